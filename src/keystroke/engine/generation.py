"""One answer being made: prompt in, chunks of text out, one engine step at a time.

Pull-style and single-threaded, so a scheduler can interleave many. It owns neither the session nor the
model. After every call `session.tokens` is exactly the prompt, what was emitted and what was spliced in: a
draft that ran past the end is rolled back. Text given out never ends in half a character nor in the
beginning of a stop string that may still come.

Held to a grammar (`engine/grammar`), an answer is of its language when it ends with STOP, and the beginning
of a text of it otherwise. What the grammar leaves no choice about is appended, not sampled; its KV comes with
the next step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from keystroke.engine.base import (
    GREEDY,
    Extended,
    Interrupt,
    Mixture,
    Sampling,
    Session,
    Step,
    StepRequest,
    TokenLogprob,
)
from keystroke.engine.grammar.constraint import Constraint, following
from keystroke.engine.mixing import NO_MIXING, Mixer, Mixing, mixed_logprobs
from keystroke.engine.model import Model
from keystroke.engine.speculative.base import MAX_DRAFT, Drafter
from keystroke.engine.token_healing import RIVALS, TokenHealing
from keystroke.engine.tokenizer import StreamDecoder
from keystroke.errors import Interrupted, NotEnoughMemory, UsageError

if TYPE_CHECKING:
    from keystroke.engine.grammar.matcher import Matcher


_MOST_CAUTION = 16  # steps


class Finish(StrEnum):
    STOP = "stop"  # the model ended its turn
    STOP_STRING = "stop_string"
    LENGTH = "length"  # max_tokens, or the end of the context
    INTERRUPTED = "interrupted"
    UNMET = "unmet"  # the grammar came to a place from which it could not go on


@dataclass(frozen=True, slots=True)
class GenerationParams:
    """How an answer is sampled and where it ends. Raises UsageError for values that make no sense."""

    max_tokens: int | None = None
    sampling: Sampling = GREEDY
    stop: tuple[str, ...] = ()
    stop_tokens: frozenset[int] = frozenset()  # end the answer as the model's own end does
    ignore_eos: bool = False
    begin: str = ""  # the answer begins with this, however its tokens cut it
    constraint: Constraint | None = None  # what may be said (after `begin`)

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 0:
            raise UsageError(f"max_tokens must be 0 or more, not {self.max_tokens}", param="max_tokens")
        if not all(self.stop):
            raise UsageError("a stop string must not be empty", param="stop")


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one step added. `text` may lag behind `tokens` where text is held back; a token that is
    part of a stop string belongs to `tokens` though its text is never given out. `ends`: how much of the text
    there was after each token, where that is known."""

    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None
    ends: tuple[int, ...] = ()

    def each(self) -> Iterator[Chunk]:
        """The chunks that steps of one token would have made of it."""
        if len(self.tokens) < 2 or len(self.ends) != len(self.tokens):
            yield self
            return
        begins = (0, *self.ends[:-1])
        for i, (token, first) in enumerate(zip(self.tokens, begins, strict=True)):
            last = i + 1 == len(self.tokens)
            text = self.text[first:] if last else self.text[first : self.ends[i]]
            yield Chunk(text, (token,), self.logprobs[i : i + 1], self.finish if last else None)


@dataclass(slots=True)
class GenerationStats:
    """What the receipt is made of. Seconds are wall clock."""

    prompt_tokens: int = 0
    prefill_seconds: float = 0.0
    reused: int = 0
    computed: int = 0
    tokens: int = 0  # emitted
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    forced: int = 0  # of the emitted, those a grammar left no choice about
    step_seconds: list[float] = field(default_factory=list)
    draft_seconds: float = 0.0  # spent thinking of drafts, not verifying them

    @property
    def decode_seconds(self) -> float:
        return sum(self.step_seconds) + self.draft_seconds

    @property
    def tokens_per_second(self) -> float:
        seconds = self.decode_seconds
        return self.tokens / seconds if seconds > 0 else 0.0


