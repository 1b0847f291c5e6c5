"""Solves tasks in sequence, in every configuration, and scores the solutions.

Solving runs on the engine's thread, one task at a time, so that its time is measured alone; scoring runs
on other threads. Results are recorded in the order of the tasks, as soon as they are scored. An error while
solving a task is its result; an interrupt ends the run and loses no result that was recorded.
"""

from __future__ import annotations

import importlib.util
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import msgspec

from keystroke.agent.attempts import StopPolicy
from keystroke.agent.evaluation.result_file import ResultFile
from keystroke.agent.evaluation.tasks import ResultStatus, Task, TaskResult
from keystroke.engine.base import Interrupt
from keystroke.errors import Interrupted, KeystrokeError

OnResult = Callable[[TaskResult, int, int], None]  # result, number done, total


class EvaluationConfig(msgspec.Struct, frozen=True):
    """One configuration of a model. `label` names it in tables and plots."""

    label: str
    model: str
    attempts: int = 1
    policy: StopPolicy = StopPolicy.FIRST
    temperature: float = 0.8
    max_tokens: int = 1024
    tries: int = 1  # for folders: rounds, each shown the tests' output


class Solution(msgspec.Struct, frozen=True):
    """A solver's answer to a task, before it is scored."""

    answer: str
    seconds: float
    tokens: int = 0
    prompt_tokens: int = 0
    attempts: int = 1
    ended_early: int = 0
    checked: bool = False
    cost: float = 0.0
    passed: bool | None = None  # set where the solver has scored it already
    tries: int = 1  # the try that passed; 0: none


class Solver(Protocol):
    """Solves tasks with one model. `solve` is called on one thread; `score` on several."""

    def solve(self, task: Task, config: EvaluationConfig, interrupt: Interrupt) -> Solution: ...

    def score(self, task: Task, solution: Solution, interrupt: Interrupt) -> tuple[bool, str]: ...

    def close(self) -> None:
        """Release what is held. Idempotent."""


def missing_tools(task: Task) -> str:
    """The tools that this machine lacks to score a task, as a clause; empty if none."""
    lacking = [name for name in task.needs if not _is_installed(name)]
    return f"needs {', '.join(lacking)}" if lacking else ""


def _is_installed(name: str) -> bool:
    if name.startswith("program:"):
        return shutil.which(name.partition(":")[2]) is not None
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def evaluate(
    tasks: Sequence[Task],
    configs: Sequence[EvaluationConfig],
    solver: Solver,
    record: ResultFile,
    *,
    jobs: int = 2,
    interrupt: Interrupt | None = None,
    on_result: OnResult | None = None,
) -> list[TaskResult]:
    """Do every task in every configuration that `record` does not have yet. Raises Interrupted, with all
    finished results recorded."""
    interrupt = interrupt or Interrupt()
    todo = [
        (task, config)
        for config in configs
        for task in tasks
        if task.id not in record.finished_tasks(config.label)
    ]
    total = len(tasks) * len(configs)
    waiting: list[Future[TaskResult]] = []

    def collect(*, at_most: int) -> None:
        while len(waiting) > at_most or (waiting and waiting[0].done()):
            row = waiting.pop(0).result()
            record.add(row)
            if on_result is not None:
                on_result(row, len(record.rows), total)

    pool = ThreadPoolExecutor(jobs, "score")
    try:
        for task, config in todo:
            interrupt.check()
            if lacking := missing_tools(task):
                skipped = TaskResult(
                    task.id, config.label, ResultStatus.SKIPPED, model=config.model, message=lacking
                )
                waiting.append(_finished_future(skipped))
            else:
                waiting.append(_solve(task, config, solver, pool, interrupt))
            collect(at_most=2 * jobs)
        collect(at_most=0)
    finally:
        pool.shutdown(wait=True)
        for future in waiting:  # keep what was scored before the end
            if future.done() and not future.cancelled() and future.exception() is None:
                record.add(future.result())
    return record.rows


def _solve(
    task: Task, config: EvaluationConfig, solver: Solver, pool: ThreadPoolExecutor, interrupt: Interrupt
) -> Future[TaskResult]:
    began = time.perf_counter()
    try:
        solution = solver.solve(task, config, interrupt)
    except Interrupted:
        raise
    except KeystrokeError as error:
        seconds = time.perf_counter() - began
        return _finished_future(
            TaskResult(
                task.id, config.label, ResultStatus.ERROR, seconds, model=config.model, message=str(error)
            )
        )
    return pool.submit(_score, task, config, solution, solver, interrupt)


def _finished_future(row: TaskResult) -> Future[TaskResult]:
    future: Future[TaskResult] = Future()
    future.set_result(row)
    return future


def _score(
    task: Task, config: EvaluationConfig, solution: Solution, solver: Solver, interrupt: Interrupt
) -> TaskResult:
    if solution.passed is not None:
        passed, message = solution.passed, ""
    else:
        passed, message = solver.score(task, solution, interrupt)
    fields = msgspec.structs.asdict(solution) | {"seconds": round(solution.seconds, 4)}
    del fields["passed"], fields["tries"]
    status = ResultStatus.PASSED if passed else ResultStatus.FAILED
    return TaskResult(task.id, config.label, status, model=config.model, message=message, **fields)
