"""The CUDA engine: sessions over one paged KV memory, stepped alone or together.

Decides what runs and when; the numbers are the kernel's. A plain step is followed at once by the next
one on the device, before the host has seen its token; if the caller does otherwise, the follower is let go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from keystroke.engine.adapter import AdaptedCheckpoint, AdapterFile
from keystroke.engine.base import Engine, EngineStats, Guess, ModelInfo, Sampling, Step, StepRequest
from keystroke.engine.checkpoint import extend_context, limit_to_window, open_checkpoint
from keystroke.engine.checkpoint.spec import ModelSpec
from keystroke.engine.cuda.draft import DraftHead, DraftHost, HeadPlan, has_room, head_bytes_per_token
from keystroke.engine.cuda.driver import GpuLauncher, compiling
from keystroke.engine.cuda.gpu import gpu_report, gpu_target, kv_room, multiprocessors, nvidia_gpu
from keystroke.engine.cuda.pages import PagePool, PageTable
from keystroke.engine.cuda.plan import PAGE, KvPrecision
from keystroke.engine.cuda.prefill import WORK, Prefill, work_of
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
from keystroke.engine.cuda.step import Launch, Outcome, SequenceRows, Stepper
from keystroke.engine.cuda.stored import Wanted
from keystroke.engine.cuda.weights import Weights, build_weights, load_weights, plan_of
from keystroke.engine.sampler import verify
from keystroke.engine.speculative.head_file import HeadWeights, open_head
from keystroke.errors import NotEnoughMemory, SessionClosed, UsageError

__all__ = ["CudaEngine", "build_weights", "gpu_report", "load_cuda"]

_BATCH = 16
_SLOTS = 256  # sessions at once
_AHEAD = 3  # positions kept writable past a plain step: its own and two that may follow
_DEPTH = 6  # tokens that a draft head drafts at most: more rarely come true
_LEAST = 0.3  # the chance of a whole draft below which going on costs more than it brings
_LEAST_SAMPLED = 0.1  # two draws with the same noise agree more often than their chances say
_AGREED = 2  # steps that took the guess as it was, after which the device goes on without the host


@dataclass(frozen=True)
class _Follower:
    """A step the device already works on, in case the caller asks for it."""

    launch: Launch
    key: tuple[
        tuple[CudaSession, Sampling, int, int], ...
    ]  # session, sampling, budget, length it goes on from
    guessed: bool = False  # whether it verifies what the draft head guesses


@dataclass
class _Behind:
    """The last step of one session, as a draft head may go on from it."""

    launch: Launch
    session: CudaSession
    sampling: Sampling
    ticket: int = 0  # of the draft behind it; 0: none was started
    length: int = 0  # of the session after it
    last: int = -1  # the token it ended with
    guess: Guess | None = None

    @property
    def current(self) -> bool:
        """Whether nothing has happened to the session since."""
        tokens = self.session.tokens
        return len(tokens) == self.length and tokens[-1] == self.last


class CudaEngine(Engine):
    max_batch = _BATCH
    runs_ahead = True
    prefill_chunk = 8192  # tokens, at most: long contexts are read in smaller portions
    prefill_work = WORK  # operations of such a portion
    tail = 16  # a keystroke's worth of tokens joins the next step instead of costing a run of its own

    def __init__(
        self,
        weights: Weights,
        launcher: DraftHost,
        kv_tokens: int,
        *,
        sparse: Sparse = "off",
        draft_head: HeadWeights | None = None,
    ) -> None:
        """Raises NotEnoughMemory, and UsageError for a draft head of another model."""
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
        self.prefill_work = work_of(plan)
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
        self._bounds = PageBounds(keys) if sparse != "off" and usable(plan) else None
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
        self.head: DraftHead | None = None
        self._behind: _Behind | None = None
        if draft_head is not None:
            self.head = DraftHead(draft_head, weights, self._stepper, self.pool.pages, launcher)
            self.drafts = True

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

    def guess(self, tokens: Sequence[int], *, wanted: bool = True) -> Guess | None:
        """What the draft head gives after the last step, if `tokens` are a session's own just as that left
        them. The head drafts behind every step of a session that was asked about since the step before."""
        behind = self._behind
        if self.head is None or behind is None or behind.session.tokens is not tokens:
            self._notice(tokens)
            return None
        behind.session.asked = True
        if not behind.current or not wanted:
            return None
        if behind.guess is None:
            if not behind.ticket:
                behind.ticket = self._draft(behind.launch, behind.sampling)
            behind.guess = self.head.finish(behind.ticket)
        return replace(behind.guess, ahead=self._follower is not None and self._follower.guessed)

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
        self.catch_up()  # the draft head may still be at work
        self._closed = True
        self.head = self._behind = None
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

    def prefill(self, tokens: Sequence[int], start: int, pages: Sequence[int], after: Sequence[int]) -> None:
        """Compute KV of `tokens`; `after` is the token behind them, where that is known."""
        try:
            if self.head is None or not after:
                self._prefill.run(tokens, start, pages)
            else:
                features = self._prefill.run(tokens, start, pages, self.head.kept)
                self.head.read(features, [*tokens[1:], *after], start, pages)
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
        if self.head is not None:
            self.head.copy_page(old, new)

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
        guesses = self._guesses(group) if sole else False
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
        parts = [
            session.rows(request.draft, self._stepper.plan.max_rows)
            for request, session in zip(group, sessions, strict=True)
        ]
        launch = self._taken(_with_lengths(familiar), plain, group)
        if launch is None:
            self.settle()
            self._take_in()
            launch = self._start(group, sessions, parts, budgets)
        behind = self._think_ahead(launch, group[0], sessions[0]) if guesses else None
        follower = None
        if behind is not None:
            agreed = behind.ticket and behind.session.agreed >= _AGREED
            if agreed and group[0].allowed is None:  # behind a mask comes another, which nobody knows yet
                follower = self._follow(launch, sessions, budgets, len(parts[0][1]), 1 + _DEPTH)
        elif plain and self._last_key == familiar:
            follower = self._follow(launch, sessions, budgets)
        self._last_key = familiar if plain else ()
        outcome = self._stepper.finish(launch)
        if outcome is None:  # stopped before it began, by a settle that came in between
            launch = self._start(group, sessions, parts, budgets)
            behind = self._think_ahead(launch, group[0], sessions[0]) if guesses else None
            follower, outcome = None, self._stepper.finish(launch)
            assert outcome is not None
        self.sparse_steps += any(budgets)
        if any(outcome.doubtful):
            outcome, follower = self._retake(group, sessions, parts, outcome, follower), None
            behind = None
        steps = self._steps(group, parts, outcome)
        for session, step, (pending, draft) in zip(sessions, steps, parts, strict=True):
            session.absorb([*pending, *draft], step.tokens, step.accepted)
            session.asked = False
        if behind is not None:
            behind.length, behind.last = sessions[0].length, steps[0].tokens[-1]
        self._behind = behind
        if follower is not None:
            self._follower = _Follower(follower, _with_lengths(familiar), behind is not None)
        return steps

    def _taken(
        self, key: tuple[tuple[CudaSession, Sampling, int, int], ...], plain: bool, group: list[StepRequest]
    ) -> Launch | None:
        """The step that the device already works on, if it is the one that is asked for."""
        follower, behind = self._follower, self._behind
        if follower is None or follower.key != key:
            return None
        if follower.guessed:
            guess = behind.guess if behind is not None else None
            fits = guess is not None and guess.tokens == tuple(group[0].draft) and group[0].allowed is None
        else:
            fits = plain
        if not fits:
            return None
        self._follower = None
        return follower.launch

    # Drafting

    def _guesses(self, group: list[StepRequest]) -> bool:
        """Whether the draft head is to go on from this step: of one session, whose caller wants guesses."""
        if self.head is None or len(group) != 1 or not _on_device(group[0].sampling):
            return False
        session = self._own(group[0])
        guess = None if self._behind is None or self._behind.session is not session else self._behind.guess
        same = guess is not None and guess.tokens == tuple(group[0].draft)
        session.agreed = session.agreed + 1 if same else 0
        return session.asked

    def _think_ahead(self, launch: Launch, request: StepRequest, session: CudaSession) -> _Behind:
        """A draft behind the step, at once; but not behind a long draft of somebody else, who is likelier to
        be heard again: then only if it is asked for."""
        behind = _Behind(launch, session, request.sampling)
        if len(request.draft) <= _DEPTH:
            behind.ticket = self._draft(launch, request.sampling)
        return behind

    def _draft(self, launch: Launch, sampling: Sampling, depth: int = _DEPTH) -> int:
        assert self.head is not None
        return self.head.start(launch, depth, _LEAST_SAMPLED if sampling.temperature > 0 else _LEAST)

    def _take_in(self) -> None:
        """What the last step computed goes into the head's memory before another step writes over it."""
        behind, self._behind = self._behind, None
        if behind is not None and not behind.ticket and behind.current:
            self._draft(behind.launch, behind.sampling, 0)

    def _notice(self, tokens: Sequence[int]) -> None:
        for session in self._sessions:
            if session.tokens is tokens:
                session.asked = True

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
            ahead = _AHEAD if self.head is None else _DEPTH + 1
            session.reserve(start, start + len(pending) + len(draft) + ahead - 1)
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

    def _follow(
        self, launch: Launch, sessions: list[CudaSession], budgets: list[int], drafted: int = 0, rows: int = 0
    ) -> Launch | None:
        """The next step, already: of a token each, or of one session's guess, in so many `rows` at most."""
        ahead = _AHEAD if not rows else drafted + rows + _DEPTH + 1
        if any(session.length + ahead > self.info.context_length for session in sessions):
            return None
        try:
            for session, budget in zip(sessions, budgets, strict=True):
                session.reserve(session.length, session.length + ahead)
                if budget and self._bounds is not None:
                    self._bounds.ensure(session.fresh_pages())
        except NotEnoughMemory:
            return None  # the step itself has room; running ahead is a luxury
        return self._stepper.follow(launch, rows or launch.sequences)

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
    """The kernel makes every choice but those that logit bias, mixtures or log probabilities go with."""
    return sampling.logprobs is None and not sampling.logit_bias and not sampling.mixtures


