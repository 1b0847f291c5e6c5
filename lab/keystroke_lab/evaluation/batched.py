"""Batched greedy completion with the plain model, for large evaluations on a GPU.

No KV cache; prompts and stop rules are those of the engine. Speed and the shipped precision are measured on
the engine itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from keystroke.assist.completion.prompt import CompletionPrompt, build_prompt
from keystroke.engine.templates import FimTemplate
from keystroke.engine.tokenizer import Tokenizer
from keystroke.text.cases import CompletionCase
from keystroke_lab.evaluation.completion import Score, Share, edit_similarity, left_to_right
from keystroke_lab.pretraining.fim import FimCut
from keystroke_lab.training.transformer import CodeModel


@dataclass(frozen=True, slots=True)
class BatchedModel:
    """A model for batched evaluation. `ends` are tokens that end its text; `context`: tokens around the
    cursor that it sees, 0 for all that fit."""

    model: CodeModel
    tokenizer: Tokenizer
    fim: FimTemplate | None
    ends: frozenset[int]
    context: int = 0

    def prompt(self, case: CompletionCase, limit: int, *, fill: bool) -> CompletionPrompt:
        budget = self.context or self.model.shape.context
        if not fill or self.fim is None:
            prefix, held = left_to_right(case.prefix, budget)
            first = [] if self.tokenizer.bos is None else [self.tokenizer.bos]
            return CompletionPrompt((*first, *self.tokenizer.encode(prefix)), frozenset(), held, False)
        stand_in: Any = SimpleNamespace(
            engine=SimpleNamespace(info=SimpleNamespace(context_length=self.model.shape.context)),
            tokenizer=self.tokenizer,
            fim=self.fim,
        )
        return build_prompt(stand_in, case.prefix, case.suffix, budget=budget, max_tokens=limit)


@dataclass(slots=True)
class BatchedAnswer:
    tokens: list[int]
    logprobs: list[float]

    @property
    def confidence(self) -> float:
        return math.exp(sum(self.logprobs) / len(self.logprobs)) if self.logprobs else 0.0


@torch.no_grad()
def greedy(
    model: CodeModel,
    prompts: Sequence[Sequence[int]],
    limit: int,
    finished: Sequence[frozenset[int]],
    size: int,
    last: frozenset[int] = frozenset(),
    never: tuple[int, ...] = (),
) -> list[BatchedAnswer]:
    """Up to `limit` tokens after each prompt, each ended by its own set of tokens (not included) or by one of
    `last` (included); `never` are not chosen."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    found: dict[int, BatchedAnswer] = {}
    for first in range(0, len(order), size):
        batch = order[first : first + size]
        answers = _together(
            model, [prompts[i] for i in batch], limit, [finished[i] for i in batch], last, never
        )
        found.update(zip(batch, answers, strict=True))
    return [found[i] for i in range(len(prompts))]


def _together(
    model: CodeModel,
    prompts: list[Sequence[int]],
    limit: int,
    finished: list[frozenset[int]],
    last: frozenset[int],
    never: tuple[int, ...],
) -> list[BatchedAnswer]:
    """One batch; rows that have ended leave it."""
    table = model.model.embed_tokens.weight
    tokens = torch.zeros(len(prompts), max(map(len, prompts)) + limit, dtype=torch.int64, device=table.device)
    lengths = torch.tensor([len(p) for p in prompts], device=table.device)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(list(prompt), device=table.device)
    answers = [BatchedAnswer([], []) for _ in prompts]
    active = list(range(len(prompts)))
    for _ in range(limit):
        rows = torch.arange(len(active), device=table.device)
        hidden = model(tokens[:, : int(lengths.max())])[rows, lengths - 1]
        scores = (hidden.to(table.dtype) @ table.T).float()
        scores[:, list(never)] = -math.inf
        chosen = scores.argmax(-1)
        logprobs = scores.log_softmax(-1)[rows, chosen].tolist()
        tokens[rows, lengths] = chosen
        lengths = lengths + 1
        going = []
        for row, token in enumerate(chosen.tolist()):
            if token not in finished[active[row]]:
                answers[active[row]].tokens.append(token)
                answers[active[row]].logprobs.append(logprobs[row])
                if token not in last:
                    going.append(row)
        if not going:
            break
        kept = torch.tensor(going, device=table.device)
        tokens, lengths, active = tokens[kept], lengths[kept], [active[row] for row in going]
    return answers


def score(
    plain: BatchedModel, cases: Sequence[CompletionCase], *, fill: bool, limit: int = 48, size: int = 64
) -> Score:
    """Exact matches of `cases` of one kind."""
    one_line = all(case.kind != FimCut.BLOCK for case in cases)
    prompts = [plain.prompt(case, limit, fill=fill) for case in cases]
    pieces = [plain.tokenizer.token_bytes(t) for t in range(plain.tokenizer.vocab_size if one_line else 0)]
    newline = frozenset(t for t, piece in enumerate(pieces) if piece.startswith(b"\n"))
    last = frozenset(t for t, piece in enumerate(pieces) if b"\n" in piece)
    ends = [plain.ends | prompt.stops | newline for prompt in prompts]
    answers = greedy(plain.model, [p.tokens for p in prompts], limit, ends, size, last)
    hits, similar, texts = 0, 0.0, []
    for case, prompt, answer in zip(cases, prompts, answers, strict=True):
        text = plain.tokenizer.decode(answer.tokens).removeprefix(prompt.repeated)
        if one_line:
            text = text.split("\n", 1)[0]
        texts.append(text)
        hits += text.rstrip() == case.middle.rstrip()
        similar += edit_similarity(text.rstrip(), case.middle.rstrip())
    return Score(
        Share(hits, len(cases)), similar / max(1, len(cases)), texts, [a.confidence for a in answers]
    )
