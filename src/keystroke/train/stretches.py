"""A run in stretches: training on a machine that is lent for minutes at a time.

After every stretch of steps the state is packed and gone on from (`packed_state.settle`), and only there
a run stops; so one that was stopped any number of times learns exactly what one without a stop learns, on a
device whose arithmetic repeats itself. The rate is constant after its warm-up, for as long as anybody likes;
the decay is a second command, `finish`, from wherever the run then is.
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
from keystroke.train import packed_state
from keystroke.train.documents import Mix
from keystroke.train.mixture import EDITS, Plan
from keystroke.train.pretrain import Phase, beginner, mean_loss, move, one_step, read_state
from keystroke.train.rounds import Place, Rounds
from keystroke.train.run_log import tell
from keystroke.train.transformer import CodeModel, Shape

# As the third weights' phases; the shares of edits are the plan's.
MAIN = Phase(Mix(fim=0.4, cursor=0.2, made=0.04, dated=0.35, seam=600), answer=2.0, decision=6.0)
FINAL = Phase(Mix(fim=0.1, cursor=0.6, made=0.06, dated=0.2, seam=250), answer=4.0, decision=8.0)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides what a run learns, besides its data and its stops."""

    batch: int = 131_072  # tokens a step, whatever the length of a window
    micro_batch: int = 65_536  # tokens at once
    window: int = 2048
    final_window: int = 8192  # while the rate decays: the rest of the context is learned at the end
    warmup: int = 100  # steps
    stretch: int = 100  # steps between two places at which a run may stop
    matrix_rate: float = 0.02
    other_rate: float = 0.003
    weight_decay: float = 0.01
    main: Phase = MAIN
    final: Phase = FINAL
    seed: int = 0
    report_every: int = 20

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """The recipe that differs from the default in what `text` (a JSON object) says."""
        try:
            said: dict[str, Any] = json.loads(text)
            for name in ("main", "final"):
                if name in said:
                    said[name] = Phase(**{**said[name], "mix": Mix(**said[name].get("mix", {}))})
            return cls(**said)
        except (ValueError, TypeError, AttributeError) as error:
            raise InputError(f"this is no recipe ({error}); give what differs as a JSON object") from error

    def __post_init__(self) -> None:
        for window in (self.window, self.final_window):
            if self.micro_batch % window or self.batch % self.micro_batch:
                raise InputError(
                    f"a batch of {self.batch} tokens is no whole number of micro-batches of "
                    f"{self.micro_batch}, or those of windows of {window}; choose multiples"
                )
        if self.stretch % self.report_every:
            raise InputError("reports must fall on the end of a stretch; choose a stretch that is a multiple")


@dataclass(slots=True)
class Progress:
    """Where a run is. What a checkpoint holds beside the weights."""

    step: int = 0
    tokens: int = 0
    place: Place = field(default_factory=Place)
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
    def of(cls, facts: Mapping[str, Any]) -> Progress:
        try:
            said = dict(facts["progress"])
            return cls(**{**said, "place": Place(**said["place"])})
        except (KeyError, TypeError, ValueError) as error:
            raise ModelDamaged(
                f"the checkpoint does not say where its run is ({error}); fetch it again"
            ) from error


_STABLE, _DECAYING, _FINISHED = "checkpoint", "decaying", "finished"


