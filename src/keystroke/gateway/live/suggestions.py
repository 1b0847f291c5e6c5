"""Runs the suggestions of one live buffer: generations at the cursor, warm-ups and the events that answer
requests.

It works in the event loop and never blocks; engine work goes through the scheduler. At most one generation
runs per buffer; newer work replaces it. Every accepted request is answered exactly once.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from keystroke.assist.completion import (
    Extent,
    LiveCompletion,
    ShownCompletion,
    SuggestionStream,
    WithheldCompletion,
    WithheldReason,
    context_budget,
)
from keystroke.assist.completion.extent import line_before
from keystroke.assist.completion.second_opinion import Opinion
from keystroke.assist.completion.window import ContextFile
from keystroke.engine.generation import Chunk, GenerationParams
from keystroke.errors import InputError, Interrupted, KeystrokeError
from keystroke.gateway.access.limits import Permit
from keystroke.gateway.live.mirror import BufferMirror
from keystroke.gateway.live.outcomes import BufferOutcomes
from keystroke.gateway.live.second_opinion import SecondOpinion, SuggestionRequest
from keystroke.gateway.work.model_client import ModelAccess
from keystroke.gateway.work.priority import Priority
from keystroke.gateway.work.remote import RemoteJob
from keystroke.gateway.work.scheduler import Job
from keystroke.gateway.work.ticket import TicketEnded, TicketItem
from keystroke.gateway.work.work import Work
from keystroke.protocol import live_messages as live
from keystroke.protocol.response import Receipt
from keystroke.text import Edit, apply_edits

IDLE = 0.7  # seconds without a key after which the prompt is brought up to date
STAYED = 0.15  # seconds after which the context at a new cursor is warmed
# Seconds after an answer before anything is computed ahead: with few cores it would keep the language server
# and the editor from showing the answer.
AHEAD = 0.02
SHOWN = 32  # suggestions for which feedback is still accepted
# Reasons for which the fast model showed nothing while the larger one may have something to show.
_OPEN = (WithheldReason.LOW_CONFIDENCE, WithheldReason.TYPING_FAST, WithheldReason.EMPTY,
         WithheldReason.LOOPS, WithheldReason.BREAKS_SYNTAX, WithheldReason.LINE_TOO_LONG,
         WithheldReason.UNTRAINED_LANGUAGE)  # fmt: skip


@dataclass(slots=True)
class SuggestionRun:
    """A running generation. `stream` None: it only warms the cache. `announce`: its end makes the buffer
    ready."""

    stream: SuggestionStream | None
    work: Work
    began: float
    announce: bool
    finished: bool = False


class SuggestionRunner:
    """`context` returns pieces of other files for the prompt; `send` sends an event to the client."""

    def __init__(
        self,
        mirror: BufferMirror,
        completion: LiveCompletion,
        model: ModelAccess,
        *,
        scope: str,
        send: Callable[[live.LiveEvent], None],
        context: Callable[[], list[ContextFile]],
        outcomes: BufferOutcomes | None = None,
    ) -> None:
        self._mirror, self._completion, self._model = mirror, completion, model
        self._send, self._context, self._outcomes = send, context, outcomes
        self._scope = f"live/{scope}/{mirror.name}"
        self._affinity = f"live/{mirror.name}"  # the same when the editor reconnects
        self._remote = model.entry.model is None
        self._run: SuggestionRun | None = None
        self._admission: asyncio.Task[None] | None = None  # where the budget is shared with other gateways
        self._pending: SuggestionRequest | None = None
        self._shown: OrderedDict[str, tuple[str, str]] = OrderedDict()  # id: the line, and what was shown
        self._last_key = 0.0  # perf_counter
        self._idle: asyncio.TimerHandle | None = None
        self._ahead: asyncio.TimerHandle | None = None
        self._closed = False
        self._second: SecondOpinion | None = None
        if completion.settings.second_opinion:
            self._second = SecondOpinion(
                mirror, completion, model, scope=self._scope, on_opinion=self._send_opinion
            )

    @property
    def busy(self) -> bool:
        return self._run is not None

    def open(self) -> None:
        """Announce the buffer; first warm its context where a model here completes it."""
        refusal = self._completion.refusal(self._mirror.text)
        if refusal is None and self._remote:
            self._send_ready()
        elif refusal is not None:
            self._send_ready(warm=False, note=refusal)
        elif self._run is not None:
            self._send_ready(warm=False)  # a key came first and warms what it needs
        else:
            self._completion.refresh(self._context(), 0)
            self._warm_up(announce=True)

    def apply_edits(self, edits: Sequence[Edit], cursor: int | None) -> None:
        """The mirror was edited: answer a pending request and begin a suggestion at the cursor."""
        text = self._mirror.text
        self._last_key = time.perf_counter()
        self._completion.apply_edits(edits, time.monotonic())
        if self._pending is not None:
            self._finish(WithheldCompletion(WithheldReason.SUPERSEDED))
        at = cursor if cursor is not None else _guess_cursor(edits)
        if self._second is not None:
            self._second.apply_edits(edits, text, at)
        if at is not None and at <= len(text) and not self._remote:
            # A remote model is only called when the editor asks.
            self._mirror.cursor = at
            self._begin(text, at, None, invoked=False)
        elif self._run is not None and self._run.stream is not None:
            self._stop()
        self._restart_idle_timer()

    def complete(self, request: live.Complete) -> None:
        now, mirror = time.perf_counter(), self._mirror
        if self._pending is not None:
            self._finish(WithheldCompletion(WithheldReason.SUPERSEDED))
        began = self._last_key if self._last_key and now - self._last_key < 1.0 else now
        pending = SuggestionRequest(
            request.id, request.version, mirror.text, request.cursor, request.invoked, began
        )
        if request.version == mirror.version:
            _insert_selected(pending, request)
        self._pending = pending
        if request.version != mirror.version:
            self._finish(WithheldCompletion(WithheldReason.STALE))
            return
        mirror.cursor = request.cursor
        extent = {"line": Extent.LINE, "block": Extent.BLOCK}.get(request.extent)
        self._begin(pending.text, pending.cursor, extent, invoked=request.invoked)
        self._restart_idle_timer()

    def move_cursor(self) -> None:
        """The mirror's cursor moved: warm the context there, once it stays."""
        if not self._remote and self._completion.refusal(self._mirror.text) is None:
            self._restart_idle_timer(STAYED)

    def cancel(self, request: str) -> bool:
        if self._pending is None or self._pending.id != request:
            return False
        self._finish(WithheldCompletion(WithheldReason.CANCELLED))
        return True

    def apply_feedback(self, feedback: live.Feedback) -> None:
        shown = self._shown.get(feedback.id)
        if shown is not None and feedback.outcome == "dismissed":
            self._completion.dismiss(*shown)

    def close(self) -> None:
        if self._pending is not None:
            self._finish(WithheldCompletion(WithheldReason.CANCELLED))
        self._stop()
        if self._idle is not None:
            self._idle.cancel()
        if self._second is not None:
            self._second.close()
        self._closed = True

    # Running

    def _begin(self, text: str, cursor: int, extent: Extent | None, *, invoked: bool) -> None:
        """Answer from the cache, join the running generation, or start one."""
        cached = self._completion.answer(text, cursor, invoked=invoked)
        if cached is not None and not (extent is Extent.BLOCK and isinstance(cached, WithheldCompletion)):
            if self._pending is not None:
                self._finish(cached)
            return
        run = self._run
        if run is not None and run.stream is not None:
            typed = run.stream.typed_length(text, cursor)
            if typed is not None and typed >= 0 and (extent is None or extent is run.stream.extent):
                self._on_progress(run, run.stream)
                return
        self._generate(self._completion.begin(text, cursor, extent), Priority.GHOST)

    def _generate(self, stream: SuggestionStream, priority: Priority) -> None:
        prompt, params = stream.prompt, stream.params()
        job: Job | RemoteJob = Job(prompt.tokens, params, affinity=self._affinity, predictor=stream.predictor)
        if self._remote:
            job = RemoteJob(params, prompt=prompt.prefix, suffix=prompt.suffix)
        self._submit(job, priority, stream)

    def _submit(
        self,
        job: Job | RemoteJob,
        priority: Priority,
        stream: SuggestionStream | None,
        announce: bool = False,
    ) -> None:
        self._stop()
        start = partial(self._start, job, priority, stream, announce)
        if self._model.service.has_shared_budget(self._model.entry):
            admission = self._admit_then_start(job, start, announce)
            self._admission = asyncio.get_running_loop().create_task(admission)
        else:
            start(None)

    async def _admit_then_start(
        self, job: Job | RemoteJob, start: Callable[[Permit | None], None], announce: bool
    ) -> None:
        """Ask for a budget that other gateways share. Newer work of the buffer cancels this."""
        try:
            permit = await self._model.service.admit_shared(self._model.entry, job, self._model.caller)
        except KeystrokeError as error:
            self._on_refused(error, announce)
            return
        self._admission = None
        start(permit)

    def _start(
        self,
        job: Job | RemoteJob,
        priority: Priority,
        stream: SuggestionStream | None,
        announce: bool,
        permit: Permit | None,
    ) -> None:
        model = self._model
        try:
            work = model.service.submit(
                model.entry,
                job,
                model.caller,
                priority=priority,
                buffer=self._scope,
                live=True,
                permit=permit,
            )
        except KeystrokeError as error:
            self._on_refused(error, announce)
            return
        self._run = run = SuggestionRun(stream, work, time.perf_counter(), announce)
        work.subscribe(partial(self._on_items, run))

    def _stop(self) -> None:
        self._cancel_ahead()
        run, self._run = self._run, None
        admission, self._admission = self._admission, None
        if admission is not None:
            admission.cancel()
        if run is not None:
            run.work.cancel(Interrupted("The text went another way."))

    def _on_refused(self, error: KeystrokeError, announce: bool) -> None:
        if self._pending is not None:
            self._fail(error)
        elif announce:  # the buffer is open all the same; the first key warms it
            self._send_ready(warm=False, note=error.code)

    def _on_items(self, run: SuggestionRun, items: list[TicketItem]) -> None:
        stream = run.stream
        for item in items:
            if isinstance(item, Chunk):
                if stream is not None and not stream.done:
                    stream.feed(item)
            elif isinstance(item, TicketEnded):
                self._on_end(run, item)
        if stream is not None and self._run is run and not run.finished:
            self._on_progress(run, stream)
        if run.work.ticket.done and self._run is run:
            self._run = None
            if stream is not None and self._pending is not None:
                self._finish(WithheldCompletion(WithheldReason.FAILED))  # it was stopped from elsewhere

    def _on_end(self, run: SuggestionRun, end: TicketEnded) -> None:
        failure = None if isinstance(end.error, Interrupted) else end.error
        if self._run is run and failure is not None and self._pending is not None:
            self._fail(failure)
        if run.announce and not self._closed:
            receipt = run.work.final_outcome(end).receipt
            self._send_ready(
                warm=failure is None,
                note="" if failure is None else failure.code,
                receipt=_live_receipt(receipt, "computed", receipt.total_ms),
            )

    def _on_progress(self, run: SuggestionRun, stream: SuggestionStream) -> None:
        """The stream grew, or the user typed more: answer if that decides it."""
        completion, pending = self._completion, self._pending
        if stream.done and not run.finished:
            run.finished = True
            run.work.stop_early()
            if pending is None:
                completion.store(stream)
                return
        if pending is None:
            # A line whose beginning was shown is generated to its end, also for a text that is only assumed.
            mirror = self._mirror
            if not stream.visible_end and stream.typed_length(mirror.text, mirror.cursor) is None:
                self._stop()
            return
        visible = stream.visible_end
        answer = completion.answer(pending.text, pending.cursor, stream, invoked=pending.invoked)
        if answer is None:
            return
        if isinstance(answer, WithheldCompletion) and answer.reason is WithheldReason.SUPERSEDED:
            # The user typed something else while this request waits: start again.
            self._stop()
            self._generate(completion.begin(pending.text, pending.cursor), Priority.GHOST)
        elif isinstance(answer, ShownCompletion) and not answer.done:
            if answer.text != pending.shown:
                pending.shown = answer.text
                self._send(self._suggestion(pending, answer, run))
        elif isinstance(answer, ShownCompletion) and 0 < answer.typed < visible:
            self._finish(answer)  # it is on the screen already
        else:
            self._finish(answer, run)

    # Answers

    def _finish(self, answer: ShownCompletion | WithheldCompletion, run: SuggestionRun | None = None) -> None:
        """Answer the pending request. `run` None: nothing was computed for it."""
        pending, self._pending = self._pending, None
        assert pending is not None
        if pending.selected is None and pending.text == self._mirror.text:
            self._request_second_opinion(pending, answer)
            if self._outcomes is not None:
                self._outcomes.record_answer(pending.id, pending.text, pending.cursor, answer)
        if isinstance(answer, WithheldCompletion):
            receipt = self._receipt(pending, run, "none" if run is None else "computed")
            self._send(
                live.NotShown(
                    **self._place(pending), reason=answer.reason, hidden=answer.text, receipt=receipt
                )
            )
            if run is not None:
                self._compute_ahead(pending.version, partial(self._warm_next_word, pending))
            return
        self._send(self._suggestion(pending, answer, run))
        self._shown[pending.id] = (line_before(pending.text, pending.cursor), answer.text)
        while len(self._shown) > SHOWN:
            self._shown.popitem(last=False)
        self._compute_ahead(pending.version, partial(self._prefetch, pending, answer))

    def _request_second_opinion(
        self, request: SuggestionRequest, answer: ShownCompletion | WithheldCompletion
    ) -> None:
        request.shown = answer.text if isinstance(answer, ShownCompletion) else ""
        is_open = isinstance(answer, WithheldCompletion) and answer.reason in _OPEN
        if self._second is not None and (request.shown or is_open):
            self._second.request(request)

    def _send_opinion(
        self, request: SuggestionRequest, opinion: Opinion, extent: Extent, receipt: Receipt
    ) -> None:
        """Send the larger model's opinion if the text it read is still current."""
        if request.version != self._mirror.version:
            return
        self._shown[request.id] = (line_before(request.text, request.cursor), opinion.text)
        if self._outcomes is not None:
            self._outcomes.record_revision(request.id, opinion.text, receipt.model)
        self._send(
            live.SuggestionRevised(
                **self._place(request),
                verdict=opinion.verdict.value,
                start=request.cursor,
                end=request.cursor,
                text=opinion.text,
                extent=extent.value,
                confidence=round(opinion.confidence, 4),
                receipt=_live_receipt(receipt, "computed", _milliseconds_since(request.arrived)),
            )
        )

    def _suggestion(
        self, pending: SuggestionRequest, answer: ShownCompletion, run: SuggestionRun | None
    ) -> live.Suggestion:
        if run is not None:
            source = "computed" if run.began >= pending.arrived - 0.001 else "continued"
        else:
            source = "typed_through" if answer.typed else "cached"
        put = pending.selected
        return live.Suggestion(
            **self._place(pending),
            start=pending.cursor if put is None else put.start,
            end=pending.cursor if put is None else put.end,
            text=answer.text if put is None else put.text + answer.text,
            done=answer.done,
            extent=answer.extent.value,
            confidence=round(answer.confidence, 4),
            receipt=self._receipt(pending, run, source),
        )

    def _place(self, request: SuggestionRequest) -> dict[str, Any]:
        """The fields that name a request in its answer."""
        return {"id": request.id, "buffer": self._mirror.name, "version": request.version}

    def _receipt(
        self, pending: SuggestionRequest, run: SuggestionRun | None, source: Any
    ) -> live.LiveReceipt:
        total = _milliseconds_since(pending.arrived)
        if run is None:
            return live.LiveReceipt(model=self._model.entry.name, source=source, total_ms=round(total, 3))
        return _live_receipt(run.work.current_receipt(), source, total)

    def _send_ready(self, **fields: Any) -> None:
        mirror = self._mirror
        if not self._closed:
            self._send(
                live.Ready(buffer=mirror.name, version=mirror.version, model=self._model.entry.name, **fields)
            )

    def _fail(self, error: KeystrokeError) -> None:
        pending, self._pending = self._pending, None
        assert pending is not None
        self._send(live.live_error(error, pending.id, self._mirror.name))

    # While nobody types

    def _compute_ahead(self, version: int, work: Callable[[], None]) -> None:
        """Do `work` in a moment if the text is the same then, unless something is being computed."""

        def begin() -> None:
            if self._pending is None and self._mirror.version == version and not self._is_computing:
                work()

        self._cancel_ahead()
        if not self._remote and not self._is_computing:
            self._ahead = asyncio.get_running_loop().call_later(AHEAD, begin)

    @property
    def _is_computing(self) -> bool:
        return self._run is not None and not self._run.finished

    def _cancel_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.cancel()
            self._ahead = None

    def _prefetch(self, answered: SuggestionRequest, answer: ShownCompletion) -> None:
        following = self._completion.prefetch(answered.text, answered.cursor, answer)
        if following is not None:
            self._generate(following, Priority.BACKGROUND)

    def _warm_up(self, *, announce: bool = False) -> None:
        mirror = self._mirror
        cursor = min(mirror.cursor, len(mirror.text)) if mirror.cursor else len(mirror.text)
        self._warm(self._completion.warm_up_prompt(mirror.text, cursor).tokens, announce)

    def _warm_next_word(self, answered: SuggestionRequest) -> None:
        """Compute the prompt that a letter at the cursor will need, if it is not the one just computed."""
        tokens = self._completion.next_word_prompt(answered.text, answered.cursor)
        if tokens is not None:
            self._warm(tokens)

    def _warm(self, tokens: Sequence[int], announce: bool = False) -> None:
        job = Job(tokens, GenerationParams(max_tokens=0), warm=True, affinity=self._affinity)
        self._submit(job, Priority.BACKGROUND, None, announce)

    def _restart_idle_timer(self, seconds: float = IDLE) -> None:
        if self._idle is not None:
            self._idle.cancel()
        self._idle = asyncio.get_running_loop().call_later(seconds, self._on_idle, seconds < IDLE)

    def _on_idle(self, moved: bool) -> None:
        """Update the parts of the prompt that lag behind, and warm them. `moved`: the cursor went to a place
        whose text is not in the prompt yet."""
        if self._remote or self._closed or self._run is not None or self._pending is not None:
            return
        if self._completion.refusal(self._mirror.text) is not None:
            return
        rate = self._model.entry.scheduler.prefill_rate
        budget = context_budget(self._completion.settings, rate)
        if self._completion.refresh(self._context(), budget) or moved:
            self._warm_up()


