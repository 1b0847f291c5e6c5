"""Generate one answer: prompt in, chunks of text out, one engine step at a time.

Single-threaded and driven by the caller, so that a scheduler can interleave many. It owns neither the session
nor the model. After every call `session.tokens` is exactly the prompt, the emitted tokens and those of
redirections: a draft beyond the end is rolled back. Emitted text never ends in half a character or in the
beginning of a stop string.

With a grammar (`engine/grammar`), an answer that ends with STOP matches it, and any other is a prefix of a
match. Tokens that the grammar forces are appended without sampling; the next step computes their KV.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from keystroke.engine.base import (
    GREEDY,
    ExtendResult,
    Interrupt,
    Mixture,
    Sampling,
    Session,
    Step,
    StepRequest,
    TokenLogprob,
)
from keystroke.engine.grammar.constraint import Constraint, with_prefix
from keystroke.engine.mixing import NO_MIXING, Mixer, Mixing, StepMixtures, mix_logprobs
from keystroke.engine.model import Model
from keystroke.engine.speculative.base import MAX_DRAFT, Drafter
from keystroke.engine.token_healing import RIVALS, TokenHealing, renormalise
from keystroke.engine.tokenizer import StreamDecoder
from keystroke.errors import Interrupted, NotEnoughMemory, UsageError

if TYPE_CHECKING:
    from keystroke.engine.grammar.matcher import Matcher


_LONGEST_PENALTY = 16  # steps


class Finish(StrEnum):
    STOP = "stop"  # the model ended its turn
    STOP_STRING = "stop_string"
    LENGTH = "length"  # max_tokens, or the end of the context
    INTERRUPTED = "interrupted"
    UNMET = "unmet"  # the grammar cannot be completed from here


@dataclass(frozen=True, slots=True)
class GenerationParams:
    """How an answer is sampled and where it ends. Raises UsageError for invalid values."""

    max_tokens: int | None = None
    sampling: Sampling = GREEDY
    stop: tuple[str, ...] = ()
    stop_tokens: frozenset[int] = frozenset()  # end the answer like the model's end token
    ignore_eos: bool = False
    begin: str = ""  # the answer begins with this text, whatever its tokens
    constraint: Constraint | None = None  # the language of the answer (after `begin`)

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 0:
            raise UsageError(f"max_tokens must be 0 or more, not {self.max_tokens}", param="max_tokens")
        if not all(self.stop):
            raise UsageError("a stop string must not be empty", param="stop")


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one step added. `text` may lag behind `tokens` while text is held back; tokens of a stop string
    are included though their text is never emitted. `ends`: length of `text` after each token, if known."""

    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None
    ends: tuple[int, ...] = ()

    def split(self) -> Iterator[Chunk]:
        """The chunks that steps of one token each would have produced."""
        if len(self.tokens) < 2 or len(self.ends) != len(self.tokens):
            yield self
            return
        begins = (0, *self.ends[:-1])
        for i, (token, first) in enumerate(zip(self.tokens, begins, strict=True)):
            last = i + 1 == len(self.tokens)
            text = self.text[first:] if last else self.text[first : self.ends[i]]
            yield Chunk(text, (token,), self.logprobs[i : i + 1], self.finish if last else None)

    def join(self, after: Chunk) -> Chunk:
        """This chunk and the next as one."""
        known = len(self.ends) == len(self.tokens) and len(after.ends) == len(after.tokens)
        ends = (*self.ends, *(len(self.text) + end for end in after.ends)) if known else ()
        return Chunk(
            self.text + after.text,
            self.tokens + after.tokens,
            self.logprobs + after.logprobs,
            after.finish,
            ends,
        )


@dataclass(slots=True)
class GenerationStats:
    """Counts for the receipt. Seconds are wall-clock time."""

    prompt_tokens: int = 0
    prefill_seconds: float = 0.0
    reused: int = 0
    computed: int = 0
    tokens: int = 0  # emitted
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    forced: int = 0  # emitted tokens that a grammar forced
    step_seconds: list[float] = field(default_factory=list)
    draft_seconds: float = 0.0  # spent making drafts, not verifying them

    @property
    def decode_seconds(self) -> float:
        return sum(self.step_seconds) + self.draft_seconds

    @property
    def tokens_per_second(self) -> float:
        seconds = self.decode_seconds
        return self.tokens / seconds if seconds > 0 else 0.0


