"""`keystroke serve --engine cuda` at a client's socket: tokens per second, with one client and with four.

A real folder of weights (random ones, and a tokenizer of bytes and numbered words), a real server in a
process of its own, our own client. It talks to bench/cuda.py as the other parts do. One answer is
cancelled; it must end at once, and the next request must succeed.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench.cuda_rows.cuda_parts import CONTEXT, READY, ROUNDS, SERVED, Json, say
from keystroke import Client
from keystroke.engine.checkpoint.spec import ModelSpec, tensor_shapes
from keystroke.protocol.events import TextDelta

TOKENS, CLIENTS = 512, 4
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def write_model(spec: ModelSpec, folder: Path, device: str, seed: int = 0) -> Path:
    """A model of this shape as Hugging Face lays it out; it never ends an answer of its own accord."""
    folder.mkdir(parents=True)
    generator = torch.Generator(device=device).manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(spec).items():
        noise = torch.randn(shape, generator=generator, device=device)
        scaled = noise * 0.1 + 1 if name.endswith("norm.weight") else noise * shape[-1] ** -0.5
        tensors[name] = scaled.to(torch.bfloat16).cpu()
    save_file(tensors, str(folder / "model.safetensors"))
    family = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[spec.architecture]
    config = {
        "architectures": [f"{family}ForCausalLM"],
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.context_length,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope.theta,
        "tie_word_embeddings": spec.tied,
    }
    (folder / "config.json").write_text(json.dumps(config))
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"Ġw{n}" for n in range(spec.vocab_size))]
    vocabulary = {word: number for number, word in enumerate(words[: spec.vocab_size])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


@contextmanager
def served(model: Path, *arguments: str) -> Iterator[str]:
    """The address of a server for `model`, in a user's world of its own."""
    with tempfile.TemporaryDirectory() as home:
        program = "from keystroke.clients.cli import main; main()"
        command = [sys.executable, "-c", program, "--json", "serve", "--port", "0"]
        process = subprocess.Popen(
            [*command, "--model", str(model), *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "KEYSTROKE_PATHS_STATE": home, "XDG_CONFIG_HOME": home},
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"the server ended with code {process.wait()}")
            yield json.loads(line)["url"]
        finally:
            process.terminate()
            process.wait(30)


@dataclass
class Answer:
    text: str
    tokens: int
    first_ms: float  # from asking to the first text
    seconds: float  # from the first text to the last
    status: str

    @property
    def tok_s(self) -> float:
        return (self.tokens - 1) / self.seconds


async def ask(client: Client, text: str, tokens: int = TOKENS, stop_after: int | None = None) -> Answer:
    began = time.perf_counter()
    stream = await client.respond(text, max_output_tokens=tokens, temperature=0)
    times, parts = [], []
    async for event in stream:
        if isinstance(event, TextDelta):
            times.append(time.perf_counter())
            parts.append(event.delta)
            if len(parts) == stop_after:
                await stream.cancel()
    assert stream.response is not None
    usage = stream.response.usage
    count = usage.output_tokens if usage is not None else len(parts)
    first = (times[0] - began) * 1000
    return Answer("".join(parts), count, first, times[-1] - times[0], stream.response.status)


async def together(client: Client, text: str, count: int = CLIENTS) -> list[Answer]:
    return list(await asyncio.gather(*(ask(client, f"{n}{text}") for n in range(count))))


async def measure(url: str, shape: str) -> list[Json]:
    common = {"shape": shape, "precision": "bf16", "context": CONTEXT, "fraction_of_limit": None}
    text = "x" * (CONTEXT - 16)  # a byte is a token of this tokenizer
    async with Client(url) as client:
        alone = [await ask(client, text) for _ in range(ROUNDS + 1)][1:]
        stopped = await ask(client, text, tokens=4096, stop_after=20)
        again = await ask(client, text)
        began = time.perf_counter()
        several = await together(client, text)
        taken = time.perf_counter() - began
        several = await together(client, text)
    speed = statistics.median(answer.tok_s for answer in alone)
    first = statistics.median(answer.first_ms for answer in alone)
    total = sum(answer.tokens for answer in several)
    spans = [answer.first_ms / 1000 + answer.seconds for answer in several]
    return [
        {
            **common,
            "mode": "served, one client",
            "tok_s": round(speed, 1),
            "peer_tok_s": None,
            "first_ms": round(first, 2),
            "same_text": all(answer.text == alone[0].text for answer in (*alone, again)),
            "stopped_after": stopped.tokens,
            "stopped": stopped.status,
        },
        {
            **common,
            "mode": f"served, {CLIENTS} at a time",
            "tok_s": round(total / max(spans), 1),
            "peer_tok_s": None,
            "first_round_s": round(taken, 3),
        },
    ]


def main(name: str) -> None:
    spec = SERVED[name]
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(spec, Path(folder) / spec.name, "cuda")
        torch.cuda.empty_cache()
        with served(model, "--engine", "cuda") as url:
            print(READY, flush=True)
            if sys.stdin.readline():
                for row in asyncio.run(measure(url, spec.name)):
                    say(row)


if __name__ == "__main__":
    main(*sys.argv[1:])
