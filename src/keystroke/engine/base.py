"""The engine contract: what every backend must do, and the values that cross it.

Engines work on tokens and their KV cache, never on text or requests. All calls block and come from one
thread at a time, the engine thread; only `Interrupt.set` may be called from another. The same seed gives the
same tokens on every backend that computes the same logits, with or without drafts.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, Self, TypeAlias

from keystroke.errors import Interrupted, UsageError

if TYPE_CHECKING:  # clients of a gateway do not need numpy
    import numpy as np
    import numpy.typing as npt


class Interrupt:
    """A flag that another thread sets once. Backends check it between steps and prefill chunks, and may
    register a callback that ends a run in progress."""

    __slots__ = ("_callbacks", "_event", "_lock", "is_set")

    def __init__(self) -> None:
        self.is_set = False  # read several times a token, so a plain attribute
        self._event: threading.Event | None = None  # created by the first `wait`
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []

    def set(self) -> None:
        with self._lock:
            if self.is_set:
                return
            self.is_set = True
            if self._event is not None:
                self._event.set()
            callbacks = tuple(self._callbacks)
        for callback in callbacks:
            callback()

    def wait(self, seconds: float) -> bool:
        """Sleep until the flag is set or the time is over. Returns whether it was set."""
        with self._lock:
            if self.is_set:
                return True
            if self._event is None:
                self._event = threading.Event()
        return self._event.wait(seconds)

    def check(self) -> None:
        """Raise Interrupted if the flag is set."""
        if self.is_set:
            raise Interrupted("stopped on request")

    def add_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` once when the flag is set; immediately if it already is."""
        with self._lock:
            if not self.is_set:
                self._callbacks.append(callback)
                return
        callback()

    def remove_callback(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if callback in self._callbacks:
                self._callbacks.remove(callback)


@dataclass(frozen=True, slots=True)
class Mixture:
    """A second distribution to mix into the model's at one position, with a total probability of `weight`.
    `chances` gives its probability of each token; `end` is that of an end token, and counts for the one of
    `ends` that the model prefers. `chances` and `end` add up to 1, or `weight` is 0. Before that, the model's
    distribution is restricted to the tokens `only`, in ascending order, if they are given."""

    weight: float
    chances: Mapping[int, float]
    end: float = 0.0
    ends: tuple[int, ...] = ()
    only: npt.NDArray[np.intp] | None = field(default=None, compare=False)

    def probability(self, token: int, chance: float) -> float:
        """The mixed probability of a token to which the model gives `chance`."""
        other = self.chances.get(token, self.end if token in self.ends else 0.0)
        return (1.0 - self.weight) * chance + self.weight * other

    def allows(self, token: int) -> bool:
        """Whether the model's distribution keeps this token."""
        if self.only is None:
            return True
        at = int(self.only.searchsorted(token))
        return at < len(self.only) and bool(self.only[at] == token)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen from logits. Temperature 0 is greedy. With a temperature the choice is
    argmax(log p + Gumbel(seed, position)): a pure function of (logits, seed, position), which is why
    a draft can be checked by equality and never changes the text."""

    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None  # None: none computed; 0: the chosen token's; n: and the n best
    mixtures: Sequence[Mixture | None] = ()  # at the step's first position and after each draft token

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 5.0:
            raise UsageError(
                f"temperature must be between 0 and 5, not {self.temperature}", param="temperature"
            )
        if self.top_k < 0:
            raise UsageError(f"top_k must be 0 (off) or more, not {self.top_k}", param="top_k")
        if not 0.0 < self.top_p <= 1.0:
            raise UsageError(f"top_p must be above 0 and at most 1, not {self.top_p}", param="top_p")
        if not 0.0 <= self.min_p < 1.0:
            raise UsageError(f"min_p must be at least 0 and below 1, not {self.min_p}", param="min_p")
        if self.logprobs is not None and not 0 <= self.logprobs <= 20:
            raise UsageError(f"logprobs must be between 0 and 20, not {self.logprobs}", param="logprobs")

    def mixture(self, row: int) -> Mixture | None:
        return self.mixtures[row] if row < len(self.mixtures) else None

    @property
    def scores_tokens_independently(self) -> bool:
        """Whether a token's score does not depend on other tokens. Then a grammar's mask only matters where
        the chosen token is not allowed."""
        whole = self.top_k == 0 and self.top_p == 1.0 and self.min_p == 0.0
        return self.temperature == 0.0 or whole


GREEDY = Sampling()


# One bit per token, the lowest first; tokens past its end are not allowed.
Mask: TypeAlias = "npt.NDArray[np.uint32]"


class AllowedTokens(Protocol):
    """Which tokens a step may choose, at the end of the sequence and after each token of the draft."""

    def row(self, index: int) -> Mask:
        """The tokens that may follow the first `index` tokens of the step's draft. At least one bit is set;
        never raises. Valid until the next call. An engine may call this while it computes the step."""

    def permits(self, index: int, token: int) -> bool:
        """A much cheaper check of `row(index)`: True means that `token` is allowed, False that only the row
        can tell."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of a chosen token and of the best alternatives, before temperature."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class ExtendResult:
    """The numbers of tokens of an extend that had their KV already, and that were computed."""

    reused: int
    computed: int


@dataclass(frozen=True, slots=True)
class Step:
    """The result of a step: `accepted` draft tokens, then one token that the model chose.
    `len(tokens) == accepted + 1`. `logprobs` has one entry per token if the sampling asks for them."""

    tokens: tuple[int, ...]
    accepted: int
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Properties of a loaded model."""

    name: str
    architecture: str
    context_length: int
    vocab_size: int
    layers: int
    parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    precision: str  # "stored", "int4", "int8", "fp16", "bf16", "fp32"
    bos: int | None = None
    eos: frozenset[int] = frozenset()
    mapped: bool = False  # weights are read where the file is mapped: another engine on it adds no copy
    host_bytes: int = 0  # of the weights, in the host's memory
    experts: int = 0  # of each layer of a mixture
    active_experts: int = 0  # used for one token


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for receipts, metrics and leak checks."""

    sessions: int
    kv_bytes: int  # held by live sessions
    cached_bytes: int  # cached for later sessions
    cached_tokens: int
    kv_limit_bytes: int = 0  # that both may take together; 0: unknown


class Session(ABC):
    """A sequence of tokens and their KV cache.

    The KV of the last tokens (at least one) may still be pending; the next `step` computes it together with
    the draft, so that a keystroke costs one run instead of two.
    """

    @property
    @abstractmethod
    def tokens(self) -> Sequence[int]:
        """The tokens held, pending tail included. Do not mutate."""

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def resident(self) -> int:
        """How many tokens have their KV: the progress of a long extend. May be read from any thread."""
        return self.length

    extended = ExtendResult(0, 0)  # the result of the last extend, also if it was interrupted

    @abstractmethod
    def extend(self, tokens: Sequence[int], interrupt: Interrupt | None = None) -> ExtendResult:
        """Make the session hold exactly `tokens`. Reuses the longest prefix whose KV the engine still holds,
        in this session or elsewhere, and computes the rest in chunks.
        Raises ContextOverflow (session unchanged), NotEnoughMemory, or Interrupted: then the session
        holds the part computed so far and may be extended again."""

    def append(self, tokens: Sequence[int]) -> None:
        """Add `tokens` without computing their KV: the next step does that. Raises ContextOverflow."""
        self.extend([*self.tokens, *tokens])

    def warm(self, interrupt: Interrupt | None = None) -> None:  # noqa: B027 - most engines keep nothing
        """Compute what `extend` left to the next step, if the engine keeps the result for it. Raises
        Interrupted."""

    @abstractmethod
    def step(
        self,
        draft: Sequence[int] = (),
        sampling: Sampling = GREEDY,
        interrupt: Interrupt | None = None,
        allowed: AllowedTokens | None = None,
    ) -> Step:
        """Compute the pending tail and the draft in one run. Accepts the draft up to the first token that
        differs from the one `sampling` chooses there (among those `allowed`, if given), appends the accepted
        tokens and the model's next token to `tokens`, and returns them. The session must hold at least one
        token. On Interrupted or any other error `tokens` is unchanged."""

    @abstractmethod
    def rollback(self, length: int) -> None:
        """Drop every token from `length` on. 0 <= length <= self.length."""

    @abstractmethod
    def fork(self) -> Session:
        """A new session that holds the same tokens; their KV is shared or copied."""

    @abstractmethod
    def close(self) -> None:
        """Release the KV (the engine may cache it for reuse). Idempotent; any other call afterwards raises
        SessionClosed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Guess:
    """Tokens that the engine predicts, the probability that each and all before it are right, and whether
    the engine is already verifying them (`ahead`): another draft then costs an extra step."""

    tokens: tuple[int, ...]
    chances: tuple[float, ...]
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class StepRequest:
    """One session's part of a batched step."""

    session: Session
    draft: Sequence[int] = ()
    sampling: Sampling = GREEDY
    allowed: AllowedTokens | None = None


class Engine(ABC):
    """A loaded model: owns its weights, KV memory and prefix cache, and creates sessions."""

    info: ModelInfo
    max_batch: int = 1  # sessions that `step_many` advances in about the time of two steps, or less
    batch_slows: bool = (
        False  # whether a step of several takes noticeably longer than one of a single session
    )

    @abstractmethod
    def session(self, scope: str = "") -> Session:
        """A new, empty session. It reuses KV of its own scope only, so that timing does not reveal
        another scope's prompts."""

    def step_many(self, requests: Sequence[StepRequest]) -> list[Step]:
        """Step several sessions. Engines that batch override this; batching never changes the results."""
        return [r.session.step(r.draft, r.sampling, None, r.allowed) for r in requests]

    @property
    def free_batch(self) -> int:
        """The number of sessions that `step_many` advances at about the cost of one."""
        return 1 if self.batch_slows else self.max_batch

    drafts: bool = False  # whether `guess` may return a draft
    guess_seconds: float = 0.0  # what a guess takes; 0: nothing that a step does not hide
    runs_ahead: bool = False  # whether it may start a step without `allowed` before it is asked for

    def guess(self, tokens: Sequence[int], *, wanted: bool = True) -> Guess | None:
        """The engine's own draft of what follows `tokens`, which must be a session's tokens as its last step
        left them; None if it has none. The call also makes the engine draft at the next step, so a caller
        that needs no draft this time passes `wanted=False`."""
        return None

    def protect_prefix(self, tokens: Sequence[int], seconds: float, scope: str = "") -> None:
        """Keep the KV of a prefix longer than others, for so many seconds. Engines that cannot ignore it."""
        return

    @abstractmethod
    def stats(self) -> EngineStats: ...

    @abstractmethod
    def close(self) -> None:
        """Free weights and KV. Idempotent; sessions of this engine become unusable."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
