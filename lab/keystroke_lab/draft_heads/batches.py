"""Training batches of a draft head: texts with the target's features and distributions at every token.

The frozen target computes a batch when it is first needed; it stays on the device while there is room, so
later passes cost only the head's own work. A batch is a rectangle of texts of similar length.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from keystroke_lab.draft_heads.target import TargetModel
from keystroke_lab.draft_heads.texts import TokenText

CHOICES = 16  # of the target's likeliest tokens: nearly all of its weight
_PART = 4096  # rows of the target's logits at a time
_GIVEN = 0.1  # how much a token counts that the target did not write
_REAL = 0.5  # and a token of real code


@dataclass(frozen=True)
class HeadBatch:
    """`rows` x `length` tokens. At index j: the target's features of token j, the likeliest tokens to follow
    it as rows of the head's output matrix (best first) with their probabilities, and how much that counts."""

    tokens: Tensor
    features: Tensor
    places: Tensor
    chances: Tensor
    weights: Tensor

    @property
    def nbytes(self) -> int:
        held = (self.tokens, self.features, self.places, self.chances, self.weights)
        return sum(tensor.numel() * tensor.element_size() for tensor in held)


def vocabulary_of(texts: Sequence[TokenText], count: int, vocab_size: int) -> tuple[Tensor, float]:
    """The `count` commonest tokens of what was written, in the order of their numbers, and the share of the
    written text that they cover."""
    written = [text.tokens[text.given :] for text in texts]
    seen = np.bincount(np.concatenate(written) if written else np.zeros(0, np.int64), minlength=vocab_size)
    best = np.argsort(-seen, kind="stable")[:count]
    return torch.from_numpy(np.sort(best)), float(seen[best].sum() / max(1, seen.sum()))


def rectangles(
    texts: Sequence[TokenText], size: int, *, seed: int = 0, grain: int = 32
) -> list[list[TokenText]]:
    """Texts in batches of about `size` tokens, padding included; those of one batch have like lengths."""
    rng = random.Random(seed)
    ordered = sorted(rng.sample(list(texts), len(texts)), key=lambda text: -(-len(text.tokens) // grain))
    found: list[list[TokenText]] = []
    batch: list[TokenText] = []
    for text in ordered:
        length = -(-len(text.tokens) // grain) * grain
        if batch and length * (len(batch) + 1) > size:
            found.append(batch)
            batch = []
        batch.append(text)
    return [*found, batch] if batch else found


def padded(texts: Sequence[TokenText], grain: int = 32) -> tuple[Tensor, Tensor]:
    """Tokens [rows, length] and the weight of guessing what follows each."""
    length = -(-max(len(text.tokens) for text in texts) // grain) * grain
    tokens = np.zeros((len(texts), length), np.int64)
    weights = np.zeros((len(texts), length), np.float32)
    for row, text in enumerate(texts):
        size = len(text.tokens)
        tokens[row, :size] = text.tokens
        weights[row, : size - 1] = _GIVEN
        weights[row, max(0, text.given - 1) : size - 1] = 1.0 if text.given else _REAL
    return torch.from_numpy(tokens), torch.from_numpy(weights)


class HeadBatches:
    def __init__(
        self,
        target: TargetModel,
        texts: Sequence[TokenText],
        vocabulary: Tensor,
        layers: Sequence[int],
        *,
        size: int,
        room: int,
        seed: int = 0,
    ) -> None:
        """`size`: tokens of a batch; `room`: bytes of the device for batches that are kept."""
        self._target, self._layers = target, tuple(layers)
        self._vocabulary = vocabulary.to(target.device)
        self._batches = rectangles(texts, size, seed=seed)
        self._kept: dict[int, HeadBatch] = {}
        self._room = room

    def __len__(self) -> int:
        return len(self._batches)

    def batch(self, number: int) -> HeadBatch:
        if number in self._kept:
            return self._kept[number]
        batch = self.read(self._batches[number])
        if batch.nbytes <= self._room:
            self._room -= batch.nbytes
            self._kept[number] = batch
        return batch

    @torch.no_grad()
    def read(self, texts: Sequence[TokenText]) -> HeadBatch:
        tokens, weights = (tensor.to(self._target.device) for tensor in padded(texts))
        last, features = self._target.run_sequences(tokens, self._layers)
        flat = last.flatten(0, 1)
        places = torch.empty(len(flat), CHOICES, dtype=torch.int32, device=flat.device)
        chances = torch.empty(len(flat), CHOICES, dtype=torch.bfloat16, device=flat.device)
        for first in range(0, len(flat), _PART):
            part = slice(first, first + _PART)
            logits = self._target.logits(flat[part])
            total = torch.logsumexp(logits, -1, keepdim=True)
            best, at = logits[:, self._vocabulary].topk(min(CHOICES, len(self._vocabulary)), -1)
            places[part], chances[part] = at.int(), (best - total).exp().to(torch.bfloat16)
        shape = (*tokens.shape, CHOICES)
        return HeadBatch(tokens, features, places.view(shape), chances.view(shape), weights)
