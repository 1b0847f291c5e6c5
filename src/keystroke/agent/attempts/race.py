"""Attempts made together: one prompt read once, many sessions forked from it, advancing in one batch.

Law: runs on the engine's thread and touches the engine from nowhere else; checks run on threads of their own
and are looked at between steps. At most `width` attempts decode at a time; where one fails and more may be
made, the next begins, every other one with the failure shown to it. Whatever ends the race, every session is
closed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace

from keystroke.agent.attempts.attempt import Attempt, End, Outcome, Policy, Verdict
from keystroke.agent.attempts.choice import choose
from keystroke.agent.attempts.judge import Go, Judge, Watch
from keystroke.engine.base import GREEDY, Interrupt, Sampling, Session
from keystroke.engine.generation import Finish, Generation, GenerationParams
from keystroke.engine.model import Model
from keystroke.engine.speculative import MAX_DRAFT, Drafter
from keystroke.errors import Interrupted, UsageError

Retry = Callable[[Attempt], Sequence[int] | None]  # the prompt that shows a failure to the next attempt
Steer = Callable[[], Sequence[int] | None]  # tokens that turn every answer under way, if the user said so
Draft = Callable[[], Drafter | None]
_LOOK = 0.005  # seconds between two looks at an interrupt while only checks are under way


def samplings(count: int, *, temperature: float = 0.8, top_p: float = 0.95, seed: int = 0) -> list[Sampling]:
    """How `count` attempts choose: the first the likeliest each time, the others ever more freely."""
    free = count - 1
    return [GREEDY] + [
        Sampling(
            temperature=round(temperature * (0.75 + 0.5 * number / max(free - 1, 1)), 3),
            top_p=top_p,
            seed=seed + number + 1,
        )
        for number in range(free)
    ]


class _Runner:
    """An attempt that decodes."""

    __slots__ = ("attempt", "generation", "old", "start", "watch")

    def __init__(self, attempt: Attempt, generation: Generation, watch: Watch) -> None:
        self.attempt, self.generation, self.watch = attempt, generation, watch
        self.start = 0  # where its text begins: behind what was written before the user said otherwise
        self.old = 0  # characters of that which are still to come


class Race:
    def __init__(
        self,
        model: Model,
        prompt: Sequence[int],
        chosen: Sequence[Sampling],
        judge: Judge,
        *,
        params: GenerationParams | None = None,
        width: int = 0,
        workers: int = 4,
        policy: Policy = Policy.FIRST,
        interrupt: Interrupt | None = None,
        retry: Retry | None = None,
        draft: Draft | None = None,
        steer: Steer | None = None,
        on_attempt: Callable[[Attempt], None] | None = None,
    ) -> None:
        """`chosen` holds one sampling an attempt; all else about generating is in `params`. `width` 0 means
        as many at a time as the engine steps for about the price of one. `draft` makes a drafter for an
        attempt that runs alone. `steer` is asked between steps: its tokens are put behind what each attempt
        has written, all of which stays computed, and the answer begins anew. `on_attempt` hears of each
        attempt as it ends and as it is judged, on the calling thread."""
        if not chosen:
            raise UsageError("a race needs at least one attempt")
        self._model, self._prompt, self._judge = model, list(prompt), judge
        self._waiting = [Attempt(number, sampling) for number, sampling in enumerate(chosen)]
        self._width = min(width or model.engine.max_batch, len(chosen))
        self._workers, self._policy = workers, policy
        self._params = params or GenerationParams(1024)
        self._interrupt, self._retry, self._draft = interrupt or Interrupt(), retry, draft
        self._steer = steer
        self._heard = on_attempt or (lambda attempt: None)
        self._attempts: list[Attempt] = []
        self._live: list[_Runner] = []
        self._unchecked: list[Attempt] = []
        self._checks: dict[Future[Verdict | None], Attempt] = {}
        self._over = Interrupt()  # ends checks that nobody waits for any more
        self._failed: list[Attempt] = []
        self._winner: Attempt | None = None
        self._started = 0.0
        self._prefill = 0.0
        self._reused = 0

    def run(self) -> Outcome:
        """Race to the end. Interrupted where the user stopped it; what an engine or a check raises passes
        through."""
        self._started = time.perf_counter()
        pool = ThreadPoolExecutor(self._workers, "check")
        with contextlib.ExitStack() as sessions:
            sessions.callback(self._close)
            sessions.callback(pool.shutdown, wait=True, cancel_futures=True)
            sessions.callback(self._over.set)
            base = sessions.enter_context(self._model.engine.session())
            self._reused = base.extend(self._prompt, self._interrupt).reused
            self._prefill = time.perf_counter() - self._started
            while self._winner is None:
                self._interrupt.check()
                self._begin(base)
                if self._steer is not None and self._live and (turn := self._steer()) is not None:
                    self._turn(turn)
                if self._live:
                    self._step()
                elif not self._checks and not self._unchecked:
                    break
                self._collect(pool)
            self._end_others(End.BEATEN)
            winner, why = self._chosen(base)
            seconds = time.perf_counter() - self._started
        return Outcome(
            tuple(self._attempts), winner, why, seconds, len(self._prompt), self._prefill, self._reused
        )

    # ── attempts begin ────────────────────────────────────────────────────────────────────────

    def _begin(self, base: Session) -> None:
        while self._waiting and len(self._live) < self._width:
            # One that may yet be judged good is waited for: on an engine that steps one at a time a second
            # attempt costs as much as the first.
            if (self._checks or self._unchecked) and self._width == 1:
                return
            attempt = self._waiting.pop(0)
            prompt = self._shown(attempt)
            attempt.prompt = prompt
            session = base.fork()
            try:
                params = replace(self._params, sampling=attempt.sampling)
                drafter = self._draft() if self._draft is not None and self._width == 1 else None
                generation = Generation(self._model, session, prompt, params, drafter, self._interrupt)
                generation.prefill()
            except BaseException:
                session.close()
                raise
            self._attempts.append(attempt)
            self._live.append(_Runner(attempt, generation, self._judge.watch()))

    def _shown(self, attempt: Attempt) -> Sequence[int]:
        """The prompt of an attempt: every other one that begins late sees how an earlier one failed."""
        if self._retry is None or not self._failed or attempt.number % 2 == 0:
            return self._prompt
        best = max(self._failed, key=lambda failed: (failed.score, -failed.number))
        self._failed.remove(best)
        prompt = self._retry(best)
        if prompt is None or len(prompt) + 64 > self._model.engine.info.context_length:
            return self._prompt
        attempt.retry_of = best.number
        return prompt

    def _turn(self, tokens: Sequence[int]) -> None:
        """The user said something: every answer under way ends there and begins anew behind it."""
        self._prompt = [*self._prompt, *tokens]  # for attempts yet to begin
        for runner in self._live:
            generation, attempt = runner.generation, runner.attempt
            generation.redirect(tokens)
            runner.old = generation.carried
            runner.start = len(generation.text) + runner.old
            runner.watch = self._judge.watch()
            attempt.prompt, attempt.begins = list(generation.session.tokens), len(generation.tokens)

    # ── they step together ────────────────────────────────────────────────────────────────────

    def _step(self) -> None:
        if len(self._live) == 1:
            runner = self._live[0]
            chunk = runner.generation.advance()
            if chunk.finish is Finish.INTERRUPTED:
                raise Interrupted("stopped on request")
            self._heard_piece(runner, chunk.text, chunk.finish)
            return
        asked = []
        for runner in tuple(self._live):
            request = runner.generation.next_step()
            if request is None:
                self._heard_piece(runner, runner.generation.advance().text, Finish.LENGTH)
            else:
                asked.append((runner, request))
        if not asked:
            return
        began = time.perf_counter()
        steps = self._model.engine.step_many([request for _, request in asked])
        spent = time.perf_counter() - began
        for (runner, request), step in zip(asked, steps, strict=True):
            chunk = runner.generation.take(step, spent, len(request.draft))
            self._heard_piece(runner, chunk.text, chunk.finish)

    def _heard_piece(self, runner: _Runner, text: str, finish: Finish | None) -> None:
        text, runner.old = text[runner.old :], max(0, runner.old - len(text))
        sign = runner.watch(text)
        if sign.go is Go.HOPELESS:
            self._ended(runner, End.HOPELESS, sign.reason)
        elif sign.go is Go.COMPLETE or finish in (Finish.STOP, Finish.STOP_STRING):
            self._ended(runner, End.FINISHED)
        elif finish is Finish.LENGTH:
            self._ended(runner, End.LENGTH, f"it did not end within {len(runner.generation.tokens)} tokens")

    def _ended(self, runner: _Runner, end: End, reason: str = "") -> None:
        self._live.remove(runner)
        attempt, generation = runner.attempt, runner.generation
        attempt.text, attempt.tokens = generation.text[runner.start :], generation.tokens
        attempt.end, attempt.reason = end, reason
        attempt.seconds = time.perf_counter() - self._started
        generation.session.close()
        if end is End.FINISHED:
            self._unchecked.append(attempt)
        elif end in (End.HOPELESS, End.LENGTH):
            self._failed.append(attempt)
            self._heard(attempt)

    # ── checks come back ──────────────────────────────────────────────────────────────────────

    def _collect(self, pool: ThreadPoolExecutor) -> None:
        for attempt in self._unchecked:
            self._checks[pool.submit(self._judge.check, attempt.text, self._over)] = attempt
        self._unchecked.clear()
        if not self._checks:
            return
        idle = not self._live and (not self._waiting or self._width == 1)
        done, _ = wait(self._checks, timeout=_LOOK if idle else 0, return_when=FIRST_COMPLETED)
        for future in done:
            attempt = self._checks.pop(future)
            attempt.verdict = future.result()
            attempt.seconds = time.perf_counter() - self._started
            self._judged(attempt)

    def _judged(self, attempt: Attempt) -> None:
        self._heard(attempt)
        if attempt.verdict is None:
            return
        if not attempt.verdict.passed:
            self._failed.append(attempt)
        elif self._policy is Policy.FIRST and self._winner is None:
            self._winner = attempt
            self._waiting.clear()

    def _end_others(self, end: End) -> None:
        for runner in tuple(self._live):
            self._ended(runner, end)
            self._heard(runner.attempt)

    def _close(self) -> None:
        for runner in self._live:
            runner.generation.session.close()
        self._live.clear()

    # ── one is taken ──────────────────────────────────────────────────────────────────────────

    def _chosen(self, base: Session) -> tuple[Attempt | None, str]:
        if self._winner is not None:
            return self._winner, "it was the first to pass the check"
        return choose(self._attempts, self._judge.key, lambda attempt: self._likelihood(base, attempt))

    def _likelihood(self, base: Session, attempt: Attempt) -> float:
        """The mean log probability of an attempt's tokens. Its own tokens are its draft: chosen by the same
        seed at the same places they are all accepted, so a few steps say what each was worth."""
        if attempt.likelihood is None:
            total, done = 0.0, 0
            tokens = attempt.tokens[attempt.begins :]
            sampling = replace(attempt.sampling, logprobs=0)
            with base.fork() as session:
                session.extend(attempt.prompt, self._interrupt)
                while done < len(tokens):
                    step = session.step(tokens[done : done + MAX_DRAFT], sampling, self._interrupt)
                    total += sum(known.logprob for known in step.logprobs)
                    done += len(step.tokens)
            attempt.likelihood = total / max(done, 1)
        return attempt.likelihood
