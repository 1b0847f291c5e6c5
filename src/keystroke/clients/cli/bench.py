"""`keystroke bench`: runs a benchmark of the checkout, or a quick one of the default model.

A benchmark's file runs with this Python, and its exit code is passed on. With --json its output goes to
standard error, and what it recorded (machine, version, command, figures) is printed, for an issue.
"""

from __future__ import annotations

import ast
import json as json_text
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from keystroke.clients.cli import options
from keystroke.clients.cli.fingerprint import checkout
from keystroke.clients.cli.options import Invocation, argument, invocation_of
from keystroke.errors import NotFound, UnsupportedModel

QUICK = "quick"
_PROGRAM = 'if __name__ == "__main__":'
CUDA = "cuda"


def bench(
    ctx: typer.Context,
    name: Annotated[str | None, argument("A benchmark. Default: list them.")] = None,
    arguments: Annotated[list[str] | None, argument("Arguments for the benchmark, after --.")] = None,
    model: options.Model = None,
    json: options.Json = False,
) -> None:
    run = invocation_of(ctx)
    found = benchmarks()
    if name is None:
        rows = [(QUICK, "prefill and decode of the default model, about two seconds")]
        rows += [(known, _about(file)) for known, file in found.items()]
        if run.json:
            run.console.json([{"name": known, "about": about} for known, about in rows])
        else:
            run.console.table(("name", "what it measures"), rows)
    elif name == QUICK:
        _quick(model, run)
    elif name in found:
        if name == CUDA:
            from keystroke.engine.cuda.backend import check_machine

            check_machine()  # raises an error that says what is missing
        command = [sys.executable, "-m", f"bench.{name}", *(arguments or ())]
        if run.json:
            code, results = run_recorded(command, found[name].parents[1])
            for result in results:
                run.console.json(result)
            raise typer.Exit(code)
        done = subprocess.run(command, check=False, cwd=found[name].parents[1])
        raise typer.Exit(done.returncode)
    else:
        where = (
            f"choose from {', '.join((QUICK, *found))}"
            if found
            else f"outside a checkout there is only {QUICK}"
        )
        raise NotFound(f"there is no benchmark called {name:.60}; {where}")


def run_recorded(command: list[str], folder: Path) -> tuple[int, list[object]]:
    """The exit code of a benchmark and what it recorded; the results of the checkout stay as they are."""
    with tempfile.TemporaryDirectory() as results:
        environment = {**os.environ, "BENCH_RESULTS": results}
        done = subprocess.run(command, check=False, cwd=folder, env=environment, stdout=sys.stderr)
        files = sorted(Path(results).glob("*.json"))
        return done.returncode, [json_text.loads(file.read_bytes()) for file in files]


def benchmarks() -> dict[str, Path]:
    """The programs of `bench/` in the checkout by name; none in an installation."""
    if (root := checkout()) is None:
        return {}
    files = sorted((root / "bench").glob("*.py"))
    return {file.stem: file for file in files if _PROGRAM in file.read_text(encoding="utf-8")}


def _about(file: Path) -> str:
    try:
        text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    except (OSError, SyntaxError, ValueError):
        return ""
    return text.partition("\n")[0]


def _quick(model: str | None, run: Invocation) -> None:
    from keystroke.agent.chat.local import LocalChatModel
    from keystroke.clients.cli.measure import measure
    from keystroke.clients.cli.open_model import open_model

    with open_model(model, run, local=True) as opened:
        if not isinstance(opened, LocalChatModel):
            raise UnsupportedModel(
                f"{opened.name} runs on a server; the quick benchmark is for models on this machine"
            )
        speed = measure(opened.model.engine)
        engine = type(opened.model.engine).__module__.split(".")[2]
    if run.json:
        from keystroke.clients.cli.installed_version import release
        from keystroke.engine.machine import look_up_machine

        machine = look_up_machine(run.settings.paths.models).describe()
        about = {"machine": machine, "version": release(), "engine": engine}
        run.console.json({"model": opened.name, **about, **asdict(speed)})
    else:
        costs = ", ".join(f"{rows}: {cost:.1f}" for rows, cost in speed.verify.items())
        run.console.table(
            ("model", "prefill tok/s", "decode tok/s", "verify rows: cost in steps"),
            [(opened.name, f"{speed.prefill:.0f}", f"{speed.decode:.0f}", costs)],
        )
