"""Solves function tasks with a model, in several attempts at once."""

from __future__ import annotations

import os
import time

from keystroke.agent.attempts import AttemptEnd
from keystroke.agent.chat.model import ChatModel
from keystroke.agent.chat.sampling import SamplingRequest
from keystroke.agent.evaluation.evaluate import EvaluationConfig, Solution
from keystroke.agent.evaluation.functions import (
    CLOSE,
    OPEN,
    FunctionChecker,
    messages,
    retry_messages,
    score,
)
from keystroke.agent.evaluation.programs import interpreter_pool
from keystroke.agent.evaluation.tasks import FunctionTask, Task
from keystroke.agent.sandbox import Sandbox
from keystroke.engine.base import Interrupt
from keystroke.errors import UsageError


class FunctionSolver:
    def __init__(self, model: ChatModel, sandbox: Sandbox, *, workers: int = 0, seed: int = 0) -> None:
        self._model, self._sandbox, self._seed = model, sandbox, seed
        # Few at a time: the answers that end first are the likeliest, and every further interpreter delays
        # their checks.
        self._workers = workers or max(2, (os.cpu_count() or 2) // 4)
        self._interpreters = interpreter_pool(sandbox, self._workers)

    def close(self) -> None:
        """End the waiting interpreters. Idempotent."""
        self._interpreters.close()

    def solve(self, task: Task, config: EvaluationConfig, interrupt: Interrupt) -> Solution:
        if not isinstance(task, FunctionTask):
            raise UsageError(f"{task.id} is not a function to write")
        started = time.perf_counter()
        request = SamplingRequest(
            messages(task),
            FunctionChecker(self._interpreters, task),
            attempts=config.attempts,
            opening=OPEN,
            stop=(CLOSE,),
            policy=config.policy,
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            seed=self._seed,
            workers=self._workers,
            retry=lambda failed: retry_messages(task, failed),
            interrupt=interrupt,
        )
        race = self._model.sample(request).race
        # Where no attempt finished, the longest is scored.
        longest = max((attempt.text for attempt in race.attempts), key=len, default="")
        return Solution(
            answer=race.winner.text if race.winner is not None else longest,
            seconds=time.perf_counter() - started,
            tokens=race.tokens,
            prompt_tokens=race.prompt_tokens,
            attempts=len(race.attempts),
            ended_early=sum(a.end in (AttemptEnd.HOPELESS, AttemptEnd.BEATEN) for a in race.attempts),
            checked=race.passed,
        )

    def score(self, task: Task, solution: Solution, interrupt: Interrupt) -> tuple[bool, str]:
        assert isinstance(task, FunctionTask)
        return score(self._sandbox, task, solution.answer, interrupt)
