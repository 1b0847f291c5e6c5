"""What a real code model loses to fewer bits, drafts, 8-bit keys and sparse attention, on one Hopper GPU.

Regime: real weights (a GGUF file), text is an old state of the program's own source, so it is always the
same. The reference for divergence is the file's weights as float32 and multiplied in float32
(reference.py); every position's logits come from the decode kernel, sixteen rows a step, once over KV that it
wrote itself and once over KV that prefill wrote. The floor is 0 nats; bf16 says what 16 bits cost.

Functions return plain rows, which tests compare with limits. Only `speed` is timed.

    python -P bench/cuda.py --model FILE --only coder-quality         through the whole benchmark
    python -m bench.cuda_rows.coder_quality FILE [SECTION ...]          kl drafts speed long
"""

from __future__ import annotations

import gc
import json
import lzma
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.cuda_rows.cuda_parts import READY
from keystroke.engine.base import Sampling
from keystroke.engine.checkpoint import open_checkpoint
from keystroke.engine.checkpoint.spec import Checkpoint, tensor_shapes
from keystroke.engine.cuda.engine import CudaEngine, load_cuda
from keystroke.engine.cuda.plan import KvPrecision, Precision
from keystroke.engine.cuda.reference import forward
from keystroke.engine.cuda.stored import STORED_TYPES, read_codes, stored_formats
from keystroke.engine.cuda.weights import plan_of
from keystroke.engine.generation import Generation, GenerationParams
from keystroke.engine.model import Model
from keystroke.engine.speculative import drafter_for, measure_verify_cost
from keystroke.engine.tokenizer import Tokenizer, load_tokenizer

Json = dict[str, Any]
PRECISIONS: tuple[Precision, ...] = ("bf16", "int8", "int4", "stored")
KV_PRECISIONS: tuple[KvPrecision, ...] = ("bf16", "int8")
PROBE = Sampling(logprobs=0)  # chosen on the host: no step runs ahead and overwrites the logits
TEXT, ROWS = 1024, 16  # tokens that are compared, and rows of a step
ANSWER = 96  # tokens of one
LENGTHS = (8_192, 24_576, 120_000)
STRETCHED = 131_072
DATA = Path(__file__).parents[1] / "data"
NEEDLES = (0.07, 0.21, 0.35, 0.52, 0.68, 0.81)  # how deep each lies, as a part of the text
SCORED = 512  # tokens whose perplexity is taken, at the end of the context
CODES = ("amber-4821", "cobalt-1937", "fennel-6604", "garnet-2758", "indigo-9143", "walnut-3370")

THINGS = (
    "a stack with push, pop and peek", "a function that merges two sorted lists", "a matrix transpose",
    "a least-recently-used cache", "a function that counts words in a text", "binary search over a list",
    "a class for rational numbers", "a function that validates an e-mail address", "quick sort", "a trie",
    "a function that parses a CSV line with quotes", "a rate limiter", "a priority queue",
    "run-length encoding", "a function that flattens nested lists", "Dijkstra's algorithm",
    "a bank account with deposits and withdrawals", "a moving average", "a temperature converter",
    "a decorator that retries a function", "a context manager that measures time",
    "a generator of prime numbers", "a function that checks for balanced brackets",
    "a simple event emitter", "a function that groups words by anagram",
)  # fmt: skip


def questions(tokenizer: Tokenizer) -> list[list[int]]:
    """Fifty prompts: new code, and code that is to be changed a little."""
    found = [f"Write {thing} in Python. Answer with code only." for thing in THINGS]
    lines = source_text().splitlines()
    for number in range(len(THINGS)):
        part = "\n".join(lines[400 + 60 * number : 424 + 60 * number])
        found.append(f"Repeat this code and add a comment above its first line:\n```python\n{part}\n```")
    return [asked(tokenizer, each) for each in found]


def asked(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n",
        special=True,
    )


def source_text() -> str:
    """Files of the program as they once were: what a model finds in a text depends on the text."""
    return lzma.decompress((DATA / "long-text.txt.xz").read_bytes()).decode()


# Divergence


