"""The next edit of one live buffer: looked for when the keys pause, moved along with every key.

Following a key is done at once and is cheap; looking happens in a thread on texts that do not change.
Rules are asked first and the model, where it knows how, when they find nothing. What stands is said again
whenever it moved; what no longer stands is said once, with its reason. Whoever asks hears what was found, or
why nothing is shown, as soon as that is known.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from keystroke.assist.completion import Hidden
from keystroke.assist.next_edit import Found, NextEdits, Other, Proposal, Unfit, foreseen
from keystroke.assist.next_edit.prompt import Change
from keystroke.errors import KeystrokeError
from keystroke.gateway.live.next_edit_model import NextEditModel
from keystroke.protocol import live_messages as live
from keystroke.text import Edit

log = logging.getLogger("keystroke.live")

PAUSE = 0.15  # seconds without a key after which a change is taken to mean something
LONGER = 0.25  # seconds more after which the model is asked: it costs more than a rule


class BufferNextEdit:
    """`asker` None: the model has not learned to be asked. `trail`: what was changed lately, in all
    buffers of the connection."""

    def __init__(
        self,
        buffer: str,
        text: str,
        language: str | None,
        say: Callable[[live.LiveEvent], None],
        *,
        path: str = "",
        trail: deque[Change] | None = None,
        asker: NextEditModel | None = None,
    ) -> None:
        self._buffer, self._say = buffer, say
        self._edits = NextEdits(text, language, path, trail)
        self._asker = asker
        self._version = 0
        self._reason: str = Unfit.NOWHERE  # why nothing stands
        self._asked: list[str] = []  # who waits for what is being looked for
        self._task: asyncio.Task[None] | None = None

    def follow(
        self,
        before: str,
        edits: Sequence[Edit],
        text: str,
        version: int,
        cursor: int,
        others: Mapping[str, Other],
    ) -> None:
        """The buffer was `before` and is `text` now."""
        self._version = version
        standing = self._edits.proposal
        dropped = self._edits.follow(before, edits)
        if standing is not None:
            if self._edits.proposal is not None:
                self._tell(self._edits.proposal)
            else:
                self._drop(standing, dropped.reason if dropped is not None else "fulfilled")
        self.close()
        self._task = asyncio.get_running_loop().create_task(self._look(text, version, cursor, others))

    def ask(self, request: str) -> None:
        """Say again what stands, or why nothing does; while a change is being looked at, when that is over:
        what stands now may be about half a word."""
        self._asked.append(request)
        if self._task is None or self._task.done():
            self._answer_all()

    def feedback(self, said: live.Feedback, text: str) -> bool:
        """Whether it was about this."""
        standing = self._edits.proposal
        if standing is None or standing.id != said.id:
            return False
        if said.outcome == "dismissed":
            self._edits.dismiss(text)
        return True

    def close(self) -> None:
        """Stop looking; who waits is told that something else came up."""
        if self._task is not None:
            self._task.cancel()
        asked, self._asked = self._asked, []
        for request in asked:
            self._decline(request, Hidden.SUPERSEDED)

    async def _look(self, text: str, version: int, cursor: int, others: Mapping[str, Other]) -> None:
        self._reason = Unfit.NOWHERE
        try:
            await asyncio.sleep(PAUSE)
            if self._edits.being_taken(text):
                self._answer_all()
                return
            inquiry = self._edits.inquiry()
            found = await asyncio.to_thread(inquiry.propose, text, cursor, others)
            if found is None and self._asker is not None:
                found = await self._foreseen(self._asker, text, cursor)
        except Exception:
            log.exception("looking for the next edit failed")
            self._reason = Hidden.FAILED
            self._answer_all()
            return
        if version == self._version:
            self._take(found)

    async def _foreseen(self, asker: NextEditModel, text: str, cursor: int) -> Proposal | None:
        """What the model would change next; None with the reason noted."""
        intent = self._edits.intent(text)
        if intent is None:
            return None
        await asyncio.sleep(LONGER)
        try:
            found = await asker.ask(intent, cursor)
        except KeystrokeError as error:
            log.debug("no next edit: %s", error)
            self._reason = error.code
            return None
        if isinstance(found, Found):
            return foreseen(text, found)
        self._reason = found
        return None

    def _take(self, found: Proposal | None) -> None:
        standing = self._edits.proposal
        proposal = self._edits.adopt(found)
        if proposal is None:
            if standing is not None:
                self._drop(standing, "no_longer_fits")
        elif proposal != standing and not self._asked:
            self._tell(proposal)
        self._answer_all()

    def _answer_all(self) -> None:
        asked, self._asked = self._asked, []
        if asked and self._edits.proposal is not None:
            self._tell(self._edits.proposal, asked)
            return
        for request in asked:
            self._decline(request, self._reason)

    def _decline(self, request: str, reason: str) -> None:
        self._say(live.NextEditDropped(id=request, buffer=self._buffer, reason=reason))

    def _tell(self, proposal: Proposal, asked: Sequence[str] = ()) -> None:
        changes = [
            live.Change(buffer=p.buffer or self._buffer, start=p.edit.start, end=p.edit.end, text=p.edit.text)
            for p in proposal.places
        ]
        event = live.NextEdit(
            id=proposal.id,
            buffer=self._buffer,
            version=self._version,
            cause=proposal.cause.value,
            title=proposal.title,
            change=changes[0],
            others=changes[1:],
            answers=list(asked),
        )
        self._say(event)

    def _drop(self, proposal: Proposal, reason: str) -> None:
        self._say(live.NextEditDropped(id=proposal.id, buffer=self._buffer, reason=reason))
