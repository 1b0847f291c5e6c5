"""How well a model completes unseen code, with the real engine and prompt formats.

A `Suggester` is anything that completes code. Scores are counts over fixed cases; every share has a 95 %
interval.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any, Protocol

from keystroke.assist.completion.gate import THRESHOLDS
from keystroke.assist.completion.prompt import build_prompt, trim_text
from keystroke.engine.base import Sampling
from keystroke.engine.generation import Generation, GenerationParams
from keystroke.engine.model import Model
from keystroke.text.cases import CompletionCase
from keystroke_lab.pretraining.fim import FimCut

GATE = THRESHOLDS["balanced"]  # the assistant shows a suggestion whose tokens are this likely on average
_LINE_TOKENS, _BLOCK_TOKENS = 48, 128


@dataclass(frozen=True, slots=True)
class EvaluatedSuggestion:
    text: str
    confidence: float = 1.0
    seconds: float = 0.0  # decoding alone
    tokens: int = 0


class Suggester(Protocol):
    """Something that completes code. `fills` says whether it reads the text after the cursor."""

    name: str
    fills: bool

    def line(self, prefix: str, suffix: str | None) -> EvaluatedSuggestion: ...

    def block(self, prefix: str, suffix: str | None) -> EvaluatedSuggestion: ...


def left_to_right(prefix: str, budget: int) -> tuple[str, str]:
    """The end of `prefix` that a model continues, and the space or tab held back from it. A word is cut
    into tokens together with the one before it, so a prompt that ends in one is cut as no model has seen: it
    is held back. No more than one: newlines and indentation are tokens of their own, and without them the
    line changes."""
    held = prefix[-1:] if prefix.endswith((" ", "\t")) else ""
    before, _ = trim_text(prefix[: len(prefix) - len(held)], "", budget=budget)
    return before, held


class ModelSuggester:
    """A model on an engine. One session is kept, so what two prompts share is computed once."""

    def __init__(self, model: Model, context: int = 0) -> None:
        """`context`: tokens around the cursor that the model sees; 0 is all that fit."""
        self.name = model.name
        self._budget = context or model.engine.info.context_length
        self.model = model
        self.fills = model.fim is not None
        self._session = model.engine.session()

    def _ask(self, prefix: str, suffix: str | None, limit: int, stop: tuple[str, ...]) -> EvaluatedSuggestion:
        model, held = self.model, ""
        if suffix is None:
            prefix, held = left_to_right(prefix, self._budget)
            tokens, ends = model.prompt(prefix), frozenset[int]()
        else:
            prompt = build_prompt(model, prefix, suffix, budget=self._budget, max_tokens=limit)
            tokens, ends = list(prompt.tokens), prompt.stops
        params = GenerationParams(limit, Sampling(logprobs=0), stop=stop, stop_tokens=ends)
        generation = Generation(model, self._session, tokens, params)
        logprobs = [entry.logprob for chunk in generation for entry in chunk.logprobs]
        mean = sum(logprobs) / len(logprobs) if logprobs else -math.inf
        stats = generation.stats
        text = generation.text.removeprefix(held)
        return EvaluatedSuggestion(text, math.exp(mean), stats.decode_seconds, stats.tokens)

    def line(self, prefix: str, suffix: str | None) -> EvaluatedSuggestion:
        return self._ask(prefix, suffix, _LINE_TOKENS, ("\n",))

    def block(self, prefix: str, suffix: str | None) -> EvaluatedSuggestion:
        return self._ask(prefix, suffix, _BLOCK_TOKENS, ())

    def close(self) -> None:
        self._session.close()


class NgramSuggester:
    """The baseline without a model: continues as the longest matching context in the same file did."""

    name = "ngram"
    fills = False
    _ORDER = 8

    def line(self, prefix: str, suffix: str | None) -> EvaluatedSuggestion:
        del suffix
        started = time.perf_counter()
        words = _words(prefix)
        table: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
        for i in range(1, len(words)):
            for order in range(1, min(self._ORDER, i) + 1):
                table[tuple(words[i - order : i])][words[i]] += 1
        out: list[str] = []
        confidence = 1.0
        while len(out) < _LINE_TOKENS:
            recent = [*words[-self._ORDER :], *out][-self._ORDER :]
            found = next((c for o in range(len(recent), 0, -1) if (c := table.get(tuple(recent[-o:])))), None)
            if found is None:
                break
            word, count = found.most_common(1)[0]
            confidence *= count / found.total()
            if "\n" in word:
                break
            out.append(word)
        return EvaluatedSuggestion("".join(out), confidence, time.perf_counter() - started, len(out))

    def block(self, prefix: str, suffix: str | None) -> EvaluatedSuggestion:
        return self.line(prefix, suffix)


def _words(text: str) -> list[str]:
    """Names, signs, and newlines with the indentation after them."""
    words: list[str] = []
    for char in text:
        kind = "w" if char.isalnum() or char == "_" else "s" if char in " \t\n" else "p"
        if words and kind != "p" and _kind(words[-1][-1]) == kind:
            words[-1] += char
        else:
            words.append(char)
    return words


def _kind(char: str) -> str:
    return "w" if char.isalnum() or char == "_" else "s" if char in " \t\n" else "p"


@dataclass(frozen=True, slots=True)
class Share:
    """A proportion with its 95 % interval (Wilson's, which stays honest near 0 and 1)."""

    hits: int
    of: int

    @property
    def value(self) -> float:
        return self.hits / self.of if self.of else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        if not self.of:
            return 0.0, 1.0
        z, n, p = 1.96, self.of, self.value
        centre = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        return max(0.0, centre - half), min(1.0, centre + half)

    def row(self, key: str) -> dict[str, Any]:
        """As a benchmark's line says it: the share, its interval, and of how many."""
        edges = [round(edge, 4) for edge in self.interval]
        return {key: round(self.value, 4), f"{key}_95": edges, f"{key}_of": self.of}


def edit_similarity(a: str, b: str) -> float:
    if not a and not b:
        return 1.0
    return SequenceMatcher(None, a, b, autojunk=False).ratio()


@dataclass(slots=True)
class Score:
    """One task of one model."""

    exact: Share
    similarity: float
    answers: list[str] = field(default_factory=list, repr=False)
    confidences: list[float] = field(default_factory=list, repr=False)


@dataclass(slots=True)
class CompletionReport:
    """Everything measured for one model. A score is None where the model cannot do the task."""

    name: str
    rest_of_line: Score
    line: Score
    fim_rest_of_line: Score | None = None
    fim_line: Score | None = None
    fim_block: Score | None = None
    characters_per_second: float = 0.0
    tokens_per_second: float = 0.0
    characters_saved: float | None = None
    suggestions_shown: int = 0
    suggestions_right: int = 0
    bits_per_byte: float | None = None


Ask = Callable[[str, str | None], EvaluatedSuggestion]


def _score(
    cases: Sequence[CompletionCase], ask: Ask, *, suffix: bool, pace: list[EvaluatedSuggestion]
) -> Score:
    hits, similar, answers, sure = 0, 0.0, [], []
    for case in cases:
        answer = ask(case.prefix, case.suffix if suffix else None)
        pace.append(answer)
        hits += answer.text.rstrip() == case.middle.rstrip()
        similar += edit_similarity(answer.text.rstrip(), case.middle.rstrip())
        answers.append(answer.text)
        sure.append(answer.confidence)
    return Score(Share(hits, len(cases)), similar / max(1, len(cases)), answers, sure)


def evaluate(
    suggester: Suggester, cases: Sequence[CompletionCase], *, typed_lines: int = 30
) -> CompletionReport:
    """Ask `suggester` every case."""
    kinds = {kind: [c for c in cases if c.kind == kind] for kind in FimCut}
    pace: list[EvaluatedSuggestion] = []
    rest = _score(kinds[FimCut.REST_OF_LINE], suggester.line, suffix=False, pace=pace)
    line = _score(kinds[FimCut.LINE], suggester.line, suffix=False, pace=pace)
    report = CompletionReport(suggester.name, rest, line)
    if suggester.fills:
        report.fim_rest_of_line = _score(kinds[FimCut.REST_OF_LINE], suggester.line, suffix=True, pace=pace)
        report.fim_line = _score(kinds[FimCut.LINE], suggester.line, suffix=True, pace=pace)
        report.fim_block = _score(kinds[FimCut.BLOCK], suggester.block, suffix=True, pace=pace)
    seconds = sum(s.seconds for s in pace)
    if seconds:
        report.characters_per_second = sum(len(s.text) for s in pace) / seconds
        report.tokens_per_second = sum(s.tokens for s in pace) / seconds
    if typed_lines:
        _type(suggester, kinds[FimCut.LINE][:typed_lines], report)
    return report


def _type(suggester: Suggester, cases: Sequence[CompletionCase], report: CompletionReport) -> None:
    """Type each line: a shown suggestion that is right to its end is taken, else one more character is typed.
    A new one is asked for only when what was typed contradicts the last: as an editor does it."""
    total = saved = 0
    for case in cases:
        line, done, pending = case.middle, 0, ""
        suffix = case.suffix if suggester.fills else None
        total += len(line)
        while done < len(line):
            if not pending:
                answer = suggester.line(case.prefix + line[:done], suffix)
                pending = answer.text if answer.confidence >= GATE else ""
                if pending.strip():
                    report.suggestions_shown += 1
                    if line.startswith(pending, done) and len(pending) > 1:
                        report.suggestions_right += 1
                        saved += len(pending) - 1  # taking it costs one keystroke
                        done += len(pending)
                        pending = ""
                        continue
            pending = pending[1:] if pending[:1] == line[done] else ""
            done += 1
    report.characters_saved = saved / max(1, total)


def limited(cases: Sequence[CompletionCase], limit: int) -> list[CompletionCase]:
    """The first `limit` cases of each kind; all of them for 0."""
    taken: Counter[str] = Counter()
    kept = []
    for case in cases:
        taken[case.kind] += 1
        if not limit or taken[case.kind] <= limit:
            kept.append(case)
    return kept


def summary(report: CompletionReport) -> dict[str, float | list[float] | int | None]:
    """The report as flat JSON: each exact match with its interval and edit similarity."""
    rows: dict[str, float | list[float] | int | None] = {}
    for key in ("rest_of_line", "line", "fim_rest_of_line", "fim_line", "fim_block"):
        score: Score | None = getattr(report, key)
        rows[f"{key}_em"] = round(score.exact.value, 4) if score else None
        rows[f"{key}_em_95"] = [round(x, 4) for x in score.exact.interval] if score else None
        rows[f"{key}_similarity"] = round(score.similarity, 4) if score else None
    rows["bits_per_byte"] = None if report.bits_per_byte is None else round(report.bits_per_byte, 4)
    rows["chars_per_s"] = round(report.characters_per_second, 1)
    rows["tokens_per_s"] = round(report.tokens_per_second, 1)
    rows["chars_saved"] = None if report.characters_saved is None else round(report.characters_saved, 4)
    rows["suggestions_shown"] = report.suggestions_shown
    rows["suggestions_right"] = report.suggestions_right
    return rows
