"""The cost of decoding on the host: sampling, tokens to text, keystrokes to tokens, drafts.

Regime: one thread, no model, processor time (a busy machine matters less); medians, or the best of five.
Ceiling: a small model on two laptop cores takes about 8 ms a token, a GPU below 1 ms; this comes on top.
Replayed drafts assume a model that writes exactly the given text. Run `python bench/decode.py MODEL [TEXT]`:
MODEL is a folder with a tokenizer.json or a GGUF file, TEXT a source file (by default, argparse).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np

from bench.record import record
from keystroke.engine.base import GREEDY, AllowedTokens, ExtendResult, Interrupt, Sampling, Session, Step
from keystroke.engine.echo import EchoEngine
from keystroke.engine.generation import Generation, GenerationParams
from keystroke.engine.model import Model
from keystroke.engine.sampler import choose
from keystroke.engine.speculative import (
    MAX_DRAFT,
    AdaptiveDrafter,
    Drafter,
    FileDrafter,
    SuffixDrafter,
    cost_table,
)
from keystroke.engine.tokenizer import Tokenizer, load_tokenizer
from keystroke.engine.tokenizer.incremental import IncrementalEncoder

TABLES = {
    "laptop": cost_table({1: 1.0, 2: 2.1, 4: 2.3, 8: 3.7, 16: 6.0, 32: 11.2}),
    "gpu": cost_table({1: 1.0, 32: 1.3}),
}


class Idle(Session):
    """An engine that takes no time."""

    def __init__(self, token: int) -> None:
        self._tokens: list[int] = []
        self._step = Step((token,), 0)

    @property
    def tokens(self) -> Sequence[int]:
        return self._tokens

    def extend(self, tokens: Sequence[int], interrupt: Interrupt | None = None) -> ExtendResult:
        self._tokens = list(tokens)
        return ExtendResult(0, len(tokens))

    def step(
        self,
        draft: Sequence[int] = (),
        sampling: Sampling = GREEDY,
        interrupt: Interrupt | None = None,
        allowed: AllowedTokens | None = None,
    ) -> Step:
        self._tokens.append(self._step.tokens[0])
        return self._step

    def rollback(self, length: int) -> None:
        del self._tokens[length:]

    def fork(self) -> Session:
        raise NotImplementedError

    def close(self) -> None:
        pass


def micros(act: Callable[[], object], times: int = 200) -> float:
    spent = []
    for _ in range(times):
        started = time.process_time()
        act()
        spent.append(time.process_time() - started)
    return median(spent) * 1e6


def sampling_costs(vocab: int) -> dict[str, float]:
    logits = (np.random.default_rng(0).normal(size=vocab) * 3).astype(np.float32)
    ways = {
        "greedy": GREEDY,
        "temperature 0.2": Sampling(temperature=0.2),
        "temperature 0.8, top-k 40, top-p 0.95": Sampling(temperature=0.8, top_k=40, top_p=0.95),
        "temperature 0.8, top-p 0.95": Sampling(temperature=0.8, top_p=0.95),
        "temperature 1": Sampling(temperature=1.0),
    }
    return {name: micros(lambda s=way: choose(logits, s, 5)) for name, way in ways.items()}  # type: ignore[misc]


def generation_cost(tokenizer: Tokenizer) -> float:
    model = Model("idle", EchoEngine(), tokenizer)
    token = tokenizer.encode("a")[0]
    best = float("inf")
    for _ in range(5):
        answer = Generation(model, Idle(token), [token], GenerationParams(max_tokens=5000, stop=("\n\n",)))
        started = time.process_time()
        for _chunk in answer:
            pass
        best = min(best, (time.process_time() - started) / 5000)
    return best * 1e6


def keystroke_cost(tokenizer: Tokenizer, text: str, tokens: int = 100_000) -> tuple[int, float]:
    """Typing in the middle of a large buffer."""
    whole = text * (tokens // len(tokenizer.encode(text)) + 1)
    encoder = IncrementalEncoder(tokenizer, whole)
    place, typed, spent = len(whole) // 2, text[:500], []
    for character in typed:
        started = time.process_time()
        encoder.edit(place, place, character)
        spent.append(time.process_time() - started)
        place += 1
    return len(encoder.tokens), median(spent) * 1e6


def replay(
    drafter: Drafter, prompt: list[int], output: list[int], cost: Sequence[float]
) -> tuple[float, float, float]:
    """Tokens per step, speed against plain steps, and microseconds of drafting for each token."""
    drafter.begin(prompt)
    sequence, at, steps, spent = list(prompt), 0, 0, 0.0
    started = time.process_time()
    while at < len(output):
        limit = min(MAX_DRAFT, len(output) - at - 1)
        draft = drafter.propose(sequence, limit) if limit > 0 else ()
        right = next((i for i, t in enumerate(draft) if t != output[at + i]), len(draft))
        new = output[at : at + right + 1]
        at += right + 1
        sequence.extend(new)
        drafter.record_result(len(draft), right, 0.0)
        drafter.observe(new)
        steps += 1
        spent += cost[len(draft) + 1]
    seconds = time.process_time() - started
    return len(output) / steps, len(output) / spent, seconds / len(output) * 1e6


def drafting(tokenizer: Tokenizer, text: str) -> dict[str, dict[str, tuple[float, float, float]]]:
    source = tokenizer.encode(text)
    half = len(source) // 2
    renamed = tokenizer.encode(text.replace("self", "this"))
    lines = text.splitlines(keepends=True)
    few = tokenizer.encode("".join(line for i, line in enumerate(lines) if i % 100) + "# end\n")
    shuffled = np.random.default_rng(1).permutation(np.array(source)).tolist()
    result = {}
    for machine, cost in TABLES.items():
        edit = [FileDrafter(source), SuffixDrafter()]
        result[machine] = {
            "one line in 100 deleted": replay(AdaptiveDrafter(edit, cost), source, few, cost),
            "every self renamed": replay(AdaptiveDrafter(edit, cost), source, renamed, cost),
            "second half after the first": replay(
                AdaptiveDrafter([SuffixDrafter()], cost), source[:half], source[half:], cost
            ),
            "tokens in random order": replay(AdaptiveDrafter(edit, cost), source, shuffled, cost),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path, nargs="?", default=Path(argparse.__file__))
    arguments = parser.parse_args()
    started = time.process_time()
    tokenizer = load_tokenizer(arguments.model)
    loaded = time.process_time() - started
    text = arguments.text.read_text(encoding="utf-8")

    print(f"tokenizer of {tokenizer.vocab_size:,} tokens loaded in {loaded:.2f} s")
    choosing = sampling_costs(tokenizer.vocab_size)
    for name, cost in choosing.items():
        print(f"choose, {name:40} {cost:8.0f} us")
    generating = generation_cost(tokenizer)
    print(f"generation loop, per token                       {generating:8.1f} us")
    held, key = keystroke_cost(tokenizer, text)
    print(f"keystroke in a buffer of {held:,} tokens         {key:8.0f} us")
    drafts = drafting(tokenizer, text)
    for machine, rows in drafts.items():
        for name, (per_step, speed, cost) in rows.items():
            print(f"{machine:7} {name:30} {per_step:6.2f} tokens/step  {speed:6.2f}x  {cost:5.1f} us/token")
    record(
        "decode",
        {"choose_us": choosing, "generation_us": generating, "keystroke_us": key, "drafts": drafts},
    )


if __name__ == "__main__":
    main()
