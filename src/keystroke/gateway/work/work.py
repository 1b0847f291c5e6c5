"""One unit of work: a ticket with what was paid for it, settled exactly once however it ends.

Whoever submits work only consumes it. The permit, the receipt, the metrics and the usage are this
file's: they are written when the ticket ends (done, stopped, superseded, failed, its reader gone), never by
the reader. A steered answer is several responses over one ticket; each is a span with a receipt of its own,
and together they are what the limits are charged.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from keystroke.engine.generation import Finish
from keystroke.errors import Interrupted, KeystrokeError
from keystroke.gateway.access.keys import Caller
from keystroke.gateway.access.limits import Settles
from keystroke.gateway.work.receipts import Price, receipt
from keystroke.gateway.work.ticket import Ended, Enough, Item, Reading, Redirected, Steered, Ticket
from keystroke.protocol.response import Receipt


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a span ended. `status` is the response's; `finish` says why it stopped by itself."""

    status: str  # completed, incomplete, cancelled, failed
    receipt: Receipt
    finish: str = "stop"  # stop, length, steered, grammar
    error: KeystrokeError | None = None


Keep = Callable[["Work", str, Outcome], None]


class Work:
    """`id` names the span under way in the books. `keep` is told of every span that ended, once each."""

    def __init__(
        self,
        identity: str,
        ticket: Ticket,
        permit: Settles,
        *,
        model: str,
        price: Price,
        caller: Caller,
        live: bool,
        keep: Keep,
    ) -> None:
        self.id = identity
        self.ticket = ticket
        self.model = model
        self.caller = caller
        self.live = live  # for a buffer that is being typed in: its books are kept by the hour
        self.network_seconds = 0.0  # added to by whoever writes to the socket
        self._permit = permit
        self._price = price
        self._keep = keep
        self._input_tokens = ticket.job.input_tokens  # 0: a remote server counts them
        self._since: Reading | None = None
        self._kept: int | None = None  # tokens a steered span found in its session
        self._spent = 0
        self._failure: KeystrokeError | None = None
        self._outcome: Outcome | None = None
        ticket.on_end = self._settle

    # Steering the ticket

    def follow(self, read: Callable[[list[Item]], None]) -> None:
        """Give every item to `read`. Call before the loop runs again, so that none is missed."""
        self.ticket.on_items = read

    async def items(self) -> AsyncGenerator[Item, None]:
        """What comes of it, up to its end; for readers that need no callback. Raises what the work failed
        with; leaving early stops it."""
        async with aclosing(aiter(self.ticket)) as items:  # type: ignore[type-var]
            async for item in items:
                if isinstance(item, Ended) and item.error is not None and not isinstance(item.error, Enough):
                    raise item.error
                yield item

    def cancel(self, reason: KeystrokeError | None = None) -> None:
        """Stop within one step. Idempotent; harmless after the end."""
        self.ticket.cancel(reason)

    def enough(self) -> None:
        """The reader has all it wants: stop, and call that completed."""
        self.ticket.cancel(Enough("The reader has all it wants."))

    # Spans

    def paid(self, until: Reading | None = None) -> Receipt:
        """The receipt of the span under way, as it stands now."""
        return receipt(
            self.ticket,
            model=self.model,
            price=self._price,
            since=self._since,
            until=until,
            kept=self._kept,
            input_tokens=self._input_tokens or self.ticket.stats.prompt_tokens,
            network_seconds=self.network_seconds,
            now=time.perf_counter(),
        )

    def steered(self, item: Steered) -> Outcome:
        """The span ends where it was redirected; the next begins over the same session."""
        outcome = Outcome("incomplete", self.paid(item.reading), "steered")
        self._book(outcome)
        self._since, self._kept, self._input_tokens = item.reading, item.kept, item.length
        self.network_seconds = 0.0
        return outcome

    def ended(self, item: Ended) -> Outcome:
        """The outcome of the last span, for a reader that wants to tell it before the books are kept."""
        if self._outcome is None:
            status, finish, error = _status(self._failure or item.error, self.ticket.finish)
            self._outcome = Outcome(status, self.paid(), finish, error)
        return self._outcome

    def broke(self, failure: KeystrokeError) -> Outcome:
        """The reader failed on what it was given: the work is stopped, and failed whatever comes of it."""
        self._failure = failure
        self.follow(lambda _items: None)
        self.cancel(failure)
        return Outcome("failed", self.paid(), error=failure)

    def _settle(self, item: Ended) -> None:
        """Called once, by the ticket, after its reader."""
        self._book(self.ended(item))
        self._permit.settle(self._spent)

    def _book(self, outcome: Outcome) -> None:
        self._spent += outcome.receipt.computed_tokens + outcome.receipt.output_tokens
        self._keep(self, self.id, outcome)


def _status(error: KeystrokeError | None, finish: Finish | None) -> tuple[str, str, KeystrokeError | None]:
    if isinstance(error, Enough):
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
