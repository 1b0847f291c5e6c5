"""What models are asked when they are compared: places in files no model has seen.

A case is fixed text with its licence; the same cases go to every model. Making them needs the late
part of the corpus and a seed; reading them needs nothing. One case a file at most of each kind, a few
files a project.
"""

from __future__ import annotations

import json
import lzma
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from keystroke.errors import InputError
from keystroke.train.documents import Source
from keystroke.train.fim import Cut, cut

KINDS = (Cut.REST_OF_LINE, Cut.LINE, Cut.BLOCK)
PREFIX, SUFFIX = 1400, 500  # characters: about what an editor sends on a CPU
_LONGEST_MIDDLE = {Cut.REST_OF_LINE: 120, Cut.LINE: 120, Cut.BLOCK: 320}
_PER_PROJECT = 4
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Case:
    kind: str
    project: str
    version: str
    licence: str
    path: str
    prefix: str
    middle: str
    suffix: str


def make_cases(
    sources: Iterable[Source], facts: Mapping[str, tuple[str, str]], per_kind: int, seed: int = 0
) -> list[Case]:
    """`per_kind` cases of each kind. `facts` gives each project's version and licence."""
    rng = random.Random(seed)
    pool = sorted(sources, key=lambda s: (s.project, s.path))
    rng.shuffle(pool)
    found: list[Case] = []
    for kind in KINDS:
        used: dict[str, int] = {}
        chosen = 0
        for source in pool:
            if chosen == per_kind:
                break
            if used.get(source.project, 0) >= _PER_PROJECT or source.project not in facts:
                continue
            case = _case(source, kind, facts[source.project], rng)
            if case is not None:
                found.append(case)
                chosen += 1
                used[source.project] = used.get(source.project, 0) + 1
        rng.shuffle(pool)
    return found


def _case(source: Source, kind: Cut, facts: tuple[str, str], rng: random.Random) -> Case | None:
    for _ in range(6):
        parts = cut(source.text, kind, rng)
        if parts is None or not len(parts.middle.strip()) >= 2 or len(parts.middle) > _LONGEST_MIDDLE[kind]:
            continue
        line = (parts.prefix[parts.prefix.rfind("\n") + 1 :] + parts.middle).lstrip()
        if line.startswith("#") or len(parts.prefix) < 300 or not parts.suffix.strip():
            continue
        if kind is Cut.BLOCK and (parts.middle.count("\n") < 1 or parts.prefix[-1] not in " \t\n"):
            continue
        prefix = parts.prefix[-PREFIX:]
        if len(parts.prefix) > PREFIX:
            prefix = prefix[prefix.find("\n") + 1 :]
        suffix = parts.suffix[:SUFFIX]
        if len(parts.suffix) > SUFFIX:
            suffix = suffix[: suffix.rfind("\n") + 1]
        return Case(kind, source.project, facts[0], facts[1], source.path, prefix, parts.middle, suffix)
    return None


def write_cases(path: Path, cases: Sequence[Case]) -> None:
    write_rows(path, cases)


def read_cases(path: Path) -> list[Case]:
    return read_rows(path, lambda row: Case(**row), "evaluation cases")


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
