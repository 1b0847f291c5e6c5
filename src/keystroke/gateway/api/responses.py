"""The Responses API, independent of the transport: create, continue, fetch, cancel, delete.

`Responses` holds what all requests share: the runs in progress, the finished turns, the event replays. The
state of one request belongs to its `ResponseRun` alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import copy

import msgspec

from keystroke.errors import Unavailable
from keystroke.gateway.access.keys import Caller
from keystroke.gateway.api.answer import Sink
from keystroke.gateway.api.compaction import Compactor
from keystroke.gateway.api.conversations import Conversations
from keystroke.gateway.api.prompts import ConversationTurn
from keystroke.gateway.api.replay import Replays
from keystroke.gateway.api.response_request import check_request
from keystroke.gateway.api.response_run import OnTurn, ResponseRun
from keystroke.gateway.record.turns import TurnJournal
from keystroke.gateway.work.service import Service, new_id
from keystroke.gateway.work.work import usage
from keystroke.protocol.faults import PreviousResponseNotFound, ResponseNotFound
from keystroke.protocol.items import content_text
from keystroke.protocol.requests import CreateRequest, ResponseCreate
from keystroke.protocol.response import CompactedConversation, InputTokens, Response, ResponseUsage

Recall = Callable[[str], ConversationTurn | None]


class Responses:
    def __init__(self, service: Service) -> None:
        self.service = service
        self.store = service.store
        self.conversations = Conversations(service.store)
        self.compactor = Compactor(service)
        self.runs: dict[str, ResponseRun] = {}
        self.replays: Replays[ResponseRun] = Replays()
        self.journal: TurnJournal | None = None  # where several gateways share a database

    async def create(
        self,
        request: CreateRequest,
        caller: Caller,
        sink: Sink,
        *,
        recall: Recall | None = None,
        on_turn: OnTurn | None = None,
        on_done: Callable[[], None] | None = None,
        turn_state: str | None = None,
    ) -> ResponseRun:
        """Start a response. Every refusal is raised from here, before the first event. `turn_state`: what an
        earlier reply of the turn said about its routing."""
        check_request(request)
        previous = await self._previous_turn(request.previous_response_id, caller, recall)
        run = ResponseRun(self, request, caller, sink, previous, turn_state)
        run.set_listeners(on_turn, on_done)
        await run.start(previous)
        return run

    async def count_tokens(self, request: CreateRequest, caller: Caller) -> InputTokens:
        """The size of the prompt that a request would have. Raises what creating it would refuse."""
        run, previous = await self._prepare(request, caller)
        return InputTokens(await run.count_tokens(previous))

    async def compact(self, request: CreateRequest, caller: Caller) -> CompactedConversation:
        """The conversation as the user's messages and one compaction item, for the input of a later
        request."""
        run, _ = await self._prepare(request, caller)
        fitted = await run.compact()
        assert fitted.item is not None
        messages = [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
            for i in run.items
            if i.is_from_user and (text := content_text(i.content))
        ]
        output = [*messages, msgspec.to_builtins(fitted.item)]
        spent = usage(fitted.receipt) if fitted.receipt is not None else ResponseUsage(0, 0, 0)
        created = int(time.time())
        return CompactedConversation(new_id("resp"), created, output, spent, fitted.compacted)

    async def _prepare(
        self, request: CreateRequest, caller: Caller
    ) -> tuple[ResponseRun, ConversationTurn | None]:
        check_request(request)
        previous = await self._previous_turn(request.previous_response_id, caller, None)
        return ResponseRun(self, request, caller, lambda _messages: None, previous), previous

    def find_run(self, response_id: str, caller: Caller) -> ResponseRun:
        """The run whose events can be resumed here. Raises ResponseNotFound, also where it failed for want of
        an engine and `resume_turn` would continue it."""
        run = self.replays.find_run(response_id, caller)
        if self.journal is not None and run.over.is_set() and isinstance(run.failure, Unavailable):
            raise ResponseNotFound(f"The stream of {response_id:.80} was interrupted.", param="response_id")
        return run

    async def resume_turn(
        self,
        response_id: str,
        caller: Caller,
        sink: Sink,
        *,
        stream_id: str | None = None,
        on_turn: OnTurn | None = None,
        on_done: Callable[[], None] | None = None,
    ) -> ResponseRun:
        """Continue a turn that another gateway began, from its first event with the text so far. Raises
        ResponseNotFound where there is none."""
        found = None
        if self.journal is not None and self.store is not None:
            found = await self.store.run_in_thread(self.journal.take, response_id, caller.id)
        if found is None:
            raise ResponseNotFound(
                f"There is no stream of {response_id:.80} to resume; fetch the response.",
                param="response_id",
            )
        request = found.request
        if isinstance(request, ResponseCreate):
            request.stream_id = stream_id
        previous = await self._previous_turn(request.previous_response_id, caller, None)
        found.request = copy(request)  # a run takes the input out of its own
        run = ResponseRun(self, request, caller, sink, previous)
        run.resumed_turn = found
        run.set_listeners(on_turn, on_done)
        await run.start(previous)
        return run

    async def fetch(self, response_id: str, caller: Caller) -> Response:
        run = self.runs.get(response_id)
        if run is not None and run.caller.id == caller.id:
            return run.response
        if self.store is not None and run is None:
            stored = await self.store.response(response_id)
            if stored is not None and stored.key_id == caller.id:
                return stored.response
        raise ResponseNotFound(f"There is no response {response_id:.80}.", param="response_id")

    async def cancel(self, response_id: str, caller: Caller) -> Response:
        """Stop a response. One that already ended is returned as it is."""
        response, run = await self.fetch(response_id, caller), self.runs.get(response_id)
        if run is not None:
            run.cancel()
            await run.over.wait()
        return response

    async def delete(self, response_id: str, caller: Caller) -> None:
        """Delete a stored response; one that still runs is stopped first and not stored. Raises
        ResponseNotFound."""
        run = self.runs.get(response_id)
        await self.fetch(response_id, caller)
        if run is not None:
            run.response.store = False
            run.cancel()
            await run.over.wait()
        self.conversations.forget(response_id)
        if self.store is not None:
            await self.store.run_in_thread(self.store.delete_response, response_id)

    async def _previous_turn(
        self, response_id: str | None, caller: Caller, recall: Recall | None
    ) -> ConversationTurn | None:
        if response_id is None:
            return None
        turn = recall(response_id) if recall is not None else None
        if turn is None:
            turn = await self.conversations.recall(caller, response_id)
        if turn is None:
            raise PreviousResponseNotFound(
                f"Response {response_id:.80} is not known here; send the whole input without it.",
                param="previous_response_id",
            )
        return turn
