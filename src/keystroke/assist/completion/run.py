"""One completion, from the text around a cursor to the text to insert."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from keystroke.assist.completion.ending import Ending
from keystroke.assist.completion.gate import find_loop
from keystroke.assist.completion.prompt import build_prompt
from keystroke.assist.completion.window import LONGEST_WORD, half_word
from keystroke.engine.base import GREEDY, Interrupt, Sampling, Session
from keystroke.engine.generation import Chunk, Finish, Generation, GenerationParams, GenerationStats
from keystroke.engine.model import Model
from keystroke.engine.speculative import Drafter

DEFAULT_TOKENS = 128  # of an answer, where the request does not say


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
    params = GenerationParams(max_tokens=max_tokens, sampling=sampling)
    asked = build_question(model, prefix, suffix, budget=budget, params=params)
    generation = Generation(model, session, asked.tokens, asked.params, drafter=drafter, interrupt=interrupt)
    ending = Ending.at(prefix, suffix, lines)
    text, finish = read_until_ending(generation, ending, held=asked.held)
    return Completion(text, finish, asked.trimmed, generation.stats)


@dataclass(frozen=True, slots=True)
class CompletionQuestion:
    """A prompt and its sampling. `held`: text that the model repeats first."""

    tokens: tuple[int, ...]
    params: GenerationParams
    held: str
    trimmed: bool


def build_question(
    model: Model, prefix: str, suffix: str, *, budget: int, params: GenerationParams
) -> CompletionQuestion:
    """The prompt at a cursor and how to sample from it. Raises ContextOverflow or InputError."""
    half = half_word_at_cursor(prefix, suffix)
    above = prefix[: len(prefix) - len(half)]
    limit = params.max_tokens or DEFAULT_TOKENS
    prompt = build_prompt(model, above, suffix, budget=budget, max_tokens=limit)
    held = prompt.held + half  # the model repeats it; a half word is forced
    begin = held if half else ""
    params = replace(params, max_tokens=limit + len(begin), begin=begin, stop_tokens=prompt.stops)
    return CompletionQuestion(prompt.tokens, params, held, prompt.trimmed)


def repeated_text(prefix: str, suffix: str, *, fills_in: bool) -> str:
    """The text that a model repeats first when it is asked through `build_question` elsewhere."""
    half = half_word_at_cursor(prefix, suffix)
    above = prefix[: len(prefix) - len(half)]
    return half if fills_in else above[len(above.rstrip(" \t")) :] + half


def half_word_at_cursor(prefix: str, suffix: str) -> str:
    """The half word before the cursor; empty where there is no other text to continue."""
    half = half_word(prefix[-LONGEST_WORD:])
    alone = not prefix[: len(prefix) - len(half)].strip() and not suffix.strip()
    return "" if alone else half


def read_until_ending(chunks: Iterable[Chunk], ending: Ending, *, held: str = "") -> tuple[str, Finish]:
    """Read chunks until the ending is decided. `held`: text that the model may repeat at the start."""
    text = ""
    finish = Finish.STOP
    for chunk in chunks:
        text += chunk.text
        if (at := find_loop(strip_repeated(held, text))) is not None:
            return ending.cut(strip_repeated(held, text)[:at], final=True).text, Finish.STOP
        if chunk.finish is not None:
            finish = chunk.finish
            break
        cut = ending.cut(strip_repeated(held, text))
        if cut.done:
            return cut.text, Finish.STOP
    return ending.cut(strip_repeated(held, text), final=True).text, finish


class EndingDetector:
    """Tells, piece by piece, whether the ending of a completion is decided."""

    def __init__(self, ending: Ending, held: str) -> None:
        self._ending, self._held, self._text = ending, held, ""

    def __call__(self, piece: str) -> bool:
        self._text += piece
        return self._ending.cut(strip_repeated(self._held, self._text)).done


def strip_repeated(held: str, text: str) -> str:
    """`text` without what the model repeats at its start."""
    if not held or text.startswith(held):
        return text[len(held) :]
    return "" if held.startswith(text) else text.lstrip(" \t")
