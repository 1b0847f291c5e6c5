"""Variants of the decode kernel timed against each other, and where a layer's time goes:
`python -m bench.kernel_variants [PART ...] [--try "MACRO=1 in_flight=66048"]`, on a GPU.

A variant is a set of macros, and of parameters of a launch (lower case). All variants of a part share
one engine and one process and are timed in turns, launches one after another, so that a difference is
the kernel's. Logits are compared bit for bit with the first variant's. If a variant hangs or
fails, its process ends and the part continues without it.
"""

from __future__ import annotations

import argparse
import json
import select
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.cuda_rows.cuda_parts import (
    DEVICE,
    GPT_OSS_20B,
    LONG,
    MELLUM2,
    QWEN3_CODER_30B,
    QWEN_1_5B,
    QWEN_7B,
    QWEN_27B_HYBRID,
    QWEN_35B_HYBRID,
    SMOLLM2_135M,
    blocks,
    random_text,
)
from bench.record import record
from keystroke.engine.base import Sampling, StepRequest
from keystroke.engine.checkpoint.rope import extend_context
from keystroke.engine.checkpoint.spec import ModelSpec
from keystroke.engine.cuda.driver import GpuLauncher, compile_all, compile_kernel
from keystroke.engine.cuda.engine import CudaEngine
from keystroke.engine.cuda.plan import Formats, Precision, StepShape
from keystroke.engine.cuda.stored import typical_formats
from keystroke.engine.cuda.weights import random_plan, random_weights
from keystroke.errors import KeystrokeError

ROUNDS = 5
START_SECONDS, SILENT_SECONDS = 50, 12  # without a word: while an engine is made, and later
PROBE = Sampling(logprobs=0)  # chosen on the host: no step runs ahead, and its input stays where it is
PHASES = ("norm", "QKV", "wait", "attention", "heads", "O", "norm", "gate/up", "wait", "down")
MIXTURE_PHASES = (*PHASES[:7], "experts", *PHASES[7:])
PLAIN = "as it is"


@dataclass(frozen=True)
class KernelCase:
    """A step that is timed: rows of one session, or as many sessions, behind so many tokens."""

    context: int
    rows: int = 1
    together: bool = False
    launches: int = 30

    @property
    def name(self) -> str:
        return f"{self.context // 1000}k, {self.rows} {'sessions' if self.together else 'rows'}"

    @property
    def tiles(self) -> int:
        return 1 if self.rows <= 8 else 2


@dataclass(frozen=True)
class KernelPart:
    spec: ModelSpec
    cases: tuple[KernelCase, ...]
    precision: Precision = "bf16"
    kv_tokens: int = 8192
    compact: bool = False  # Q4_K in FOUR_K where the feed-forward part has it

    @property
    def formats(self) -> Formats | None:
        return typical_formats(self.spec).compacted() if self.compact else None

    @property
    def phases(self) -> tuple[str, ...]:
        return PHASES if self.spec.experts is None else MIXTURE_PHASES

    @property
    def readings(self) -> int:
        """Of the clock in a step, by a block."""
        return len(self.phases) * self.spec.layers + 1


_NEAR = (KernelCase(1024), KernelCase(1024, 16))
PARTS = {
    "1.5b": KernelPart(
        extend_context(QWEN_1_5B, 131_072),
        (
            KernelCase(LONG, launches=20),
            KernelCase(8192),
            KernelCase(8192, 16),
            *_NEAR,
            KernelCase(1024, 16, together=True),
        ),
        kv_tokens=160_000,
    ),
    "1.5b-stored": KernelPart(QWEN_1_5B, _NEAR, "stored"),
    "7b-stored": KernelPart(QWEN_7B, _NEAR, "stored"),
    "7b-int4": KernelPart(QWEN_7B, _NEAR, "int4"),
    "7b-int8": KernelPart(QWEN_7B, _NEAR, "int8"),
    "135m": KernelPart(SMOLLM2_135M, _NEAR),
    "moe-30b": KernelPart(QWEN3_CODER_30B, _NEAR, "stored"),
    "moe-gpt-oss": KernelPart(GPT_OSS_20B, (KernelCase(1024), KernelCase(1024, 8)), "stored"),
    "mellum2": KernelPart(MELLUM2, (KernelCase(1024), KernelCase(1024, 8)), "stored"),
    "hybrid-35b": KernelPart(QWEN_35B_HYBRID, (KernelCase(1024),), "stored"),
    "hybrid-27b": KernelPart(QWEN_27B_HYBRID, (KernelCase(1024),), "stored"),
}
PARTS["moe-30b-compact"] = replace(PARTS["moe-30b"], compact=True)


