"""Tasks done one after the other, each in every way asked for, and scored.

Solving happens on the engine's thread, one task at a time, so that its seconds are its own; scoring
happens beside it, on threads. Every result is recorded as it comes. An error of one task is its result and
not the end of the run; an interrupt is the end, and loses nothing.
"""

from __future__ import annotations

import importlib.util
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import msgspec

from keystroke.agent.attempts import Policy
from keystroke.agent.evaluation.record import Record
from keystroke.agent.evaluation.tasks import Done, Status, Task
from keystroke.engine.base import Interrupt
from keystroke.errors import Interrupted, KeystrokeError

Told = Callable[[Done, int, int], None]  # a result, how many are done, of how many


class Way(msgspec.Struct, frozen=True):
    """One way of doing tasks. `label` names it in tables and plots."""

    label: str
    model: str
    attempts: int = 1
    policy: Policy = Policy.FIRST
    temperature: float = 0.8
    max_tokens: int = 1024
    tries: int = 1  # for folders: how often the tests' output is shown


class Solved(msgspec.Struct, frozen=True):
    """What a solver made of a task, before it is scored."""

    answer: str
    seconds: float
    tokens: int = 0
    prompt_tokens: int = 0
    attempts: int = 1
    ended_early: int = 0
    checked: bool = False
    cost: float = 0.0
    verdict: bool | None = None  # already scored, where solving needs the tests' own word
    tries: int = 1  # the try that passed, where a task gives several; 0: none did


class Solver(Protocol):
    """Does tasks with one model. `solve` is called on one thread; `score` on several."""

    def solve(self, task: Task, way: Way, interrupt: Interrupt) -> Solved: ...

    def score(self, task: Task, solved: Solved, interrupt: Interrupt) -> tuple[bool, str]: ...

    def close(self) -> None:
        """Give back what is held. Idempotent."""
        ...


def missing(task: Task) -> str:
    """What this machine lacks to score a task; empty where nothing."""
    lacking = [name for name in task.needs if not _there(name)]
    return f"needs {', '.join(lacking)}" if lacking else ""


def _there(name: str) -> bool:
    if name.startswith("program:"):
        return shutil.which(name.partition(":")[2]) is not None
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def evaluate(
    tasks: Sequence[Task],
    ways: Sequence[Way],
    solver: Solver,
    record: Record,
    *,
    jobs: int = 2,
    interrupt: Interrupt | None = None,
    told: Told | None = None,
) -> list[Done]:
    """Do every task in every way that `record` does not hold yet. Interrupted on request, with all that was
    finished recorded."""
    interrupt = interrupt or Interrupt()
    todo = [(task, way) for way in ways for task in tasks if task.id not in record.known(way.label)]
    total = len(tasks) * len(ways)
    waiting: list[Future[Done]] = []

    def collect(*, at_most: int) -> None:
        while len(waiting) > at_most or (waiting and waiting[0].done()):
            row = waiting.pop(0).result()
            record.add(row)
            if told is not None:
                told(row, len(record.rows), total)

    pool = ThreadPoolExecutor(jobs, "score")
    try:
        for task, way in todo:
            interrupt.check()
            if lacking := missing(task):
                skipped = Done(task.id, way.label, Status.SKIPPED, model=way.model, message=lacking)
                waiting.append(_known(skipped))
            else:
                waiting.append(_one(task, way, solver, pool, interrupt))
            collect(at_most=2 * jobs)
        collect(at_most=0)
    finally:
        pool.shutdown(wait=True)
        for future in waiting:  # what was scored before the end is not lost
            if future.done() and not future.cancelled() and future.exception() is None:
                record.add(future.result())
    return record.rows


def _one(
    task: Task, way: Way, solver: Solver, pool: ThreadPoolExecutor, interrupt: Interrupt
) -> Future[Done]:
    began = time.perf_counter()
    try:
        solved = solver.solve(task, way, interrupt)
    except Interrupted:
        raise
    except KeystrokeError as error:
        seconds = time.perf_counter() - began
        return _known(Done(task.id, way.label, Status.ERROR, seconds, model=way.model, message=str(error)))
    return pool.submit(_scored, task, way, solved, solver, interrupt)


def _known(row: Done) -> Future[Done]:
    future: Future[Done] = Future()
    future.set_result(row)
    return future


def _scored(task: Task, way: Way, solved: Solved, solver: Solver, interrupt: Interrupt) -> Done:
    if solved.verdict is not None:
        passed, message = solved.verdict, ""
    else:
        passed, message = solver.score(task, solved, interrupt)
    return Done(
        task=task.id,
        way=way.label,
        status=Status.PASSED if passed else Status.FAILED,
        seconds=round(solved.seconds, 4),
        tokens=solved.tokens,
        prompt_tokens=solved.prompt_tokens,
        attempts=solved.attempts,
        ended_early=solved.ended_early,
        cost=solved.cost,
        checked=solved.checked,
        model=way.model,
        message=message,
        answer=solved.answer,
    )
