"""What bench/cuda.py measures: each part is one engine and its rows, in a process of its own.

The process prints READY, waits for one line on standard input (the GPU's bandwidth), then prints one JSON
object a row. A row that fails is an object with `error`, and the next one is tried. Everything goes through
`Session`, host included, but for what is called `us`: the device's own time.

A further row is a function of `Run` that returns `run.row(...)`, named in its part below.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from keystroke.assist.next_edit.prompt import REGION, changes_between, join_lines, learned_version
from keystroke.engine.base import Sampling, StepRequest
from keystroke.engine.checkpoint.rope import extend_context, yarn_attention_factor
from keystroke.engine.checkpoint.spec import DeltaSpec, ExpertsSpec, ModelSpec, RopeSpec
from keystroke.engine.cuda.driver import GpuLauncher
from keystroke.engine.cuda.engine import CudaEngine, load_cuda
from keystroke.engine.cuda.gpu import gpu_target
from keystroke.engine.cuda.plan import (
    EIGHT,
    FOUR,
    LOGGED_ROWS,
    NEAR,
    SIX,
    SIX_OFFSET,
    Formats,
    KvPrecision,
    Plan,
    Precision,
)
from keystroke.engine.cuda.session import CudaSession
from keystroke.engine.cuda.sparse import BUDGET, SPARSE_FROM, Sparse, supports_sparse
from keystroke.engine.cuda.stored import typical_formats
from keystroke.engine.cuda.target import Target
from keystroke.engine.cuda.weights import random_plan, random_weights
from keystroke.engine.generation import Generation, GenerationParams
from keystroke.engine.model import Model
from keystroke.engine.prefix import common_prefix
from keystroke.engine.speculative import drafter_for, measure_verify_cost
from keystroke.engine.tokenizer import load_tokenizer

Json = dict[str, Any]
READY = "READY"
DEVICE = torch.device("cuda")
CONTEXT = 1024  # tokens before the first one that counts, where a row does not say otherwise
SETTLED, TOKENS, ROUNDS = 32, 128, 3  # tokens let go by, tokens timed, and how often: for the peer too
LAUNCHES = 40  # steps in a row, where steps are timed rather than tokens
LONG, WHOLE = 120_000, 131_000
EDITED, OLD, NEW = "src/keystroke/engine/host.py", "wanted", "asked_for"

QWEN_1_5B = ModelSpec(
    architecture="qwen2",
    name="Qwen2.5-1.5B",
    vocab_size=151_936,
    hidden=1536,
    layers=28,
    heads=12,
    kv_heads=2,
    head_dim=128,
    intermediate=8960,
    norm_eps=1e-6,
    rope=RopeSpec(1_000_000.0),
    context_length=32_768,
    tied=True,
    qkv_bias=True,
)
QWEN_7B = replace(
    QWEN_1_5B,
    name="Qwen2.5-7B",
    vocab_size=152_064,
    hidden=3584,
    heads=28,
    kv_heads=4,
    intermediate=18_944,
    tied=False,
)
SMOLLM2_135M = replace(
    QWEN_1_5B,
    architecture="llama",
    name="SmolLM2-135M",
    vocab_size=49_152,
    hidden=576,
    layers=30,
    heads=9,
    kv_heads=3,
    head_dim=64,
    intermediate=1536,
    context_length=8192,
    qkv_bias=False,
)

QWEN3_CODER_30B = ModelSpec(
    architecture="qwen3_moe",
    name="Qwen3-Coder-30B-A3B",
    vocab_size=151_936,
    hidden=2048,
    layers=48,
    heads=32,
    kv_heads=4,
    head_dim=128,
    intermediate=6144,
    norm_eps=1e-6,
    rope=RopeSpec(10_000_000.0),
    context_length=131_072,
    tied=False,
    qk_norm=True,
    experts=ExpertsSpec(count=128, top=8, width=768),
)
GPT_OSS_20B = ModelSpec(
    architecture="gpt_oss",
    name="gpt-oss-20b",
    vocab_size=201_088,
    hidden=2880,
    layers=24,
    heads=64,
    kv_heads=8,
    head_dim=64,
    intermediate=2880,
    norm_eps=1e-5,
    rope=RopeSpec(
        150_000.0,
        scaling="yarn",
        factor=32.0,
        original_context=4096,
        truncate=False,
        attention_factor=yarn_attention_factor(32.0),
    ),
    context_length=131_072,
    tied=False,
    qkv_bias=True,
    o_bias=True,
    sinks=True,
    window=128,
    windowed=frozenset(range(0, 24, 2)),
    experts=ExpertsSpec(count=32, top=4, width=2880, router_bias=True, bias=True, limit=7.0),
)
MELLUM2 = replace(
    QWEN3_CODER_30B,
    architecture="mellum",
    name="Mellum2-12B-A2.5B",
    vocab_size=98_304,
    hidden=2304,
    layers=28,
    intermediate=7168,
    rope=RopeSpec(500_000.0),
    window=1024,
    windowed=frozenset(n for n in range(28) if (n + 1) % 4),
    window_rope=RopeSpec(10_000.0),
    experts=ExpertsSpec(count=64, top=8, width=896),
)
QWEN_35B_HYBRID = replace(
    QWEN3_CODER_30B,
    architecture="qwen3_5_moe",
    name="Qwen3.6-35B-A3B",
    vocab_size=248_320,
    layers=40,
    heads=16,
    kv_heads=2,
    head_dim=256,
    rotary=64,
    gated_attention=True,
    experts=ExpertsSpec(count=256, top=8, width=512, shared=512, shared_gate=True),
    delta=DeltaSpec(frozenset(n for n in range(40) if (n + 1) % 4), 16, 32, 128, 128, 4),
)
QWEN_27B_HYBRID = replace(
    QWEN_35B_HYBRID,
    architecture="qwen3_5",
    name="Qwen3.6-27B",
    hidden=5120,
    layers=64,
    heads=24,
    kv_heads=4,
    intermediate=17_408,
    experts=None,
    delta=DeltaSpec(frozenset(n for n in range(64) if (n + 1) % 4), 16, 48, 128, 128, 4),
)


@dataclass
class Run:
    """An engine being measured."""

    engine: CudaEngine
    limit: float  # bytes a second
    model: Model | None = None  # where the weights mean something
    steps: dict[int, float] = field(default_factory=dict)  # seconds of a plain step, by context

    @property
    def plan(self) -> Plan:
        return self.engine._stepper.plan

    @cached_property
    def text(self) -> list[int]:
        return random_text(self.plan.spec.vocab_size, 0)

    def row(self, context: int, mode: str, tok_s: float, **more: Any) -> Json:
        plan = self.plan
        found = {"shape": plan.spec.name, "precision": plan.precision, "context": context, "mode": mode}
        if plan.kv_precision != "bf16":
            more["kv"] = plan.kv_precision
        if plan.target.name != "sm_90":
            more["target"] = plan.target.name
        return {**found, "tok_s": round(tok_s, 1), "fraction_of_limit": None, "peer_tok_s": None, **more}

    def step_seconds(self, context: int) -> float:
        """What a token takes in one stream of plain steps."""
        if context not in self.steps:
            with self.engine.session() as session:
                session.extend(self.text[:context])

                def once() -> float:
                    session.rollback(context)
                    for _ in range(SETTLED):
                        session.step()
                    return seconds_each(session.step, TOKENS)

                self.steps[context] = statistics.median(once() for _ in range(ROUNDS))
        return self.steps[context]

    def kernel_us(self, session: CudaSession, rows: int) -> float:
        """Microseconds that a step over so many rows takes on the device, one launch after another."""
        stepper = self.engine._stepper
        # Chosen on the host, so that no step runs ahead; the launch's input then lies where it lay.
        session.step([0] * (rows - 1), Sampling(logprobs=0))
        slot = (stepper._ticket - 1) % len(stepper._controls)
        launch = partial(stepper._launch, slot, rows, 1, False, session.length)
        return 1e6 * statistics.median(seconds_each(launch, LAUNCHES) for _ in range(ROUNDS))


def seconds_each(work: Callable[[], object], count: int) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / count


@cache
def random_text(vocabulary: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocabulary, 1 << 17).tolist()  # type: ignore[no-any-return]


# Rows


def decode(run: Run, context: int = CONTEXT) -> Json:
    """One stream."""
    run.engine.sparse_from = 1 << 30
    taken = run.step_seconds(context)
    read = run.plan.streamed_bytes + (context + SETTLED + TOKENS // 2) * run.plan.kv_bytes_per_token
    return run.row(context, "decode", 1 / taken, fraction_of_limit=round(read / taken / run.limit, 3))


def sparse_decode(run: Run, context: int = LONG) -> Json:
    """One stream that attends to some of its context."""
    dense, run.engine.sparse_from = run.steps.pop(context, None), SPARSE_FROM
    taken = run.step_seconds(context)
    more = {} if dense is None else {"times_dense": round(dense / taken, 2)}
    return run.row(context, "sparse decode", 1 / taken, chunks=BUDGET, **more)


def verify(run: Run, context: int = CONTEXT, rows: int = 16) -> Json:
    """What a step over 16 rows costs against one: on the device alone, and as a session sees it (a plain step
    runs ahead of its caller, one with a draft cannot). `tok_s` is that of drafts that are always wrong."""
    rows = min(rows, run.plan.max_rows)  # where shared memory is small
    if run.plan.spec.delta is not None:
        rows = min(rows, LOGGED_ROWS)
    with run.engine.session() as session:
        session.extend(run.text[:context])
        one, many = (run.kernel_us(session, n) for n in (1, rows))
        wrong = [0] * (rows - 1)

        def once() -> float:
            session.rollback(context)
            session.step(wrong)
            return seconds_each(lambda: session.step(wrong), LAUNCHES)

        taken = statistics.median(once() for _ in range(ROUNDS))
    return run.row(
        context,
        f"verify {rows} rows",
        1 / taken,
        times_one_row=round(many / one, 3),
        times_plain_step=round(taken / run.step_seconds(context), 3),
        us_one_row=round(one, 1),
        us=round(many, 1),
    )


def together(run: Run, context: int = CONTEXT, count: int = 16) -> Json:
    """Sessions that take every step at once."""
    sessions = [run.engine.session() for _ in range(count)]
    try:
        for i, session in enumerate(sessions):
            session.extend([i, *run.text[: context - 1]])
        requests = [StepRequest(session) for session in sessions]

        def once() -> float:
            for _ in range(4):
                run.engine.step_many(requests)
            return seconds_each(lambda: run.engine.step_many(requests), LAUNCHES)

        taken = statistics.median(once() for _ in range(ROUNDS))
    finally:
        for session in sessions:
            session.close()
    alone = run.step_seconds(context)
    return run.row(
        context,
        f"{count} sessions together",
        count / taken,
        times_one_session=round(count * alone / taken, 2),
    )


def first_token(run: Run, context: int = 8192, count: int = 16) -> Json:
    """From 16 tokens typed into a long session, idle until then, to the token after them."""
    base, times = run.text[:context], []
    with run.engine.session() as session:
        for i in range(LAUNCHES):
            session.extend(base)
            for _ in range(2):
                session.step()
            torch.cuda.synchronize()
            typed = [
                *base,
                *run.text[context + i * count :][:count],
            ]  # never seen: KV is found again otherwise
            began = time.perf_counter()
            session.extend(typed)
            session.step()
            times.append(time.perf_counter() - began)
    taken = statistics.median(times[1:])
    steps = round(taken / run.step_seconds(context), 2)
    return run.row(context, f"first token after +{count}", 1 / taken, steps=steps, ms=round(taken * 1000, 3))


def prefill(run: Run, context: int = 16_384, rounds: int = 3) -> Json:
    """Reading a text never seen before."""
    texts = [run.text, *(random_text(run.plan.spec.vocab_size, seed) for seed in range(1, rounds))]
    times = []
    with run.engine.session() as session:  # the libraries' own first-time work
        session.extend(random_text(run.plan.spec.vocab_size, rounds)[: min(context, 4096)])
    for text in reversed(texts):  # so that the pages of `run.text` are the last ones kept
        with run.engine.session() as session:
            times.append(seconds_each(partial(session.extend, text[:context]), 1))
    taken = statistics.median(times)
    return run.row(context, "prefill", context / taken, seconds=round(taken, 3))


def edit(run: Run) -> list[Json]:
    """A file copied with a name changed in it, as the editor asks for it: the model has seen the first
    changes and rewrites the file region by region; the old lines are the draft. The text must be the same
    without them.

    The first round of either kind is the warm-up. The very first reads whole prompts; all later rounds find
    the full pages it left and compute only what follows them, in one portion or in the first step. So rounds
    that are compared read the same KV, whether they draft or not; `reused` says so for each question, and
    where it differs (pages were evicted in between) portions were others and their last bits may be."""
    model = run.model
    assert model is not None
    questions = list(rewrites(model))
    measure_verify_cost(model.engine, 2.0)
    found: dict[bool, list[Json]] = {False: [], True: []}
    for drafts, _ in itertools.product((False, True), range(1 + ROUNDS)):
        said, reused = [], []
        sums = dict.fromkeys(("tokens", "seconds", "prefill", "steps", "drafted", "accepted"), 0.0)
        for prompt, draft, room in questions:
            drafter = drafter_for(model.engine, draft) if drafts else None
            with model.engine.session() as session:
                answer = Generation(
                    model, session, prompt, GenerationParams(max_tokens=room), drafter=drafter
                )
                for _ in answer:
                    pass
            said.append(tuple(answer.tokens))
            stats = answer.stats
            reused.append(stats.reused)
            each = (stats.tokens, stats.decode_seconds, stats.prefill_seconds)
            for name, value in zip(sums, (*each, stats.steps, stats.drafted, stats.accepted), strict=True):
                sums[name] += value
        found[drafts].append({**sums, "said": said, "reused": reused})
    context = max(len(prompt) for prompt, _, _ in questions)
    rows, speeds = [], []
    for drafts, rounds in found.items():
        timed = rounds[1:]  # the first is the warm-up
        speeds.append(statistics.median(r["tokens"] / r["seconds"] for r in timed))
        last = timed[-1]
        more: Json = {
            "tokens": int(last["tokens"]),
            "whole_seconds": round(statistics.median(r["seconds"] + r["prefill"] for r in timed), 4),
        }
        if drafts:
            more |= {
                "times_plain": round(speeds[1] / speeds[0], 2),
                "accepted": round(last["accepted"] / max(last["drafted"], 1), 3),
                "tokens_a_step": round(last["tokens"] / last["steps"], 2),
            }
            plain = found[False][1]
            others = [r for r in (*found[False][2:], *timed) if r["said"] != plain["said"]]
            more["same_text"] = not others
            if others:
                more["first_difference"] = difference(run, [q[0] for q in questions], plain, others[0])
        mode = "copy with edits, drafts" if drafts else "copy with edits, plain"
        rows.append(run.row(context, mode, speeds[-1], **more))
    return rows


def difference(run: Run, prompts: list[list[int]], plain: Json, other: Json) -> Json:
    """Where two rounds part, and how far apart the two best logits are there: next to nothing where rounding
    decided (then `same_reads` should be false: other portions), much more where something is wrong."""
    question, a, b = next(
        (i, a, b) for i, (a, b) in enumerate(zip(plain["said"], other["said"], strict=True)) if a != b
    )
    token = common_prefix(a, b)
    with run.engine.session() as session:
        session.extend([*prompts[question], *a[:token]])
        (_, best), (_, second) = session.step(sampling=Sampling(logprobs=2)).logprobs[0].top
    return {
        "question": question,
        "token": token,
        "best_logits_apart": round(best - second, 4),
        "same_reads": plain["reused"] == other["reused"],
    }


def rewrites(model: Model) -> list[tuple[list[int], list[int], int]]:
    """Prompts, what they most likely ask for, and how long an answer may be. Where an answer begins is given,
    so that lines that may stay as they are are copied too."""
    assert model.path is not None
    old = (Path(__file__).resolve().parents[2] / EDITED).read_text().rstrip("\n")
    new, encode, special = old.replace(OLD, NEW), model.tokenizer.encode, model.tokenizer.special
    before, after = old.split("\n"), new.split("\n")
    version = learned_version(model.path)
    if not isinstance(version, int):  # such a model goes on with the new file, having read the old one
        begun = len(before) // 3
        prompt, rest = (
            model.prompt(f"{old}\n\n\n{join_lines(after[:begun])}"),
            encode(join_lines(before[begun:])),
        )
        return [(prompt, rest, min(len(rest), model.engine.info.context_length - len(prompt)))]
    names = ["edit", "edit_before", "edit_after", "file_sep", "fim_suffix"]
    names += [f"reserved_{1 + n}" for n in range(REGION + 1)]  # numbers of lines
    edit, was, becomes, file, below, *numbers = (special(f"<|{name}|>") or 0 for name in names)
    path = encode(f"{EDITED}\n")
    history: list[int] = []
    for change in changes_between(old, new, EDITED)[:3]:
        history += [edit, *path, was, *encode(change.before), becomes, *encode(change.after)]
    found = []
    for first in range(0, len(before), REGION):
        lines, last = before[first : first + REGION], first + REGION
        above, under = (
            encode(join_lines(after[max(first - 4, 0) : first])),
            encode(join_lines(before[last : last + 4])),
        )
        draft = encode(join_lines(lines))
        region, place = draft, []
        if version > 1:  # lines have numbers, and an answer says which ones it is for
            numbered = [[number, *encode(f"{text}\n")] for number, text in zip(numbers, lines, strict=False)]
            region = [*itertools.chain(*numbered), numbers[len(lines)]]
            place = [numbers[0], numbers[len(lines)]]
        asked = [*history, file, *path, *above, was, *region, below, *under, becomes, *place, draft[0]]
        found.append((asked, draft[1:], len(draft) + 32))
    return found


# Parts

Row = Callable[[Run], Json | list[Json]]


@dataclass(frozen=True)
class Part:
    """One model with random weights, which speed does not depend on."""

    spec: ModelSpec
    rows: tuple[Row, ...]
    precision: Precision = "bf16"
    kv_tokens: int = 65_536
    sparse: Sparse = "off"
    kv_precision: KvPrecision = "bf16"
    peer: bool = False  # transformers runs the same
    file: str = ""  # its shape in random_models.py, if llama.cpp runs the same: with one, ours reads it too
    depth: int = CONTEXT  # behind which llama.cpp is timed
    target: str = "auto"  # an older kind of GPU that this one is run as
    formats: Formats | None = None  # of stored weights; None: the typical ones

    def kernels(self) -> list[dict[str, str]]:
        target = kind(self.target)
        plan = random_plan(self.spec, self.precision, blocks(), self.kv_precision, target, self.formats)
        sparse = [plan.macros(1, True)] if self.sparse != "off" and supports_sparse(plan) else []
        sizes = sorted({bucket.tiles_n for bucket in plan.buckets} & {1, 2})
        single = [plan.macros(1, shape=plan.shape(1, reach)) for reach in (0, NEAR)]
        return [*(plan.macros(tiles) for tiles in sizes), *single, *sparse]

    def engine(self, file: Path | None = None) -> CudaEngine:
        target = kind(self.target)
        if file is not None:
            return load_cuda(
                file,
                precision=self.precision,
                kv_tokens=self.kv_tokens,
                context=self.spec.context_length,
                sparse=self.sparse,
                kv_precision=self.kv_precision,
            )
        weights = random_weights(
            self.spec,
            self.precision,
            DEVICE,
            blocks(),
            kv_precision=self.kv_precision,
            target=target,
            stored=self.formats,
        )
        return CudaEngine(weights, GpuLauncher(weights.plan, DEVICE), self.kv_tokens, sparse=self.sparse)


# The types of published files: eight bits for all but the experts, or the feed-forward part, and the head.
PUBLISHED_27B = Formats(EIGHT, EIGHT, EIGHT, FOUR, FOUR, SIX, wide=FOUR, delta_in=EIGHT, delta_out=EIGHT)
PUBLISHED_35B = replace(
    PUBLISHED_27B, down=SIX_OFFSET, wide=SIX_OFFSET, shared_gate_up=EIGHT, shared_down=EIGHT
)
PARTS = {
    "135m": Part(SMOLLM2_135M, (decode, verify, together), peer=True),
    "1.5b": Part(
        QWEN_1_5B,
        (decode, verify, together, partial(decode, context=8192), first_token, prefill),
        peer=True,
    ),
    "1.5b-stored": Part(QWEN_1_5B, (decode, verify), "stored"),  # as files of Q4_K_M are made
    "7b": Part(QWEN_7B, (decode, verify), peer=True),
    "7b-int8": Part(QWEN_7B, (decode, verify), "int8"),
    "7b-int4": Part(QWEN_7B, (decode, verify), "int4"),
    "7b-stored": Part(QWEN_7B, (decode, verify), "stored"),
    # Random routers choose experts as evenly as can be: rows of a step share fewer than trained ones would.
    "moe-30b": Part(
        QWEN3_CODER_30B,
        (decode, verify, together, partial(prefill, context=8192), partial(decode, context=LONG)),
        "stored",
        kv_tokens=140_000,
        file="coder-30b-a3b",
    ),
    # 16-bit keys and values of 120,000 tokens are 11.8 GB, which alone allow about 400 tokens a second.
    "moe-30b-120k": Part(
        QWEN3_CODER_30B,
        (decode, partial(decode, context=LONG), sparse_decode),
        "stored",
        kv_tokens=140_000,
        sparse="always",
        kv_precision="int8",
        file="coder-30b-a3b",
        depth=LONG,
    ),
    "moe-gpt-oss": Part(
        GPT_OSS_20B,
        (decode, verify, together, partial(prefill, context=8192), partial(decode, context=LONG)),
        "stored",
        kv_tokens=140_000,
        file="gpt-oss-20b",
    ),
    "mellum2": Part(
        MELLUM2,
        (decode, verify, together, partial(prefill, context=8192)),
        "stored",
        kv_tokens=65_536,
        file="mellum2",
    ),
    "hybrid-35b": Part(
        QWEN_35B_HYBRID,
        (decode, verify, together, partial(prefill, context=8192)),
        "stored",
        kv_tokens=65_536,
        file="qwen3.6-35b-a3b",
    ),
    "hybrid-27b": Part(
        QWEN_27B_HYBRID,
        (decode, verify, together, partial(prefill, context=8192)),
        "stored",
        kv_tokens=65_536,
        file="qwen3.6-27b",
    ),
    # The experts in 4.6 bits a weight, as cards with 24 GB hold them.
    "moe-30b-compact": Part(
        QWEN3_CODER_30B,
        (decode, verify, partial(prefill, context=8192)),
        "stored",
        formats=typical_formats(QWEN3_CODER_30B).compacted(),
    ),
    # What GPUs without bulk copies and with less shared memory run, on this one: their code, not their speed.
    "1.5b-sm_80": Part(QWEN_1_5B, (decode, verify, together, partial(decode, context=8192)), target="sm_80"),
    "1.5b-sm_86": Part(QWEN_1_5B, (decode, verify, together, partial(decode, context=8192)), target="sm_86"),
    "7b-int4-sm_86": Part(QWEN_7B, (decode, verify), "int4", target="sm_86"),
    "120k": Part(
        extend_context(QWEN_1_5B, 131_072),
        (partial(prefill, context=WHOLE, rounds=1), partial(decode, context=LONG), sparse_decode),
        kv_tokens=140_000,
        sparse="always",
    ),
    "120k-kv8": Part(
        extend_context(QWEN_1_5B, 131_072),
        (decode, partial(decode, context=8192), partial(decode, context=LONG), sparse_decode),
        kv_tokens=140_000,
        sparse="always",
        kv_precision="int8",
    ),
}
PARTS |= {
    f"{name}-published": replace(PARTS[name], formats=formats, file="")
    for name, formats in (("hybrid-35b", PUBLISHED_35B), ("hybrid-27b", PUBLISHED_27B))
}
EDIT = "edit"  # the part that needs a real model
SERVED = {"serve-135m": SMOLLM2_135M, "serve-1.5b": QWEN_1_5B}  # over a socket, see cuda_serve.py


def kind(name: str = "auto") -> Target:
    return gpu_target(DEVICE, name)


def blocks() -> int:
    return torch.cuda.get_device_properties(DEVICE).multi_processor_count


def say(found: Json) -> None:
    print(json.dumps(found), flush=True)


def name_of(row: Row) -> str:
    if isinstance(row, partial):
        details = ", ".join(f"{k} {v:,}" for k, v in row.keywords.items())
        return f"{row.func.__name__} ({details})"
    return getattr(row, "__name__", str(row))


def main(name: str, model: str | None = None) -> None:
    blocks()  # the driver's own start
    print(READY, flush=True)
    told = sys.stdin.readline()
    if not told:
        return
    limit = float(told)
    if name == EDIT:
        assert model is not None
        path = Path(model)
        engine = load_cuda(path, kv_tokens=16_384)
        real = Model(path.name, engine, load_tokenizer(path), path=path)
        run = Run(engine, limit, real)
        rows: tuple[Row, ...] = (edit,)
    else:
        run = Run(PARTS[name].engine(None if model is None else Path(model)), limit)
        rows = PARTS[name].rows
    with run.engine:
        for row in rows:
            try:
                found = row(run)
            except Exception as error:
                traceback.print_exc()
                say({"part": name, "row": name_of(row), "error": f"{type(error).__name__}: {error}"[:300]})
            else:
                for each in found if isinstance(found, list) else [found]:
                    say({**each, "shape": PARTS[name].spec.name} if name in PARTS else each)


if __name__ == "__main__":
    main(*sys.argv[1:])
