"""Training a head: the loop, its clock and its checkpoints.

A run is a folder, as in `train/pretrain.py`: the shape, a log line per report, a checkpoint to go on
from, the weights. It ends after a number of passes over the texts or of seconds, whichever comes first, and
the learning rate reaches zero just then. The head drafts from its own results while it learns, as it will
when it is used.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from keystroke.errors import InputError, ModelDamaged
from keystroke.train.draft_head.lessons import Lesson
from keystroke.train.draft_head.loss import distilled
from keystroke.train.draft_head.model import DraftHead
from keystroke.train.draft_head.shape import HeadShape
from keystroke.train.draft_head.target import Target
from keystroke.train.muon import Muon
from keystroke.train.run_log import tell
from keystroke.train.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Recipe:
    passes: float = 4.0  # over the texts
    seconds: float = float("inf")
    steps_ahead: int = 5  # drafts that the head makes from its own results while learning
    discount: float = 0.9  # what a draft counts less than the one before it
    matrix_rate: float = 0.02
    other_rate: float = 0.0005
    weight_decay: float = 0.01
    schedule: Schedule = field(default_factory=lambda: Schedule(warmup=0.03, decay=0.6))
    seed: int = 0
    report_every: int = 10
    checkpoint_seconds: float = 300.0


class Course(Protocol):
    def __len__(self) -> int: ...
    def lesson(self, number: int) -> Lesson: ...


class Optimiser:
    """Muon over the layer's matrices, AdamW over the output matrix and the norms."""

    def __init__(self, head: DraftHead, recipe: Recipe) -> None:
        named = list(head.named_parameters())
        matrices = [p for name, p in named if p.ndim == 2 and name != "out.weight"]
        others = [p for name, p in named if p.ndim != 2 or name == "out.weight"]
        self.muon = Muon(matrices, rate=recipe.matrix_rate, decay=recipe.weight_decay)
        self._rate = recipe.other_rate
        fused = head.out.weight.is_cuda
        self.adam = torch.optim.AdamW(others, lr=self._rate, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)

    def step(self, factor: float) -> None:
        for group in self.adam.param_groups:
            group["lr"] = self._rate * factor
        self.adam.step()
        self.muon.step(factor)

    def state_dict(self) -> dict[str, Any]:
        return {"adam": self.adam.state_dict(), "velocity": self.muon.velocity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.adam.load_state_dict(state["adam"])
        for mine, saved in zip(self.muon.velocity, state["velocity"], strict=True):
            mine.copy_(saved)


def head_loss(
    head: DraftHead, target: Target, lesson: Lesson, steps: int, discount: float
) -> tuple[Tensor, Tensor]:
    """The mean loss of a lesson in nats, drafts discounted, and for each draft the share of the written
    tokens at which the head's likeliest guess is the target's."""
    length = lesson.tokens.size(1)
    following = F.pad(lesson.tokens[:, 1:], (0, steps + 1))
    embedded = target.embedding[following]
    angles = target.cosines[: length + steps], target.sines[: length + steps]
    results = head.unrolled(lesson.features, embedded, angles, steps)
    total = torch.zeros((), device=lesson.tokens.device)
    shares, scale = [], 0.0
    for step, result in enumerate(results):
        weights = lesson.weights[:, step + 1 :].flatten()
        loss, right = distilled(
            result[:, : length - step - 1].flatten(0, 1),
            head.out.weight,
            lesson.places[:, step + 1 :].flatten(0, 1).long(),
            lesson.chances[:, step + 1 :].flatten(0, 1).float(),
            weights,
        )
        factor = discount**step
        total = total + factor * loss / weights.sum().clamp_min(1.0)
        scale += factor
        counted = weights >= 1.0
        shares.append((right & counted).sum() / counted.sum().clamp_min(1))
    return total / scale, torch.stack(shares)


def new_head(shape: HeadShape, target: Target, vocabulary: Tensor, *, seed: int = 0) -> DraftHead:
    """A head that knows nothing yet but how its target reads out a stream."""
    head = DraftHead(shape, seed=seed, device=target.device)
    head.adopt(target.head[vocabulary.to(target.device)], target.norm)
    return head


class Trainer:
    """One run. `train` returns when its passes or its seconds are over."""

    def __init__(
        self,
        run: Path,
        target: Target,
        head: DraftHead,
        vocabulary: Tensor,
        recipe: Recipe,
        *,
        start: Path | None = None,
    ) -> None:
        """`start`: weights of an earlier run to begin from, where this one has no checkpoint yet."""
        self.run, self.target, self.head, self.recipe = run, target, head, recipe
        run.mkdir(parents=True, exist_ok=True)
        self.shape, self.vocabulary = head.shape, vocabulary
        self.optimiser = Optimiser(self.head, recipe)
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self._resume(start)

    def train(self, lessons: Course, report: Callable[[dict[str, Any]], None] | None = None) -> None:
        recipe = self.recipe
        steps = max(1, round(recipe.passes * len(lessons)))
        began, before = time.monotonic(), self.seconds
        saved, tokens = began, self.tokens
        while True:
            self.seconds = before + time.monotonic() - began
            done = max(self.step / steps, self.seconds / recipe.seconds)
            if done >= 1.0:
                break
            lesson = lessons.lesson(self._number(self.step, len(lessons)))
            loss, shares = self._one_step(lesson, recipe.schedule.factor(done))
            if self.step % recipe.report_every == 0:
                value = float(loss)
                row = {
                    "step": self.step,
                    "of": steps,
                    "passes": round(self.step / len(lessons), 3),
                    "loss": round(value, 4),
                    "right": [round(share, 4) for share in shares.tolist()],
                    "factor": round(recipe.schedule.factor(done), 4),
                    "seconds": round(self.seconds, 1),
                    "tokens": self.tokens,
                    "tokens_per_second": round((self.tokens - tokens) / max(1e-9, time.monotonic() - began)),
                }
                tell(self.run, row, report)
            if time.monotonic() - saved > recipe.checkpoint_seconds:
                self.checkpoint()
                saved = time.monotonic()
        self.save_weights(self.run / "final.pt")

    def _number(self, step: int, count: int) -> int:
        """The batch of a step: every pass goes through all of them, in an order of its own."""
        order = list(range(count))
        random.Random(self.recipe.seed * 1000 + step // count).shuffle(order)
        return order[step % count]

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cuda", torch.bfloat16) if self.target.device.type == "cuda" else nullcontext()

    def _one_step(self, lesson: Lesson, factor: float) -> tuple[Tensor, Tensor]:
        with self._autocast():
            loss, shares = head_loss(
                self.head, self.target, lesson, self.recipe.steps_ahead, self.recipe.discount
            )
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimiser.step(factor)
        self.head.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += lesson.tokens.numel()
        return loss.detach(), shares

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
        """The weights alone, in bfloat16: what is exported and what a next run may start from."""
        weights = {name: p.detach().to(torch.bfloat16).cpu() for name, p in self.head.named_parameters()}
        _save(path, {**self._facts(), "weights": weights})

    def checkpoint(self) -> None:
        state = {"head": self.head.state_dict(), "optimiser": self.optimiser.state_dict()}
        _save(self.run / "checkpoint.pt", {**self._facts(), **state})

    def _resume(self, start: Path | None) -> None:
        path = self.run / "checkpoint.pt"
        if path.exists():
            state = read_head(path)
            self._check(path, state)
            self.head.load_state_dict(state["head"])
            self.optimiser.load_state_dict(state["optimiser"])
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


def _save(path: Path, state: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def read_head(path: Path) -> dict[str, Any]:
    """A checkpoint or weights file of a run. Raises InputError or ModelDamaged."""
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        HeadShape.from_json(state["shape"])
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist; train a head first or name another file") from error
    except Exception as error:  # torch raises many kinds for a truncated or foreign file
        raise ModelDamaged(f"{path} is not a draft head of ours or is cut short; delete it") from error
    return state


def head_of(state: dict[str, Any]) -> DraftHead:
    """The head that a weights file holds, in float32."""
    head = DraftHead(HeadShape.from_json(state["shape"]))
    head.load_state_dict({name: tensor.float() for name, tensor in state["weights"].items()})
    return head
