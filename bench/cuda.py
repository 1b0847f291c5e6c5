"""Speed of the CUDA engine on one GPU, with transformers' compiled static cache beside it.

Regime: batch 1 unless a row says otherwise, bf16 KV but for rows with `kv`, greedy, weights random (speed
does not depend on them) but for the speculative edit, which needs a real model. 1,024 tokens of context and
32 steps of warm-up, then 128 timed steps; the median of three runs, for ours and the peer. A step must read
every weight once and the context's KV once; that many bytes over the bandwidth of a large copy, measured in
the same run, is the ceiling; `fraction_of_limit` is a row's share of it. `peer_tok_s` is transformers' in the
same run; `quoted_tok_s` was measured once on such a GPU with another program. With --llama, mixtures and
hybrids run from a GGUF file of random weights in the real shapes, and llama.cpp, their peer, from the same.

Kernels and the peers' graphs are compiled first, in parallel; nothing else runs while a row is timed. Every
part has its own process, so a part that fails or hangs loses only its own rows. The last line is JSON, with
the parts that failed or were left out, and is written to bench/results/cuda-rows.json; the exit code is 1 if
anything was.

    python -m bench.cuda                   every part; bench/cuda_rows holds them
    python -m bench.cuda moe-host          experts in host memory, by the GPU's memory
    python -m bench.cuda moe-30b-120k      8-bit keys and values, and attention to a part of the context
    python -m bench.cuda 135m 7b-int4      some of: 135m 1.5b-stored 7b 7b-stored 120k serve-135m ... edit
    python -m bench.cuda 1.5b 1.5b-sm_80 1.5b-sm_86 7b-int4-sm_86     this GPU run as an older kind beside it
        --model PATH    a folder or GGUF file with real weights, for the edit, coder-new, coder-repeat and
                        coder-quality (what fewer bits, drafts, 8-bit keys and sparse attention cost)
        --head PATH     a draft head for them (auto: where it lies beside the model or in models/)
        --precision P   of coder-new and coder-repeat: bf16, int8, int4 or stored
        --only PART     the same as naming parts
        --no-peer       leaves transformers out
        --llama PATH    llama.cpp's program llama-bench, built for CUDA; the files need up to 22 GB of disk
        --minutes N     leaves out what does not fit
        --compile       only compiles, so that a later run need not
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import torch

from bench.cuda_rows.coder_quality import quality_kernels
from bench.cuda_rows.cuda_coder import CODER
from bench.cuda_rows.cuda_parts import (
    CONTEXT,
    DEVICE,
    EDIT,
    LONG,
    PARTS,
    READY,
    SERVED,
    Json,
    blocks,
    kind,
    seconds_each,
)
from bench.cuda_rows.llama_peer import llama_speeds
from bench.random_models import SHAPES, write_model
from bench.record import record
from keystroke.engine.checkpoint import open_checkpoint
from keystroke.engine.cuda.driver import compile_all
from keystroke.engine.cuda.gpu import gpu_target, nvidia_gpu
from keystroke.engine.cuda.plan import Plan
from keystroke.errors import KeystrokeError

ROOT = Path(__file__).resolve().parents[1]
PREPARED = 240.0  # seconds within which all must be compiled and ready
LONGEST = 90.0  # seconds a part may take; the usual ones take 3 to 20
GRACE = 5.0  # seconds to end by itself
QUOTED = {
    ("SmolLM2-135M", "bf16", CONTEXT): ("llama.cpp F16", 965.0),
    ("Qwen2.5-1.5B", "bf16", CONTEXT): ("gpt-fast", 436.0),
    ("Qwen2.5-7B", "bf16", CONTEXT): ("llama.cpp F16", 196.0),
    ("Qwen2.5-7B", "int8", CONTEXT): ("llama.cpp Q8_0", 257.0),
    ("Qwen2.5-7B", "int4", CONTEXT): ("llama.cpp Q4_0", 353.0),
    ("Qwen2.5-1.5B", "bf16", LONG): ("llama.cpp F16", 247.0),
}
QUALITY = "coder-quality"
HOST_EXPERTS = "moe-host"  # several engines, see host_experts.py
REAL = (EDIT, *CODER, QUALITY)  # parts that need real weights
EVERY = (*PARTS, HOST_EXPERTS, *REAL, *SERVED)
COMMON = ("shape", "precision", "context", "mode", "tok_s", "fraction_of_limit", "peer_tok_s")


class Worker:
    """A process of a file in cuda_rows: ready, told to go, heard until it ends."""

    def __init__(self, *program: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *program],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            start_new_session=True,  # so that what it starts can be stopped with it
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def wait_ready(self, deadline: float) -> None:
        if not any(line == READY for line in self._heard(deadline)):
            raise RuntimeError(f"ended with code {self._process.wait()} before it was ready")

    def run(self, limit: float, deadline: float) -> Iterator[Json]:
        """The rows it prints. Raises where it ends badly or not in time."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{limit}\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it is gone: its exit code says more
        for line in self._heard(deadline):
            if line.startswith("{"):
                yield json.loads(line)
        if self._process.wait():
            raise RuntimeError(f"ended with code {self._process.returncode}")

    def dismiss(self) -> None:
        """Nobody will tell it to go: it may end by itself."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def stop(self) -> None:
        self.dismiss()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.strip())
        self._lines.put(None)

    def _heard(self, deadline: float) -> Iterator[str]:
        """Lines until it ends."""
        while True:
            try:
                line = self._lines.get(timeout=max(deadline - time.monotonic(), 0.01))
            except queue.Empty:
                self.stop()
                raise TimeoutError("took too long and was stopped") from None
            if line is None:
                return
            yield line


class Report:
    def __init__(self) -> None:
        self.began = time.monotonic()
        self.limit = 0.0  # bytes a second
        self.rows: list[Json] = []
        self.failed: list[Json] = []
        self.skipped: list[str] = []

    def progress(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:5.1f} s] {text}", flush=True)

    def add(self, row: Json) -> None:
        if "error" in row:
            self.failed.append(row)
            print(f"FAILED {row}", flush=True)
            return
        quoted = QUOTED.get((row["shape"], row["precision"], row["context"]))
        if row["mode"] in ("decode", "sparse decode") and quoted is not None:
            row["quoted_peer"], row["quoted_tok_s"] = quoted
        self.rows.append(row)
        print(line(row), flush=True)

    def add_peer(self, found: Json) -> None:
        print(f"{found['shape']:14} transformers, compiled: {found['peer_tok_s']} tok/s", flush=True)
        for row in self.rows:
            key = (row["shape"], row["precision"], row["context"], row["mode"])
            if key == (found["shape"], "bf16", CONTEXT, "decode"):
                row["peer_tok_s"] = found["peer_tok_s"]
                row["times_peer"] = round(row["tok_s"] / found["peer_tok_s"], 2)

    def add_llama(self, shape: str, speeds: dict[tuple[str, int], float]) -> None:
        for row in self.rows:
            speed = speeds.get((row["mode"], row["context"]))
            if row["shape"] != shape or speed is None:
                continue
            row["peer"], row["peer_tok_s"] = "llama.cpp", round(speed, 1)
            row["times_peer"] = round(row["tok_s"] / speed, 2)
            print(f"{shape} {row['mode']}: llama.cpp {speed:.1f} tok/s", flush=True)

    def fail(self, part: str, error: Exception) -> None:
        self.add({"part": part, "error": f"{type(error).__name__}: {error}"[:300]})

    def end(self) -> None:
        print(f"\n{'shape':14} {'bits':6} {'context':>8}  {'mode':24} {'tok/s':>10} of limit  peer")
        print("\n".join(map(line, self.rows)))
        about = {
            "bench": "cuda",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "copy_tb_s": round(self.limit / 1e12, 3),
            "seconds": round(time.monotonic() - self.began, 1),
        }
        record("cuda-rows", {**about, "rows": self.rows, "failed": self.failed, "skipped": self.skipped})


def line(row: Json) -> str:
    shape, precision, context, mode, tok_s, fraction, peer = (row[name] for name in COMMON)
    more = ", ".join(f"{k} {v}" for k, v in row.items() if k not in COMMON)
    rate = "-" if tok_s is None else f"{tok_s:,.1f}"
    columns = f"{shape:14} {precision:6} {context:>8,}  {mode:24} {rate:>10}"
    return f"{columns} {'-' if fraction is None else fraction:>7} {'-' if peer is None else peer:>8}  {more}"


def bandwidth() -> float:
    """Bytes a second, read plus written, of a large copy."""
    source = torch.empty(1 << 32, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    taken = statistics.median([seconds_each(lambda: target.copy_(source), 10) for _ in range(4)])
    return 2 * source.numel() / taken


def kernels(names: list[str], model: Path | None) -> list[dict[str, str]]:
    wanted = [macros for name in names if name in PARTS for macros in PARTS[name].kernels()]
    specs = [SERVED[name] for name in names if name in SERVED]
    if model is not None and any(name in REAL for name in names):
        with open_checkpoint(model) as checkpoint:
            specs.append(checkpoint.spec)
    if QUALITY in names and model is not None:
        with open_checkpoint(model) as checkpoint:
            wanted += quality_kernels(checkpoint, blocks())
    for spec in specs:  # these draft, so their steps have all widths
        plan = Plan(spec, "bf16", blocks(), target=kind())
        wanted += [plan.macros(tiles) for tiles in sorted({bucket.tiles_n for bucket in plan.buckets})]
    return wanted


def compile_kernels(names: list[str], model: Path | None) -> None:
    other = [name for name in names if name in PARTS and PARTS[name].target != "auto"]
    compile_all(kernels([name for name in names if name not in other], model), kind())
    for name in other:
        compile_all(PARTS[name].kernels(), kind(PARTS[name].target))


def command(name: str, model: Path | None, coder: tuple[str, ...] = ()) -> tuple[str, ...]:
    """`coder`: precision and draft head of the rows with a code model."""
    if name in CODER:
        return "-m", "bench.cuda_rows.cuda_coder", name, str(model), *coder
    if name in SERVED:
        return "-m", "bench.cuda_rows.cuda_serve", name
    if name == HOST_EXPERTS:
        return "-m", "bench.cuda_rows.host_experts"
    if name == QUALITY:
        return "-m", "bench.cuda_rows.coder_quality", str(model), "--part"
    parts = ("-m", "bench.cuda_rows.cuda_parts", name)
    return parts if model is None else (*parts, str(model))


def measure(
    report: Report,
    names: list[str],
    model: Path | None,
    peers: list[str],
    deadline: float,
    coder: tuple[str, ...] = (),
    llama: Path | None = None,
) -> None:
    files = Path(tempfile.mkdtemp(prefix="keystroke-bench-"))
    written = {
        name: files / f"{PARTS[name].file}.gguf"
        for name in names
        if llama is not None and name in PARTS and PARTS[name].file
    }
    parts = {
        name: Worker(*command(name, written.get(name, model if name in REAL else None), coder))
        for name in names
    }
    beside = {name: Worker("-m", "bench.cuda_rows.cuda_peer", name) for name in peers}

    def limit_of_part(name: str = "") -> float:
        return min(deadline, time.monotonic() + LONGEST * (4 if name in (QUALITY, HOST_EXPERTS) else 1))

    try:
        report.progress(f"compiling kernels, and transformers for {', '.join(peers) or 'nothing'}")
        compile_kernels(names, model)
        report.progress("kernels compiled")
        ready_by = min(deadline, report.began + PREPARED)
        for group, kind in ((beside, "transformers "), (parts, "")):
            for name, worker in tuple(group.items()):
                try:
                    worker.wait_ready(ready_by)
                except Exception as error:
                    report.fail(kind + name, error)
                    del group[name]
        report.progress("all ready")
        report.limit = bandwidth()
        torch.cuda.empty_cache()
        print(f"{torch.cuda.get_device_name()}: copy {report.limit / 1e12:.2f} TB/s", flush=True)
        for name, worker in parts.items():
            if time.monotonic() > deadline:
                report.skipped.append(name)
                continue
            try:
                if name in written:
                    shape = SHAPES[PARTS[name].file]
                    write_model(written[name], shape, shape.layers)
                    report.progress(f"{name}: {written[name].stat().st_size / 1e9:.1f} GB written")
                for row in worker.run(report.limit, limit_of_part(name)):
                    report.add(row)
                if name in written and llama is not None:
                    part = PARTS[name]
                    report.add_llama(part.spec.name, llama_speeds(llama, written[name], part.depth))
            except Exception as error:
                report.fail(name, error)
            try:
                if name in beside:
                    for found in beside[name].run(report.limit, limit_of_part()):
                        report.add_peer(found)
            except Exception as error:
                report.fail(f"transformers {name}", error)
            if name in written:
                written[name].unlink(missing_ok=True)
            report.progress(f"{name} done")
    finally:
        dismissed = (*parts.values(), *beside.values())
        for worker in dismissed:
            worker.dismiss()
        for worker in dismissed:
            worker.stop()
        shutil.rmtree(files, ignore_errors=True)
        report.end()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n", 1)[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of: {' '.join(EVERY)}")
    parser.add_argument("--model", type=Path, help=f"real weights, for {' '.join(REAL)}")
    parser.add_argument("--head", default="auto", help="a draft head for the model: its folder, auto, off")
    parser.add_argument(
        "--precision", default="bf16", choices=("bf16", "int8", "int4", "stored"), help="of the coder rows"
    )
    parser.add_argument("--no-peer", action="store_true", help="leave transformers out")
    parser.add_argument(
        "--llama", type=Path, metavar="PATH", help="llama-bench, the peer of mixtures and hybrids"
    )
    parser.add_argument("--minutes", type=float, default=20.0, help="leave out what does not fit")
    parser.add_argument("--compile", action="store_true", help="only compile")
    parser.add_argument("--only", action="append", default=[], metavar="PART", help="as naming it")
    given = parser.parse_args()
    given.parts += given.only
    unknown = [name for name in given.parts if name not in EVERY]
    if unknown:
        parser.error(f"there is no part {unknown[0]}; there are {' '.join(EVERY)}")
    if given.model is None and (real := [name for name in given.parts if name in REAL]):
        parser.error(f"{real[0]} needs a real model: --model PATH")
    if given.llama is not None and not given.llama.is_file():
        parser.error(
            f"there is no program {given.llama}: build llama.cpp's target llama-bench with CUDA first"
        )
    report = Report()
    names = given.parts or [name for name in EVERY if name not in REAL or given.model is not None]
    try:
        gpu_target(nvidia_gpu())
        peers = [] if given.no_peer else [name for name in names if name in PARTS and PARTS[name].peer]
        if given.compile:
            warm = [Worker("-m", "bench.cuda_rows.cuda_peer", name) for name in peers]
            compile_kernels(names, given.model)
            for worker in warm:
                worker.wait_ready(time.monotonic() + PREPARED)
                worker.stop()
            return
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and say what was measured
        deadline = report.began + 60 * given.minutes
        measure(report, names, given.model, peers, deadline, (given.precision, given.head), given.llama)
    except KeystrokeError as error:
        sys.exit(str(error))
    sys.exit(1 if report.failed or report.skipped else 0)


if __name__ == "__main__":
    main()
