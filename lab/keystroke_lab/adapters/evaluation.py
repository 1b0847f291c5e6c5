"""How well a base with an adapter predicts edits, hundreds of cases at a time on one device.

A case is an example: a prompt and its correct answer. The place, or no edit, is read from one softmax over
the tokens an answer may begin with; the text is generated greedily from the correct place on. Works on tokens
only; comparing decoded text is left to the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from keystroke_lab.draft_heads.generation import BatchGenerator, GenerationPrompt
from keystroke_lab.draft_heads.target import TargetModel, causal
from keystroke_lab.draft_heads.texts import TokenText

_READ = 32_768  # tokens at a time


@dataclass(frozen=True)
class PredictedCases:
    """For each case: the probability of each first token (no edit first, then the places), and the text
    generated from the correct place and from the likeliest place. The texts are empty if not generated."""

    chances: NDArray[np.float32]
    right: list[NDArray[np.int32]]
    best: list[NDArray[np.int32]]


@torch.no_grad()
def choices(
    target: TargetModel, prompts: Sequence[Sequence[int]], numbers: Sequence[int]
) -> NDArray[np.float32]:
    """The probability of each token of `numbers` as the next token of each prompt."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    out = np.zeros((len(prompts), len(numbers)), np.float32)
    wanted = torch.tensor(list(numbers), device=target.device)
    while order:
        some: list[int] = []
        while order and (not some or len(prompts[some[0]]) * (len(some) + 1) <= _READ):
            some.append(order.pop())
        length = len(prompts[some[0]])
        tokens = np.zeros((len(some), length), np.int64)
        for row, i in enumerate(some):
            tokens[row, : len(prompts[i])] = prompts[i]
        held = torch.from_numpy(tokens).to(target.device)
        positions = torch.arange(length, device=target.device).expand_as(held)
        last, _ = target.run(held, positions, causal)
        ends = torch.tensor([len(prompts[i]) - 1 for i in some], device=target.device)
        logits = target.logits(last[torch.arange(len(some), device=target.device), ends])
        out[some] = torch.softmax(logits, -1)[:, wanted].float().cpu().numpy()
    return out


def generate(
    target: TargetModel,
    prompts: Sequence[Sequence[int]],
    *,
    longest: int,
    ends: frozenset[int],
    slots: int = 256,
) -> list[NDArray[np.int32]]:
    """The greedy continuation of each prompt, its end token included."""
    if not prompts:
        return []
    writer = BatchGenerator(
        target,
        slots=min(slots, len(prompts)),
        longest_prompt=max(map(len, prompts)),
        longest_answer=longest,
        ends=ends,
    )
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    asks = [GenerationPrompt(tuple(prompts[i]), "", 0.0, i) for i in order]  # the seed identifies the prompt
    found: list[NDArray[np.int32]] = [np.zeros(0, np.int32)] * len(prompts)
    for text in writer.generate(asks):
        found[text.seed] = text.tokens[text.given :]
    return found


def predict_edits(
    target: TargetModel,
    cases: Sequence[TokenText],
    numbers: Sequence[int],
    *,
    longest: int,
    ends: frozenset[int],
    write: bool = True,
) -> PredictedCases:
    """Predict place and text of each case. `numbers` are the first tokens of answers: the one for no edit,
    then one per place. Without `write` only the probabilities are computed."""
    prompts = [case.tokens[: case.given].tolist() for case in cases]
    chances = choices(target, prompts, numbers)
    if not write:
        return PredictedCases(chances, [], [])
    open_cases = [i for i, case in enumerate(cases) if int(case.tokens[case.given]) != numbers[0]]
    best = [numbers[1 + int(row[1:].argmax())] for row in chances]
    asked = [(i, int(cases[i].tokens[cases[i].given])) for i in open_cases]
    others = [(i, best[i]) for i in range(len(cases)) if (i, best[i]) not in set(asked)]
    every = [*asked, *others]
    answers = generate(target, [[*prompts[i], first] for i, first in every], longest=longest, ends=ends)
    said = {
        key: np.concatenate((np.array([key[1]], np.int32), answer))
        for key, answer in zip(every, answers, strict=True)
    }
    nothing = np.zeros(0, np.int32)
    right = [said.get((i, int(case.tokens[case.given])), nothing) for i, case in enumerate(cases)]
    return PredictedCases(chances, right, [said[i, best[i]] for i in range(len(cases))])


def score_cases(
    cases: Sequence[TokenText], found: PredictedCases, numbers: Sequence[int], sure: float
) -> dict[str, float]:
    """Shares of the cases. With an edit left: `place` and `text` are right, and `offered` if the probability
    of an edit is at least `sure`. Without one: `quiet` if it is below `sure`."""
    place = text = quiet = offered = 0
    n_open = n_quiet = 0
    for i, case in enumerate(cases):
        expected = case.tokens[case.given :]
        moves = 1.0 - float(found.chances[i, 0])
        if int(expected[0]) == numbers[0]:
            n_quiet += 1
            quiet += moves < sure
            continue
        n_open += 1
        offered += moves >= sure
        place += numbers[1 + int(found.chances[i, 1:].argmax())] == int(expected[0])
        text += np.array_equal(found.right[i], expected)
    return {
        "place": place / max(1, n_open),
        "text": text / max(1, n_open),
        "quiet": quiet / max(1, n_quiet),
        "offered": offered / max(1, n_open),
        "open": n_open,
        "nothing_left": n_quiet,
    }