def macros_of(variant: str) -> dict[str, str]:
    return dict(each.split("=", 1) for each in variant.split() if each[0].isupper())


def parameters_of(variant: str) -> dict[str, int]:
    return {name: int(value) for name, value in (e.split("=") for e in variant.split() if e[0].islower())}


class VariantLauncher(GpuLauncher):
    """Launches the kernel of one variant at a time."""

    variant = ""

    def use(self, variant: str) -> None:
        self.variant = variant
        self._functions = self.__dict__.setdefault("_all", {}).setdefault(variant, {})

    def prepare(self, tiles_n: int, sparse: bool = False, shape: StepShape = "any") -> Any:
        macros = {**self._plan.macros(tiles_n, sparse, shape), **macros_of(self.variant)}
        shared = self._plan.target.shared_bytes
        found = self._gpu.function(self._gpu.load(compile_kernel(macros)), "decode_step", shared)
        self._functions[tiles_n, sparse, shape] = found
        return found


class KernelTiming:
    """A case on an engine: takes the step, then launches it again and again."""

    def __init__(self, engine: CudaEngine, case: KernelCase) -> None:
        self.engine, self.case = engine, case
        text = random_text(engine._stepper.plan.spec.vocab_size, 0)
        count = case.rows if case.together else 1
        self.sessions = [engine.session() for _ in range(count)]
        for i, session in enumerate(self.sessions):
            session.extend([i, *text[: case.context - 1]] if case.together else text[: case.context])
        self.step()  # what is left to read is read

    def step(self) -> tuple[torch.Tensor, Callable[[], object]]:
        for session in self.sessions:
            session.rollback(self.case.context)
        stepper, rows = self.engine._stepper, self.case.rows
        if self.case.together:
            self.engine.step_many([StepRequest(each, (), PROBE) for each in self.sessions])
        else:
            self.sessions[0].step([0] * (rows - 1), PROBE)
        slot = (stepper._ticket - 1) % len(stepper._controls)
        return stepper.logits[:rows].clone(), lambda: stepper._launch(
            slot, rows, len(self.sessions), False, self.case.context + rows - 1
        )

    def microseconds(self, launch: Callable[[], object]) -> float:
        launch()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(self.case.launches):
            launch()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1000 / self.case.launches


def measure(name: str, tried: list[str], without: set[str]) -> Iterator[dict[str, Any]]:
    part = PARTS[name]
    weights = random_weights(part.spec, part.precision, DEVICE, blocks(), stored=part.formats)
    launcher = VariantLauncher(weights.plan, DEVICE)
    launcher.use("")
    engine = CudaEngine(weights, launcher, part.kv_tokens)
    readings = torch.zeros(blocks(), part.readings, dtype=torch.int64, device=DEVICE)
    engine._stepper._parameters.profile = readings.data_ptr()
    usual = {"in_flight": weights.plan.in_flight}
    for case in part.cases:
        left = [each for each in variants(part, tried) if f"{case.name}|{each or PLAIN}" not in without]
        if not left:
            continue
        launcher.use("")
        timed = KernelTiming(engine, case)
        truth: torch.Tensor | None = None
        for turn in range(ROUNDS):
            for variant in tuple(left):
                yield {"begins": f"{case.name}|{variant or PLAIN}"}
                launcher.use(variant)
                for parameter, value in {**usual, **parameters_of(variant)}.items():
                    setattr(engine._stepper._parameters, parameter, value)
                found = {"part": name, "case": case.name, "variant": variant or PLAIN}
                try:
                    logits, launch = timed.step()
                    taken = timed.microseconds(launch)
                except (KeystrokeError, RuntimeError) as error:
                    torch.cuda.synchronize()  # raises where the GPU is lost to this process
                    yield {**found, "error": f"{type(error).__name__}: {error}"[:300]}
                    left.remove(variant)
                    continue
                truth = logits if truth is None else truth
                yield {**found, "us": taken, "same": torch.equal(logits, truth)}
                if "PROFILE" in variant and turn == ROUNDS - 1:
                    yield {**found, "phases": phases(readings, part)}
        for session in timed.sessions:
            session.close()


def variants(part: KernelPart, tried: list[str]) -> list[str]:
    """The kernel as it is, what others are compared with; those tried; and one that reads the clock."""
    return ["", *tried, f"PROFILE={part.readings}"]


