"""Computes how many tokens per step a target accepts from a draft head, without running an engine.

The result is exact. A draft is accepted where it equals the target's own text, and up to the first rejection
the head's input is that text. The rank of the true token among the head's predictions, for every start and
depth, therefore gives the accepted length of any chain or tree of drafts. Greedy texts give the acceptance of
greedy decoding; texts sampled with the engines' noise, which the head then uses too, that of sampling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor

from keystroke_lab.draft_heads.batches import padded, rectangles
from keystroke_lab.draft_heads.coupling import coupled_gumbel
from keystroke_lab.draft_heads.model import DraftHeadModule
from keystroke_lab.draft_heads.target import TargetModel
from keystroke_lab.draft_heads.texts import TokenText

Branch = tuple[int, ...]  # a drafted token by the ranks that lead to it
NEVER = 255  # the rank of a token outside the head's vocabulary or after the end of the text
_NOISE_ROWS = 512


@dataclass(frozen=True)
class DraftTrial:
    """The predictions for one text. For each start, from the last token of the prompt on: the rank of the
    true token at each depth, and the probability of the head's best prediction."""

    kind: str
    ranks: NDArray[np.uint8]  # [starts, depth]
    chances: NDArray[np.float32]


@torch.no_grad()
def trials(
    head: DraftHeadModule,
    target: TargetModel,
    texts: Sequence[TokenText],
    vocabulary: Tensor,
    depth: int,
    *,
    size: int = 8192,
) -> list[DraftTrial]:
    """Try the head on texts that the target wrote (drawn ones must be coupled: their seeds are used)."""
    found: list[DraftTrial] = []
    for batch in rectangles([text for text in texts if text.written > 1 and text.given], size):
        tokens = padded(batch)[0].to(target.device)
        _, features = target.run_sequences(tokens, head.shape.layers)
        found += tried(head, target, batch, features, vocabulary, depth)
    return found


@torch.no_grad()
def tried(
    head: DraftHeadModule,
    target: TargetModel,
    batch: Sequence[TokenText],
    features: Tensor,
    vocabulary: Tensor,
    depth: int,
) -> list[DraftTrial]:
    """The same for one batch whose features [texts, length, layers, hidden] are known."""
    device, dtype = target.device, head.out.weight.dtype
    vocabulary = vocabulary.to(device)
    places = torch.full((target.spec.vocab_size,), -1, dtype=torch.int64, device=device)
    places[vocabulary] = torch.arange(len(vocabulary), device=device)
    tokens = padded(batch)[0].to(device)
    length = tokens.size(1)
    embedded = target.embedding[F.pad(tokens[:, 1:], (0, depth + 1))]
    angles = target.cosines[: length + depth], target.sines[: length + depth]
    if device.type == "cuda":
        with torch.autocast("cuda", target.dtype):
            results = head.unroll(features, embedded, angles, depth)
    else:
        results = head.unroll(features.to(dtype), embedded.to(dtype), angles, depth)
    found = []
    for row, text in enumerate(batch):
        first, last = text.given - 1, len(text.tokens) - 2  # a start guesses the token two further on
        ranks = np.full((last - first, depth), NEVER, np.uint8)
        chances = np.zeros((last - first, depth), np.float32)
        for step in range(min(depth, last - first)):
            count = last - first - step
            result = results[step][row, first : first + count].float()
            scores = result @ head.out.weight.float().T
            chances[:count, step] = scores.softmax(-1).amax(-1).cpu().numpy()
            wanted = places[tokens[row, first + step + 2 : first + step + 2 + count]]
            ranks[:count, step] = _ranks(scores, wanted, text, first + step + 2, vocabulary).cpu().numpy()
        found.append(DraftTrial(text.kind, ranks, chances))
    return found


def _ranks(scores: Tensor, wanted: Tensor, text: TokenText, position: int, vocabulary: Tensor) -> Tensor:
    """How many guesses stand before the wanted one, at most NEVER."""
    if text.temperature > 0:
        scores = scores / text.temperature
        positions = torch.arange(position, position + len(scores), device=scores.device)
        seeds = torch.full_like(positions, text.seed)
        for first in range(0, len(scores), _NOISE_ROWS):
            part = slice(first, first + _NOISE_ROWS)
            scores[part] += coupled_gumbel(seeds[part], positions[part], vocabulary)
    mine = scores.gather(1, wanted.clamp(min=0)[:, None])
    before = (scores > mine).sum(-1).clamp(max=NEVER)
    return torch.where(wanted < 0, NEVER, before).to(torch.uint8)


def tree_of(found: Iterable[DraftTrial], nodes: int, width: int = 8) -> frozenset[Branch]:
    """The `nodes` drafted tokens that come true most often: every one's path is in it as well."""
    seen: Counter[Branch] = Counter()
    for trial in found:
        for ranks in trial.ranks.tolist():
            path: Branch = ()
            for rank in ranks:
                if rank >= width:
                    break
                path = (*path, rank)
                seen[path] += 1
    # A path is never commoner than its beginning; of equals the shorter stands first.
    best = sorted(seen, key=lambda path: (-seen[path], len(path), path))
    return frozenset(best[:nodes])


def chain_of(depth: int) -> frozenset[Branch]:
    return frozenset((0,) * length for length in range(1, depth + 1))


@dataclass(frozen=True, slots=True)
class Yield:
    """Over some texts: tokens written and the target's steps they took."""

    tokens: int
    steps: int

    @property
    def per_step(self) -> float:
        return self.tokens / max(1, self.steps)


def yield_of(found: Iterable[DraftTrial], tree: frozenset[Branch]) -> Yield:
    """Walk through each text as decoding would: a step takes what it accepts and one token more."""
    tokens = steps = 0
    for trial in found:
        ranks = trial.ranks.tolist()
        at = 0
        while at < len(ranks):
            path: Branch = ()
            for rank in ranks[at]:
                if (*path, rank) not in tree:
                    break
                path = (*path, rank)
            taken = len(path) + 1
            tokens += min(taken, len(ranks) - at)
            steps += 1
            at += taken
    return Yield(tokens, steps)


@dataclass(frozen=True, slots=True)
class DraftCosts:
    """Seconds, measured: a step of the target over one row and over sixteen, and one pass of the head."""

    one_row: float = 883e-6
    sixteen_rows: float = 1186e-6
    head_pass: float = 25e-6

    def step(self, rows: int, passes: int) -> float:
        slope = (self.sixteen_rows - self.one_row) / 15
        return self.one_row + slope * (rows - 1) + passes * self.head_pass

    def speed(self, found: Sequence[DraftTrial], tree: frozenset[Branch]) -> float:
        """Tokens a second."""
        passes = max((len(path) for path in tree), default=0)
        return yield_of(found, tree).per_step / self.step(1 + len(tree), passes)