def widened(path: Path, device: torch.device) -> tuple[Any, dict[str, Tensor]]:
    """The model and its tensors in float32, exactly what the file says."""
    with open_checkpoint(path) as checkpoint:
        found = {}
        for name in tensor_shapes(checkpoint.spec):
            array, kind = checkpoint.raw(name)
            if kind in STORED_TYPES:
                found[name] = read_codes(torch.from_numpy(array.copy()).to(device), kind).weights()
            else:
                found[name] = torch.from_numpy(checkpoint.tensor(name).copy()).to(device)
        return checkpoint.spec, found


@torch.inference_mode()
def truth(path: Path, tokens: Sequence[int], device: torch.device) -> Tensor:
    """Log probabilities [tokens, vocabulary] of the widened model, float32."""
    spec, tensors = widened(path, device)
    return forward(spec, tensors.__getitem__, tokens).log_softmax(-1)


@torch.inference_mode()
def divergence(engine: CudaEngine, tokens: Sequence[int], exact: Tensor, start: int = 0) -> Json:
    """Of the decode kernel's rows from `start` on; what comes before is read by prefill."""
    total, agreed, worst, count = 0.0, 0, 0.0, 0
    with engine.session(scope=f"divergence {start}") as session:
        first = max(start, 1)
        for end in range(first + ROWS, len(tokens) + 1, ROWS):
            session.extend(tokens[: end - ROWS] if session.length == 0 and start else tokens[:end])
            if session.length < end:  # the beginning alone, so that the rows below are all its followers
                session.extend(tokens[:end])
            rows = session.length - session.resident
            session.step(sampling=PROBE)
            found = engine._stepper.logits[:rows].log_softmax(-1)
            wanted = exact[end - rows : end]
            each = (wanted.exp() * (wanted - found)).sum(-1)
            total += float(each.sum())
            worst = max(worst, float(each.max()))
            agreed += int((wanted.argmax(-1) == found.argmax(-1)).sum())
            count += rows
    return {
        "kl": round(total / count, 6),
        "worst": round(worst, 4),
        "same_best": round(agreed / count, 4),
        "tokens": count,
    }


