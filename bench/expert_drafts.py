"""Draft lengths for a mixture of experts: the chosen length against plain decoding and fixed lengths.

Verifying a draft reads every expert that one of its rows chooses, so a long draft costs more than in a dense
model. Regime: no model runs. Real files are replayed token by token: drafts come from the product's own
prompt lookup, and what the file says next decides how much is accepted. Three kinds of answers: `new` (the
second half of a file after its first), `edit` (a file again with a tenth of its lines changed) and `random`
(tokens without any order, where no draft can pay). A step takes `fixed` plus `experts` times the distinct
experts of its rows, both in steps of one row:

  h200     fixed 0.84, experts 0.16: fitted to the measured 1.18 / 1.42 / 1.64 / 2.5 steps for 2 / 4 / 8 / 16
           rows of Coder-30B-A3B (log/mixtures-gpu.md)
  memory   fixed 0.22, experts 0.78: an engine at the memory's speed, by the bytes of the same model

Routing is not measured: there are no trained weights of a mixture here. In each of `LAYERS` layers a token
chooses 8 of 128 experts: half of them belong to the token itself, a fifth are those of the token before, the
others are drawn by a popularity of 1/rank^0.6. Figures are tokens per time, plain decoding is 1: by kind the
median over files, and `worst`, the slowest file of all kinds. `chosen` begins with the cautious costs of a
dense model on a CPU, `chosen_cheap` with those of a dense model on a GPU, `chosen_predicted` with what the
product begins with for a mixture; all three correct them by measured steps. Ceiling: a draft can at best save
all steps but those where the file departs from what came before.

    python -m bench.expert_drafts [--files N] [--seed N]
"""

from __future__ import annotations

import argparse
import random
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.record import record
from keystroke.config import load_settings
from keystroke.engine.checkpoint.spec import ExpertsSpec
from keystroke.engine.library import ModelLibrary
from keystroke.engine.speculative import AdaptiveDrafter, Drafter, SuffixDrafter
from keystroke.engine.speculative.base import MAX_DRAFT
from keystroke.engine.speculative.cost import CAUTIOUS, CHEAP, expert_cost
from keystroke.engine.tokenizer import Tokenizer, load_tokenizer

EXPERTS, CHOSEN, LAYERS = 128, 8, 6
MIXTURE = ExpertsSpec(EXPERTS, CHOSEN, width=768)
TOKENS = 1200  # of an answer
KINDS = ("new", "edit", "random")


@dataclass(frozen=True)
class MachineModel:
    fixed: float
    experts: float

    def step(self, distinct: float) -> float:
        """The time of a step that reads `distinct` experts a layer, in steps of one row."""
        return self.fixed + self.experts * distinct / CHOSEN


MACHINES = {"h200": MachineModel(0.84, 0.16), "memory": MachineModel(0.22, 0.78)}


