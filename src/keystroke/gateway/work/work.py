"""One unit of work: a ticket with its permit and receipts, settled exactly once however it ends.

Permit, receipt, metrics and usage are written when the ticket ends (finished, cancelled, superseded,
failed), never by its reader. A steered answer is several responses over one ticket; each is a span with its
own receipt, and the limits are charged for their sum.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from keystroke.agent.chat.receipt import Price
from keystroke.engine.generation import Chunk, Finish
from keystroke.errors import Interrupted, KeystrokeError
from keystroke.gateway.access.keys import Caller
from keystroke.gateway.access.limits import Permit
from keystroke.gateway.work.ticket import (
    CounterSnapshot,
    Redirected,
    StoppedEarly,
    Ticket,
    TicketEnded,
    TicketItem,
    TicketSteered,
)
from keystroke.protocol.response import InputTokenDetails, Receipt, ResponseUsage


@dataclass(frozen=True, slots=True)
class WorkOutcome:
    """How a span ended: the response's status, and why generation stopped."""

    status: str  # completed, incomplete, cancelled, failed
    receipt: Receipt
    finish: str = "stop"  # stop, length, steered, grammar
    error: KeystrokeError | None = None
    stop_string: str | None = None  # the requested text that ended it


OnSpanEnd = Callable[["Work", str, WorkOutcome], None]


class Work:
    """`id` names the current span in the usage records. `on_span_end` is called once for every span."""

    def __init__(
        self,
        identity: str,
        ticket: Ticket,
        permit: Permit,
        *,
        model: str,
        price: Price,
        caller: Caller,
        live: bool,
        on_span_end: OnSpanEnd,
    ) -> None:
        self.id = identity
        self.ticket = ticket
        self.model = model
        self.caller = caller
        self.live = live  # for a live buffer: its usage is summed by the hour
        self.network_seconds = 0.0  # added by the socket's writer
        self._permit = permit
        self.price = price
        self._on_span_end = on_span_end
        self._input_tokens = ticket.job.input_tokens  # 0: a remote server counts them
        self.span_start: CounterSnapshot | None = None  # None: the span begins with the ticket
        self.kept_tokens: int | None = None  # in the session, where a steered span began
        self._spent = 0
        self._failure: KeystrokeError | None = None
        self._outcome: WorkOutcome | None = None
        ticket.on_end = self._settle

    # Steering the ticket

    def subscribe(self, read: Callable[[list[TicketItem]], None]) -> None:
        """Pass every item to `read`. Call before the loop runs again, so that none is missed."""
        self.ticket.on_items = read

    async def items(self) -> AsyncGenerator[TicketItem, None]:
        """The items up to the end, for readers without a callback. Raises the work's error; leaving early
        cancels the work."""
        async with aclosing(aiter(self.ticket)) as items:  # type: ignore[type-var]
            async for item in items:
                if (
                    isinstance(item, TicketEnded)
                    and item.error is not None
                    and not isinstance(item.error, StoppedEarly)
                ):
                    raise item.error
                yield item

    async def read_chunks(self, should_stop: Callable[[Chunk], bool]) -> None:
        """Pass each chunk to `should_stop`; stop generating once it returns True. Raises the work's error."""
        async with aclosing(self.items()) as items:
            async for item in items:
                if isinstance(item, Chunk) and should_stop(item):
                    self.stop_early()
                    return

    async def read_text(self, should_stop: Callable[[str], bool]) -> str:
        """The text up to the chunk for which `should_stop` returns True. Raises the work's error."""
        pieces: list[str] = []

        def add(chunk: Chunk) -> bool:
            pieces.append(chunk.text)
            return should_stop(chunk.text)

        await self.read_chunks(add)
        return "".join(pieces)

    def cancel(self, reason: KeystrokeError | None = None) -> None:
        """Stop within one step. Idempotent; harmless after the end."""
        self.ticket.cancel(reason)

    def stop_early(self) -> None:
        """Stop generating; the work counts as completed."""
        self.ticket.cancel(StoppedEarly("The reader needs no more."))

    # Spans

    def current_receipt(self, until: CounterSnapshot | None = None) -> Receipt:
        """The receipt of the current span, up to `until` or so far."""
        return span_receipt(self, self._input_tokens or self.ticket.stats.prompt_tokens, until)

    def end_steered_span(self, item: TicketSteered) -> WorkOutcome:
        """End the span at the redirect; the next begins over the same session."""
        outcome = WorkOutcome("incomplete", self.current_receipt(item.counters), "steered")
        self._record(outcome)
        self.span_start, self.kept_tokens, self._input_tokens = item.counters, item.kept_tokens, item.length
        self.network_seconds = 0.0
        return outcome

    def final_outcome(self, item: TicketEnded) -> WorkOutcome:
        """The outcome of the last span."""
        if self._outcome is None:
            status, finish, error = _status(self._failure or item.error, self.ticket.finish)
            self._outcome = WorkOutcome(status, self.current_receipt(), finish, error)
        return self._outcome

    def fail(self, failure: KeystrokeError) -> WorkOutcome:
        """The reader failed on an item: stop the work and record it as failed."""
        self._failure = failure
        self.subscribe(lambda _items: None)
        self.cancel(failure)
        return WorkOutcome("failed", self.current_receipt(), error=failure)

    def _settle(self, item: TicketEnded) -> None:
        """Called once by the ticket, after its reader."""
        self._record(self.final_outcome(item))
        self._permit.settle(self._spent)

    def _record(self, outcome: WorkOutcome) -> None:
        self._spent += outcome.receipt.computed_tokens + outcome.receipt.output_tokens
        self._on_span_end(self, self.id, outcome)


