"""A draft head on the GPU: its weights, its KV cache and its launches (structures of kernels/draft.cuh).

Entry t of its KV belongs to token t and the feature of the token before, and uses the same page numbers as
the target's KV. Missing or stale entries only make drafts worse.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from keystroke.engine.base import Guess
from keystroke.engine.checkpoint.spec import ModelSpec
from keystroke.engine.cuda.packing import gate_up_order, pack, plain_order, qkv_order
from keystroke.engine.cuda.plan import MAX_ROWS, PAD, PAGE, TAIL_BYTES, Matrix, Plan
from keystroke.engine.cuda.reference import rotate
from keystroke.engine.cuda.step import Launch, Launcher, Parameters, Stepper, wait_for
from keystroke.engine.cuda.target import HOPPER, Target
from keystroke.engine.cuda.weights import Weights
from keystroke.engine.speculative.head_file import NORMS, HeadConfig, HeadWeights
from keystroke.errors import UsageError

MOST_DRAFTED = 8
MOST_FEATURES = 4
WINDOW = 32 * PAGE  # most recent tokens that the head attends to
_ROWS = 8  # of one launch
_MATRICES = ("fuse", "pair", "output", "gate_up", "down", "out")
_BUFFERS = ("stream", "queries", "partial", "partial_norm", "middle", "activated", "result", "logits")
_RESULT_WORDS = 2 + 2 * MOST_DRAFTED


class DraftParameters(ctypes.Structure):
    _fields_ = [
        ("base", Parameters),
        *((name, ctypes.c_void_p) for name in _MATRICES),
        *((name, ctypes.c_void_p) for name in ("norms", "vocabulary", "keys", "values", *_BUFFERS)),
        *((name, ctypes.c_void_p) for name in ("best_score", "best", "drafted")),
        *((name, ctypes.c_int) for name in ("ticket", "depth", "context")),
        ("least", ctypes.c_float),
    ]


@dataclass(frozen=True)
class HeadPlan:
    """The plan of a head: that of a model with one int8 layer and unsplit matrices."""

    config: HeadConfig
    target: Plan

    def __post_init__(self) -> None:
        self.config.check_target(self.target.spec)
        layers, most = self.config.layers, self.target.spec.layers
        if len(layers) > MOST_FEATURES or layers[-1] >= most:
            raise UsageError(
                f"this draft head reads layers {layers} of {self.config.target}; the CUDA engine gives at "
                f"most {MOST_FEATURES}, all before the last"
            )
        if self.stages < 3:
            raise UsageError(f"the draft head for {self.config.target} is too wide for the CUDA engine")

    @cached_property
    def layer(self) -> Plan:
        config = self.config
        spec = replace(
            self.target.spec,
            layers=1,
            vocab_size=config.vocabulary,
            intermediate=config.intermediate,
            norm_eps=config.norm_eps,
            qkv_bias=False,
            qk_norm=False,
            o_bias=False,
            mlp_bias=False,
        )
        return Plan(spec, "int8", self.target.blocks, target=self.target.target)

    @property
    def matrices(self) -> dict[str, Matrix]:
        c = self.config
        width = (c.heads + 2 * c.kv_heads) * c.head_dim
        return {
            "fuse": Matrix(c.hidden // 16, 1, len(c.layers) * c.hidden, 1),
            "pair": Matrix(width // 16, 1, 2 * c.hidden, 1),
            "output": Matrix(c.hidden // 16, 1, c.heads * c.head_dim, 1),
            "gate_up": Matrix(c.intermediate // 8, 1, c.hidden, 1),
            "down": Matrix(c.hidden // 16, 1, c.intermediate, 1),
            "out": Matrix(-(-c.vocabulary // 16), 1, c.hidden, 1),
        }

    @property
    def stage_bytes(self) -> int:
        """Of the ring: a whole unit of the output matrix, and at least a page of keys."""
        page = PAGE * self.config.head_dim * 2 + TAIL_BYTES
        return max(-(-self.matrices["out"].unit_bytes // 128) * 128, page)

    @property
    def x_stride(self) -> int:
        c = self.config
        wide = max(len(c.layers) * c.hidden, 2 * c.hidden, c.heads * c.head_dim)
        return max(wide, -(-c.intermediate // (8 * _ROWS)) * 8) + PAD

    @property
    def ring_offset(self) -> int:
        return -(-(self.layer.operand_offset(_ROWS) + _ROWS * self.x_stride * 2) // 128) * 128

    @property
    def stages(self) -> int:
        return min(16, (self.target.target.shared_bytes - self.ring_offset) // self.stage_bytes)

    @property
    def macros(self) -> dict[str, str]:
        unsplit = {"O_SPLIT": "1", "O_ALONE": "0", "DOWN_SPLIT": "1"}
        sizes = {"STAGE_BYTES": str(self.stage_bytes), "FEATURES": str(len(self.config.layers))}
        return {**self.layer.macros(1), **unsplit, **sizes}


def has_room(config: HeadConfig, spec: ModelSpec, blocks: int, target: Target) -> bool:
    """Whether shared memory holds this head's rows and those of its drafts. Hopper's always does."""
    if target.shared_bytes >= HOPPER.shared_bytes:
        return True
    plan = Plan(spec, "bf16", blocks, target=target)
    try:
        return plan.max_rows >= _ROWS and HeadPlan(config, plan).stages > 0
    except UsageError:
        return False


def head_bytes_per_token(config: HeadConfig) -> int:
    """Of the head's KV."""
    return config.kv_heads * config.head_dim * 2 * 2


