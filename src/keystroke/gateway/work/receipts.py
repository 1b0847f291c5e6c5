"""Receipts: what a response cost and where its time went.

Computed once, at the end, from counters and timestamps. A steered answer is several responses over one
generation, so a receipt covers the span between two snapshots of the same counters.
"""

from __future__ import annotations

import time
from typing import Protocol

from keystroke.agent.chat.receipt import Price
from keystroke.gateway.work.ticket import CounterSnapshot, Ticket
from keystroke.protocol.response import InputTokenDetails, Receipt, ResponseUsage


class MeasuredWork(Protocol):
    """The parts of a work that its receipts are made from."""

    ticket: Ticket
    model: str
    price: Price
    kept_tokens: int | None
    span_start: CounterSnapshot | None
    network_seconds: float


def span_receipt(work: MeasuredWork, input_tokens: int, until: CounterSnapshot | None) -> Receipt:
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
