"""What one buffer's changes ask for next, kept true while the user types.

Following a key is cheap and never parses; an inquiry parses and may run in a thread, on values that do
not change. A proposal is rebased over every edit; taken one by one it shrinks; contradicted it is dropped
with a named reason. Changes a proposal itself made are no new intent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from keystroke.analysis.syntax import LANGUAGES
from keystroke.assist.next_edit.burst import Burst, burst_between
from keystroke.assist.next_edit.prompt import CHANGES, Change
from keystroke.assist.next_edit.question import Found, changes_of
from keystroke.assist.next_edit.rename import is_top_level, mentions, renamed
from keystroke.assist.next_edit.repeat import repeated
from keystroke.assist.next_edit.signature import calls_in, changed_calls
from keystroke.text import Dropped, Edit, rebase
from keystroke.text.rebase import Reason

LARGEST = 400_000  # characters; a larger file would hold up a core
_HISTORY = 8
_REFUSED = 32
_NEAR = 48  # characters between two edits that still belong together


class Cause(StrEnum):
    RENAME = "rename"
    SIGNATURE = "signature"
    REPEAT = "repeat"
    MODEL = "model"  # no rule knew; the model did


@dataclass(frozen=True, slots=True)
class Placed:
    """An edit in a buffer; None: the one that was changed."""

    buffer: str | None
    edit: Edit


@dataclass(frozen=True, slots=True)
class Proposal:
    id: str
    cause: Cause
    title: str
    places: tuple[Placed, ...]


@dataclass(frozen=True, slots=True)
class Other:
    """Another open buffer of the same language."""

    text: str


@dataclass(frozen=True, slots=True)
class Inquiry:
    """A burst and what came before it."""

    language: str | None
    baseline: str
    history: tuple[Burst, ...]

    def propose(self, text: str, cursor: int, others: Mapping[str, Other]) -> Proposal | None:
        """What the burst under way asks for in `text`; None where nothing."""
        if len(text) > LARGEST or len(self.baseline) > LARGEST:
            return None
        burst = burst_between(self.baseline, text)
        if burst is None:
            return None
        found = self._found(burst, others)
        if found is None:
            return None
        cause, title, own, elsewhere = found
        here = sorted(own, key=lambda e: (e.start < cursor, e.start))
        places = [Placed(None, edit) for edit in here]
        places += [Placed(name, edit) for name, edits in elsewhere.items() for edit in edits]
        return Proposal("", cause, title, tuple(places)) if places else None

    def _found(
        self, burst: Burst, others: Mapping[str, Other]
    ) -> tuple[Cause, str, list[Edit], dict[str, list[Edit]]] | None:
        language = self.language
        if language is not None:
            name = renamed(burst, language)
            visible = _defines_top_level(burst, language)
            if name is not None or visible:
                old, new, edits = name or (*_names(burst), [])
                elsewhere = {}
                if visible:
                    for buffer, other in others.items():
                        if old in other.text and (found := mentions(other.text, language, old, new)):
                            elsewhere[buffer] = found
                if edits or elsewhere:
                    return Cause.RENAME, f"Rename {old} to {new}", edits, elsewhere
            calls = changed_calls(burst, language)
            far = {b: found for b, o in others.items() if (found := calls_in(o.text, language, burst))}
            if calls is not None or far:
                title = f"Update calls of {calls[0]}" if calls else "Update calls in other files"
                return Cause.SIGNATURE, title, calls[1] if calls else [], far
        pattern = repeated([*self.history, burst])
        if pattern is None:
            return None
        old, new, edits = pattern
        return Cause.REPEAT, f"Change {old.strip():.40} to {new.strip():.40}", edits, {}


@dataclass(frozen=True, slots=True)
class Intent:
    """What the model is asked about: the last change, what was changed before it and what was refused."""

    change: Burst
    history: tuple[Change, ...]
    dismissed: frozenset[tuple[str, str]]


class NextEdits:
    """`trail`: the changes made lately in all buffers, oldest first, shared by their trackers."""

    def __init__(
        self, text: str, language: str | None, path: str = "", trail: deque[Change] | None = None
    ) -> None:
        self._language = language if language in LANGUAGES else None
        self._path = path
        self._trail: deque[Change] = trail if trail is not None else deque(maxlen=CHANGES)
        self._refused: deque[tuple[str, str]] = deque(maxlen=_REFUSED)
        self._taken_last: Burst | None = None  # the model's own edit, just taken
        self._baseline = text  # the text before the burst under way
        self._span: tuple[int, int] | None = None  # of the burst, in the text as it is now
        self._history: deque[Burst] = deque(maxlen=_HISTORY)
        self._count = 0
        self._key: tuple[str, ...] = ()
        self.proposal: Proposal | None = None

    def follow(self, before: str, edits: Sequence[Edit]) -> Dropped | None:
        """Edits were made one after another to `before`. Says why the proposal is gone, if it is now."""
        text = before
        for edit in edits:
            after = text[: edit.start] + edit.text + text[edit.end :]
            by_model = self.proposal is not None and self.proposal.cause is Cause.MODEL
            if self._taken(edit):
                self._let_go(text)
                self._taken_last = burst_between(text, after) if by_model else None
                self._baseline, self._span, text = after, None, after
                continue
            self._grow(text, edit)
            text = after
            dropped = self._rebase(edit)
            if dropped is not None:
                return dropped
        return None

    def inquiry(self) -> Inquiry:
        """The question as it stands now; `adopt` takes its answer."""
        return Inquiry(self._language, self._baseline, tuple(self._history))

    def being_taken(self, text: str) -> bool:
        """Whether places of a proposal are left and nothing else changed: then nothing is asked."""
        return self.proposal is not None and self._baseline == text

    def intent(self, text: str) -> Intent | None:
        """What to ask the model about; None where nothing was changed. An edit of its own that was just taken
        is a change like any other: there may be a next one."""
        change = burst_between(self._baseline, text) or self._taken_last
        if change is None or max(len(text), len(change.before)) > LARGEST or change.after != text:
            return None
        return Intent(change, tuple(self._trail), frozenset(self._refused))

    def propose(self, text: str, cursor: int, others: Mapping[str, Other]) -> Proposal | None:
        return self.inquiry().propose(text, cursor, others)

    def adopt(self, proposal: Proposal | None) -> Proposal | None:
        """Take what `propose` found; the same intent keeps its id."""
        if proposal is None:
            self.proposal = None
            return None
        key = (proposal.cause, proposal.title.partition(" to ")[0])
        if key != self._key or self.proposal is None:
            self._count += 1
            self._key = key
        self.proposal = replace(proposal, id=f"e{self._count}")
        return self.proposal

    def dismiss(self, text: str) -> None:
        """Not wanted: the burst that led to it is let go, and the model's own words are not offered again."""
        if self.proposal is not None and self.proposal.cause is Cause.MODEL:
            for place in self.proposal.places:
                old = text[place.edit.start : place.edit.end]
                self._refused.append((old.strip(), place.edit.text.strip()))
        self._let_go(text)
        self.proposal, self._baseline, self._span, self._taken_last = None, text, None, None

    # Bursts

    def _grow(self, text: str, edit: Edit) -> None:
        """Let the edit join the burst under way, or end that and begin another."""
        span = self._span
        if span is not None and edit.start <= span[1] + _NEAR and edit.end >= span[0] - _NEAR:
            line_break = "\n" in text[min(edit.start, span[0]) : max(edit.end, span[1])]
            if not line_break or (edit.start <= span[1] and edit.end >= span[0]):
                end = max(span[1] + edit.delta, edit.start + len(edit.text))
                self._span = (min(span[0], edit.start), max(end, edit.start))
                return
        ended = self._let_go(text)
        if ended is not None:
            self._history.append(ended)
        self._baseline = text
        self._span = (edit.start, edit.start + len(edit.text))

    def _let_go(self, text: str) -> Burst | None:
        """End the burst under way. It and an edit of the model's that was taken are part of the trail now."""
        ended = burst_between(self._baseline, text) if self._span is not None else None
        for done in (self._taken_last, ended):
            if done is not None:
                self._trail.extend(changes_of(done, self._path))
        self._taken_last = None
        return ended

    def _taken(self, edit: Edit) -> bool:
        """Whether the edit is one the proposal asked for; then it is done and the rest moves along."""
        proposal = self.proposal
        if proposal is None:
            return False
        for index, place in enumerate(proposal.places):
            if place.buffer is None and place.edit == edit:
                rest = [p for i, p in enumerate(proposal.places) if i != index]
                moved = tuple(p for p in (_moved(p, edit) for p in rest) if isinstance(p, Placed))
                self.proposal = replace(proposal, places=moved) if moved else None
                return True
        return False

    def _rebase(self, edit: Edit) -> Dropped | None:
        proposal = self.proposal
        if proposal is None:
            return None
        moved = [_moved(place, edit) for place in proposal.places]
        kept = tuple(p for p in moved if isinstance(p, Placed))
        if not kept:
            self.proposal = None
            first = moved[0]
            return first if isinstance(first, Dropped) else Dropped(Reason.OVERLAPPED)
        self.proposal = replace(proposal, places=kept)
        return None


def foreseen(text: str, found: Found) -> Proposal:
    """The model's edits as a proposal."""
    first = found.edits[0]
    line = text.count("\n", 0, first.start) + 1
    said = next((row.strip() for row in first.text.split("\n") if row.strip()), "")
    title = f"Change line {line} to {said:.40}" if said else f"Take out at line {line}"
    return Proposal("", Cause.MODEL, title, tuple(Placed(None, edit) for edit in found.edits))


def _defines_top_level(burst: Burst, language: str) -> bool:
    old, new = _names(burst)
    return old.isidentifier() and new.isidentifier() and old != new and is_top_level(burst, language)


def _names(burst: Burst) -> tuple[str, str]:
    change = burst.words()
    return change.old, change.new


def _moved(place: Placed, typed: Edit) -> Placed | Dropped:
    if place.buffer is not None:
        return place
    result = rebase(place.edit, (typed,))
    return result if isinstance(result, Dropped) else Placed(None, result)
