"""Fill-in cases: places in files with the text that is missing there, stored as compressed JSON lines.

`keystroke learn export` writes them; training, evaluation and the benchmarks read them.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from keystroke.errors import InputError

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class CompletionCase:
    kind: str
    project: str
    version: str
    licence: str
    path: str
    prefix: str
    middle: str
    suffix: str


def write_cases(path: Path, cases: Sequence[CompletionCase]) -> None:
    write_rows(path, cases)


def read_cases(path: Path) -> list[CompletionCase]:
    return read_rows(path, lambda row: CompletionCase(**row), "evaluation cases")


def write_rows(path: Path, rows: Sequence[Any]) -> None:
    """Dataclasses as packed lines of JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(path, "wt", encoding="utf-8", preset=9) as stream:
        for row in rows:
            stream.write(json.dumps(asdict(row), ensure_ascii=False) + "\n")


def read_rows(path: Path, made: Callable[[dict[str, Any]], Made], what: str) -> list[Made]:
    """What `write_rows` wrote, each line `made` again. InputError where the file holds something else."""
    try:
        with lzma.open(path, "rt", encoding="utf-8") as stream:
            return [made(json.loads(line)) for line in stream]
    except (OSError, EOFError, lzma.LZMAError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"{path} does not hold {what} ({error}); make them again") from error
