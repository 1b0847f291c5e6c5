"""One step of the decode kernel: its buffers, its arguments, its results.

Mirrors the structures of kernels/layout.cuh. A `Launcher` runs the kernel: a GPU, or the tests' emulator.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from keystroke.engine.base import AllowedTokens, Sampling
from keystroke.engine.cuda.plan import (
    BF16,
    CHUNK,
    CONTROL_WORDS,
    EARLY_SCORES,
    FILTER_BINS,
    MAX_ROWS,
    NEAR,
    PAGE,
    Bucket,
    Plan,
    StepShape,
    all_experts,
    used_experts,
)
from keystroke.engine.cuda.weights import HostExperts, Weights
from keystroke.engine.host_experts import ExpertServer, mail_words
from keystroke.errors import EngineError

# The fields of Parameters (kernels/layout.cuh), in their order.
_WEIGHTS = ("layers", "head", "embedding", "norms", "qk_norms", "rope")
_CACHE = ("tables", "keys", "values", "value_steps")
_ROWS = ("residual", "normed", "raw", "queries", "sent", "partial", "partial_norm", "attended")
_ROWS_TAGGED = ("attended_tagged", "activated", "tagged")
_CHOICE = ("logits", "best_value", "best_token", "best_score", "barrier")
_SPARSE = ("bounds", "chunk_bounds", "omitted", "doubt", "histogram")
_HOST = ("control", "next", "result", "stop", "masks", "masks_ready")
_EXPERTS = ("routers", "router_biases", "expert_scores", "sinks", "window_rope", "profile")
_DELTA_WEIGHTS = ("delta_heads", "convolutions", "delta_decays", "delta_biases", "delta_norms")
_HYBRID = ("gates", *_DELTA_WEIGHTS, "states", "logs", "delta_results", "delta_sent")
_HOST_EXPERTS = ("placement", "uses", "mail", "mail_rows", "mail_sums")
_EARLY = ("early_before", "early_behind", "early_scales", "early_scores", "early_rows", "early_norms")
_POINTERS = (*_WEIGHTS, *_CACHE, *_ROWS, *_ROWS_TAGGED, *_CHOICE, *_SPARSE, *_HOST, *_EXPERTS)
_STRIDES = ("table_stride", "partial_stride", "x_stride", "stages", "ring_offset", "in_flight")
_NUMBERS = (*_STRIDES, "direct_rows", "fused_rows")
_RESULT_WORDS = 2 + 3 * MAX_ROWS
_SLOTS = 8  # of control and result words; at most two launches run at once
_STOPPED = -1
_POLLS_BETWEEN_CHECKS = 20_000  # some tens of milliseconds


class Parameters(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("kv_layer_stride", ctypes.c_int64),
        ("bound_layer_stride", ctypes.c_int64),
        *((name, ctypes.c_int) for name in _NUMBERS),
        ("most_omitted", ctypes.c_float),
        ("features", ctypes.c_void_p),
        ("feature_count", ctypes.c_int),
        ("feature_layers", ctypes.c_int * 4),
        *((name, ctypes.c_void_p) for name in _HYBRID),
        ("state_slots", ctypes.c_int),
        ("second_states", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in _HOST_EXPERTS),
        ("resident", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in _EARLY),
    ]


class Launcher(Protocol):
    blocks: int
    asynchronous: bool  # whether a launch returns before its step ends

    def launch(self, parameters: Parameters, bucket: Bucket, sparse: bool, shape: StepShape) -> None:
        """Start one step with the kernel for this shape, or one for more."""

    def check(self) -> None:
        """Raise EngineError if the device has failed."""

    def host_buffer(self, words: int) -> Tensor:
        """int32 zeros in memory that host and device share."""


@dataclass(frozen=True)
class SequenceRows:
    """One sequence's part of a step: its tokens from `position` on, of which `pending` are given and the rest
    drafted. `allowed`: what may be chosen after the given tokens and after each drafted one."""

    table: int
    tokens: Sequence[int]
    position: int
    pending: int
    sampling: Sampling
    budget: int = 0  # chunks of keys each row attends to; 0: all
    allowed: AllowedTokens | None = None
    state: int = 0  # of a hybrid model: which recurrent state,
    replay: int = 0  # and how many of the last step's rows it has yet to read


@dataclass(frozen=True)
class StepOutcome:
    """The token chosen after each row, how many draft tokens of each sequence were accepted, and for which
    sequences sparse attention may have omitted too much."""

    chosen: tuple[int, ...]
    accepted: tuple[int, ...]
    doubtful: tuple[bool, ...] = ()


@dataclass(frozen=True)
class Launch:
    ticket: int
    slot: int
    rows: int
    sequences: int
    sparse: bool
    reach: int  # no row has a later position


class _Control:
    """The arrays of one launch's Control (kernels/layout.cuh)."""

    def __init__(self, words: npt.NDArray[np.int32]) -> None:
        self.head = words[:7]
        (
            self.token,
            self.position,
            self.owner,
            self.first,
            self.count,
            self.pending,
            self.table,
            inverse,
            floor,
            low,
            high,
            self.top_k,
            top_p,
            self.budget,
            self.state,
            self.replay,
        ) = words[7:].reshape(16, MAX_ROWS)
        self.inverse, self.floor, self.top_p = (a.view(np.float32) for a in (inverse, floor, top_p))
        self.low, self.high = low.view(np.uint32), high.view(np.uint32)