class Generation:
    """One answer being written: iterate over it for its chunks; `text` and `stats` are what came so far.
    Raises UsageError for an empty prompt, and what the engine raises while it runs."""

    def __init__(
        self,
        model: Model,
        session: Session,
        prompt: Sequence[int],
        params: GenerationParams | None = None,
        *,
        drafter: Drafter | None = None,
        interrupt: Interrupt | None = None,
        generated: Sequence[int] = (),
        mixing: Mixing = NO_MIXING,
    ) -> None:
        """`generated`: tokens of the answer that another engine produced before. They are not emitted again;
        the answer goes on as it would have there."""
        if not prompt:
            raise UsageError("the prompt is empty; a model needs at least one token to go on from")
        self.model = model
        self.session = session
        self.params = params or GenerationParams()
        self.interrupt = interrupt  # may be replaced between calls, so that a preempted prefill can go on
        self.stats = GenerationStats(prompt_tokens=len(prompt))
        self.finish: Finish | None = None
        self.tokens: list[int] = []  # emitted so far
        self._prompt = [*prompt, *generated]
        self._drafter = drafter
        self._begun_drafting = False
        self._decoder = StreamDecoder(model.tokenizer)
        self._stops = StopStrings(self.params.stop)
        self._matcher = self._new_matcher()
        self._trusting = False  # whether the step under way was asked for without the grammar's mask
        self._wary = 0  # steps that are to have one, since such a step was taken back
        self._caution = 1  # how many they will be next time: a model that insists is asked with masks
        self._opened = False  # the grammar's own beginning has been appended
        begin = self.params.begin if self._matcher is None else ""  # a grammar holds to it by itself
        self._healing = TokenHealing(begin, model.tokenizer)
        self._held = False  # the step under way is held to the beginning
        self._own = 0  # of the draft under way, the tokens that are the drafter's
        self._appended = False  # forced tokens ride along with the step under way
        ends = frozenset() if self.params.ignore_eos else model.engine.info.eos
        self._eos = ends | self.params.stop_tokens
        self._mixer: Mixer | None = None
        self._mixer_drafts = False
        if (
            mixing.predictor is not None and self._matcher is None
        ):  # a grammar may not allow what was seen before
            line_ends = model.tokenizer.encode("\n") if "\n" in self.params.stop else []
            self._mixer = Mixer(mixing.predictor, model.tokenizer, self._eos.union(line_ends[:1]))
            self._mixer_drafts = mixing.drafts and drafter is None
        self._ends: list[int] = []  # of the text of each token of the step that was read last
        self._mixtures: tuple[Mixture | None, ...] = ()  # of the step under way
        self._context = model.engine.info.context_length
        self._carried = ""  # text to go out with the next chunk
        self._carried_tokens: tuple[int, ...] = ()
        self._due: Finish | None = None  # the answer ends with the next chunk
        self._parts: list[str] = []
        if generated:
            self._replay(tuple(generated))

    @property
    def text(self) -> str:
        """All text given out so far."""
        return "".join(self._parts)

    @property
    def carried(self) -> int:
        """Characters written before a redirection that go out with the next chunk."""
        return len(self._carried)

    def prefill(self) -> Extended:
        """Bring the prompt into the session. Raises Interrupted; calling again goes on from there."""
        if self._drafter is not None and not self._begun_drafting:
            self._begun_drafting = True  # before the prompt is read: a worker beside reads it meanwhile
            self._drafter.choose_by(self.params.sampling)
            self._drafter.begin(self._prompt)
        started = time.perf_counter()
        try:
            extended = self.session.extend(self._prompt, self.interrupt)
        except Interrupted:
            self._count(self.session.extended)
            raise
        finally:
            self.stats.prefill_seconds += time.perf_counter() - started
        self._count(extended)
        return extended

    def _replay(self, said: tuple[int, ...]) -> None:
        """Bring every state to where it stood after `said`: half characters, half stop strings, a grammar."""
        if self._healing.open:
            self._healing.take(said)
        if self._matcher is not None:
            self._opened = True
            self._matcher.advance(said)
        _, _, self._due = self._read(said)
        self.tokens.extend(said)
        self.stats.tokens = len(said)

    def _count(self, extended: Extended) -> None:
        """What a prefill interrupted before had computed counts once: it is found again, not reused."""
        stats = self.stats
        stats.reused = extended.reused - stats.computed
        stats.computed += extended.computed

    def advance(self) -> Chunk:
        """One engine step. An interrupt ends the answer with what it has; the session stays usable."""
        request = self.next_step()
        if request is None:
            return self._ended(self._due or Finish.LENGTH)
        started = time.perf_counter()
        try:
            step = self.session.step(request.draft, request.sampling, self.interrupt, request.allowed)
        except Interrupted:
            return self.stop()
        return self.take(step, time.perf_counter() - started, len(request.draft))

    def next_step(self) -> StepRequest | None:
        """What to ask of the engine next; None where there is no room: then `advance` ends the answer.
        For a scheduler that steps several sessions together; `take` receives the result."""
        if self.finish is not None:
            raise UsageError("this answer has ended; start another")
        if self._matcher is not None and not self._opened:
            self._open_grammar(self._matcher)
        room = self._room()
        if room <= 0 or self._due is not None:
            return None
        draft: Sequence[int] = ()
        sampling = self.params.sampling
        self._held = self._healing.open and bool(bias := self._healing.bias())
        if self._held:
            rivals = None if sampling.logprobs is None else RIVALS
            sampling = replace(sampling, logit_bias={**sampling.logit_bias, **bias}, logprobs=rivals)
        elif self._drafter is not None and room > 1:
            started = time.perf_counter()
            draft = self._drafter.propose(self.session.tokens, min(room - 1, MAX_DRAFT))
            self.stats.draft_seconds += time.perf_counter() - started
        if self._mixer is not None:
            left = self._healing.left if self._held else ""
            torn = self._held and not left  # what must come ends in half a character
            if self._mixer_drafts and not self._held and room > 1:
                draft, self._mixtures = self._mixer.drafted(self.tokens, room - 1)
            else:
                self._mixtures = () if torn else self._mixer.mixtures(self.tokens, draft, left)
            if any(self._mixtures):
                sampling = replace(sampling, mixtures=self._mixtures)
        if self._matcher is None:
            return StepRequest(self.session, draft, sampling)
        self._trusting = self._may_trust(self._matcher, sampling)
        if self._trusting:  # the very step that an answer without a grammar takes
            self._own = len(draft)
            return StepRequest(self.session, draft, sampling)
        draft, self._own = self._matcher.admit(draft, min(room - 1, MAX_DRAFT))
        return StepRequest(self.session, draft, sampling, self._matcher)

    def _may_trust(self, matcher: Matcher, sampling: Sampling) -> bool:
        """Whether the next step is asked for without a mask and proved afterwards, so that an engine that
        runs ahead may have begun it. Where nearly every token may follow, the one that is chosen is nearly
        always allowed, and then it is the one that a mask would have left; else it is taken back."""
        if self._wary > 0:
            self._wary -= 1
            return False
        if not (self.model.engine.runs_ahead and sampling.by_own_score and sampling.logprobs is None):
            return False
        return matcher.in_free_text or (sampling.temperature == 0.0 and matcher.in_long_string)

    def take(self, step: Step, seconds: float, drafted: int = 0) -> Chunk:
        """Turn a step's tokens into a chunk, ending the answer where it ends."""
        stats = self.stats
        stats.steps += 1
        stats.step_seconds.append(seconds)
        stats.drafted += drafted
        stats.accepted += step.accepted
        if self._held:
            step = self._begun(step)
        if any(self._mixtures) and step.logprobs:
            step = replace(step, logprobs=mixed_logprobs(step.logprobs, self._mixtures))
        if self._trusting and self._matcher is not None:
            step = self._proved(self._matcher, step)
        tokens, text, finish = self._read(step.tokens)
        if len(tokens) < len(step.tokens):
            self.session.rollback(self.session.length - len(step.tokens) + len(tokens))
        self.tokens.extend(tokens)
        if self._drafter is not None:
            if self._matcher is None:
                self._drafter.verified(drafted, step.accepted, seconds)
            else:  # its own part of the draft; where forced tokens rode along, the time says nothing of it
                alone = self._own == drafted and not self._appended
                self._drafter.verified(self._own, min(step.accepted, self._own), seconds if alone else 0.0)
        if self._matcher is not None:
            tokens, text, finish = self._held_to_grammar(self._matcher, tokens, text, finish)
        stats.tokens += len(tokens)
        if self._drafter is not None:
            self._drafter.observe(tokens)
        if finish is None and self._room() <= 0:
            finish = Finish.LENGTH
        if finish is not None:
            self._finished(finish)
            if finish is not Finish.STOP_STRING:
                text += self._rest()
        ends = () if self._carried or self._matcher is not None else tuple(self._ends)
        if self._carried:
            text, self._carried = self._carried + text, ""
        if self._carried_tokens:
            tokens, self._carried_tokens = self._carried_tokens + tokens, ()
        self._parts.append(text)
        return Chunk(text, tokens, step.logprobs[: len(tokens)], finish, ends)

    def _proved(self, matcher: Matcher, step: Step) -> Step:
        """A step that was made without a mask, up to the first token that is not allowed; that place is asked
        about again with one."""
        taken = matcher.takes(step.tokens)
        if taken == len(step.tokens):
            self._caution = 1
            return step
        self._wary, self._caution = self._caution, min(2 * self._caution, _MOST_CAUTION)
        self.session.rollback(self.session.length - len(step.tokens) + taken)
        return replace(step, tokens=step.tokens[:taken], accepted=min(step.accepted, taken))

    def stop(self) -> Chunk:
        """End the answer here, at a token boundary, with what it has."""
        return self._ended(Finish.INTERRUPTED)

    def redirect(self, tokens: Sequence[int]) -> None:
        """Keep everything generated, put `tokens` after it, and go on from there. On ContextOverflow,
        Interrupted and NotEnoughMemory nothing has changed."""
        if self.finish is not None:
            raise UsageError("this answer has ended; start another")
        before = list(self.session.tokens)
        started = time.perf_counter()
        try:
            self.session.extend([*before, *tokens], self.interrupt)
        except (Interrupted, NotEnoughMemory):
            self.session.extend(before)  # computes nothing: no more is pending than before
            raise
        finally:
            self.stats.prefill_seconds += time.perf_counter() - started
        self.stats.computed += len(tokens)
        self._carried += self._rest()
        if self._drafter is not None:
            self._drafter.observe(tokens)
        if self._matcher is not None:  # what comes now is another answer
            self._matcher, self._opened = self._new_matcher(), False

    def __iter__(self) -> Iterator[Chunk]:
        try:
            self.prefill()
        except Interrupted:
            yield self.stop()
            return
        while self.finish is None:
            yield self.advance()

    def _begun(self, step: Step) -> Step:
        """A step that was held to the beginning, with chances as the caller asked for them."""
        told = tuple(self._healing.among(p, self.params.sampling.logprobs or 0) for p in step.logprobs)
        self._healing.take(step.tokens)
        return replace(step, logprobs=told)

    def _new_matcher(self) -> Matcher | None:
        constraint = self.params.constraint
        if constraint is None:
            return None
        from keystroke.engine.grammar.compiler import matcher_for  # here: most answers need none

        model, free = self.model, not self.params.ignore_eos
        constraint = following(self.params.begin, constraint)
        return matcher_for(constraint, model.tokenizer, model.engine.info, may_end=free)

    def _open_grammar(self, matcher: Matcher) -> None:
        """What the grammar begins with goes out with the first chunk."""
        self._opened = True
        tokens, text, self._due = self._held_to_grammar(matcher, (), "", None)
        self.stats.tokens += len(tokens)
        self._carried += text
        self._carried_tokens = tokens
        if self._drafter is not None:
            self._drafter.observe(tokens)

    def _held_to_grammar(
        self, matcher: Matcher, tokens: tuple[int, ...], text: str, finish: Finish | None
    ) -> tuple[tuple[int, ...], str, Finish | None]:
        """Let the grammar follow `tokens`, which were chosen, and append what must come after them. Returns
        all of it with its text, and why the answer ends there, if it does."""
        taken = matcher.advance(tokens)
        if taken < len(tokens):
            self.session.rollback(self.session.length - len(tokens) + taken)
            del self.tokens[len(self.tokens) - len(tokens) + taken :]
            tokens, finish = tokens[:taken], None
        told = self.params.sampling.logprobs is not None  # then every token needs its row of logits
        self._appended = False
        while finish is None and not told and (forced := matcher.forced()):
            forced = forced[: self._room()]
            forced, piece, finish = self._read(forced[: matcher.advance(forced)])
            if not forced:
                break
            self.session.append(forced)
            self._appended = True
            self.tokens.extend(forced)
            self.stats.forced += len(forced)
            tokens, text = tokens + forced, text + piece
        if finish is None and matcher.finished:
            finish = Finish.UNMET if matcher.failed else Finish.STOP
        return tokens, text, finish

    def _room(self) -> int:
        """How many more tokens may be emitted."""
        room = self._context - self.session.length
        if self.params.max_tokens is not None:
            room = min(room, self.params.max_tokens - len(self.tokens))
        return room

    def _read(self, step: tuple[int, ...]) -> tuple[tuple[int, ...], str, Finish | None]:
        """The part of a step that belongs to the answer, its text, and why the answer ends there, if it does.
        Token by token, so that the answer does not depend on how steps cut it."""
        text, self._ends = "", []
        if self.params.max_tokens is not None:
            step = step[: self.params.max_tokens - len(self.tokens)]
        for index, token in enumerate(step):
            if token in self._eos:
                self._ends.append(len(text))
                return step[: index + 1], text, Finish.STOP
            piece, stopped = self._stops.feed(self._decoder.feed((token,)))
            text += piece
            self._ends.append(len(text))
            if stopped:
                return step[: index + 1], text, Finish.STOP_STRING
        return step, text, None

    def _rest(self) -> str:
        """Text held back, now that nothing can follow it."""
        piece, stopped = self._stops.feed(self._decoder.flush())
        return piece if stopped else piece + self._stops.flush()

    def _finished(self, finish: Finish) -> None:
        self.finish = finish
        if self._matcher is not None:
            self._matcher.close()

    def _ended(self, finish: Finish) -> Chunk:
        if self.finish is not None:
            raise UsageError("this answer has ended; start another")
        self._finished(finish)
        if finish is Finish.INTERRUPTED:
            self._decoder.flush()  # half a character that the model had not finished is none of its text
        text = self._carried + self._rest()
        tokens, self._carried_tokens = self._carried_tokens, ()
        self._carried = ""
        self._parts.append(text)
        return Chunk(text, tokens, finish=finish)


class StopStrings:
    """Finds stop strings in a stream of text and holds back what may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Text that is safe to show, and whether a stop string came (it and all after it are dropped)."""
        if not self._stops:
            return text, False
        text = self._held + text
        found = [at for at in map(text.find, self._stops) if at >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        keep = self._tail(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _tail(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-size:]
            if any(stop.startswith(end) for stop in self._stops):
                return size
        return 0
