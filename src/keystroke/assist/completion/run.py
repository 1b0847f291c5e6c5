"""One completion, from the text around a cursor to the text to insert.

Law: drives one generation until its ending is decided, then stops it. Knows no files and prints nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from keystroke.assist.completion.ending import Ending
from keystroke.assist.completion.gate import loops_from
from keystroke.assist.completion.prompt import build_prompt
from keystroke.assist.completion.window import LONGEST_WORD, half_word
from keystroke.engine.base import GREEDY, Interrupt, Sampling, Session
from keystroke.engine.generation import Chunk, Finish, Generation, GenerationParams, GenerationStats
from keystroke.engine.model import Model
from keystroke.engine.speculative import Drafter


@dataclass(frozen=True, slots=True)
class Completion:
    """The text to insert at the cursor; empty where the model had nothing to add."""

    text: str
    finish: Finish
    trimmed: bool = False
    stats: GenerationStats | None = None


def complete(
    model: Model,
    session: Session,
    prefix: str,
    suffix: str = "",
    *,
    lines: int = 0,
    budget: int = 1024,
    max_tokens: int = 128,
    sampling: Sampling = GREEDY,
    drafter: Drafter | None = None,
    interrupt: Interrupt | None = None,
) -> Completion:
    """The completion between `prefix` and `suffix`. Raises what the engine raises, but not for an interrupt:
    that ends the completion with what it has."""
    half = half_word(prefix[-LONGEST_WORD:])
    if not prefix[: len(prefix) - len(half)].strip() and not suffix.strip():
        half = ""  # there is nothing else to go on from
    above = prefix[: len(prefix) - len(half)]
    prompt = build_prompt(model, above, suffix, budget=budget, max_tokens=max_tokens)
    held = prompt.held + half  # said again, and where it is a half word it has to be
    begin = held if half else ""
    params = GenerationParams(max_tokens=max_tokens + len(begin), sampling=sampling, begin=begin)
    generation = Generation(model, session, prompt.tokens, params, drafter, interrupt)
    ending = Ending.at(prefix, suffix, lines)
    text, finish = settle(_until(generation, prompt.stops), ending, held=held)
    return Completion(text, finish, prompt.trimmed, generation.stats)


def settle(chunks: Iterable[Chunk], ending: Ending, *, held: str = "") -> tuple[str, Finish]:
    """Read chunks until the ending is decided. `held` is what the model may say again at the start."""
    text = ""
    finish = Finish.STOP
    for chunk in chunks:
        text += chunk.text
        if (at := loops_from(without_held(held, text))) is not None:
            return ending.cut(without_held(held, text)[:at], final=True).text, Finish.STOP
        if chunk.finish is not None:
            finish = chunk.finish
            break
        cut = ending.cut(without_held(held, text))
        if cut.done:
            return cut.text, Finish.STOP
    return ending.cut(without_held(held, text), final=True).text, finish


def without_held(held: str, text: str) -> str:
    """`text` less what the model had to say again at its start."""
    if not held or text.startswith(held):
        return text[len(held) :]
    return "" if held.startswith(text) else text.lstrip(" \t")


def _until(generation: Generation, stops: frozenset[int]) -> Iterator[Chunk]:
    """The generation's chunks up to the first token in `stops`."""
    for chunk in generation:
        if stops.intersection(chunk.tokens):
            yield Chunk(chunk.text, chunk.tokens, chunk.logprobs, Finish.STOP)
            return
        yield chunk
