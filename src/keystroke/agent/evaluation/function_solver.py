"""Functions written by a model on this machine, several attempts at once.

One engine, one thread. The prompt of a task is read once for all its attempts.
"""

from __future__ import annotations

import os
import time

from keystroke.agent.attempts import End, EngineDecoder, Race, samplings
from keystroke.agent.evaluation.evaluate import Solved, Way
from keystroke.agent.evaluation.functions import (
    CLOSE,
    FunctionJudge,
    messages,
    prompt_tokens,
    retry_tokens,
    score,
)
from keystroke.agent.evaluation.programs import standby
from keystroke.agent.evaluation.tasks import FunctionTask, Task
from keystroke.agent.sandbox import Sandbox
from keystroke.engine.base import Interrupt
from keystroke.engine.generation import GenerationParams
from keystroke.engine.model import Model
from keystroke.engine.speculative import drafter_for
from keystroke.errors import UsageError


class FunctionSolver:
    def __init__(self, model: Model, sandbox: Sandbox, *, workers: int = 0, seed: int = 0) -> None:
        self._model, self._sandbox, self._seed = model, sandbox, seed
        # Few at a time: the answers that ended first are the likeliest, and every further interpreter that
        # starts beside theirs makes their verdict later.
        self._workers = workers or max(2, (os.cpu_count() or 2) // 4)
        self._ready = standby(sandbox, self._workers)

    def close(self) -> None:
        """End what stands ready to check answers. Idempotent."""
        self._ready.close()

    def solve(self, task: Task, way: Way, interrupt: Interrupt) -> Solved:
        if not isinstance(task, FunctionTask):
            raise UsageError(f"{task.id} is no function to write")
        began = time.perf_counter()
        model = self._model
        decoder = EngineDecoder(
            model,
            GenerationParams(way.max_tokens, stop=(CLOSE,)),
            draft=lambda: drafter_for(model.engine, draft=model.draft),  # anew: nothing learnt elsewhere
        )
        race = Race(
            decoder,
            prompt_tokens(model, messages(task)),
            samplings(way.attempts, temperature=way.temperature, seed=self._seed),
            FunctionJudge(self._ready, task),
            workers=self._workers,
            policy=way.policy,
            interrupt=interrupt,
            retry=lambda failed: retry_tokens(model, task, failed),
        )
        done = race.run()
        early = sum(attempt.end in (End.HOPELESS, End.BEATEN) for attempt in done.attempts)
        return Solved(
            answer=done.winner.text if done.winner is not None else _longest(done.attempts),
            seconds=time.perf_counter() - began,
            tokens=done.tokens,
            prompt_tokens=done.prompt_tokens,
            attempts=len(done.attempts),
            ended_early=early,
            checked=done.passed,
        )

    def score(self, task: Task, solved: Solved, interrupt: Interrupt) -> tuple[bool, str]:
        assert isinstance(task, FunctionTask)
        return score(self._sandbox, task, solved.answer, interrupt)


def _longest(attempts: tuple[object, ...]) -> str:
    """Where none came to an end, the one that got furthest is scored all the same."""
    return max((getattr(attempt, "text", "") for attempt in attempts), key=len, default="")
