"""The CUDA engine: sessions over one paged KV cache, stepped alone or batched.

Schedules the kernel. Behind a plain step it launches the next one before the host has seen the token (the
launch ahead); if the caller then asks for something else, that launch is cancelled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from keystroke.engine.adapter import AdaptedCheckpoint, AdapterFile
from keystroke.engine.base import GREEDY, Engine, EngineStats, Guess, ModelInfo, Sampling, Step, StepRequest
from keystroke.engine.checkpoint import extend_context, open_checkpoint
from keystroke.engine.checkpoint.spec import ModelSpec
from keystroke.engine.cuda.draft import DraftHead, DraftingLauncher, HeadPlan, has_room, head_bytes_per_token
from keystroke.engine.cuda.driver import GpuLauncher, cache_folder, compile_in_background
from keystroke.engine.cuda.expert_use import Uses, exchanges
from keystroke.engine.cuda.gpu import (
    ExpertPlacement,
    context_bytes,
    fit_plan,
    gpu_report,
    gpu_target,
    kv_token_capacity,
    multiprocessors,
    nvidia_gpu,
    state_slots,
)
from keystroke.engine.cuda.pages import PagePool, PageTable
from keystroke.engine.cuda.plan import LOGGED_ROWS, MAX_BATCH, PAGE, KvPrecision
from keystroke.engine.cuda.prefill import PORTION, WORK, Prefill, operations_per_portion
from keystroke.engine.cuda.prefill_delta import RecurrentSlot
from keystroke.engine.cuda.scales import measure_steps
from keystroke.engine.cuda.session import CudaSession
from keystroke.engine.cuda.sparse import (
    BUDGET,
    DENSE_TOKENS_AFTER_DOUBT,
    MOST_OMITTED,
    SPARSE_FROM,
    PageBounds,
    Sparse,
    supports_sparse,
)
from keystroke.engine.cuda.states import StatePool
from keystroke.engine.cuda.step import Launch, SequenceRows, StepOutcome, Stepper
from keystroke.engine.cuda.stored import RequestedPrecision
from keystroke.engine.cuda.weights import Weights, build_weights, load_weights, place_experts, plan_of
from keystroke.engine.host_experts import expert_store
from keystroke.engine.sampler import verify
from keystroke.engine.snapshots import SNAPSHOT_SHARE
from keystroke.engine.speculative.head_file import HeadWeights, open_head
from keystroke.errors import NotEnoughMemory, SessionClosed, UsageError

__all__ = ["CudaEngine", "build_weights", "gpu_report", "load_cuda"]

_SLOTS = 256  # sessions at once
_POSITIONS_AHEAD = 3  # writable positions of a plain step: its own and those of two launches ahead
_DRAFT_TOKENS = 6  # longest draft of the draft head: later tokens are rarely right
_MIN_CHANCE = 0.3  # a draft less likely than this costs more than it saves
_MIN_CHANCE_SAMPLED = 0.1  # lower: draws with the same noise agree more often than by chance
_STEPS_UP_TO = 384  # measured: 16 rows take a 25th of what copying the experts takes
_FOLLOW_AFTER = 256  # rows whose choice of experts decides what is exchanged
_MOST_EXCHANGED = 128  # experts at once: about 0.3 GB
_AGREED_STEPS = 2  # steps that verified exactly the guess before the device launches ahead


@dataclass(frozen=True)
class _AheadLaunch:
    """A step that was launched before the caller asked for it."""

    launch: Launch
    key: tuple[tuple[CudaSession, Sampling, int, int], ...]  # session, sampling, budget, length before it
    guessed: bool = False  # whether it verifies the guess of the draft head


@dataclass
class _LastStep:
    """The last step of a single session, from which the draft head can draft."""

    launch: Launch
    session: CudaSession
    sampling: Sampling
    ticket: int = 0  # of the draft after it; 0: not started
    length: int = 0  # of the session after it
    last: int = -1  # its last token
    guess: Guess | None = None

    @property
    def current(self) -> bool:
        """Whether the session is unchanged since."""
        tokens = self.session.tokens
        return len(tokens) == self.length and tokens[-1] == self.last


@dataclass(frozen=True, slots=True)
class _Part:
    """One session's part of a step."""

    request: StepRequest
    session: CudaSession
    pending: list[int]
    draft: list[int]
    budget: int  # chunks of keys that a row attends to; 0: all

    @property
    def key(self) -> tuple[CudaSession, Sampling, int]:
        return self.session, self.request.sampling, self.budget


