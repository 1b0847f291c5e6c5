"""One completion, from the text around a cursor to the text to insert."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from keystroke.assist.completion.ending import Ending
from keystroke.assist.completion.gate import confidence, find_loop
from keystroke.assist.completion.prompt import build_prompt
from keystroke.assist.completion.window import LONGEST_WORD, half_word
from keystroke.engine.base import GREEDY, Interrupt, Sampling, Session
from keystroke.engine.generation import Chunk, Finish, Generation, GenerationParams, GenerationStats
from keystroke.engine.model import Model
from keystroke.engine.speculative import Drafter

DEFAULT_TOKENS = 128  # of an answer, where the request sets no limit


@dataclass(frozen=True, slots=True)
class Completion:
    """The text to insert at the cursor; empty where the model had nothing to add. `confidence` is how sure
    the model is of it, from 0 to 1; None where the engine reports no probabilities."""

    text: str
    finish: Finish
    trimmed: bool = False
    stats: GenerationStats | None = None
    confidence: float | None = None


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
    params = GenerationParams(max_tokens=max_tokens, sampling=replace(sampling, logprobs=0))
    question = build_question(model, prefix, suffix, budget=budget, params=params)
    generation = Generation(
        model, session, question.tokens, question.params, drafter=drafter, interrupt=interrupt
    )
    ending = Ending.at(prefix, suffix, lines)
    meter = ConfidenceMeter()
    text, finish = read_until_ending(meter.watch(generation), ending, repeated=question.repeated)
    return Completion(text, finish, question.trimmed, generation.stats, meter.value(question.repeated, text))


class ConfidenceMeter:
    """Collects where each token of an answer ends and its log probability."""

    def __init__(self) -> None:
        self._tokens: list[tuple[int, float]] = []
        self._length = 0

    def add(self, text: str, logprobs: Iterable[float]) -> None:
        """Record the next token, or several whose borders are not known."""
        self._length += len(text)
        self._tokens += [(self._length, value) for value in logprobs]

    def watch(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        for chunk in chunks:
            for piece in chunk.split():
                self.add(piece.text, (token.logprob for token in piece.logprobs))
            yield chunk

    def value(self, repeated: str, text: str) -> float | None:
        """The confidence in `text`, which follows the repeated text `repeated`."""
        start, end = len(repeated), len(repeated) + len(text)
        begins = (0, *(end for end, _ in self._tokens))
        inside = [
            value
            for begin, (stop, value) in zip(begins, self._tokens, strict=False)
            if stop > start and begin < end
        ]
        return confidence(inside) if inside and text else None


@dataclass(frozen=True, slots=True)
class CompletionQuestion:
    """A prompt and its sampling. `repeated`: text that the model repeats first."""

    tokens: tuple[int, ...]
    params: GenerationParams
    repeated: str
    trimmed: bool


def build_question(
    model: Model, prefix: str, suffix: str, *, budget: int, params: GenerationParams
) -> CompletionQuestion:
    """The prompt at a cursor and how to sample from it. Raises ContextOverflow or InputError."""
    half = half_word_at_cursor(prefix, suffix)
    above = prefix[: len(prefix) - len(half)]
    limit = params.max_tokens or DEFAULT_TOKENS
    prompt = build_prompt(model, above, suffix, budget=budget, max_tokens=limit)
    repeated = prompt.repeated + half  # the model repeats it; a half word is forced
    begin = repeated if half else ""
    params = replace(params, max_tokens=limit + len(begin), begin=begin, stop_tokens=prompt.stops)
    return CompletionQuestion(prompt.tokens, params, repeated, prompt.trimmed)


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


def read_until_ending(chunks: Iterable[Chunk], ending: Ending, *, repeated: str = "") -> tuple[str, Finish]:
    """Read chunks until the ending is decided. `repeated`: text that the model may repeat at the start."""
    text = ""
    finish = Finish.STOP
    for chunk in chunks:
        text += chunk.text
        if (at := find_loop(strip_repeated(repeated, text))) is not None:
            return ending.cut(strip_repeated(repeated, text)[:at], final=True).text, Finish.STOP
        if chunk.finish is not None:
            finish = chunk.finish
            break
        cut = ending.cut(strip_repeated(repeated, text))
        if cut.done:
            return cut.text, Finish.STOP
    return ending.cut(strip_repeated(repeated, text), final=True).text, finish


class EndingDetector:
    """Tells, piece by piece, whether the ending of a completion is decided."""

    def __init__(self, ending: Ending, repeated: str) -> None:
        self._ending, self._held, self._text = ending, repeated, ""

    def __call__(self, piece: str) -> bool:
        self._text += piece
        return self._ending.cut(strip_repeated(self._held, self._text)).done


def strip_repeated(repeated: str, text: str) -> str:
    """`text` without what the model repeats at its start."""
    if not repeated or text.startswith(repeated):
        return text[len(repeated) :]
    return "" if repeated.startswith(text) else text.lstrip(" \t")
