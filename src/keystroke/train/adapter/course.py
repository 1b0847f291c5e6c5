"""A course: lessons of all kinds in fixed shares of tokens, from collected edits and the base's own answers.

Law: project by project in an order of chance, so that any first part is a fair sample; what a project gives
is bounded. Projects and files that evaluation cases show are left out. The same edits and seed give the same
course.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from keystroke.train.adapter.lessons import (
    FILL,
    NEXT,
    OWN,
    QUIET,
    REWRITE,
    Forms,
    filling,
    made_up,
    next_edits,
    rewriting,
)
from keystroke.train.corpus.trajectories import FileEdit
from keystroke.train.draft_head.texts import Text
from keystroke.train.edits import steps

MADE_UP = 0.15  # share of next-edit lessons that are carried through a file by rule
_OF_A_PROJECT = 16_000  # tokens of next edits


@dataclass(frozen=True, slots=True)
class Shares:
    """Of the course's tokens, beside next edits and silence, which are the rest."""

    of: dict[str, float] = field(default_factory=lambda: {REWRITE: 0.07, FILL: 0.12, OWN: 0.09})


def course(
    projects: Iterable[Sequence[FileEdit]],
    own: Iterator[Text],
    forms: Forms,
    tokens: int,
    *,
    shares: Shares | None = None,
    seed: int = 0,
    report: Callable[[int, int], None] = lambda done, of: None,
) -> Iterator[Text]:
    """Lessons until `tokens` are made or the projects are used up."""
    rng = random.Random(seed)
    wanted = (shares or Shares()).of
    made: Counter[str] = Counter()
    for edits in projects:
        for text in _of_project(edits, forms, rng):
            made[text.kind] += len(text.tokens)
            yield text
        for kind, share in wanted.items():
            room = share / (1 - sum(wanted.values())) * (made[NEXT] + made[QUIET])
            for _ in range(400):
                if made[kind] >= room:
                    break
                other = _other(kind, edits, own, forms, rng)
                if other is not None:
                    made[kind] += len(other.tokens)
                    yield other
        report(sum(made.values()), tokens)
        if sum(made.values()) >= tokens:
            return


def _of_project(edits: Sequence[FileEdit], forms: Forms, rng: random.Random) -> Iterator[Text]:
    room = _OF_A_PROJECT
    for step in steps(edits):
        lessons = list(next_edits(step, forms, rng))
        if rng.random() < 3 * MADE_UP:
            lessons += made_up(rng.choice(step), forms, rng)
        for text in lessons:
            if room > 0:
                room -= len(text.tokens)
                yield text


def _other(
    kind: str, edits: Sequence[FileEdit], own: Iterator[Text], forms: Forms, rng: random.Random
) -> Text | None:
    if kind == OWN:
        return next(own, None)
    if not edits:
        return None
    edit = rng.choice(edits)
    return rewriting(edit, forms, rng) if kind == REWRITE else filling(edit.after(), forms, rng)
