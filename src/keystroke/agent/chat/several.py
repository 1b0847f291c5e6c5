"""Several attempts at one answer, put together from what was asked: prompts, retries, lines said meanwhile.

Composition only; whoever writes the attempts is a decoder, and the race does the rest.
"""

from __future__ import annotations

from keystroke.agent.attempts import Attempt, Decoder, Outcome, Race, samplings
from keystroke.agent.chat.chat import Asked, Steered, Steering
from keystroke.agent.chat.receipt import Price, Receipt
from keystroke.agent.chat.wording import Wording
from keystroke.engine.base import Interrupt


def race_for(
    asked: Asked, decoder: Decoder, wording: Wording, interrupt: Interrupt | None, steering: Steering | None
) -> tuple[Race, Steered]:
    """The race that answers `asked`, and where the lines are kept that the user says in its course."""
    heard = Steered()

    def retry(failed: Attempt) -> list[int] | None:
        shown = asked.retry(failed) if asked.retry is not None else None
        return None if shown is None else wording.prompt(shown, opening=asked.opening)

    def steer() -> list[int] | None:
        line = steering.take() if steering is not None else None
        if line is None:
            return None
        heard.lines.append(line)
        return wording.splice(line, asked.opening)

    race = Race(
        decoder,
        wording.prompt(asked.messages, opening=asked.opening),
        samplings(asked.attempts, temperature=asked.temperature, seed=asked.seed),
        asked.judge,
        workers=asked.workers,
        policy=asked.policy,
        interrupt=interrupt,
        retry=retry,
        steer=steer,
        on_attempt=asked.on_attempt,
    )
    return race, heard


def receipt_of(outcome: Outcome, model: str, price: Price, seconds: float) -> Receipt:
    return Receipt(
        "attempts",
        model,
        outcome.prompt_tokens,
        outcome.reused_tokens,
        outcome.tokens,
        seconds,
        price.of(outcome.prompt_tokens, outcome.reused_tokens, outcome.tokens),
        len(outcome.attempts),
    )
