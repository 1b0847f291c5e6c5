"""The engine contract on MLX.

A session's keys and values are immutable arrays, so that a fork and a reused prefix share them for nothing; a
rollback only shortens the tokens. Memory grows in pages and is counted against a budget; prefixes of closed
sessions are kept as long as it allows. The state of recurrent layers is taken back from snapshots. Called by
one thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import mlx.core as mx
import numpy as np

from keystroke.engine.base import Engine, EngineStats, Guess, Interrupt
from keystroke.engine.checkpoint import ModelSpec
from keystroke.engine.disk_prefixes import DiskPrefixes, whole_blocks
from keystroke.engine.host import HostSession
from keystroke.engine.mlx.delta_net import empty_state, state_bytes
from keystroke.engine.mlx.drafts import MlxDrafter, MlxDraftHead, MlxPredictor
from keystroke.engine.mlx.model import Cache, MlxModel
from keystroke.engine.mlx.recurrent import MlxRecurrentState, States
from keystroke.engine.mlx.weights import MlxWeights, runs_on_gpu
from keystroke.engine.prefix import PrefixCache, common_prefix
from keystroke.engine.snapshots import SNAPSHOT_SHARE, SnapshotStore
from keystroke.engine.speculative.base import MAX_DRAFT
from keystroke.engine.speculative.cost import drafts_can_pay, measure_verify_cost, remember_cost
from keystroke.engine.speculative.head_file import HeadWeights
from keystroke.engine.speculative.layer_draft import KEPT_STREAM, StreamTail
from keystroke.errors import EngineError, NotEnoughMemory

PAGE = 256  # tokens by which a session's memory grows
PREFILL_CHUNK = 256  # rows between two looks at the interrupt
TAIL = 16  # an extension of up to this many tokens is computed with the next step
WORTH_KEEPING = 16  # tokens: fewer are quickly computed again


@dataclass(frozen=True, slots=True, kw_only=True)
class MlxOptions:
    kv_budget: int = 1 << 30  # bytes
    context_length: int | None = None  # None: the model's own
    disk_prefixes: DiskPrefixes | None = None  # read when useful and written when the engine closes
    draft_head: HeadWeights | None = None  # for models without an MTP layer


@dataclass(slots=True)
class MlxMemory:
    """What a session or a kept prefix has computed. Its arrays are shared, never written to."""

    kv: Cache
    capacity: int  # tokens
    recurrent: MlxRecurrentState | None

    def copy(self) -> MlxMemory:
        return MlxMemory(self.kv, self.capacity, None if self.recurrent is None else self.recurrent.copy())

    def reach(self, length: int) -> int:
        """The largest position up to `length` at which a run can start."""
        return length if self.recurrent is None else self.recurrent.reach(length)


class MlxEngine(Engine):
    def __init__(self, spec: ModelSpec, weights: MlxWeights, options: MlxOptions) -> None:
        """Raises UsageError for a draft head of another model."""
        self.spec = spec
        weight_bytes = weights.nbytes
        self.model: MlxModel | None = MlxModel(spec, weights)
        self.drafter: MlxDrafter | None = None
        if spec.predictor:
            self.drafter = MlxPredictor(self.model, weights)
        elif options.draft_head is not None:
            self.drafter = MlxDraftHead(self.model, options.draft_head)
            weight_bytes += self.drafter.nbytes
        self.drafts = self.drafter is not None
        self.kv_budget = options.kv_budget
        self.cache: PrefixCache[MlxMemory] = PrefixCache(options.kv_budget)
        self.disk_prefixes = options.disk_prefixes
        self.snapshots: SnapshotStore[States] = SnapshotStore(int(options.kv_budget * SNAPSHOT_SHARE))
        self.live: set[MlxSession] = set()
        self.state_bytes = 0 if spec.delta is None else state_bytes(spec.delta)
        self.info = spec.info(
            weight_bytes=weight_bytes,
            kv_bytes_per_token=self._kv_bytes_per_token(self.model),
            precision="stored",
            context=options.context_length,
        )

    def session(self, scope: str = "") -> MlxSession:
        if self.model is None:
            raise EngineError("this engine was closed; load the model again")
        return MlxSession(self, scope)

    def guess(self, tokens: Sequence[int], *, wanted: bool = True) -> Guess | None:
        if self.drafter is None or not wanted:
            return None
        session = next((each for each in self.live if each.tokens is tokens), None)
        guess = session.predict(self.drafter) if session is not None else None
        self.guess_seconds = self.drafter.seconds
        return guess

    def stats(self) -> EngineStats:
        return EngineStats(
            sessions=len(self.live),
            kv_bytes=self._live_bytes(),
            cached_bytes=self.cache.nbytes,
            cached_tokens=self.cache.tokens,
        )

    def close(self) -> None:
        if self.model is None:
            return
        for session in tuple(self.live):
            session.close()
        if self.disk_prefixes is not None:
            self.save_prefixes(self.disk_prefixes)
        self.cache.clear()
        self.model = self.drafter = None
        mx.clear_cache()

    def measure_drafts(self, *, gpu: bool | None = None) -> None:
        """Find out what verifying several rows costs, so that drafts are made only where they pay; a layer
        whose drafts cannot is dropped. MLX's CPU build computes a row after the other: there no draft can.
        `gpu`: whether to measure; None: if there is one."""
        if not (runs_on_gpu() if gpu is None else gpu):
            remember_cost(self, [float(rows) for rows in range(MAX_DRAFT + 2)])
            self._drop_drafter()
            return
        try:
            table = measure_verify_cost(self)
            cost = self._draft_cost()
        except NotEnoughMemory:  # the assumed costs stay
            return
        if self.drafter is not None and not drafts_can_pay(table, cost, self.drafter.most):
            self._drop_drafter()
        self.cache.clear()  # of what was only measured

    def _draft_cost(self) -> float:
        """The time of a drafted token in plain steps, at best."""
        if self.drafter is None or self.info.context_length < 32:
            return 0.0
        steps, drafts = [], []
        with self.session() as session:
            session.extend([i % self.info.vocab_size for i in range(1, 17)])
            for _ in range(4):
                started = time.perf_counter()
                session.step()
                stepped = time.perf_counter()
                session.predict(self.drafter, 1)
                steps.append(stepped - started)
                drafts.append(time.perf_counter() - stepped)
        self.drafter.seconds = 0.0  # of whole drafts
        return min(drafts) / min(steps)

    def _drop_drafter(self) -> None:
        if self.drafter is None or self.model is None:
            return
        weight_bytes = self.info.weight_bytes - self.drafter.nbytes
        self.drafter, self.drafts = None, False
        self.cache.clear()  # prefixes have its keys and values
        kv_bytes = self._kv_bytes_per_token(self.model)
        self.info = replace(self.info, weight_bytes=weight_bytes, kv_bytes_per_token=kv_bytes)
        mx.clear_cache()

    def protect_prefix(self, tokens: Sequence[int], seconds: float, scope: str = "") -> None:
        self.cache.protect(tokens, seconds, scope)

    def save_prefixes(self, disk: DiskPrefixes) -> None:
        for entry in self.cache.newest_first():
            memory, length = entry.payload, len(entry.tokens)
            arrays = [np.array(array) for layer in memory.kv for array in layer]
            states = None if memory.recurrent is None else memory.recurrent.saved_states(length)
            disk.save(entry.tokens, arrays, entry.scope, states)

    # For sessions

    def load_prefix(self, tokens: Sequence[int], scope: str, beyond: int) -> None:
        """Load a prefix from disk into the cache if it is longer than `beyond`."""
        if self.disk_prefixes is None or self.model is None:
            return
        entry, length = self.disk_prefixes.find(tokens, scope, beyond + WORTH_KEEPING)
        if entry is None:
            return
        memory = self.new_memory(-(-whole_blocks(length) // PAGE) * PAGE)
        arrays = [np.array(array) for layer in memory.kv for array in layer]
        recurrent = memory.recurrent
        restore = None if recurrent is None else partial(recurrent.restore, store=self.snapshots)
        if not self.disk_prefixes.load(entry, arrays, length, restore):
            return
        each = self.model.arrays_per_layer
        loaded = [mx.array(array) for array in arrays]
        memory.kv = [tuple(loaded[at : at + each]) for at in range(0, len(loaded), each)]
        self.cache.put(list(tokens[:length]), memory, self.bytes_for(memory.capacity), scope)

    def new_memory(self, capacity: int) -> MlxMemory:
        assert self.model is not None
        delta = self.spec.delta
        recurrent = None if delta is None else MlxRecurrentState([empty_state(delta) for _ in delta.layers])
        layers = self.model.attention_layers + self.drafts
        return MlxMemory(self.model.new_cache(capacity, layers), capacity, recurrent)

    def bytes_for(self, capacity: int) -> int:
        """Of a session with so many tokens; a recurrent state is held twice, after a step and before it."""
        return capacity * self.info.kv_bytes_per_token + 2 * self.state_bytes

    def require(self, capacity: int) -> None:
        """Make room for a session of `capacity` tokens. Raises NotEnoughMemory."""
        need = self.bytes_for(capacity)
        while self._live_bytes() + self.cache.nbytes + need > self.kv_budget and self.cache.drop_oldest():
            pass
        left = self.kv_budget - self._live_bytes()
        if need > left:
            raise NotEnoughMemory(
                f"a session of {capacity:,} tokens needs {need / 2**20:,.0f} MB of KV cache and "
                f"{max(left, 0) / 2**20:,.0f} MB of the budget are left; close sessions or raise "
                "engine.kv_budget_mb"
            )

    def _kv_bytes_per_token(self, model: MlxModel) -> int:
        arrays = model.arrays_per_layer * (model.attention_layers + self.drafts)
        return arrays * self.spec.kv_heads * self.spec.head_dim * model.dtype.size

    def _live_bytes(self) -> int:
        return sum(self.bytes_for(session.capacity) for session in self.live if session.capacity)


class MlxSession(HostSession):
    def __init__(self, engine: MlxEngine, scope: str = "") -> None:
        spec = engine.spec
        borders = spec.eos if spec.delta is not None else ()
        super().__init__(engine.info.context_length, chunk=PREFILL_CHUNK, tail=TAIL, borders=borders)
        self._engine = engine
        self.scope = scope
        self.memory: MlxMemory | None = None
        self.streams: StreamTail[mx.array] = StreamTail()  # that the drafter reads
        engine.live.add(self)

    @property
    def capacity(self) -> int:
        return 0 if self.memory is None else self.memory.capacity

    def fork(self) -> MlxSession:
        self._check_open()
        other = MlxSession(self._engine, self.scope)
        other.memory = None if self.memory is None else self.memory.copy()
        self._copy_state_to(other)
        other.streams = self.streams.copy()
        return other

    def predict(self, drafter: MlxDrafter, most: int | None = None) -> Guess | None:
        """The drafter's guess of up to `most` tokens; None without the stream before the last token, or if
        memory is short."""
        position = len(self._tokens) - 1
        before = self.streams.before(position)
        most = min(most or drafter.most, self._context_length - len(self._tokens) - 1)
        if before is None or self._resident != position or most < 1:
            return None
        try:
            memory = self._with_room(len(self._tokens) + most)
        except NotEnoughMemory:
            return None
        stream = before

        def follow(token: int, place: int) -> tuple[int, float]:
            nonlocal stream
            logits, stream, own = drafter.next_logits(token, place, stream, memory.kv[-1])
            memory.kv = [*memory.kv[:-1], own]
            best, chance = mx.argmax(logits), mx.exp(logits.max() - mx.logsumexp(logits))
            mx.eval(best, chance, stream, *own)
            return drafter.token_of(int(np.array(best))), float(np.array(chance))

        return drafter.guess_likely(follow, self._tokens[position], position, most)

    def _forward(
        self, tokens: Sequence[int], start: int, rows: int, interrupt: Interrupt | None
    ) -> np.ndarray:
        model = self._engine.model
        assert model is not None
        memory = self._with_room(start + len(tokens))
        recurrent = memory.recurrent
        states = [] if recurrent is None else recurrent.at(start, model)
        drafter, end = self._engine.drafter, start + len(tokens)
        run = model.run(tokens, start, rows, memory.kv, states, () if drafter is None else drafter.reads)
        wanted = [] if run.logits is None else [run.logits]
        if drafter is not None:
            streams, own = drafter.follow(run, start, self.streams.before(start), memory.kv[-1])
            run.cache.append(own)
            newest = [streams[row] for row in range(max(len(tokens) - rows - KEPT_STREAM, 0), len(tokens))]
            self.streams.replace(start, end, newest)
            wanted += newest
        # Replaced before anything is computed: arrays without another reference are written in place.
        memory.kv = run.cache
        wanted += [array for layer in memory.kv for array in layer]
        if recurrent is not None:
            drafted = max(rows - 1, 0)
            recurrent.advance(start, len(tokens), drafted, run.states)
            at = self._snapshot_position(start, tokens, drafted, recurrent.newest_snapshot())
            if at is not None:
                recurrent.keep(at, self._engine.snapshots, self._engine.state_bytes)
            wanted += recurrent.arrays()
        mx.eval(wanted)
        if run.logits is None:
            return np.empty((0, self._engine.spec.vocab_size), dtype=np.float32)
        return np.array(run.logits)

    def _resume(self, length: int) -> int:
        return length if self.memory is None else self.memory.reach(length)

    def _with_room(self, length: int) -> MlxMemory:
        """This session's memory with at least `length` tokens of capacity."""
        engine, held = self._engine, self.memory
        if held is not None and held.capacity >= length:
            return held
        capacity = -(-length // PAGE) * PAGE
        self.memory = None  # its bytes are not needed beside the new ones
        try:
            engine.require(capacity)
        except NotEnoughMemory:
            self.memory = held
            raise
        if held is None:
            held = engine.new_memory(capacity)
        else:
            spec, model = engine.spec, engine.model
            assert model is not None
            more = mx.zeros((1, spec.kv_heads, capacity - held.capacity, spec.head_dim), model.dtype)
            held.kv = [tuple(mx.concatenate([each, more], axis=2) for each in layer) for layer in held.kv]
            held.capacity = capacity
        self.memory = held
        return held

    def _adopt(self, tokens: Sequence[int], own: int) -> int:
        engine = self._engine
        entry, shared = engine.cache.find(tokens, self.scope)
        if engine.disk_prefixes is not None and len(tokens) > max(own, shared) + WORTH_KEEPING:
            engine.load_prefix(tokens, self.scope, max(own, shared))
            entry, shared = engine.cache.find(tokens, self.scope)
        source = entry.payload if entry is not None else None
        for other in engine.live:
            if other is self or other.scope != self.scope or other.memory is None:
                continue
            if (length := common_prefix(other._held, tokens)) > shared:
                source, shared = other.memory, length
        own = self._resume(own)
        shared = 0 if source is None else source.reach(shared)
        if source is None or shared < own + WORTH_KEEPING:
            return own
        held, self.memory = self.memory, None
        try:
            engine.require(source.capacity)
        except NotEnoughMemory:
            self.memory = held
            return own
        self.memory = source.copy()
        self.streams.clear()
        self._held = list(tokens[:shared])
        return shared

    def _release(self) -> None:
        engine, memory = self._engine, self.memory
        engine.live.discard(self)
        self.memory = None
        if memory is not None and len(self._held) >= WORTH_KEEPING:
            engine.cache.put(self._held, memory, engine.bytes_for(memory.capacity), self.scope)
            self._held = []
        mx.clear_cache()  # memory is shared with every other program on such machines