class DraftLauncher(Protocol):
    def launch(self, parameters: DraftParameters) -> None:
        """Start drafting."""


class DraftingLauncher(Launcher, Protocol):
    """A launcher of steps and of drafts."""

    def draft_launcher(self, plan: HeadPlan) -> DraftLauncher: ...


class DraftHead:
    """A head and its target. `read` processes a prompt's features, `start` drafts behind a step."""

    def __init__(
        self, head: HeadWeights, weights: Weights, stepper: Stepper, pages: int, host: DraftingLauncher
    ) -> None:
        """Raises UsageError for a head of another target."""
        config = self.config = head.config
        self.plan = HeadPlan(config, weights.plan)
        device = weights.embedding.device
        self._weights, self._stepper, self._host = weights, stepper, host
        self._launcher = host.draft_launcher(self.plan)
        self._packed = self._pack(head, device)
        norms = np.stack([head.norms[name] for name in NORMS])
        self._norms = torch.from_numpy(norms.astype(np.float32)).to(device)
        vocabulary = torch.from_numpy(head.vocabulary.astype(np.int32)).to(device)
        shape = (pages, config.kv_heads, PAGE, config.head_dim)
        self.keys = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        self.values = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        self.features = torch.zeros(
            MAX_ROWS, len(config.layers), config.hidden, dtype=torch.float16, device=device
        )
        width, chunks = config.heads * config.head_dim, WINDOW // PAGE

        def floats(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        self.logits = floats(-(-config.vocabulary // 16) * 16)
        self._buffers = {
            **self._packed,
            "norms": self._norms,
            "vocabulary": vocabulary,
            "keys": self.keys,
            "values": self.values,
            "stream": floats(_ROWS, config.hidden),
            "queries": floats(width),
            "partial": torch.zeros(chunks, width, dtype=torch.bfloat16, device=device),
            "partial_norm": floats(chunks, config.heads, 2),
            "middle": floats(config.hidden),
            "activated": torch.zeros(config.intermediate, dtype=torch.float16, device=device),
            "result": floats(config.hidden),
            "logits": self.logits,
            "best_score": torch.zeros(self.plan.target.blocks, dtype=torch.float64, device=device),
            "best": floats(self.plan.target.blocks, 4),
        }
        self._barrier = torch.zeros(64, dtype=torch.int32, device=device)
        self._results = host.host_buffer(8 * _RESULT_WORDS).view(8, _RESULT_WORDS)
        self._read: list[npt.NDArray[np.int32]] = list(self._results.numpy())
        stepper.export_features(self.features, config.layers)
        p = self._parameters = DraftParameters(base=stepper.shared_parameters())
        for name, tensor in self._buffers.items():
            setattr(p, name, tensor.data_ptr())
        p.base.barrier = self._barrier.data_ptr()
        p.base.x_stride, p.base.stages = self.plan.x_stride, self.plan.stages
        p.base.ring_offset, p.base.in_flight = self.plan.ring_offset, 2 * self.plan.stage_bytes
        p.context = weights.plan.spec.context_length
        # For prompts: the same weights, dequantised.
        self._fuse = self._dense(head, "fuse")
        self._pair = torch.cat((self._dense(head, "k_proj"), self._dense(head, "v_proj")))
        self._ticket = 0

    @property
    def feature_windows(self) -> dict[int, int]:
        """The layers whose residual stream `read` needs, and of how many tokens."""
        return dict.fromkeys(self.config.layers, WINDOW)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self._buffers.values(), self._fuse, self._pair))

    def start(self, launch: Launch, depth: int, least: float) -> int:
        """Behind the step `launch` of one sequence: process its verified rows and draft at most `depth`
        tokens, until the whole draft is less likely than `least`. Returns a ticket for `finish`."""
        p = self._parameters
        self._ticket += 1
        p.base.control, p.base.next = self._stepper.controls_of(launch)
        p.drafted = self._results[self._ticket % 8].data_ptr()
        p.ticket, p.depth, p.least = self._ticket, min(depth, MOST_DRAFTED), least
        self._launcher.launch(p)
        return self._ticket

    def finish(self, ticket: int) -> Guess:
        """Wait for a draft; it is empty if its step was cancelled."""
        words = self._read[ticket % 8]
        wait_for(words, ticket, self._host)
        count = int(words[1])
        tokens, chances = words[2 : 2 + count], words[2 + MOST_DRAFTED : 2 + MOST_DRAFTED + count]
        return Guess(tuple(tokens.tolist()), tuple(chances.view(np.float32).tolist()))

    def copy_page(self, old: int, new: int) -> None:
        self.keys[new] = self.keys[old]
        self.values[new] = self.values[old]

    @torch.inference_mode()
    def read(
        self, features: Sequence[Tensor], tokens: Sequence[int], start: int, pages: Sequence[int]
    ) -> None:
        """Compute the head's KV of n prompt tokens from start + 1 on, from the residual stream before each of
        its layers at the positions one before them [n or at most WINDOW, hidden]."""
        c, weights = self.config, self._weights
        count = min(len(tokens), WINDOW)
        if not count:
            return
        kind, device = self._fuse.dtype, self._fuse.device
        even = [F.rms_norm(x[-count:].float(), (c.hidden,), None, c.norm_eps) for x in features]
        stream = F.linear(torch.cat(even, -1).to(kind), self._fuse).float()
        embedded = weights.embedding[torch.tensor(tokens[-count:], device=device)].float()
        both = [
            F.rms_norm(x, (c.hidden,), self._norms[NORMS.index(name)], c.norm_eps)
            for x, name in ((embedded, "token_norm"), (stream, "hidden_norm"))
        ]
        pair = F.linear(torch.cat(both, -1).to(kind), self._pair).float()
        pair = pair.view(count, 2, c.kv_heads, c.head_dim)
        first = start + len(tokens) - count
        angles = weights.rope[first : first + count]
        keys = rotate(pair[:, 0], angles[..., 0], angles[..., 1])
        at = torch.arange(first + 1, first + 1 + count, device=device)
        page = torch.tensor(pages[: (first + count) // PAGE + 1], device=device)[at // PAGE]
        self.keys[page, :, at % PAGE] = keys.to(torch.bfloat16)
        self.values[page, :, at % PAGE] = pair[:, 1].to(torch.bfloat16)

    def _dense(self, head: HeadWeights, name: str) -> Tensor:
        kind = torch.float16 if self.keys.is_cuda else torch.float32
        return torch.from_numpy(head.matrix(name)).to(self.keys.device, kind)

    def _pack(self, head: HeadWeights, device: torch.device) -> dict[str, Tensor]:
        c = self.config
        parts = {
            "fuse": (("fuse",), plain_order(c.hidden)),
            "pair": (("q_proj", "k_proj", "v_proj"), qkv_order(c.heads, c.kv_heads, c.head_dim)),
            "output": (("o_proj",), plain_order(c.hidden)),
            "gate_up": (("gate_proj", "up_proj"), gate_up_order(c.intermediate)),
            "down": (("down_proj",), plain_order(c.hidden)),
            "out": (("out",), plain_order(c.vocabulary)),
        }
        found = {}
        for name, matrix in self.plan.matrices.items():
            names, order = parts[name]
            rows = torch.cat([torch.from_numpy(head.matrix(part)).to(device) for part in names])
            found[name] = pack(rows, None, order, matrix)
        return found
