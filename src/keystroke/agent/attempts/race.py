"""Runs attempts together: the prompt is read once, and streams forked from it advance in one batch.

Decoding runs on the calling thread; checks run on threads of their own. At most `width` attempts decode at
a time. Where one fails, the next starts; every second one is shown an earlier failure. Where company slows
an attempt, the first runs alone, and the others start if its check refuses it. All streams are closed at the
end.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from keystroke.agent.attempts.attempt import Attempt, AttemptEnd, CheckResult, RaceResult, StopPolicy
from keystroke.agent.attempts.checker import AttemptChecker, AttemptWatch, WatchState
from keystroke.agent.attempts.decoder import AttemptStream, Decoder
from keystroke.agent.attempts.selection import select_attempt
from keystroke.agent.sandbox.busy_clock import BusyClock
from keystroke.engine.base import GREEDY, Interrupt, Sampling
from keystroke.engine.generation import Finish
from keystroke.errors import UsageError

RetryPrompt = Callable[[Attempt], Sequence[int] | None]  # shows a failed attempt to the next one
SteeringTokens = Callable[[], Sequence[int] | None]  # tokens that redirect every running answer
_POLL_SECONDS = 0.005  # between two looks at an interrupt while only checks run


def attempt_samplings(
    count: int, *, temperature: float = 0.8, seed: int = 0, greedy: bool = True
) -> list[Sampling]:
    """Sampling settings for `count` attempts: the first is greedy, the others have rising temperatures.
    Without `greedy` all are sampled, because the greedy answer is known already."""
    free = count - 1 if greedy else count
    return [GREEDY] * greedy + [
        Sampling(
            temperature=round(temperature * (0.75 + 0.5 * number / max(free - 1, 1)), 3),
            top_p=0.95,
            seed=seed + number + 1,
        )
        for number in range(free)
    ]


@dataclass(slots=True)
class _Runner:
    """A running attempt."""

    attempt: Attempt
    stream: AttemptStream
    watch: AttemptWatch


class Race:
    def __init__(
        self,
        decoder: Decoder,
        prompt: Sequence[int],
        samplings: Sequence[Sampling],
        checker: AttemptChecker,
        *,
        workers: int = 4,
        policy: StopPolicy = StopPolicy.FIRST,
        interrupt: Interrupt | None = None,
        retry: RetryPrompt | None = None,
        steer: SteeringTokens | None = None,
        on_attempt: Callable[[Attempt], None] | None = None,
        busy: BusyClock | None = None,
    ) -> None:
        """`samplings` holds one sampling per attempt. `steer` is called between steps: its tokens are
        appended to what each attempt has written, and the answer starts again after them. `on_attempt` is
        called on this thread when an attempt has ended or was checked. `busy` counts the time in which the
        model computes. The race closes the decoder."""
        if not samplings:
            raise UsageError("a race needs at least one attempt")
        self._decoder, self._prompt, self._checker = decoder, list(prompt), checker
        self._waiting = [Attempt(number, sampling) for number, sampling in enumerate(samplings)]
        self._width = self._full_width = min(decoder.width, len(samplings))
        if decoder.slows and policy is StopPolicy.FIRST:
            self._width = 1
        self._workers, self._policy = workers, policy
        self._interrupt, self._retry = interrupt or Interrupt(), retry
        self._steer = steer
        self._on_attempt = on_attempt or (lambda attempt: None)
        self._busy = busy or BusyClock()
        self._attempts: list[Attempt] = []
        self._live: dict[AttemptStream, _Runner] = {}
        self._unchecked: list[Attempt] = []
        self._checks: dict[Future[CheckResult | None], list[Attempt]] = {}
        self._checks_by_text: dict[str, Future[CheckResult | None]] = {}  # equal texts are checked once
        self._failed: list[Attempt] = []
        self._stop_checks = Interrupt()  # stops checks that are no longer needed
        self._winner: Attempt | None = None
        self._started = 0.0
        self._prefill = 0.0
        self._reused = 0

    def run(self) -> RaceResult:
        """Run all attempts. Raises Interrupted, and what an engine or a check raises."""
        self._started = time.perf_counter()
        pool = ThreadPoolExecutor(self._workers, "check")
        with contextlib.ExitStack() as stack:
            stack.callback(self._decoder.close)
            stack.callback(self._close)
            # Checks that are no longer needed are stopped and not waited for: ending sixteen sandboxes takes
            # longer than generating sixteen answers.
            stack.callback(pool.shutdown, wait=False, cancel_futures=True)
            stack.callback(self._stop_checks.set)
            with self._busy:
                self._reused = self._decoder.prefill(self._prompt, self._interrupt)
            self._prefill = time.perf_counter() - self._started
            while self._winner is None:
                self._interrupt.check()
                self._start_waiting()
                if self._steer is not None and self._live and (tokens := self._steer()) is not None:
                    self._redirect(tokens)
                if self._live:
                    self._step()
                elif not self._checks and not self._unchecked:
                    break
                self._collect(pool)
            self._end_others()
            winner, reason = self._select()
            seconds = time.perf_counter() - self._started
        attempts, length = tuple(self._attempts), len(self._prompt)
        return RaceResult(attempts, winner, reason, seconds, length, self._prefill, self._reused)

    def _start_waiting(self) -> None:
        if self._attempts and not (self._live or self._checks or self._unchecked):
            self._width = self._full_width  # the first attempt failed
        while self._waiting and len(self._live) < self._width:
            # Wait for pending checks: on an engine that steps one at a time a second attempt costs as much as
            # the first.
            if (self._checks or self._unchecked) and self._width == 1:
                return
            attempt = self._waiting.pop(0)
            stream = self._decoder.start(self._prompt_for(attempt), attempt.sampling, alone=self._width == 1)
            self._attempts.append(attempt)
            self._live[stream] = _Runner(attempt, stream, self._checker.watch())

    def _prompt_for(self, attempt: Attempt) -> Sequence[int]:
        """The prompt of an attempt: every second one that starts late is shown an earlier failure."""
        if self._retry is None or not self._failed or attempt.number % 2 == 0:
            return self._prompt
        best = max(self._failed, key=lambda failed: (failed.score, -failed.number))
        self._failed.remove(best)
        prompt = self._retry(best)
        if prompt is None or len(prompt) + 64 > self._decoder.context:
            return self._prompt
        attempt.retry_of = best.number
        return prompt

    def _redirect(self, tokens: Sequence[int]) -> None:
        """End every running answer and start it again after `tokens`."""
        self._prompt = [*self._prompt, *tokens]  # for attempts yet to start
        for runner in self._live.values():
            runner.stream.redirect(tokens)
            runner.watch = self._checker.watch()

    def _step(self) -> None:
        # While nothing is checked only the streams can have news, and an interrupt wakes them.
        timeout = _POLL_SECONDS if self._checks or self._steer is not None else None
        with self._busy:
            chunks = list(self._decoder.step(list(self._live), timeout))
        for stream, text, finish in chunks:
            runner = self._live[stream]
            watched = runner.watch(text)
            if watched.state is WatchState.HOPELESS:
                self._end(runner, AttemptEnd.HOPELESS, watched.reason)
            elif watched.state is WatchState.COMPLETE or finish in (Finish.STOP, Finish.STOP_STRING):
                self._end(runner, AttemptEnd.FINISHED)
            elif finish is Finish.LENGTH:
                self._end(runner, AttemptEnd.LENGTH, f"it did not end within {len(stream.tokens)} tokens")

    def _end(self, runner: _Runner, end: AttemptEnd, reason: str = "") -> None:
        attempt, stream = runner.attempt, runner.stream
        del self._live[stream]
        attempt.text, attempt.tokens = stream.text, stream.tokens
        attempt.prompt, attempt.redirected_at = stream.prompt, stream.redirected_at
        attempt.end, attempt.reason = end, reason
        attempt.seconds = time.perf_counter() - self._started
        stream.close()
        if end is AttemptEnd.FINISHED:
            self._unchecked.append(attempt)
        elif end in (AttemptEnd.HOPELESS, AttemptEnd.LENGTH):
            self._failed.append(attempt)
            self._on_attempt(attempt)

    def _collect(self, pool: ThreadPoolExecutor) -> None:
        for attempt in self._unchecked:
            check = self._checks_by_text.get(attempt.text)
            if check is None:
                check = self._checks_by_text[attempt.text] = pool.submit(
                    self._checker.check, attempt.text, self._stop_checks
                )
            self._checks.setdefault(check, []).append(attempt)
        self._unchecked.clear()
        if not self._checks:
            return
        idle = not self._live and (not self._waiting or self._width == 1)
        done, _ = wait(self._checks, timeout=_POLL_SECONDS if idle else 0, return_when=FIRST_COMPLETED)
        for future in done:
            for attempt in self._checks.pop(future):
                attempt.check_result = future.result()
                attempt.seconds = time.perf_counter() - self._started
                self._on_checked(attempt)

    def _on_checked(self, attempt: Attempt) -> None:
        self._on_attempt(attempt)
        if attempt.check_result is None:
            return
        if not attempt.check_result.passed:
            self._failed.append(attempt)
        elif self._policy is StopPolicy.FIRST and self._winner is None:
            self._winner = attempt
            self._waiting.clear()

    def _end_others(self) -> None:
        for runner in tuple(self._live.values()):
            self._end(runner, AttemptEnd.BEATEN)
            self._on_attempt(runner.attempt)

    def _close(self) -> None:
        for stream in self._live:
            stream.close()
        self._live.clear()

    def _select(self) -> tuple[Attempt | None, str]:
        if self._winner is not None:
            return self._winner, "it was the first to pass the check"
        likelihood = self._likelihood if self._decoder.has_likelihood else None
        return select_attempt(self._attempts, self._checker.key, likelihood)

    def _likelihood(self, attempt: Attempt) -> float:
        if attempt.likelihood is None:
            attempt.likelihood = self._decoder.likelihood(attempt, self._interrupt)
        return attempt.likelihood
