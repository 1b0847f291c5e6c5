"""A compact checkpoint: weights, optimizer and counters in few bytes, in files with checksums.

Packing is lossy, so training continues from the packed state (`settle`): a run that stopped and one that did
not are then equal to the bit. Weights keep 16 bits and a scale for every 64 of them, which is finer than
bfloat16; momentum keeps 4 bits, squares their logarithm in 8. A damaged or missing file is named.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keystroke.errors import InputError, ModelDamaged
from keystroke_lab.training.optimizer import Optimizer
from keystroke_lab.training.transformer import CodeModel, Shape

BLOCK = 64
PIECE = 16_000_000  # bytes
FACTS = "state.json"
Packed = dict[str, Tensor]


def _blocks(values: Tensor) -> Tensor:
    return values.float().reshape(-1, BLOCK)


def pack16(values: Tensor) -> Packed:
    """16 bits a value beside a scale for each block."""
    blocks = _blocks(values)
    scale = blocks.abs().amax(1, keepdim=True) / 32767
    codes = (blocks / scale.clamp_min(1e-30)).round().to(torch.int16)
    return {"codes": codes, "scale": scale}


def unpack16(packed: Packed, like: Tensor) -> Tensor:
    return (packed["codes"].float() * packed["scale"]).reshape(like.shape)


def pack4(values: Tensor) -> Packed:
    """4 bits a value, two in a byte, beside a scale for each block."""
    blocks = _blocks(values)
    scale = blocks.abs().amax(1, keepdim=True) / 7
    codes = ((blocks / scale.clamp_min(1e-30)).round() + 8).to(torch.uint8)
    return {"codes": codes[:, ::2] | (codes[:, 1::2] << 4), "scale": scale}


def unpack4(packed: Packed, like: Tensor) -> Tensor:
    pairs = packed["codes"]
    codes = torch.stack((pairs & 15, pairs >> 4), dim=-1).reshape(len(pairs), BLOCK)
    return ((codes.float() - 8) * packed["scale"]).reshape(like.shape)


def pack_squares(values: Tensor) -> Packed:
    """The logarithm of values that are not negative, in 255 levels; level 0 is zero itself."""
    values = values.float()
    logs = values.clamp_min(1e-38).log2()
    some = values > 1e-38
    low = torch.where(some, logs, torch.inf).amin()
    high = torch.where(some, logs, -torch.inf).amax()
    step = ((high - low) / 254).clamp_min(1e-6)
    codes = torch.where(some, ((logs - low) / step).round().clamp(0, 254) + 1, 0).to(torch.uint8)
    return {"codes": codes, "low": low, "step": step}


def unpack_squares(packed: Packed, like: Tensor) -> Tensor:
    codes = packed["codes"].float()
    found = torch.exp2(packed["low"] + (codes - 1) * packed["step"])
    return torch.where(codes > 0, found, 0.0).reshape(like.shape)


def pack(model: CodeModel, optimiser: Optimizer | None) -> dict[str, Packed]:
    """Everything training continues from; without an optimizer the weights alone."""
    state: dict[str, Packed] = {}
    for name, parameter in model.named_parameters():
        values = parameter.detach()
        state[f"w {name}"] = pack16(values) if values.ndim > 1 else {"values": values.float().clone()}
    if optimiser is None:
        return state
    for i, velocity in enumerate(optimiser.muon.velocity):
        state[f"v {i}"] = pack4(velocity)
    for i, parameter in enumerate(optimiser.adam.param_groups[0]["params"]):
        held = optimiser.adam.state.get(parameter)
        if not held:  # no step was taken
            continue
        if parameter.ndim > 1:
            state[f"a {i}"] = pack4(held["exp_avg"])
            state[f"s {i}"] = pack_squares(held["exp_avg_sq"])
        else:
            state[f"a {i}"] = {"values": held["exp_avg"].clone()}
            state[f"s {i}"] = {"values": held["exp_avg_sq"].clone()}
        state[f"n {i}"] = {"values": held["step"].float().reshape(1).clone()}
    return state


@torch.no_grad()
def unpack(state: dict[str, Packed], model: CodeModel, optimiser: Optimizer | None) -> None:
    """Put packed values into a model and an optimiser of the same shape."""
    device = model.model.embed_tokens.weight.device

    def held(key: str) -> Packed:
        return {name: tensor.to(device) for name, tensor in state[key].items()}

    for name, parameter in model.named_parameters():
        packed = held(f"w {name}")
        parameter.copy_(unpack16(packed, parameter) if parameter.ndim > 1 else packed["values"])
    if optimiser is None:
        return
    for i, velocity in enumerate(optimiser.muon.velocity):
        velocity.copy_(unpack4(held(f"v {i}"), velocity))
    for i, parameter in enumerate(optimiser.adam.param_groups[0]["params"]):
        if f"a {i}" not in state:
            continue
        first, second = held(f"a {i}"), held(f"s {i}")
        matrix = parameter.ndim > 1
        values = {
            "exp_avg": unpack4(first, parameter) if matrix else first["values"],
            "exp_avg_sq": unpack_squares(second, parameter) if matrix else second["values"],
        }
        mine = optimiser.adam.state[parameter]
        if not mine:
            step = state[f"n {i}"]["values"][0].clone()
            mine.update({"step": step.to(device) if parameter.is_cuda else step.cpu()})
            mine.update({name: torch.zeros_like(parameter, dtype=torch.float32) for name in values})
        for name, value in values.items():
            mine[name].copy_(value)


def settle(model: CodeModel, optimiser: Optimizer) -> dict[str, Packed]:
    """Pack the state and load what was packed."""
    state = pack(model, optimiser)
    unpack(state, model, optimiser)
    return state


def write(folder: Path, shape: Shape, facts: dict[str, Any], state: dict[str, Packed]) -> int:
    """Write pieces and their checksums; the size in bytes. The folder that was there stays until all is."""
    stream = io.BytesIO()
    torch.save({key: {n: t.cpu() for n, t in packed.items()} for key, packed in state.items()}, stream)
    data = stream.getbuffer()
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    rows = []
    for number, start in enumerate(range(0, len(data), PIECE)):
        part = data[start : start + PIECE]
        name = f"state-{number:03d}.bin"
        (partial / name).write_bytes(part)
        rows.append({"name": name, "bytes": len(part), "sha256": hashlib.sha256(part).hexdigest()})
    said = {**facts, "shape": shape.to_json(), "pieces": rows}
    (partial / FACTS).write_text(json.dumps(said, indent=1) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)
    return len(data)


def read(folder: Path) -> tuple[Shape, dict[str, Any], dict[str, Packed]]:
    """Shape, facts and state. Raises InputError without a checkpoint, ModelDamaged where a piece is not what
    was written."""
    try:
        facts: dict[str, Any] = json.loads((folder / FACTS).read_text())
        rows, shape = facts["pieces"], Shape.from_json(facts["shape"])
    except OSError as error:
        raise InputError(
            f"{folder} holds no checkpoint ({error}); name the folder that a run wrote"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ModelDamaged(f"{folder / FACTS} cannot be read ({error}); fetch it again") from error
    parts = []
    for row in rows:
        path = folder / row["name"]
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ModelDamaged(f"{path} is missing ({error}); fetch it again") from error
        if len(data) != row["bytes"] or hashlib.sha256(data).hexdigest() != row["sha256"]:
            raise ModelDamaged(f"{path} is damaged: its checksum differs; fetch it again")
        parts.append(data)
    state = torch.load(io.BytesIO(b"".join(parts)), map_location="cpu", weights_only=True)
    return shape, facts, state
