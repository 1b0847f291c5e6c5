"""Training an adapter on a frozen base model.

A run is a folder, see `training/run.py`; its checkpoint holds the adapter and its optimizer, not the base. It
ends after a number of passes or of seconds, whichever comes first. Only answers count in the loss: the token
that chooses a place counts more, and long answers hardly more than short ones. On examples of kind `keep` and
`own` the loss is the divergence from the base, so that the adapter does not change what the base can do.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keystroke.engine.adapter import PRODUCTS, AdapterShape, read_adapter, write_adapter
from keystroke.engine.checkpoint import open_checkpoint
from keystroke.errors import InputError, ModelDamaged
from keystroke_lab.adapters.lora import AdaptedModel, Adapter
from keystroke_lab.draft_heads.batches import rectangles
from keystroke_lab.draft_heads.target import TargetModel
from keystroke_lab.draft_heads.texts import TokenText, read_texts
from keystroke_lab.training.run import CHECKPOINT, PassesRun, TrainingRecipe, load_state, save_state
from keystroke_lab.training.run_log import Report
from keystroke_lab.training.schedule import Schedule

_GRAIN = 64  # lengths of a rectangle
_EDITS = ("next", "new")  # kinds whose answers name a place, its lines, and words
_KEPT = ("keep", "own")


@dataclass(frozen=True, slots=True)
class AdapterRecipe(TrainingRecipe):
    passes: float = 1.0
    seconds: float = float("inf")
    rate: float = 2e-4
    clip: float = 1.0
    batch: int = 8192  # tokens of a rectangle
    together: int = 2  # rectangles of one step: unlike lengths are unlike tasks
    weights: Mapping[str, float] = field(  # of an answer's tokens, by kind of example
        default_factory=lambda: {"next": 1.0, "new": 0.15, "quiet": 1.0, "rewrite": 0.3, "fill": 0.7}
    )
    answer: float = 32.0  # tokens that the words of a next edit count as at most
    keep: float = 4.0  # of a nat of divergence from the base, beside a nat of an answer; 0 costs nothing
    choice: float = 6.0  # of the token that chooses a place, or silence
    lines: float = 3.0  # of the two that choose its lines
    schedule: Schedule = field(default_factory=lambda: Schedule(warmup=0.04, decay=0.8, floor=0.02))
    report_every: int = 10
    checkpoint_seconds: float = 300.0


@dataclass(frozen=True)
class AdapterBatch:
    """A rectangle laid out flat and filled up. `weights`: of guessing what follows each token. `kept`: its
    texts are to be kept, not learned."""

    tokens: Tensor
    weights: Tensor
    rows: int
    length: int
    kept: bool


def batch_of(texts: Sequence[TokenText], recipe: AdapterRecipe, device: torch.device) -> AdapterBatch:
    length = -(-max(len(text.tokens) for text in texts) // _GRAIN) * _GRAIN
    size = max(recipe.batch, length * len(texts))
    tokens, weights = np.zeros(size, np.int64), np.zeros(size, np.float32)
    for row, text in enumerate(texts):
        at, count = row * length, len(text.tokens)
        tokens[at : at + count] = text.tokens
        weights[at + text.given - 1 : at + count - 1] = recipe.weights.get(text.kind, 1.0)
        if text.kind in _EDITS:
            words = weights[at + text.given + 2 : at + count - 1]
            words *= min(1.0, recipe.answer / max(1, len(words)))
            weights[at + text.given : at + text.given + 2] = recipe.lines
        if text.kind in (*_EDITS, "quiet"):
            weights[at + text.given - 1] = recipe.choice
    return AdapterBatch(
        torch.from_numpy(tokens).to(device),
        torch.from_numpy(weights).to(device),
        len(texts),
        length,
        texts[0].kind in _KEPT,
    )


class AdapterRun(PassesRun):
    """`train` returns when its passes or its seconds are over."""

    def __init__(
        self,
        run: Path,
        target: TargetModel,
        adapter: Adapter,
        recipe: AdapterRecipe,
        *,
        compiled: bool = False,
    ) -> None:
        super().__init__(run, recipe.report_every, recipe.schedule, recipe.passes, recipe.seconds)
        self.checkpoint_seconds = recipe.checkpoint_seconds
        self.adapter, self.recipe = adapter, recipe
        self.model = AdaptedModel(target, adapter, compiled=compiled)
        self.device = target.device
        self.optimizer = torch.optim.AdamW(
            adapter.parameters(),
            lr=recipe.rate,
            betas=(0.9, 0.98),
            weight_decay=0.0,
            fused=self.device.type == "cuda",
        )
        self._drift: Tensor | None = None  # of the last step with examples to keep
        self._resume()

    def train(self, texts: Sequence[TokenText], report: Report | None = None) -> None:
        self._batches = self._groups(texts)
        if not self._batches:
            raise InputError("there are no examples to train on; build some first")
        self._set_batches(len(self._batches))
        self._train(report)

    def _row(self, measured: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "of": self._steps,
            "loss": round(float(measured["loss"]), 4),
            "right": round(float(measured["right"]), 4),
            "drift": None if self._drift is None else round(float(self._drift), 5),
            "seconds": round(self.seconds, 1),
        }

    def _groups(self, texts: Sequence[TokenText]) -> list[list[list[TokenText]]]:
        """Rectangles drawn together for each step, in an order that does not sort by length; those to be kept
        come beside them, evenly."""
        recipe = self.recipe
        learned = self._rectangles([text for text in texts if text.kind not in _KEPT])
        kept = self._rectangles([text for text in texts if text.kind in _KEPT]) if recipe.keep else []
        n = recipe.together
        groups = [learned[i : i + n] for i in range(0, len(learned) - n + 1, n)] or [learned][: len(learned)]
        for i, rectangle in enumerate(kept if groups else ()):
            groups[i * len(groups) // len(kept)].append(rectangle)
        return groups

    def _rectangles(self, texts: Sequence[TokenText]) -> list[list[TokenText]]:
        found = rectangles(texts, self.recipe.batch, seed=self.recipe.seed, grain=_GRAIN)
        random.Random(self.recipe.seed).shuffle(found)
        return found

    def _take_step(self, factor: float) -> Mapping[str, Any]:
        group = self._batches[self.step % len(self._batches)]
        batches = [batch_of(texts, self.recipe, self.device) for texts in group]
        zero = torch.zeros((), device=self.device)
        learned = sum((batch.weights.sum() for batch in batches if not batch.kept), zero).clamp_min(1.0)
        held = sum((batch.weights.sum() for batch in batches if batch.kept), zero).clamp_min(1.0)
        total, drift, hits, count = zero, zero, zero, 0
        for batch in batches:
            measure = self.model.drift if batch.kept else self.model.loss
            loss, right = measure(batch.tokens, batch.weights, batch.rows, batch.length)
            loss = loss / (held if batch.kept else learned)
            (loss * (self.recipe.keep if batch.kept else 1.0)).backward()  # type: ignore[no-untyped-call]
            if batch.kept:
                drift = drift + loss.detach()
            else:
                total, hits, count = total + loss.detach(), hits + right.sum(), count + len(right)
            self.tokens += batch.rows * batch.length
        torch.nn.utils.clip_grad_norm_(self.adapter.parameters(), self.recipe.clip)
        for rates in self.optimizer.param_groups:
            rates["lr"] = self.recipe.rate * factor
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if any(batch.kept for batch in batches):
            self._drift = drift
        return {"loss": total, "right": hits / max(1, count)}

    def checkpoint(self) -> None:
        state = {
            "adapter": self.adapter.state_dict(),
            "optimiser": self.optimizer.state_dict(),
            "counts": [self.step, self.tokens, self.seconds],
        }
        save_state(self.run / CHECKPOINT, state)

    def _resume(self) -> None:
        path = self.run / CHECKPOINT
        if not path.exists():
            return
        damaged = f"{path} is no checkpoint of such an adapter or is cut short; delete it to begin again"
        state = load_state(path, damaged, damaged, self.device)
        try:
            self.adapter.load_state_dict(state["adapter"])
            self.optimizer.load_state_dict(state["optimiser"])
            self.step, self.tokens, self.seconds = state["counts"]
        except (KeyError, RuntimeError, TypeError, ValueError) as error:  # of another shape
            raise ModelDamaged(damaged) from error


def export(adapter: Adapter, path: Path, facts: Mapping[str, str]) -> int:
    """Write the adapter's file; its size in bytes."""
    pairs = {}
    for layer in range(adapter.shape.layers):
        for product, (down, up) in zip(PRODUCTS, adapter.pairs_of(layer), strict=True):
            pairs[layer, product] = (down.detach().float().cpu().numpy(), up.detach().float().cpu().numpy())
    return write_adapter(path, adapter.shape, pairs, facts)


