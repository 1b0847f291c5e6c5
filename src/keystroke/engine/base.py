"""The engine contract: what every backend must do, and the values that cross it.

An engine knows tokens and their KV cache. It never sees text, prompts, requests or the wire.
All calls are blocking and come from one thread at a time, the engine thread; only `Interrupt.set`
may be called from elsewhere. Sampling is a value (`Sampling`), so the same seed gives the same
tokens on every backend that computes the same logits, whatever was drafted.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, Self, TypeAlias

from keystroke.errors import Interrupted, UsageError

if TYPE_CHECKING:  # a client of a gateway has no numbers to work with
    import numpy as np
    import numpy.typing as npt


class Interrupt:
    """A one-way switch another thread may throw. Backends look at it between steps and prefill
    chunks, and may register a callback that ends a run already under way."""

    __slots__ = ("_callbacks", "_event", "_lock", "is_set")

    def __init__(self) -> None:
        self.is_set = False  # looked at several times a token: a plain value
        self._event: threading.Event | None = (
            None  # made by whoever waits; most switches are never waited for
        )
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
        """Sleep until the switch is thrown or the time is over; True if it was thrown."""
        with self._lock:
            if self.is_set:
                return True
            if self._event is None:
                self._event = threading.Event()
        return self._event.wait(seconds)

    def check(self) -> None:
        """Raise Interrupted if the switch was thrown."""
        if self.is_set:
            raise Interrupted("stopped on request")

    def add_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` once when the switch is thrown; at once if it already was."""
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
    """What somebody beside the model takes for likely at one place: of the whole chance `weight`, shared out
    by `chances`; `end` of it goes to whichever of `ends` the model itself finds likeliest. Chances and end
    add up to 1."""

    weight: float
    chances: Mapping[int, float]
    end: float = 0.0
    ends: tuple[int, ...] = ()

    def of(self, token: int, chance: float) -> float:
        """The chance of a token to which the model gives `chance`."""
        said = self.chances.get(token, self.end if token in self.ends else 0.0)
        return (1.0 - self.weight) * chance + self.weight * said


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
    mixtures: tuple[
        Mixture | None, ...
    ] = ()  # by place of the step: the first, then after each drafted token

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
    def by_own_score(self) -> bool:
        """Whether each token's score is its own, whatever others there are: then tokens that are not allowed
        only matter where one of them is chosen."""
        whole = self.top_k == 0 and self.top_p == 1.0 and self.min_p == 0.0
        return self.temperature == 0.0 or whole


GREEDY = Sampling()


Mask: TypeAlias = (
    "npt.NDArray[np.uint32]"  # one bit a token, the lowest first; tokens past its end are not allowed
)


class Allowed(Protocol):
    """Which tokens a step may choose: a grammar at the end of the sequence, and after each drafted token."""

    def row(self, index: int) -> Mask:
        """The tokens that may follow the first `index` tokens of the step's draft. Has at least one bit set,
        never raises, and is valid until the next call. An engine may ask while it computes the step."""

    def permits(self, index: int, token: int) -> bool:
        """Whether `row(index)` surely has `token`, told for much less than the row costs. Where it says no,
        the row decides."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of a chosen token before temperature, and of its best rivals."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Extended:
    """What an extend did: tokens whose KV was already there, and tokens it had to compute."""

    reused: int
    computed: int


@dataclass(frozen=True, slots=True)
class Step:
    """What a step gave: `accepted` draft tokens, then one token of the model's own.
    `len(tokens) == accepted + 1`. `logprobs` parallels `tokens` where the sampling asked for it."""

    tokens: tuple[int, ...]
    accepted: int
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What callers may rely on about a loaded model."""

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


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for receipts, metrics and leak checks."""

    sessions: int
    kv_bytes: int  # held by live sessions
    cached_bytes: int  # held for reuse by sessions to come
    cached_tokens: int


class Session(ABC):
    """A sequence of tokens and their KV cache.

    `tokens` is what the session stands for. The KV of its tail (at least the last token) may still be
    pending; the next `step` computes it together with the draft. So a keystroke costs one run, not two.
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
        """How many of its tokens have their KV. Any thread may ask: it tells how far a long extend has
        come."""
        return self.length

    extended = Extended(0, 0)  # what the last extend did, as far as it came

    @abstractmethod
    def extend(self, tokens: Sequence[int], interrupt: Interrupt | None = None) -> Extended:
        """Make the session hold exactly `tokens`, keeping the longest prefix whose KV this session, or
        any other content the engine still holds, already has; compute the rest in chunks.
        Raises ContextOverflow (session unchanged), NotEnoughMemory, or Interrupted: then the session
        holds the part computed so far and may be extended again."""

    def append(self, tokens: Sequence[int]) -> None:
        """Put `tokens` after those held, computing nothing: the next step does. Raises ContextOverflow."""
        self.extend([*self.tokens, *tokens])

    @abstractmethod
    def step(
        self,
        draft: Sequence[int] = (),
        sampling: Sampling = GREEDY,
        interrupt: Interrupt | None = None,
        allowed: Allowed | None = None,
    ) -> Step:
        """Compute the pending tail and the draft in one run, accept the draft up to its first token that
        differs from the one `sampling` chooses there (out of those `allowed`, where that is given), append
        what was accepted plus the model's own next token to `tokens`, and return them. Needs at least one
        token held. On Interrupted or any other error `tokens` is unchanged."""

    @abstractmethod
    def rollback(self, length: int) -> None:
        """Forget every token from `length` on. 0 <= length <= self.length."""

    @abstractmethod
    def fork(self) -> Session:
        """A session of its own that holds the same tokens, sharing or copying their KV."""

    @abstractmethod
    def close(self) -> None:
        """Give the KV back (the engine may keep it for content-keyed reuse). Idempotent; any other call
        afterwards raises SessionClosed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Guess:
    """Tokens that an engine itself takes for likely to follow, how likely each is right together with all
    before it, and whether the engine is verifying them already: another draft then costs a step more."""

    tokens: tuple[int, ...]
    chances: tuple[float, ...]
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class StepRequest:
    """One session's part in a step taken together with others."""

    session: Session
    draft: Sequence[int] = ()
    sampling: Sampling = GREEDY
    allowed: Allowed | None = None


class Engine(ABC):
    """A loaded model. Makes sessions; owns weights, KV memory and the prefix cache."""

    info: ModelInfo
    max_batch: int = 1  # how many sessions `step_many` advances for about the price of one

    @abstractmethod
    def session(self, scope: str = "") -> Session:
        """A new, empty session. It finds KV of its own scope only: what one scope asked cannot be learnt by
        another from what it finds already computed."""

    def step_many(self, requests: Sequence[StepRequest]) -> list[Step]:
        """Step several sessions; engines that batch override this. Results do not depend on the company."""
        return [r.session.step(r.draft, r.sampling, None, r.allowed) for r in requests]

    drafts: bool = False  # whether `guess` ever has an answer
    runs_ahead: bool = False  # whether a step without `allowed` may be under way before it is asked for

    def guess(self, tokens: Sequence[int], *, wanted: bool = True) -> Guess | None:
        """What the engine takes for likely to follow `tokens`, which must be those of a session just as its
        last step left them; None where it has no opinion. Asking is what makes it think ahead at the next
        step; who does not want an answer this time asks all the same."""
        return None

    @abstractmethod
    def stats(self) -> EngineStats: ...

    @abstractmethod
    def close(self) -> None:
        """Free weights and KV. Idempotent; sessions of this engine become unusable."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