def phases(readings: torch.Tensor, part: KernelPart) -> dict[str, list[int]]:
    """Cycles of each phase of a layer, mean of all layers and blocks, and of each layer's slowest block;
    those of delta nets apart, where QKV is their in-projection and attention their recurrence."""
    names, delta = part.phases, part.spec.delta
    spent = readings.diff(dim=1).reshape(readings.shape[0], -1, len(names)).double()
    layers = range(1, part.spec.layers)  # the first has the step's beginning in it
    nets = [layer for layer in layers if delta is not None and layer in delta.layers]
    found: dict[str, list[int]] = {}
    for kind, chosen in (("", [layer for layer in layers if layer not in nets]), ("delta net: ", nets)):
        if not chosen:
            continue
        mean, slowest = spent[:, chosen].mean((0, 1)), spent[:, chosen].amax(0).mean(0)
        found |= {f"{kind}{i} {name}": [int(mean[i]), int(slowest[i])] for i, name in enumerate(names)}
    return found


def child(name: str, tried: list[str], without: set[str]) -> None:
    try:
        for row in measure(name, tried, without):
            print(json.dumps(row), flush=True)
    except BaseException as error:
        print(json.dumps({"part": name, "error": f"{type(error).__name__}: {error}"[:300]}), flush=True)
        raise


def compile_variants(names: list[str], tried: list[str], count: int = 132) -> None:
    wanted = []
    for part in (PARTS[name] for name in names):
        plan = random_plan(part.spec, part.precision, count, stored=part.formats)
        for case in part.cases:
            macros = plan.macros(case.tiles, shape=plan.shape(case.rows, case.context))
            wanted += [{**macros, **macros_of(each)} for each in variants(part, tried)]
    compile_all(wanted)


def lines_of(command: list[str]) -> Iterator[str | int]:
    """What a process says, line by line, then its exit code. Saying nothing for too long ends it."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        patience = START_SECONDS
        while select.select([process.stdout], [], [], patience)[0]:
            if not (line := process.stdout.readline()):
                break
            patience = SILENT_SECONDS
            yield line.decode()
        else:
            process.kill()
        yield process.wait()


def run_part(name: str, tried: list[str], log: Path | None) -> list[dict[str, Any]]:
    """The part in a process of its own; again without what did not end, and without what is done."""
    found: list[dict[str, Any]] = []
    hung: set[str] = set()
    for _ in range(3):
        done = Counter(f"{row['case']}|{row['variant']}" for row in found if "us" in row)
        without = hung | {each for each, times in done.items() if times >= ROUNDS}
        begun, code = "", 0
        given = [
            f"--{kind}={each}" for kind, of in (("try", tried), ("without", sorted(without))) for each in of
        ]
        for line in lines_of([sys.executable, "-P", "-m", "bench.kernel_variants", "--child", name, *given]):
            if isinstance(line, int):
                code = line
            elif line.startswith("{"):
                row = json.loads(line)
                begun = row.get("begins", begun)
                found += [] if "begins" in row else [row]
                if log is not None:
                    with log.open("a") as to:
                        to.write(line)
        if code == 0:
            break
        print(f"{name}: ended with {code} at {begun!r}", file=sys.stderr)
        if not begun or begun in hung:
            break
        hung.add(begun)
        found.append({"part": name, "error": f"ended with {code} at {begun}"})
    return found


def table(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in found:
        if "us" in row:
            groups.setdefault((row["part"], row["case"], row["variant"]), []).append(row)
    rows = []
    for (part, case, variant), each in groups.items():
        times = [row["us"] for row in each]
        rows.append(
            {
                "part": part,
                "case": case,
                "variant": variant,
                "us": round(statistics.median(times), 1),
                "spread": round(max(times) - min(times), 1),
                "same": all(row["same"] for row in each),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument(
        "--try", dest="tried", action="append", default=[], metavar="VARIANT", help="macros and parameters"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--without", action="append", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--compile", action="store_true", help="compile only")
    parser.add_argument("--out", type=Path, help="folder for all readings")
    given = parser.parse_args()
    if given.child:
        child(given.parts[0], given.tried, set(given.without))
        return
    names = given.parts or list(PARTS)
    began = time.monotonic()
    try:
        compile_variants(names, given.tried)
    except KeystrokeError as error:  # said again by whoever needs it
        print(error, file=sys.stderr)
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    if given.compile:
        return
    found: list[dict[str, Any]] = []
    for name in names:
        found += run_part(name, given.tried, given.out / "readings.jsonl" if given.out else None)
        print(f"{name} done after {time.monotonic() - began:.0f} s", flush=True)
    rows = table(found)
    for row in rows:
        print(
            "{part:10} {case:16} {variant:32} {us:8.1f} us  +-{spread:<6.1f} {0}".format(
                "same" if row["same"] else "OTHER BITS", **row
            )
        )
    for row in found:
        if "phases" in row or "error" in row:
            print(json.dumps(row))
    record("kernel_variants", {"rows": rows})


if __name__ == "__main__":
    main()
