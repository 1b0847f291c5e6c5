"""Batched generation by the target model: hundreds of answers at a time.

Texts come in the order in which they end. Answers are greedy, or sampled at the prompt's temperature: with
`coupled` by the engines' noise (`engine/noise.py`), otherwise by the device's generator, which is faster but
not reproducible.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from keystroke_lab.draft_heads.coupling import coupled_gumbel
from keystroke_lab.draft_heads.target import BatchDecoder, TargetModel
from keystroke_lab.draft_heads.texts import TokenText

_BETWEEN = 32  # steps between two looks at who has ended
_FILL = 32_768  # tokens of new prompts read at once
_NOISE_ROWS = 32  # of coupled noise at once: its integers are large


@dataclass(frozen=True, slots=True)
class GenerationPrompt:
    """A prompt and how it is to be answered."""

    tokens: Sequence[int]
    kind: str
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class GeneratedAnswer:
    """How far the writing is."""

    answers: int
    tokens: int
    seconds: float


class BatchGenerator:
    def __init__(
        self,
        target: TargetModel,
        *,
        slots: int,
        longest_prompt: int,
        longest_answer: int,
        ends: frozenset[int],
        coupled: bool = False,
    ) -> None:
        self._decoder = BatchDecoder(target, slots, longest_prompt + longest_answer)
        self._limit = longest_answer
        self._coupled = coupled
        device = target.device
        self._ends = torch.tensor(sorted(ends), device=device)
        self._vocabulary = torch.arange(target.spec.vocab_size, device=device)
        self._out = torch.zeros(slots, longest_answer, dtype=torch.int32, device=device)
        self._count = torch.zeros(slots, dtype=torch.int64, device=device)
        self._going = torch.zeros(slots, dtype=torch.bool, device=device)
        self._heat = torch.zeros(slots, device=device)  # temperature; 0: the likeliest
        self._seeds = torch.zeros(slots, dtype=torch.int64, device=device)
        self._rows = torch.arange(slots, device=device)
        self._asks: list[GenerationPrompt | None] = [None] * slots

    def generate(
        self,
        asks: Sequence[GenerationPrompt],
        *,
        deadline: float = float("inf"),
        report: Callable[[GeneratedAnswer], None] | None = None,
    ) -> Iterator[TokenText]:
        """Answers to `asks`, until all are answered or the clock (time.monotonic) passes `deadline`: what is
        then unfinished is left out."""
        waiting = deque(asks)
        started, answers, tokens = time.monotonic(), 0, 0
        while waiting or any(ask is not None for ask in self._asks):
            self._fill_free_slots(waiting)
            longest = int((self._decoder.positions * self._going).max()) + 1
            for step in range(_BETWEEN):
                self._step(longest + step)
                if self._decoder.target.device.type == "cpu" and not bool(self._going.any()):
                    break
            for text in self._ended():
                answers, tokens = answers + 1, tokens + text.written
                yield text
            if report is not None:
                report(GeneratedAnswer(answers, tokens, time.monotonic() - started))
            if time.monotonic() > deadline:
                break
        self._asks = [None] * len(self._asks)
        self._going.zero_()

    def _fill_free_slots(self, waiting: deque[GenerationPrompt]) -> None:
        """Waiting asks into free slots, as many at a time as may be read at once."""
        free = [slot for slot, ask in enumerate(self._asks) if ask is None]
        while free and waiting:
            taken: list[tuple[int, GenerationPrompt]] = []
            longest = 0
            while free and waiting:
                longest = max(longest, len(waiting[0].tokens))
                if taken and longest * (len(taken) + 1) > _FILL:
                    break
                taken.append((free.pop(), waiting.popleft()))
            self._fill(taken, longest)

    def _fill(self, taken: list[tuple[int, GenerationPrompt]], longest: int) -> None:
        device = self._rows.device
        prompts = np.zeros((len(taken), longest), np.int64)
        for row, (slot, ask) in enumerate(taken):
            prompts[row, : len(ask.tokens)] = ask.tokens
            self._asks[slot] = ask
        slots = torch.tensor([slot for slot, _ in taken], device=device)
        lengths = torch.tensor([len(ask.tokens) for _, ask in taken], device=device)
        logits = self._decoder.fill(slots, torch.from_numpy(prompts).to(device), lengths)
        heat = [float(ask.temperature) for _, ask in taken]
        self._heat[slots] = torch.tensor(heat, device=device)
        self._seeds[slots] = torch.tensor([ask.seed for _, ask in taken], device=device)
        self._count[slots] = 0
        self._going[slots] = True
        self._decoder.positions[slots] = lengths - 1
        chosen = self._chosen(logits, self._heat[slots], self._seeds[slots], lengths)
        self._append(slots, chosen)

    def _step(self, longest: int) -> None:
        logits = self._decoder.step(longest)
        chosen = self._chosen(logits, self._heat, self._seeds, self._decoder.positions + 1)
        self._append(self._rows, chosen)

    def _append(self, slots: Tensor, chosen: Tensor) -> None:
        """Put each slot's chosen token behind its text, if it is still going."""
        going = self._going[slots]
        at = self._count[slots].clamp(max=self._limit - 1)
        self._out[slots, at] = torch.where(going, chosen.int(), self._out[slots, at])
        self._count[slots] += going
        self._decoder.tokens[slots] = torch.where(going, chosen, self._decoder.tokens[slots])
        self._decoder.positions[slots] += going
        ended = torch.isin(chosen, self._ends) | (self._count[slots] >= self._limit)
        self._going[slots] = going & ~ended

    def _chosen(self, logits: Tensor, heat: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """argmax(logits / temperature + noise); without noise where the temperature is 0."""
        hot = heat > 0
        if self._coupled:
            parts = []
            for first in range(0, len(logits), _NOISE_ROWS):
                some = slice(first, first + _NOISE_ROWS)
                parts.append(coupled_gumbel(seeds[some], positions[some], self._vocabulary))
            noise = torch.cat(parts)
        else:
            noise = torch.empty_like(logits).exponential_().log_().neg_()
        scores = torch.addcmul(logits * torch.where(hot, 1 / heat, 1.0)[:, None], noise, hot.float()[:, None])
        return scores.argmax(-1)

    def _ended(self) -> Iterator[TokenText]:
        going, counts = self._going.cpu().numpy(), self._count.cpu().numpy()
        done = [slot for slot, ask in enumerate(self._asks) if ask is not None and not going[slot]]
        if not done:
            return
        out = self._out[torch.tensor(done, device=self._rows.device)].cpu().numpy()
        for row, slot in enumerate(done):
            ask = self._asks[slot]
            assert ask is not None
            self._asks[slot] = None
            tokens = np.concatenate((np.asarray(ask.tokens, np.int32), out[row, : counts[slot]]))
            yield TokenText(tokens, len(ask.tokens), ask.kind, ask.temperature, ask.seed)