class SimulatedRouting:
    """The experts of each token, by the model of the module's description."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        weights = [1 / rank**0.6 for rank in range(1, EXPERTS + 1)]
        self._popular = [self._random.choices(range(EXPERTS), weights, k=4096) for _ in range(LAYERS)]
        self._own: dict[int, list[list[int]]] = {}

    def choose(self, token: int, before: Sequence[frozenset[int]] | None) -> list[frozenset[int]]:
        if token not in self._own:
            self._own[token] = [self._random.sample(range(EXPERTS), CHOSEN) for _ in range(LAYERS)]
        chosen = []
        for layer, own in enumerate(self._own[token]):
            found = {expert for expert in own if self._random.random() < 0.5}
            if before is not None:
                found |= {expert for expert in before[layer] if self._random.random() < 0.2}
            while len(found) < CHOSEN:
                found.add(self._random.choice(self._popular[layer]))
            chosen.append(frozenset(sorted(found)[:CHOSEN]))
        return chosen

    def distinct(self, rows: Sequence[int]) -> float:
        """Experts that a step over these tokens reads, a layer."""
        chosen: list[list[frozenset[int]]] = []
        for token in rows:
            chosen.append(self.choose(token, chosen[-1] if chosen else None))
        return sum(len(frozenset().union(*layer)) for layer in zip(*chosen, strict=True)) / LAYERS


def decode(
    drafter: Drafter | None, limit: int, machine: MachineModel, case: tuple[list[int], list[int]]
) -> float:
    """Tokens per time of a plain step, while the answer of `case` is generated after its prompt."""
    prompt, answer = case
    routing, seconds, at = SimulatedRouting(7), 0.0, 0
    text = list(prompt)
    if drafter is not None:
        drafter.begin(prompt)
    while at < len(answer):
        draft = list(drafter.propose(text, min(limit, len(answer) - at - 1))) if drafter else []
        accepted = 0
        while accepted < len(draft) and draft[accepted] == answer[at + accepted]:
            accepted += 1
        took = machine.step(routing.distinct([text[-1], *draft]))
        made = answer[at : at + accepted + 1]
        if drafter is not None:
            drafter.record_result(len(draft), accepted, took)
            drafter.observe(made)
        seconds += took
        at += len(made)
        text += made
    return len(answer) / seconds


def drafters(machine: MachineModel) -> dict[str, Callable[[], tuple[Drafter | None, int]]]:
    """Each way to choose a length, as a new drafter and its limit."""
    return {
        "plain": lambda: (None, 0),
        "fixed2": lambda: (SuffixDrafter(), 2),
        "fixed4": lambda: (SuffixDrafter(), 4),
        "fixed8": lambda: (SuffixDrafter(), 8),
        "chosen": lambda: (AdaptiveDrafter([SuffixDrafter()], CAUTIOUS), MAX_DRAFT),
        "chosen_cheap": lambda: (AdaptiveDrafter([SuffixDrafter()], CHEAP), MAX_DRAFT),
        "chosen_predicted": lambda: (
            AdaptiveDrafter([SuffixDrafter()], expert_cost(MIXTURE, machine.experts)),
            MAX_DRAFT,
        ),
    }


def cases(tokenizer: Tokenizer, files: int, seed: int) -> Iterator[tuple[str, tuple[list[int], list[int]]]]:
    """Prompts and answers of each kind from files of the standard library, drawn by `seed`."""
    chance = random.Random(seed)
    known = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    for path in chance.sample([p for p in known if p.stat().st_size > 12_000], files):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)[:400]
        half = len(lines) // 2
        yield (
            "new",
            (tokenizer.encode("".join(lines[:half])), tokenizer.encode("".join(lines[half:]))[:TOKENS]),
        )
        changed = [line.replace("self", "this") if chance.random() < 0.1 else line for line in lines]
        yield (
            "edit",
            (tokenizer.encode("".join(lines)), tokenizer.encode("".join(changed))[:TOKENS]),
        )
        noise = [chance.randrange(1000, tokenizer.vocab_size) for _ in range(TOKENS)]
        yield "random", (tokenizer.encode("".join(lines[:half])), noise)


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--files", type=int, default=12)
    options.add_argument("--seed", type=int, default=1)
    chosen = options.parse_args()
    settings = load_settings()
    library = ModelLibrary(settings.paths.models)
    tokenizer = load_tokenizer(library.path(library.get("smollm2")), settings.paths.cache)
    found = list(cases(tokenizer, chosen.files, chosen.seed))
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for name, machine in MACHINES.items():
        print(f"{name:18} {'  '.join(f'{kind:>8}' for kind in (*KINDS, 'worst'))}")
        for way, make in drafters(machine).items():
            rates = [(kind, decode(*make(), machine, case)) for kind, case in found]
            row = {kind: median(rate for known, rate in rates if known == kind) for kind in KINDS}
            row["worst"] = min(rate for _, rate in rates)
            figures.setdefault(name, {})[way] = {key: round(value, 3) for key, value in row.items()}
            print(f"  {way:16} {'  '.join(f'{value:8.3f}' for value in row.values())}", flush=True)
    record("expert_drafts", figures)


if __name__ == "__main__":
    main()
