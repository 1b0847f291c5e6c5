"""Training: the loop, its clock and its checkpoints.

A run is a folder. It holds the shape, a log line per report, a checkpoint to go on from, and the
weights. The end is a moment in time that may be moved while training runs (the folder's `deadline` file),
and the learning rate reaches zero exactly then; or a number of steps. A run that was stopped goes on from
its last checkpoint.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from keystroke.assist.next_edit.prompt import VERSION as EDIT_FORMAT
from keystroke.errors import InputError, ModelDamaged
from keystroke.train import special
from keystroke.train.documents import Mix
from keystroke.train.feed import Feed
from keystroke.train.muon import Optimiser
from keystroke.train.schedule import Schedule
from keystroke.train.transformer import CodeModel, Shape


@dataclass(frozen=True, slots=True)
class Phase:
    """What is learned from, and how much what an answer says counts beside what it is asked.

    The loss is over all tokens: prompts are code too, and most of what there is to learn. But an answer of
    ten tokens after a prompt of five hundred is what the model is for, and a next edit is decided by one
    token (leave it or not), so these may weigh more."""

    mix: Mix = field(default_factory=Mix)
    answer: float = 1.0
    decision: float = 1.0


MAIN = Phase(Mix(fim=0.4, cursor=0.2, made=0.05, edits=0.08, dated=0.35, seam=600), answer=2.0, decision=6.0)
FINAL = Phase(Mix(fim=0.1, cursor=0.6, made=0.08, edits=0.16, dated=0.2, seam=250), answer=4.0, decision=8.0)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides what a run learns, besides its data."""

    batch: int = 64  # windows a step: small batches make the most of a short run
    micro_batch: int = 32  # windows at once
    steps: int = 0  # 0: until the deadline
    matrix_rate: float = 0.02
    other_rate: float = 0.003
    weight_decay: float = 0.01
    schedule: Schedule = field(default_factory=Schedule)
    main: Phase = MAIN
    final: Phase = FINAL  # while the rate decays
    seed: int = 0
    report_every: int = 20
    checkpoint_seconds: float = 120.0
    heldout_every: int = 200

    @classmethod
    def from_json(cls, text: str, **fixed: Any) -> Recipe:
        """The recipe that differs from the default in what `text` (a JSON object) and `fixed` say."""
        try:
            said: dict[str, Any] = json.loads(text)
            if "schedule" in said:
                said["schedule"] = Schedule(**said["schedule"])
            for name in ("main", "final"):
                if name in said:
                    said[name] = Phase(**{**said[name], "mix": Mix(**said[name].get("mix", {}))})
            return cls(**{**said, **fixed})
        except (ValueError, TypeError, AttributeError) as error:
            raise InputError(f"this is no recipe ({error}); give what differs as a JSON object") from error

    def __post_init__(self) -> None:
        if self.batch % self.micro_batch:
            raise InputError(
                f"a batch of {self.batch} is not a whole number of micro-batches of {self.micro_batch}"
            )


class Clock:
    """How much of the run is over. `deadline` in the run's folder holds the end as seconds since the epoch,
    `started` the beginning."""

    def __init__(self, run: Path, recipe: Recipe) -> None:
        self._file = run / "deadline"
        self._steps = recipe.steps
        if self._steps:
            return
        if not self._file.exists():
            raise InputError(
                f"{self._file} does not say when to end; write a Unix time there or give a number of steps"
            )
        self._end = float(self._file.read_text())
        started = run / "started"  # a run that goes on does not begin anew
        if not started.exists():
            started.write_text(str(time.time()))
        self._started = float(started.read_text())

    def done(self, step: int) -> float:
        if self._steps:
            return step / self._steps
        with suppress(OSError, ValueError):  # just being rewritten: the last known end holds
            self._end = float(self._file.read_text())
        return min(1.0, (time.time() - self._started) / max(1e-9, self._end - self._started))


