"""Warm-up, stable, decay: the learning rate as a function of the share of the run that is over.

Runs measured in seconds and in steps use the same curve, and the decay ends at its floor exactly when the run
does.
"""

from __future__ import annotations

from dataclasses import dataclass

from keystroke.errors import InputError


@dataclass(frozen=True, slots=True)
class Schedule:
    warmup: float = 0.02  # of the whole run
    decay: float = 0.4
    floor: float = 0.0

    def __post_init__(self) -> None:
        if self.warmup < 0 or self.decay < 0 or self.warmup + self.decay > 1 or not 0 <= self.floor <= 1:
            raise InputError("warm-up and decay are shares of the run: neither below 0, together at most 1")

    def factor(self, done: float) -> float:
        """What to multiply the peak learning rate by when `done` of the run (0 to 1) is over."""
        done = min(1.0, max(0.0, done))
        if done < self.warmup:
            return max(0.01, done / self.warmup)
        start = 1.0 - self.decay
        if done <= start or self.decay == 0:
            return 1.0
        return self.floor + (1.0 - self.floor) * (1.0 - done) / self.decay

    def decaying(self, done: float) -> bool:
        return self.decay > 0 and done > 1.0 - self.decay
