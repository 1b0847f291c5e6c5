"""A draft head on disk: config.json and head.safetensors, as `keystroke train draft-head` writes them.

The whole file is checked before it is used. Matrices are int8 with one float32 scale per row; norms are
float32; `vocabulary` gives the target's token for each row of the output matrix. A head belongs to one
target: call `check_target` before use.

    fuse [hidden, layers x hidden]                     features, lowest first, each normed without a weight
    q_proj, k_proj, v_proj [heads x head_dim, 2 hidden]  columns: the token's embedding, then the stream
    o_proj, gate_proj, up_proj, down_proj, out           as in any layer; out has `vocabulary` rows
    token_norm, hidden_norm, mlp_norm, norm [hidden]
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from keystroke.engine.checkpoint.fields import Fields
from keystroke.engine.checkpoint.safetensors_file import SafetensorsFile
from keystroke.engine.checkpoint.spec import ModelSpec
from keystroke.errors import ModelDamaged, NotFound, UsageError

VERSION = 1
CONFIG, WEIGHTS = "config.json", "head.safetensors"
NORMS = ("token_norm", "hidden_norm", "mlp_norm", "norm")
_DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "I32": np.dtype("<i4"), "I8": np.dtype("i1")}


@dataclass(frozen=True, slots=True)
class HeadConfig:
    target: str  # the model it drafts for, by name
    target_vocabulary: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    layers: tuple[int, ...]  # the numbers of target layers after which features are read
    norm_eps: float

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of every matrix."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "fuse": (self.hidden, len(self.layers) * self.hidden),
            "q_proj": (queries, 2 * self.hidden),
            "k_proj": (keys, 2 * self.hidden),
            "v_proj": (keys, 2 * self.hidden),
            "o_proj": (self.hidden, queries),
            "gate_proj": (self.intermediate, self.hidden),
            "up_proj": (self.intermediate, self.hidden),
            "down_proj": (self.hidden, self.intermediate),
            "out": (self.vocabulary, self.hidden),
        }

    def to_json(self) -> str:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps({"format": "keystroke-draft-head", "version": VERSION, **fields}, indent=1) + "\n"

    def check_target(self, spec: ModelSpec) -> None:
        """Raises UsageError unless the head was made for a model of these sizes."""
        mine = (self.target_vocabulary, self.hidden, self.heads, self.kv_heads, self.head_dim)
        theirs = (spec.vocab_size, spec.hidden, spec.heads, spec.kv_heads, spec.head_dim)
        if mine != theirs or self.layers[-1] > spec.layers:
            raise UsageError(
                f"this draft head was made for {self.target} and cannot draft for {spec.name}: "
                "their sizes differ"
            )


@dataclass(frozen=True)
class HeadWeights:
    config: HeadConfig
    matrices: dict[str, tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]]  # bytes, scales
    norms: dict[str, npt.NDArray[np.float32]]
    vocabulary: npt.NDArray[np.int32]

    def matrix(self, name: str) -> npt.NDArray[np.float32]:
        """One matrix in float32."""
        values, scales = self.matrices[name]
        wide: npt.NDArray[np.float32] = values.astype(np.float32) * scales[:, None]
        return wide


def open_head(folder: Path) -> HeadWeights:
    """Read and check a head. Raises NotFound or ModelDamaged."""
    config = read_config(folder)
    file = SafetensorsFile(folder / WEIGHTS)

    def stored(name: str, kind: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        entry = file.entries.get(name)
        size = int(np.prod(shape)) * _DTYPES[kind].itemsize
        if entry is None or (entry.type, entry.shape, entry.end - entry.start) != (kind, shape, size):
            raise ModelDamaged(
                f"{file.path} has no {name} of the size its config.json states; fetch it again"
            )
        return file.stored_bytes(name).view(_DTYPES[kind]).reshape(shape)

    matrices = {}
    for name, (rows, columns) in config.matrices.items():
        scales = stored(f"{name}.scale", "F32", (rows,))
        if not np.isfinite(scales).all():
            raise ModelDamaged(f"{file.path} has scales of {name} that are no numbers; fetch it again")
        matrices[name] = stored(f"{name}.weight", "I8", (rows, columns)), scales
    norms = {name: stored(f"{name}.weight", "F32", (config.hidden,)) for name in NORMS}
    vocabulary = stored("vocabulary", "I32", (config.vocabulary,))
    if (np.diff(vocabulary) <= 0).any() or vocabulary[0] < 0 or vocabulary[-1] >= config.target_vocabulary:
        raise ModelDamaged(f"{file.path} has a vocabulary that is not the target's; fetch it again")
    return HeadWeights(config, matrices, norms, vocabulary)


def read_config(folder: Path) -> HeadConfig:
    """The configuration of a head. Raises NotFound or ModelDamaged."""
    path = folder / CONFIG
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise NotFound(
            f"{path.parent} holds no draft head; give a folder with {CONFIG} and {WEIGHTS}"
        ) from error
    except (OSError, ValueError) as error:
        raise ModelDamaged(f"{path} cannot be read ({error}); fetch it again") from error
    if not isinstance(found, dict) or found.get("format") != "keystroke-draft-head":
        raise ModelDamaged(f"{path} does not describe a draft head; give another folder")
    if found.get("version") != VERSION:
        raise ModelDamaged(
            f"{path} is of version {found.get('version')}, which this program does not read; update it"
        )
    fields = Fields(found, str(path))
    layers = found.get("layers")
    if not isinstance(layers, list) or not layers or not all(type(n) is int and 0 < n < 4096 for n in layers):
        raise ModelDamaged(f"{path} does not list the layers of its features; fetch it again")
    if layers != sorted(set(layers)):
        raise ModelDamaged(f"{path} names its layers in no order; fetch it again")
    return HeadConfig(
        target=fields.text("target"),
        target_vocabulary=fields.integer("target_vocabulary", 1 << 24),
        hidden=fields.integer("hidden", 1 << 20),
        heads=fields.integer("heads", 4096),
        kv_heads=fields.integer("kv_heads", 4096),
        head_dim=fields.integer("head_dim", 4096),
        intermediate=fields.integer("intermediate", 1 << 22),
        vocabulary=fields.integer("vocabulary", 1 << 24),
        layers=tuple(layers),
        norm_eps=fields.number("norm_eps"),
    )
