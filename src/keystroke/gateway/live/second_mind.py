"""The larger model beside one buffer: it reads along and has an opinion on what the smaller one has shown.

Never in the way. It begins when the keys pause, with the smaller one's text as its draft (as text, since
the two cut text into different tokens), ends at the next key that contradicts it, and speaks at most once for
each request, only while the text it read still stands. What it found is kept for typing through all the
same. Lives in the event loop; its work goes through its own model's queue.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from keystroke.assist.completion import Extent, LiveCompletion, Offer, Stream
from keystroke.assist.completion.live_completion import LEAST_CONTEXT, MOST_CONTEXT
from keystroke.assist.completion.second_opinion import Opinion, second_opinion
from keystroke.engine.generation import Chunk
from keystroke.engine.speculative import AdaptiveDrafter, Drafter, FileDrafter, verify_cost
from keystroke.errors import Interrupted, KeystrokeError
from keystroke.gateway.access.keys import Caller
from keystroke.gateway.work.priority import Priority
from keystroke.gateway.work.registry import Registry, ServedModel
from keystroke.gateway.work.scheduler import Job
from keystroke.gateway.work.service import Service
from keystroke.gateway.work.ticket import Item
from keystroke.gateway.work.work import Work
from keystroke.protocol.response import Receipt
from keystroke.text import Edit

log = logging.getLogger("keystroke.live")

SETTLED = 0.12  # seconds without a key before it begins: on a CPU both minds use the same cores
READING = 4.0  # seconds that reading its context may take
LEAST = 256  # tokens of context, however slow the machine

Told = Callable[["Place", Opinion, Extent, Receipt], None]


@dataclass(frozen=True, slots=True)
class Place:
    """A request that was answered: where, about which text, and what was shown (empty: nothing)."""

    id: str
    version: int
    text: str
    cursor: int
    shown: str
    invoked: bool
    arrived: float


@dataclass(slots=True)
class _Reading:
    place: Place
    stream: Stream
    work: Work
    typed: bool = False  # keys came that agree with it


def larger_model(registry: Registry, first: ServedModel) -> ServedModel | None:
    """A loaded model that can have an opinion on what `first` completes; None where there is none. The deep
    one goes before others, then the largest; of those as large as that, one that takes the suffix first,
    since typing only appends to its prompt. One whose tokens or requests are rationed is left to those who
    ask for it."""
    able = [
        entry
        for entry in registry.entries.values()
        if entry is not first
        and entry.model is not None
        and entry.model.fim is not None
        and entry.role != "fast"
        and not (entry.budget.tokens_per_minute or entry.budget.requests_per_minute)
        and entry.parameters >= first.parameters
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
    """Tokens of context: what the machine reads in a few seconds. `rate`: tokens a second, where measured."""
    return LEAST_CONTEXT if rate is None else max(LEAST, min(MOST_CONTEXT, int(rate * READING)))


class SecondMind:
    """For a buffer that `first` completes. `told` is called with each opinion worth hearing."""

    def __init__(
        self,
        service: Service,
        first: ServedModel,
        caller: Caller,
        completion: LiveCompletion,
        scope: str,
        told: Told,
        *,
        path: str | None,
        language: str | None,
    ) -> None:
        self._service, self._first, self._caller = service, first, caller
        self._shown_by, self._scope, self._told = completion, f"{scope}/second", told
        self._path, self._language = path, language
        self._entry: ServedModel | None = None
        self._completion: LiveCompletion | None = None  # this model's view of the buffer
        self._timer: asyncio.TimerHandle | None = None
        self._reading: _Reading | None = None

    def follow(self, edits: Sequence[Edit], text: str, cursor: int | None) -> None:
        """A key came: what it contradicts is stopped, what it agrees with goes on."""
        if self._completion is not None:
            self._completion.window.follow(edits)
        self._rest()
        if (reading := self._reading) is not None:
            reading.typed = True
            if cursor is None or cursor > len(text) or reading.stream.typed(text, cursor) is None:
                self._stop()

    def heard(self, place: Place) -> None:
        """The first mind has answered here."""
        self._rest()
        if self._reading is not None and self._reading.place.text == place.text:
            return  # it is being read already
        self._timer = asyncio.get_running_loop().call_later(SETTLED, self._begin, place)

    def close(self) -> None:
        self._rest()
        self._stop()

    def _rest(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stop(self) -> None:
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.work.cancel(Interrupted("The text went another way."))

    def _begin(self, place: Place) -> None:
        self._timer = None
        self._stop()
        entry = larger_model(self._service.registry, self._first)
        completion = self._of(entry) if entry is not None else None
        if entry is None or completion is None or completion.refusal(place.text) is not None:
            return
        stream = completion.begin(place.text, place.cursor)
        draft = self._draft(entry, stream, place.shown)
        job = Job(stream.prompt.tokens, stream.params(), draft, predictor=stream.predictor)
        try:
            work = self._service.submit(
                entry, job, self._caller, priority=Priority.NEXT_EDIT, buffer=self._scope, live=True
            )
        except KeystrokeError as error:
            log.info("no second opinion: %s", error.code)
            return
        self._reading = reading = _Reading(place, stream, work)
        work.follow(partial(self._items, reading))

    def _of(self, entry: ServedModel) -> LiveCompletion:
        """The model's view of the buffer; made anew where another model has taken its place."""
        first = self._shown_by
        budget = reading_budget(entry.scheduler.prefill_rate)
        if self._completion is None or self._entry is not entry:
            self._entry = entry
            self._completion = LiveCompletion(
                entry.model, first.settings, path=self._path, language=self._language, budget=budget
            )
            self._completion.dismissed = first.dismissed
        self._completion.rules, self._completion.project = first.rules, first.project
        self._completion.grow(budget)
        return self._completion

    def _draft(self, entry: ServedModel, stream: Stream, shown: str) -> Drafter | None:
        """The smaller one's text in this one's tokens."""
        if not shown or entry.model is None or not self._service.speculation:
            return None
        tokens = entry.model.tokenizer.encode(stream.prompt.begin + shown)
        return AdaptiveDrafter([FileDrafter(tokens)], verify_cost(entry.model.engine))

    def _items(self, reading: _Reading, items: list[Item]) -> None:
        for item in items:
            if isinstance(item, Chunk) and not reading.stream.done:
                reading.stream.feed(item)
        if self._reading is not reading:
            return
        if reading.stream.done:
            self._reading = None
            reading.work.enough()
            self._decide(reading)
            if self._entry is not None:
                self._service.registry.adapt(self._entry)  # so that the next opinion is a better one
        elif reading.work.ticket.done:
            self._reading = None  # stopped from elsewhere, or it failed: the first answer stands

    def _decide(self, reading: _Reading) -> None:
        place, stream, completion = reading.place, reading.stream, self._completion
        assert completion is not None
        answer = completion.answer(stream, place.text, place.cursor, invoked=place.invoked)
        assert answer is not None  # the stream is done
        opinion = second_opinion(place.shown, answer, typed=reading.typed)
        if opinion is None:
            return
        if isinstance(answer, Offer):
            # From now on whoever types into it, or asks again, is answered with this.
            kept = stream.kept(opinion.text)
            kept.shown = bool(place.shown)
            self._shown_by.cache.put(stream.before, stream.after, kept)
        if not reading.typed:
            self._told(place, opinion, stream.extent, reading.work.paid())
