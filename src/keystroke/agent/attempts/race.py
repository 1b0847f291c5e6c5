"""Attempts made together: one prompt read once, many sessions forked from it, advancing in one batch.

Runs on one thread, which a decoder that drives an engine wants; checks run on threads of their own and
are looked at between steps. At most `width` attempts decode at a time; where one fails and more may be made,
the next begins, every other one with the failure shown to it. Whatever ends the race, every writer is closed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from keystroke.agent.attempts.attempt import Attempt, End, Outcome, Policy, Verdict
from keystroke.agent.attempts.choice import choose
from keystroke.agent.attempts.decoder import Decoder, Writer
from keystroke.agent.attempts.judge import Go, Judge, Watch
from keystroke.engine.base import GREEDY, Interrupt, Sampling
from keystroke.engine.generation import Finish
from keystroke.errors import UsageError

Retry = Callable[[Attempt], Sequence[int] | None]  # the prompt that shows a failure to the next attempt
Steer = Callable[[], Sequence[int] | None]  # tokens that turn every answer under way, if the user said so
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

    __slots__ = ("attempt", "watch", "writer")

    def __init__(self, attempt: Attempt, writer: Writer, watch: Watch) -> None:
        self.attempt, self.writer, self.watch = attempt, writer, watch


class Race:
    def __init__(
        self,
        decoder: Decoder,
        prompt: Sequence[int],
        chosen: Sequence[Sampling],
        judge: Judge,
        *,
        workers: int = 4,
        policy: Policy = Policy.FIRST,
        interrupt: Interrupt | None = None,
        retry: Retry | None = None,
        steer: Steer | None = None,
        on_attempt: Callable[[Attempt], None] | None = None,
    ) -> None:
        """`chosen` holds one sampling an attempt. `steer` is asked between steps: its tokens are put behind
        what each attempt has written, all of which stays computed, and the answer begins anew. `on_attempt`
        hears of each attempt as it ends and as it is judged, on the calling thread. The decoder is closed
        with the race."""
        if not chosen:
            raise UsageError("a race needs at least one attempt")
        self._decoder, self._prompt, self._judge = decoder, list(prompt), judge
        self._waiting = [Attempt(number, sampling) for number, sampling in enumerate(chosen)]
        self._width = min(decoder.width, len(chosen))
        self._workers, self._policy = workers, policy
        self._interrupt, self._retry = interrupt or Interrupt(), retry
        self._steer = steer
        self._heard = on_attempt or (lambda attempt: None)
        self._attempts: list[Attempt] = []
        self._live: dict[Writer, _Runner] = {}
        self._unchecked: list[Attempt] = []
        self._checks: dict[Future[Verdict | None], list[Attempt]] = {}
        self._asked: dict[str, Future[Verdict | None]] = {}  # by text: what was written twice is checked once
        self._failed: list[Attempt] = []
        self._over = Interrupt()  # ends checks that no longer matter
        self._winner: Attempt | None = None
        self._started = 0.0
        self._prefill = 0.0
        self._reused = 0

    def run(self) -> Outcome:
        """Race to the end. Interrupted where the user stopped it; what an engine or a check raises passes
        through."""
        self._started = time.perf_counter()
        pool = ThreadPoolExecutor(self._workers, "check")
        with contextlib.ExitStack() as held:
            held.callback(self._decoder.close)
            held.callback(self._close)
            # Checks that no longer matter are told to end and not waited for: ending sixteen sandboxes takes
            # longer than writing sixteen answers.
            held.callback(pool.shutdown, wait=False, cancel_futures=True)
            held.callback(self._over.set)
            self._reused = self._decoder.read(self._prompt, self._interrupt)
            self._prefill = time.perf_counter() - self._started
            while self._winner is None:
                self._interrupt.check()
                self._begin()
                if self._steer is not None and self._live and (turn := self._steer()) is not None:
                    self._turn(turn)
                if self._live:
                    self._step()
                elif not self._checks and not self._unchecked:
                    break
                self._collect(pool)
            self._end_others(End.BEATEN)
            winner, why = self._chosen()
            seconds = time.perf_counter() - self._started
        return Outcome(
            tuple(self._attempts), winner, why, seconds, len(self._prompt), self._prefill, self._reused
        )

    # ── attempts begin ────────────────────────────────────────────────────────────────────────

    def _begin(self) -> None:
        while self._waiting and len(self._live) < self._width:
            # One that may yet be judged good is waited for: on an engine that steps one at a time a second
            # attempt costs as much as the first.
            if (self._checks or self._unchecked) and self._width == 1:
                return
            attempt = self._waiting.pop(0)
            writer = self._decoder.begin(self._shown(attempt), attempt.sampling, alone=self._width == 1)
            self._attempts.append(attempt)
            self._live[writer] = _Runner(attempt, writer, self._judge.watch())

    def _shown(self, attempt: Attempt) -> Sequence[int]:
        """The prompt of an attempt: every other one that begins late sees how an earlier one failed."""
        if self._retry is None or not self._failed or attempt.number % 2 == 0:
            return self._prompt
        best = max(self._failed, key=lambda failed: (failed.score, -failed.number))
        self._failed.remove(best)
        prompt = self._retry(best)
        if prompt is None or len(prompt) + 64 > self._decoder.context:
            return self._prompt
        attempt.retry_of = best.number
        return prompt

    def _turn(self, tokens: Sequence[int]) -> None:
        """The user said something: every answer under way ends there and begins anew behind it."""
        self._prompt = [*self._prompt, *tokens]  # for attempts yet to begin
        for runner in self._live.values():
            runner.writer.turn(tokens)
            runner.watch = self._judge.watch()

    # ── they step together ────────────────────────────────────────────────────────────────────

    def _step(self) -> None:
        # While nothing is being checked only the writers can have news, and they are woken by an interrupt.
        patience = _LOOK if self._checks or self._steer is not None else None
        for writer, text, finish in self._decoder.step(list(self._live), patience):
            runner = self._live[writer]
            sign = runner.watch(text)
            if sign.go is Go.HOPELESS:
                self._ended(runner, End.HOPELESS, sign.reason)
            elif sign.go is Go.COMPLETE or finish in (Finish.STOP, Finish.STOP_STRING):
                self._ended(runner, End.FINISHED)
            elif finish is Finish.LENGTH:
                self._ended(runner, End.LENGTH, f"it did not end within {len(writer.tokens)} tokens")

    def _ended(self, runner: _Runner, end: End, reason: str = "") -> None:
        attempt, writer = runner.attempt, runner.writer
        del self._live[writer]
        attempt.text, attempt.tokens = writer.text, writer.tokens
        attempt.prompt, attempt.begins = writer.prompt, writer.begins
        attempt.end, attempt.reason = end, reason
        attempt.seconds = time.perf_counter() - self._started
        writer.close()
        if end is End.FINISHED:
            self._unchecked.append(attempt)
        elif end in (End.HOPELESS, End.LENGTH):
            self._failed.append(attempt)
            self._heard(attempt)

    # ── checks come back ──────────────────────────────────────────────────────────────────────

    def _collect(self, pool: ThreadPoolExecutor) -> None:
        for attempt in self._unchecked:
            check = self._asked.get(attempt.text)
            if check is None:
                check = self._asked[attempt.text] = pool.submit(self._judge.check, attempt.text, self._over)
            self._checks.setdefault(check, []).append(attempt)
        self._unchecked.clear()
        if not self._checks:
            return
        idle = not self._live and (not self._waiting or self._width == 1)
        done, _ = wait(self._checks, timeout=_LOOK if idle else 0, return_when=FIRST_COMPLETED)
        for future in done:
            for attempt in self._checks.pop(future):
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
        for runner in tuple(self._live.values()):
            self._ended(runner, end)
            self._heard(runner.attempt)

    def _close(self) -> None:
        for writer in self._live:
            writer.close()
        self._live.clear()

    # ── one is taken ──────────────────────────────────────────────────────────────────────────

    def _chosen(self) -> tuple[Attempt | None, str]:
        if self._winner is not None:
            return self._winner, "it was the first to pass the check"
        likelihood = self._likelihood if self._decoder.scores else None
        return choose(self._attempts, self._judge.key, likelihood)

    def _likelihood(self, attempt: Attempt) -> float:
        if attempt.likelihood is None:
            attempt.likelihood = self._decoder.likelihood(attempt, self._interrupt)
        return attempt.likelihood
