"""One run of an adapter: lessons in rectangles, steps by the clock, a file of matrices at the end.

A run folder holds a log, a checkpoint to go on from (the adapter and its optimiser: small, for the base
is not in it) and the adapter's file. It ends after a number of passes or of seconds, whichever comes first;
the learning rate reaches zero just then. A lesson's answer counts, its question does not; the token that
chooses a place counts more, and a long answer hardly more than a short one: right to the letter is counted by
answers. Texts to be kept (`keep`, and the base's own) teach nothing but what the base would say anyway.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from keystroke.engine.adapter import PRODUCTS, AdapterShape, read_adapter, write_adapter
from keystroke.engine.checkpoint import open_checkpoint
from keystroke.errors import InputError, ModelDamaged
from keystroke.train.adapter.lora import Adapted, Adapter
from keystroke.train.draft_head.lessons import rectangles
from keystroke.train.draft_head.target import Target
from keystroke.train.draft_head.texts import Text, read_texts
from keystroke.train.run_log import tell
from keystroke.train.schedule import Schedule

_GRAIN = 64  # lengths of a rectangle
_EDITS = ("next", "new")  # kinds whose answers name a place, its lines, and words
_KEPT = ("keep", "own")


@dataclass(frozen=True, slots=True)
class Recipe:
    passes: float = 1.0
    seconds: float = float("inf")
    rate: float = 2e-4
    clip: float = 1.0
    batch: int = 8192  # tokens of a rectangle
    together: int = 2  # rectangles of one step: unlike lengths are unlike tasks
    weights: Mapping[str, float] = field(  # of an answer's tokens, by kind of lesson
        default_factory=lambda: {"next": 1.0, "new": 0.15, "quiet": 1.0, "rewrite": 0.3, "fill": 0.7}
    )
    answer: float = 32.0  # tokens that the words of a next edit count as at most
    keep: float = 4.0  # of a nat of divergence from the base, beside a nat of an answer; 0 costs nothing
    choice: float = 6.0  # of the token that chooses a place, or silence
    lines: float = 3.0  # of the two that choose its lines
    schedule: Schedule = field(default_factory=lambda: Schedule(warmup=0.04, decay=0.8, floor=0.02))
    seed: int = 0
    report_every: int = 10
    checkpoint_seconds: float = 300.0


@dataclass(frozen=True)
class Batch:
    """A rectangle laid out flat and filled up. `weights`: of guessing what follows each token. `kept`: its
    texts are to be kept, not learned."""

    tokens: Tensor
    weights: Tensor
    rows: int
    length: int
    kept: bool


def batch_of(texts: Sequence[Text], recipe: Recipe, device: torch.device) -> Batch:
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
    return Batch(
        torch.from_numpy(tokens).to(device),
        torch.from_numpy(weights).to(device),
        len(texts),
        length,
        texts[0].kind in _KEPT,
    )


class Taken(NamedTuple):
    """Of one step: nats of its answers, the share guessed right, and the drift from the base if looked at."""

    loss: Tensor
    right: Tensor
    drift: Tensor | None


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
        drift: Tensor | None = None
        while True:
            self.seconds = before + time.monotonic() - began
            done = max(self.step / steps, self.seconds / recipe.seconds)
            if done >= 1.0:
                break
            taken = self._one_step(groups[self.step % len(groups)], recipe.schedule.factor(done))
            drift = drift if taken.drift is None else taken.drift
            if self.step % recipe.report_every == 0:
                row = {
                    "step": self.step, "of": steps, "loss": round(float(taken.loss), 4),
                    "right": round(float(taken.right), 4),
                    "drift": None if drift is None else round(float(drift), 5),
                    "factor": round(recipe.schedule.factor(done), 4), "seconds": round(self.seconds, 1),
                    "tokens": self.tokens,
                    "tokens_per_second": round((self.tokens - tokens) / max(1e-9, time.monotonic() - began)),
                }  # fmt: skip
                tell(self.run, row, report)
            if time.monotonic() - saved > recipe.checkpoint_seconds:
                self.checkpoint()
                saved = time.monotonic()

    def _groups(self, texts: Sequence[Text]) -> list[list[list[Text]]]:
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

    def _rectangles(self, texts: Sequence[Text]) -> list[list[Text]]:
        found = rectangles(texts, self.recipe.batch, seed=self.recipe.seed, grain=_GRAIN)
        random.Random(self.recipe.seed).shuffle(found)
        return found

    def _one_step(self, group: Sequence[Sequence[Text]], factor: float) -> Taken:
        batches = [batch_of(texts, self.recipe, self.device) for texts in group]
        zero = torch.zeros((), device=self.device)
        learned = sum((batch.weights.sum() for batch in batches if not batch.kept), zero).clamp_min(1.0)
        held = sum((batch.weights.sum() for batch in batches if batch.kept), zero).clamp_min(1.0)
        total, drift, hits, count = zero, zero, zero, 0
        for batch in batches:
            of = self.model.drift if batch.kept else self.model.loss
            loss, right = of(batch.tokens, batch.weights, batch.rows, batch.length)
            loss = loss / (held if batch.kept else learned)
            (loss * (self.recipe.keep if batch.kept else 1.0)).backward()  # type: ignore[no-untyped-call]
            if batch.kept:
                drift = drift + loss.detach()
            else:
                total, hits, count = total + loss.detach(), hits + right.sum(), count + len(right)
            self.tokens += batch.rows * batch.length
        torch.nn.utils.clip_grad_norm_(self.adapter.parameters(), self.recipe.clip)
        for rates in self.optimiser.param_groups:
            rates["lr"] = self.recipe.rate * factor
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.step += 1
        return Taken(total, hits / max(1, count), drift if any(batch.kept for batch in batches) else None)

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
    learned: Mapping[str, str],
    report: Callable[[str, int, int], None] = lambda *_: None,
    *,
    begin: Path | None = None,
    compiled: bool | None = None,
) -> dict[str, Any]:
    """Load the base, train, and leave `adapter.safetensors` in `run`. What was made. `learned`: what the
    lessons teach, for the file to say. `begin`: an adapter to go on from; a run that was stopped goes on from
    its own checkpoint. `compiled`: None does so on a GPU."""
    held = read_adapter(begin) if begin is not None else None
    texts = [text for path in lessons for text in read_texts(path)]
    place = torch.device(device)
    length = max((len(text.tokens) for text in texts), default=0) + _GRAIN
    with open_checkpoint(model) as checkpoint:
        dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
        report("base", 0, 1)
        target = Target.load(checkpoint, place, dtype, length)
        report("base", 1, 1)
    adapter = Adapter(shape_for(target, rank), seed=recipe.seed, device=place)
    before = {"steps": 0, "tokens": 0}
    if held is not None:
        adapter.begin(held)
        before = {name: int(held.facts.get(name, 0)) for name in before}
    fuse = place.type == "cuda" if compiled is None else compiled
    trainer = Trainer(run, target, adapter, recipe, compiled=fuse)
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


def shape_for(target: Target, rank: int, scale: float = 2.0) -> AdapterShape:
    return AdapterShape.of(target.spec, rank, scale)
