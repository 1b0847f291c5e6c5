"""The next edit of one live buffer: searched for when typing pauses, rebased over every key.

Applying a key is cheap; the search runs in a thread on texts that do not change. Rules are tried first, then
a model that was trained on an edit format, through its queue and below ghost text in priority. A current
proposal is sent again whenever it moved; one that no longer applies is dropped once, with its reason. A
request is answered as soon as the search is over.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath

from keystroke.analysis.check import check
from keystroke.assist.completion import LiveCompletion, WithheldReason
from keystroke.assist.next_edit import (
    Intent,
    NextEditProposal,
    NextEditTracker,
    NoEditReason,
    PlacesQuestion,
    PredictedEdits,
    SinglePlaceQuestion,
    proposal_from_model,
)
from keystroke.assist.next_edit.candidates import MOST
from keystroke.assist.next_edit.places import PlacesFormat
from keystroke.assist.next_edit.prompt import RecentChange
from keystroke.errors import KeystrokeError
from keystroke.gateway.live.mirror import BufferMirror
from keystroke.gateway.work.model_client import ModelAccess, ModelClient
from keystroke.gateway.work.registry import ModelRegistry, ServedModel
from keystroke.protocol import live_messages as live
from keystroke.text import Edit

log = logging.getLogger("keystroke.live")

PAUSE = 0.15  # seconds without a key before rules are tried
LONGER = 0.25  # more seconds before the model is asked: it costs more than a rule
SECONDS = 1.5  # that all questions about one change may take
QUICK = 400  # tokens a second that a model must read to be asked about all places at once
_QUESTION = 300  # tokens that one place costs, without the history
_LARGEST_CHECK = 60_000  # characters; checking more takes longer than a pause


class BufferNextEdit:
    """`model` None: no loaded model was trained for next edits. `trail`: recent changes in all buffers of the
    connection."""

    def __init__(
        self,
        mirror: BufferMirror,
        send: Callable[[live.LiveEvent], None],
        *,
        trail: deque[RecentChange] | None = None,
        model: NextEditModel | None = None,
    ) -> None:
        self._mirror, self._send, self._model = mirror, send, model
        self._tracker = NextEditTracker(mirror.text, mirror.language, mirror.path or mirror.name, trail)
        self._reason: str = NoEditReason.NOWHERE  # why there is no proposal
        self._requests: list[str] = []  # wait for the running search
        self._task: asyncio.Task[None] | None = None

    def apply_edits(self, before: str, edits: Sequence[Edit], others: Mapping[str, str]) -> None:
        """The mirror's text was `before`. `others`: the texts of other buffers in the same language."""
        current = self._tracker.proposal
        dropped = self._tracker.apply_edits(before, edits)
        if current is not None:
            if self._tracker.proposal is not None:
                self._send_proposal(self._tracker.proposal)
            else:
                self._drop(current.id, dropped.reason if dropped is not None else "fulfilled")
        self.close()
        mirror = self._mirror
        search = self._search(mirror.text, mirror.version, mirror.cursor, others)
        self._task = asyncio.get_running_loop().create_task(search)

    def answer_request(self, request: str) -> None:
        """Send the current proposal again, or why there is none; after a running search, if there is one."""
        self._requests.append(request)
        if self._task is None or self._task.done():
            self._answer_all()

    def apply_feedback(self, feedback: live.Feedback, text: str) -> bool:
        """Whether the feedback was about this buffer's proposal."""
        current = self._tracker.proposal
        if current is None or current.id != feedback.id:
            return False
        if feedback.outcome == "dismissed":
            self._tracker.dismiss(text)
        return True

    def close(self) -> None:
        """Stop the search; waiting requests are superseded."""
        if self._task is not None:
            self._task.cancel()
        requests, self._requests = self._requests, []
        for request in requests:
            self._drop(request, WithheldReason.SUPERSEDED)

    async def _search(self, text: str, version: int, cursor: int, others: Mapping[str, str]) -> None:
        self._reason = NoEditReason.NOWHERE
        try:
            await asyncio.sleep(PAUSE)
            if self._tracker.is_being_accepted(text):
                self._answer_all()
                return
            rules = self._tracker.rule_search()
            found = await asyncio.to_thread(rules.propose, text, cursor, others)
            if found is None and self._model is not None:
                found = await self._ask_model(self._model, text, cursor)
        except Exception:
            log.exception("the search for the next edit failed")
            self._reason = WithheldReason.FAILED
            self._answer_all()
            return
        if version == self._mirror.version:
            self._adopt(found)

    async def _ask_model(self, model: NextEditModel, text: str, cursor: int) -> NextEditProposal | None:
        """The model's proposal; None with the reason noted."""
        intent = self._tracker.intent(text)
        if intent is None:
            return None
        await asyncio.sleep(LONGER)
        try:
            found = await model.predict(intent, cursor)
        except KeystrokeError as error:
            log.debug("no next edit: %s", error)
            self._reason = error.code
            return None
        if isinstance(found, PredictedEdits):
            return proposal_from_model(text, found)
        self._reason = found
        return None

    def _adopt(self, found: NextEditProposal | None) -> None:
        current = self._tracker.proposal
        proposal = self._tracker.adopt(found)
        if proposal is None:
            if current is not None:
                self._drop(current.id, "no_longer_fits")
        elif proposal != current and not self._requests:
            self._send_proposal(proposal)
        self._answer_all()

    def _answer_all(self) -> None:
        requests, self._requests = self._requests, []
        if requests and self._tracker.proposal is not None:
            self._send_proposal(self._tracker.proposal, requests)
            return
        for request in requests:
            self._drop(request, self._reason)

    def _send_proposal(self, proposal: NextEditProposal, requests: Sequence[str] = ()) -> None:
        name = self._mirror.name
        changes = [
            live.NextEditChange(buffer=e.buffer or name, start=e.edit.start, end=e.edit.end, text=e.edit.text)
            for e in proposal.edits
        ]
        self._send(
            live.NextEdit(
                id=proposal.id,
                buffer=name,
                version=self._mirror.version,
                cause=proposal.cause.value,
                title=proposal.title,
                change=changes[0],
                others=changes[1:],
                answers=list(requests),
            )
        )

    def _drop(self, id: str, reason: str) -> None:  # noqa: A002 - the wire's name
        self._send(live.NextEditDropped(id=id, buffer=self._mirror.name, reason=reason))


