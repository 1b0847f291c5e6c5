"""The next edit of one live buffer: looked for when the keys pause, moved along with every key.

Law: following a key is done at once and is cheap; looking happens in a thread on texts that do not change.
What stands is said again whenever it moved; what no longer stands is said once, with its reason.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from keystroke.assist.next_edit import NextEdits, Other, Proposal
from keystroke.protocol import live
from keystroke.text import Edit

log = logging.getLogger("keystroke.live")

PAUSE = 0.15  # seconds without a key after which a change is taken to mean something


class BufferNextEdit:
    def __init__(
        self, buffer: str, text: str, language: str | None, say: Callable[[live.LiveEvent], None]
    ) -> None:
        self._buffer, self._say = buffer, say
        self._edits = NextEdits(text, language)
        self._version = 0
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
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.get_running_loop().create_task(self._look(text, version, cursor, others))

    def repeat(self) -> bool:
        """Say again what stands; False where nothing does."""
        if self._edits.proposal is None:
            return False
        self._tell(self._edits.proposal)
        return True

    def feedback(self, said: live.Feedback, text: str) -> bool:
        """Whether it was about this."""
        standing = self._edits.proposal
        if standing is None or standing.id != said.id:
            return False
        if said.outcome == "dismissed":
            self._edits.dismiss(text)
        return True

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _look(self, text: str, version: int, cursor: int, others: Mapping[str, Other]) -> None:
        await asyncio.sleep(PAUSE)
        inquiry = self._edits.inquiry()
        try:
            found = await asyncio.to_thread(inquiry.propose, text, cursor, others)
        except Exception:
            log.exception("looking for the next edit failed")
            return
        if version != self._version:
            return
        standing = self._edits.proposal
        proposal = self._edits.adopt(found)
        if proposal is None:
            if standing is not None:
                self._drop(standing, "no_longer_fits")
        elif proposal != standing:
            self._tell(proposal)

    def _tell(self, proposal: Proposal) -> None:
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
        )
        self._say(event)

    def _drop(self, proposal: Proposal, reason: str) -> None:
        self._say(live.NextEditDropped(id=proposal.id, buffer=self._buffer, reason=reason))
