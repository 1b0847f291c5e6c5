"""What a task of a set is, and what came of doing it.

Values. A task holds what its solver is shown and, apart from that, what it is scored by; nobody who
solves a task reads the second part.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import msgspec


class FunctionTask(msgspec.Struct, frozen=True, tag="function"):
    """A function to write. `prompt` is code that ends where the answer begins, or a description; `context` is
    code that stands before the answer. `examples` are checks that the prompt itself shows."""

    id: str
    prompt: str
    entry: str
    tests: str  # a program that follows the answer and raises where it is wrong
    context: str = ""
    examples: tuple[str, ...] = ()  # assertions
    seconds: float = 20.0
    needs: tuple[str, ...] = ()  # Python modules without which it cannot be scored


class FolderTask(msgspec.Struct, frozen=True, tag="folder"):
    """A folder to change. `source` holds what the solver sees; `tests` are files that are put there for
    scoring, by the place they get; `command` is the shell line that scores. `check` is one the solver may
    use. `{python}` and `{root}` in either stand for this machine's Python and for the folder."""

    id: str
    instruction: str
    source: Path
    files: tuple[str, ...]  # those the instruction is about; empty: the solver finds them
    tests: dict[str, Path]
    command: str
    check: str = ""
    tries: int = 2
    seconds: float = 180.0
    needs: tuple[str, ...] = ()  # Python modules, and `program:NAME`, without which it cannot be scored
    container: bool = False  # tests say /app and /tests where they mean the folder and theirs
    environment: dict[str, str] = {}


Task = FunctionTask | FolderTask


class Status(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"  # cannot be scored on this machine; does not count
    ERROR = "error"  # the engine or the disk failed; counts as failed, and is done again when resumed


class Done(msgspec.Struct, frozen=True):
    """One task done one way. `seconds` are those the solver took; scoring is not in them."""

    task: str
    way: str
    status: Status
    seconds: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    attempts: int = 0
    ended_early: int = 0
    cost: float = 0.0
    checked: bool = False  # whether a check of the solver's own passed
    model: str = ""
    message: str = ""
    answer: str = ""
