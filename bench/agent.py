"""Tasks solved by a model with one and with many attempts: score, seconds per task, tokens per second.

Regime: functions of HumanEval and MBPP+ asked in chat, and exercises of the polyglot benchmark in Python with
two tries. One attempt is greedy; of several, the first is greedy and the others sampled, all forked from one
prefilled prompt and stepped together. Attempts are checked in the sandbox with the examples of the task's
description; the tests that decide the score are not shown (polyglot: the second try sees their output, as in
that benchmark). Seconds are from prompt to answer with checks, one task at a time, without scoring. The run
with the most attempts comes first, so that single attempts profit from its cached prompts and the ratio of
times is not flattered. Ceiling: unknown for several attempts; published for one attempt of
Qwen2.5-Coder-1.5B-Instruct: HumanEval 70.7, MBPP 69.2.

    python -m bench.agent --engine cuda --precision int8 --model coder.gguf \\
        --humaneval HumanEval.jsonl.gz --mbpp MbppPlus.jsonl --polyglot polyglot-benchmark/python

Sets that are not given are left out. On a CPU: --limit 8. Results are written to --out; a stopped run
resumes.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from bench.record import record
from keystroke.agent.attempts import EngineDecoder, Race, attempt_samplings
from keystroke.agent.chat.encoder import ConversationEncoder
from keystroke.agent.chat.local import LocalChatModel
from keystroke.agent.evaluation.evaluate import EvaluationConfig, evaluate
from keystroke.agent.evaluation.folder_solver import FolderSolver
from keystroke.agent.evaluation.functions import CLOSE, OPEN, FunctionChecker, FunctionSolver, messages
from keystroke.agent.evaluation.plot import render_plot
from keystroke.agent.evaluation.programs import interpreter_pool
from keystroke.agent.evaluation.report import HEADINGS, Summary, summarise, table_rows
from keystroke.agent.evaluation.result_file import ResultFile, ResultHeader
from keystroke.agent.evaluation.sets import load_set, select_tasks, with_test_timeout
from keystroke.agent.evaluation.tasks import FunctionTask, Task, TaskResult
from keystroke.agent.sandbox import Sandbox, SandboxKind, find_sandbox
from keystroke.config import load_settings
from keystroke.engine.base import GREEDY, Interrupt
from keystroke.engine.generation import GenerationParams
from keystroke.engine.load import load_model
from keystroke.engine.model import Model
from keystroke.errors import Interrupted


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file or a model's folder")
    parser.add_argument("--engine", default="auto", choices=("auto", "onnx", "cuda"))
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--humaneval", type=Path)
    parser.add_argument("--mbpp", type=Path)
    parser.add_argument("--polyglot", type=Path)
    parser.add_argument("--attempts", default="1,4,16")
    parser.add_argument("--limit", type=int, default=0, help="tasks of each set, spread evenly; 0: all")
    parser.add_argument("--sample", type=int, default=0, help="exercises at random, by --seed; 0: all")
    parser.add_argument("--test-seconds", type=float, default=0, help="for an exercise's tests; 0: the set's")
    parser.add_argument("--max-tokens", type=int, default=768)
    parser.add_argument("--exercise-tokens", type=int, default=2048, help="longest answer to an exercise")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(".work/agent"))
    parser.add_argument(
        "--unconfined", action="store_true", help="run without a sandbox: a throw-away machine"
    )
    options = parser.parse_args()
    sandbox = Sandbox(SandboxKind.NONE) if options.unconfined else find_sandbox()
    if not sandbox.confines and not options.unconfined:
        sys.exit("no sandbox holds here; on a machine that is thrown away afterwards say --unconfined")
    settings = load_settings({"engine.kind": options.engine, "model.precision": options.precision})
    began = time.perf_counter()
    model = load_model(options.model, settings)
    info = model.engine.info
    print(
        f"{info.name}, {info.precision}, {type(model.engine).__name__}, {model.engine.max_batch} together, "
        f"{os.cpu_count()} cores, sandbox {sandbox.kind}, loaded in {time.perf_counter() - began:.1f} s",
        flush=True,
    )
    numbers = sorted({int(part) for part in options.attempts.split(",")}, reverse=True)
    keys: dict[str, object] = {"model": info.name, "precision": info.precision, "sandbox": str(sandbox.kind)}
    for name, path in (("humaneval", options.humaneval), ("mbpp", options.mbpp)):
        if path is not None:
            keys |= functions(name, path, model, sandbox, numbers, options)
    if options.polyglot is not None:
        keys |= polyglot(options.polyglot, model, sandbox, max(numbers), options)
    keys |= reactions(model, sandbox)
    record("agent", keys)


def functions(
    name: str, path: Path, model: Model, sandbox: Sandbox, numbers: Sequence[int], options: argparse.Namespace
) -> dict[str, object]:
    _, every = load_set(str(path), options.out)
    tasks = select_tasks(every, [], options.limit)
    ways = [
        EvaluationConfig(
            f"x{number}", model.name, number, max_tokens=options.max_tokens, temperature=options.temperature
        )
        for number in numbers
    ]
    with closing(FunctionSolver(LocalChatModel(model), sandbox, seed=options.seed)) as solver:
        _warm(solver, tasks, ways)
        summaries = _done(name, tasks, ways, solver, options)
    prefix = "" if name == "humaneval" else f"{name}_"
    keys: dict[str, object] = {f"{prefix}tasks": len(tasks)}
    for number in sorted(numbers):
        found = next(s for s in summaries if s.label == f"x{number}")
        keys |= {
            f"{prefix}score_{number}": found.score,
            f"{prefix}seconds_{number}": found.seconds_mean,
            f"{prefix}median_{number}": found.seconds_median,
            f"{prefix}tokens_per_second_{number}": found.tokens_per_second,
        }
    return keys


def _warm(solver: FunctionSolver, tasks: Sequence[Task], ways: Sequence[EvaluationConfig]) -> None:
    """One task of each kind beforehand: kernels are compiled and memory is taken the first time."""
    for way in ways:
        solver.solve(tasks[-1], way, Interrupt())


def polyglot(
    path: Path, model: Model, sandbox: Sandbox, attempts: int, options: argparse.Namespace
) -> dict[str, object]:
    """Two tries, as that benchmark has it; with one attempt a try and with many."""
    _, every = load_set(str(path), options.out)
    folders = [task for task in every if not isinstance(task, FunctionTask)]
    if options.sample:
        folders = random.Random(options.seed).sample(folders, min(options.sample, len(folders)))
    tasks = with_test_timeout(select_tasks(folders, [], options.limit), options.test_seconds)
    chat = LocalChatModel(model)
    solver = FolderSolver(chat, sandbox, seed=options.seed, workers=min(8, os.cpu_count() or 2))
    ways = [
        EvaluationConfig(
            f"x{number}",
            model.name,
            number,
            max_tokens=options.exercise_tokens,
            temperature=options.temperature,
            tries=2,
        )
        for number in sorted({1, attempts}, reverse=True)
    ]
    summaries = _done("polyglot", tasks, ways, solver, options)
    chat.close()
    one = next(s for s in summaries if s.label == "x1")
    many = next(s for s in summaries if s.label == f"x{attempts}")
    return {
        "polyglot": one.score,
        "polyglot_tasks": one.tasks,
        "polyglot_seconds": one.seconds_mean,
        f"polyglot_x{attempts}": many.score,
    }


def _done(
    name: str,
    tasks: Sequence[Task],
    ways: Sequence[EvaluationConfig],
    solver: FunctionSolver | FolderSolver,
    options: argparse.Namespace,
) -> list[Summary]:
    record = ResultFile(options.out / f"{name}.jsonl", ResultHeader(name, len(tasks)))

    def told(row: TaskResult, done: int, total: int) -> None:
        if done % 20 == 0 or row.seconds > 20:
            print(f"  {name} {row.label}: {done} of {total}", flush=True)

    evaluate(tasks, ways, solver, record, jobs=max(1, (os.cpu_count() or 2) // 2), on_result=told)
    wanted = {task.id for task in tasks}
    labels = {way.label for way in ways}
    summaries = summarise(row for row in record.rows if row.task in wanted and row.label in labels)
    print(f"\n{name}")
    for cells in [HEADINGS, *table_rows(summaries)]:
        print("  ".join(cell.ljust(10) for cell in cells))
    print(flush=True)
    (options.out / f"{name}.svg").write_text(render_plot(summaries, f"{name}: score against time"))
    return summaries


def reactions(model: Model, sandbox: Sandbox, rounds: int = 5) -> dict[str, object]:
    """How soon many attempts stop when told to, and how much of an answer's work a steering line keeps."""
    task = FunctionTask("probe", "def f(a):\n    '''Anything, at great length.'''\n", "f", "")
    prompt = ConversationEncoder(model).encode(messages(task), opening=OPEN)
    waits = []
    ready = interpreter_pool(sandbox, 1)
    for number in range(rounds):
        interrupt, thrown = Interrupt(), [0.0]

        def throw(interrupt: Interrupt = interrupt, thrown: list[float] = thrown) -> None:
            thrown[0] = time.perf_counter()
            interrupt.set()

        race = Race(
            EngineDecoder(model, GenerationParams(4000, ignore_eos=True, stop=(CLOSE * 9,))),
            prompt,
            attempt_samplings(16, temperature=1.5, seed=number),
            FunctionChecker(ready, task),
            interrupt=interrupt,
        )
        timer = threading.Timer(0.3 + 0.07 * number, throw)
        timer.start()
        try:
            race.run()
        except Interrupted:
            waits.append(1e3 * (time.perf_counter() - thrown[0]))
        timer.join()
    ready.close()
    with model.engine.session() as session:
        session.extend(prompt)
        for _ in range(48):
            session.step((), GREEDY)
        spliced = ConversationEncoder(model).encode_interjection("Use a loop instead.")
        extended = session.extend([*session.tokens, *spliced])
    share = extended.reused / (extended.reused + extended.computed)
    return {
        "interrupt_ms": round(statistics.median(waits), 1) if waits else None,
        "steer_reused_share": round(share, 3),
    }


if __name__ == "__main__":
    main()
