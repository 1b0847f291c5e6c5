"""Tracks the changes of one buffer and its current next-edit proposal.

Applying a key is cheap and never parses; a rule search parses and may run in a thread. A proposal is rebased
over every edit. Accepting one of its edits shrinks it, contradicting it drops it with a named reason.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from keystroke.analysis.syntax import LANGUAGES
from keystroke.assist.next_edit.burst import Burst, burst_between
from keystroke.assist.next_edit.prompt import CHANGES, RecentChange
from keystroke.assist.next_edit.question import PredictedEdits, changes_in_burst
from keystroke.assist.next_edit.rename import find_rename, find_uses, is_top_level
from keystroke.assist.next_edit.repeat import find_repetition
from keystroke.assist.next_edit.signature import find_changed_calls
from keystroke.text import Dropped, Edit, rebase
from keystroke.text.rebase import DropReason

LARGEST = 400_000  # characters; larger files are not searched
_HISTORY = 8
_MOST_DISMISSED = 32
_NEAR = 48  # characters between two edits that still belong together


class Cause(StrEnum):
    RENAME = "rename"
    SIGNATURE = "signature"
    REPEAT = "repeat"
    MODEL = "model"  # predicted by the model, where no rule applied


@dataclass(frozen=True, slots=True)
class ProposedEdit:
    """An edit in a buffer; `buffer` None: the one that was changed."""

    buffer: str | None
    edit: Edit


@dataclass(frozen=True, slots=True)
class NextEditProposal:
    id: str
    cause: Cause
    title: str
    edits: tuple[ProposedEdit, ...]


@dataclass(frozen=True, slots=True)
class RuleSearch:
    """A snapshot of the current burst and the bursts before it, to be searched with rules."""

    language: str | None
    baseline: str
    history: tuple[Burst, ...]

    def propose(self, text: str, cursor: int, others: Mapping[str, str]) -> NextEditProposal | None:
        """The edits that the current burst requires in `text`, or None."""
        if len(text) > LARGEST or len(self.baseline) > LARGEST:
            return None
        burst = burst_between(self.baseline, text)
        if burst is None:
            return None
        found = self._find_edits(burst, others)
        if found is None:
            return None
        cause, title, own, elsewhere = found
        here = sorted(own, key=lambda e: (e.start < cursor, e.start))
        places = [ProposedEdit(None, edit) for edit in here]
        places += [ProposedEdit(name, edit) for name, edits in elsewhere.items() for edit in edits]
        return NextEditProposal("", cause, title, tuple(places)) if places else None

    def _find_edits(
        self, burst: Burst, others: Mapping[str, str]
    ) -> tuple[Cause, str, list[Edit], dict[str, list[Edit]]] | None:
        language = self.language
        if language is not None:
            name = find_rename(burst, language)
            word = burst.words()
            renamed = word.old.isidentifier() and word.new.isidentifier() and word.old != word.new
            visible = renamed and is_top_level(burst, language)
            if name is not None or visible:
                old, new, edits = name or (word.old, word.new, [])
                elsewhere = {}
                if visible:
                    for buffer, other in others.items():
                        if old in other and (found := find_uses(other, language, old, new)):
                            elsewhere[buffer] = found
                if edits or elsewhere:
                    return Cause.RENAME, f"Rename {old} to {new}", edits, elsewhere
            calls = find_changed_calls(burst, language)
            far = {b: hit[1] for b, o in others.items() if (hit := find_changed_calls(burst, language, o))}
            if calls is not None or far:
                title = f"Update calls of {calls[0]}" if calls else "Update calls in other files"
                return Cause.SIGNATURE, title, calls[1] if calls else [], far
        pattern = find_repetition([*self.history, burst])
        if pattern is None:
            return None
        old, new, edits = pattern
        return Cause.REPEAT, f"Change {old.strip():.40} to {new.strip():.40}", edits, {}


@dataclass(frozen=True, slots=True)
class Intent:
    """The input of a question to the model: the last change, the changes before it and dismissed edits."""

    change: Burst
    history: tuple[RecentChange, ...]
    dismissed: frozenset[tuple[str, str]]


class NextEditTracker:
    """`trail`: recent changes in all buffers, oldest first, shared by their trackers."""

    def __init__(
        self, text: str, language: str | None, path: str = "", trail: deque[RecentChange] | None = None
    ) -> None:
        self._language = language if language in LANGUAGES else None
        self._path = path
        self._trail: deque[RecentChange] = trail if trail is not None else deque(maxlen=CHANGES)
        self._dismissed: deque[tuple[str, str]] = deque(maxlen=_MOST_DISMISSED)
        self._accepted_last: Burst | None = None  # the model's edit that was just accepted
        self._baseline = text  # the text before the current burst
        self._span: tuple[int, int] | None = None  # of the burst, in the text as it is now
        self._history: deque[Burst] = deque(maxlen=_HISTORY)
        self._count = 0
        self._key: tuple[str, ...] = ()
        self.proposal: NextEditProposal | None = None

    def apply_edits(self, before: str, edits: Sequence[Edit]) -> Dropped | None:
        """Apply edits made one after another to `before`. Returns why the proposal was dropped, if it was."""
        text = before
        for edit in edits:
            after = text[: edit.start] + edit.text + text[edit.end :]
            by_model = self.proposal is not None and self.proposal.cause is Cause.MODEL
            if self._accept(edit):
                self._end_burst(text)
                self._accepted_last = burst_between(text, after) if by_model else None
                self._baseline, self._span, text = after, None, after
                continue
            self._extend_burst(text, edit)
            text = after
            dropped = self._rebase(edit)
            if dropped is not None:
                return dropped
        return None

    def rule_search(self) -> RuleSearch:
        """A snapshot to search in; pass its result to `adopt`."""
        return RuleSearch(self._language, self._baseline, tuple(self._history))

    def is_being_accepted(self, text: str) -> bool:
        """Whether edits of a proposal are left and nothing else changed."""
        return self.proposal is not None and self._baseline == text

    def intent(self, text: str) -> Intent | None:
        """The input of a question; None where nothing was changed. An accepted edit of the model counts as
        a change."""
        change = burst_between(self._baseline, text) or self._accepted_last
        if change is None or max(len(text), len(change.before)) > LARGEST or change.after != text:
            return None
        return Intent(change, tuple(self._trail), frozenset(self._dismissed))

    def adopt(self, proposal: NextEditProposal | None) -> NextEditProposal | None:
        """Make this the current proposal. It keeps the id of the last one if it has the same purpose."""
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
        """Drop the proposal and end its burst; edits of the model are not proposed again."""
        if self.proposal is not None and self.proposal.cause is Cause.MODEL:
            for place in self.proposal.edits:
                old = text[place.edit.start : place.edit.end]
                self._dismissed.append((old.strip(), place.edit.text.strip()))
        self._end_burst(text)
        self.proposal, self._baseline, self._span, self._accepted_last = None, text, None, None

    # Bursts

    def _extend_burst(self, text: str, edit: Edit) -> None:
        """Add the edit to the current burst, or end that and begin another."""
        span = self._span
        if span is not None and edit.start <= span[1] + _NEAR and edit.end >= span[0] - _NEAR:
            line_break = "\n" in text[min(edit.start, span[0]) : max(edit.end, span[1])]
            if not line_break or (edit.start <= span[1] and edit.end >= span[0]):
                end = max(span[1] + edit.delta, edit.start + len(edit.text))
                self._span = (min(span[0], edit.start), max(end, edit.start))
                return
        ended = self._end_burst(text)
        if ended is not None:
            self._history.append(ended)
        self._baseline = text
        self._span = (edit.start, edit.start + len(edit.text))

    def _end_burst(self, text: str) -> Burst | None:
        """End the current burst and add it, and an accepted edit of the model, to the trail."""
        ended = burst_between(self._baseline, text) if self._span is not None else None
        for done in (self._accepted_last, ended):
            if done is not None:
                self._trail.extend(changes_in_burst(done, self._path))
        self._accepted_last = None
        return ended

    def _accept(self, edit: Edit) -> bool:
        """Whether the edit is one of the proposal's; then it is removed from it and the rest is rebased."""
        proposal = self.proposal
        if proposal is None:
            return False
        for index, place in enumerate(proposal.edits):
            if place.buffer is None and place.edit == edit:
                rest = [p for i, p in enumerate(proposal.edits) if i != index]
                moved = tuple(p for p in (_shift(p, edit) for p in rest) if isinstance(p, ProposedEdit))
                self.proposal = replace(proposal, edits=moved) if moved else None
                return True
        return False

    def _rebase(self, edit: Edit) -> Dropped | None:
        proposal = self.proposal
        if proposal is None:
            return None
        moved = [_shift(place, edit) for place in proposal.edits]
        kept = tuple(p for p in moved if isinstance(p, ProposedEdit))
        if not kept:
            self.proposal = None
            first = moved[0]
            return first if isinstance(first, Dropped) else Dropped(DropReason.OVERLAPPED)
        self.proposal = replace(proposal, edits=kept)
        return None


def proposal_from_model(text: str, found: PredictedEdits) -> NextEditProposal:
    """A proposal from the model's edits."""
    first = found.edits[0]
    line = text.count("\n", 0, first.start) + 1
    first_line = next((row.strip() for row in first.text.split("\n") if row.strip()), "")
    title = f"Change line {line} to {first_line:.40}" if first_line else f"Take out at line {line}"
    return NextEditProposal("", Cause.MODEL, title, tuple(ProposedEdit(None, edit) for edit in found.edits))


def _shift(place: ProposedEdit, typed: Edit) -> ProposedEdit | Dropped:
    if place.buffer is not None:
        return place
    result = rebase(place.edit, (typed,))
    return result if isinstance(result, Dropped) else ProposedEdit(None, result)
