"""The MLX engine beside the embedded one on the same GGUF file: greedy texts, and the speed of both.

Regime: batch 1, 20 short prompts, no drafts. Both engines read the same codes, but round differently: the
embedded one multiplies activations of 8 bits, MLX floats. Where a text differs, the first differing token is
shown with the margin by which each engine prefers its own (in nats): rounding decides small margins only.
On a GPU, MLX also answers with drafts, as it does in use: those texts must be the same as without, and their
speed and the tokens of each step show what drafts gain. On Linux, MLX's CPU build reads about half a gigabyte
a second, which says nothing about a Mac, and no draft pays.

    python -m bench.mlx_texts [--model FILE.gguf]         # default: coder-small of the model library
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bench.record import record
from keystroke.config import load_settings
from keystroke.engine.host import HostSession
from keystroke.engine.load import load_model
from keystroke.engine.locate import resolve
from keystroke.engine.model import Model
from keystroke.engine.speculative import MAX_DRAFT, AdaptiveDrafter, drafter_for

PROMPTS = (
    "def fibonacci(n):\n",
    "import os\n\ndef read_file(path):\n",
    "class Stack:\n    def __init__(self):\n",
    "for i, line in enumerate(",
    "# Sort a list of dictionaries by key\n",
    "SELECT name, COUNT(*) FROM",
    "function debounce(fn, delay) {\n",
    "func main() {\n\tfmt.",
    "#include <stdio.h>\n\nint main",
    "fn add(a: i32, b: i32)",
    "public static int max(int a",
    "try:\n    value = int(text)\n",
    "def is_prime(n: int) -> bool:\n",
    "with open('data.json') as f:\n",
    "git commit -m",
    "The capital of France is",
    "A binary search tree is",
    "const response = await fetch(",
    "assert sorted([3, 1, 2]) ==",
    "def test_empty_list_has_no_maximum():\n",
)


@dataclass(frozen=True, slots=True)
class DifferingToken:
    """The first token at which two greedy texts differ, and how much each engine prefers its own."""

    prompt: str
    position: int
    tokens: tuple[str, str]
    margins: tuple[float, float]  # nats


def open_on(kind: str, file: Path) -> Model:
    settings = load_settings()
    return load_model(file, replace(settings, engine=replace(settings.engine, kind=kind)))


def greedy(model: Model, prompt: Sequence[int], count: int) -> tuple[list[int], list[np.ndarray], float]:
    """`count` tokens, the logits that chose each, and seconds a token."""
    logits: list[np.ndarray] = []
    with model.engine.session() as session:
        assert isinstance(session, HostSession)
        forward = session._forward

        def watched(*arguments: object) -> np.ndarray:
            found = forward(*arguments)  # type: ignore[arg-type]
            logits.extend(found[-1:].copy())
            return found

        session._forward = watched  # type: ignore[assignment, method-assign]
        session.extend(prompt)
        took: list[float] = []
        while session.length < len(prompt) + count:
            began = time.perf_counter()
            session.step()
            took.append(time.perf_counter() - began)
        return list(session.tokens[len(prompt) :]), logits, statistics.median(took[1:])


def drafted(
    model: Model, drafter: AdaptiveDrafter, prompt: Sequence[int], count: int
) -> tuple[list[int], int, float]:
    """`count` tokens with whatever the drafter proposes, in how many steps and seconds a token."""
    steps = 0
    drafter.begin(prompt)
    with model.engine.session() as session:
        session.extend(prompt)
        session.step()
        drafter.observe(session.tokens[len(prompt) :])
        began = time.perf_counter()
        while session.length < len(prompt) + count:
            draft = drafter.propose(session.tokens, min(MAX_DRAFT, len(prompt) + count - session.length - 1))
            started = time.perf_counter()
            step = session.step(draft)
            drafter.record_result(len(draft), step.accepted, time.perf_counter() - started)
            drafter.observe(step.tokens)
            steps += 1
        seconds = (time.perf_counter() - began) / max(session.length - len(prompt) - 1, 1)
        return list(session.tokens[len(prompt) :]), steps, seconds


def compare_drafts(mlx: Model, count: int) -> dict[str, float]:
    """MLX with drafts and without: texts that are the same, tokens a step, tokens a second."""
    drafter = drafter_for(mlx.engine)
    same, steps, seconds = 0, 0, []
    for text in PROMPTS:
        prompt = mlx.tokenizer.encode(text)
        found, taken, each = drafted(mlx, drafter, prompt, count)
        same += found == greedy(mlx, prompt, count)[0]
        steps += taken
        seconds.append(each)
    return {
        "same_texts": same,
        "tokens_a_step": round((count - 1) * len(PROMPTS) / steps, 2),
        "decode_tok_s": round(1 / statistics.median(seconds), 2),
    }


def compare(embedded: Model, mlx: Model, count: int) -> tuple[list[DifferingToken], float, float]:
    found: list[DifferingToken] = []
    seconds: tuple[list[float], list[float]] = ([], [])
    for number, text in enumerate(PROMPTS):
        prompt = embedded.tokenizer.encode(text)
        ours, our_logits, our_seconds = greedy(embedded, prompt, count)
        theirs, their_logits, their_seconds = greedy(mlx, prompt, count)
        seconds[0].append(our_seconds)
        seconds[1].append(their_seconds)
        at = next((n for n in range(count) if ours[n] != theirs[n]), None)
        print(f"{number + 1:3} {text[:34]!r:40} {'the same text' if at is None else f'differs at {at}'}")
        if at is not None:
            margins = (
                float(our_logits[at][ours[at]] - our_logits[at][theirs[at]]),
                float(their_logits[at][theirs[at]] - their_logits[at][ours[at]]),
            )
            pieces = embedded.tokenizer.decode([ours[at]]), embedded.tokenizer.decode([theirs[at]])
            found.append(DifferingToken(text, at, pieces, margins))
            print(f"    {pieces[0]!r} by {margins[0]:.3f}, {pieces[1]!r} by {margins[1]:.3f}")
    return found, statistics.median(seconds[0]), statistics.median(seconds[1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a GGUF file; default: coder-small")
    parser.add_argument("--tokens", type=int, default=16, help="of each answer")
    parser.add_argument("--drafts", action="store_true", help="answers with drafts, also without a GPU")
    options = parser.parse_args()
    from keystroke.engine.mlx.weights import runs_on_gpu

    file = options.model or resolve("coder-small", load_settings())
    file = file if file.is_file() else next(file.glob("*.gguf"))
    embedded, mlx = open_on("onnx", file), open_on("mlx", file)
    differences, ours, theirs = compare(embedded, mlx, options.tokens)
    figures: dict[str, object] = {
        "prompts": len(PROMPTS),
        "tokens": options.tokens,
        "same_texts": len(PROMPTS) - len(differences),
        "largest_margin_nats": round(max((min(each.margins) for each in differences), default=0.0), 3),
        "decode_tok_s": {"embedded": round(1 / ours, 2), "mlx": round(1 / theirs, 2)},
    }
    if options.drafts or runs_on_gpu():
        figures["with_drafts"] = compare_drafts(mlx, options.tokens)
        print(f"with drafts: {figures['with_drafts']}")
    for model in (embedded, mlx):
        model.engine.close()
    record("mlx", figures)


if __name__ == "__main__":
    main()
