"""transformers with a compiled static cache, the peer of bench/cuda.py: one shape, in a process of its own.

The prompt length and the numbers of warm-up steps, timed steps and repetitions are those of our engine. It
compiles before it prints READY, and measures on request. Weights are random, bf16.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
import transformers

from bench.cuda_rows.cuda_parts import (
    CONTEXT,
    DEVICE,
    PARTS,
    READY,
    ROUNDS,
    SETTLED,
    TOKENS,
    random_text,
    say,
)


class Clock:
    """Sees every token's scores, and so when each step ended: generate() waits for each."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return scores


def build(name: str) -> Any:
    spec = PARTS[name].spec
    family = "Llama" if spec.architecture == "llama" else "Qwen2"
    config = getattr(transformers, f"{family}Config")(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden,
        intermediate_size=spec.intermediate,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        max_position_embeddings=spec.context_length,
        rms_norm_eps=spec.norm_eps,
        tie_word_embeddings=spec.tied,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def tokens_a_second(model: Any, prompt: torch.Tensor) -> float:
    clock = Clock()
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        min_new_tokens=SETTLED + TOKENS + 1,
        max_new_tokens=SETTLED + TOKENS + 1,
        do_sample=False,
        cache_implementation="static",
        pad_token_id=0,
        logits_processor=[clock],
    )
    return TOKENS / (clock.times[SETTLED + TOKENS] - clock.times[SETTLED])


def main(name: str) -> None:
    model = build(name)
    prompt = torch.tensor([random_text(model.config.vocab_size, 0)[:CONTEXT]], device=DEVICE)
    for _ in range(2):
        tokens_a_second(model, prompt)
    print(READY, flush=True)
    if not sys.stdin.readline():
        return
    speed = statistics.median(tokens_a_second(model, prompt) for _ in range(ROUNDS))
    say({"shape": PARTS[name].spec.name, "peer_tok_s": round(speed, 1)})


if __name__ == "__main__":
    main(*sys.argv[1:])
