"""The CUDA engine: sessions over one paged KV memory, stepped alone or together.

Law: decides what runs and when; the numbers are the kernel's. A plain step is followed at once by the next
one on the device, before the host has seen its token; if the caller does otherwise, the follower is let go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from keystroke.engine.base import Engine, EngineStats, ModelInfo, Sampling, Step, StepRequest
from keystroke.engine.checkpoint import extended, open_checkpoint, within_window
from keystroke.engine.cuda.driver import GpuLauncher
from keystroke.engine.cuda.gpu import SPARE_BYTES, gpu_report, hopper
from keystroke.engine.cuda.pages import PagePool, PageTable
from keystroke.engine.cuda.plan import PAGE, KvPrecision, Precision
from keystroke.engine.cuda.prefill import Prefill
from keystroke.engine.cuda.scales import measure_steps
from keystroke.engine.cuda.session import CudaSession
from keystroke.engine.cuda.sparse import (
    BUDGET,
    MOST_OMITTED,
    SPARSE_FROM,
    TRUST_AGAIN,
    PageBounds,
    Sparse,
    usable,
)
from keystroke.engine.cuda.step import Launch, Launcher, Outcome, SequenceRows, Stepper
from keystroke.engine.cuda.weights import Weights, build_weights, load_weights
from keystroke.engine.sampler import verify
from keystroke.errors import NotEnoughMemory, SessionClosed, UsageError

__all__ = ["CudaEngine", "build_weights", "gpu_report", "load_cuda"]

_BATCH = 16
_SLOTS = 256  # sessions at once
_AHEAD = 3  # positions kept writable past a plain step: its own and two that may follow


@dataclass(frozen=True)
class _Follower:
    """A step the device already works on, in case the caller asks for it."""

    launch: Launch
    key: tuple[
        tuple[CudaSession, Sampling, int, int], ...
    ]  # session, sampling, budget, length it goes on from


class CudaEngine(Engine):
    max_batch = _BATCH
    prefill_chunk = 8192  # tokens, at most: long contexts are read in smaller portions
    tail = 16  # a keystroke's worth of tokens joins the next step instead of costing a run of its own

    def __init__(
        self, weights: Weights, launcher: Launcher, kv_tokens: int, *, sparse: Sparse = "off"
    ) -> None:
        plan, spec = weights.plan, weights.plan.spec
        device = weights.embedding.device
        kind = torch.bfloat16
        if plan.kv_precision == "int8":
            kind = torch.uint8
            if weights.kv_steps is None:
                weights.fold(measure_steps(weights))
        self.info: ModelInfo = weights.info()
        self.spec = spec
        self.tail = min(self.tail, plan.max_rows)
        self.pool = PagePool(max(-(-kv_tokens // PAGE), 2))
        shape = (spec.layers, self.pool.pages, spec.kv_heads, PAGE * spec.head_dim)
        try:
            self._keys = torch.zeros(shape, dtype=kind, device=device)
            self._values = torch.zeros(shape, dtype=kind, device=device)
        except torch.cuda.OutOfMemoryError as error:
            raise NotEnoughMemory(
                f"KV memory for {kv_tokens:,} tokens of {spec.name} needs "
                f"{kv_tokens * plan.kv_bytes_per_token / 1e9:.1f} GB; ask for fewer tokens"
            ) from error
        width = -(-spec.context_length // PAGE) + 8
        self._tables = torch.zeros(_SLOTS, -(-width // 4) * 4, dtype=torch.int32, device=device)
        keys = self._keys.view(*shape[:3], PAGE, spec.head_dim)
        self._bounds = PageBounds(keys) if sparse != "off" and usable(spec) else None
        self._stepper = Stepper(
            weights,
            self._keys,
            self._values,
            self._tables,
            launcher,
            None if self._bounds is None else self._bounds.tensor,
        )
        self._stepper.allow_omission(MOST_OMITTED if sparse == "auto" else 1.0)
        self.sparse_from = SPARSE_FROM
        self.sparse_budget = BUDGET
        self.sparse_steps = 0  # taken with part of the context
        self.doubts = 0  # and taken again with all of it
        values = self._values.view(*shape[:3], spec.head_dim, PAGE)
        self._prefill = Prefill(weights, keys, values)
        self._free_slots = list(range(_SLOTS - 1, -1, -1))
        self._sessions: set[CudaSession] = set()
        self._follower: _Follower | None = None
        self._last_key: tuple[object, ...] = ()
        self._closed = False

    # The contract

    def session(self, scope: str = "") -> CudaSession:
        return self.session_over(PageTable(self.pool, scope))

    def step_many(self, requests: Sequence[StepRequest]) -> list[Step]:
        """Step up to `max_batch` sessions in one pass over the weights; more are taken in turns."""
        sessions = [self._own(request) for request in requests]
        if len(set(sessions)) != len(sessions):
            raise UsageError("a session can take part in a step only once")
        for session in sessions:
            session.check_ready()
            session.read_appended()
        steps: list[Step] = []
        for group in self._groups(requests):
            steps += self._step_group(group, sole=len(group) == len(requests))
        return steps

    def stats(self) -> EngineStats:
        page_bytes = PAGE * self.info.kv_bytes_per_token
        return EngineStats(
            sessions=len(self._sessions),
            kv_bytes=self.pool.held * page_bytes,
            cached_bytes=self.pool.idle * page_bytes,
            cached_tokens=self.pool.idle * PAGE,
        )

    def close(self) -> None:
        if self._closed:
            return
        for session in tuple(self._sessions):
            session.close()
        self.settle()
        self._closed = True
        del self._stepper, self._prefill, self._keys, self._values, self._tables, self._bounds
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    # For sessions

    def session_over(self, table: PageTable) -> CudaSession:
        if self._closed:
            raise SessionClosed("this engine was closed; load the model again")
        if not self._free_slots:
            table.clear()
            raise NotEnoughMemory(f"{_SLOTS} sessions are open, which is all this engine holds; close some")
        session = CudaSession(self, self._free_slots.pop(), table)
        self.upload(session.slot, table.pages, 0)
        self._sessions.add(session)
        return session

    def forget(self, session: CudaSession) -> None:
        self._sessions.discard(session)
        self._free_slots.append(session.slot)

    def prefill(self, tokens: Sequence[int], start: int, pages: Sequence[int]) -> None:
        try:
            self._prefill.run(tokens, start, pages)
        except torch.cuda.OutOfMemoryError as error:
            raise NotEnoughMemory(
                "the GPU has no room left to read the prompt; give the engine less KV memory"
            ) from error

    def catch_up(self) -> None:
        """Wait until the device has done all that it was told."""
        if self._keys.is_cuda:
            torch.cuda.current_stream(self._keys.device).synchronize()

    def upload(self, slot: int, pages: Sequence[int], first: int) -> None:
        if first < len(pages):
            part = torch.tensor(pages[first:], dtype=torch.int32)
            self._tables[slot, first : len(pages)].copy_(part, non_blocking=True)

    def copy_page(self, old: int, new: int) -> None:
        self._keys[:, new] = self._keys[:, old]
        self._values[:, new] = self._values[:, old]

    def changes(self, pages: Sequence[int]) -> None:
        """A session is about to write to these pages."""
        if self._bounds is not None:
            self._bounds.forget(pages)

    def settle(self) -> None:
        """Let go of a step that runs ahead. What it wrote lies past every session's end."""
        if self._follower is not None:
            launch, self._follower = self._follower.launch, None
            self._stepper.stop()
            try:
                self._stepper.wait(launch)
            finally:
                self._stepper.resume()

    # Stepping

    def _own(self, request: StepRequest) -> CudaSession:
        session = request.session
        if not isinstance(session, CudaSession) or session._engine is not self:
            raise UsageError("this session belongs to another engine")
        return session

    def _groups(self, requests: Sequence[StepRequest]) -> list[list[StepRequest]]:
        groups: list[list[StepRequest]] = []
        used = self._stepper.plan.max_rows
        for request in requests:
            pending, draft = self._own(request).rows(request.draft, self._stepper.plan.max_rows)
            size = len(pending) + len(draft)
            if not groups or used + size > self._stepper.plan.max_rows or len(groups[-1]) == _BATCH:
                groups.append([])
                used = 0
            groups[-1].append(request)
            used += size
        return groups

    def _step_group(self, group: list[StepRequest], *, sole: bool) -> list[Step]:
        sessions = [self._own(request) for request in group]
        plain = sole and all(
            not request.draft
            and request.allowed is None
            and _on_device(request.sampling)
            and session.length - session.resident == 1
            for request, session in zip(group, sessions, strict=True)
        )
        budgets = [self._budget(session) for session in sessions]
        familiar = tuple(
            (session, request.sampling, budget)
            for request, session, budget in zip(group, sessions, budgets, strict=True)
        )
        key = _with_lengths(familiar)
        launch = None
        if plain and self._follower is not None and self._follower.key == key:
            launch, self._follower = self._follower.launch, None
        else:
            self.settle()
        parts = [
            session.rows(request.draft, self._stepper.plan.max_rows)
            for request, session in zip(group, sessions, strict=True)
        ]
        if launch is None:
            launch = self._start(group, sessions, parts, budgets)
        follower = None
        if (
            plain
            and self._last_key == familiar
            and all(s.length + 2 < self.info.context_length for s in sessions)
        ):
            follower = self._follow(launch, sessions, budgets)
        self._last_key = familiar if plain else ()
        outcome = self._stepper.finish(launch)
        if outcome is None:  # stopped before it began, by a settle that came in between
            launch = self._start(group, sessions, parts, budgets)
            follower, outcome = None, self._stepper.finish(launch)
            assert outcome is not None
        self.sparse_steps += any(budgets)
        if any(outcome.doubtful):
            outcome, follower = self._retake(group, sessions, parts, outcome, follower), None
        steps = self._steps(group, parts, outcome)
        row = 0
        for session, step, (pending, draft) in zip(sessions, steps, parts, strict=True):
            session.absorb([*pending, *draft], step.tokens, step.accepted)
            row += len(pending) + len(draft)
        if follower is not None:
            self._follower = _Follower(follower, _with_lengths(familiar))
        return steps

    def _budget(self, session: CudaSession) -> int:
        """How many chunks of keys a row of `session` attends to; 0: all."""
        if self._bounds is None or session.length < max(self.sparse_from, session.dense_until):
            return 0
        return self.sparse_budget

    def _retake(
        self,
        group: list[StepRequest],
        sessions: list[CudaSession],
        parts: list[tuple[list[int], list[int]]],
        outcome: Outcome,
        follower: Launch | None,
    ) -> Outcome:
        """The same step, over the whole context of the sessions whose choice of it is in doubt."""
        if follower is not None:
            self._stepper.finish(follower)  # the device let it go
        for session, doubtful in zip(sessions, outcome.doubtful, strict=True):
            if doubtful:
                self.doubts += 1
                session.dense_until = session.length + TRUST_AGAIN
        launch = self._start(group, sessions, parts, [self._budget(session) for session in sessions])
        again = self._stepper.finish(launch)
        assert again is not None
        return again

    def _start(
        self,
        group: list[StepRequest],
        sessions: list[CudaSession],
        parts: list[tuple[list[int], list[int]]],
        budgets: list[int],
    ) -> Launch:
        rows = []
        for request, session, (pending, draft), budget in zip(group, sessions, parts, budgets, strict=True):
            start = session.resident
            if budget and self._bounds is not None:
                self._bounds.ensure(session.fresh_pages())
            session.reserve(start, start + len(pending) + len(draft) + _AHEAD - 1)
            rows.append(
                SequenceRows(
                    session.slot,
                    [*pending, *draft],
                    start,
                    len(pending),
                    _for_device(request.sampling),
                    budget,
                    request.allowed if _on_device(request.sampling) else None,
                )
            )
        return self._stepper.start(rows)

    def _follow(self, launch: Launch, sessions: list[CudaSession], budgets: list[int]) -> Launch | None:
        try:
            for session, budget in zip(sessions, budgets, strict=True):
                session.reserve(session.length, session.length + _AHEAD)
                if budget and self._bounds is not None:
                    self._bounds.ensure(session.fresh_pages())
        except NotEnoughMemory:
            return None  # the step itself has room; running ahead is a luxury
        return self._stepper.follow(launch)

    def _steps(
        self, group: list[StepRequest], parts: list[tuple[list[int], list[int]]], outcome: Outcome
    ) -> list[Step]:
        steps = []
        row = 0
        for s, (request, (pending, draft)) in enumerate(zip(group, parts, strict=True)):
            first = row + len(pending) - 1  # the row whose choice follows the last given token
            if _on_device(request.sampling):
                accepted = outcome.accepted[s]
                steps.append(Step(tuple(outcome.chosen[first : first + accepted + 1]), accepted))
            else:
                logits = self._stepper.logits[first : first + len(draft) + 1].cpu().numpy()
                base = self._own(request).length
                logits = logits.astype(np.float32, copy=False)
                steps.append(verify(logits, draft, request.sampling, base, request.allowed))
            row += len(pending) + len(draft)
        return steps


