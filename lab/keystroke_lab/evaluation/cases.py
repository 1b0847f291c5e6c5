"""Makes completion cases from files no model has seen.

Cases come from the late part of the corpus and a seed: at most one of each kind a file, a few files a
project.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping

from keystroke.text.cases import CompletionCase
from keystroke_lab.pretraining.documents import SourceText
from keystroke_lab.pretraining.fim import FimCut, cut

KINDS = (FimCut.REST_OF_LINE, FimCut.LINE, FimCut.BLOCK)
PREFIX, SUFFIX = 1400, 500  # characters: about what an editor sends on a CPU
_LONGEST_MIDDLE = {FimCut.REST_OF_LINE: 120, FimCut.LINE: 120, FimCut.BLOCK: 320}
_PER_PROJECT = 4


def make_cases(
    sources: Iterable[SourceText], facts: Mapping[str, tuple[str, str]], per_kind: int, seed: int = 0
) -> list[CompletionCase]:
    """`per_kind` cases of each kind. `facts` gives each project's version and licence."""
    rng = random.Random(seed)
    pool = sorted(sources, key=lambda s: (s.project, s.path))
    rng.shuffle(pool)
    found: list[CompletionCase] = []
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


def _case(
    source: SourceText, kind: FimCut, facts: tuple[str, str], rng: random.Random
) -> CompletionCase | None:
    for _ in range(6):
        parts = cut(source.text, kind, rng)
        if parts is None or not len(parts.middle.strip()) >= 2 or len(parts.middle) > _LONGEST_MIDDLE[kind]:
            continue
        line = (parts.prefix[parts.prefix.rfind("\n") + 1 :] + parts.middle).lstrip()
        if line.startswith("#") or len(parts.prefix) < 300 or not parts.suffix.strip():
            continue
        if kind is FimCut.BLOCK and (parts.middle.count("\n") < 1 or parts.prefix[-1] not in " \t\n"):
            continue
        prefix = parts.prefix[-PREFIX:]
        if len(parts.prefix) > PREFIX:
            prefix = prefix[prefix.find("\n") + 1 :]
        suffix = parts.suffix[:SUFFIX]
        if len(parts.suffix) > SUFFIX:
            suffix = suffix[: suffix.rfind("\n") + 1]
        return CompletionCase(
            kind, source.project, facts[0], facts[1], source.path, prefix, parts.middle, suffix
        )
    return None