def kl_rows(path: Path, precisions: Iterable[Precision] = PRECISIONS) -> Iterator[Json]:
    tokens = load_tokenizer(path).encode(source_text()[20_000:60_000])[:TEXT]
    exact = truth(path, tokens, torch.device("cuda"))
    freed()
    for precision in precisions:
        try:
            began = time.perf_counter()
            with load_cuda(path, precision=precision, kv_tokens=16_384) as engine:
                loaded = time.perf_counter() - began
                yield {
                    "section": "kl",
                    "precision": precision,
                    **divergence(engine, tokens, exact),
                    "after_prefill": divergence(engine, tokens, exact, TEXT // 2)["kl"],
                    "load_s": round(loaded, 2),
                    "weight_bytes": engine.info.weight_bytes,
                }
        except Exception as error:
            yield failed("kl", precision, error)
        freed()


# Drafts


def answers(
    model: Model, prompts: Sequence[Sequence[int]], sampling: Sampling, drafts: str
) -> list[tuple[int, ...]]:
    """Greedy or sampled answers; `drafts`: none, lookup (what the prompt says) or file (its last lines)."""
    said = []
    for prompt in prompts:
        source = list(prompt[-200:]) if drafts == "file" else None
        drafter = drafter_for(model.engine, source) if drafts != "none" else None
        with model.engine.session() as session:
            params = GenerationParams(max_tokens=ANSWER, sampling=sampling)
            answer = Generation(model, session, prompt, params, drafter=drafter)
            for _ in answer:
                pass
        said.append(tuple(answer.tokens))
    return said


def draft_rows(path: Path, precision: Precision = "bf16", count: int = 50) -> Iterator[Json]:
    tokenizer = load_tokenizer(path)
    with load_cuda(path, precision=precision, kv_tokens=65_536) as engine:
        model = Model(path.name, engine, tokenizer, path=path)
        prompts = questions(tokenizer)
        prompts = prompts[:: max(len(prompts) // count, 1)][:count]
        measure_verify_cost(engine, 1.0)
        for name, sampling in (("greedy", Sampling()), ("0.8", Sampling(temperature=0.8, seed=7))):
            answers(model, prompts, sampling, "none")  # so that all that follow find the same pages
            plain = answers(model, prompts, sampling, "none")
            for drafts in ("lookup", "file"):
                began = time.perf_counter()
                said = answers(model, prompts, sampling, drafts)
                same = sum(a == b for a, b in zip(plain, said, strict=True))
                yield {
                    "section": "drafts",
                    "precision": precision,
                    "temperature": name,
                    "drafts": drafts,
                    "same": same,
                    "answers": len(prompts),
                    "tokens": sum(map(len, said)),
                    "seconds": round(time.perf_counter() - began, 2),
                }


# Speed


def speed_rows(
    path: Path, precisions: Iterable[Precision] = PRECISIONS, context: int = 1024
) -> Iterator[Json]:
    """Plain greedy decoding behind `context` tokens through `Session.step`, and what 16 rows cost."""
    tokens = load_tokenizer(path).encode(source_text()[20_000:60_000])
    for precision in precisions:
        try:
            with load_cuda(path, precision=precision, kv_tokens=16_384) as engine:
                yield {
                    "section": "speed",
                    "model": path.stem,
                    "precision": precision,
                    **speed(engine, tokens[:context]),
                }
        except Exception as error:
            yield failed("speed", precision, error)
        freed()


def speed(engine: CudaEngine, prompt: Sequence[int]) -> Json:
    rates = []
    with engine.session() as session:
        session.extend(prompt)
        for _ in range(32):
            session.step()
        for _ in range(3):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(128):
                session.step()
            rates.append(128 / (time.perf_counter() - began))
        draft = list(prompt[:15])
        session.step(draft)
        began = time.perf_counter()
        steps = 40
        for _ in range(steps):
            session.step(draft)
        sixteen = (time.perf_counter() - began) / steps
    plan = engine._stepper.plan
    rate = sorted(rates)[1]
    return {
        "tok_s": round(rate, 1),
        "us": round(1e6 / rate, 1),
        "sixteen_rows_us": round(1e6 * sixteen, 1),
        "streamed_gb": round(plan.streamed_bytes / 1e9, 3),
        "tb_s": round(plan.streamed_bytes * rate / 1e12, 3),
    }


# Long contexts


def haystack(tokenizer: Tokenizer, length: int) -> tuple[list[int], list[str]]:
    """A text of about `length` tokens with six lines hidden in it, and the lines' codes."""
    budget = int(length * 4.0)
    text = source_text()
    text = (text * (budget // len(text) + 1))[:budget]
    lines = text.split("\n")
    for index in reversed(range(len(NEEDLES))):
        at = int(NEEDLES[index] * len(lines))
        lines.insert(at, f"# NOTE: the access code of vault number {index + 1} is {CODES[index]}.")
    return tokenizer.encode("\n".join(lines))[: length - 200], list(CODES)


def long_rows(
    path: Path,
    length: int,
    kv_precisions: Iterable[KvPrecision] = KV_PRECISIONS,
    precision: Precision = "bf16",
) -> Iterator[Json]:
    """Retrieval of hidden lines and perplexity of the last tokens: dense and sparse, over 16-bit and 8-bit
    keys and values."""
    tokenizer = load_tokenizer(path)
    tokens, codes = haystack(tokenizer, length)
    context = STRETCHED if length > 30_000 else None
    begin = asked(tokenizer, "")[:-5]
    for kv in kv_precisions:
        try:
            with load_cuda(
                path,
                precision=precision,
                context=context,
                kv_tokens=length + 8_192,
                sparse="always",
                kv_precision=kv,
            ) as engine:
                model = Model(path.name, engine, tokenizer, path=path)
                for attention, sparse_from in (("dense", 1 << 30), ("sparse", 4_096)):
                    engine.sparse_from = sparse_from
                    began = time.perf_counter()
                    right = 0
                    for index, code in enumerate(codes):
                        ask = f"What is the access code of vault number {index + 1}? Answer with it only."
                        tail = tokenizer.encode(f"\n\n{ask}<|im_end|>\n<|im_start|>assistant\n", special=True)
                        with engine.session() as session:
                            params = GenerationParams(max_tokens=16)
                            answer = Generation(model, session, [*begin, *tokens, *tail], params)
                            for _ in answer:
                                pass
                        right += code in answer.text
                    yield {
                        "section": "long",
                        "tokens": length,
                        "kv": kv,
                        "attention": attention,
                        "retrieved": right,
                        "of": len(codes),
                        "nll": round(perplexity(engine, [*begin, *tokens]), 4),
                        "seconds": round(time.perf_counter() - began, 2),
                    }
        except Exception as error:
            yield failed("long", f"{length} {kv}", error)
        freed()


def perplexity(engine: CudaEngine, tokens: Sequence[int]) -> float:
    """Nats a token over the last ones, each row over all that comes before it, by the decode kernel."""
    total, count = 0.0, 0
    with engine.session() as session:
        begin = len(tokens) - SCORED - 1
        session.extend(tokens[:begin])
        for end in range(begin + ROWS, len(tokens), ROWS):
            session.extend(tokens[:end])
            rows = session.length - session.resident
            session.step(sampling=PROBE)
            found = engine._stepper.logits[:rows].log_softmax(-1)
            nexts = torch.tensor(tokens[end - rows + 1 : end + 1], device=found.device)
            total -= float(found[torch.arange(rows, device=found.device), nexts].sum())
            count += rows
    return total / count


def freed() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def failed(section: str, what: str, error: Exception) -> Json:
    traceback.print_exc()
    return {"section": section, "what": what, "error": f"{type(error).__name__}: {error}"[:300]}


def rows(path: Path, sections: Sequence[str]) -> Iterator[Json]:
    """Every row of these sections, as it comes; one that fails says so and the next is tried."""
    made: dict[str, Callable[[], Iterator[Json]]] = {
        "kl": lambda: kl_rows(path),
        "drafts": lambda: draft_rows(path),
        "speed": lambda: speed_rows(path),
        **{f"long-{length}": partial(long_rows, path, length) for length in LENGTHS},
    }
    wanted = [
        n
        for s in sections
        for n in (made if s == "all" else [k for k in made if k == s or k.startswith(f"{s}-")])
    ]
    for name in wanted:
        try:
            yield from made[name]()
        except Exception as error:
            yield failed(name, "section", error)
        freed()


def quality_kernels(checkpoint: Checkpoint, blocks: int) -> list[dict[str, str]]:
    """What these sections run, to be compiled beforehand."""
    plans = [
        plan_of(checkpoint, precision, blocks) for precision in PRECISIONS if fits(checkpoint, precision)
    ]
    wanted = [plan.macros(tiles) for plan in plans for tiles in (1, 2)]
    for kv in KV_PRECISIONS:
        plan = plan_of(checkpoint, "bf16", blocks, kv)
        wanted += [plan.macros(tiles, sparse) for tiles in (1, 2) for sparse in (False, True)]
    return wanted


def fits(checkpoint: Checkpoint, precision: Precision) -> bool:
    return precision != "stored" or stored_formats(checkpoint) is not None


def as_row(path: Path, row: Json) -> Json:
    """With the columns that all rows of bench/cuda.py have."""
    common = {
        "shape": path.stem[:14],
        "precision": row.get("precision", "bf16"),
        "context": row.get("tokens", TEXT) if row["section"] == "long" else TEXT,
        "mode": " ".join([row["section"], *(str(row[k]) for k in ("drafts", "attention", "kv") if k in row)]),
        "tok_s": row.get("tok_s"),
        "fraction_of_limit": None,
        "peer_tok_s": None,
    }
    return row if "error" in row else {**common, **{k: v for k, v in row.items() if k not in common}}


def main(model: str, *sections: str) -> None:
    path, part = Path(model), sections == ("--part",)
    if part:  # of bench/cuda.py: ready, then told to go
        print(READY, flush=True)
        if not sys.stdin.readline():
            return
    for row in rows(path, ("all",) if part or not sections else sections):
        print(json.dumps(as_row(path, row) if part else row), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
