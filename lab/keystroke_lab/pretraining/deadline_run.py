"""Pretraining until a deadline, on random windows of pieces that may still be arriving.

The end is a moment in time that may be moved while training runs (the folder's `deadline` file), and the
learning rate reaches zero exactly then; or a number of steps. A stopped run continues from its checkpoint.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from keystroke.assist.next_edit.prompt import VERSION as EDIT_FORMAT
from keystroke.errors import InputError
from keystroke_lab.pretraining.documents import Mix
from keystroke_lab.pretraining.step import (
    Phase,
    PretrainingRecipe,
    build_model_and_optimizer,
    mean_loss,
    read_state,
    to_device,
    train_on_batch,
)
from keystroke_lab.pretraining.window_feed import WindowFeed
from keystroke_lab.training.run import CHECKPOINT, TrainingRun, autocast, bfloat16_weights, save_state
from keystroke_lab.training.run_log import append_row
from keystroke_lab.training.schedule import Schedule
from keystroke_lab.training.transformer import Shape

MAIN = Phase(Mix(fim=0.4, cursor=0.2, made=0.05, edits=0.08, dated=0.35, seam=600), answer=2.0, decision=6.0)
FINAL = Phase(Mix(fim=0.1, cursor=0.6, made=0.08, edits=0.16, dated=0.2, seam=250), answer=4.0, decision=8.0)


@dataclass(frozen=True, slots=True)
class DeadlineRecipe(PretrainingRecipe):
    batch: int = 64  # windows a step: small batches make the most of a short run
    micro_batch: int = 32  # windows at once
    steps: int = 0  # 0: until the deadline
    schedule: Schedule = field(default_factory=Schedule)
    main: Phase = MAIN
    final: Phase = FINAL
    checkpoint_seconds: float = 120.0
    heldout_every: int = 200

    def __post_init__(self) -> None:
        if self.batch % self.micro_batch:
            raise InputError(
                f"a batch of {self.batch} is not a whole number of micro-batches of {self.micro_batch}"
            )


class DeadlineClock:
    """How much of the run is over. `deadline` in the run's folder holds the end as seconds since the epoch,
    `started` the beginning."""

    def __init__(self, run: Path, recipe: DeadlineRecipe) -> None:
        self._file = run / "deadline"
        self._steps = recipe.steps
        if self._steps:
            return
        if not self._file.exists():
            raise InputError(
                f"{self._file} does not say when to end; write a Unix time there or give a number of steps"
            )
        self._end = float(self._file.read_text())
        started = run / "started"  # a resumed run keeps its beginning
        if not started.exists():
            started.write_text(str(time.time()))
        self._started = float(started.read_text())

    def share_done(self, step: int) -> float:
        if self._steps:
            return step / self._steps
        with suppress(OSError, ValueError):  # just being rewritten: the last known end holds
            self._end = float(self._file.read_text())
        return min(1.0, (time.time() - self._started) / max(1e-9, self._end - self._started))


class DeadlineRun(TrainingRun):
    """`train` returns when the clock says so and leaves `stable.pt` (before the decay) and `final.pt`."""

    def __init__(
        self,
        run: Path,
        shape: Shape,
        recipe: DeadlineRecipe,
        feed: WindowFeed,
        *,
        device: str = "cuda",
        compile_model: bool = True,
        start: Path | None = None,
    ) -> None:
        """`start`: weights (final.pt or stable.pt) to begin from, where the run has no checkpoint yet."""
        super().__init__(run, recipe.report_every)
        self.shape, self.recipe, self.feed = shape, recipe, feed
        self.checkpoint_seconds = recipe.checkpoint_seconds
        self.device = torch.device(device)
        self.model, self.optimizer = build_model_and_optimizer(shape, recipe, self.device)
        self._phase, self._done = recipe.main, 0.0
        self._clock: DeadlineClock | None = None
        self._heldout: NDArray[np.uint16] | None = None
        if compile_model:
            self.model.compile_parts()
        self._resume(start)
        (run / "shape.json").write_text(shape.to_json() + "\n")
        (run / "recipe.json").write_text(json.dumps(asdict(recipe)) + "\n")

    def train(self, heldout: NDArray[np.uint16] | None = None) -> None:
        self.feed.mix = self.recipe.main.mix
        self.feed.start()
        self._warm_up_compiler()
        self._clock, self._heldout = DeadlineClock(self.run, self.recipe), heldout
        self._train()
        self.save_weights(self.run / "final.pt")
        self._report_heldout(final=True)

    def _next_factor(self) -> float | None:
        assert self._clock is not None
        schedule = self.recipe.schedule
        self._done = self._clock.share_done(self.step)
        if self._done >= 1.0:
            return None
        if schedule.decaying(self._done) and self._phase is not self.recipe.final:
            if self.recipe.final is not self.recipe.main:
                self.save_weights(self.run / "stable.pt")
            self._phase = self.recipe.final
        self.feed.mix = self._phase.mix
        return schedule.factor(self._done)

    def _take_step(self, factor: float) -> Mapping[str, Any]:
        batch = to_device(self.feed.batch(self.recipe.batch), self.device)
        micro = self.recipe.micro_batch
        loss = train_on_batch(self.model, self.optimizer, batch, micro, self._phase, factor, self.step)
        self.tokens += batch.size(0) * (batch.size(1) - 1)
        return {"loss": loss}

    def _row(self, measured: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "done": round(self._done, 4),
            "loss": round(float(measured["loss"]), 4),
            "time": round(time.time(), 1),
            "passes": self.feed.passes,
            "edits": self.feed.edits_drawn,
            "stock": self.feed.available,
        }

    def _after_step(self) -> None:
        if self.step % self.recipe.heldout_every == 0:
            self._report_heldout()

    def _report_heldout(self, **more: Any) -> None:
        if self._heldout is None:
            return
        loss = round(mean_loss(self.model, self._heldout, self.device), 4)
        row = {"step": self.step, "tokens": self.tokens, "heldout": loss, **more}
        append_row(self.run, {**row, "time": round(time.time(), 1)})

    def _warm_up_compiler(self) -> None:
        """Compile before the clock starts: the first step is then as quick as the others."""
        tokens = torch.zeros(
            self.recipe.micro_batch, self.shape.context, dtype=torch.int64, device=self.device
        )
        with autocast(self.device):
            weights = torch.ones(tokens.shape, device=self.device)
            (self.model.weighted_loss(tokens, tokens, weights) / 2).backward()  # type: ignore[no-untyped-call]
        self.model.zero_grad(set_to_none=True)

    def save_weights(self, path: Path) -> None:
        learned = EDIT_FORMAT if self.feed.edits_drawn else 0
        save_state(path, {**self._counts(), "next_edit": learned, "weights": bfloat16_weights(self.model)})

    def checkpoint(self) -> None:
        state = {"model": self.model.state_dict(), "optimiser": self.optimizer.state_dict()}
        save_state(self.run / CHECKPOINT, {**self._counts(), **state})

    def _counts(self) -> dict[str, Any]:
        return {"shape": self.shape.to_json(), "step": self.step, "tokens": self.tokens}

    def _resume(self, start: Path | None) -> None:
        path = self.run / CHECKPOINT
        if not path.exists():
            if start is not None:
                self.model.load_state_dict(read_state(start, self.shape)["weights"])
            return
        state = read_state(path, self.shape)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimiser"])
        self.step, self.tokens = state["step"], state["tokens"]
