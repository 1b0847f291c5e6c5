"""The engine contract on MLX.

A session's keys and values are immutable arrays, so that a fork and a reused prefix share them for nothing; a
rollback only shortens the tokens. Memory grows in pages and is counted against a budget; prefixes of closed
sessions are kept as long as it allows. Called by one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from keystroke.engine.base import Engine, EngineStats, Interrupt, ModelInfo
from keystroke.engine.checkpoint import ModelSpec
from keystroke.engine.host import HostSession
from keystroke.engine.mlx.model import Cache, MlxModel
from keystroke.engine.mlx.weights import MlxWeights
from keystroke.engine.prefix import PrefixCache, common_prefix
from keystroke.errors import EngineError, NotEnoughMemory

PAGE = 256  # tokens by which a session's memory grows
PREFILL_CHUNK = 256  # rows between two looks at the interrupt
TAIL = 16  # an extension of up to this many tokens is computed with the next step
WORTH_KEEPING = 16  # tokens: fewer are quickly computed again


@dataclass(frozen=True, slots=True, kw_only=True)
class MlxOptions:
    kv_budget: int = 1 << 30  # bytes
    context_length: int | None = None  # None: the model's own


class MlxEngine(Engine):
    def __init__(self, spec: ModelSpec, weights: MlxWeights, options: MlxOptions) -> None:
        self.spec = spec
        self.model: MlxModel | None = MlxModel(spec, weights)
        self.kv_budget = options.kv_budget
        self.cache: PrefixCache[Cache] = PrefixCache(options.kv_budget)
        self.live: set[MlxSession] = set()
        self._kv_token = 2 * spec.layers * spec.kv_heads * spec.head_dim * weights.dtype.size
        self.info = ModelInfo(
            name=spec.name,
            architecture=spec.architecture,
            context_length=min(options.context_length or spec.context_length, spec.context_length),
            vocab_size=spec.vocab_size,
            layers=spec.layers,
            parameters=spec.parameters,
            weight_bytes=weights.nbytes,
            kv_bytes_per_token=self._kv_token,
            precision="stored",
            bos=spec.bos,
            eos=spec.eos,
        )

    def session(self, scope: str = "") -> MlxSession:
        if self.model is None:
            raise EngineError("this engine was closed; load the model again")
        return MlxSession(self, scope)

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
        self.cache.clear()
        self.model = None
        mx.clear_cache()

    # For sessions

    def require(self, capacity: int) -> None:
        """Make room for a session of `capacity` tokens. Raises NotEnoughMemory."""
        need = capacity * self._kv_token
        while self._live_bytes() + self.cache.nbytes + need > self.kv_budget and self.cache.drop_oldest():
            pass
        left = self.kv_budget - self._live_bytes()
        if need > left:
            raise NotEnoughMemory(
                f"a session of {capacity:,} tokens needs {need / 2**20:,.0f} MB of KV cache and "
                f"{max(left, 0) / 2**20:,.0f} MB of the budget are left; close sessions or raise "
                "engine.kv_budget_mb"
            )

    def _live_bytes(self) -> int:
        return sum(session.capacity for session in self.live) * self._kv_token


class MlxSession(HostSession):
    def __init__(self, engine: MlxEngine, scope: str = "") -> None:
        super().__init__(engine.info.context_length, chunk=PREFILL_CHUNK, tail=TAIL)
        self._engine = engine
        self.scope = scope
        self.kv: Cache | None = None
        self.capacity = 0
        engine.live.add(self)

    def fork(self) -> MlxSession:
        self._check_open()
        other = MlxSession(self._engine, self.scope)
        other.kv, other.capacity = self.kv, self.capacity
        self._copy_state_to(other)
        return other

    def _forward(
        self, tokens: Sequence[int], start: int, rows: int, interrupt: Interrupt | None
    ) -> np.ndarray:
        model = self._engine.model
        assert model is not None
        kv = self._with_room(start + len(tokens))
        logits, following = model.run(list(tokens), start, rows, kv)
        del kv
        self.kv = (
            following  # before computing: nobody else holds the old arrays, so they are written in place
        )
        mx.eval([array for pair in following for array in pair] + ([] if logits is None else [logits]))
        if logits is None:
            return np.empty((0, self._engine.spec.vocab_size), dtype=np.float32)
        return np.array(logits)

    def _with_room(self, length: int) -> Cache:
        """This session's cache with at least `length` tokens of capacity."""
        model = self._engine.model
        assert model is not None
        if self.kv is not None and self.capacity >= length:
            return self.kv
        capacity = -(-length // PAGE) * PAGE
        held, self.capacity = self.capacity, 0
        try:
            self._engine.require(capacity)
        except NotEnoughMemory:
            self.capacity = held
            raise
        if self.kv is None:
            self.kv = model.new_cache(capacity)
        else:
            spec = self._engine.spec
            more = mx.zeros((1, spec.kv_heads, capacity - held, spec.head_dim), model.dtype)
            self.kv = [
                (mx.concatenate([k, more], axis=2), mx.concatenate([v, more], axis=2)) for k, v in self.kv
            ]
        self.capacity = capacity
        return self.kv

    def _adopt(self, tokens: Sequence[int], own: int) -> int:
        engine = self._engine
        entry, shared = engine.cache.find(tokens, self.scope)
        kv = entry.payload if entry is not None else None
        for other in engine.live:
            if other is self or other.scope != self.scope or other.kv is None:
                continue
            if (length := common_prefix(other._held, tokens)) > shared:
                kv, shared = other.kv, length
        if kv is None or shared < own + WORTH_KEEPING:
            return own
        capacity = kv[0][0].shape[2]
        held, self.capacity = self.capacity, 0
        try:
            engine.require(capacity)
        except NotEnoughMemory:
            self.capacity = held
            return own
        self.kv, self.capacity = kv, capacity
        self._held = list(tokens[:shared])
        return shared

    def _release(self) -> None:
        engine, kv = self._engine, self.kv
        engine.live.discard(self)
        self.kv, size = None, self.capacity * engine.info.kv_bytes_per_token
        self.capacity = 0
        if kv is not None and len(self._held) >= WORTH_KEEPING:
            engine.cache.put(self._held, kv, size, self.scope)
            self._held = []
        mx.clear_cache()  # memory is shared with every other program on such machines
