"""A small model that drafts beside a larger one: where two engines in one workload pay, and where not.

Regime: one answer at a time, greedy, short prompts for Python of three kinds: new code asked for in chat (the
answer is begun with a fence), a gap in a file to fill in, a file to be written again with a name changed. On
a CPU: the target on one thread alone, on all cores alone, on all cores with prompt lookup, on one core less
with a worker ahead on that core (`ahead`), and on all cores in turns with a worker that has them while the
target waits (`turns`); the last two hear prompt lookup too, as the product does. With `--engine cuda` the
target is on the GPU and the worker on the CPU's cores; beside it the draft head in the kernel. Every prompt
is answered in every way before the next, the order turning, so that a busy machine disturbs all alike; each
loaded model reads it once, for its ways share a session: only answers are timed. Figures are ratios to
`alone`, geometric means over prompts with a 95 % interval from resampled prompts. Texts must be the same.
Where the target has one thread, row costs are processor seconds, which others disturb less.

Ceiling: with a token right by chance a, k drafted and verified at the cost c(k+1) of plain steps of T
seconds, and pieces of the worker's that take d seconds, (1 + a + ... + a^k) / c(k+1) ahead, and the same over
(c(k+1) + k d / T) in turns. `reckoned` is that with what was drafted and accepted here, at the costs measured
first: what an idle machine would show.

    python -m bench.two_engines [--model M] [--draft M] [--engine onnx|cuda] [--prompts N] [--tokens N]
                                [--seconds S] [--temperature T] [--threads N] [--precision P]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from bench.edit_cases import read_cases as read_edit_cases
from keystroke.config import load_settings
from keystroke.engine.base import Sampling, Session
from keystroke.engine.generation import Generation, GenerationParams
from keystroke.engine.load import load_model
from keystroke.engine.model import Model
from keystroke.engine.speculative import AdaptiveDrafter, Drafter, SuffixDrafter, cost_table, drafter_for
from keystroke.engine.speculative.cost import remember_cost, verify_cost
from keystroke.engine.speculative.draft_worker import DraftWorker
from keystroke.train.cases import read_cases

DATA = Path(__file__).parent / "data"
ALONE = "alone"
ROWS = (1, 2, 3, 5, 9, 17)
NEAR = 320  # characters before a gap; half of that behind it
LONG = 480  # characters of a file to be written again


@dataclass(frozen=True, slots=True)
class Way:
    """How an answer is made: the settings its model is loaded with, and who drafts."""

    name: str
    flags: tuple[tuple[str, Any], ...]
    drafts: str  # none, lookup, product


def ways(engine: str, threads: int, draft: str, precision: str) -> list[Way]:
    """Those that share their flags share a loaded model."""
    base = (("engine.kind", engine), ("engine.context", 2048), ("model.precision", precision))
    worker = (("speculation.draft_model", draft), ("speculation.draft_engine", "onnx"))
    if engine == "cuda":
        plain = (*base, ("speculation.draft_head", "off"))
        beside = (
            *plain,
            *worker,
            ("speculation.draft_worker", "ahead"),
            ("speculation.draft_threads", threads),
        )
        return [
            Way(ALONE, plain, "none"),
            Way("lookup", plain, "lookup"),
            Way("head", base, "product"),
            Way("ahead", beside, "product"),
        ]
    whole, less = (*base, ("engine.threads", threads)), (*base, ("engine.threads", max(threads - 1, 1)))
    one = (*base, ("engine.threads", 1))
    ahead = (*less, *worker, ("speculation.draft_worker", "ahead"), ("speculation.draft_threads", 1))
    turns = (*whole, *worker, ("speculation.draft_worker", "turns"), ("speculation.draft_threads", threads))
    # A model with a worker serves the ways without one as well: it is not heard.
    first = ahead if threads <= 2 else one
    return [
        Way(ALONE, turns, "none"),
        Way("one thread", first, "none"),
        Way("lookup", turns, "lookup"),
        Way("ahead", ahead, "product"),
        Way("turns", turns, "product"),
    ]


class Counted(Drafter):
    """Another drafter, with a record of every step."""

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner
        self.steps: list[tuple[int, int]] = []  # drafted, accepted

    def choose_by(self, sampling: Sampling) -> None:
        self._inner.choose_by(sampling)

    def begin(self, prompt: Sequence[int]) -> None:
        self._inner.begin(prompt)

    def observe(self, tokens: Sequence[int]) -> None:
        self._inner.observe(tokens)

    def propose(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
        return self._inner.propose(tokens, limit)

    def verified(self, drafted: int, accepted: int, seconds: float) -> None:
        self.steps.append((drafted, accepted))
        self._inner.verified(drafted, accepted, seconds)


@dataclass(slots=True)
class Figures:
    """Of one way and kind of prompt."""

    faster: list[float] = field(default_factory=list)  # than alone, by the clock
    reckoned: list[float] = field(default_factory=list)  # the same at the costs measured first
    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    waited: float = 0.0
    same: list[bool] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Costs:
    """What was measured before the first answer."""

    table: tuple[float, ...]
    unit: float  # seconds of a step over one row


def asked(model: Model, count: int) -> Iterator[tuple[str, list[int]]]:
    """The kinds in turn, so that a run that is cut short has some of each."""
    lines = (DATA / "new-code.jsonl").read_text(encoding="utf-8").splitlines()
    known = [row["prompt"] for row in map(json.loads, lines) if row["language"] == "Python"]
    new = known[:: max(len(known) // count, 1)][:count]
    cuts = [case for case in read_cases(DATA / "completion.jsonl.xz") if case.kind == "block"]
    cuts = cuts[:: max(len(cuts) // count, 1)][:count]
    files = [case for case in read_edit_cases() if case.language == "python"]
    files = files[:: max(len(files) // count, 1)][:count]

    def chat(text: str) -> list[int]:
        assert model.chat is not None
        tokens = model.chat.tokens(model.tokenizer, [{"role": "user", "content": text}])
        return [*tokens, *model.tokenizer.encode("```python\n")]

    for index in range(count):
        if model.chat is not None:
            yield "new", chat(new[index])
        if model.fim is not None and index < len(cuts):
            cut = cuts[index]
            yield (
                "fill-in",
                model.fim.tokens(model.tokenizer, cut.prefix[-NEAR:], cut.suffix[: NEAR // 2]),
            )
        if model.chat is not None and index < len(files):
            text = next(iter(files[index].files.values()))[:LONG]
            yield "edit", chat(f"Write this again with every `self` or `data` renamed to `it`:\n\n{text}")


def measured(model: Model, threads: int, rounds: int = 5) -> Costs:
    """Steps over several rows, sizes in turn, the quickest of each: what is not disturbed."""
    best: dict[int, float] = {}
    text, engine = model.tokenizer.encode(__doc__ or ""), model.engine
    clock = time.process_time if threads == 1 else time.perf_counter
    with engine.session() as session:
        session.extend(text[:64])
        for rows in [n for _ in range(rounds) for larger in ROWS[1:] for n in (1, larger)]:
            session.rollback(64)
            started = clock()
            session.step(text[rows - 1 : 0 : -1])  # backwards: no model goes on so
            best[rows] = min(best.get(rows, 1e9), clock() - started)
    table = cost_table(best)
    remember_cost(engine, table)
    return Costs(table, best[1])


def drafter(model: Model, kind: str) -> Drafter | None:
    if kind == "none":
        return None
    if kind == "lookup":
        return AdaptiveDrafter([SuffixDrafter()], verify_cost(model.engine))
    return drafter_for(model.engine, draft=model.draft)


def answer(
    model: Model,
    session: Session,
    prompt: Sequence[int],
    kind: str,
    sampling: Sampling,
    most: int,
    costs: Costs,
) -> tuple[Generation, float, float, Counted | None]:
    """With seconds a token by the clock, and as reckoned. What `session` holds of the prompt is not read
    again."""
    made = drafter(model, kind)
    counted = Counted(made) if made is not None else None
    said = Generation(model, session, prompt, GenerationParams(most, sampling), counted)
    for _ in said:
        pass
    stats = said.stats
    # The first step computes what a prompt left pending: not a step like the others.
    tokens = max(stats.tokens - 1, 1)
    clock = (sum(stats.step_seconds[1:]) + stats.draft_seconds) / tokens
    rows = [drafted + 1 for drafted, _ in counted.steps[1:]] if counted else [1] * (stats.steps - 1)
    reckoned = (sum(costs.table[n] * costs.unit for n in rows) + stats.draft_seconds) / tokens
    return said, clock, reckoned, counted


def run(
    given: argparse.Namespace,
    models: dict[str, Model],
    sessions: dict[str, Session],
    chosen: Sequence[Way],
    costs: dict[str, Costs],
) -> Any:
    table: dict[str, dict[str, Figures]] = {way.name: {} for way in chosen}
    sampling = Sampling(temperature=given.temperature, seed=7)
    until = time.monotonic() + given.seconds
    for index, (kind, prompt) in enumerate(asked(models[ALONE], given.prompts)):
        if time.monotonic() > until:
            break
        turn = index % len(chosen)
        took: dict[str, tuple[float, float]] = {}
        first: list[int] | None = None
        for way in [*chosen[turn:], *chosen[:turn]]:
            said, clock, reckoned, _ = answer(
                models[way.name],
                sessions[way.name],
                prompt,
                way.drafts,
                sampling,
                given.tokens,
                costs[way.name],
            )
            took[way.name] = clock, reckoned
            figures = table[way.name].setdefault(kind, Figures())
            stats = said.stats
            figures.tokens += stats.tokens
            figures.steps += stats.steps
            figures.drafted += stats.drafted
            figures.accepted += stats.accepted
            figures.waited += stats.draft_seconds
            first = first or said.tokens
            figures.same.append(said.tokens == first)
        for way in chosen:
            figures = table[way.name][kind]
            figures.faster.append(took[ALONE][0] / took[way.name][0])
            figures.reckoned.append(took[ALONE][1] / took[way.name][1])
        told = "  ".join(f"{way.name} {took[way.name][0] * 1e3:.0f}" for way in chosen)
        print(f"{kind:8} ms a token: {told}", file=sys.stderr, flush=True)
    return table


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The geometric mean, and where 95 % of those of resampled prompts lie."""
    chance = random.Random(1)
    means = sorted(geometric_mean(chance.choices(values, k=len(values))) for _ in range(2000))
    return geometric_mean(values), means[50], means[-51]


