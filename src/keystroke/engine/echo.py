"""A deterministic engine without a model, for tests and for measuring the overhead of the pipeline.

Implements the whole contract (prefix reuse, rollback, fork, interruption, limits) with configurable costs.
With a script, a function maps the prompt's text to the answer; without one, the next token is a hash of the
last few tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from keystroke.engine.base import Engine, EngineStats, ExtendResult, Interrupt, ModelInfo, Step, StepRequest
from keystroke.engine.host import HostSession
from keystroke.engine.prefix import PrefixCache

BYTES = 256
BOS, EOS, END_OF_TURN = 256, 257, 258
SPECIAL = {"<bos>": BOS, "<eos>": EOS, "<end>": END_OF_TURN}
VOCAB = 320
_PRINTABLE = b"abcdefghijklmnopqrstuvwxyz ()=.:_\n"

Script = Callable[[str], str | Sequence[int]]


class EchoEngine(Engine):
    """`script` maps the prompt's text to the text or tokens of the answer. Costs are in seconds: per
    prefilled token, per step, and per additional row of a step."""

    def __init__(
        self,
        script: Script | None = None,
        *,
        context_length: int = 131_072,
        prefill_cost: float = 0.0,
        step_cost: float = 0.0,
        row_cost: float = 0.0,
        cache_bytes: int = 1 << 24,
        chunk: int = 512,
        max_batch: int = 1,
    ) -> None:
        self.script = script
        self.max_batch = max_batch
        self.prefill_cost, self.step_cost, self.row_cost = prefill_cost, step_cost, row_cost
        self.chunk = chunk
        self.info = ModelInfo(
            name="echo",
            architecture="echo",
            context_length=context_length,
            vocab_size=VOCAB,
            layers=0,
            parameters=0,
            weight_bytes=0,
            kv_bytes_per_token=1,
            precision="fp32",
            bos=BOS,
            eos=frozenset({EOS, END_OF_TURN}),
        )
        self.cache: PrefixCache[None] = PrefixCache(cache_bytes)
        self._cache_bytes = cache_bytes
        self.live: set[EchoSession] = set()
        self.steps = 0
        self.prefilled = 0

    def session(self, scope: str = "") -> EchoSession:
        return EchoSession(self, scope)

    def step_many(self, requests: Sequence[StepRequest]) -> list[Step]:
        """All steps for the cost of the most expensive one, like an engine that batches."""
        if self.max_batch < 2:
            return super().step_many(requests)
        cost, rows = self.step_cost, self.row_cost
        longest = max(len(r.draft) for r in requests)
        time.sleep(cost + rows * longest)
        self.step_cost = self.row_cost = 0.0
        try:
            return super().step_many(requests)
        finally:
            self.step_cost, self.row_cost = cost, rows

    def protect_prefix(self, tokens: Sequence[int], seconds: float, scope: str = "") -> None:
        self.cache.protect(tokens, seconds, scope)

    def stats(self) -> EngineStats:
        return EngineStats(
            sessions=len(self.live),
            kv_bytes=sum(len(s._held) for s in self.live),
            cached_bytes=self.cache.nbytes,
            cached_tokens=self.cache.tokens,
            kv_limit_bytes=self._cache_bytes,
        )

    def close(self) -> None:
        for session in tuple(self.live):
            session.close()
        self.cache.clear()


class EchoSession(HostSession):
    def __init__(self, engine: EchoEngine, scope: str = "") -> None:
        super().__init__(engine.info.context_length, chunk=engine.chunk, tail=16)
        self.scope = scope
        self._engine = engine
        self._prompt = 0
        self._answer: list[int] | None = None
        engine.live.add(self)

    def extend(self, tokens: Sequence[int], interrupt: Interrupt | None = None) -> ExtendResult:
        self._prompt, self._answer = len(tokens), None
        return super().extend(tokens, interrupt)

    def fork(self) -> EchoSession:
        self._check_open()
        other = EchoSession(self._engine, self.scope)
        self._copy_state_to(other)
        other._prompt, other._answer = self._prompt, self._answer
        return other

    def _forward(
        self, tokens: Sequence[int], start: int, rows: int, interrupt: Interrupt | None
    ) -> np.ndarray:
        engine = self._engine
        if rows:
            engine.steps += 1
            self._spend(engine.step_cost + engine.row_cost * (len(tokens) - 1), interrupt)
        else:
            engine.prefilled += len(tokens)
            self._spend(engine.prefill_cost * len(tokens), interrupt)
        logits = np.zeros((rows, VOCAB), dtype=np.float32)
        context = self._held[max(start - 4, 0) : start] + list(tokens)
        for row in range(rows):
            after = len(tokens) - rows + row + 1  # tokens up to and including this row
            position = start + after
            ending = context[: len(context) - len(tokens) + after][-4:]
            logits[row, self._next_token(ending, position)] = 12.0
            logits[row, self._hash_token(ending, salt=1)] += 6.0
        return logits

    def _adopt(self, tokens: Sequence[int], own: int) -> int:
        _, shared = self._engine.cache.find(tokens, self.scope)
        if shared > own:
            self._held = list(tokens[:shared])
            return shared
        return own

    def _release(self) -> None:
        self._engine.live.discard(self)
        if self._held:
            self._engine.cache.put(self._held, None, len(self._held), self.scope)

    def _next_token(self, ending: list[int], position: int) -> int:
        if self._engine.script is None:
            return self._hash_token(ending, salt=0)
        if self._answer is None:
            prompt = bytes(t for t in self._tokens[: self._prompt] if t < BYTES).decode("utf-8", "replace")
            answer = self._engine.script(prompt)
            self._answer = list(answer.encode() if isinstance(answer, str) else answer)
        index = position - self._prompt
        return self._answer[index] if 0 <= index < len(self._answer) else END_OF_TURN

    @staticmethod
    def _hash_token(ending: list[int], salt: int) -> int:
        state = 2166136261 + salt
        for token in ending:
            state = ((state ^ token) * 16777619) & 0xFFFFFFFF
        return _PRINTABLE[(state >> 7) % len(_PRINTABLE)]

    @staticmethod
    def _spend(seconds: float, interrupt: Interrupt | None) -> None:
        if seconds > 0:
            if interrupt is None:
                time.sleep(seconds)
            elif interrupt.wait(seconds):
                interrupt.check()
