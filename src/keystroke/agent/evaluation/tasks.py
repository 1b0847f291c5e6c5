"""Tasks of an evaluation set and their results. Solvers never read the fields that score."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import msgspec


class FunctionTask(msgspec.Struct, frozen=True, tag="function"):
    """A function to write. `prompt` is code that ends where the answer begins, or a description; `context`
    is code that precedes the answer; `examples` are assertions in the prompt."""

    id: str
    prompt: str
    entry: str
    tests: str  # a program appended to the answer; it raises where the answer is wrong
    context: str = ""
    examples: tuple[str, ...] = ()
    seconds: float = 20.0
    needs: tuple[str, ...] = ()  # Python modules without which it cannot be scored


class FolderTask(msgspec.Struct, frozen=True, tag="folder"):
    """A folder to change. `source` is what the solver sees; `tests` are the scoring files by target path;
    `command` is the shell command that scores; `check` is one the solver may use. `{python}` and `{root}`
    in either stand for this machine's Python and the folder."""

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
    container: bool = False  # tests refer to the folders as /app and /tests
    environment: dict[str, str] = {}


Task = FunctionTask | FolderTask


class ResultStatus(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"  # cannot be scored on this machine; does not count
    ERROR = "error"  # the engine or the disk failed; counts as failed, and is done again when resumed


class TaskResult(msgspec.Struct, frozen=True):
    """The result of a task in one configuration. `seconds` is the solver's time, without scoring."""

    task: str
    label: str = msgspec.field(name="way")  # of the configuration; the name in files of earlier releases
    status: ResultStatus
    seconds: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    attempts: int = 0
    ended_early: int = 0
    cost: float = 0.0
    checked: bool = False  # whether the solver's own check passed
    model: str = ""
    message: str = ""
    answer: str = ""