def summary(table: dict[str, dict[str, Figures]]) -> list[dict[str, Any]]:
    rows = []
    for name, kinds in table.items():
        for kind, figures in kinds.items():
            if not figures.faster:
                continue
            mean, low, high = interval(figures.faster)
            rows.append(
                {
                    "way": name,
                    "kind": kind,
                    "faster": round(mean, 3),
                    "low": round(low, 3),
                    "high": round(high, 3),
                    "reckoned": round(geometric_mean(figures.reckoned), 3),
                    "tokens_a_step": round(figures.tokens / max(figures.steps, 1), 2),
                    "drafted": figures.drafted,
                    "accepted": figures.accepted,
                    "draft_ms_a_step": round(figures.waited / max(figures.steps, 1) * 1e3, 2),
                    "same_text": f"{sum(figures.same)} of {len(figures.same)}",
                }
            )
    return rows


def shown(rows: Sequence[dict[str, Any]], costs: dict[str, Costs], paces: dict[str, float]) -> None:
    for name, cost in costs.items():
        steps = " / ".join(f"{cost.table[rows]:.2f}" for rows in ROWS[1:])
        pace = f"; a piece of the worker's {paces[name] * 1e3:.1f} ms" if paces.get(name) else ""
        print(f"{name:12} a step {cost.unit * 1e3:7.1f} ms; {ROWS[1:]} rows cost {steps}{pace}")
    print(f"\n{'way':12} {'kind':8} {'faster (95 %)':>22} {'reckoned':>9} {'tok/step':>9} {'accepted':>12}")
    for row in rows:
        span = f"{row['faster']:.2f} ({row['low']:.2f} to {row['high']:.2f})"
        taken = f"{row['accepted']}/{row['drafted']}"
        print(
            f"{row['way']:12} {row['kind']:8} {span:>22} {row['reckoned']:9.2f} "
            f"{row['tokens_a_step']:9.2f} {taken:>12}  {row['same_text']}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="coder")
    parser.add_argument("--draft", default="embedded")
    parser.add_argument("--engine", default="onnx", choices=("onnx", "cuda"))
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--prompts", type=int, default=12, help="of each kind")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--temperature", type=float, default=0.0)
    given = parser.parse_args()
    chosen = ways(given.engine, given.threads, given.draft, given.precision)
    with ExitStack() as stack:
        loaded: dict[tuple[tuple[str, Any], ...], Model] = {}
        costs: dict[tuple[tuple[str, Any], ...], Costs] = {}
        for way in chosen:
            if way.flags not in loaded:
                model = loaded[way.flags] = load_model(given.model, load_settings(dict(way.flags)))
                stack.callback(model.engine.close)
                if model.draft is not None:
                    stack.callback(model.draft.close)
                threads = dict(way.flags).get("engine.threads", 0)
                costs[way.flags] = measured(model, threads if given.engine == "onnx" else 0)
        by_name = {way.name: costs[way.flags] for way in chosen}
        opened = {flags: stack.enter_context(model.engine.session()) for flags, model in loaded.items()}
        models = {way.name: loaded[way.flags] for way in chosen}
        table = run(given, models, {way.name: opened[way.flags] for way in chosen}, chosen, by_name)
        paces = {
            way.name: loaded[way.flags].draft.record.pace  # type: ignore[union-attr]
            for way in chosen
            if isinstance(loaded[way.flags].draft, DraftWorker) and way.drafts == "product"
        }
        rows = summary(table)
        print(f"{given.model} with {given.draft} beside it · {platform.machine()}, {given.threads} cores\n")
        shown(rows, by_name, paces)
        said = {
            "bench": "two_engines",
            "model": given.model,
            "draft": given.draft,
            "engine": given.engine,
            "precision": given.precision,
            "machine": platform.machine(),
            "threads": given.threads,
            "temperature": given.temperature,
            "steps_ms": {name: round(cost.unit * 1e3, 2) for name, cost in by_name.items()},
            "costs": {name: [round(cost.table[n], 3) for n in ROWS] for name, cost in by_name.items()},
            "pieces_ms": {name: round(pace * 1e3, 2) for name, pace in paces.items()},
            "rows": rows,
        }
    print(json.dumps(said))
    return 0 if all(row["same_text"].split()[0] == row["same_text"].split()[-1] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