class Generation:
    """One answer: iterate over it for its chunks; `text` and `stats` are the state so far. Raises UsageError
    for an empty prompt, and the engine's errors while it runs."""

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
        self.interrupt = interrupt  # may be replaced between calls, to continue a preempted prefill
        self.stats = GenerationStats(prompt_tokens=len(prompt))
        self.finish: Finish | None = None
        self.tokens: list[int] = []  # emitted so far
        self._prompt = [*prompt, *generated]
        self._drafter = drafter
        self._begun_drafting = False
        self._decoder = StreamDecoder(model.tokenizer)
        self._stops = StopStrings(self.params.stop)
        self._matcher = self._new_matcher()
        self._unmasked = False  # the current step runs without the grammar's mask
        self._masked_steps = 0  # steps that must use the mask, since an unmasked one was rolled back
        self._penalty = 1  # how many those will be next time; doubles each time
        self._opened = False  # the grammar's forced beginning has been appended
        begin = self.params.begin if self._matcher is None else ""  # a grammar includes it
        self._healing = TokenHealing(begin, model.tokenizer)
        self._healing_step = False  # the current step is restricted to the beginning
        self._own = 0  # tokens of the current draft that came from the drafter
        self._appended = False  # forced tokens are computed with the current step
        ends = frozenset() if self.params.ignore_eos else model.engine.info.eos
        self._eos = ends | self.params.stop_tokens
        self._mixer: Mixer | None = None
        self._mixer_drafts = False
        # A grammar may not allow what was seen before.
        if mixing.predictor is not None and self._matcher is None:
            line_ends = model.tokenizer.encode("\n") if "\n" in self.params.stop else []
            ends = self._eos.union(line_ends[:1])
            self._mixer = Mixer(mixing.predictor, model.tokenizer, ends)
            self._mixer_drafts = mixing.drafts and drafter is None
        self._ends: list[int] = []  # the length of the text after each token of the last step
        self._mixtures: Sequence[Mixture | None] = ()  # of the current step
        self._context = model.engine.info.context_length
        self._carried = ""  # text to emit with the next chunk
        self._carried_tokens: tuple[int, ...] = ()
        self._due: Finish | None = None  # the answer ends with the next chunk
        self._parts: list[str] = []
        if generated:
            self._replay(tuple(generated))

    @property
    def text(self) -> str:
        """All text emitted so far."""
        return "".join(self._parts)

    @property
    def pending_characters(self) -> int:
        """Characters from before a redirection that the next chunk emits."""
        return len(self._carried)

    def prefill(self) -> ExtendResult:
        """Compute the prompt. Raises Interrupted; calling again continues from there."""
        if self._drafter is not None and not self._begun_drafting:
            self._begun_drafting = True
            self._drafter.set_sampling(self.params.sampling)
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

    def release_session(self) -> None:
        """Close the session. To go on, set `session` to an empty one and call `prefill`: it then holds the
        same tokens again."""
        if self.session.length > len(self._prompt):
            self._prompt = list(self.session.tokens)
        self.session.close()

    def _replay(self, generated: tuple[int, ...]) -> None:
        """Restore the decoder, the stop strings and the grammar to their state after `generated`."""
        self._healing.advance(generated)
        if self._matcher is not None:
            self._opened = True
            self._matcher.advance(generated)
        _, _, self._due = self._read_step(generated)
        self.tokens.extend(generated)
        self.stats.tokens = len(generated)

    def _count(self, extended: ExtendResult) -> None:
        """Count what an interrupted prefill, or an earlier session, had computed as computed, not as
        reused."""
        stats = self.stats
        if not stats.steps:
            stats.reused = max(0, extended.reused - stats.computed)
        stats.computed += extended.computed

    def advance(self) -> Chunk:
        """Run one engine step. An interrupt ends the answer; the session stays usable."""
        request = self.next_step()
        if request is None:
            return self._end_chunk(self._due or Finish.LENGTH)
        started = time.perf_counter()
        try:
            step = self.session.step(request.draft, request.sampling, self.interrupt, request.allowed)
        except Interrupted:
            return self.stop()
        return self.apply_step(step, time.perf_counter() - started, len(request.draft))

    def next_step(self) -> StepRequest | None:
        """The next engine step, for a scheduler that batches sessions; pass its result to `apply_step`. None
        if there is no room: call `advance`, which ends the answer."""
        if self.finish is not None:
            raise UsageError("this answer has ended; start another")
        if self._matcher is not None and not self._opened:
            self._open_grammar(self._matcher)
        room = self._remaining_room()
        if room <= 0 or self._due is not None:
            return None
        draft: Sequence[int] = ()
        sampling = self.params.sampling
        healing = self._healing_step = self._healing.begin_step()
        if healing and sampling.logprobs is not None:
            sampling = replace(sampling, logprobs=RIVALS)
        elif not healing and self._drafter is not None and room > 1:
            started = time.perf_counter()
            draft = self._drafter.propose(self.session.tokens, min(room - 1, MAX_DRAFT))
            self.stats.draft_seconds += time.perf_counter() - started
        self._mixtures = ()
        if self._mixer is not None or healing:
            known: list[Mixture | None] = []
            if self._mixer is not None and self._mixer_drafts and room > 1:
                draft, known = self._mixer.draft(self.tokens, room - 1, self._healing.remaining)
                known = [self._healing.restrict(draft[:row], mixture) for row, mixture in enumerate(known)]
            mixtures = StepMixtures(self._mixture_after, draft, known)
            if draft or mixtures[0] is not None:
                self._mixtures = mixtures
                sampling = replace(sampling, mixtures=mixtures)
        if self._matcher is None:
            return StepRequest(self.session, draft, sampling)
        self._unmasked = self._may_skip_mask(self._matcher, sampling)
        if self._unmasked:  # the same step as without a grammar
            self._own = len(draft)
            return StepRequest(self.session, draft, sampling)
        draft, self._own = self._matcher.filter_draft(draft, min(room - 1, MAX_DRAFT))
        return StepRequest(self.session, draft, sampling, self._matcher)

    def _mixture_after(self, draft: Sequence[int]) -> Mixture | None:
        mixer, healing = self._mixer, self._healing
        mixture = mixer.mixture(self.tokens, draft, healing.remaining) if mixer is not None else None
        return healing.restrict(draft, mixture)

    def _may_skip_mask(self, matcher: Matcher, sampling: Sampling) -> bool:
        """Whether to run the next step without a mask and check it afterwards, so that an engine that runs
        ahead may have started it. Where nearly every token is allowed, the chosen one nearly always is, and
        then a mask would not have changed it; otherwise it is rolled back."""
        if self._masked_steps > 0:
            self._masked_steps -= 1
            return False
        if not (
            self.model.engine.runs_ahead
            and sampling.scores_tokens_independently
            and sampling.logprobs is None
        ):
            return False
        return matcher.in_free_text or (sampling.temperature == 0.0 and matcher.in_long_string)

    def apply_step(self, step: Step, seconds: float, drafted: int = 0) -> Chunk:
        """Turn the result of a step into a chunk, and end the answer if it ends there."""
        stats = self.stats
        stats.steps += 1
        stats.step_seconds.append(seconds)
        stats.drafted += drafted
        stats.accepted += step.accepted
        if self._healing_step:
            step = self._heal(step)
        if self._mixtures and step.logprobs:
            step = replace(step, logprobs=mix_logprobs(step.logprobs, self._mixtures))
        if self._unmasked and self._matcher is not None:
            step = self._check_unmasked(self._matcher, step)
        tokens, text, finish = self._read_step(step.tokens)
        if len(tokens) < len(step.tokens):
            self.session.rollback(self.session.length - len(step.tokens) + len(tokens))
        self.tokens.extend(tokens)
        if self._drafter is not None:
            if self._matcher is None:
                self._drafter.record_result(drafted, step.accepted, seconds)
            else:  # only its own part of the draft; with forced tokens the time is not that of the draft
                alone = self._own == drafted and not self._appended
                self._drafter.record_result(
                    self._own, min(step.accepted, self._own), seconds if alone else 0.0
                )
        if self._matcher is not None:
            tokens, text, finish = self._apply_grammar(self._matcher, tokens, text, finish)
        stats.tokens += len(tokens)
        if self._drafter is not None:
            self._drafter.observe(tokens)
        if finish is None and self._remaining_room() <= 0:
            finish = Finish.LENGTH
        if finish is not None:
            self._set_finish(finish)
            if finish is not Finish.STOP_STRING:
                text += self._flush_text()
        ends = () if self._carried or self._matcher is not None else tuple(self._ends)
        if self._carried:
            text, self._carried = self._carried + text, ""
        if self._carried_tokens:
            tokens, self._carried_tokens = self._carried_tokens + tokens, ()
        self._parts.append(text)
        return Chunk(text, tokens, step.logprobs[: len(tokens)], finish, ends)

    def _check_unmasked(self, matcher: Matcher, step: Step) -> Step:
        """The result of an unmasked step up to the first token that is not allowed; from there the next step
        continues with a mask."""
        taken = matcher.count_allowed(step.tokens)
        if taken == len(step.tokens):
            self._penalty = 1
            return step
        self._masked_steps, self._penalty = self._penalty, min(2 * self._penalty, _LONGEST_PENALTY)
        self.session.rollback(self.session.length - len(step.tokens) + taken)
        return replace(step, tokens=step.tokens[:taken], accepted=min(step.accepted, taken))

    def stop(self) -> Chunk:
        """End the answer here, at a token boundary."""
        return self._end_chunk(Finish.INTERRUPTED)

    def redirect(self, tokens: Sequence[int]) -> None:
        """Insert `tokens` after everything generated so far and continue from there. On ContextOverflow,
        Interrupted and NotEnoughMemory nothing changes."""
        if self.finish is not None:
            raise UsageError("this answer has ended; start another")
        before = list(self.session.tokens)
        started = time.perf_counter()
        try:
            self.session.extend([*before, *tokens], self.interrupt)
        except (Interrupted, NotEnoughMemory):
            self.session.extend(before)  # computes nothing
            raise
        finally:
            self.stats.prefill_seconds += time.perf_counter() - started
        self.stats.computed += len(tokens)
        self._carried += self._flush_text()
        if self._drafter is not None:
            self._drafter.observe(tokens)
        if self._matcher is not None:  # a new answer begins
            self._matcher, self._opened = self._new_matcher(), False

    def __iter__(self) -> Iterator[Chunk]:
        try:
            self.prefill()
        except Interrupted:
            yield self.stop()
            return
        while self.finish is None:
            yield self.advance()

    def _heal(self, step: Step) -> Step:
        """The result of a step of token healing, with as many log probabilities as the caller asked for."""
        wanted = self.params.sampling.logprobs or 0
        healed = tuple(
            renormalise(chosen, mixture, wanted)
            for chosen, mixture in zip(step.logprobs, self._mixtures, strict=False)
        )
        self._healing.advance(step.tokens)
        return replace(step, logprobs=healed)

    def _new_matcher(self) -> Matcher | None:
        constraint = self.params.constraint
        if constraint is None:
            return None
        from keystroke.engine.grammar.compiler import matcher_for  # most answers have no grammar

        model, free = self.model, not self.params.ignore_eos
        constraint = with_prefix(self.params.begin, constraint)
        return matcher_for(constraint, model.tokenizer, model.engine.info, may_end=free)

    def _open_grammar(self, matcher: Matcher) -> None:
        """Append the forced beginning; the first chunk emits it."""
        self._opened = True
        tokens, text, self._due = self._apply_grammar(matcher, (), "", None)
        self.stats.tokens += len(tokens)
        self._carried += text
        self._carried_tokens = tokens
        if self._drafter is not None:
            self._drafter.observe(tokens)

    def _apply_grammar(
        self, matcher: Matcher, tokens: tuple[int, ...], text: str, finish: Finish | None
    ) -> tuple[tuple[int, ...], str, Finish | None]:
        """Advance the grammar by the chosen `tokens` and append the tokens that it forces after them. Returns
        all of them with their text, and why the answer ends there, if it does."""
        taken = matcher.advance(tokens)
        if taken < len(tokens):
            self.session.rollback(self.session.length - len(tokens) + taken)
            del self.tokens[len(self.tokens) - len(tokens) + taken :]
            tokens, finish = tokens[:taken], None
        needs_logits = self.params.sampling.logprobs is not None  # then no token may skip its step
        self._appended = False
        while finish is None and not needs_logits and (forced := matcher.forced_tokens()):
            forced = forced[: self._remaining_room()]
            forced, piece, finish = self._read_step(forced[: matcher.advance(forced)])
            if not forced:
                break
            self.session.append(forced)
            self._appended = True
            self.tokens.extend(forced)
            self.stats.forced += len(forced)
            tokens, text = tokens + forced, text + piece
        if finish is None and matcher.is_finished:
            finish = Finish.UNMET if matcher.has_failed else Finish.STOP
        return tokens, text, finish

    def _remaining_room(self) -> int:
        """The number of tokens that may still be emitted."""
        room = self._context - self.session.length
        if self.params.max_tokens is not None:
            room = min(room, self.params.max_tokens - len(self.tokens))
        return room

    def _read_step(self, step: tuple[int, ...]) -> tuple[tuple[int, ...], str, Finish | None]:
        """The tokens of a step that belong to the answer, their text, and why the answer ends there, if it
        does. Works token by token, so that the answer does not depend on how many tokens a step has."""
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

    def _flush_text(self) -> str:
        """Text held back, now that nothing can follow it."""
        piece, stopped = self._stops.feed(self._decoder.flush())
        return piece if stopped else piece + self._stops.flush()

    def _set_finish(self, finish: Finish) -> None:
        self.finish = finish
        if self._matcher is not None:
            self._matcher.close()

    def _end_chunk(self, finish: Finish) -> Chunk:
        if self.finish is not None:
            raise UsageError("this answer has ended; start another")
        self._set_finish(finish)
        if finish is Finish.INTERRUPTED:
            self._decoder.flush()  # drop an unfinished character
        text = self._carried + self._flush_text()
        tokens, self._carried_tokens = self._carried_tokens, ()
        self._carried = ""
        self._parts.append(text)
        return Chunk(text, tokens, finish=finish)


class StopStrings:
    """Finds stop strings in a stream of text, holding back text that may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Text that is safe to emit, and whether a stop string was found (it and the rest are dropped)."""
        if not self._stops:
            return text, False
        text = self._held + text
        found = [at for at in map(text.find, self._stops) if at >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        keep = self._stop_overlap(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _stop_overlap(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-size:]
            if any(stop.startswith(end) for stop in self._stops):
                return size
        return 0
