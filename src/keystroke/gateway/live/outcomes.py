"""Records what becomes of the suggestions of one buffer: accepted, typed, dismissed, and the final text.

Editors report what was accepted; the rest is inferred from what is typed. Withheld suggestions are watched
too: one that is then typed would have been right. Each outcome is saved once, when it has settled.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher

from keystroke.assist.completion import (
    Extent,
    LiveCompletion,
    ShownCompletion,
    WithheldCompletion,
    WithheldReason,
)
from keystroke.gateway.live.mirror import BufferMirror
from keystroke.gateway.record.outcome_store import Fate, OutcomeStore, SuggestionOutcome
from keystroke.protocol import live_messages as live
from keystroke.text import Edit

SETTLED = 30.0  # seconds after which an outcome is final
WATCHED = 32  # suggestions at a time
AGAIN = 20  # outcomes after which the threshold is tuned again
PREFIX, SUFFIX, LONGEST = 1400, 500, 4000  # characters kept
# Withheld for these reasons, a suggestion that is then typed could have been shown.
_HELD_BACK = (WithheldReason.LOW_CONFIDENCE, WithheldReason.TYPING_FAST)
_CLOSERS = ")]}>\"'`"


@dataclass(slots=True)
class WatchedSuggestion:
    """A suggestion at [start, end); `end` grows with what is written there."""

    at: float
    suggestion: str
    start: int
    end: int
    confidence: float
    extent: str
    model: str
    was_shown: bool
    counts_for_tuning: bool
    before: str = ""  # code around it
    after: str = ""
    fate: Fate | None = None
    accepted_length: int = 0

    def apply_edit(self, edit: Edit) -> bool:
        """Move with an edit; False where the text at its place is gone."""
        if edit.end < self.start or (edit.end == self.start and edit.start < edit.end):
            self.start, self.end = self.start + edit.delta, self.end + edit.delta
        elif edit.start > self.end:
            return True
        elif edit.start < self.start:
            return False
        else:
            self.end = max(self.end, edit.end) + edit.delta
        return True


class BufferOutcomes:
    """Saves each outcome in `store`."""

    def __init__(
        self, store: OutcomeStore, completion: LiveCompletion, mirror: BufferMirror, *, model: str
    ) -> None:
        self._store, self._completion, self._model = store, completion, model
        self._project = store.project(mirror.root)
        self._path, self._language = mirror.path or "", mirror.language or ""
        self._watched: list[WatchedSuggestion] = []
        self._ids: OrderedDict[str, WatchedSuggestion] = OrderedDict()
        self._edits: OrderedDict[str, live.NextEdit] = OrderedDict()
        self._now = ""  # the buffer's text
        self._timer: asyncio.TimerHandle | None = None
        self._until_again = 0
        self._tuning: asyncio.Task[None] | None = None

    def tune(self) -> None:
        """Update the confidence threshold, in a thread."""
        self._until_again = AGAIN
        if self._tuning is None or self._tuning.done():
            self._tuning = asyncio.get_running_loop().create_task(self._tune())

    def record_answer(
        self, request: str, text: str, cursor: int, answer: ShownCompletion | WithheldCompletion
    ) -> None:
        """Watch the answer that was given for `text` at `cursor`."""
        seen = isinstance(answer, ShownCompletion)
        if isinstance(answer, WithheldCompletion) and (
            answer.reason not in _HELD_BACK or not answer.text.strip()
        ):
            return
        self._now = text
        for watch in self._watched:  # the same suggestion, partly typed
            if watch.fate is None and text[watch.start : cursor] + answer.text == watch.suggestion:
                watch.was_shown = watch.was_shown or seen
                self._remember_id(request, watch)
                return
        extent = answer.extent.value if isinstance(answer, ShownCompletion) else Extent.LINE.value
        tunes = isinstance(answer, WithheldCompletion) or not answer.partial
        around = _code_around(text, cursor) if seen else ("", "")
        watch = WatchedSuggestion(
            time.time(),
            answer.text,
            cursor,
            cursor,
            answer.confidence,
            extent,
            self._model,
            seen,
            tunes,
            *around,
        )
        self._watched.append(watch)
        if seen:
            self._remember_id(request, watch)
        while len(self._watched) > WATCHED:
            self._settle(self._watched[0])
        self._start_timer()

    def record_revision(self, request: str, text: str, model: str) -> None:
        """The larger model replaced the text, so it says nothing about the fast model's confidence."""
        watch = self._ids.get(request)
        if watch is not None and watch.fate is None and watch.suggestion != text:
            watch.suggestion, watch.model, watch.counts_for_tuning = text, model, False

    def record_next_edit(self, event: live.NextEdit) -> None:
        self._edits[event.id] = event
        while len(self._edits) > WATCHED:
            self._edits.popitem(last=False)

    def apply_edits(self, edits: Sequence[Edit], text: str) -> None:
        """The buffer was changed, and is `text` now."""
        self._now = text
        for watch in tuple(self._watched):
            if not all(watch.apply_edit(edit) for edit in edits):
                self._settle(watch, text_known=False)
                continue
            if watch.fate is not None:
                continue
            written = text[watch.start : watch.end]
            if written.rstrip() == watch.suggestion.rstrip():
                # Several characters at once were accepted, even if the editor did not report it.
                at_once = len(edits) == 1 and len(edits[0].text) > 1 and edits[0].text.strip()
                watch.fate = "accepted" if at_once and watch.was_shown else "typed"
                watch.accepted_length = len(edits[0].text) if watch.fate == "accepted" else 0
            elif not _may_become(written, watch.suggestion):
                watch.fate = "rejected"

    def record_feedback(self, feedback: live.Feedback) -> None:
        """Record what an editor reports about a suggestion or a next edit."""
        if (event := self._edits.get(feedback.id)) is not None:
            if feedback.outcome in ("accepted", "dismissed"):
                del self._edits[feedback.id]
                self._save_next_edit(event, taken=feedback.outcome == "accepted")
            return
        watch = self._ids.get(feedback.id)
        if watch is None or feedback.outcome == "shown":
            return
        if feedback.outcome == "partial":
            taken = min(feedback.length, len(watch.suggestion))
            watch.fate, watch.accepted_length = "partial", max(watch.accepted_length, taken)
        elif feedback.outcome == "accepted":
            watch.fate, watch.accepted_length = "accepted", watch.accepted_length or len(watch.suggestion)
        elif watch.fate is None:
            watch.fate = "dismissed"

    def close(self) -> None:
        for watch in tuple(self._watched):
            self._settle(watch)
        if self._timer is not None:
            self._timer.cancel()
        if self._tuning is not None:
            self._tuning.cancel()

    # Inside

    async def _tune(self) -> None:
        counts = await asyncio.to_thread(self._store.counts, self._language, self._project)
        self._completion.tune(counts)

    def _remember_id(self, request: str, watch: WatchedSuggestion) -> None:
        self._ids[request] = watch
        while len(self._ids) > 4 * WATCHED:
            self._ids.popitem(last=False)

    def _start_timer(self) -> None:
        if self._timer is None and self._watched:
            due = self._watched[0].at + SETTLED - time.time()
            self._timer = asyncio.get_running_loop().call_later(max(due, 0.1), self._settle_due)

    def _settle_due(self) -> None:
        self._timer = None
        for watch in tuple(self._watched):
            if time.time() - watch.at < SETTLED:
                break
            self._settle(watch)
        self._start_timer()

    def _settle(self, watch: WatchedSuggestion, *, text_known: bool = True) -> None:
        """Save the outcome. `text_known` False: the text around it was rewritten."""
        self._watched.remove(watch)
        for name in [name for name, held in self._ids.items() if held is watch]:
            del self._ids[name]
        if watch.fate is None:
            return  # nothing was typed after it: neither accepted nor rejected
        written = _first_lines(self._now[watch.start : watch.end], watch.suggestion) if text_known else ""
        self._store.save(self._outcome(watch, written))
        self._until_again -= 1
        if self._until_again <= 0:
            self.tune()

    def _outcome(self, watch: WatchedSuggestion, written: str) -> SuggestionOutcome:
        assert watch.fate is not None
        became = watch.fate
        partial = watch.accepted_length / max(1, len(watch.suggestion))
        worth = {"accepted": 1.0, "typed": 1.0, "partial": partial}.get(became, 0.0)
        if became == "accepted" and written:
            worth = _surviving_share(watch.suggestion, written)
        if not watch.was_shown:
            became = "unseen_right" if became == "typed" else "unseen_wrong"
        outcome = SuggestionOutcome(
            project=self._project,
            language=self._language,
            at=watch.at,
            model=watch.model,
            kind="completion",
            extent=watch.extent,
            confidence=round(watch.confidence, 4),
            became=became,
            shown=len(watch.suggestion) if watch.was_shown else 0,
            taken=watch.accepted_length if watch.was_shown else 0,
            worth=round(worth, 4),
            tunes=watch.counts_for_tuning,
        )
        if not watch.was_shown or not written:
            return outcome
        return replace(  # with the code around it
            outcome,
            path=self._path,
            prefix=watch.before,
            suggestion=watch.suggestion[:LONGEST],
            written=written[:LONGEST],
            suffix=watch.after,
        )

    def _save_next_edit(self, event: live.NextEdit, *, taken: bool) -> None:
        length = sum(len(change.text) for change in (event.change, *event.others))
        self._store.save(
            SuggestionOutcome(
                project=self._project,
                language=self._language,
                at=time.time(),
                model=self._model,
                kind="next_edit",
                extent=event.cause,
                confidence=0.0,
                became="accepted" if taken else "dismissed",
                shown=length,
                taken=length if taken else 0,
                worth=float(taken),
                tunes=False,
            )
        )


def _code_around(text: str, cursor: int) -> tuple[str, str]:
    before, after = text[max(0, cursor - PREFIX) : cursor], text[cursor : cursor + SUFFIX]
    if cursor > PREFIX:
        before = before[before.find("\n") + 1 :]
    if len(text) - cursor > SUFFIX:
        after = after[: after.rfind("\n") + 1] or after
    return before, after


def _first_lines(written: str, suggestion: str) -> str:
    """The first lines of what was written, as many as were suggested."""
    return "\n".join(written.split("\n")[: suggestion.count("\n") + 1])


def _may_become(written: str, suggestion: str) -> bool:
    """Whether what is written may still become the suggestion; brackets the editor closes are ignored."""
    return suggestion.startswith((written, written.rstrip(_CLOSERS)))


def _surviving_share(suggestion: str, written: str) -> float:
    """How much of the accepted text is still there."""
    if written.startswith(suggestion.rstrip()):
        return 1.0
    old: Sequence[str] = suggestion if len(suggestion) <= 400 else suggestion.split("\n")
    new: Sequence[str] = written if len(suggestion) <= 400 else written.split("\n")
    blocks = SequenceMatcher(None, old, new[: 4 * len(old)], autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks) / max(1, len(old))