def choose_edit_model(registry: ModelRegistry, own: ServedModel) -> ServedModel:
    """The model that predicts next edits for a buffer that `own` completes: a loaded model whose adapter was
    trained for it and which is fast enough here, else `own` itself."""
    for entry in registry.entries.values():
        if isinstance(entry.edits, PlacesFormat):
            rate = entry.scheduler.prefill_rate
            if rate is None or rate >= QUICK:
                return entry
    return own


class NextEditModel:
    """Asks a model for the next edit of one buffer, with one short job after another."""

    def __init__(self, mirror: BufferMirror, completion: LiveCompletion, model: ModelAccess) -> None:
        self._mirror, self._completion, self._model = mirror, completion, model
        self._path = mirror.path or mirror.name

    async def predict(self, intent: Intent, cursor: int) -> PredictedEdits | NoEditReason:
        """Raises KeystrokeError where the queue or the engine refuses. Cancelling the awaiting task cancels
        the running job."""
        service = self._model.service
        entry = choose_edit_model(service.registry, self._model.entry)
        form = entry.edits
        if form is None:
            return NoEditReason.NOWHERE  # the model that supported it is no longer loaded
        arguments = (
            self._path,
            self._mirror.language,
            intent.change,
            intent.history,
            cursor,
            await asyncio.to_thread(self._problems, intent.change.after),
            intent.dismissed,
            self._completion.rules.max_line,
            self._completion.settings.eagerness,
            _place_limit(entry),
        )
        client = ModelClient(service, entry, self._model.caller, f"live/{self._path}")
        if isinstance(form, PlacesFormat):
            return await PlacesQuestion(form, *arguments).resolve(client)
        return await SinglePlaceQuestion(form, *arguments).resolve(client)

    def _problems(self, text: str) -> tuple[int, ...]:
        if self._mirror.language != "python" or len(text) > _LARGEST_CHECK:
            return ()
        try:
            return tuple(item.start for item in check(text, PurePath(self._path).name, fixes=False))
        except KeystrokeError:
            return ()


def _place_limit(entry: ServedModel) -> int:
    """How many places this machine can examine in the time allowed."""
    rate = entry.scheduler.prefill_rate
    return MOST if rate is None else max(2, min(MOST, int(rate * SECONDS / _QUESTION)))