def _with_lengths(
    familiar: Sequence[tuple[CudaSession, Sampling, int]],
) -> tuple[tuple[CudaSession, Sampling, int, int], ...]:
    return tuple((session, sampling, budget, session.length) for session, sampling, budget in familiar)


def _on_device(sampling: Sampling) -> bool:
    """The kernel makes every choice but those that logit bias or log probabilities go with."""
    return sampling.logprobs is None and not sampling.logit_bias


def _for_device(sampling: Sampling) -> Sampling:
    return sampling if _on_device(sampling) else Sampling()


def load_cuda(
    path: Path,
    *,
    precision: Precision = "bf16",
    context: int | None = None,
    kv_tokens: int | None = None,
    sparse: Sparse = "off",
    kv_precision: KvPrecision = "bf16",
) -> CudaEngine:
    """Load a Hugging Face folder or GGUF file onto the first GPU. `context` beyond what the model was trained
    on stretches it by YaRN; `kv_tokens` defaults to the memory that is left (int8 KV holds twice as many)."""
    device = hopper()
    blocks = torch.cuda.get_device_properties(device).multi_processor_count
    with open_checkpoint(path) as checkpoint:
        if context is not None:
            checkpoint.spec = extended(checkpoint.spec, context)
        checkpoint.spec = within_window(checkpoint.spec)
        weights = load_weights(checkpoint, precision, device, blocks, kv_precision)
    if kv_tokens is None:
        free, _ = torch.cuda.mem_get_info(device)
        kv_tokens = max(int((free - SPARE_BYTES) * 0.9) // weights.plan.kv_bytes_per_token, PAGE * 2)
        kv_tokens = min(kv_tokens, 16 * weights.plan.spec.context_length)
    return CudaEngine(weights, GpuLauncher(weights.plan, device), kv_tokens, sparse=sparse)
