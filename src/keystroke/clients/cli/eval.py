"""`keystroke eval`: tasks of a set done by models, in several ways, and score against time.

Opens models and sets, shows progress, writes results as they come and a plot at the end. Ctrl-C loses
nothing: the same command goes on. Nothing is fetched but archives of the set that is made of releases.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keystroke.clients.cli import options
from keystroke.clients.cli.invocation import Invocation, of
from keystroke.errors import InputError, UsageError

if TYPE_CHECKING:
    from keystroke.agent.chat import Chat
    from keystroke.agent.evaluation.evaluate import Solver, Way
    from keystroke.agent.evaluation.record import Record
    from keystroke.agent.evaluation.releases import Fetch
    from keystroke.agent.evaluation.report import Summary
    from keystroke.agent.evaluation.tasks import Done, Task


def evaluate(
    ctx: typer.Context,
    where: Annotated[str, typer.Argument(metavar="SET", help="A file, a folder, an archive, or `releases`.")],
    model: Annotated[
        list[str] | None, typer.Option("--model", "-m", help="Models to compare; may be repeated.")
    ] = None,
    attempts: Annotated[
        str, typer.Option("--attempts", metavar="N,N", help="Numbers of attempts to compare.")
    ] = "1",
    policy: Annotated[
        str,
        typer.Option("--policy", help="first: what passes first; agree: what most agree on. May be both."),
    ] = "first",
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="PATTERN", help="Tasks by name; may be repeated.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=0, help="At most so many tasks, spread evenly.")] = 0,
    tries: Annotated[int, typer.Option("--tries", min=1, max=10, help="Tries of a folder's task.")] = 1,
    test_seconds: Annotated[
        float,
        typer.Option("--test-seconds", min=0, help="Longest run of a folder's tests; 0: the set's own."),
    ] = 0,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=0, help="Scored at a time; 0: by cores.")] = 0,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=16, help="Longest answer.")] = 1024,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, max=5.0)] = 0.8,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Results, one JSON line each; goes on there.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.svg", help="Draw score against time.")
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the tasks; do none.")] = False,
    json: options.Json = False,
) -> None:
    from keystroke.agent.evaluation.record import Head, Record
    from keystroke.agent.evaluation.report import HEADINGS, summarised, table
    from keystroke.agent.evaluation.sets import chosen, load_set, timed

    run = of(ctx)
    as_json = run.wants_json(json)
    name, every = load_set(where, run.settings.paths.cache / "eval", _fetch(run))
    tasks = timed(chosen(every, only or [], limit), test_seconds)
    if listed:
        for task in tasks:
            run.console.line(task.id)
        return
    ways = _ways(model or [_default(run)], attempts, policy, tries, max_tokens, temperature)
    record = Record(out, Head(name, len(tasks)))
    left = _todo(record, tasks, ways)
    if left < len(tasks) * len(ways):
        run.console.note(f"{len(tasks) * len(ways) - left} results are there already; {left} to do")
    try:
        for named in dict.fromkeys(way.model for way in ways):
            mine = [way for way in ways if way.model == named]
            if _todo(record, tasks, mine):
                _one_model(run, named, tasks, mine, record, jobs)
    except KeyboardInterrupt:
        run.console.note("stopped; the same command goes on" + ("" if out else " if you give it --out FILE"))
        raise
    summaries = summarised(record.rows)
    if as_json:
        run.console.json({"set": name, "ways": summaries, "results": record.rows})
    else:
        run.console.table(HEADINGS, table(summaries))
    if plot is not None:
        _draw(plot, summaries, name)
        run.console.note(f"score against time: {plot}")


def _default(run: Invocation) -> str:
    from keystroke.engine.roles import Role, required

    return required(Role.CHAT, run.settings)


def _ways(
    models: list[str], attempts: str, policy: str, tries: int, max_tokens: int, temperature: float
) -> list[Way]:
    from keystroke.agent.attempts import Policy
    from keystroke.agent.evaluation.evaluate import Way

    try:
        numbers = [int(part) for part in attempts.split(",")]
        policies = [Policy(part.strip()) for part in policy.split(",")]
    except ValueError:
        raise UsageError(
            f"--attempts takes numbers like 1,4,16 and --policy {' or '.join(Policy)}, not "
            f"{attempts!r:.40} and {policy!r:.40}"
        ) from None
    if not all(1 <= number <= 64 for number in numbers):
        raise UsageError("--attempts takes numbers from 1 to 64")
    ways = []
    for named in models:
        short = Path(named).name if os.path.exists(named) else named
        for number in numbers:
            for chosen in policies if number > 1 else policies[:1]:
                how = f" {chosen}" if len(policies) > 1 and number > 1 else ""
                label = f"{short} x{number}{how}" if len(models) > 1 else f"x{number}{how}"
                ways.append(Way(label, named, number, chosen, temperature, max_tokens, tries))
    return ways


def _todo(record: Record, tasks: list[Task], ways: list[Way]) -> int:
    return sum(task.id not in record.known(way.label) for way in ways for task in tasks)


def _one_model(
    run: Invocation, named: str, tasks: list[Task], ways: list[Way], record: Record, jobs: int
) -> None:
    from keystroke.agent.evaluation.evaluate import evaluate as evaluated
    from keystroke.agent.sandbox import find_sandbox
    from keystroke.clients.cli.chats import open_chat
    from keystroke.clients.cli.interruption import interruptible
    from keystroke.errors import Interrupted

    sandbox = find_sandbox()
    if not sandbox.confines:
        raise InputError("no sandbox holds on this machine, and what models write is not run without one")
    with ExitStack() as stack:
        interrupt = stack.enter_context(interruptible())
        chat = open_chat(named, run)
        stack.callback(chat.close)
        progress = stack.enter_context(run.console.progress())
        began = time.monotonic()
        passed = {"passed": 0, "done": 0}

        def told(row: Done, done: int, total: int) -> None:
            passed["done"] += 1
            passed["passed"] += row.status == "passed"
            rate = (time.monotonic() - began) / passed["done"]
            progress(f"{row.way}: {passed['passed']}/{passed['done']} passed, {rate:.1f} s each", done, total)

        try:
            with closing(_solver(chat, tasks)) as solver:
                evaluated(
                    tasks,
                    ways,
                    solver,
                    record,
                    jobs=jobs or max(1, (os.cpu_count() or 2) // 2),
                    interrupt=interrupt,
                    told=told,
                )
        except Interrupted:
            raise KeyboardInterrupt from None


def _solver(chat: Chat, tasks: list[Task]) -> Solver:
    from keystroke.agent.chat import LocalChat
    from keystroke.agent.evaluation.folder_solver import FolderSolver
    from keystroke.agent.evaluation.function_solver import FunctionSolver
    from keystroke.agent.evaluation.tasks import FunctionTask
    from keystroke.agent.sandbox import find_sandbox

    if not isinstance(tasks[0], FunctionTask):
        return FolderSolver(chat, find_sandbox())
    if not isinstance(chat, LocalChat):
        raise UsageError(
            "functions are asked of models on this machine; a server's model does folders' tasks"
        )
    return FunctionSolver(chat.model, find_sandbox())


def _fetch(run: Invocation) -> Fetch:
    """Source archives from pip's index, kept once fetched."""
    folder = run.settings.paths.cache / "eval" / "archives"

    def fetch(package: str, version: str) -> bytes:
        kept = folder / f"{package}-{version}"
        if kept.is_file():
            return kept.read_bytes()
        from keystroke.train.corpus.index import PackageIndex

        index = PackageIndex()
        try:
            project = index.project(package)
            for release in project.releases if project is not None else ():
                if release.version == version and release.download.sdist:
                    data = index.fetch(release.download)
                    folder.mkdir(parents=True, exist_ok=True)
                    part = kept.with_name(f"{kept.name}.part")
                    part.write_bytes(data)
                    part.replace(kept)
                    return data
        finally:
            index.close()
        raise InputError(f"the package index has no source archive of {package} {version}")

    return fetch


def _draw(plot: Path, summaries: list[Summary], name: str) -> None:
    from keystroke.agent.evaluation.plot import plotted

    try:
        plot.write_text(plotted(summaries, f"{name}: score against time"), encoding="utf-8")
    except OSError as error:
        raise InputError(f"{plot} cannot be written: {error.strerror}") from None
