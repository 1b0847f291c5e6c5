"""Exercises with two tries: `keystroke do` beside aider itself, over the same model and in the same run.

Regime: practice exercises in Python as their authors publish them, one stub each; of the tests only what they
said after the first try is shown. aider is unchanged and gets the same instruction, `--parallel` processes of
it at a time over one server; ours does one exercise after the other. Both greedy, tests in the sandbox. The
ceiling is the model: what was published for it is of other editions of the exercises.

    python -m bench.exercises --model coder.gguf --engine cuda --parallel 12 exercism/exercises/practice
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from bench.client_rows.programs import Aider
from bench.clients import serving
from bench.record import record
from keystroke.agent.chat.local import LocalChatModel
from keystroke.agent.evaluation.evaluate import EvaluationConfig
from keystroke.agent.evaluation.folder_solver import (
    TESTS_FAILED,
    FolderSolver,
    prepare_workspace,
    run_scoring_tests,
)
from keystroke.agent.evaluation.sets import load_set, with_test_timeout
from keystroke.agent.evaluation.tasks import FolderTask
from keystroke.agent.loop.edit_checker import failure_message
from keystroke.agent.sandbox import find_sandbox
from keystroke.config import Settings, load_settings
from keystroke.engine.base import Interrupt
from keystroke.engine.load import load_model
from keystroke.errors import KeystrokeError

TRIES = 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("exercises", type=Path, help="a folder of practice exercises")
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file or a model's folder")
    parser.add_argument("--engine", default="auto", choices=("auto", "onnx", "cuda"))
    parser.add_argument("--parallel", type=int, default=1, help="aiders at a time")
    parser.add_argument("--sample", type=int, default=0, help="exercises at random, by --seed; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--test-seconds", type=float, default=15.0)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one try of aider's")
    parser.add_argument("--who", nargs="*", default=["keystroke", "aider"], choices=["keystroke", "aider"])
    parser.add_argument("--aider", type=Path, help="where aider is installed")
    parser.add_argument("--save", type=Path, help="a JSON line for each exercise")
    given = parser.parse_args()
    tasks = chosen(given)
    settings = load_settings({"engine.kind": given.engine, "server.port": 0, "server.host": "127.0.0.1"})
    figures: dict[str, object] = {"bench": "exercises", "exercises": len(tasks), "model": given.model.name}
    for who in given.who:
        began = time.perf_counter()
        done = ours(tasks, given, settings) if who == "keystroke" else theirs(tasks, given, settings)
        rows = {}
        for name, tries in done:
            rows[name] = tries
            if given.save:  # as it comes: a run that is cut has said what it knows
                with given.save.open("a") as file:
                    file.write(json.dumps({"who": who, "exercise": name, "solved_in_try": tries}) + "\n")
        first, either = sum(n == 1 for n in rows.values()), sum(n > 0 for n in rows.values())
        figures |= {f"{who}_first": first / len(tasks), f"{who}_second": either / len(tasks)}
        print(f"{who:10} {first:4} in the first try, {either:4} in two, of {len(tasks)}", end="")
        print(f"  ({time.perf_counter() - began:.0f} s)", flush=True)
    figures["precision"] = settings.model.precision
    record("exercises", figures)


def chosen(given: argparse.Namespace) -> list[FolderTask]:
    with tempfile.TemporaryDirectory() as cache:
        _, every = load_set(str(given.exercises), Path(cache))
    folders = [task for task in every if isinstance(task, FolderTask)]
    if given.sample:
        folders = random.Random(given.seed).sample(folders, min(given.sample, len(folders)))
    return [task for task in with_test_timeout(folders, given.test_seconds) if isinstance(task, FolderTask)]


def ours(
    tasks: Sequence[FolderTask], given: argparse.Namespace, settings: Settings
) -> Iterator[tuple[str, int]]:
    """Exercises, and the try that solved each; 0: none did."""
    model = load_model(given.model, settings)
    chat = LocalChatModel(model)
    solver = FolderSolver(chat, find_sandbox(), workers=2)
    way = EvaluationConfig("x1", model.name, 1, max_tokens=2048, temperature=0.0, tries=TRIES)
    for task in tasks:
        try:
            yield task.id, solver.solve(task, way, Interrupt()).tries
        except KeystrokeError:
            yield task.id, 0
    chat.close()
    model.engine.close()


def theirs(
    tasks: Sequence[FolderTask], given: argparse.Namespace, settings: Settings
) -> Iterator[tuple[str, int]]:
    program = Aider(given.aider)
    sandbox = find_sandbox()

    def one(task: FolderTask, url: str) -> int:
        failed = ""
        with tempfile.TemporaryDirectory(prefix="keystroke-aider-", ignore_cleanup_errors=True) as folder:
            root = Path(folder) / "work"
            prepare_workspace(task, root)
            for number in range(1, TRIES + 1):
                told = task.instruction + (TESTS_FAILED.format(said=failed) if failed else "")
                program.do(url, root, told, given.limit)
                scored = run_scoring_tests(task, root, sandbox)
                if scored.ok:
                    return number
                failed = failure_message(scored)
        return 0

    with serving(given.model, settings) as url, ThreadPoolExecutor(given.parallel) as pool:
        asked = {pool.submit(one, task, url): task.id for task in tasks}
        for answered in as_completed(asked):
            yield asked[answered], answered.result()


if __name__ == "__main__":
    main()
