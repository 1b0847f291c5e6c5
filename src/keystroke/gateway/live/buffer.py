"""One open buffer of a live connection: its mirror and its running suggestion.

Lives in the event loop and never waits there; engine work goes through the scheduler. At most one
generation runs per buffer: newer work takes its place. Every request it accepts is answered exactly once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from keystroke.analysis.rules import ProjectRules
from keystroke.assist.completion import (
    Extent,
    Hidden,
    LiveCompletion,
    Offer,
    Stream,
    Withheld,
    context_budget,
)
from keystroke.assist.completion.extent import line_before
from keystroke.assist.completion.second_opinion import Opinion
from keystroke.assist.completion.window import ContextFile
from keystroke.assist.next_edit import Other
from keystroke.assist.next_edit.prompt import Change
from keystroke.engine.generation import Chunk, GenerationParams
from keystroke.errors import InputError, Interrupted, KeystrokeError
from keystroke.gateway.access.keys import Caller
from keystroke.gateway.access.limits import Settles
from keystroke.gateway.live.audit import BufferAudit
from keystroke.gateway.live.next_edit import BufferNextEdit
from keystroke.gateway.live.next_edit_model import NextEditModel, editor
from keystroke.gateway.live.outcomes import BufferOutcomes
from keystroke.gateway.live.second_mind import Place, SecondMind
from keystroke.gateway.work.priority import Priority
from keystroke.gateway.work.registry import ServedModel
from keystroke.gateway.work.remote import RemoteJob
from keystroke.gateway.work.scheduler import Job
from keystroke.gateway.work.service import Service
from keystroke.gateway.work.ticket import Ended, Item
from keystroke.gateway.work.work import Work
from keystroke.protocol import live_messages as live
from keystroke.protocol.faults import detail
from keystroke.protocol.response import Receipt
from keystroke.text import Edit, apply_edits

log = logging.getLogger("keystroke.live")

IDLE = 0.7  # seconds without a key after which the prompt is brought up to date
STAYED = 0.15  # seconds after which a place the cursor went to is worth warming
SHOWN = 32  # suggestions whose fate may still be told
# Why the first mind showed nothing where a larger one may have something.
_OPEN = (Hidden.LOW_CONFIDENCE, Hidden.TYPING_FAST, Hidden.EMPTY, Hidden.LOOPS, Hidden.BREAKS_SYNTAX,
         Hidden.LINE_TOO_LONG, Hidden.UNLEARNED)  # fmt: skip


class Surroundings(Protocol):
    """What a buffer may ask of its connection."""

    trail: deque[Change]  # what was changed lately, in all buffers

    def say(self, event: live.LiveEvent) -> None: ...

    def context(self, buffer: LiveBuffer) -> list[ContextFile]: ...

    def others(self, buffer: LiveBuffer) -> dict[str, Other]: ...


@dataclass(slots=True)
class Ask:
    """A request that waits for its answer: about the buffer's text, or that text with what the editor's own
    list has selected put in (`selected`, which the answer then begins with)."""

    id: str
    version: int
    text: str
    cursor: int
    invoked: bool
    arrived: float
    selected: Edit | None = None
    told: str = ""  # the part of a block that was shown already


@dataclass(slots=True)
class SuggestionRun:
    """A generation under way. `stream` None: it only warms the cache."""

    stream: Stream | None
    work: Work
    began: float
    settled: bool = False


class LiveBuffer:
    def __init__(
        self,
        around: Surroundings,
        service: Service,
        entry: ServedModel,
        caller: Caller,
        opened: live.BufferOpen,
        completion: LiveCompletion,
        language: str | None,
        *,
        path: str | None,
        audit: bool,
        next_edit: bool,
        scope: str,
        outcomes: BufferOutcomes | None = None,
    ) -> None:
        self.name = opened.buffer
        self.path = path
        self.language = language
        self.text = opened.text
        self.version = opened.version
        self.completion = completion
        # Where the user is, if that is known.
        self.cursor = opened.cursor if opened.cursor is not None and opened.cursor <= len(opened.text) else 0
        self._remote = entry.model is None
        self.touched = time.monotonic()
        self._around = around
        self._service, self._entry, self._caller = service, entry, caller
        self._scope = f"live/{scope}/{opened.buffer}"
        self._affinity = f"live/{opened.buffer}"  # the same when the editor comes back on another socket
        self._run: SuggestionRun | None = None
        self._admission: asyncio.Task[None] | None = None  # where the budget is asked for elsewhere
        self._ask: Ask | None = None
        self._shown: OrderedDict[str, tuple[str, str]] = OrderedDict()  # id: the line, and what was offered
        self._key = 0.0  # when the last key arrived, perf_counter
        self._idle: asyncio.TimerHandle | None = None
        self._audit = BufferAudit(self.name, language, self._say, caller.id) if audit else None
        self._next: BufferNextEdit | None = None
        if next_edit:
            # What is changed in a file that may hold secrets is nobody else's business either.
            shared = completion.refusal(opened.text) is not Hidden.EXCLUDED
            self._next = BufferNextEdit(
                self.name,
                opened.text,
                language,
                self._say,
                path=path or opened.buffer,
                trail=around.trail if shared else None,
                asker=self._asker(path or opened.buffer),
            )
        self._second: SecondMind | None = None
        if completion.settings.second_opinion:
            self._second = SecondMind(
                service,
                entry,
                caller,
                completion,
                self._scope,
                self._revised,
                path=path,
                language=language,
            )
        self._outcomes = outcomes  # None: nobody asked that anything be learned
        self._closed = False

    # From the connection

    def opened(self) -> None:
        """Warm the context and audit the text."""
        refusal = self.completion.refusal(self.text)
        if refusal is None and self._remote:
            self._ready()
        elif refusal is not None:
            self._ready(warm=False, note=refusal)
        elif self._run is not None:
            self._ready(warm=False)  # a key came first: it warms what it needs
        else:
            self.completion.window.set_context(self._around.context(self))
            self._warm(announce=True)
        if self._audit is not None:
            self._audit.follow(self.text, self.version, ())
        if self._outcomes is not None:
            self._outcomes.tune()

    def obey(self, rules: ProjectRules) -> None:
        """What is inserted from now on follows the project's rules."""
        self.completion.rules = rules

    def change(self, edits: Sequence[Edit], version: int, cursor: int | None) -> None:
        """Follow the editor. Raises InputError, with nothing changed, for an edit outside the text."""
        text = self.text
        for edit in edits:
            text = apply_edits(text, (edit,))
        before, self.text, self.version = self.text, text, version
        self.touched = time.monotonic()
        self._key = time.perf_counter()
        if self._audit is not None:
            self._audit.follow(text, version, edits)
        if self._next is not None:
            self._next.follow(before, edits, text, version, self.cursor, self._around.others(self))
        if self._outcomes is not None:
            self._outcomes.follow(edits, text)
        self.completion.window.follow(edits)
        self.completion.rhythm.key(self.touched)
        if self._ask is not None:
            self._finish(Withheld(Hidden.SUPERSEDED))
        where = cursor if cursor is not None else self._guess(edits)
        if self._second is not None:
            self._second.follow(edits, text, where)
        if self._remote:
            where = None  # somebody else's machine is asked when the editor asks, not at every key
        if where is not None and where <= len(text):
            self.cursor = where
            self._begin(text, where, None, invoked=False)
        elif self._run is not None and self._run.stream is not None:
            self._stop_run()
        self._rest()

    def complete(self, asked: live.Complete) -> None:
        now = time.perf_counter()
        if self._ask is not None:
            self._finish(Withheld(Hidden.SUPERSEDED))
        began = self._key if self._key and now - self._key < 1.0 else now
        self._ask = Ask(asked.id, asked.version, self.text, asked.cursor, asked.invoked, began)
        if asked.version != self.version:
            self._finish(Withheld(Hidden.STALE))
            return
        try:
            self._assume(self._ask, asked)
        except InputError:
            self._ask = None
            raise
        self.cursor = asked.cursor
        extent = {"line": Extent.LINE, "block": Extent.BLOCK}.get(asked.extent)
        self._begin(self._ask.text, self._ask.cursor, extent, invoked=asked.invoked)
        self._rest()

    def _assume(self, ask: Ask, asked: live.Complete) -> None:
        """Check the cursor, and put in what the editor's list has selected. Raises InputError."""
        if asked.cursor > len(self.text):
            raise InputError(
                f"The cursor {asked.cursor} is outside the buffer, which has {len(self.text)} characters.",
                param="cursor",
            )
        if asked.selected is not None:
            edit = Edit(asked.selected.start, asked.selected.end, asked.selected.text)
            ask.text = apply_edits(self.text, (edit,))
            ask.cursor, ask.selected = edit.start + len(edit.text), edit

    def moved(self, said: live.BufferCursor) -> None:
        """Warm the context where the user went, once they stay."""
        if said.version != self.version or said.cursor > len(self.text) or said.cursor == self.cursor:
            return
        self.cursor = said.cursor
        if not self._remote and self.completion.refusal(self.text) is None:
            self._rest(STAYED)

    def cancel(self, request: str) -> bool:
        if self._ask is None or self._ask.id != request:
            return False
        self._finish(Withheld(Hidden.CANCELLED))
        return True

    def feedback(self, said: live.Feedback) -> None:
        if self._outcomes is not None:
            self._outcomes.told(said)
        if self._next is not None and self._next.feedback(said, self.text):
            return
        shown = self._shown.get(said.id)
        if shown is not None and said.outcome == "dismissed":
            self.completion.dismissed.add(*shown)

    def ask_next_edit(self, asked: live.NextEditAsk) -> None:
        """Say again what stands, or that nothing does."""
        if asked.version != self.version:
            self._say(live.NextEditDropped(id=asked.id, buffer=self.name, reason=Hidden.STALE))
        elif self._next is None:
            self._say(live.NextEditDropped(id=asked.id, buffer=self.name, reason=Hidden.DISABLED))
        else:
            self._next.ask(asked.id)

    def close(self) -> None:
        if self._ask is not None:
            self._finish(Withheld(Hidden.CANCELLED))
        self._stop_run()
        if self._idle is not None:
            self._idle.cancel()
        for part in (self._audit, self._next, self._second, self._outcomes):
            if part is not None:
                part.close()
        self._closed = True

    @property
    def busy(self) -> bool:
        return self._run is not None

    # Suggestions

    def _begin(self, text: str, cursor: int, extent: Extent | None, *, invoked: bool) -> None:
        """Answer from what is known, join what runs, or compute."""
        known = self.completion.look(text, cursor, invoked=invoked)
        if known is not None and not (extent is Extent.BLOCK and isinstance(known, Withheld)):
            if self._ask is not None:
                self._finish(known, known=True)
            return
        run = self._run
        if run is not None and run.stream is not None:
            typed = run.stream.typed(text, cursor)
            if typed is not None and typed >= 0 and (extent is None or extent is run.stream.extent):
                self._grown(run)
                return
        self._compute(self.completion.begin(text, cursor, extent), Priority.GHOST)

    def _compute(self, stream: Stream, priority: Priority) -> None:
        prompt, params = stream.prompt, stream.params()
        job: Job | RemoteJob = Job(prompt.tokens, params, affinity=self._affinity, predictor=stream.predictor)
        if self._remote:
            job = RemoteJob(params, prompt=prompt.prefix, suffix=prompt.suffix)
        self._submit(job, priority, stream)

    def _submit(
        self, job: Job | RemoteJob, priority: Priority, stream: Stream | None, announce: bool = False
    ) -> None:
        self._stop_run()
        if self._service.shares_budget(self._entry):
            admission = self._admit_then_submit(job, priority, stream, announce)
            self._admission = asyncio.get_running_loop().create_task(admission)
        else:
            self._submit_now(job, priority, stream, announce)

    async def _admit_then_submit(
        self, job: Job | RemoteJob, priority: Priority, stream: Stream | None, announce: bool
    ) -> None:
        """Other gateways take from the same budget: ask there first. Newer work of the buffer ends this."""
        try:
            permit = await self._service.admitted(self._entry, job, self._caller)
        except KeystrokeError as error:
            self._refused(error, announce)
            return
        self._admission = None
        self._submit_now(job, priority, stream, announce, permit)

    def _refused(self, error: KeystrokeError, announce: bool) -> None:
        if self._ask is not None:
            ask, self._ask = self._ask, None
            self._fail(error, ask.id)
        elif announce:  # the buffer is open all the same; the first key warms it
            self._ready(warm=False, note=error.code)

    def _submit_now(
        self,
        job: Job | RemoteJob,
        priority: Priority,
        stream: Stream | None,
        announce: bool,
        permit: Settles | None = None,
    ) -> None:
        try:
            work = self._service.submit(
                self._entry,
                job,
                self._caller,
                priority=priority,
                buffer=self._scope,
                live=True,
                permit=permit,
            )
        except KeystrokeError as error:
            self._refused(error, announce)
            return
        run = SuggestionRun(stream, work, time.perf_counter())
        work.follow(partial(self._items, run, announce))
        self._run = run

    def _items(self, run: SuggestionRun, announce: bool, items: list[Item]) -> None:
        for item in items:
            if isinstance(item, Chunk):
                if run.stream is not None and not run.stream.done:
                    run.stream.feed(item)
            elif isinstance(item, Ended):
                self._over(run, item, announce)
        if run.stream is not None and self._run is run and not run.settled:
            self._grown(run)
        if run.work.ticket.done and self._run is run:
            self._run = None
            if run.stream is not None and self._ask is not None:
                self._finish(Withheld(Hidden.FAILED))  # it was stopped from elsewhere; nobody waits in vain

    def _grown(self, run: SuggestionRun) -> None:
        """The stream said more, or the user typed more: answer if that decides it."""
        stream, completion = run.stream, self.completion
        assert stream is not None
        if stream.done and not run.settled:
            run.settled = True
            run.work.enough()
            if self._ask is None:
                completion.keep(stream)
                return
        if self._ask is None:
            # A line whose beginning was shown is said to its end, also for a text that is only assumed.
            if not stream.begun and stream.typed(self.text, self.cursor) is None:
                self._stop_run()
            return
        ask, seen = self._ask, stream.begun
        answer = completion.answer(stream, ask.text, ask.cursor, invoked=ask.invoked)
        if answer is None:
            return
        if isinstance(answer, Withheld) and answer.reason is Hidden.SUPERSEDED:
            # Typing and the model parted ways while the user waits for an answer here: begin anew.
            self._stop_run()
            self._compute(completion.begin(ask.text, ask.cursor), Priority.GHOST)
            return
        if isinstance(answer, Offer) and not answer.done:
            if answer.text != ask.told:
                ask.told = answer.text
                self._say(self._suggestion(ask, answer, run))
            return
        self._finish(answer, run=run, known=isinstance(answer, Offer) and 0 < answer.typed < seen)

    def _finish(
        self, answer: Offer | Withheld, *, run: SuggestionRun | None = None, known: bool = False
    ) -> None:
        ask, self._ask = self._ask, None
        assert ask is not None
        self._reconsider(ask, answer)
        if self._outcomes is not None and ask.selected is None and ask.text == self.text:
            self._outcomes.answered(ask.id, ask.text, ask.cursor, answer)
        if isinstance(answer, Withheld):
            paid = self._paid(ask, run, "none" if run is None else "computed")
            self._say(
                live.NotShown(
                    id=ask.id,
                    buffer=self.name,
                    version=ask.version,
                    reason=answer.reason,
                    hidden=answer.text,
                    receipt=paid,
                )
            )
            return
        self._say(self._suggestion(ask, answer, None if known else run))
        line = line_before(ask.text, ask.cursor)
        self._shown[ask.id] = (line, answer.text)
        while len(self._shown) > SHOWN:
            self._shown.popitem(last=False)
        if not self._remote and (self._run is None or self._run.settled):
            ahead = self.completion.ahead(ask.text, ask.cursor, answer)
            if ahead is not None:
                self._compute(ahead, Priority.BACKGROUND)

    def _reconsider(self, ask: Ask, answer: Offer | Withheld) -> None:
        """Let the larger model look at what was answered."""
        if self._second is None or ask.selected is not None or ask.text != self.text:
            return
        shown = answer.text if isinstance(answer, Offer) else ""
        if shown or (isinstance(answer, Withheld) and answer.reason in _OPEN):
            self._second.heard(
                Place(ask.id, ask.version, ask.text, ask.cursor, shown, ask.invoked, ask.arrived)
            )

    def _revised(self, place: Place, opinion: Opinion, extent: Extent, paid: Receipt) -> None:
        """The larger model's opinion, while the text it read stands."""
        if place.version != self.version:
            return
        self._shown[place.id] = (line_before(place.text, place.cursor), opinion.text)
        if self._outcomes is not None:
            self._outcomes.revised(place.id, opinion.text, paid.model)
        total = (time.perf_counter() - place.arrived) * 1e3
        self._say(
            live.SuggestionRevised(
                id=place.id,
                buffer=self.name,
                version=place.version,
                verdict=opinion.verdict.value,
                start=place.cursor,
                end=place.cursor,
                text=opinion.text,
                extent=extent.value,
                confidence=round(opinion.confidence, 4),
                receipt=_live_receipt(paid, "computed", total),
            )
        )

    def _suggestion(self, ask: Ask, offer: Offer, run: SuggestionRun | None) -> live.Suggestion:
        if run is not None:
            source = "computed" if run.began >= ask.arrived - 0.001 else "continued"
        else:
            source = "typed_through" if offer.typed else "cached"
        put = ask.selected
        return live.Suggestion(
            id=ask.id,
            buffer=self.name,
            version=ask.version,
            start=ask.cursor if put is None else put.start,
            end=ask.cursor if put is None else put.end,
            text=offer.text if put is None else put.text + offer.text,
            done=offer.done,
            extent=offer.extent.value,
            confidence=round(offer.confidence, 4),
            receipt=self._paid(ask, run, source),
        )

    def _paid(self, ask: Ask, run: SuggestionRun | None, source: Any) -> live.LiveReceipt:
        total = (time.perf_counter() - ask.arrived) * 1e3
        if run is None:
            return live.LiveReceipt(model=self._entry.name, source=source, total_ms=round(total, 3))
        return _live_receipt(run.work.paid(), source, total)

    def _over(self, run: SuggestionRun, end: Ended, announce: bool) -> None:
        failure = None if isinstance(end.error, Interrupted) else end.error
        if self._run is run and failure is not None and self._ask is not None:
            ask, self._ask = self._ask, None
            self._fail(failure, ask.id)
        if announce and not self._closed:
            paid = run.work.ended(end).receipt
            note = "" if failure is None else failure.code
            self._ready(
                warm=failure is None, note=note, receipt=_live_receipt(paid, "computed", paid.total_ms)
            )

    def _stop_run(self) -> None:
        run, self._run = self._run, None
        admission, self._admission = self._admission, None
        if admission is not None:
            admission.cancel()
        if run is not None:
            run.work.cancel(Interrupted("The text went another way."))

    def _guess(self, edits: Sequence[Edit]) -> int | None:
        """Where the caret is after one insertion that looks typed."""
        if len(edits) == 1 and edits[0].text and edits[0].end - edits[0].start <= 64:
            return edits[0].start + len(edits[0].text)
        return None

    # When nobody types

    def _warm(self, *, announce: bool = False) -> None:
        cursor = min(self.cursor, len(self.text)) if self.cursor else len(self.text)
        prompt = self.completion.window.prompt(self.text, cursor, refresh=True)
        self._submit(
            Job(prompt.tokens, GenerationParams(max_tokens=0), warm=True, affinity=self._affinity),
            Priority.BACKGROUND,
            None,
            announce,
        )

    def _rest(self, seconds: float = IDLE) -> None:
        if self._idle is not None:
            self._idle.cancel()
        self._idle = asyncio.get_running_loop().call_later(seconds, self._rested, seconds < IDLE)

    def _rested(self, elsewhere: bool) -> None:
        """Bring the parts of the prompt that lag behind up to date, and compute them now. `elsewhere`: the
        user went to another place, whose text is not in the prompt yet."""
        if self._remote or self._closed or self._run is not None or self._ask is not None:
            return
        if self.completion.refusal(self.text) is not None:
            return
        window = self.completion.window
        stale = window.lagging or elsewhere
        stale |= self.completion.grow(
            context_budget(self.completion.settings, self._entry.scheduler.prefill_rate)
        )
        if window.set_context(self._around.context(self)) or stale:
            self._warm()

    def _asker(self, path: str) -> NextEditModel | None:
        """The way to ask a model for edits; None where none has learned them or may see the file."""
        known = editor(self._service.registry, self._entry).edits
        if known is None or self.completion.refusal(self.text) is not None:
            return None
        return NextEditModel(
            self._service,
            self._entry,
            self._caller,
            self.completion.settings,
            path=path,
            language=self.language,
            rules=lambda: self.completion.rules,
        )

    def _say(self, event: live.LiveEvent) -> None:
        if self._closed:
            return
        if self._outcomes is not None and isinstance(event, live.NextEdit):
            self._outcomes.offered(event)
        self._around.say(event)

    def _ready(self, **how: Any) -> None:
        self._say(live.Ready(buffer=self.name, version=self.version, model=self._entry.name, **how))

    def _fail(self, error: KeystrokeError, request: str) -> None:
        self._say(live.LiveError(status=error.status, error=detail(error), id=request, buffer=self.name))


def _live_receipt(paid: Receipt, source: Any, total_ms: float) -> live.LiveReceipt:
    """What the editor is shown of a receipt; `total_ms` counts from the key, not from the queue."""
    return live.LiveReceipt(
        model=paid.model,
        source=source,
        prompt_tokens=paid.input_tokens,
        reused_tokens=paid.reused_tokens,
        computed_tokens=paid.computed_tokens,
        output_tokens=paid.output_tokens,
        queue_ms=paid.queue_ms,
        prefill_ms=paid.prefill_ms,
        decode_ms=paid.decode_ms,
        total_ms=round(total_ms, 3),
    )
