"""Next-edit sequences from what people changed between two releases.

The prompt is that of `assist.next_edit.prompt`. Some hunks of a release count as made, in an order a person
could have made them; the question is about a place where one is left (the answer rewrites it) or where none
is (the answer leaves it). The same function frames both kinds of place, so the frame reveals nothing.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from keystroke.assist.next_edit.prompt import (
    CHANGES,
    EditFormat,
    EditMarks,
    EditPrompt,
    LineRange,
    RecentChange,
    change_between,
)
from keystroke_lab.corpus.hunks import EditHunk
from keystroke_lab.corpus.trajectories import FileEdit
from keystroke_lab.tokenizer import special

MARKS = EditMarks(
    edit=special.EDIT,
    before=special.EDIT_BEFORE,
    after=special.EDIT_AFTER,
    file=special.FILE_SEP,
    below=special.FIM_SUFFIX,
    cursor=special.CURSOR,
    keep=special.KEEP,
    end=special.END,
    numbers=special.NUMBERS,
)
POSITIVE = 0.5  # share of questions at a place that changes
IN_ORDER = 0.6  # share of histories that go down the file
RELATED = 0.85  # share of places that share a changed name with the history, where there are such
CURSOR = 0.7  # share of questions that say where the cursor is
_MOST = 24  # questions about one release step
_WORD = re.compile(r"[A-Za-z_]\w{2,}")


class RegionFramer(Protocol):
    """A format that says which lines are shown where one may have to change."""

    def region(self, lines: Sequence[str], line: int) -> LineRange: ...


@dataclass(frozen=True, slots=True)
class EditSituation:
    """A place asked about and what is right there: its new lines, or None to leave it."""

    path: str
    history: tuple[RecentChange, ...]
    lines: tuple[str, ...]
    region: LineRange
    cursor: int | None
    answer: tuple[str, ...] | None

    def prompt(self, form: EditFormat) -> EditPrompt:
        return form.build(self.history, self.path, self.lines, self.region, self.cursor)


def edit_format(tokenizer: Any) -> EditFormat:
    """The format over a tokenizer that knows no special tokens."""
    return EditFormat(
        lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
        lambda tokens: str(tokenizer.decode(list(tokens))),
        MARKS,
    )


def edit_sequences(
    taken: Iterable[Sequence[FileEdit]], tokenizer: Any, rng: random.Random
) -> Iterator[list[int]]:
    """Whole training sequences of release steps."""
    form = edit_format(tokenizer)
    for step in taken:
        hunks = sum(len(edit.hunks) for edit in step)
        for _ in range(min(_MOST, 1 + hunks)):
            question = make_situation(step, form, rng)
            if question is not None:
                prompt = question.prompt(form)
                yield [*prompt.tokens, *form.encode_answer(prompt.lines, question.answer)]


def steps(edits: Iterable[FileEdit]) -> list[list[FileEdit]]:
    """The files that one release of a project changed, together."""
    found: dict[tuple[str, str, str], list[FileEdit]] = {}
    for edit in edits:
        found.setdefault((edit.project, edit.release_from, edit.release_to), []).append(edit)
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Situation:
    """Some hunks of a release step have been made. `target`: the file asked about and the hunk to be made
    next in it, None if the question is about a place where there is none."""

    step: Sequence[FileEdit]
    made: Sequence[tuple[int, int]]
    target: tuple[int, int | None]
    state: State
    cursor: int | None  # the line of the last change, if that was in this file

    @property
    def path(self) -> str:
        return self.step[self.target[0]].path

    @property
    def last(self) -> EditHunk:
        file, hunk = self.made[-1]
        return self.step[file].hunks[hunk]

    def history(self) -> tuple[RecentChange, ...]:
        return tuple(_change(self.step[file], hunk) for file, hunk in self.made[-CHANGES:])

    def region(self, form: RegionFramer, line: int) -> LineRange:
        return form.region(self.state.lines, min(max(0, line), len(self.state.lines) - 1))


def situation(step: Sequence[FileEdit], rng: random.Random, *, positive: bool) -> Situation | None:
    """A moment on the way through a release step; None where nothing would be left to ask for."""
    order = _order(step, rng)
    if positive and len(order) < 2:
        return None
    count = rng.randint(1, len(order) - (1 if positive else 0))
    made = order[:count]
    last_file, last_hunk = made[-1]
    target: tuple[int, int | None]
    if positive:
        target = _next(step, order, count, rng)
    else:
        target = (last_file if rng.random() < 0.8 else rng.choice(order)[0], None)
    edit = step[target[0]]
    state = State.after_hunks(edit, [hunk for file, hunk in made if file == target[0]])
    cursor = None
    if last_file == target[0]:
        cursor = state.at[last_hunk] + max(0, len(edit.hunks[last_hunk].new) - 1)
    return Situation(step, made, target, state, cursor)


def make_situation(step: Sequence[FileEdit], form: EditFormat, rng: random.Random) -> EditSituation | None:
    """One question about a release step; None where the place drawn makes no clear one."""
    found = situation(step, rng, positive=rng.random() < POSITIVE) or situation(step, rng, positive=False)
    assert found is not None
    hunk = found.target[1]
    line = quiet_line(found, rng) if hunk is None else found.state.at[hunk] + rng.randint(-2, 2)
    region = found.region(form, line)
    rewritten = found.state.rewritten(region)
    if rewritten is None or (rewritten.count > 0) == (hunk is None):
        return None
    return EditSituation(
        found.path,
        found.history(),
        tuple(found.state.lines),
        region,
        found.cursor if rng.random() < CURSOR else None,
        None if hunk is None else tuple(rewritten.lines),
    )


def _order(step: Sequence[FileEdit], rng: random.Random) -> list[tuple[int, int]]:
    """Every hunk of the step, in an order in which someone could have made them: file after file."""
    files = list(range(len(step)))
    rng.shuffle(files)
    order = []
    for file in files:
        hunks = list(range(len(step[file].hunks)))
        if rng.random() >= IN_ORDER:
            rng.shuffle(hunks)
        order += [(file, hunk) for hunk in hunks]
    return order


def _next(
    step: Sequence[FileEdit], order: Sequence[tuple[int, int]], made: int, rng: random.Random
) -> tuple[int, int]:
    """The hunk asked about: preferably one related to those made, since only that can be predicted."""
    left = order[made:]
    words = set().union(*(_words(step[f].hunks[h]) for f, h in order[max(0, made - CHANGES) : made]))
    related = [(f, h) for f, h in left if words & _words(step[f].hunks[h])]
    if related and rng.random() < RELATED:
        return rng.choice(related)
    near = [place for place in left if place[0] == order[made - 1][0]]
    return rng.choice(near) if near and rng.random() < 0.5 else left[0]


def _words(hunk: EditHunk) -> set[str]:
    """The names that come or go."""
    return set(_WORD.findall("\n".join(hunk.old))) ^ set(_WORD.findall("\n".join(hunk.new)))


def _change(edit: FileEdit, index: int) -> RecentChange:
    hunk = edit.hunks[index]
    old = edit.before.split("\n")
    new = [*old[: hunk.start_line], *hunk.new]
    was, became = hunk.start_line + len(hunk.old), hunk.start_line + len(hunk.new)
    return change_between(old, (hunk.start_line, was), new, (hunk.start_line, became), edit.path)


@dataclass(frozen=True, slots=True)
class _Rewritten:
    lines: list[str]
    count: int  # of hunks


@dataclass(frozen=True, slots=True)
class State:
    """A file of which some hunks have been made."""

    edit: FileEdit
    done: frozenset[int]
    lines: list[str]
    at: list[int]  # where each hunk begins

    @classmethod
    def after_hunks(cls, edit: FileEdit, done: Iterable[int]) -> State:
        made = frozenset(done)
        lines: list[str] = []
        at: list[int] = []
        old, end = edit.before.split("\n"), 0
        for i, hunk in enumerate(edit.hunks):
            lines += old[end : hunk.start_line]
            at.append(len(lines))
            lines += hunk.new if i in made else hunk.old
            end = hunk.start_line + len(hunk.old)
        return cls(edit, made, lines + old[end:], at)

    def rewritten(self, region: LineRange) -> _Rewritten | None:
        """The region with every hunk that is left in it made; None where one reaches across its edge."""
        lines: list[str] = []
        count, end = 0, region.first
        for i, hunk in enumerate(self.edit.hunks):
            first, last = self.at[i], self.at[i] + len(hunk.old)
            if i in self.done or last < region.first or first > region.last:
                continue
            inside = region.first <= first and last <= region.last
            on_edge = not hunk.old and (first == region.last or first == region.first > 0)
            if not inside or on_edge:
                if last == region.first or first == region.last:
                    continue  # it only touches the region
                return None
            lines += [*self.lines[end:first], *hunk.new]
            count, end = count + 1, last
        return _Rewritten([*lines, *self.lines[end : region.last]], count)


@functools.lru_cache(1 << 16)
def _line_words(line: str) -> frozenset[str]:
    return frozenset(_WORD.findall(line))


def quiet_line(found: Situation, rng: random.Random) -> int:
    """A line to ask about where nothing may be left to do: near the last change, near a mention of what
    changed, or anywhere."""
    lines, drawn = found.state.lines, rng.random()
    if found.cursor is not None and drawn < 0.4:
        return found.cursor + rng.randint(-4, 8)
    if drawn < 0.75:
        words = set(_WORD.findall("\n".join(found.last.old)))
        near = [i for i, line in enumerate(lines) if not words.isdisjoint(_line_words(line))]
        if near:
            return rng.choice(near) + rng.randint(-2, 2)
    return rng.randrange(len(lines))