class CudaEngine(Engine):
    max_batch = MAX_BATCH
    runs_ahead = True
    prefill_chunk = PORTION  # most tokens of a portion; fewer where the context is long
    prefill_work = WORK  # operations of such a portion
    tail = 16  # so many appended tokens join the next step instead of costing a run of their own

    def __init__(
        self,
        weights: Weights,
        launcher: DraftingLauncher,
        kv_tokens: int,
        *,
        sparse: Sparse = "off",
        draft_head: HeadWeights | None = None,
        slots: int = MAX_BATCH,
    ) -> None:
        """Raises NotEnoughMemory, and UsageError for a draft head of another model."""
        plan, spec = weights.plan, weights.plan.spec
        device = weights.embedding.device
        kind = torch.bfloat16
        if plan.kv_precision == "int8":
            kind = torch.uint8
            if weights.kv_steps is None:
                weights.fold_kv_steps(measure_steps(weights))
        self.info: ModelInfo = weights.info()
        self.spec = spec
        self.tail = min(self.tail, plan.max_rows)
        self.prefill_work = operations_per_portion(plan)
        self.pool = PagePool(max(-(-kv_tokens // PAGE), 2))
        self.states: StatePool | None = None
        if spec.delta is not None:
            self.tail = min(self.tail, LOGGED_ROWS)
            if draft_head is not None:
                raise UsageError(f"draft heads of hybrid models such as {spec.name} are not supported")
            budget = int(kv_tokens * plan.kv_bytes_per_token * SNAPSHOT_SHARE)
            self.states = StatePool(plan, slots, device, budget)
            self.max_batch = slots  # with more, sequences would take each other's states
        shape = (plan.attention_layers, self.pool.pages, spec.kv_heads, PAGE * spec.head_dim)
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
        self._bounds = PageBounds(keys) if sparse != "off" and supports_sparse(plan) else None
        bounds = None if self._bounds is None else self._bounds.tensor
        states = None if self.states is None else (self.states.states, self.states.logs)
        self._stepper = Stepper(weights, self._keys, self._values, self._tables, launcher, bounds, states)
        self._stepper.allow_omission(MOST_OMITTED if sparse == "auto" else 1.0)
        self.sparse_from = SPARSE_FROM
        self.sparse_budget = BUDGET
        self.sparse_steps = 0  # that attended to part of the context
        self.repeated_steps = 0  # of these, repeated with all of it
        values = self._values.view(*shape[:3], spec.head_dim, PAGE)
        self._prefill = Prefill(weights, keys, values)
        self._weights = weights
        self.follows_use = False  # whether experts are exchanged between turns, which changes rounding
        # Tokens that are read in steps instead of copying the host's experts for them. Draft heads and
        # recurrent states are fed by prefill only.
        alone = draft_head is None and spec.delta is None
        self.steps_up_to = _STEPS_UP_TO if weights.host is not None and alone else 0
        self._counted: Uses | None = None  # uses of experts when some were last exchanged
        self._free_slots = list(range(_SLOTS - 1, -1, -1))
        self._sessions: set[CudaSession] = set()
        self._ahead: _AheadLaunch | None = None
        self._last_key: tuple[object, ...] = ()
        self._closed = False
        self.head: DraftHead | None = None
        self._last_step: _LastStep | None = None
        if draft_head is not None:
            self.head = DraftHead(draft_head, weights, self._stepper, self.pool.pages, launcher)
            self.drafts = True

    # The contract

    def session(self, scope: str = "") -> CudaSession:
        return self.session_over(PageTable(self.pool, scope))

    def step_many(self, requests: Sequence[StepRequest]) -> list[Step]:
        """Step up to `max_batch` sessions in one pass over the weights; more run in turns."""
        sessions = [self._session_of(request) for request in requests]
        if len(set(sessions)) != len(sessions):
            raise UsageError("a session can take part in a step only once")
        for session in sessions:
            session.check_ready()
        steps: list[Step] = []
        for first in range(0, len(requests), self.max_batch):
            together = slice(first, first + self.max_batch)
            for session in sessions[together]:
                session.keep_state()
            for session in sessions[together]:
                session.read_appended()
            for parts in self._groups(requests[together]):
                steps += self._step_group(parts, sole=len(parts) == len(requests))
        return steps

    def guess(self, tokens: Sequence[int], *, wanted: bool = True) -> Guess | None:
        """The draft head's guess, if `tokens` are a session's own list and unchanged since its last step.
        The head drafts behind each step of a session for which this was called since the step before."""
        last = self._last_step
        if self.head is None or last is None or last.session.tokens is not tokens:
            for session in self._sessions:
                if session.tokens is tokens:
                    session.guess_requested = True
            return None
        last.session.guess_requested = True
        if not last.current or not wanted:
            return None
        if last.guess is None:
            if not last.ticket:
                last.ticket = self._launch_draft(last.launch, last.sampling)
            last.guess = self.head.finish(last.ticket)
        return replace(last.guess, ahead=self._ahead is not None and self._ahead.guessed)

    def stats(self) -> EngineStats:
        page_bytes = PAGE * self.info.kv_bytes_per_token
        return EngineStats(
            sessions=len(self._sessions),
            kv_bytes=self.pool.held * page_bytes,
            cached_bytes=self.pool.idle * page_bytes + (self.states.snapshot_bytes if self.states else 0),
            cached_tokens=self.pool.idle * PAGE,
            kv_limit_bytes=self.pool.pages * page_bytes,
        )

    def close(self) -> None:
        if self._closed:
            return
        for session in tuple(self._sessions):
            session.close()
        self.cancel_ahead()
        self.synchronize()  # the draft head may still be running
        self._closed = True
        self.head = self._last_step = None
        self.states = None
        if self._weights.host is not None:
            self._weights.host.keep_profile(self._expert_uses())
        self._stepper.close()
        del self._stepper, self._prefill, self._weights, self._keys, self._values, self._tables, self._bounds
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
        self.upload_pages(session.slot, table.pages, 0)
        self._sessions.add(session)
        return session

    def remove_session(self, session: CudaSession) -> None:
        self._sessions.discard(session)
        self._free_slots.append(session.slot)

    def prefill(
        self,
        tokens: Sequence[int],
        start: int,
        pages: Sequence[int],
        after: Sequence[int],
        slot: RecurrentSlot | None,
    ) -> None:
        """Compute KV of `tokens`, and the recurrent state in `slot`; `after` holds the token that follows
        them, if it is known."""
        self._follow_use()
        try:
            if self.head is None or not after:
                self._prefill.run(tokens, start, pages, slot=slot)
            else:
                features = self._prefill.run(tokens, start, pages, self.head.feature_windows)
                self.head.read(features, [*tokens[1:], *after], start, pages)
        except torch.cuda.OutOfMemoryError as error:
            raise NotEnoughMemory(
                "the GPU has no room left to read the prompt; give the engine less KV memory"
            ) from error

    def read_in_steps(self, table: int, tokens: Sequence[int], start: int) -> None:
        """Compute KV of `tokens` as steps do, whose choices are not used."""
        self._follow_use()
        most = self._stepper.plan.max_rows
        for first in range(0, len(tokens), most):
            part = tokens[first : first + most]
            rows = SequenceRows(table, part, start + first, len(part), GREEDY)
            self._stepper.finish(self._stepper.start([rows]))

    def _expert_uses(self) -> Uses:
        """How often each expert was chosen since the model was loaded."""
        uses = self._stepper.expert_uses
        assert uses is not None
        found: Uses = uses.cpu().numpy().astype(np.int64)
        return found

    def _follow_use(self) -> None:
        """Exchange experts that are used rarely for others that are used often. No step may run."""
        host, experts = self._weights.host, self.spec.experts
        if not self.follows_use or host is None or experts is None or not self._stepper.plan.resident:
            return
        uses = self._expert_uses()
        recent = uses if self._counted is None else uses - self._counted
        if recent[0].sum() < _FOLLOW_AFTER * experts.top:
            return
        self._counted = uses
        found = exchanges(recent, host.resident, _MOST_EXCHANGED)
        for layer, position, expert in found:
            self._weights.place_expert(layer, position, expert)
        if found:
            self._stepper.set_placement(host)

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self._keys.is_cuda:
            torch.cuda.current_stream(self._keys.device).synchronize()

    def upload_pages(self, slot: int, pages: Sequence[int], first: int) -> None:
        if first < len(pages):
            part = torch.tensor(pages[first:], dtype=torch.int32)
            self._tables[slot, first : len(pages)].copy_(part, non_blocking=True)

    def copy_page(self, old: int, new: int) -> None:
        self._keys[:, new] = self._keys[:, old]
        self._values[:, new] = self._values[:, old]
        if self.head is not None:
            self.head.copy_page(old, new)

    def invalidate_bounds(self, pages: Sequence[int]) -> None:
        """Call before writing to these pages."""
        if self._bounds is not None:
            self._bounds.invalidate(pages)

    def cancel_ahead(self) -> None:
        """Cancel the launch ahead, if any, and wait for it. It wrote only past the end of each session."""
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            self._stepper.cancel_waiting()
            try:
                if self._stepper.has_run(ahead.launch):
                    for session, *_ in ahead.key:
                        session.step_was_run(alone=ahead.launch.rows == 1)
            finally:
                self._stepper.allow_waiting()

    # Stepping

    def _session_of(self, request: StepRequest) -> CudaSession:
        session = request.session
        if not isinstance(session, CudaSession) or session._engine is not self:
            raise UsageError("this session belongs to another engine")
        return session

    def _groups(self, requests: Sequence[StepRequest]) -> list[list[_Part]]:
        groups: list[list[_Part]] = []
        most = used = self._stepper.plan.max_rows
        for request in requests:
            session = self._session_of(request)
            part = _Part(request, session, *session.rows(request.draft, most), self._budget(session))
            size = len(part.pending) + len(part.draft)
            if not groups or used + size > most:
                groups.append([])
                used = 0
            groups[-1].append(part)
            used += size
        return groups

    def _step_group(self, parts: list[_Part], *, sole: bool) -> list[Step]:
        first, drafts = parts[0], sole and self._wants_draft(parts)
        plain = sole and all(
            not part.request.draft
            and part.request.allowed is None
            and _on_device(part.request.sampling)
            and part.session.length - part.session.resident == 1
            for part in parts
        )
        key = tuple(part.key for part in parts)
        launch = self._claim_ahead(_with_lengths(key), plain, first.request)
        if launch is None:
            self.cancel_ahead()
            self._feed_draft_head()
            launch = self._start(parts)
        last = self._start_draft(launch, first) if drafts else None
        ahead = None
        if last is not None:
            agreed = last.ticket and last.session.agreed_steps >= _AGREED_STEPS
            if agreed and first.request.allowed is None:  # the mask of the next step is not known yet
                ahead = self._launch_ahead(launch, parts, len(first.draft), 1 + _DRAFT_TOKENS)
        elif plain and self._last_key == key and not self._snapshot_due(parts):
            ahead = self._launch_ahead(launch, parts)
        self._last_key = key if plain else ()
        outcome = self._stepper.finish(launch)
        if outcome is None:  # cancelled before it began
            launch = self._start(parts)
            last = self._start_draft(launch, first) if drafts else None
            ahead, outcome = None, self._stepper.finish(launch)
            assert outcome is not None
        self.sparse_steps += any(part.budget for part in parts)
        if any(outcome.doubtful):
            outcome, ahead, last = self._repeat_densely(parts, outcome, ahead), None, None
        steps = self._collect_steps(parts, outcome)
        for part, step in zip(parts, steps, strict=True):
            computed = [*part.pending, *part.draft]
            part.session.apply_step(computed, step.tokens, step.accepted, alone=launch.rows == 1)
            part.session.guess_requested = False
        if last is not None:
            last.length, last.last = first.session.length, steps[0].tokens[-1]
        self._last_step = last
        if ahead is not None:
            self._ahead = _AheadLaunch(ahead, _with_lengths(key), last is not None)
        return steps

    def _claim_ahead(
        self, key: tuple[tuple[CudaSession, Sampling, int, int], ...], plain: bool, request: StepRequest
    ) -> Launch | None:
        """The launch ahead, if it computes exactly the requested step."""
        ahead, last = self._ahead, self._last_step
        if ahead is None or ahead.key != key:
            return None
        if ahead.guessed:
            guess = last.guess if last is not None else None
            fits = guess is not None and guess.tokens == tuple(request.draft) and request.allowed is None
        else:
            fits = plain
        if not fits:
            return None
        self._ahead = None
        return ahead.launch

    # Drafting

    def _wants_draft(self, parts: list[_Part]) -> bool:
        """Whether the draft head drafts behind this step: that of one session whose caller wants guesses."""
        request, session = parts[0].request, parts[0].session
        if self.head is None or len(parts) != 1 or not _on_device(request.sampling):
            return False
        last = self._last_step
        guess = None if last is None or last.session is not session else last.guess
        same = guess is not None and guess.tokens == tuple(request.draft)
        session.agreed_steps = session.agreed_steps + 1 if same else 0
        return session.guess_requested

    def _start_draft(self, launch: Launch, part: _Part) -> _LastStep:
        """Draft behind the step at once, except behind a long draft from elsewhere, whose source probably
        drafts again: then only when the guess is requested."""
        last = _LastStep(launch, part.session, part.request.sampling)
        if len(part.request.draft) <= _DRAFT_TOKENS:
            last.ticket = self._launch_draft(launch, last.sampling)
        return last

    def _launch_draft(self, launch: Launch, sampling: Sampling, depth: int = _DRAFT_TOKENS) -> int:
        assert self.head is not None
        return self.head.start(
            launch, depth, _MIN_CHANCE_SAMPLED if sampling.temperature > 0 else _MIN_CHANCE
        )

    def _feed_draft_head(self) -> None:
        """Write the last step's features to the head's KV before another step overwrites them."""
        last, self._last_step = self._last_step, None
        if last is not None and not last.ticket and last.current:
            self._launch_draft(last.launch, last.sampling, 0)

    def _budget(self, session: CudaSession) -> int:
        if self._bounds is None or session.length < max(self.sparse_from, session.dense_until):
            return 0
        return self.sparse_budget

    def _repeat_densely(self, parts: list[_Part], outcome: StepOutcome, ahead: Launch | None) -> StepOutcome:
        """Repeat the step, with the whole context for sessions where sparse attention is in doubt."""
        if ahead is not None:
            self._stepper.finish(ahead)  # the device has cancelled it
        for part, doubtful in zip(parts, outcome.doubtful, strict=True):
            if doubtful:
                self.repeated_steps += 1
                part.session.dense_until = part.session.length + DENSE_TOKENS_AFTER_DOUBT
        launch = self._start([replace(part, budget=self._budget(part.session)) for part in parts])
        again = self._stepper.finish(launch)
        assert again is not None
        return again

    @staticmethod
    def _snapshot_due(parts: list[_Part]) -> bool:
        """Whether a step's state is to be kept, which the step after it changes."""
        return any(part.session.snapshot_due(part.pending, 0) for part in parts)

    def _start(self, parts: list[_Part]) -> Launch:
        rows = []
        ahead = _POSITIONS_AHEAD if self.head is None else _DRAFT_TOKENS + 1
        for part in parts:
            session, sampling, start = part.session, part.request.sampling, part.session.resident
            if part.budget and self._bounds is not None:
                self._bounds.update(session.take_unbounded_pages())
            tokens = [*part.pending, *part.draft]
            session.reserve(start, start + len(tokens) + ahead - 1)
            allowed = part.request.allowed
            if not _on_device(sampling):  # the host chooses from the logits
                sampling, allowed = GREEDY, None
            given = SequenceRows(
                session.slot, tokens, start, len(part.pending), sampling, part.budget, allowed
            )
            state, replay = session.prepare_state()
            rows.append(replace(given, state=state, replay=replay))
        return self._stepper.start(rows)

    def _launch_ahead(
        self, launch: Launch, parts: list[_Part], drafted: int = 0, rows: int = 0
    ) -> Launch | None:
        """Launch the next step: one token for each session, or at most `rows` of one session's guess."""
        ahead = _POSITIONS_AHEAD if not rows else drafted + rows + _DRAFT_TOKENS + 1
        if any(part.session.length + ahead > self.info.context_length for part in parts):
            return None
        try:
            for part in parts:
                part.session.reserve(part.session.length, part.session.length + ahead)
                if part.budget and self._bounds is not None:
                    self._bounds.update(part.session.take_unbounded_pages())
        except NotEnoughMemory:
            return None  # only the launch ahead lacks room; the step itself has its pages
        return self._stepper.launch_next(launch, rows or launch.sequences)

    def _collect_steps(self, parts: list[_Part], outcome: StepOutcome) -> list[Step]:
        steps = []
        row = 0
        for part, accepted in zip(parts, outcome.accepted, strict=True):
            first = row + len(part.pending) - 1  # the row of the last given token
            if _on_device(part.request.sampling):
                steps.append(Step(tuple(outcome.chosen[first : first + accepted + 1]), accepted))
            else:
                logits = self._stepper.logits[first : first + len(part.draft) + 1].cpu().numpy()
                logits = logits.astype(np.float32, copy=False)
                base, request = part.session.length, part.request
                steps.append(verify(logits, part.draft, request.sampling, base, request.allowed))
            row += len(part.pending) + len(part.draft)
        return steps


def _with_lengths(
    key: Sequence[tuple[CudaSession, Sampling, int]],
) -> tuple[tuple[CudaSession, Sampling, int, int], ...]:
    return tuple((session, sampling, budget, session.length) for session, sampling, budget in key)


def _on_device(sampling: Sampling) -> bool:
    """Whether the kernel chooses: not with logit bias, mixtures or log probabilities."""
    return sampling.logprobs is None and not sampling.logit_bias and not sampling.mixtures


def load_cuda(
    path: Path,
    *,
    precision: RequestedPrecision = "bf16",
    context: int | None = None,
    kv_tokens: int | None = None,
    kv_bytes: int | None = None,
    sparse: Sparse = "off",
    kv_precision: KvPrecision = "bf16",
    draft_head: Callable[[ModelSpec], Path | None] | Path | None = None,
    adapter: AdapterFile | None = None,
    target: str = "auto",
    experts: ExpertPlacement = "gpu",
    expert_bytes: int | None = None,
    cache: Path | None = None,
    exact: bool = True,
    threads: int = 0,
) -> CudaEngine:
    """Load a Hugging Face folder or GGUF file onto the first GPU. A longer `context` than trained uses YaRN.
    `kv_tokens` defaults to what fits in the free memory, or in `kv_bytes`. `draft_head` is the folder of a
    head for this model, or a function that finds it. An `adapter` is merged into the weights. `target` names
    an older GPU architecture to compile for (target.py). `experts` says where a mixture's experts are: "auto"
    leaves those that do not fit, or exceed `expert_bytes`, in host memory, where operators compiled into
    `cache` compute them with `threads` (0: all cores); unless `exact`, experts are also exchanged
    between turns. Raises ModelError, NotEnoughMemory, ConfigError."""
    device = nvidia_gpu()
    kind, blocks = gpu_target(device, target), multiprocessors(device)
    with open_checkpoint(path) as checkpoint:
        if context is not None:
            checkpoint.spec = extend_context(checkpoint.spec, context)
        folder = draft_head(checkpoint.spec) if callable(draft_head) else draft_head
        head = None if folder is None else open_head(folder)
        if head is not None and callable(draft_head):  # not configured explicitly, so it may be left out
            head = head if has_room(head.config, checkpoint.spec, blocks, kind) else None
        source = checkpoint if adapter is None else AdaptedCheckpoint(checkpoint, adapter)
        plan = plan_of(source, precision, blocks, kv_precision, kind)
        free, total = torch.cuda.mem_get_info(device)
        wanted = None if kv_bytes is None else kv_bytes // plan.kv_bytes_per_token
        plan = fit_plan(plan, experts, free, total, kv_tokens=kv_tokens or wanted, most=expert_bytes)
        host = None
        if plan.resident is not None:
            folder = cache or cache_folder()
            profile = folder / "experts" / f"{checkpoint.fingerprint()[:20]}.npy"
            host = place_experts(plan, expert_store(source, folder, threads), profile)
        drafting = None if head is None else HeadPlan(head.config, plan)
        with compile_in_background(plan, sparse=sparse != "off" and supports_sparse(plan), head=drafting):
            weights = load_weights(source, plan, device, host)
    torch.cuda.empty_cache()  # what packing needed
    free, total = torch.cuda.mem_get_info(device)
    slots = state_slots(weights.plan, free, total)
    if kv_tokens is None:
        each = context_bytes(weights.plan) + (0 if head is None else head_bytes_per_token(head.config))
        left = free - weights.plan.state_bytes(slots)
        kv_tokens = kv_token_capacity(weights.plan, left, total, each, kv_bytes)
    launcher = GpuLauncher(weights.plan, device)
    engine = CudaEngine(weights, launcher, kv_tokens, sparse=sparse, draft_head=head, slots=slots)
    engine.follows_use = not exact
    return engine
