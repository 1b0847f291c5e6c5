"""From a run's weights to the folder that is shipped: 8 bits a weight, one scale a row.

Writes what `engine/speculative/head_file.py` reads, and nothing it does not read. A folder appears
whole: the config, without which it is no head, is written last.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import Tensor

from keystroke.engine.checkpoint.spec import ModelSpec
from keystroke.engine.speculative.head_file import CONFIG, NORMS, WEIGHTS, HeadConfig
from keystroke_lab.draft_heads.shape import HeadShape
from keystroke_lab.draft_heads.training import read_head


def rowwise(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes in -127 ... 127 and a scale for each row."""
    wide = matrix.float()
    scale = wide.abs().amax(-1).clamp(min=1e-30) / 127
    return (wide / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def export_head(weights: Path, spec: ModelSpec, out: Path, *, target: str = "") -> int:
    """Write the head that `weights` (final.pt of a run) holds for the target `spec`; the size of its file in
    bytes. Raises InputError, ModelDamaged, or UsageError where the head is another target's."""
    state = read_head(weights)
    shape = HeadShape.from_json(state["shape"])
    config = HeadConfig(
        target=target or spec.name,
        target_vocabulary=spec.vocab_size,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate=shape.intermediate,
        vocabulary=shape.vocabulary,
        layers=shape.layers,
        norm_eps=shape.norm_eps,
    )
    config.check_target(spec)
    tensors: dict[str, Any] = {"vocabulary": state["vocabulary"].numpy().astype(np.int32)}
    for name in config.matrices:
        values, scale = rowwise(state["weights"][f"{name}.weight"])
        tensors[f"{name}.weight"], tensors[f"{name}.scale"] = values.numpy(), scale.numpy()
    for name in NORMS:
        tensors[f"{name}.weight"] = state["weights"][f"{name}.weight"].float().numpy()
    out.mkdir(parents=True, exist_ok=True)
    partial = out / f"{WEIGHTS}.partial"
    save_file(tensors, partial)
    os.replace(partial, out / WEIGHTS)
    (out / CONFIG).write_text(config.to_json(), encoding="utf-8")
    sums = [f"{hashlib.sha256((out / n).read_bytes()).hexdigest()}  {n}\n" for n in (CONFIG, WEIGHTS)]
    (out / "SHA256SUMS").write_text("".join(sums))
    return (out / WEIGHTS).stat().st_size
