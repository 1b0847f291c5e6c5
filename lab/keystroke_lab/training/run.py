"""The training loop: resumable training on short GPU leases, the same for every kind of model.

A run is a folder with a log, a checkpoint to continue from and the weights. A subclass chooses the next
learning-rate factor, takes a step and writes a checkpoint; the loop reports, saves by the clock and stops.
Steps, tokens and seconds count over all parts of a run, however often it was stopped.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from keystroke.errors import InputError, ModelDamaged
from keystroke_lab.training.run_log import Report, append_row
from keystroke_lab.training.schedule import Schedule

CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True, slots=True)
class TrainingRecipe:
    """What every kind of training decides; a kind adds what is its own."""

    seed: int = 0
    report_every: int = 20  # steps


class TrainingRun(ABC):
    """One run in a folder. `checkpoint_seconds`: how often the loop saves by the clock."""

    checkpoint_seconds = float("inf")

    def __init__(self, run: Path, report_every: int) -> None:
        run.mkdir(parents=True, exist_ok=True)
        self.run = run
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self._report_every = report_every

    def _train(self, report: Report | None = None) -> None:
        """Take steps until `_next_factor` returns None."""
        began, before = time.monotonic(), self.seconds
        saved, reported, reported_tokens = began, began, self.tokens
        while (factor := self._next_factor()) is not None:
            measured = self._take_step(factor)
            self.step += 1
            now = time.monotonic()
            self.seconds = before + now - began
            if self.step % self._report_every == 0:
                rate = (self.tokens - reported_tokens) / max(1e-9, now - reported)
                row = {"step": self.step, "tokens": self.tokens, **self._row(measured)}
                row |= {"factor": round(factor, 4), "tokens_per_second": round(rate)}
                append_row(self.run, row, report)
                reported, reported_tokens = now, self.tokens
            self._after_step()
            if time.monotonic() - saved > self.checkpoint_seconds:
                self.checkpoint()
                saved = time.monotonic()

    @abstractmethod
    def _next_factor(self) -> float | None:
        """What the peak learning rate is multiplied by in the next step; None ends the run."""

    @abstractmethod
    def _take_step(self, factor: float) -> Mapping[str, Any]:
        """Train on one batch and count its tokens. What `_row` needs, still on the device."""

    @abstractmethod
    def _row(self, measured: Mapping[str, Any]) -> dict[str, Any]:
        """What the log says of the last step, with at least its loss."""

    def _after_step(self) -> None:  # noqa: B027 - most runs have nothing to do here
        """Called after every step and its report."""

    @abstractmethod
    def checkpoint(self) -> None:
        """Write what the run continues from."""


class PassesRun(TrainingRun):
    """A run over a fixed set of batches: it ends after a number of passes or of seconds, whichever comes
    first, and the learning rate reaches its floor just then."""

    def __init__(
        self, run: Path, report_every: int, schedule: Schedule, passes: float, longest: float
    ) -> None:
        super().__init__(run, report_every)
        self._schedule, self._passes, self._longest = schedule, passes, longest
        self._steps = 1

    def _set_batches(self, count: int) -> None:
        self._steps = max(1, round(self._passes * count))

    def _next_factor(self) -> float | None:
        done = max(self.step / self._steps, self.seconds / self._longest)
        return self._schedule.factor(done) if done < 1.0 else None


def autocast(device: torch.device) -> AbstractContextManager[Any]:
    """bfloat16 on a GPU; a CPU computes in the type it is given."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def bfloat16_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights alone: what is exported and what a later run may start from."""
    return {name: p.detach().to(torch.bfloat16).cpu() for name, p in model.named_parameters()}


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write whole or not at all."""
    partial = path.with_suffix(".partial")
    torch.save(dict(state), partial)
    os.replace(partial, path)


def load_state(path: Path, missing: str, damaged: str, device: torch.device | str = "cpu") -> dict[str, Any]:
    """A file that `save_state` wrote. Raises InputError(`missing`) where there is none and
    ModelDamaged(`damaged`) where it cannot be read."""
    try:
        state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError as error:
        raise InputError(missing) from error
    except Exception as error:  # torch raises many kinds for a truncated or foreign file
        raise ModelDamaged(damaged) from error
    return state
