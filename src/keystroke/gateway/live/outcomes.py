"""What becomes of the suggestions of one buffer: taken, typed, turned down, and what stood there in the end.

Lives in the event loop and computes little: it moves a few spans with every key. Editors tell what was
taken; what they do not tell is seen from what is typed. A suggestion that was held back is watched too: if it
is then typed by hand, it would have been right. Each is handed on once, when it has settled.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher

from keystroke.assist.completion import Extent, Hidden, LiveCompletion, Offer, Withheld
from keystroke.assist.completion.gate import THRESHOLDS
from keystroke.assist.completion.tuning import shift_between, tuned
from keystroke.gateway.record.learned import Became, Learned, Outcome
from keystroke.protocol import live_messages as live
from keystroke.text import Edit

SETTLED = 30.0  # seconds after which what was taken or written instead is taken to stay
WATCHED = 32  # suggestions at a time
AGAIN = 20  # outcomes after which the threshold is looked up anew
PREFIX, SUFFIX, LONGEST = 1400, 500, 4000  # characters kept
# A suggestion of these that the text then turns out to hold could have been shown.
_HELD_BACK = (Hidden.LOW_CONFIDENCE, Hidden.TYPING_FAST)
_CLOSERS = ")]}>\"'`"


@dataclass(slots=True)
class Watch:
    """A suggestion at [start, end), where `end` grows with what is written there."""

    at: float
    suggestion: str
    start: int
    end: int
    confidence: float
    extent: str
    model: str
    seen: bool
    tunes: bool
    before: str = ""  # code around it
    after: str = ""
    became: Became | None = None
    taken: int = 0

    def follow(self, edit: Edit) -> bool:
        """Move along; False where what it stood on is gone."""
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
    """`learned` is given each outcome. `root`: of the workspace."""

    def __init__(
        self,
        learned: Learned,
        completion: LiveCompletion,
        *,
        root: str | None,
        path: str | None,
        language: str | None,
        model: str,
    ) -> None:
        self._learned, self._completion = learned, completion
        self._project = learned.project(root)
        self._path, self._language, self._model = path or "", language or "", model
        self._watched: list[Watch] = []
        self._ids: OrderedDict[str, Watch] = OrderedDict()
        self._edits: OrderedDict[str, live.NextEdit] = OrderedDict()
        self._now = ""  # the buffer's text
        self._timer: asyncio.TimerHandle | None = None
        self._until_again = 0
        self._tuning: asyncio.Task[None] | None = None

    # What the buffer tells

    def tune(self) -> None:
        """Look up, in a thread, how sure a suggestion must be here."""
        self._until_again = AGAIN
        if self._tuning is None or self._tuning.done():
            self._tuning = asyncio.get_running_loop().create_task(self._tune())

    def answered(self, request: str, text: str, cursor: int, answer: Offer | Withheld) -> None:
        """`answer` was given for `text` with its cursor there."""
        seen = isinstance(answer, Offer)
        if isinstance(answer, Withheld) and (answer.reason not in _HELD_BACK or not answer.text.strip()):
            return
        self._now = text
        for watch in self._watched:  # the same suggestion, some of it typed by now
            if watch.became is None and text[watch.start : cursor] + answer.text == watch.suggestion:
                watch.seen = watch.seen or seen
                self._name(request, watch)
                return
        extent = answer.extent.value if isinstance(answer, Offer) else Extent.LINE.value
        tunes = isinstance(answer, Withheld) or not answer.begun
        watch = Watch(time.time(), answer.text, cursor, cursor, answer.confidence, extent, self._model,
                      seen, tunes, *(_around(text, cursor) if seen else ("", "")))  # fmt: skip
        self._watched.append(watch)
        if seen:
            self._name(request, watch)
        while len(self._watched) > WATCHED:
            self._settle(self._watched[0])
        self._wait()

    def revised(self, request: str, text: str, model: str) -> None:
        """A larger model put other words in its place: they say nothing about this one's confidence."""
        watch = self._ids.get(request)
        if watch is not None and watch.became is None and watch.suggestion != text:
            watch.suggestion, watch.model, watch.tunes = text, model, False

    def offered(self, event: live.NextEdit) -> None:
        self._edits[event.id] = event
        while len(self._edits) > WATCHED:
            self._edits.popitem(last=False)

    def follow(self, edits: Sequence[Edit], text: str) -> None:
        """The buffer was changed, and is `text` now."""
        self._now = text
        for watch in tuple(self._watched):
            if not all(watch.follow(edit) for edit in edits):
                self._settle(watch, whole=False)
                continue
            if watch.became is not None:
                continue
            written = text[watch.start : watch.end]
            if written.rstrip() == watch.suggestion.rstrip():
                # A whole run of characters at once was taken with a key, even if no editor said so.
                at_once = len(edits) == 1 and len(edits[0].text) > 1 and edits[0].text.strip()
                watch.became = "accepted" if at_once and watch.seen else "typed"
                watch.taken = len(edits[0].text) if watch.became == "accepted" else 0
            elif not _agrees(written, watch.suggestion):
                watch.became = "rejected"

    def told(self, said: live.Feedback) -> None:
        """What an editor says of a suggestion or of a next edit."""
        if (event := self._edits.get(said.id)) is not None:
            if said.outcome in ("accepted", "dismissed"):
                del self._edits[said.id]
                self._keep_edit(event, taken=said.outcome == "accepted")
            return
        watch = self._ids.get(said.id)
        if watch is None or said.outcome == "shown":
            return
        if said.outcome == "partial":
            watch.became, watch.taken = "partial", max(watch.taken, min(said.length, len(watch.suggestion)))
        elif said.outcome == "accepted":
            watch.became, watch.taken = "accepted", watch.taken or len(watch.suggestion)
        elif watch.became is None:
            watch.became = "dismissed"

    def close(self) -> None:
        """Whatever it came to, that is what is kept."""
        for watch in tuple(self._watched):
            self._settle(watch)
        if self._timer is not None:
            self._timer.cancel()
        if self._tuning is not None:
            self._tuning.cancel()

    # Inside

    async def _tune(self) -> None:
        counts = await asyncio.to_thread(self._learned.counts, self._language, self._project)
        default = THRESHOLDS[self._completion.eagerness]
        self._completion.shift = shift_between(default, tuned(default, *counts))

    def _name(self, request: str, watch: Watch) -> None:
        self._ids[request] = watch
        while len(self._ids) > 4 * WATCHED:
            self._ids.popitem(last=False)

    def _wait(self) -> None:
        if self._timer is None and self._watched:
            due = self._watched[0].at + SETTLED - time.time()
            self._timer = asyncio.get_running_loop().call_later(max(due, 0.1), self._look)

    def _look(self) -> None:
        self._timer = None
        for watch in tuple(self._watched):
            if time.time() - watch.at < SETTLED:
                break
            self._settle(watch)
        self._wait()

    def _settle(self, watch: Watch, *, whole: bool = True) -> None:
        """Hand it on. `whole` False: what it stood on was rewritten, so what was written in its place is not
        known."""
        self._watched.remove(watch)
        for name in [name for name, held in self._ids.items() if held is watch]:
            del self._ids[name]
        if watch.became is None:
            return  # nobody typed on: it was neither taken nor turned down
        written = _as_long(self._now[watch.start : watch.end], watch.suggestion) if whole else ""
        self._learned.keep(self._outcome(watch, written))
        self._until_again -= 1
        if self._until_again <= 0:
            self.tune()

    def _outcome(self, watch: Watch, written: str) -> Outcome:
        assert watch.became is not None
        became = watch.became
        worth = {"accepted": 1.0, "typed": 1.0, "partial": watch.taken / max(1, len(watch.suggestion))}.get(
            became, 0.0
        )
        if became == "accepted" and written:
            worth = _kept_share(watch.suggestion, written)
        if not watch.seen:
            became = "unseen_right" if became == "typed" else "unseen_wrong"
        outcome = Outcome(
            at=watch.at,
            project=self._project,
            language=self._language,
            model=watch.model,
            kind="completion",
            extent=watch.extent,
            confidence=round(watch.confidence, 4),
            became=became,
            shown=len(watch.suggestion) if watch.seen else 0,
            taken=watch.taken if watch.seen else 0,
            worth=round(worth, 4),
            tunes=watch.tunes,
        )
        if not watch.seen or not written:
            return outcome  # numbers are enough
        return _with_text(outcome, watch, self._path, written)

    def _keep_edit(self, event: live.NextEdit, *, taken: bool) -> None:
        length = sum(len(change.text) for change in (event.change, *event.others))
        self._learned.keep(
            Outcome(
                at=time.time(),
                project=self._project,
                language=self._language,
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


def _with_text(outcome: Outcome, watch: Watch, path: str, written: str) -> Outcome:
    """With the code around it, from the beginning of a line to the end of one."""
    return replace(
        outcome,
        path=path,
        prefix=watch.before,
        suggestion=watch.suggestion[:LONGEST],
        written=written[:LONGEST],
        suffix=watch.after,
    )


def _around(text: str, cursor: int) -> tuple[str, str]:
    before, after = text[max(0, cursor - PREFIX) : cursor], text[cursor : cursor + SUFFIX]
    if cursor > PREFIX:
        before = before[before.find("\n") + 1 :]
    if len(text) - cursor > SUFFIX:
        after = after[: after.rfind("\n") + 1] or after
    return before, after


def _as_long(written: str, suggestion: str) -> str:
    """As many lines of what was written as were suggested: what follows them is something else."""
    return "\n".join(written.split("\n")[: suggestion.count("\n") + 1])


def _agrees(written: str, suggestion: str) -> bool:
    """Whether the suggestion may still come true; brackets that the editor closes by itself stand aside."""
    return suggestion.startswith((written, written.rstrip(_CLOSERS)))


def _kept_share(suggestion: str, written: str) -> float:
    """How much of what was taken is still there."""
    if written.startswith(suggestion.rstrip()):
        return 1.0
    old: Sequence[str] = suggestion if len(suggestion) <= 400 else suggestion.split("\n")
    new: Sequence[str] = written if len(suggestion) <= 400 else written.split("\n")
    blocks = SequenceMatcher(None, old, new[: 4 * len(old)], autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks) / max(1, len(old))
