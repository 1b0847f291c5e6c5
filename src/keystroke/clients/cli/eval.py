"""`keystroke eval`: evaluates models on a set of tasks, score against time.

Writes results as they come and a plot at the end. After Ctrl-C the same command continues. Nothing is
downloaded but the archives of the set `releases`.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keystroke.clients.cli import options
from keystroke.clients.cli.options import Invocation, argument, invocation_of, option
from keystroke.errors import InputError, UsageError

if TYPE_CHECKING:
    from keystroke.agent.chat.model import ChatModel
    from keystroke.agent.evaluation.evaluate import EvaluationConfig, Solver
    from keystroke.agent.evaluation.report import Summary
    from keystroke.agent.evaluation.result_file import ResultFile
    from keystroke.agent.evaluation.tasks import Task, TaskResult


def evaluate(
    ctx: typer.Context,
    where: Annotated[str, argument("A file, a folder, an archive, or `releases`.", metavar="SET")],
    model: Annotated[list[str] | None, option("--model", "-m", "Models to compare; may be repeated.")] = None,
    attempts: Annotated[str, option("Numbers of attempts to compare.", metavar="N,N")] = "1",
    policy: Annotated[
        str, option("first: the first that passes; agree: what most agree on. May be both.")
    ] = "first",
    only: Annotated[list[str] | None, option("Tasks by name; may be repeated.", metavar="PATTERN")] = None,
    limit: Annotated[int, option("At most this many tasks, spread evenly.", min=0)] = 0,
    tries: Annotated[int, option("Tries for a folder task.", min=1, max=10)] = 1,
    test_seconds: Annotated[float, option("Time limit of a folder's tests; 0: the set's own.", min=0)] = 0,
    jobs: Annotated[int, option("--jobs", "-j", "Tasks scored at a time; 0: by cores.", min=0)] = 0,
    max_tokens: Annotated[int, option("Longest answer.", min=16)] = 1024,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, max=5.0)] = 0.8,
    out: Annotated[
        Path | None, option("Results, one JSON line each; continues an existing file.", metavar="FILE")
    ] = None,
    plot: Annotated[Path | None, option("Draw score against time.", metavar="FILE.svg")] = None,
    listed: Annotated[bool, option("--list", "List the tasks; do none.")] = False,
    json: options.Json = False,
) -> None:
    from keystroke.agent.evaluation.report import HEADINGS, summarise, table_rows
    from keystroke.agent.evaluation.result_file import ResultFile, ResultHeader
    from keystroke.agent.evaluation.sets import load_set, select_tasks, with_test_timeout
    from keystroke.agent.evaluation.source_archives import source_archive
    from keystroke.clients.cli.open_model import chat_model

    run = invocation_of(ctx)
    cache = run.settings.paths.cache / "eval"
    name, every = load_set(where, cache, partial(source_archive, folder=cache / "archives"))
    tasks = with_test_timeout(select_tasks(every, only or [], limit), test_seconds)
    if listed:
        for task in tasks:
            run.console.line(task.id)
        return
    configs = _configs(model or [chat_model(None, run)], attempts, policy, tries, max_tokens, temperature)
    record = ResultFile(out, ResultHeader(name, len(tasks)))
    left = _todo(record, tasks, configs)
    if left < len(tasks) * len(configs):
        run.console.note(f"{len(tasks) * len(configs) - left} results exist already; {left} to do")
    try:
        for named in dict.fromkeys(config.model for config in configs):
            mine = [config for config in configs if config.model == named]
            if _todo(record, tasks, mine):
                _evaluate_model(run, named, tasks, mine, record, jobs)
    except KeyboardInterrupt:
        run.console.note(
            "stopped; the same command continues" + ("" if out else " if you give it --out FILE")
        )
        raise
    summaries = summarise(record.rows)
    if run.json:
        run.console.json({"set": name, "ways": summaries, "results": record.rows})
    else:
        run.console.table(HEADINGS, table_rows(summaries))
    if plot is not None:
        _draw(plot, summaries, name)
        run.console.note(f"score against time: {plot}")


def _configs(
    models: list[str], attempts: str, policy: str, tries: int, max_tokens: int, temperature: float
) -> list[EvaluationConfig]:
    from keystroke.agent.attempts import StopPolicy
    from keystroke.agent.evaluation.evaluate import EvaluationConfig

    try:
        numbers = [int(part) for part in attempts.split(",")]
        policies = [StopPolicy(part.strip()) for part in policy.split(",")]
    except ValueError:
        raise UsageError(
            f"--attempts takes numbers like 1,4,16 and --policy {' or '.join(StopPolicy)}, not "
            f"{attempts!r:.40} and {policy!r:.40}"
        ) from None
    if not all(1 <= number <= 64 for number in numbers):
        raise UsageError("--attempts takes numbers from 1 to 64")
    configs = []
    for named in models:
        short = Path(named).name if os.path.exists(named) else named
        for number in numbers:
            for chosen in policies if number > 1 else policies[:1]:
                how = f" {chosen}" if len(policies) > 1 and number > 1 else ""
                label = f"{short} x{number}{how}" if len(models) > 1 else f"x{number}{how}"
                configs.append(EvaluationConfig(label, named, number, chosen, temperature, max_tokens, tries))
    return configs


def _todo(record: ResultFile, tasks: list[Task], configs: list[EvaluationConfig]) -> int:
    return sum(task.id not in record.finished_tasks(config.label) for config in configs for task in tasks)


def _evaluate_model(
    run: Invocation,
    named: str,
    tasks: list[Task],
    configs: list[EvaluationConfig],
    record: ResultFile,
    jobs: int,
) -> None:
    from keystroke.agent.evaluation.evaluate import evaluate as run_evaluation
    from keystroke.agent.sandbox import find_sandbox
    from keystroke.clients.cli.interruption import interruptible
    from keystroke.clients.cli.open_model import open_task_model
    from keystroke.errors import Interrupted

    sandbox = find_sandbox()
    if not sandbox.confines:
        raise InputError("no sandbox works on this machine, and code of models is not run without one")
    with ExitStack() as stack:
        interrupt = stack.enter_context(interruptible())
        opened = stack.enter_context(open_task_model(named, run))
        progress = stack.enter_context(run.console.progress())
        began = time.monotonic()
        passed = {"passed": 0, "done": 0}

        def on_result(row: TaskResult, done: int, total: int) -> None:
            passed["done"] += 1
            passed["passed"] += row.status == "passed"
            rate = (time.monotonic() - began) / passed["done"]
            counts = f"{passed['passed']}/{passed['done']} passed"
            progress(f"{row.label}: {counts}, {rate:.1f} s each", done, total)

        try:
            with closing(_solver(opened, tasks)) as solver:
                run_evaluation(
                    tasks,
                    configs,
                    solver,
                    record,
                    jobs=jobs or max(1, (os.cpu_count() or 2) // 2),
                    interrupt=interrupt,
                    on_result=on_result,
                )
        except Interrupted:
            raise KeyboardInterrupt from None


def _solver(model: ChatModel, tasks: list[Task]) -> Solver:
    from keystroke.agent.chat.local import LocalChatModel
    from keystroke.agent.evaluation.folder_solver import FolderSolver
    from keystroke.agent.evaluation.functions import FunctionSolver
    from keystroke.agent.evaluation.tasks import FunctionTask
    from keystroke.agent.sandbox import find_sandbox

    if not isinstance(tasks[0], FunctionTask):
        return FolderSolver(model, find_sandbox())
    if not isinstance(model, LocalChatModel):
        raise UsageError("function tasks need a local model; a server's model solves folder tasks")
    return FunctionSolver(model, find_sandbox())


def _draw(plot: Path, summaries: list[Summary], name: str) -> None:
    from keystroke.agent.evaluation.plot import render_plot

    try:
        plot.write_text(render_plot(summaries, f"{name}: score against time"), encoding="utf-8")
    except OSError as error:
        raise InputError(f"{plot} cannot be written: {error.strerror}") from None
