"""Examples of all kinds in fixed shares of tokens, from collected edits and the base's own answers.

Each project has a random generator of its own, so projects can be processed in parallel and any prefix is a
fair sample; what one project contributes is bounded. The same edits and seed give the same examples.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from keystroke_lab.adapters.examples import (
    FILL,
    KEEP,
    REWRITE,
    PromptForms,
    fill_example,
    keep_example,
    next_edit_examples,
    rewrite_example,
    synthetic_examples,
)
from keystroke_lab.corpus.trajectories import FileEdit
from keystroke_lab.draft_heads.texts import TokenText
from keystroke_lab.pretraining.edit_sequences import steps

# Of a course's tokens, beside next edits and silence, which are the rest.
SHARES = {REWRITE: 0.06, FILL: 0.10, KEEP: 0.10}
OWN_SHARE = 0.04  # of the base's own answers, where there are any
_MADE_UP = 0.6  # of release steps that are followed by a change carried through one of their files by rule
_OF_A_PROJECT = 16_000  # tokens of next edits
_TRIES = 400


def project_examples(edits: Sequence[FileEdit], forms: PromptForms, seed: str) -> list[TokenText]:
    """All examples of one project."""
    rng = random.Random(seed)
    found = list(_of_project(edits, forms, rng))
    room = sum(len(text.tokens) for text in found) / (1 - sum(SHARES.values()))
    for kind, share in SHARES.items():
        made = 0
        for _ in range(_TRIES):
            other = _other(kind, rng.choice(edits), forms, rng)
            if other is None:
                continue
            if made + rng.random() * len(other.tokens) > share * room:
                break  # the last one by chance: so small projects have no more than their share either
            made += len(other.tokens)
            found.append(other)
    return found


def sample_examples(
    projects: Iterable[Sequence[TokenText]],
    own: Iterator[TokenText],
    tokens: int,
    *,
    report: Callable[[int, int], None] = lambda done, of: None,
) -> Iterator[TokenText]:
    """The projects' examples, mixed with the base's own answers, until `tokens` are made or there are no
    more."""
    made: Counter[bool] = Counter()
    for texts in projects:
        for text in texts:
            made[False] += len(text.tokens)
            yield text
        while made[True] < OWN_SHARE / (1 - OWN_SHARE) * made[False]:
            said = next(own, None)
            if said is None:
                break
            made[True] += len(said.tokens)
            yield said
        report(made.total(), tokens)
        if made.total() >= tokens:
            return


def _of_project(edits: Sequence[FileEdit], forms: PromptForms, rng: random.Random) -> Iterator[TokenText]:
    room = _OF_A_PROJECT
    every = steps(edits)
    rng.shuffle(every)  # where a project has more than there is room for, no release is preferred
    for step in every:
        examples = list(next_edit_examples(step, forms, rng))
        if rng.random() < _MADE_UP:
            examples += synthetic_examples(rng.choice(step), forms, rng)
        for text in examples:
            if room > 0:
                room -= len(text.tokens)
                yield text


def _other(kind: str, edit: FileEdit, forms: PromptForms, rng: random.Random) -> TokenText | None:
    if kind == REWRITE:
        return rewrite_example(edit, forms, rng)
    return fill_example(edit.after(), forms, rng) if kind == FILL else keep_example(edit.after(), forms, rng)
