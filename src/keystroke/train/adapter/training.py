"""One run of an adapter: lessons in rectangles, steps by the clock, a file of matrices at the end.

Law: a run folder holds a log, a checkpoint to go on from (the adapter and its optimiser: small, for the base
is not in it) and the adapter's file. It ends after a number of passes or of seconds, whichever comes first;
the learning rate reaches zero just then. A lesson's answer counts, its question does not; the token that
chooses a place counts more.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keystroke.assist.next_edit.places import VERSION as PLACES_VERSION
from keystroke.engine.adapter import PRODUCTS, AdapterShape, write_adapter
from keystroke.engine.checkpoint import open_checkpoint
from keystroke.errors import InputError, ModelDamaged
from keystroke.train.adapter.lora import Adapted, Adapter
from keystroke.train.draft_head.lessons import rectangles
from keystroke.train.draft_head.target import Target
from keystroke.train.draft_head.texts import Text, read_texts
from keystroke.train.run_log import tell
from keystroke.train.schedule import Schedule

_GRAIN = 64  # lengths of a rectangle


@dataclass(frozen=True, slots=True)
class Recipe:
    passes: float = 1.0
    seconds: float = float("inf")
    rate: float = 4e-4
    clip: float = 1.0
    batch: int = 8192  # tokens of a rectangle
    together: int = 2  # rectangles of one step: unlike lengths are unlike tasks
    weights: Mapping[str, float] = field(  # of an answer's tokens, by kind of lesson
        default_factory=lambda: {"next": 1.0, "quiet": 1.0, "rewrite": 0.3, "fill": 0.7, "own": 0.1}
    )
    choice: float = 6.0  # of the token that chooses a place, or silence
    lines: float = 3.0  # of the two that choose its lines
    schedule: Schedule = field(default_factory=lambda: Schedule(warmup=0.04, decay=0.8, floor=0.02))
    seed: int = 0
    report_every: int = 10
    checkpoint_seconds: float = 300.0


@dataclass(frozen=True)
class Batch:
    """A rectangle laid out flat and filled up. `weights`: of guessing what follows each token."""

    tokens: Tensor
    weights: Tensor
    rows: int
    length: int


def batch_of(texts: Sequence[Text], recipe: Recipe, device: torch.device) -> Batch:
    length = -(-max(len(text.tokens) for text in texts) // _GRAIN) * _GRAIN
    size = max(recipe.batch, length * len(texts))
    tokens, weights = np.zeros(size, np.int64), np.zeros(size, np.float32)
    for row, text in enumerate(texts):
        at, count = row * length, len(text.tokens)
        tokens[at : at + count] = text.tokens
        weights[at + text.given - 1 : at + count - 1] = recipe.weights.get(text.kind, 1.0)
        if text.kind in ("next", "quiet"):
            weights[at + text.given - 1] *= recipe.choice
        if text.kind == "next":
            weights[at + text.given : at + text.given + 2] *= recipe.lines
    return Batch(
        torch.from_numpy(tokens).to(device), torch.from_numpy(weights).to(device), len(texts), length
    )


class Trainer:
    """`train` returns when its passes or its seconds are over."""

    def __init__(
        self, run: Path, target: Target, adapter: Adapter, recipe: Recipe, *, compiled: bool = False
    ) -> None:
        self.run, self.adapter, self.recipe = run, adapter, recipe
        run.mkdir(parents=True, exist_ok=True)
        self.model = Adapted(target, adapter, compiled=compiled)
        self.device = target.device
        self.optimiser = torch.optim.AdamW(
            adapter.parameters(),
            lr=recipe.rate,
            betas=(0.9, 0.98),
            weight_decay=0.0,
            fused=self.device.type == "cuda",
        )
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self._resume()

    def train(self, texts: Sequence[Text], report: Callable[[dict[str, Any]], None] | None = None) -> None:
        recipe = self.recipe
        groups = self._groups(texts)
        if not groups:
            raise InputError("there is no lesson to learn from; build some first")
        steps = max(1, round(recipe.passes * len(groups)))
        began, before, tokens = time.monotonic(), self.seconds, self.tokens
        saved = began
        while True:
            self.seconds = before + time.monotonic() - began
            done = max(self.step / steps, self.seconds / recipe.seconds)
            if done >= 1.0:
                break
            loss, right = self._one_step(groups[self.step % len(groups)], recipe.schedule.factor(done))
            if self.step % recipe.report_every == 0:
                value = float(loss)
                row = {
                    "step": self.step, "of": steps, "loss": round(value, 4), "right": round(float(right), 4),
                    "factor": round(recipe.schedule.factor(done), 4), "seconds": round(self.seconds, 1),
                    "tokens": self.tokens,
                    "tokens_per_second": round((self.tokens - tokens) / max(1e-9, time.monotonic() - began)),
                }  # fmt: skip
                tell(self.run, row, report)
            if time.monotonic() - saved > recipe.checkpoint_seconds:
                self.checkpoint()
                saved = time.monotonic()

    def _groups(self, texts: Sequence[Text]) -> list[list[list[Text]]]:
        """Rectangles drawn together for each step, in an order that does not sort by length."""
        found = rectangles(texts, self.recipe.batch, seed=self.recipe.seed, grain=_GRAIN)
        random.Random(self.recipe.seed).shuffle(found)
        n = self.recipe.together
        return [found[i : i + n] for i in range(0, len(found) - n + 1, n)] or ([found] if found else [])

    def _one_step(self, group: Sequence[Sequence[Text]], factor: float) -> tuple[Tensor, Tensor]:
        batches = [batch_of(texts, self.recipe, self.device) for texts in group]
        whole = torch.stack([batch.weights.sum() for batch in batches]).sum().clamp_min(1.0)
        total, hits, count = torch.zeros((), device=self.device), torch.zeros((), device=self.device), 0
        for batch in batches:
            loss, right = self.model.loss(batch.tokens, batch.weights, batch.rows, batch.length)
            (loss / whole).backward()  # type: ignore[no-untyped-call]
            total, hits, count = total + loss.detach(), hits + right.sum(), count + len(right)
            self.tokens += batch.rows * batch.length
        torch.nn.utils.clip_grad_norm_(self.adapter.parameters(), self.recipe.clip)
        for rates in self.optimiser.param_groups:
            rates["lr"] = self.recipe.rate * factor
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.step += 1
        return total / whole, hits / max(1, count)

    def checkpoint(self) -> None:
        state = {
            "adapter": self.adapter.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "counts": [self.step, self.tokens, self.seconds],
        }
        partial = self.run / "checkpoint.partial"
        torch.save(state, partial)
        os.replace(partial, self.run / "checkpoint.pt")

    def _resume(self) -> None:
        path = self.run / "checkpoint.pt"
        if not path.exists():
            return
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
            self.adapter.load_state_dict(state["adapter"])
            self.optimiser.load_state_dict(state["optimiser"])
            self.step, self.tokens, self.seconds = state["counts"]
        except Exception as error:  # torch raises many kinds for a truncated or foreign file
            raise ModelDamaged(
                f"{path} is no checkpoint of such an adapter or is cut short; delete it to begin again"
            ) from error


def export(adapter: Adapter, path: Path, facts: Mapping[str, str]) -> int:
    """Write the adapter's file; its size in bytes."""
    pairs = {}
    for layer in range(adapter.shape.layers):
        for product, (down, up) in zip(PRODUCTS, adapter.of(layer), strict=True):
            pairs[layer, product] = (down.detach().float().cpu().numpy(), up.detach().float().cpu().numpy())
    return write_adapter(path, adapter.shape, pairs, facts)


