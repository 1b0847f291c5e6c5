"""What both pretraining runs share: phases of data, the recipe's common part, one training step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from keystroke.errors import InputError, ModelDamaged
from keystroke_lab.pretraining.documents import Mix
from keystroke_lab.tokenizer import special
from keystroke_lab.training.optimizer import Optimizer
from keystroke_lab.training.run import TrainingRecipe, autocast, load_state
from keystroke_lab.training.schedule import Schedule
from keystroke_lab.training.transformer import CodeModel, Shape


@dataclass(frozen=True, slots=True)
class Phase:
    """A mix of data and the weight of answers in the loss.

    The loss covers all tokens: prompts are code too, and most of what there is to learn. But an answer of ten
    tokens after a prompt of five hundred is what the model is for, and one token decides whether a region is
    edited, so these may weigh more."""

    mix: Mix = field(default_factory=Mix)
    answer: float = 1.0
    decision: float = 1.0


@dataclass(frozen=True, slots=True)
class PretrainingRecipe(TrainingRecipe):
    """Everything that decides what a run learns, besides its data."""

    matrix_rate: float = 0.02
    other_rate: float = 0.003
    weight_decay: float = 0.01
    main: Phase = field(default_factory=Phase)
    final: Phase = field(default_factory=Phase)  # while the rate decays

    @classmethod
    def from_json(cls, text: str, **fixed: Any) -> Self:
        """The recipe that differs from the default in what `text` (a JSON object) and `fixed` say."""
        try:
            given: dict[str, Any] = json.loads(text)
            if "schedule" in given:
                given["schedule"] = Schedule(**given["schedule"])
            for name in ("main", "final"):
                if name in given:
                    given[name] = Phase(**{**given[name], "mix": Mix(**given[name].get("mix", {}))})
            return cls(**{**given, **fixed})
        except (ValueError, TypeError, AttributeError) as error:
            raise InputError(f"this is no recipe ({error}); give what differs as a JSON object") from error


def build_model_and_optimizer(
    shape: Shape, recipe: PretrainingRecipe, device: torch.device
) -> tuple[CodeModel, Optimizer]:
    """A model with its initial weights on the device, and its optimizer."""
    torch.manual_seed(recipe.seed)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    model = CodeModel(shape, seed=recipe.seed).to(device)
    optimizer = Optimizer(
        model, matrix_rate=recipe.matrix_rate, other_rate=recipe.other_rate, decay=recipe.weight_decay
    )
    return model, optimizer


def to_device(batch: NDArray[np.uint16], device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(batch.astype(np.int32))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True).long()
    return tensor.long()


def token_weights(windows: torch.Tensor, answer: float, decision: float) -> torch.Tensor:
    """How much each target (window[:, 1:]) counts: 1, `answer` inside an answer, `decision` for the first
    token of a next edit's answer. Computed from the special tokens alone, which occur nowhere else."""
    tokens = windows[:, :-1]
    position = torch.arange(1, tokens.size(1) + 1, device=tokens.device).expand_as(tokens)

    def last(found: torch.Tensor) -> torch.Tensor:
        return (position * found).cummax(dim=1).values

    decides = (tokens == special.EDIT_AFTER) & (
        last(tokens == special.FILE_SEP) > last(tokens == special.EDIT)
    )
    inside = last((tokens == special.FIM_MIDDLE) | decides) > last(tokens == special.END)
    weights = torch.where(inside, answer, 1.0)
    return torch.where(decides, decision, weights)


def train_on_batch(
    model: CodeModel,
    optimizer: Optimizer,
    batch: torch.Tensor,
    micro_batch: int,
    phase: Phase,
    factor: float,
    step: int,
) -> torch.Tensor:
    """One optimizer step on a batch of windows, `micro_batch` at once. The loss before it, on the device."""
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
    optimizer.step(factor, momentum=0.85 + 0.10 * min(1.0, step / 200))
    model.zero_grad(set_to_none=True)
    return total


@torch.no_grad()
def mean_loss(model: CodeModel, heldout: NDArray[np.uint16], device: torch.device) -> float:
    """The loss on held-out windows, in nats a token."""
    total = 0.0
    for start in range(0, len(heldout), 8):
        window = to_device(heldout[start : start + 8], device)
        # Not compiled: graphs for another size and without gradients would cost more than they save.
        with autocast(device), torch.compiler.set_stance("force_eager"):
            total += float(model.loss(window[:, :-1], window[:, 1:])) * len(window)
    return total / len(heldout)


def read_state(path: Path, shape: Shape | None = None) -> dict[str, Any]:
    """A checkpoint or weights file. Raises ModelDamaged if it cannot be read or has another shape than
    `shape`."""
    damaged = f"{path} is not a checkpoint of ours or is cut short; delete it or fetch it again"
    missing = f"{path} does not exist; train a model first or name another file"
    state = load_state(path, missing, damaged)
    found = _shape_of(state, damaged)
    if shape is not None and found != shape:
        raise ModelDamaged(
            f"{path} holds a model of another shape ({found}); use its own run folder or delete it"
        )
    return state


def _shape_of(state: Mapping[str, Any], damaged: str) -> Shape:
    try:
        return Shape.from_json(state["shape"])
    except (InputError, KeyError, TypeError) as error:
        raise ModelDamaged(damaged) from error
