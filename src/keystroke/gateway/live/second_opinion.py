"""The second opinion: the larger model completes where the fast model has answered, and may revise what it
showed.

It begins when typing pauses, with the fast model's text as its draft (as text, since the two models have
different tokenizers), and stops at the first key that contradicts it. It sends at most one opinion per
request, and only while the text it read is current; what it generated is cached in any case. It works in the
event loop; generation goes through the larger model's own queue.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from keystroke.assist.completion import Extent, LiveCompletion, ShownCompletion, SuggestionStream
from keystroke.assist.completion.live_completion import LEAST_CONTEXT, MOST_CONTEXT
from keystroke.assist.completion.second_opinion import Opinion, second_opinion
from keystroke.engine.generation import Chunk
from keystroke.engine.speculative import AdaptiveDrafter, Drafter, FileDrafter, verify_cost
from keystroke.errors import Interrupted, KeystrokeError
from keystroke.gateway.live.mirror import BufferMirror
from keystroke.gateway.work.model_client import ModelAccess
from keystroke.gateway.work.priority import Priority
from keystroke.gateway.work.registry import ModelRegistry, ServedModel
from keystroke.gateway.work.scheduler import Job
from keystroke.gateway.work.ticket import TicketItem
from keystroke.gateway.work.work import Work
from keystroke.protocol.response import Receipt
from keystroke.text import Edit

log = logging.getLogger("keystroke.live")

SETTLED = 0.12  # seconds without a key before it begins: on a CPU both models use the same cores
READING = 4.0  # seconds that reading its context may take
LEAST = 256  # tokens of context, however slow the machine

OnOpinion = Callable[["SuggestionRequest", Opinion, Extent, Receipt], None]


@dataclass(slots=True)
class SuggestionRequest:
    """A request for a completion. `text` and `cursor` are the buffer's, or those after the editor's own
    selected list entry is inserted (`selected`, which the answer then begins with)."""

    id: str
    version: int
    text: str
    cursor: int
    invoked: bool
    arrived: float
    selected: Edit | None = None
    shown: str = ""  # by the fast model, so far


@dataclass(slots=True)
class _OpinionRun:
    request: SuggestionRequest
    stream: SuggestionStream
    work: Work
    typed: bool = False  # keys came that agree with it


def larger_model(registry: ModelRegistry, fast: ServedModel) -> ServedModel | None:
    """The loaded model that gives second opinions on what `fast` completes, or None.

    The deep model is preferred, then the largest; among those of equal size one that takes the suffix first,
    since typing only appends to its prompt. Models with a limit of tokens or requests are not used.
    """
    able = [
        entry
        for entry in registry.entries.values()
        if entry is not fast
        and entry.model is not None
        and entry.model.fim is not None
        and entry.role != "fast"
        and not (entry.budget.tokens_per_minute or entry.budget.requests_per_minute)
        and entry.parameters >= fast.parameters
    ]
    if not able:
        return None
    best = max(able, key=lambda entry: (entry.role == "deep", entry.parameters))
    if _suffix_first(best):
        return best
    return next((e for e in able if e.parameters == best.parameters and _suffix_first(e)), best)


def _suffix_first(entry: ServedModel) -> bool:
    return entry.model is not None and entry.model.fim is not None and entry.model.fim.order == "spm"


def reading_budget(rate: float | None) -> int:
    """Tokens of context: what the machine reads in a few seconds. `rate`: tokens a second, None: not
    measured."""
    return LEAST_CONTEXT if rate is None else max(LEAST, min(MOST_CONTEXT, int(rate * READING)))


class SecondOpinion:
    """For a buffer that `fast` completes. `on_opinion` is called with each opinion that changes something."""

    def __init__(
        self,
        mirror: BufferMirror,
        completion: LiveCompletion,
        fast: ModelAccess,
        *,
        scope: str,
        on_opinion: OnOpinion,
    ) -> None:
        self._mirror, self._fast_completion, self._fast = mirror, completion, fast
        self._scope, self._on_opinion = f"{scope}/second", on_opinion
        self._entry: ServedModel | None = None
        self._completion: LiveCompletion | None = None  # the larger model's own
        self._timer: asyncio.TimerHandle | None = None
        self._run: _OpinionRun | None = None

    def apply_edits(self, edits: Sequence[Edit], text: str, cursor: int | None) -> None:
        """Stop a run that the edits contradict; one that agrees goes on."""
        if self._completion is not None:
            self._completion.apply_edits(edits)
        self._cancel_timer()
        if (run := self._run) is not None:
            run.typed = True
            if cursor is None or cursor > len(text) or run.stream.typed_length(text, cursor) is None:
                self._stop()

    def request(self, request: SuggestionRequest) -> None:
        """Give an opinion on this answer once typing pauses."""
        self._cancel_timer()
        if self._run is None or self._run.request.text != request.text:
            self._timer = asyncio.get_running_loop().call_later(SETTLED, self._begin, request)

    def close(self) -> None:
        self._cancel_timer()
        self._stop()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stop(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.work.cancel(Interrupted("The text went another way."))

    def _begin(self, request: SuggestionRequest) -> None:
        self._timer = None
        self._stop()
        service = self._fast.service
        entry = larger_model(service.registry, self._fast.entry)
        if entry is None:
            return
        completion = self._completion_for(entry)
        if completion.refusal(request.text) is not None:
            return
        stream = completion.begin(request.text, request.cursor)
        draft = self._draft(entry, stream, request.shown) if service.speculation else None
        job = Job(stream.prompt.tokens, stream.params(), draft, predictor=stream.predictor)
        try:
            work = service.submit(
                entry, job, self._fast.caller, priority=Priority.NEXT_EDIT, buffer=self._scope, live=True
            )
        except KeystrokeError as error:
            log.info("no second opinion: %s", error.code)
            return
        self._run = run = _OpinionRun(request, stream, work)
        work.subscribe(partial(self._on_items, run))

    def _completion_for(self, entry: ServedModel) -> LiveCompletion:
        """The larger model's completion of the buffer; a new one where another model took its place."""
        fast = self._fast_completion
        budget = reading_budget(entry.scheduler.prefill_rate)
        if self._completion is None or self._entry is not entry:
            self._entry = entry
            self._completion = LiveCompletion(
                entry.model, fast.settings, path=self._mirror.path, language=fast.language, budget=budget
            )
        self._completion.share_state(fast)
        self._completion.grow(budget)
        return self._completion

    def _draft(self, entry: ServedModel, stream: SuggestionStream, shown: str) -> Drafter | None:
        """The fast model's text in the larger model's tokens."""
        if not shown or entry.model is None:
            return None
        tokens = entry.model.tokenizer.encode(stream.prompt.begin + shown)
        return AdaptiveDrafter([FileDrafter(tokens)], verify_cost(entry.model.engine))

    def _on_items(self, run: _OpinionRun, items: list[TicketItem]) -> None:
        for item in items:
            if isinstance(item, Chunk) and not run.stream.done:
                run.stream.feed(item)
        if self._run is not run:
            return
        if run.stream.done:
            self._run = None
            run.work.stop_early()
            self._decide(run)
            if self._entry is not None:
                self._fast.service.registry.load_adapted(self._entry)
        elif run.work.ticket.done:
            self._run = None  # stopped from elsewhere, or failed: the first answer stays

    def _decide(self, run: _OpinionRun) -> None:
        request, stream, completion = run.request, run.stream, self._completion
        assert completion is not None
        answer = completion.answer(request.text, request.cursor, stream, invoked=request.invoked)
        assert answer is not None  # the stream is done
        opinion = second_opinion(request.shown, answer, typed=run.typed)
        if opinion is None:
            return
        if isinstance(answer, ShownCompletion):
            # Typing through it, or asking again, finds the larger model's text from now on.
            self._fast_completion.store_revision(stream, opinion.text, was_shown=bool(request.shown))
        if not run.typed:
            self._on_opinion(request, opinion, stream.extent, run.work.current_receipt())