def train_adapter(
    model: Path,
    lessons: Sequence[Path],
    run: Path,
    recipe: Recipe,
    rank: int,
    device: str,
    report: Callable[[str, int, int], None] = lambda *_: None,
) -> dict[str, Any]:
    """Load the base, train, and leave `adapter.safetensors` in `run`. What was made."""
    texts = [text for path in lessons for text in read_texts(path)]
    place = torch.device(device)
    length = max((len(text.tokens) for text in texts), default=0) + _GRAIN
    with open_checkpoint(model) as checkpoint:
        dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
        report("base", 0, 1)
        target = Target.load(checkpoint, place, dtype, length)
        report("base", 1, 1)
    adapter = Adapter(shape_for(target, rank), seed=recipe.seed, device=place)
    trainer = Trainer(run, target, adapter, recipe, compiled=place.type == "cuda")
    try:
        trainer.train(texts, lambda row: report("steps", row["step"], row["of"]))
    except KeyboardInterrupt:
        trainer.checkpoint()
        raise
    facts = {"base": target.spec.name, "next_edit": str(PLACES_VERSION), "fim_order": "spm"}
    facts |= {"steps": str(trainer.step), "tokens": str(trainer.tokens)}
    path = run / "adapter.safetensors"
    size = export(adapter, path, facts)
    return {"adapter": str(path), "bytes": size, "steps": trainer.step, "tokens": trainer.tokens}


def shape_for(target: Target, rank: int, scale: float = 2.0) -> AdapterShape:
    return AdapterShape.of(target.spec, rank, scale)