class Rates(Protocol):
    """What a recipe says of how a model begins to learn."""

    @property
    def seed(self) -> int: ...
    @property
    def matrix_rate(self) -> float: ...
    @property
    def other_rate(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...


def beginner(shape: Shape, recipe: Rates, device: torch.device) -> tuple[CodeModel, Optimiser]:
    """A model that has learned nothing yet, on the device, and what will teach it."""
    torch.manual_seed(recipe.seed)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    model = CodeModel(shape, seed=recipe.seed).to(device)
    optimiser = Optimiser(
        model, matrix_rate=recipe.matrix_rate, other_rate=recipe.other_rate, decay=recipe.weight_decay
    )
    return model, optimiser


def move(batch: NDArray[np.uint16], device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(batch.astype(np.int32))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True).long()
    return tensor.long()


def token_weights(windows: torch.Tensor, answer: float, decision: float) -> torch.Tensor:
    """How much each target (window[:, 1:]) counts: 1, `answer` inside an answer, `decision` for the first
    token of a next edit's. Read from the special tokens alone, which stand nowhere else."""
    tokens = windows[:, :-1]
    place = torch.arange(1, tokens.size(1) + 1, device=tokens.device).expand_as(tokens)

    def last(found: torch.Tensor) -> torch.Tensor:
        return (place * found).cummax(dim=1).values

    asked = (tokens == special.EDIT_AFTER) & (last(tokens == special.FILE_SEP) > last(tokens == special.EDIT))
    inside = last((tokens == special.FIM_MIDDLE) | asked) > last(tokens == special.END)
    weights = torch.where(inside, answer, 1.0)
    return torch.where(asked, decision, weights)


def autocast(device: torch.device) -> AbstractContextManager[Any]:
    """bfloat16 on a GPU; a CPU multiplies what it is given."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def one_step(
    model: CodeModel,
    optimiser: Optimiser,
    batch: torch.Tensor,
    micro_batch: int,
    phase: Phase,
    factor: float,
    step: int,
) -> torch.Tensor:
    """Learn from a batch of windows, `micro_batch` at once; the loss before it, on the device."""
    parts = batch.size(0) // micro_batch
    total = torch.zeros((), device=batch.device)
    for i in range(parts):
        window = batch[i * micro_batch : (i + 1) * micro_batch]
        weights = token_weights(window, phase.answer, phase.decision)
        with autocast(batch.device):
            tokens, targets = window[:, :-1].contiguous(), window[:, 1:].contiguous()
            loss = model.weighted_loss(tokens, targets, weights) / parts
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    optimiser.step(factor, momentum=0.85 + 0.10 * min(1.0, step / 200))
    model.zero_grad(set_to_none=True)
    return total


class Trainer:
    """One run. `train` returns when the clock says so."""

    def __init__(
        self,
        run: Path,
        shape: Shape,
        recipe: Recipe,
        feed: Feed,
        *,
        device: str = "cuda",
        compile_model: bool = True,
        start: Path | None = None,
    ) -> None:
        """`start`: weights (final.pt or stable.pt) to begin from, where the run has no checkpoint yet."""
        self.run, self.shape, self.recipe, self.feed = run, shape, recipe, feed
        run.mkdir(parents=True, exist_ok=True)
        self.device = torch.device(device)
        self.model, self.optimiser = beginner(shape, recipe, self.device)
        self.step = 0
        self.tokens = 0
        if compile_model:
            self.model.compile_parts()
        self._resume(start)
        (run / "shape.json").write_text(shape.to_json() + "\n")
        (run / "recipe.json").write_text(json.dumps(asdict(recipe)) + "\n")

    def _autocast(self) -> AbstractContextManager[Any]:
        return autocast(self.device)

    def train(self, heldout: NDArray[np.uint16] | None = None) -> None:
        recipe = self.recipe
        self.feed.mix = recipe.main.mix
        self.feed.start()
        self._warm_up_compiler()
        clock = Clock(self.run, recipe)
        reported, since, saved = self.tokens, time.time(), time.time()
        while (done := clock.done(self.step)) < 1.0:
            phase = recipe.final if recipe.schedule.decaying(done) else recipe.main
            if phase is not recipe.main and self.feed.mix == recipe.main.mix:
                self.save_weights(self.run / "stable.pt")
            self.feed.mix = phase.mix
            factor = recipe.schedule.factor(done)
            loss = self._one_step(factor, phase)
            if self.step % recipe.report_every == 0:
                value = float(loss)
                now = time.time()
                rate = (self.tokens - reported) / (now - since)
                self._log(
                    step=self.step,
                    tokens=self.tokens,
                    done=round(done, 4),
                    loss=round(value, 4),
                    factor=round(factor, 4),
                    tokens_per_second=round(rate),
                    time=round(now, 1),
                    passes=self.feed.passes,
                    edits=self.feed.edits_drawn,
                    stock=self.feed.available,
                )
                if not np.isfinite(value):
                    raise ModelDamaged(
                        f"the loss is {value} at step {self.step}; start again with a lower learning rate"
                    )
                reported, since = self.tokens, now
            if heldout is not None and self.step % recipe.heldout_every == 0:
                self._log(
                    step=self.step,
                    tokens=self.tokens,
                    heldout=round(self.evaluate(heldout), 4),
                    time=round(time.time(), 1),
                )
            if time.time() - saved > recipe.checkpoint_seconds:
                self.checkpoint()
                saved = time.time()
        self.save_weights(self.run / "final.pt")
        if heldout is not None:
            self._log(
                step=self.step,
                tokens=self.tokens,
                heldout=round(self.evaluate(heldout), 4),
                final=True,
                time=round(time.time(), 1),
            )

    def _warm_up_compiler(self) -> None:
        """Compile before the clock starts: the first step is then as quick as the others."""
        tokens = torch.zeros(
            self.recipe.micro_batch, self.shape.context, dtype=torch.int64, device=self.device
        )
        with self._autocast():
            weights = torch.ones(tokens.shape, device=self.device)
            (self.model.weighted_loss(tokens, tokens, weights) / 2).backward()  # type: ignore[no-untyped-call]
        self.model.zero_grad(set_to_none=True)

    def _one_step(self, factor: float, phase: Phase) -> torch.Tensor:
        batch = move(self.feed.batch(self.recipe.batch), self.device)
        loss = one_step(self.model, self.optimiser, batch, self.recipe.micro_batch, phase, factor, self.step)
        self.step += 1
        self.tokens += batch.size(0) * (batch.size(1) - 1)
        return loss

    def evaluate(self, heldout: NDArray[np.uint16]) -> float:
        """Mean loss over held-out windows."""
        return mean_loss(self.model, heldout, self.device)

    def _log(self, **values: Any) -> None:
        with (self.run / "log.jsonl").open("a") as stream:
            stream.write(json.dumps(values) + "\n")

    def save_weights(self, path: Path) -> None:
        """The weights alone, in bfloat16: what is shipped and what a next run may start from."""
        weights = {name: p.detach().to(torch.bfloat16).cpu() for name, p in self.model.named_parameters()}
        facts = {"shape": self.shape.to_json(), "step": self.step, "tokens": self.tokens}
        learned = EDIT_FORMAT if self.feed.edits_drawn else 0
        _save(path, {**facts, "next_edit": learned, "weights": weights})

    def checkpoint(self) -> None:
        state = {"model": self.model.state_dict(), "optimiser": self.optimiser.state_dict()}
        _save(
            self.run / "checkpoint.pt",
            {"shape": self.shape.to_json(), "step": self.step, "tokens": self.tokens, **state},
        )

    def _resume(self, start: Path | None) -> None:
        path = self.run / "checkpoint.pt"
        if not path.exists():
            if start is not None:
                self.model.load_state_dict(read_state(start, self.shape)["weights"])
            return
        state = read_state(path, self.shape)
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.step, self.tokens = state["step"], state["tokens"]


@torch.no_grad()
def mean_loss(model: CodeModel, heldout: NDArray[np.uint16], device: torch.device) -> float:
    """Of windows that are not trained on, in nats a token."""
    total = 0.0
    for start in range(0, len(heldout), 8):
        window = move(heldout[start : start + 8], device)
        # Not compiled: graphs for another size and without gradients would cost more than they save.
        with autocast(device), torch.compiler.set_stance("force_eager"):
            total += float(model.loss(window[:, :-1], window[:, 1:])) * len(window)
    return total / len(heldout)


def _save(path: Path, state: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def read_state(path: Path, shape: Shape | None = None) -> dict[str, Any]:
    """A checkpoint or weights file. Raises ModelDamaged if it cannot be read or is of another shape
    than `shape`."""
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        found = Shape.from_json(state["shape"])
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist; train a model first or name another file") from error
    except Exception as error:  # torch raises many kinds for a truncated or foreign file
        raise ModelDamaged(
            f"{path} is not a checkpoint of ours or is cut short; delete it or fetch it again"
        ) from error
    if shape is not None and found != shape:
        raise ModelDamaged(
            f"{path} holds a model of another shape ({found}); use its own run folder or delete it"
        )
    return state
