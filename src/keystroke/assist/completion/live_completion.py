"""Completion for one live buffer: what to compute, what to cache, what to show.

It runs no engine and sends no message. For each cursor the caller asks `answer` first. Where that is None it
runs the stream that `begin` returns and asks `answer` again as the stream grows. Every finished stream is
cached, shown or not. After an answer, `prefetch` returns a stream for the next line.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import TYPE_CHECKING

from keystroke.analysis.rules import ProjectRules
from keystroke.analysis.syntax import adds_errors
from keystroke.assist.completion import gate
from keystroke.assist.completion.beginning import confident_beginning, confident_lines, is_unlikely
from keystroke.assist.completion.cache import CachedSuggestion, SuggestionCache, text_below
from keystroke.assist.completion.extent import Extent, body_floor, ending_for, extent_at, line_at, line_before
from keystroke.assist.completion.reasons import WithheldReason
from keystroke.assist.completion.stream import SuggestionStream
from keystroke.assist.completion.tuning import Counts, shift_between, shift_threshold, tune_threshold
from keystroke.assist.completion.window import ContextFile, PromptWindow, TextWindow, WindowPrompt
from keystroke.config import AssistSettings
from keystroke.engine.mixing import Predictor
from keystroke.engine.model import Model
from keystroke.text import Edit

if TYPE_CHECKING:  # they import numpy
    from keystroke.analysis.text_index import TextIndex
    from keystroke.assist.completion.ngram_cache import FileText

CONTEXT_TOKENS = 768  # used until the engine's speed has been measured
LEAST_CONTEXT, MOST_CONTEXT = 512, 2048
WAIT = 1.0  # seconds that reading a file's context may take
LINES_SURER = 0.05  # how much more confident the first lines of a block must be to be shown alone
GROWTH = 1.5  # a budget that grows by less is not worth a full prefill
# Reasons to withhold a whole line that do not concern its beginning.
_WHOLE_LINE = (WithheldReason.LOW_CONFIDENCE, WithheldReason.TYPING_FAST, WithheldReason.LINE_TOO_LONG,
               WithheldReason.LOOPS)  # fmt: skip
_OPENER = re.compile(r"[:{(\[]\s*$")


def context_budget(settings: AssistSettings, rate: float | None) -> int:
    """Tokens of prompt: the configured number, else what this machine reads in about a second. `rate`: tokens
    a second, None where not measured."""
    if settings.context_tokens:
        return settings.context_tokens
    if rate is None:
        return CONTEXT_TOKENS
    return max(LEAST_CONTEXT, min(MOST_CONTEXT, int(rate * WAIT)))


@dataclass(frozen=True, slots=True)
class ShownCompletion:
    """Insert `text` at the requested cursor. `typed`: how many of its characters were typed before."""

    text: str
    extent: Extent
    confidence: float
    typed: int = 0
    done: bool = True
    partial: bool = False  # the confident beginning of a longer suggestion


@dataclass(frozen=True, slots=True)
class WithheldCompletion:
    reason: WithheldReason
    text: str = ""
    confidence: float = field(default=0.0, compare=False)


class LiveCompletion:
    """`model` None: the model is remote, so prompts are text."""

    def __init__(
        self,
        model: Model | None,
        settings: AssistSettings,
        *,
        path: str | None = None,
        language: str | None = None,
        rules: ProjectRules | None = None,
        budget: int = CONTEXT_TOKENS,
    ) -> None:
        self.settings = settings
        self.language = language
        self.rules = rules or ProjectRules()
        self._path = path
        self._name = PurePath(path).name if path else ""
        self._budget = budget
        self._window: PromptWindow | TextWindow = TextWindow(budget)
        if model is not None:
            self._window = PromptWindow(model, budget, path)
        self._trained = model is None or model.supports_language(language)
        self._uses_ngrams = model is not None and settings.project_text
        self._conservative = model is not None and language in model.conservative_languages
        self._rhythm = gate.TypingRhythm()
        self.dismissed = gate.DismissedSuggestions()
        self.cache = SuggestionCache()
        self.shift = 0.0  # how much stricter than the settings say, learned from earlier outcomes
        self.project: TextIndex | None = None  # what the other files contain
        self._file: FileText | None = None

    @property
    def eagerness(self) -> str:
        """The configured eagerness; "calm" in languages that are untrained or `conservative_languages`."""
        return self.settings.eagerness if self._trained and not self._conservative else "calm"

    def refusal(self, text: str) -> WithheldReason | None:
        """Why this buffer gets no completions at all, or None."""
        if not self.settings.completion:
            return WithheldReason.DISABLED
        if any(fnmatch.fnmatch(self._name, pattern) for pattern in self.settings.exclude):
            return WithheldReason.EXCLUDED
        # In a conservative language the project's n-grams make up for what the model was not trained on.
        if not (self._trained or (self._uses_ngrams and self._conservative)):
            return WithheldReason.UNTRAINED_LANGUAGE
        if len(text) > self.settings.max_file_kb * 1024:
            return WithheldReason.TOO_LARGE
        return None

    # State

    def apply_edits(self, edits: Sequence[Edit], now: float | None = None) -> None:
        """The buffer was edited. `now`: when (monotonic seconds), for the typing speed; None: not a key."""
        self._window.apply_edits(edits)
        if now is not None:
            self._rhythm.record_key(now)

    def share_state(self, other: LiveCompletion) -> None:
        """Use the project rules, the project index and the dismissed suggestions of `other`."""
        self.rules, self.project, self.dismissed = other.rules, other.project, other.dismissed

    def tune(self, counts: Sequence[Counts]) -> None:
        """Set how much stricter than the settings to be, from what became of earlier suggestions."""
        default = gate.THRESHOLDS[self.eagerness]
        self.shift = shift_between(default, tune_threshold(default, *counts))

    def dismiss(self, line: str, text: str) -> None:
        """Do not show `text` again after `line`, the cursor's line up to the cursor."""
        self.dismissed.add(line, text)

    def grow(self, budget: int) -> bool:
        """Use a larger context if `budget` is much larger. Returns whether it did, which costs a prefill."""
        if budget < GROWTH * self._budget:
            return False
        self._budget = budget
        self._window.resize(budget)
        return True

    def refresh(self, files: Sequence[ContextFile], budget: int) -> bool:
        """Bring the context up to date while nobody types. Returns whether the prompt needs a warm-up."""
        stale = self.grow(budget) or self._window.lagging
        return self._window.set_context(files) or stale

    def warm_up_prompt(self, text: str, cursor: int) -> WindowPrompt:
        """The prompt to compute before anything is asked at this cursor."""
        return self._window.prompt(text, cursor, refresh=True)

    def next_word_prompt(self, text: str, cursor: int) -> list[int] | None:
        """The prompt if a letter is typed next, where it begins a word: tokenizers put the sign before a word
        into the word's token, so that it is another prompt. None inside of a word."""
        if not text[:cursor] or text[cursor - 1].isalnum() or text[cursor - 1] == "\n":
            return None
        return self._window.prompt(f"{text[:cursor]}x{text[cursor:]}", cursor + 1).tokens

    # Suggestions

    def answer(
        self, text: str, cursor: int, stream: SuggestionStream | None = None, *, invoked: bool = False
    ) -> ShownCompletion | WithheldCompletion | None:
        """The answer at this cursor, from the cache or, where given, from `stream`. None while it is open."""
        if stream is not None:
            return self._answer_from(stream, text, cursor, invoked)
        reason = self.refusal(text) or gate.reason_not_to_compute(text, cursor, invoked=invoked)
        if reason is not None and reason is not WithheldReason.UNTRAINED_LANGUAGE:
            return WithheldCompletion(reason)
        found = self.cache.find(text, cursor)
        if found is None:  # a larger model may have put something there, whatever this one was trained on
            return WithheldCompletion(reason) if reason is not None else None
        return self._judge(text, cursor, *found, invoked)

    def begin(self, text: str, cursor: int, extent: Extent | None = None) -> SuggestionStream:
        """A stream to run for this cursor."""
        extent = extent or extent_at(text, cursor, self.language)
        prompt = self._window.prompt(text, cursor)
        ending = ending_for(text, cursor, extent, self.language)
        predictor = (
            self._make_predictor(text, cursor, extent, len(prompt.repeated)) if self._uses_ngrams else None
        )
        return SuggestionStream(text[:cursor], text_below(text, cursor), extent, prompt, ending, predictor)

    def store(self, stream: SuggestionStream) -> CachedSuggestion:
        """Put a finished stream into the cache. Where its beginning was shown early, an entry that was stored
        since (by the larger model) stays."""
        cached = stream.to_cached(self._format_insertion(stream, stream.text))
        shown = stream.visible_end
        found = self.cache.find(stream.before + stream.below, len(stream.before)) if shown else None
        if found is None or found[1]:
            self.cache.put(stream.before, stream.below, cached)
        return cached

    def store_revision(self, stream: SuggestionStream, text: str, *, was_shown: bool) -> None:
        """Cache `text`, which the larger model generated in `stream`, in place of what was there."""
        cached = stream.to_cached(text)
        cached.was_shown = was_shown
        self.cache.put(stream.before, stream.below, cached)

    def prefetch(self, text: str, cursor: int, shown: ShownCompletion) -> SuggestionStream | None:
        """A stream for the line after this one, as if the suggestion had been accepted."""
        if text[cursor : line_at(text, cursor)[1]].strip():
            return None
        accepted = text[:cursor] + shown.text
        line = accepted[accepted.rfind("\n") + 1 :]
        indent = line[: len(line) - len(line.lstrip())]
        if _OPENER.search(line):
            indent += "\t" if self.rules.tabs else " " * (self.rules.indent_width or 4)
        before = f"{accepted}\n{indent}"
        after = before + text[cursor:]
        if self.cache.find(after, len(before)) is not None:
            return None
        return self.begin(after, len(before), Extent.LINE)

    def _make_predictor(self, text: str, cursor: int, extent: Extent, repeated: int) -> Predictor:
        from keystroke.assist.completion.ngram_cache import FileText, NgramCache  # here: they need numpy

        self._file = self._file or FileText()
        one_line = extent is not Extent.BLOCK
        return NgramCache(
            text, cursor, self._file, self.project, self._path, repeated=repeated, ends_line=one_line
        )

    def _answer_from(
        self, stream: SuggestionStream, text: str, cursor: int, invoked: bool
    ) -> ShownCompletion | WithheldCompletion | None:
        typed = stream.typed_length(text, cursor)
        if typed is None or typed < 0:
            return WithheldCompletion(WithheldReason.SUPERSEDED)
        if stream.done:
            cached = self.store(stream)
            if not cached.text.startswith(text[len(stream.before) : cursor]):
                cached = stream.to_cached(stream.text)  # the user typed the model's form, not the project's
            return self._judge(text, cursor, cached, typed, invoked)
        if stream.extent is not Extent.BLOCK:
            return None if invoked else self._answer_early(stream, text, cursor, typed)
        first = stream.text.lstrip("\n").partition("\n")
        if not first[1] or typed:
            return None
        # The first line of a block is shown while the rest is generated.
        line = stream.text[: len(stream.text) - len(first[2]) - 1]
        early = self._judge(text, cursor, stream.to_cached(self._format_insertion(stream, line)), 0, invoked)
        if not isinstance(early, ShownCompletion):
            return None
        return ShownCompletion(early.text, Extent.BLOCK, early.confidence, done=False)

    def _answer_early(
        self, stream: SuggestionStream, text: str, cursor: int, typed: int
    ) -> ShownCompletion | None:
        """The confident beginning of an unfinished line, once the line as a whole is too unlikely to be
        shown.

        Joint probabilities only fall, so later tokens change neither.
        """
        if stream.rejected_at == typed:
            return None
        cached = stream.to_cached(self._format_insertion(stream, stream.text))
        agrees = cached.text.startswith(text[len(stream.before) : cursor])
        if agrees and (shown := self._still_visible(text, cursor, cached, typed)) is not None:
            return shown
        if not is_unlikely(cached, typed, self.eagerness, self.shift):
            return None
        line = line_before(text, cursor)
        if stream.ending.may_repeat(stream.text) or self.dismissed.may_become(line, cached.text[typed:]):
            return None  # the whole line may turn out not to be shown at all
        stream.rejected_at = typed
        if not agrees:
            return None
        early = self._judge(text, cursor, cached, typed, invoked=False)
        if not isinstance(early, ShownCompletion):
            return None
        stream.visible_end, stream.rejected_at = cached.visible_end, None
        return early

    def _format_insertion(self, stream: SuggestionStream, text: str) -> str:
        return self.rules.format_insertion(text, stream.before[stream.before.rfind("\n") + 1 :])

    def _judge(
        self, text: str, cursor: int, cached: CachedSuggestion, typed: int, invoked: bool
    ) -> ShownCompletion | WithheldCompletion:
        rest = cached.text[typed:]
        confidence = gate.confidence(cached.logprobs_after(typed))
        being_typed = cached.was_shown and typed > 0
        candidate = gate.Candidate(
            text,
            cursor,
            rest,
            confidence,
            invoked,
            self._rhythm.is_fast(),
            being_typed,
            self.rules.max_line,
            # Editors indent the first line of a block automatically.
            indented=cached.extent == Extent.BLOCK and self._is_indented(text, cursor),
        )
        reason = gate.find_reason(candidate, self.eagerness, self.dismissed, self.shift)
        check_whole = not invoked and not being_typed and cached.extent != Extent.BLOCK
        if reason is None and check_whole and is_unlikely(cached, typed, self.eagerness, self.shift):
            reason = WithheldReason.LOW_CONFIDENCE
        if reason in _WHOLE_LINE and (shown := self._show_beginning(text, cursor, cached, typed, candidate)):
            return shown
        if reason is None and self.language is not None:
            # Checked once: typing through a suggestion leads to the same text.
            if cached.breaks_syntax is None:
                cached.breaks_syntax = self._breaks_syntax(text, cursor, rest)
            if cached.breaks_syntax and (shown := self._still_visible(text, cursor, cached, typed)):
                return shown
            reason = WithheldReason.BREAKS_SYNTAX if cached.breaks_syntax else None
        if reason is not None:
            return WithheldCompletion(reason, rest, confidence)
        cached.was_shown = True
        return ShownCompletion(rest, Extent(cached.extent), confidence, typed)

    def _is_indented(self, text: str, cursor: int) -> bool:
        """Whether the cursor is on a blank line of a block, indented further than the line that opens it."""
        line = line_before(text, cursor)
        floor = body_floor(text, cursor, self.language)
        return not line.strip() and floor is not None and len(line.expandtabs(4)) > floor

    def _show_beginning(
        self, text: str, cursor: int, cached: CachedSuggestion, typed: int, candidate: gate.Candidate
    ) -> ShownCompletion | None:
        """The confident beginning of a suggestion that is not shown as a whole. A burst of keys raises the
        threshold; what is on the screen already stays while it is typed."""
        eagerness = "calm" if candidate.fast and not candidate.invoked else self.eagerness
        start, chance = "", 0.0
        if cached.extent == Extent.BLOCK:
            least = shift_threshold(gate.THRESHOLDS[eagerness], self.shift)
            start, chance = confident_lines(cached, typed, min(least + LINES_SURER, max(least, 0.95)))
        if not start:
            start, chance = confident_beginning(cached, typed, eagerness, self.shift)
        if 0 < typed < cached.visible_end and len(start) < cached.visible_end - typed:
            start = cached.text[typed : cached.visible_end]
            chance = gate.confidence(cached.logprobs_after(typed))
        if not start:
            return None
        confident = replace(candidate, inserted=start, confidence=1.0, fast=False)  # checked above
        if gate.find_reason(confident, eagerness, self.dismissed) or self._breaks_syntax(text, cursor, start):
            return None
        cached.visible_end = typed + len(start)
        extent = Extent.BLOCK if "\n" in start else Extent.REST
        return ShownCompletion(start, extent, chance, typed, partial=True)

    def _still_visible(
        self, text: str, cursor: int, cached: CachedSuggestion, typed: int
    ) -> ShownCompletion | None:
        """The rest of a beginning that is on the screen: it stays while it is typed, unless dismissed."""
        left = cached.text[typed : cached.visible_end]
        if not typed or not left or (line_before(text, cursor), left) in self.dismissed:
            return None
        extent = Extent.BLOCK if "\n" in left else Extent.REST
        return ShownCompletion(
            left, extent, gate.confidence(cached.logprobs_after(typed)), typed, partial=True
        )

    def _breaks_syntax(self, text: str, cursor: int, inserted: str) -> bool:
        return self.language is not None and adds_errors(text, cursor, inserted, self.language)
