"""Bits per byte of a model on text, comparable across tokenizers.

Any Llama-shaped checkpoint (a GGUF file or a folder), computed in float32 by the plain model: quantisation in
the file counts, the engine's does not. The first token is predicted too, from the model's start token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - the name every torch reader knows

from keystroke.engine.checkpoint import ModelSpec, open_checkpoint
from keystroke.engine.tokenizer import Tokenizer, load_tokenizer
from keystroke.errors import InputError, UnsupportedModel
from keystroke_lab.training.transformer import CodeModel, Shape


def shape_of(spec: ModelSpec) -> Shape:
    """Our shape for a checkpoint of the same architecture."""
    if spec.architecture != "llama" or spec.qkv_bias or spec.rope.scaling is not None or not spec.tied:
        raise UnsupportedModel(
            f"{spec.name} is not a plain Llama with tied embeddings; its bits per byte are not measured here"
        )
    return Shape(
        vocab=spec.vocab_size,
        hidden=spec.hidden,
        layers=spec.layers,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        intermediate=spec.intermediate,
        context=spec.context_length,
        rope_theta=spec.rope.theta,
        norm_eps=spec.norm_eps,
    )


def open_model(path: Path) -> CodeModel:
    """The checkpoint at `path` as our plain model, in float32."""
    checkpoint = open_checkpoint(path)
    try:
        model = CodeModel(shape_of(checkpoint.spec))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.tensor(checkpoint.tensor(name)))
    finally:
        checkpoint.close()
    return model.eval()


def bits_per_byte(path: Path, texts: Sequence[str]) -> float:
    """Mean over all bytes of `texts`, each text on its own."""
    tokenizer = load_tokenizer(path)
    return model_bits_per_byte(open_model(path), tokenizer, texts)


@torch.no_grad()
def model_bits_per_byte(model: CodeModel, tokenizer: Tokenizer, texts: Sequence[str]) -> float:
    start = tokenizer.bos if tokenizer.bos is not None else tokenizer.special("<|endoftext|>")
    if start is None or not any(texts):
        raise InputError("bits per byte need some text and a model with a start token")
    device = model.model.embed_tokens.weight.device
    nats, size = 0.0, 0
    for text in texts:
        tokens = torch.tensor([[start, *tokenizer.encode(text)]], device=device)[:, : model.shape.context]
        logits = model.logits(tokens[:, :-1])
        nats += float(F.cross_entropy(logits[0].float(), tokens[0, 1:], reduction="sum"))
        size += len(tokenizer.decode(tokens[0, 1:].tolist()).encode())
    return nats / math.log(2) / max(1, size)