class StretchRun:
    """One run in a folder: `checkpoint/` at the constant rate, `decaying/` while it decays, `finished/` when
    that is over, `log.jsonl`. A run that was finished can go on from `checkpoint/` as if it had not been."""

    def __init__(
        self,
        run: Path,
        shape: Shape,
        recipe: Recipe,
        plan: Plan,
        folders: tuple[Path, ...],
        tokenizer: Path,
        *,
        device: str = "cuda",
        workers: int = 12,
        round_pieces: int = 12,  # one for each worker of a lent machine: the first round is there soon
        start: Path | None = None,
        compile_model: bool | None = None,
    ) -> None:
        """Goes on from the run's checkpoint; without one from the weights `start`, or anew."""
        run.mkdir(parents=True, exist_ok=True)
        self.run, self.shape, self.recipe, self.plan = run, shape, recipe, plan
        self.device = torch.device(device)
        self.model, self.optimiser = beginner(shape, recipe, self.device)
        self.progress = Progress()
        self._resume(start)
        if compile_model if compile_model is not None else self.device.type == "cuda":
            self.model.compile_parts()
        self.feed = Rounds(
            plan,
            folders,
            tokenizer,
            workers=workers,
            seed=recipe.seed,
            pieces=round_pieces,
            place=self.progress.place,
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
            packed_state.unpack(state, self.model, self.optimiser)
            self.progress = Progress.of(facts)
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
        """Train until the clock, or `steps` more, says so; a run stops at the end of a stretch only.
        `finish`: then decay over so many steps and end; at once where no time and no steps are given. Leaves
        a checkpoint, or the finished weights."""
        if not seconds and not steps and not finish and self.progress.decay_from < 0:
            raise InputError("say how long to train: seconds, steps, or the steps of a decay to finish with")
        if finish and not seconds and not steps:
            self._decay(finish)
        began = saved = stretched = told = time.monotonic()
        last, reported = self.progress.step + steps if steps else 0, self.progress.tokens
        while not self.progress.finished:
            loss = self._step()
            step = self.progress.step
            if step % self.recipe.report_every == 0:
                now = time.monotonic()
                self._tell(loss, (self.progress.tokens - reported) / max(1e-9, now - told), began)
                reported, told = self.progress.tokens, now
            if step % self.recipe.stretch == 0:
                state = packed_state.settle(self.model, self.optimiser)
                now = time.monotonic()
                another = now + (now - stretched) <= began + seconds  # as long as the last one took
                if (last and step >= last) or (seconds and not another):
                    if not finish or self.progress.decay_from >= 0:
                        break
                    self._checkpoint(state)
                    self._decay(finish)
                    seconds, last = 0.0, 0
                elif now - saved >= checkpoint_seconds:
                    self._checkpoint(state)
                    saved = time.monotonic()
                stretched = time.monotonic()
        self._end(heldout)

    def _decay(self, steps: int) -> None:
        """From here on the rate falls, to zero after `steps` (whole stretches of them)."""
        if self.progress.decay_from < 0:
            self.feed.leave()
            self.progress.decay_from = self.progress.step
            self.progress.decay_steps = -(-steps // self.recipe.stretch) * self.recipe.stretch

    def _step(self) -> torch.Tensor:
        recipe, progress = self.recipe, self.progress
        decaying = progress.decay_from >= 0
        phase = recipe.final if decaying else recipe.main
        window = recipe.final_window if decaying else recipe.window
        self.feed.turn(phase.mix, window + 1)
        batch = move(self.feed.batch(recipe.batch // window), self.device)
        factor = progress.factor(recipe.warmup)
        micro = recipe.micro_batch // window
        loss = one_step(self.model, self.optimiser, batch, micro, phase, factor, progress.step)
        progress.step += 1
        progress.tokens += recipe.batch
        progress.place = self.feed.place
        return loss

    def _tell(self, loss: torch.Tensor, rate: float, began: float) -> None:
        progress = self.progress
        row = {
            "step": progress.step,
            "tokens": progress.tokens,
            "loss": round(float(loss), 5),
            "factor": round(progress.factor(self.recipe.warmup), 4),
            "tokens_per_second": round(rate),
            "seconds": round(time.monotonic() - began, 1),
            "pieces": progress.place.pieces,
        }
        tell(self.run, row)

    def _facts(self) -> dict[str, Any]:
        learned = EDIT_FORMAT if EDITS in self.plan.shares else 0
        return {
            "progress": asdict(self.progress),
            "next_edit": learned,
            "languages": sorted(set(self.plan.shares) - {EDITS}),
        }

    def _checkpoint(self, state: dict[str, packed_state.Packed]) -> None:
        name = _STABLE if self.progress.decay_from < 0 else _DECAYING
        packed_state.write(self.run / name, self.shape, self._facts(), state)

    def _end(self, heldout: Mapping[str, NDArray[np.uint16]] | None) -> None:
        if self.progress.finished:
            state = packed_state.pack(self.model, None)
            packed_state.write(self.run / _FINISHED, self.shape, self._facts(), state)
            shutil.rmtree(self.run / _DECAYING, ignore_errors=True)
        else:
            self._checkpoint(packed_state.pack(self.model, self.optimiser))
        for language, windows in (heldout or {}).items():
            value = mean_loss(self.model, windows, self.device)
            row = {"step": self.progress.step, "tokens": self.progress.tokens, "language": language}
            tell(self.run, {**row, "loss": round(value, 4), "heldout": True})

    def close(self) -> None:
        self.feed.close()


def to_weights(folder: Path, out: Path) -> None:
    """Packed weights (`finished/` or `checkpoint/`) as the file that `export` and `--start` read."""
    shape, facts, state = packed_state.read(folder)
    model = CodeModel(shape)
    packed_state.unpack(state, model, None)
    progress = Progress.of(facts)
    weights = {name: p.detach().to(torch.bfloat16) for name, p in model.named_parameters()}
    said = {"shape": shape.to_json(), "step": progress.step, "tokens": progress.tokens}
    said |= {"next_edit": facts.get("next_edit", 0), "languages": facts.get("languages", [])}
    torch.save({**said, "weights": weights}, out)
