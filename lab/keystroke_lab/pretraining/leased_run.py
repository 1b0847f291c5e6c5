"""Resumable pretraining on short GPU leases: the same result however often a run is stopped.

After every interval of steps the state is packed and training continues from the packed state
(`packed_state.settle`); a run stops only there. On a device with deterministic arithmetic, a run that was
stopped any number of times ends with the same bits as one that was not. The learning rate is constant after
its warm-up for as long as wanted; `finish` decays it from wherever the run is.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from keystroke.assist.next_edit.prompt import VERSION as EDIT_FORMAT
from keystroke.errors import InputError, ModelDamaged
from keystroke_lab.pretraining.documents import Mix
from keystroke_lab.pretraining.mixture import EDITS, MixturePlan
from keystroke_lab.pretraining.planned_windows import DataPosition, PlannedWindows
from keystroke_lab.pretraining.step import (
    Phase,
    PretrainingRecipe,
    build_model_and_optimizer,
    mean_loss,
    read_state,
    to_device,
    train_on_batch,
)
from keystroke_lab.training import packed_state
from keystroke_lab.training.run import TrainingRun, bfloat16_weights
from keystroke_lab.training.run_log import append_row
from keystroke_lab.training.transformer import CodeModel, Shape

# The plan sets the share of edits.
MAIN = Phase(Mix(fim=0.4, cursor=0.2, made=0.04, dated=0.35, seam=600), answer=2.0, decision=6.0)
FINAL = Phase(Mix(fim=0.1, cursor=0.6, made=0.06, dated=0.2, seam=250), answer=4.0, decision=8.0)


@dataclass(frozen=True, slots=True)
class LeasedRecipe(PretrainingRecipe):
    batch: int = 131_072  # tokens a step, whatever the length of a window
    micro_batch: int = 65_536  # tokens at once
    window: int = 2048
    final_window: int = 8192  # while the rate decays: long contexts are learned at the end
    warmup: int = 100  # steps
    stretch: int = 100  # steps between two points at which a run may stop
    main: Phase = MAIN
    final: Phase = FINAL

    def __post_init__(self) -> None:
        for window in (self.window, self.final_window):
            if self.micro_batch % window or self.batch % self.micro_batch:
                raise InputError(
                    f"a batch of {self.batch} tokens is no whole number of micro-batches of "
                    f"{self.micro_batch}, or those of windows of {window}; choose multiples"
                )
        if self.stretch % self.report_every:
            raise InputError("`stretch` must be a multiple of `report_every`; choose other numbers")


@dataclass(slots=True)
class LeaseProgress:
    """How far a run is; stored in its checkpoint beside the weights."""

    step: int = 0
    tokens: int = 0
    place: DataPosition = field(default_factory=DataPosition)
    warm_from: int = 0  # the step the warm-up began at
    decay_from: int = -1  # -1: not decaying
    decay_steps: int = 0

    @property
    def finished(self) -> bool:
        return self.decay_from >= 0 and self.step >= self.decay_from + self.decay_steps

    def factor(self, warmup: int) -> float:
        """What the peak rate is multiplied by for the next step."""
        if self.decay_from >= 0:
            return max(0.0, 1.0 - (self.step - self.decay_from) / max(1, self.decay_steps))
        return min(1.0, (self.step - self.warm_from + 1) / max(1, warmup))

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> LeaseProgress:
        try:
            stored = dict(facts["progress"])
            return cls(**{**stored, "place": DataPosition(**stored["place"])})
        except (KeyError, TypeError, ValueError) as error:
            raise ModelDamaged(
                f"the checkpoint does not say where its run is ({error}); fetch it again"
            ) from error


_STABLE, _DECAYING, _FINISHED = "checkpoint", "decaying", "finished"


@dataclass(slots=True)
class _Stops:
    """When one call of `train` ends."""

    deadline: float | None
    last_step: int | None
    finish: int
    checkpoint_seconds: float
    saved: float
    interval_began: float
    stopped: bool = False


class LeasedRun(TrainingRun):
    """One run in a folder: `checkpoint/` at the constant rate, `decaying/` while it decays, `finished/` when
    that is over, `log.jsonl`. A finished run can continue from `checkpoint/` as if it had not finished."""

    def __init__(
        self,
        run: Path,
        shape: Shape,
        recipe: LeasedRecipe,
        plan: MixturePlan,
        folders: tuple[Path, ...],
        tokenizer: Path,
        *,
        device: str = "cuda",
        workers: int = 12,
        round_pieces: int = 12,  # one for each worker: the first round is ready soon
        start: Path | None = None,
        compile_model: bool | None = None,
    ) -> None:
        """Continues from the run's checkpoint; without one from the weights `start`, or from scratch."""
        super().__init__(run, recipe.report_every)
        self.shape, self.recipe, self.plan = shape, recipe, plan
        self.device = torch.device(device)
        self.model, self.optimizer = build_model_and_optimizer(shape, recipe, self.device)
        self.progress = LeaseProgress()
        self._resume(start)
        if compile_model if compile_model is not None else self.device.type == "cuda":
            self.model.compile_parts()
        self.feed = PlannedWindows(
            plan,
            folders,
            tokenizer,
            workers=workers,
            seed=recipe.seed,
            pieces=round_pieces,
            position=self.progress.place,
        )
        (run / "recipe.json").write_text(json.dumps(asdict(recipe)) + "\n")

    def _resume(self, start: Path | None) -> None:
        folder = next((f for name in (_DECAYING, _STABLE) if (f := self.run / name).is_dir()), None)
        if folder is not None:
            shape, facts, state = packed_state.read(folder)
            if shape != self.shape:
                raise ModelDamaged(
                    f"{folder} holds a model of another shape ({shape}); use its own run folder"
                )
            packed_state.unpack(state, self.model, self.optimizer)
            self.progress = LeaseProgress.from_facts(facts)
            self.step, self.tokens = self.progress.step, self.progress.tokens
        elif start is not None:
            self.model.load_state_dict(read_state(start, self.shape)["weights"])

    def train(
        self,
        *,
        seconds: float = 0.0,
        steps: int = 0,
        finish: int = 0,
        heldout: Mapping[str, NDArray[np.uint16]] | None = None,
        checkpoint_seconds: float = 240.0,
    ) -> None:
        """Train for `seconds`, or `steps` more; a run stops at the end of an interval only. `finish`: then
        decay over so many steps and end; at once where no time and no steps are given. Leaves a checkpoint,
        or the finished weights."""
        if not seconds and not steps and not finish and self.progress.decay_from < 0:
            raise InputError("say how long to train: seconds, steps, or the steps of a decay to finish with")
        if finish and not seconds and not steps:
            self._decay(finish)
        now = time.monotonic()
        self._stops = _Stops(
            deadline=now + seconds if seconds else None,
            last_step=self.step + steps if steps else None,
            finish=finish,
            checkpoint_seconds=checkpoint_seconds,
            saved=now,
            interval_began=now,
        )
        self._train()
        self._end(heldout)

    def _next_factor(self) -> float | None:
        over = self.progress.finished or self._stops.stopped
        return None if over else self.progress.factor(self.recipe.warmup)

    def _after_step(self) -> None:
        """At the end of an interval: settle, then stop, begin the decay, or save a checkpoint."""
        stops = self._stops
        if self.step % self.recipe.stretch:
            return
        state = packed_state.settle(self.model, self.optimizer)
        now = time.monotonic()
        next_end = now + (now - stops.interval_began)  # if the next interval takes as long as the last one
        out_of_time = stops.deadline is not None and next_end > stops.deadline
        if out_of_time or (stops.last_step is not None and self.step >= stops.last_step):
            if not stops.finish or self.progress.decay_from >= 0:
                stops.stopped = True
            else:
                self._write(state)
                self._decay(stops.finish)
                stops.deadline = stops.last_step = None
        elif now - stops.saved >= stops.checkpoint_seconds:
            self._write(state)
            stops.saved = time.monotonic()
        stops.interval_began = time.monotonic()

    def _decay(self, steps: int) -> None:
        """Let the rate fall from here to zero over `steps`, rounded up to whole intervals."""
        if self.progress.decay_from < 0:
            self.feed.skip_rest_of_round()
            self.progress.decay_from = self.step
            self.progress.decay_steps = -(-steps // self.recipe.stretch) * self.recipe.stretch

    def _take_step(self, factor: float) -> Mapping[str, Any]:
        recipe, progress = self.recipe, self.progress
        decaying = progress.decay_from >= 0
        phase = recipe.final if decaying else recipe.main
        window = recipe.final_window if decaying else recipe.window
        self.feed.set_kind(phase.mix, window + 1)
        batch = to_device(self.feed.batch(recipe.batch // window), self.device)
        micro = recipe.micro_batch // window
        loss = train_on_batch(self.model, self.optimizer, batch, micro, phase, factor, self.step)
        self.tokens += recipe.batch
        progress.step, progress.tokens, progress.place = self.step + 1, self.tokens, self.feed.position
        return {"loss": loss}

    def _row(self, measured: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "loss": round(float(measured["loss"]), 5),
            "seconds": round(self.seconds, 1),
            "pieces": self.progress.place.pieces,
        }

    def _facts(self) -> dict[str, Any]:
        learned = EDIT_FORMAT if EDITS in self.plan.shares else 0
        return {
            "progress": asdict(self.progress),
            "next_edit": learned,
            "languages": sorted(set(self.plan.shares) - {EDITS}),
        }

    def checkpoint(self) -> None:
        self._write(packed_state.pack(self.model, self.optimizer))

    def _write(self, state: dict[str, packed_state.Packed]) -> None:
        name = _STABLE if self.progress.decay_from < 0 else _DECAYING
        packed_state.write(self.run / name, self.shape, self._facts(), state)

    def _end(self, heldout: Mapping[str, NDArray[np.uint16]] | None) -> None:
        if self.progress.finished:
            state = packed_state.pack(self.model, None)
            packed_state.write(self.run / _FINISHED, self.shape, self._facts(), state)
            shutil.rmtree(self.run / _DECAYING, ignore_errors=True)
        else:
            self.checkpoint()
        for language, windows in (heldout or {}).items():
            loss = round(mean_loss(self.model, windows, self.device), 4)
            row = {"step": self.step, "tokens": self.tokens, "language": language}
            append_row(self.run, {**row, "loss": loss, "heldout": True})

    def close(self) -> None:
        self.feed.close()


def to_weights(folder: Path, out: Path) -> None:
    """Packed weights (`finished/` or `checkpoint/`) as the file that `export` and `--start` read."""
    shape, facts, state = packed_state.read(folder)
    model = CodeModel(shape)
    packed_state.unpack(state, model, None)
    progress = LeaseProgress.from_facts(facts)
    counts = {"shape": shape.to_json(), "step": progress.step, "tokens": progress.tokens}
    counts |= {"next_edit": facts.get("next_edit", 0), "languages": facts.get("languages", [])}
    torch.save({**counts, "weights": bfloat16_weights(model)}, out)
