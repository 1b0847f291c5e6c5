"""Many completions at once with the plain model: evaluation on a GPU, where one at a time would waste it.

Law: greedy and without a KV cache, so there is nothing to get wrong; the same prompts and stop rules as
the engine gets. Used for large samples; speed and the shipped precision are measured on the engine itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from keystroke.assist.completion.prompt import CompletionPrompt, build_prompt
from keystroke.engine.templates import FimTemplate
from keystroke.engine.tokenizer import Tokenizer
from keystroke.train.cases import Case
from keystroke.train.evaluate import Score, Share, edit_similarity, left_to_right
from keystroke.train.fim import Cut
from keystroke.train.model import CodeModel


@dataclass(frozen=True, slots=True)
class Plain:
    """A model for batched evaluation. `ends` are tokens that end its text."""

    model: CodeModel
    tokenizer: Tokenizer
    fim: FimTemplate | None
    ends: frozenset[int]

    def prompt(self, case: Case, limit: int, *, fill: bool) -> CompletionPrompt:
        if not fill or self.fim is None:
            prefix, held = left_to_right(case.prefix, self.model.shape.context)
            first = [] if self.tokenizer.bos is None else [self.tokenizer.bos]
            return CompletionPrompt((*first, *self.tokenizer.encode(prefix)), frozenset(), held, False)
        stand_in: Any = SimpleNamespace(
            engine=SimpleNamespace(info=SimpleNamespace(context_length=self.model.shape.context)),
            tokenizer=self.tokenizer,
            fim=self.fim,
        )
        budget = self.model.shape.context
        return build_prompt(stand_in, case.prefix, case.suffix, budget=budget, max_tokens=limit)


@torch.no_grad()
def greedy(
    model: CodeModel,
    prompts: Sequence[Sequence[int]],
    limit: int,
    finished: Sequence[frozenset[int]],
    size: int,
) -> list[list[int]]:
    """Up to `limit` tokens after each prompt, each ended by its own set of tokens (not included)."""
    device = model.model.embed_tokens.weight.device
    out: list[list[int]] = []
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    found: dict[int, list[int]] = {}
    for first in range(0, len(order), size):
        batch = order[first : first + size]
        lengths = torch.tensor([len(prompts[i]) for i in batch], device=device)
        width = int(lengths.max()) + limit
        tokens = torch.zeros(len(batch), width, dtype=torch.int64, device=device)
        for row, i in enumerate(batch):
            tokens[row, : len(prompts[i])] = torch.tensor(list(prompts[i]), device=device)
        rows = torch.arange(len(batch), device=device)
        done = [False] * len(batch)
        answers: list[list[int]] = [[] for _ in batch]
        for step in range(limit):
            hidden = model(tokens[:, : int(lengths.max()) + step])[rows, lengths + step - 1]
            chosen = (hidden @ model.model.embed_tokens.weight.T.to(hidden.dtype)).argmax(-1)
            tokens[rows, lengths + step] = chosen
            for row, token in enumerate(chosen.tolist()):
                done[row] = done[row] or token in finished[batch[row]]
                if not done[row]:
                    answers[row].append(token)
            if all(done):
                break
        found.update(zip(batch, answers, strict=True))
    out.extend(found[i] for i in range(len(prompts)))
    return out


def score(plain: Plain, cases: Sequence[Case], *, fill: bool, limit: int = 48, size: int = 64) -> Score:
    """Exact matches of `cases` of one kind."""
    one_line = all(case.kind != Cut.BLOCK for case in cases)
    prompts = [plain.prompt(case, limit, fill=fill) for case in cases]
    newline = frozenset(
        t
        for t in range(plain.tokenizer.vocab_size)
        if one_line and plain.tokenizer.token_bytes(t).startswith(b"\n")
    )
    ends = [plain.ends | prompt.stops | newline for prompt in prompts]
    answers = greedy(plain.model, [p.tokens for p in prompts], limit, ends, size)
    hits, similar, texts = 0, 0.0, []
    for case, prompt, answer in zip(cases, prompts, answers, strict=True):
        text = plain.tokenizer.decode(answer).removeprefix(prompt.held)
        if one_line:
            text = text.split("\n", 1)[0]
        texts.append(text)
        hits += text.rstrip() == case.middle.rstrip()
        similar += edit_similarity(text.rstrip(), case.middle.rstrip())
    return Score(Share(hits, len(cases)), similar / max(1, len(cases)), texts)
