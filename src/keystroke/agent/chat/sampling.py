"""Several sampled attempts at one answer: the request, its result, and the race that produces it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from keystroke.agent.attempts import (
    Attempt,
    AttemptChecker,
    Decoder,
    Race,
    RaceResult,
    StopPolicy,
    attempt_samplings,
)
from keystroke.agent.chat.encoder import ConversationEncoder
from keystroke.agent.chat.receipt import Price, StepReceipt
from keystroke.agent.chat.steering import Message, Steering
from keystroke.agent.sandbox.busy_clock import BusyClock
from keystroke.engine.base import Interrupt, Sampling


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """`opening` is text that every answer begins with; `prediction` is text the answer probably repeats;
    `retry` returns the conversation that shows a failed attempt to the next one; `busy` counts the time in
    which the model computes."""

    messages: Sequence[Message]
    checker: AttemptChecker
    attempts: int = 1
    opening: str = ""
    stop: tuple[str, ...] = ()
    prediction: str = ""
    policy: StopPolicy = StopPolicy.FIRST
    max_tokens: int = 2048
    temperature: float = 0.8
    seed: int = 0
    greedy: bool = True  # False where the greedy answer to the same question is known
    workers: int = 2
    retry: Callable[[Attempt], Sequence[Message] | None] | None = None
    on_attempt: Callable[[Attempt], None] | None = None
    interrupt: Interrupt = field(default_factory=Interrupt)
    steering: Steering = field(default_factory=Steering)
    busy: BusyClock = field(default_factory=BusyClock)

    def samplings(self) -> list[Sampling]:
        """The sampling settings of each attempt."""
        return attempt_samplings(
            self.attempts, temperature=self.temperature, seed=self.seed, greedy=self.greedy
        )


@dataclass(slots=True)
class SamplingResult:
    """`steering_lines` are the lines that the user added meanwhile, in order."""

    race: RaceResult
    receipt: StepReceipt
    steering_lines: list[str] = field(default_factory=list)


def run_race(
    request: SamplingRequest, decoder: Decoder, encoder: ConversationEncoder, model: str, price: Price
) -> SamplingResult:
    """Run all attempts of a request with one decoder."""
    lines: list[str] = []

    def retry(failed: Attempt) -> list[int] | None:
        messages = request.retry(failed) if request.retry is not None else None
        return None if messages is None else encoder.encode(messages, opening=request.opening)

    def steer() -> list[int] | None:
        if (line := request.steering.next_line()) is None:
            return None
        lines.append(line)
        return encoder.encode_interjection(line, request.opening)

    result = Race(
        decoder,
        encoder.encode(request.messages, opening=request.opening),
        request.samplings(),
        request.checker,
        workers=request.workers,
        policy=request.policy,
        interrupt=request.interrupt,
        retry=retry,
        steer=steer,
        on_attempt=request.on_attempt,
        busy=request.busy,
    ).run()
    receipt = StepReceipt(
        "attempts",
        model,
        result.prompt_tokens,
        result.reused_tokens,
        result.tokens,
        result.seconds,
        price.cost(result.prompt_tokens, result.reused_tokens, result.tokens),
        len(result.attempts),
    )
    return SamplingResult(result, receipt, lines)
