"""Training a draft head against its frozen target.

A run is a folder, see `training/run.py`. It ends after a number of passes over the texts or of seconds,
whichever comes first. While it learns, the head drafts from its own results, as it does in use.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from keystroke.errors import InputError, ModelDamaged
from keystroke_lab.draft_heads.batches import HeadBatch
from keystroke_lab.draft_heads.loss import distillation_loss
from keystroke_lab.draft_heads.model import DraftHeadModule
from keystroke_lab.draft_heads.shape import HeadShape
from keystroke_lab.draft_heads.target import TargetModel
from keystroke_lab.training.optimizer import Optimizer
from keystroke_lab.training.run import (
    CHECKPOINT,
    PassesRun,
    TrainingRecipe,
    autocast,
    bfloat16_weights,
    load_state,
    save_state,
)
from keystroke_lab.training.run_log import Report
from keystroke_lab.training.schedule import Schedule


@dataclass(frozen=True, slots=True)
class DraftHeadRecipe(TrainingRecipe):
    passes: float = 4.0  # over the texts
    seconds: float = float("inf")
    steps_ahead: int = 5  # drafts that the head makes from its own results while learning
    discount: float = 0.9  # weight of a draft relative to the one before it
    matrix_rate: float = 0.02
    other_rate: float = 0.0005
    weight_decay: float = 0.01
    schedule: Schedule = field(default_factory=lambda: Schedule(warmup=0.03, decay=0.6))
    report_every: int = 10
    checkpoint_seconds: float = 300.0


class BatchSource(Protocol):
    def __len__(self) -> int: ...
    def batch(self, number: int) -> HeadBatch: ...


def head_loss(
    head: DraftHeadModule, target: TargetModel, batch: HeadBatch, steps: int, discount: float
) -> tuple[Tensor, Tensor]:
    """The mean loss of a batch in nats, drafts discounted, and for each draft the share of the written
    tokens at which the head's likeliest guess is the target's."""
    length = batch.tokens.size(1)
    following = F.pad(batch.tokens[:, 1:], (0, steps + 1))
    embedded = target.embedding[following]
    angles = target.cosines[: length + steps], target.sines[: length + steps]
    results = head.unroll(batch.features, embedded, angles, steps)
    total = torch.zeros((), device=batch.tokens.device)
    shares, scale = [], 0.0
    for step, result in enumerate(results):
        weights = batch.weights[:, step + 1 :].flatten()
        loss, right = distillation_loss(
            result[:, : length - step - 1].flatten(0, 1),
            head.out.weight,
            batch.places[:, step + 1 :].flatten(0, 1).long(),
            batch.chances[:, step + 1 :].flatten(0, 1).float(),
            weights,
        )
        factor = discount**step
        total = total + factor * loss / weights.sum().clamp_min(1.0)
        scale += factor
        counted = weights >= 1.0
        shares.append((right & counted).sum() / counted.sum().clamp_min(1))
    return total / scale, torch.stack(shares)


def new_head(shape: HeadShape, target: TargetModel, vocabulary: Tensor, *, seed: int = 0) -> DraftHeadModule:
    """An untrained head with its target's output rows and last norm."""
    head = DraftHeadModule(shape, seed=seed, device=target.device)
    head.copy_output(target.head[vocabulary.to(target.device)], target.norm)
    return head


class DraftHeadRun(PassesRun):
    """`train` returns when its passes or its seconds are over."""

    def __init__(
        self,
        run: Path,
        target: TargetModel,
        head: DraftHeadModule,
        vocabulary: Tensor,
        recipe: DraftHeadRecipe,
        *,
        start: Path | None = None,
    ) -> None:
        """`start`: weights of an earlier run to begin from, where this one has no checkpoint yet."""
        super().__init__(run, recipe.report_every, recipe.schedule, recipe.passes, recipe.seconds)
        self.checkpoint_seconds = recipe.checkpoint_seconds
        self.target, self.head, self.recipe = target, head, recipe
        self.shape, self.vocabulary = head.shape, vocabulary
        self.optimizer = Optimizer(
            head,
            matrix_rate=recipe.matrix_rate,
            other_rate=recipe.other_rate,
            decay=recipe.weight_decay,
            eps=1e-8,
            vectors=("out.weight",),
        )
        self._resume(start)

    def train(self, batches: BatchSource, report: Report | None = None) -> None:
        self._batches = batches
        self._set_batches(len(batches))
        self._train(report)
        self.save_weights(self.run / "final.pt")

    def _number(self, step: int, count: int) -> int:
        """The batch of a step: every pass goes through all of them, in an order of its own."""
        order = list(range(count))
        random.Random(self.recipe.seed * 1000 + step // count).shuffle(order)
        return order[step % count]

    def _take_step(self, factor: float) -> Mapping[str, Any]:
        batch = self._batches.batch(self._number(self.step, len(self._batches)))
        with autocast(self.target.device):
            loss, shares = head_loss(
                self.head, self.target, batch, self.recipe.steps_ahead, self.recipe.discount
            )
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step(factor)
        self.head.zero_grad(set_to_none=True)
        self.tokens += batch.tokens.numel()
        return {"loss": loss.detach(), "right": shares}

    def _row(self, measured: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "of": self._steps,
            "passes": round(self.step / len(self._batches), 3),
            "loss": round(float(measured["loss"]), 4),
            "right": [round(share, 4) for share in measured["right"].tolist()],
            "seconds": round(self.seconds, 1),
        }

    def _facts(self) -> dict[str, Any]:
        return {
            "shape": self.shape.to_json(),
            "vocabulary": self.vocabulary.to(torch.int32).cpu(),
            "recipe": json.dumps(asdict(self.recipe)),
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
        }

    def save_weights(self, path: Path) -> None:
        save_state(path, {**self._facts(), "weights": bfloat16_weights(self.head)})

    def checkpoint(self) -> None:
        state = {"head": self.head.state_dict(), "optimiser": self.optimizer.state_dict()}
        save_state(self.run / CHECKPOINT, {**self._facts(), **state})

    def _resume(self, start: Path | None) -> None:
        path = self.run / CHECKPOINT
        if path.exists():
            state = read_head(path)
            self._check(path, state)
            self.head.load_state_dict(state["head"])
            self.optimizer.load_state_dict(state["optimiser"])
            self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
        elif start is not None:
            state = read_head(start)
            self._check(start, state)
            self.head.load_state_dict(state["weights"])

    def _check(self, path: Path, state: dict[str, Any]) -> None:
        same = HeadShape.from_json(state["shape"]) == self.shape
        if not same or not torch.equal(state["vocabulary"].long(), self.vocabulary.cpu().long()):
            raise ModelDamaged(
                f"{path} holds a head of another shape or vocabulary; use its own run folder or delete it"
            )


def read_head(path: Path) -> dict[str, Any]:
    """A checkpoint or weights file of a run. Raises InputError or ModelDamaged."""
    damaged = f"{path} is not a draft head of ours or is cut short; delete it"
    state = load_state(path, f"{path} does not exist; train a head first or name another file", damaged)
    try:
        HeadShape.from_json(state["shape"])
    except (InputError, KeyError, TypeError, ValueError) as error:
        raise ModelDamaged(damaged) from error
    return state


def head_of(state: dict[str, Any]) -> DraftHeadModule:
    """The head that a weights file holds, in float32."""
    head = DraftHeadModule(HeadShape.from_json(state["shape"]))
    head.load_state_dict({name: tensor.float() for name, tensor in state["weights"].items()})
    return head
