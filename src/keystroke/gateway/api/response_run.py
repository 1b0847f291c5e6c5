"""One request under way, from its first response to its last.

A run is one place in a conversation that may become several responses: a steered one is followed by its
successor. Each of them ends exactly once and leaves a Turn from which the next can go on. It starts nothing
by itself: successors are made by its owner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from msgspec import UNSET

from keystroke.engine.model import Model
from keystroke.errors import InputError, KeystrokeError
from keystroke.gateway.access.keys import Caller
from keystroke.gateway.api import prompts
from keystroke.gateway.api.answer import Answer, Sink
from keystroke.gateway.api.conversations import Conversations
from keystroke.gateway.api.prompts import Turn
from keystroke.gateway.api.replay import Replay
from keystroke.gateway.api.serializers import ResponseSerializer
from keystroke.gateway.record.store import Store
from keystroke.gateway.work.registry import ServedModel
from keystroke.gateway.work.service import new_id
from keystroke.gateway.work.ticket import Ended, Redirected, Steered
from keystroke.gateway.work.work import Outcome
from keystroke.protocol import events
from keystroke.protocol.items import CustomToolCall, FunctionCall, Item, as_input
from keystroke.protocol.requests import CreateRequest, ResponseCreate
from keystroke.protocol.response import Response, Routing

_ENDS = (events.Completed, events.IncompleteEvent, events.Failed, events.Cancelled)

OnTurn = Callable[[tuple[str, Turn | None]], None]


@dataclass(slots=True)
class PendingSteer:
    id: str
    items: list[Item]


class Owner(Protocol):
    """What a run asks of the API that began it."""

    store: Store | None
    conversations: Conversations
    runs: dict[str, ResponseRun]

    def successor_serializer(self, run: ResponseRun, previous: Response) -> ResponseSerializer: ...

    def succeed(self, run: ResponseRun, turn: Turn, items: list[Item]) -> None: ...

    def later(self, act: Callable[[], None]) -> None: ...


class ResponseRun:
    """One request under way. `on_turn` is told of every response that ended: its id, and its turn or None
    where nothing can be continued. `on_done` is told once, when no successor follows."""

    def __init__(self, owner: Owner, request: CreateRequest, caller: Caller, sink: Sink) -> None:
        self.owner = owner
        self.request = request
        self.caller = caller
        self.sink = sink
        self.answer: Answer | None = None
        self.serializer: ResponseSerializer
        self.entry: ServedModel
        self.routing: Routing
        self.items: list[Item] = []  # the conversation up to the answer
        self.own_items: list[Item] = []  # what this turn added to it
        self.pending: list[PendingSteer] = []
        self.cancelled = False
        self.latest: tuple[str, Turn | None] | None = None  # what ended last, and its turn
        self.over = asyncio.Event()  # no successor follows
        self.replay: Replay | None = None  # where it can be taken up again once its connection broke
        self.task: asyncio.Task[None] | None = None  # a successor being prepared
        self._splicing: asyncio.Task[None] | None = None  # steering input on its way to the engine
        self.on_turn: OnTurn = lambda _turn: None
        self.on_done: Callable[[], None] = lambda: None
        self._held: list[Any] | None = None  # an end that is told once it is stored
        self._settled = False  # what comes now is told at once

    @property
    def id(self) -> str:
        return self.serializer.id

    @property
    def response(self) -> Response:
        return self.serializer.response

    @property
    def stream_id(self) -> str | None:
        return self.request.stream_id if isinstance(self.request, ResponseCreate) else None

    def cancel(self, reason: KeystrokeError | None = None) -> None:
        """Stop, and let no successor follow. Input that was to steer is given back when the answer ends."""
        self.cancelled = True
        if self.answer is not None:
            self.answer.cancel(reason)

    def unpause(self) -> None:
        """Nobody is behind any more."""
        if self.answer is not None:
            self.answer.work.ticket.resume()

    def heed_cancel(self) -> None:
        """A cancel that came while the prompt was made had nothing to stop yet."""
        if self.cancelled:
            self.cancel()

    def tell(self, messages: list[Any]) -> None:
        """To the client. Where other gateways answer from the same store, a response is in it before its end
        is told: whoever saw it end finds it, whatever becomes of this gateway."""
        store, answer = self.owner.store, self.answer
        stored = store is not None and store.durable and bool(self.response.store)
        # A steered response has a successor on the way: its end is not the last word.
        if answer is not None and not answer.ended:
            self._settled = False
        elif stored and answer is not None and not self._settled:
            at = max((i for i, m in enumerate(messages) if isinstance(m, _ENDS)), default=len(messages))
            messages, self._held = messages[:at], messages[at:]
        if messages:
            self.sink(messages)

    async def _end_once_stored(self, answer: Answer, outcome: Outcome, item: Ended) -> None:
        store = self.owner.store
        assert store is not None
        store.save_response(self.caller.id, self.own_items, self.response)
        await store.flush()
        held, self._held = self._held or [], None
        self._settled = True
        self.sink(held)
        self._ended(answer, outcome, item)

    # Steering

    def steer(self, content: str | list[Item]) -> list[Any]:
        """Take input for the answer under way; says `accepted`. Raises InputError for what cannot steer."""
        items = prompts.items_of(content)
        if not items or any(i.type != "message" or (i.role or "user") != "user" for i in items):
            raise InputError("Only user messages can steer a response.", param="input")
        steer = PendingSteer(new_id("steer"), items)
        self.pending.append(steer)
        said = events.SteerAccepted(
            events.SteerRef(steer.id, self.id), self.serializer.stream.number(), self._stream()
        )
        assert self.answer is not None
        model = self.entry.model
        if model is None:
            self.answer.cancel(Redirected("steered"))  # a remote stream cannot be spliced: stop, then go on
        elif model.chat is not None and model.chat.foreign:
            self._splicing = asyncio.create_task(self._splice_later(self._splicing, steer, model))
        else:
            self._splice(steer, prompts.join(model, prompts.messages_of(None, items, self.items)))
        return [said]

    def _splice(self, steer: PendingSteer, joint: list[int] | None) -> None:
        if joint is not None and self.answer is not None:
            self.answer.work.ticket.redirect(steer.id, joint)

    async def _splice_later(
        self, before: asyncio.Task[None] | None, steer: PendingSteer, model: Model
    ) -> None:
        """The join of a template that runs in a process of its own is waited for, in the order of the input.
        Where it fails, or the answer ends first, a successor takes the input."""
        if before is not None:
            await asyncio.wait({before})
        messages = prompts.messages_of(None, steer.items, self.items)
        try:
            joint = await asyncio.to_thread(prompts.join, model, messages)
        except KeystrokeError:
            return
        if steer in self.pending:
            self._splice(steer, joint)

    def steered(self, _answer: Answer, item: Steered) -> ResponseSerializer:
        """The engine spliced the input in: the successor begins."""
        steer = next(s for s in self.pending if s.id == item.steer_id)
        self.pending.remove(steer)
        previous = self.serializer.response
        self.items = [*self.items, *map(as_input, previous.output), *steer.items]
        self.own_items = steer.items
        self.serializer = self.owner.successor_serializer(self, previous)
        self.owner.runs[self.id] = self
        return self.serializer

    def ended(self, answer: Answer, outcome: Outcome, item: Ended | Steered) -> None:
        """One response is over: keep its turn, tell who needs to know, go on where input is waiting."""
        if not self._held or isinstance(item, Steered):
            self._settled = self._settled or isinstance(item, Ended)
            self._ended(answer, outcome, item)
        else:
            self.task = asyncio.get_running_loop().create_task(self._end_once_stored(answer, outcome, item))

    def _ended(self, answer: Answer, outcome: Outcome, item: Ended | Steered) -> None:
        response = self.serializer.response
        self.owner.runs.pop(response.id, None)
        if isinstance(item, Steered):
            self._leave_turn(response, outcome, item.tokens)
            return
        turn = self._leave_turn(response, outcome, item.tokens)
        goes_on = outcome.status in ("completed", "incomplete") and not self.cancelled
        if self.pending and turn is not None and goes_on:
            self._go_on(response, turn)
        else:
            self._return_pending()
        if not self.pending:
            self.finish()

    def _leave_turn(self, response: Response, outcome: Outcome, tokens: Sequence[int]) -> Turn | None:
        turn = None
        if outcome.status != "failed":
            turn = Turn(
                response.id,
                self.entry.name,
                [*self.items, *map(as_input, response.output)],
                self.request.instructions,
                self.request.tools,
                tokens or None,
            )
            if response.store:
                self.owner.conversations.remember(self.caller, turn)
        if response.store and self.owner.store is not None:
            self.owner.store.save_response(self.caller.id, self.own_items, response)
        self.latest = (response.id, turn)
        self.on_turn(self.latest)
        return turn

    def _go_on(self, response: Response, turn: Turn) -> None:
        """The answer ended before the steering input reached it: a successor takes it, or, where the client
        owes tool results, the client's next request does."""
        owed = [c for c in response.output if isinstance(c, FunctionCall | CustomToolCall)]
        waiting, self.pending = self.pending, []
        if owed:
            required = [
                events.RequiredInput("function_call_output", c.call_id, c.name)
                if isinstance(c, FunctionCall)
                else events.RequiredInput("custom_tool_call_output", c.call_id)
                for c in owed
            ]
            said: list[Any] = []
            for steer in waiting:
                turn.steers += steer.items
                ref = events.SteerRef(steer.id, response.id)
                number = self.serializer.stream.number()
                said.append(events.SteerPending(ref, required, number, stream_id=self._stream()))
            self.owner.later(lambda: self.sink(said))
            return
        items = [item for steer in waiting for item in steer.items]
        self.pending = waiting
        self.owner.later(lambda: self.owner.succeed(self, turn, items))

    def _return_pending(self) -> None:
        waiting, self.pending = self.pending, []
        said = [
            steer_failed(
                self.id,
                s.items,
                "response_not_active",
                "The response ended before the input was used; send it with response.create.",
                s.id,
                self.serializer.stream.number(),
                self.stream_id,
            )
            for s in waiting
        ]
        if said:
            self.owner.later(lambda: self.sink(list(said)))

    def finish(self) -> None:
        if not self.over.is_set():
            self.over.set()
            if self.replay is not None:
                self.replay.ended()
            self.owner.later(lambda: self.on_done())  # whose it is by then

    def _stream(self) -> Any:
        return UNSET if self.stream_id is None else self.stream_id


def steer_failed(
    response_id: str,
    content: str | list[Item],
    code: str,
    message: str,
    steer_id: str | None,
    number: int,
    stream_id: str | None,
) -> events.SteerFailed:
    return events.SteerFailed(
        events.SteerReturned(response_id, content, steer_id),
        events.SteerError(code, message),
        number,
        UNSET if stream_id is None else stream_id,
    )