def _insert_selected(pending: SuggestionRequest, request: live.Complete) -> None:
    """Insert what the editor's own list has selected. Raises InputError for a cursor outside the text."""
    if request.cursor > len(pending.text):
        raise InputError(
            f"The cursor {request.cursor} is outside the buffer, which has {len(pending.text)} characters.",
            param="cursor",
        )
    if request.selected is not None:
        edit = Edit(request.selected.start, request.selected.end, request.selected.text)
        pending.text = apply_edits(pending.text, (edit,))
        pending.cursor, pending.selected = edit.start + len(edit.text), edit


def _guess_cursor(edits: Sequence[Edit]) -> int | None:
    """Where the cursor is after a single insertion that looks typed."""
    if len(edits) == 1 and edits[0].text and edits[0].end - edits[0].start <= 64:
        return edits[0].start + len(edits[0].text)
    return None


def _milliseconds_since(start: float) -> float:
    return (time.perf_counter() - start) * 1e3


def _live_receipt(receipt: Receipt, source: Any, total_ms: float) -> live.LiveReceipt:
    """The part of a receipt that editors get; `total_ms` counts from the key, not from the queue."""
    return live.LiveReceipt(
        model=receipt.model,
        source=source,
        prompt_tokens=receipt.input_tokens,
        reused_tokens=receipt.reused_tokens,
        computed_tokens=receipt.computed_tokens,
        output_tokens=receipt.output_tokens,
        queue_ms=receipt.queue_ms,
        prefill_ms=receipt.prefill_ms,
        decode_ms=receipt.decode_ms,
        total_ms=round(total_ms, 3),
    )
