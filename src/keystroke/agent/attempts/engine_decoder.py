"""Generates attempts with an engine on the calling thread: sessions forked from one that has read the prompt.

All streams advance in one batch; a stream that runs alone may use a drafter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from keystroke.agent.attempts.attempt import Attempt
from keystroke.agent.attempts.decoder import AttemptChunk, AttemptStream, Decoder
from keystroke.engine.base import Interrupt, Sampling, Session, StepRequest
from keystroke.engine.generation import Chunk, Finish, Generation, GenerationParams
from keystroke.engine.model import Model
from keystroke.engine.speculative import MAX_DRAFT, Drafter
from keystroke.errors import Interrupted

Draft = Callable[[], Drafter | None]


class EngineAttemptStream(AttemptStream):
    def __init__(self, generation: Generation, prompt: Sequence[int]) -> None:
        self.generation, self.prompt = generation, prompt
        self._start = 0  # where the text since the last redirection begins
        self._old = 0  # characters from before it that the next chunks still carry

    @property
    def text(self) -> str:
        return self.generation.text[self._start :]

    @property
    def tokens(self) -> list[int]:
        return self.generation.tokens

    def redirect(self, tokens: Sequence[int]) -> None:
        generation = self.generation
        generation.redirect(tokens)
        self._old = generation.pending_characters
        self._start = len(generation.text) + self._old
        self.prompt, self.redirected_at = list(generation.session.tokens), len(generation.tokens)

    def new_text(self, chunk: Chunk) -> str:
        """The part of a chunk that was written after the last redirection."""
        if not self._old:
            return chunk.text
        text, self._old = chunk.text[self._old :], max(0, self._old - len(chunk.text))
        return text

    def close(self) -> None:
        self.generation.session.close()


class EngineDecoder(Decoder):
    """`draft` makes a drafter for a stream that runs alone. `width` 0: as many streams as the engine steps
    together."""

    has_likelihood = True

    def __init__(
        self, model: Model, params: GenerationParams, *, draft: Draft | None = None, width: int = 0
    ) -> None:
        self._model, self._params, self._draft = model, params, draft
        self.width, self.slows = width or model.engine.max_batch, model.engine.batch_slows
        self.context = model.engine.info.context_length
        self._base: Session | None = None
        self._interrupt = Interrupt()

    def prefill(self, prompt: Sequence[int], interrupt: Interrupt) -> int:
        self._interrupt = interrupt
        self._base = self._model.engine.session()
        return self._base.extend(prompt, interrupt).reused

    def start(self, prompt: Sequence[int], sampling: Sampling, *, alone: bool) -> EngineAttemptStream:
        assert self._base is not None
        session = self._base.fork()
        try:
            params = replace(self._params, sampling=sampling)
            drafter = self._draft() if self._draft is not None and alone else None
            generation = Generation(
                self._model, session, prompt, params, drafter=drafter, interrupt=self._interrupt
            )
            generation.prefill()
        except BaseException:
            session.close()
            raise
        return EngineAttemptStream(generation, prompt)

    def step(self, streams: Sequence[AttemptStream], timeout: float | None) -> Iterable[AttemptChunk]:
        known = [stream for stream in streams if isinstance(stream, EngineAttemptStream)]
        if len(known) == 1:
            chunk = known[0].generation.advance()
            if chunk.finish is Finish.INTERRUPTED:
                raise Interrupted("stopped on request")
            return [(known[0], known[0].new_text(chunk), chunk.finish)]
        pieces: list[AttemptChunk] = []
        requests: list[tuple[EngineAttemptStream, StepRequest]] = []
        for stream in known:
            request = stream.generation.next_step()
            if request is None:
                pieces.append((stream, stream.new_text(stream.generation.advance()), Finish.LENGTH))
            else:
                requests.append((stream, request))
        if requests:
            began = time.perf_counter()
            steps = self._model.engine.step_many([request for _, request in requests])
            spent = time.perf_counter() - began
            for (stream, request), step in zip(requests, steps, strict=True):
                chunk = stream.generation.apply_step(step, spent, len(request.draft))
                pieces.append((stream, stream.new_text(chunk), chunk.finish))
        return pieces

    def likelihood(self, attempt: Attempt, interrupt: Interrupt) -> float:
        """The attempt's tokens are used as the draft: with the same seed all are accepted, so a few steps
        give the log probability of each."""
        assert self._base is not None
        total, done = 0.0, 0
        tokens = attempt.tokens[attempt.redirected_at :]
        sampling = replace(attempt.sampling, logprobs=0)
        with self._base.fork() as session:
            session.extend(attempt.prompt, interrupt)
            while done < len(tokens):
                step = session.step(tokens[done : done + MAX_DRAFT], sampling, interrupt)
                total += sum(known.logprob for known in step.logprobs)
                done += len(step.tokens)
        return total / max(done, 1)

    def close(self) -> None:
        if self._base is not None:
            self._base.close()
            self._base = None