def _for_device(sampling: Sampling) -> Sampling:
    return sampling if _on_device(sampling) else Sampling()


def load_cuda(
    path: Path,
    *,
    precision: Wanted = "bf16",
    context: int | None = None,
    kv_tokens: int | None = None,
    kv_bytes: int | None = None,
    sparse: Sparse = "off",
    kv_precision: KvPrecision = "bf16",
    draft_head: Callable[[ModelSpec], Path | None] | Path | None = None,
    adapter: AdapterFile | None = None,
    target: str = "auto",
) -> CudaEngine:
    """Load a Hugging Face folder or GGUF file onto the first GPU. `context` beyond what the model was trained
    on stretches it by YaRN; `kv_tokens` defaults to the memory that is left (int8 KV holds twice as many), or
    to `kv_bytes` of it. `draft_head` is the folder of a head trained for this model, or who knows it by the
    model's sizes. An `adapter` is put into the weights on their way: the model is then a second one in
    memory. `target` names an older kind of GPU to run as (target.py). Raises ModelError, NotEnoughMemory and
    ConfigError, each with what to do."""
    device = nvidia_gpu()
    kind, blocks = gpu_target(device, target), multiprocessors(device)
    with open_checkpoint(path) as checkpoint:
        if context is not None:
            checkpoint.spec = extend_context(checkpoint.spec, context)
        checkpoint.spec = limit_to_window(checkpoint.spec)
        folder = draft_head(checkpoint.spec) if callable(draft_head) else draft_head
        head = None if folder is None else open_head(folder)
        if head is not None and callable(draft_head):  # found, not asked for: the text is the same without
            head = head if has_room(head.config, checkpoint.spec, blocks, kind) else None
        source = checkpoint if adapter is None else AdaptedCheckpoint(checkpoint, adapter)
        plan = plan_of(source, precision, blocks, kv_precision, kind)
        drafting = None if head is None else HeadPlan(head.config, plan)
        chooses = sparse != "off" and usable(plan)
        with compiling(plan, sparse=chooses, head=drafting):  # where the cache has them not
            weights = load_weights(source, plan, device)
    if kv_tokens is None:
        free, total = torch.cuda.mem_get_info(device)
        each = weights.plan.kv_bytes_per_token + (0 if head is None else head_bytes_per_token(head.config))
        kv_tokens = kv_room(weights.plan, free, total, each, kv_bytes)
    launcher = GpuLauncher(weights.plan, device)
    return CudaEngine(weights, launcher, kv_tokens, sparse=sparse, draft_head=head)
