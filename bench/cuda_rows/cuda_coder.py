"""Rows of a real code model in chat: new code, and answers that repeat their prompt.

One process for one part, as cuda_parts.py has them; the weights are real, so is the text. Every prompt
is answered plainly, with prompt lookup and with the draft head beside it, each by the same `Generation`
that serves users; texts must be the same. Speed is tokens over the seconds of decoding, the median over
prompts.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.cuda_rows.cuda_parts import READY, Json, Run, blocks, say
from keystroke.engine.base import GREEDY, Sampling
from keystroke.engine.checkpoint import open_checkpoint
from keystroke.engine.cuda.engine import load_cuda
from keystroke.engine.cuda.plan import Precision
from keystroke.engine.generation import Generation, GenerationParams
from keystroke.engine.model import Model
from keystroke.engine.speculative import AdaptiveDrafter, Drafter, SuffixDrafter, measure_verify_cost
from keystroke.engine.speculative.adaptive import drafter_for
from keystroke.engine.speculative.find_head import find_head
from keystroke.engine.templates import detect_chat
from keystroke.engine.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[2]
NEW, REPEAT = "coder-new", "coder-repeat"
CODER = (NEW, REPEAT)
MOST = 256  # tokens of an answer
HOT = Sampling(temperature=0.8, seed=5)
REPEATED = 16  # files that are asked for again, with something changed


def prompts(model: Model, name: str) -> list[list[int]]:
    """What is asked, as the model's own template says it."""
    assert model.chat is not None
    if name == NEW:
        lines = (ROOT / "bench/data/new-code.jsonl").read_text(encoding="utf-8").splitlines()
        asked = [json.loads(line)["prompt"] for line in lines]
    else:
        files = sorted((ROOT / "src/keystroke/text").glob("*.py"))
        files += sorted((ROOT / "src/keystroke/engine").glob("*.py"))
        texts = [file.read_text(encoding="utf-8") for file in files]
        asked = [
            f"Rename `self` to `this` in this code and change nothing else.\n\n```python\n{text[:2400]}\n```"
            for text in texts
            if len(text) > 2400
        ][:REPEATED]
    return [model.chat.tokens(model.tokenizer, [{"role": "user", "content": text}]) for text in asked]


def answers(
    model: Model, asked: Sequence[Sequence[int]], make: Callable[[], Drafter | None], sampling: Sampling
) -> tuple[list[tuple[int, ...]], Json]:
    said, speeds, sums = [], [], dict.fromkeys(("tokens", "steps", "drafted", "accepted"), 0)
    for prompt in asked:
        with model.engine.session() as session:
            answer = Generation(model, session, prompt, GenerationParams(MOST, sampling), drafter=make())
            for _ in answer:
                pass
        said.append(tuple(answer.tokens))
        stats = answer.stats
        speeds.append(stats.tokens_per_second)
        for name in sums:
            sums[name] += getattr(stats, name)
    tenths = statistics.quantiles(speeds, n=10)
    return said, {
        "tok_s": statistics.median(speeds),
        "tenth": round(tenths[0]),
        "ninth": round(tenths[-1]),
        "tokens_a_step": round(sums["tokens"] / sums["steps"], 2),
        "drafted": sums["drafted"],
        "accepted": sums["accepted"],
    }


def measure(run: Run, model: Model, name: str, sampling: Sampling, count: int) -> None:
    engine = run.engine
    asked = prompts(model, name)[:count]
    kinds: dict[str, Callable[[], Drafter | None]] = {
        "plain": lambda: None,
        "prompt lookup": lambda: AdaptiveDrafter([SuffixDrafter()], costs),
        "head and prompt lookup": lambda: drafter_for(engine),
    }
    costs = measure_verify_cost(engine, 2.0)
    if engine.head is None:
        del kinds["head and prompt lookup"]
    answers(model, asked[:3], kinds["plain"], sampling)  # the warm-up
    first: list[tuple[int, ...]] = []
    heat = "greedy" if sampling == GREEDY else f"at {sampling.temperature}"
    for kind, make in kinds.items():
        said, found = answers(model, asked, make, sampling)
        first = first or said
        same = sum(a == b for a, b in zip(first, said, strict=True))
        speed = found.pop("tok_s")
        longest = max(map(len, asked))
        say(run.row(longest, f"{name} {heat}, {kind}", speed, **found, same_text=f"{same} of {len(said)}"))


def main(name: str, path: str, precision: Precision = "bf16", head: str = "auto", count: str = "100") -> None:
    blocks()  # the driver's own start
    print(READY, flush=True)
    told = sys.stdin.readline()
    if not told:
        return
    file = Path(path)
    with open_checkpoint(file) as checkpoint:
        found = find_head(head, file, checkpoint.spec, (ROOT / "models",))
    engine = load_cuda(file, precision=precision, kv_tokens=65_536, draft_head=found)
    model = Model(file.name, engine, load_tokenizer(file), detect_chat(file), path=file)
    with engine:
        for sampling in (GREEDY, HOT):
            try:
                measure(Run(engine, float(told), model), model, name, sampling, int(count))
            except Exception as error:
                say({"part": name, "row": str(sampling), "error": f"{type(error).__name__}: {error}"[:300]})


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]