def wait_for(words: npt.NDArray[np.int32], ticket: int, launcher: Launcher) -> None:
    """Poll until the device has written `ticket`. Yields instead of sleeping: other threads get Python's
    lock, and a sleep would wake too late."""
    polls = 0
    while words[0] != ticket:
        os.sched_yield()
        polls += 1
        if polls % _POLLS_BETWEEN_CHECKS == 0:
            launcher.check()


class Stepper:
    """Owns the kernel's buffers. `start` launches a step, `launch_next` the step after it, whose input is on
    the device; `finish` waits for a result."""

    def __init__(
        self,
        weights: Weights,
        keys: Tensor,
        values: Tensor,
        tables: Tensor,
        launcher: Launcher,
        bounds: Tensor | None = None,
        recurrent: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """`recurrent`: the states and logs of a hybrid model; states beyond the number of logs are the second
        ones of the first sequences."""
        self.plan: Plan = weights.plan
        self._launcher = launcher
        spec, device = self.plan.spec, weights.layers.device
        rows, blocks = self.plan.max_rows, launcher.blocks
        chunks = NEAR // PAGE + max(0, -(-(spec.context_length - NEAR) // CHUNK)) + 1
        chunks = -(-chunks // 4) * 4  # even: bounds are read and written two at a time
        width = spec.heads * spec.head_dim

        def floats(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        def halves(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int16, device=device)

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.logits = floats(rows, spec.vocab_size)
        self._buffers = {
            "layers": weights.layers,
            "head": weights.head,
            "embedding": weights.embedding,
            "norms": weights.norms,
            "qk_norms": weights.kernel_norms,
            "rope": weights.rope,
            "tables": tables,
            "keys": keys,
            "values": values,
            "value_steps": floats(1) if weights.kv_steps is None else weights.kv_steps.values,
            "residual": torch.zeros(rows, spec.hidden, dtype=torch.int64, device=device),
            "normed": halves(rows, spec.hidden),
            "raw": floats(rows, width + 2 * spec.kv_heads * spec.head_dim),
            "queries": halves(rows, width),
            "sent": integers(rows, width + 2 * spec.kv_heads * spec.head_dim),
            "partial": floats(rows * spec.heads * chunks, spec.head_dim),
            "partial_norm": floats(rows * spec.heads * chunks, 2),
            "attended": halves(rows, width),
            "attended_tagged": integers(rows, width),
            "activated": halves(rows, self.plan.inner_width),
            "tagged": integers(rows, self.plan.inner_width),
            "routers": weights.routers,
            "router_biases": weights.router_biases,
            "sinks": weights.sinks,
            "window_rope": weights.window_rope,
            "expert_scores": floats(MAX_ROWS, all_experts(spec.experts) if spec.experts else 1),
            "logits": self.logits,
            "best_value": floats(blocks, MAX_ROWS),
            "best_token": integers(2 * blocks, MAX_ROWS),
            "best_score": torch.zeros(blocks, MAX_ROWS, dtype=torch.float64, device=device),
            "barrier": integers(64),
            "chunk_bounds": floats(rows * spec.heads, 1 if bounds is None else chunks),
            "omitted": floats(rows, spec.heads),
            "doubt": integers(MAX_ROWS),
            "histogram": torch.zeros(
                FILTER_BINS[0], MAX_ROWS, FILTER_BINS[1], dtype=torch.int64, device=device
            ),
        }
        delta_width = 0 if spec.delta is None else spec.delta.values
        if spec.gated_attention or delta_width:
            self._buffers["gates"] = floats(rows, max(width, delta_width))
        if spec.delta is not None and weights.delta is not None and recurrent is not None:
            self._buffers |= {
                "delta_heads": weights.delta.heads,
                "convolutions": weights.delta.convolutions,
                "delta_decays": weights.delta.decays,
                "delta_biases": weights.delta.biases,
                "delta_norms": weights.delta.norms,
                "states": recurrent[0],
                "logs": recurrent[1],
                "delta_results": floats(rows, delta_width),
                "delta_sent": integers(spec.delta.channels + delta_width + 2 * spec.delta.value_heads),
            }
        if (early := self.plan.early_scores) is not None:
            self._buffers |= {
                "early_before": weights.early.before,
                "early_behind": weights.early.behind,
                "early_scales": weights.early.scales,
                "early_scores": floats(MAX_ROWS, self.plan.output.split, early.groups * EARLY_SCORES),
                "early_rows": halves(rows, spec.hidden),
                "early_norms": floats(2, MAX_ROWS, 2),
            }
        self.experts: ExpertServer | None = None
        if weights.host is not None:
            self.experts = self._serve_experts(weights.host, launcher)
        # Looked up once: indexing a tensor costs as much as a launch.
        self._controls = integers(_SLOTS, CONTROL_WORDS)
        self._staging = launcher.host_buffer(_SLOTS * CONTROL_WORDS).view(_SLOTS, CONTROL_WORDS)
        self._results = launcher.host_buffer(_SLOTS * _RESULT_WORDS).view(_SLOTS, _RESULT_WORDS)
        self._uploads = list(zip(self._controls, self._staging, strict=True))
        self._control_at = [control.data_ptr() for control in self._controls]
        self._result_at = [result.data_ptr() for result in self._results]
        self._staged = [_Control(words) for words in self._staging.numpy()]
        self._read: list[npt.NDArray[np.int32]] = list(self._results.numpy())
        self._stop = launcher.host_buffer(16)
        self._stop_words: npt.NDArray[np.int32] = self._stop.numpy()
        words = -(-spec.vocab_size // 32)
        self._masks_at = launcher.host_buffer(MAX_ROWS * words)
        self._masks: npt.NDArray[np.uint32] = self._masks_at.numpy().view(np.uint32).reshape(MAX_ROWS, words)
        self._ready = launcher.host_buffer(16)
        self._ready_words: npt.NDArray[np.int32] = self._ready.numpy()
        self._parameters = Parameters()
        for name, tensor in self._buffers.items():
            setattr(self._parameters, name, tensor.data_ptr())
        if self.experts is not None:
            self._parameters.resident = self.plan.expert_slots
        if recurrent is not None:
            slots = len(recurrent[1])
            self._parameters.state_slots = slots
            self._parameters.second_states = len(recurrent[0]) - slots
        self._parameters.stop = self._stop.data_ptr()
        self._parameters.masks = self._masks_at.data_ptr()
        self._parameters.masks_ready = self._ready.data_ptr()
        self._parameters.kv_layer_stride = keys.stride(0)
        if bounds is not None:
            self._buffers["bounds"] = bounds
            self._parameters.bounds = bounds.data_ptr()
            self._parameters.bound_layer_stride = bounds.stride(0)
        self._parameters.most_omitted = float("inf")
        self._parameters.table_stride = tables.stride(0)
        self._parameters.partial_stride = chunks
        self._parameters.in_flight = self.plan.in_flight
        self._parameters.direct_rows = 2
        self._parameters.fused_rows = 2
        self._ticket = 0

    def _serve_experts(self, host: HostExperts, launcher: Launcher) -> ExpertServer:
        plan, spec, experts = self.plan, self.plan.spec, self.plan.spec.experts
        assert experts is not None
        device, rows = self.logits.device, plan.max_rows
        mail = launcher.host_buffer(mail_words(MAX_ROWS, used_experts(experts)))
        inputs = launcher.host_buffer(rows * spec.hidden // 2)
        sums = launcher.host_buffer(rows * spec.hidden * 2)
        table = torch.from_numpy(host.table(experts)).to(device)
        uses = torch.zeros(spec.layers, experts.count, dtype=torch.int32, device=device)
        self._buffers |= {
            "placement": table,
            "uses": uses,
            "mail": mail,
            "mail_rows": inputs,
            "mail_sums": sums,
        }
        return ExpertServer(
            host.store,
            spec,
            experts,
            mail.numpy(),
            inputs.numpy().view(np.uint16).reshape(rows, spec.hidden),
            sums.numpy().view(np.int64).reshape(rows, spec.hidden),
            half=plan.formats.query_key != BF16,
        )

    @property
    def expert_uses(self) -> Tensor | None:
        """How often each expert was chosen, int32 [layers, experts], where the host computes some."""
        return self._buffers.get("uses")

    def set_placement(self, host: HostExperts) -> None:
        """Tell the kernel which experts lie where. No step may run."""
        assert self.plan.spec.experts is not None
        self._buffers["placement"].copy_(torch.from_numpy(host.table(self.plan.spec.experts)))

    def close(self) -> None:
        """End what computes for the device. No step may run."""
        if self.experts is not None:
            self.experts.close()

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self._buffers.values())

    def tune(self, *, in_flight: int, direct_rows: int, fused_rows: int) -> None:
        """Set how many weight bytes are in flight and up to how many rows blocks work alone. Results do not
        depend on it."""
        self._parameters.in_flight = in_flight
        self._parameters.direct_rows = direct_rows
        self._parameters.fused_rows = fused_rows

    def export_features(self, features: Tensor, layers: Sequence[int]) -> None:
        """Make every step write `features` [rows, layers, hidden] for a draft head: the float16 residual
        stream before each of `layers`."""
        p = self._parameters
        self._buffers["features"] = features
        p.features, p.feature_count = features.data_ptr(), len(layers)
        for i in range(len(p.feature_layers)):
            p.feature_layers[i] = layers[i] if i < len(layers) else -1

    def shared_parameters(self) -> Parameters:
        """A copy of the parameters of every launch."""
        return Parameters.from_buffer_copy(self._parameters)

    def controls_of(self, launch: Launch) -> tuple[int, int]:
        """Device addresses of the control words of `launch` and of the step after it."""
        return self._control_at[launch.slot], self._control_at[(launch.slot + 1) % _SLOTS]

    def allow_omission(self, share: float) -> None:
        """Set the largest share of a row's attention that sparse attention may omit without doubt."""
        self._parameters.most_omitted = float(np.log2(share / (1.0 - share))) if share < 1.0 else float("inf")

    def start(self, parts: Sequence[SequenceRows]) -> Launch:
        slot = self._ticket % _SLOTS
        rows = self._write_control(self._staged[slot], parts)
        control, staging = self._uploads[slot]
        control.copy_(staging, non_blocking=True)
        masked, sparse = any(part.allowed is not None for part in parts), any(part.budget for part in parts)
        if masked and not self._launcher.asynchronous:
            self._write_masks(parts)
        reach = max(part.position + len(part.tokens) for part in parts) - 1
        launch = self._launch(slot, rows, len(parts), sparse, reach)
        if masked and self._launcher.asynchronous:  # the step waits for masks only at its end
            try:
                self._write_masks(parts)
            except BaseException:
                self._ready_words[0] = launch.ticket
                self.wait(launch)
                raise
        return launch

    def launch_next(self, launch: Launch, rows: int) -> Launch:
        """Launch the step after `launch` from the tokens that it chooses; a single sequence also gets the
        draft head's tokens, `rows` in all at most."""
        reach = launch.reach + rows
        return self._launch(self._ticket % _SLOTS, rows, launch.sequences, launch.sparse, reach)

    def cancel_waiting(self) -> None:
        """Make launches that have not begun end without work."""
        self._stop_words[0] = 1

    def allow_waiting(self) -> None:
        self._stop_words[0] = 0

    def wait(self, launch: Launch) -> None:
        wait_for(self._read[launch.slot], launch.ticket, self._launcher)

    def has_run(self, launch: Launch) -> bool:
        """Wait for a launch; whether it was not stopped before it began."""
        self.wait(launch)
        return bool(self._read[launch.slot][1] != _STOPPED)

    def finish(self, launch: Launch) -> StepOutcome | None:
        """The result, or None if the launch was stopped before it began."""
        self.wait(launch)
        _, fault, *found = self._read[launch.slot].tolist()
        if fault == _STOPPED:
            return None
        if self.experts is not None:
            self.experts.check()
        if fault:
            raise EngineError("the model produced numbers that are not finite; its weights may be damaged")
        accepted, chosen, doubt = found[:MAX_ROWS], found[MAX_ROWS : 2 * MAX_ROWS], found[2 * MAX_ROWS :]
        return StepOutcome(
            tuple(chosen[: launch.rows]),
            tuple(accepted[: launch.sequences]),
            tuple(map(bool, doubt[: launch.sequences])),
        )

    def _launch(self, slot: int, rows: int, sequences: int, sparse: bool, reach: int) -> Launch:
        bucket = self.plan.bucket(rows)
        self._ticket += 1
        p = self._parameters
        p.control = self._control_at[slot]
        p.next = self._control_at[(slot + 1) % _SLOTS]
        p.result = self._result_at[slot]
        shape = "any" if sparse else self.plan.shape(rows, reach)
        p.x_stride, p.ring_offset = bucket.x_stride, bucket.ring_offset
        p.stages = self.plan.stages(bucket, shape)
        if self.experts is not None:
            self.experts.wake()
        self._launcher.launch(p, bucket, sparse, shape)
        return Launch(self._ticket, slot, rows, sequences, sparse, reach)

    def _write_masks(self, parts: Sequence[SequenceRows]) -> None:
        """Write the masks of all masked rows, then mark them ready."""
        row = 0
        for part in parts:
            if part.allowed is not None:
                for index in range(len(part.tokens) - part.pending + 1):
                    mask = part.allowed.row(index)[: self._masks.shape[1]]
                    self._masks[row + part.pending - 1 + index, : len(mask)] = mask
            row += len(part.tokens)
        self._ready_words[0] = self._ticket + (not self._launcher.asynchronous)

    def _write_control(self, to: _Control, parts: Sequence[SequenceRows]) -> int:
        row = 0
        any_hot = any_filtered = any_sparse = False
        masked = 0
        for s, part in enumerate(parts):
            size, sampling = len(part.tokens), part.sampling
            to.token[row : row + size] = part.tokens
            to.position[row : row + size] = range(part.position, part.position + size)
            to.owner[row : row + size] = s
            to.first[s], to.count[s], to.pending[s], to.table[s] = row, size, part.pending, part.table
            hot = sampling.temperature > 0.0 and sampling.top_k != 1
            to.inverse[s] = 1.0 / sampling.temperature if hot else 0.0
            to.floor[s] = np.log(sampling.min_p) if sampling.min_p > 0 else -np.inf
            to.low[s], to.high[s] = sampling.seed & 0xFFFFFFFF, (sampling.seed >> 32) & 0xFFFFFFFF
            to.top_k[s] = sampling.top_k if hot else 0
            to.top_p[s] = sampling.top_p if hot else 1.0
            to.budget[s] = part.budget
            to.state[s], to.replay[s] = part.state, part.replay
            any_hot |= hot
            any_filtered |= hot and (sampling.top_k > 0 or sampling.top_p < 1.0)
            any_sparse |= part.budget > 0
            if part.allowed is not None:
                masked |= (1 << row + size) - (1 << row + part.pending - 1)
            row += size
        signed = masked - (masked >> 31 << 32)  # one bit per row in a signed word
        to.head[:] = (row, len(parts), any_hot, self._ticket + 1, any_filtered, any_sparse, signed)
        return row