def _status(error: KeystrokeError | None, finish: Finish | None) -> tuple[str, str, KeystrokeError | None]:
    if isinstance(error, StoppedEarly):
        return "completed", "stop", None
    if isinstance(error, Redirected):
        return "incomplete", "steered", error
    if isinstance(error, Interrupted):
        return "cancelled", "stop", error
    if error is not None:
        return "failed", "stop", error
    if finish is Finish.LENGTH:
        return "incomplete", "length", None
    if finish is Finish.UNMET:
        return "incomplete", "grammar", None
    return "completed", "stop", None


def span_receipt(work: Work, input_tokens: int, until: CounterSnapshot | None) -> Receipt:
    """The receipt of a work's current span, up to a snapshot (None: the ticket's own end, or now)."""
    ticket, kept_tokens = work.ticket, work.kept_tokens
    stats, timing = ticket.stats, ticket.timing
    base = work.span_start or CounterSnapshot()
    last = until or CounterSnapshot.of(stats)
    times = sorted(stats.step_seconds[base.steps : last.steps])
    spent_steps = last.steps - base.steps
    output = last.tokens - base.tokens
    reused = min(stats.reused if kept_tokens is None else kept_tokens, input_tokens)
    computed = last.computed - base.computed  # less than the remaining input if it was stopped early
    began = base.at or timing.submitted
    ended = last.at if until else timing.ended or time.perf_counter()
    started = base.at or timing.started or ended
    first = timing.first if timing.first > began else 0.0
    share = spent_steps / output if output else 1.0  # a step may give several tokens
    return Receipt(
        model=work.model,
        priority=ticket.priority.label,
        service_tier=ticket.tier.label,
        queue_ms=_ms(started - began),
        prefill_ms=_ms(last.prefill - base.prefill),
        decode_ms=_ms(sum(times)),
        network_ms=_ms(work.network_seconds),
        first_token_ms=_ms(first - began) if first else 0.0,
        total_ms=_ms(ended - began),
        input_tokens=input_tokens,
        reused_tokens=reused,
        computed_tokens=computed,
        output_tokens=output,
        steps=spent_steps,
        drafted_tokens=last.drafted - base.drafted,
        accepted_tokens=last.accepted - base.accepted,
        token_p50_ms=_ms(_quantile(times, 0.50) * share),
        token_p99_ms=_ms(_quantile(times, 0.99) * share),
        preemptions=ticket.preemptions,
        cost=round(work.price.cost(computed + reused, reused, output), 9),
    )


def usage(receipt: Receipt) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=receipt.input_tokens,
        output_tokens=receipt.output_tokens,
        total_tokens=receipt.input_tokens + receipt.output_tokens,
        input_tokens_details=InputTokenDetails(
            cached_tokens=receipt.reused_tokens,
            cache_write_tokens=receipt.input_tokens - receipt.reused_tokens,
        ),
    )


def _ms(seconds: float) -> float:
    return round(max(0.0, seconds) * 1e3, 3)


def _quantile(ordered: list[float], q: float) -> float:
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0
