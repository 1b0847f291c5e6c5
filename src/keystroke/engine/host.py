"""The base of sessions whose logits reach the host: the whole contract except the forward pass.

`tokens` is the content of the session, `_held` that of the KV buffer. A rollback only shortens `tokens`, so
that returning to the same text, or to a rejected draft, costs nothing. Backends implement `_forward` and
optionally `_adopt` (KV from elsewhere) and `_release`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from keystroke.engine.base import GREEDY, AllowedTokens, ExtendResult, Interrupt, Sampling, Session, Step
from keystroke.engine.prefix import common_prefix
from keystroke.engine.sampler import RankedRow, verify
from keystroke.engine.snapshots import run_to_border, snapshot_position
from keystroke.errors import ContextOverflow, SessionClosed, UsageError


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A step before its run: the `tokens` to compute, of which the last `rows` give logits."""

    tokens: list[int]
    rows: int  # 0: nothing has to be computed
    draft: Sequence[int]
    sampling: Sampling
    allowed: AllowedTokens | None
    known: tuple[np.ndarray, RankedRow] | None  # the logits after the last token, kept from an earlier run
    done: Step | None = None  # the whole step, if those are enough


class HostSession(Session):
    """`borders`: tokens that end a message, after which a recurrent state is kept; empty for models whose KV
    cache can be cut anywhere."""

    def __init__(
        self, context_length: int, *, chunk: int, tail: int = 1, borders: Collection[int] = ()
    ) -> None:
        self._context_length = context_length
        self._borders = borders
        self._chunk = chunk  # most rows of one prefill run, between two checks for an interrupt
        self._tail = tail  # at most this many tokens are left for the next step to compute
        self._tokens: list[int] = []
        self._held: list[int] = []  # content of the KV buffer
        self._resident = 0  # leading tokens of _held that equal _tokens; < len(_tokens) unless both are empty
        self._prompt = 0  # the length of the last extend
        self._closed = False

    # What a backend supplies

    @abstractmethod
    def _forward(
        self, tokens: Sequence[int], start: int, rows: int, interrupt: Interrupt | None
    ) -> np.ndarray:
        """Compute KV for `tokens` at positions start, start+1, ... over the KV of positions before
        `start`; return float32 logits of the last `rows` of them, [rows, vocab]. Raises Interrupted."""

    def _synchronize(self) -> None:
        """Wait for the runs that the device is still computing."""

    def _portion(self, start: int) -> int:
        """The number of tokens that one prefill run computes from `start` on."""
        if not self._borders:
            return self._chunk
        return run_to_border(self._tokens, start, self._chunk, self._borders)

    def _snapshot_position(self, start: int, tokens: Sequence[int], drafted: int, newest: int) -> int | None:
        """Where to keep the recurrent state after a run: see `snapshot_position`."""
        length = len(self._tokens)
        return snapshot_position(start, tokens, drafted, length=length, newest=newest, ends=self._borders)

    def _resume(self, length: int) -> int:
        """The largest position up to `length` from which a run can go on. A KV cache can be cut anywhere; a
        recurrent state cannot."""
        return length

    def _inspect(self, fresh: Sequence[int]) -> None:
        """Check the new tokens of an extend. Raises UsageError."""

    def _adopt(self, tokens: Sequence[int], own: int) -> int:
        """If KV held elsewhere shares more than `own` leading tokens with `tokens`, move it into this
        session's buffer, set `_held`, and return the new shared length; otherwise return `own`."""
        return own

    def _ranked(self, rows: int) -> Sequence[RankedRow]:
        """The best tokens and sums of the last run's `rows` rows of logits, if the engine computes them."""
        return ()

    def _known_row(self) -> tuple[np.ndarray, RankedRow] | None:
        """The logits after the last token, if `_keep_row` kept them for the same tokens."""
        return None

    def _keep_row(self, logits: np.ndarray, ranked: RankedRow) -> None:
        """Keep a copy of the logits after the last token, where that pays."""

    def _release(self) -> None:
        """Release the KV; called once."""

    # The contract

    @property
    def tokens(self) -> Sequence[int]:
        return self._tokens

    @property
    def length(self) -> int:
        return len(self._tokens)

    @property
    def resident(self) -> int:
        return self._resident

    def extend(self, tokens: Sequence[int], interrupt: Interrupt | None = None) -> ExtendResult:
        self._check_open()
        if len(tokens) > self._context_length:
            raise ContextOverflow(
                f"the prompt has {len(tokens):,} tokens and the context holds {self._context_length:,}; "
                "shorten it or choose a model with a longer context"
            )
        wanted = list(tokens)
        last = max(len(wanted) - 1, 0)  # the last token stays pending: a step needs a row to compute
        shared = common_prefix(self._held, wanted)
        self._inspect(wanted[shared:])
        self._resident = min(shared, last)
        self._resident = self._resume(min(self._adopt(wanted, self._resident), last))
        reused = self._resident
        self._tokens = wanted
        self._prompt = len(wanted)
        try:
            self._compute_pending(interrupt)
        except BaseException:
            # Keep what was computed, plus one pending token, so that the session stays well formed.
            self._tokens = wanted[: self._resident + 1]
            self.extended = ExtendResult(reused=reused, computed=self._resident - reused)
            raise
        self.extended = ExtendResult(reused=reused, computed=len(wanted) - reused)
        return self.extended

    def append(self, tokens: Sequence[int]) -> None:
        self._check_open()
        if len(self._tokens) + len(tokens) > self._context_length:
            raise ContextOverflow(
                f"the context of {self._context_length:,} tokens has no room for {len(tokens):,} more; "
                "start a new conversation"
            )
        self._inspect(tokens)
        self._tokens.extend(tokens)

    def step(
        self,
        draft: Sequence[int] = (),
        sampling: Sampling = GREEDY,
        interrupt: Interrupt | None = None,
        allowed: AllowedTokens | None = None,
    ) -> Step:
        ready = self.prepare_step(draft, sampling, interrupt, allowed)
        if not ready.rows:
            return self.finish_step(ready, (), ())
        logits = self._run(ready.tokens, ready.rows, interrupt)
        return self.finish_step(ready, logits, self._ranked(len(logits)))

    # A step in two parts, so that an engine can compute those of several sessions in one run

    def prepare_step(
        self,
        draft: Sequence[int] = (),
        sampling: Sampling = GREEDY,
        interrupt: Interrupt | None = None,
        allowed: AllowedTokens | None = None,
    ) -> PreparedStep:
        """What the step's run has to compute, from `resident` on. `tokens` stays as it is until `finish_step`
        is called with the logits. Raises what `step` raises."""
        room = self.check_ready()
        if interrupt is not None:
            interrupt.check()
        base = len(self._tokens)
        draft = draft[: room - 1] if draft else ()
        # While a half word is typed, every key asks for the same prompt.
        known = self._known_row() if base == self._prompt else None
        if known is not None:
            first = verify(known[:1], (), sampling, base, allowed, known[1:])
            if not draft or first.tokens[0] != draft[0]:
                return PreparedStep([], 0, draft, sampling, allowed, known, first)
        self._resident = self._resume(self._resident)
        if base - self._resident > self._tail:  # much was appended
            self._compute_pending(interrupt)
        pending = [*self._tokens[self._resident :], *draft]
        return PreparedStep(pending, len(draft) + (known is None), draft, sampling, allowed, known)

    def finish_step(
        self, ready: PreparedStep, logits: Sequence[np.ndarray] | np.ndarray, ranked: Sequence[RankedRow]
    ) -> Step:
        """Choose tokens by the logits of the run that `prepare_step` described."""
        base, known = len(self._tokens), ready.known
        if ready.done is not None:
            if self._resident == base - 1 and self._held[base - 1 : base] == self._tokens[-1:]:
                self._resident = base
            self._tokens.extend(ready.done.tokens)
            return ready.done
        if known is not None:
            logits, ranked = [known[0], *logits], [known[1], *ranked]
        elif base == self._prompt and ranked:
            self._keep_row(logits[0], ranked[0])
        step = verify(logits, ready.draft, ready.sampling, base, ready.allowed, ranked)
        self._tokens.extend(step.tokens)
        self._resident = base + step.accepted
        return step

    def check_ready(self) -> int:
        """Returns how many tokens the context still holds. Raises if the session cannot take a step."""
        self._check_open()
        if not self._tokens:
            raise UsageError("a step needs at least one token; extend the session first")
        room = self._context_length - len(self._tokens)
        if room <= 0:
            raise ContextOverflow(
                f"the context of {self._context_length:,} tokens is full; start a new conversation"
            )
        return room

    def rollback(self, length: int) -> None:
        self._check_open()
        if not 0 <= length <= len(self._tokens):
            raise UsageError(f"cannot roll back to {length}: the session holds {len(self._tokens)} tokens")
        del self._tokens[length:]
        self._resident = min(self._resident, max(length - 1, 0))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._release()

    # Shared machinery

    def _compute_pending(self, interrupt: Interrupt | None) -> None:
        """Compute the KV of pending tokens in portions, except a tail for the next step."""
        while len(self._tokens) - self._resident > self._tail:
            if interrupt is not None:
                self._synchronize()
                interrupt.check()
            end = min(self._resident + self._portion(self._resident), len(self._tokens) - 1)
            self._run(self._tokens[self._resident : end], 0, interrupt)
            self._resident = end

    def _run(self, tokens: list[int], rows: int, interrupt: Interrupt | None) -> np.ndarray:
        start = self._resident
        # Until the run ends, the buffer after `start` is undefined.
        del self._held[start:]
        logits = self._forward(tokens, start, rows, interrupt)
        self._held.extend(tokens)
        return logits

    def _check_open(self) -> None:
        if self._closed:
            raise SessionClosed("this session was closed; open a new one")

    def _copy_state_to(self, other: HostSession) -> None:
        other._tokens = list(self._tokens)
        other._held = list(self._held)
        other._resident = self._resident