def train_adapter(
    model: Path,
    examples: Sequence[Path],
    run: Path,
    recipe: AdapterRecipe,
    rank: int,
    device: str,
    learned: Mapping[str, str],
    report: Callable[[str, int, int], None] = lambda *_: None,
    *,
    begin: Path | None = None,
    compiled: bool | None = None,
) -> dict[str, Any]:
    """Load the base, train, and leave `adapter.safetensors` in `run`. A summary. `learned`: facts about
    the examples for the file's metadata. `begin`: an adapter to continue from; a stopped run continues from
    its own checkpoint. `compiled`: None does so on a GPU."""
    held = read_adapter(begin) if begin is not None else None
    texts = [text for path in examples for text in read_texts(path)]
    place = torch.device(device)
    length = max((len(text.tokens) for text in texts), default=0) + _GRAIN
    with open_checkpoint(model) as checkpoint:
        dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
        report("base", 0, 1)
        target = TargetModel.load(checkpoint, place, dtype, length)
        report("base", 1, 1)
    adapter = Adapter(shape_for(target, rank), seed=recipe.seed, device=place)
    before = {"steps": 0, "tokens": 0}
    if held is not None:
        adapter.continue_from(held)
        before = {name: int(held.facts.get(name, 0)) for name in before}
    fuse = place.type == "cuda" if compiled is None else compiled
    trainer = AdapterRun(run, target, adapter, recipe, compiled=fuse)
    try:
        trainer.train(texts, lambda row: report("steps", row["step"], row["of"]))
    except KeyboardInterrupt:
        trainer.checkpoint()
        raise
    facts = {"base": target.spec.name, **learned}
    facts |= {
        "steps": str(before["steps"] + trainer.step),
        "tokens": str(before["tokens"] + trainer.tokens),
    }
    path = run / "adapter.safetensors"
    size = export(adapter, path, facts)
    return {"adapter": str(path), "bytes": size, "steps": trainer.step, "tokens": trainer.tokens}


def shape_for(target: TargetModel, rank: int, scale: float = 2.0) -> AdapterShape:
    return AdapterShape.of(target.spec, rank, scale)
