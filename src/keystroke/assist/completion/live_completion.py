"""Completion for one live buffer: what to compute, what to keep, what to show.

Law: no engine is run and no message sent here; whoever drives it asks `look` first (an answer without
computing), else runs the stream that `begin` returns and asks `answer` as it grows. Everything made is kept
for typing through, shown or not. After an answer `ahead` says what to compute as if it had been accepted.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from pathlib import PurePath

from keystroke.analysis.rules import ProjectRules
from keystroke.analysis.syntax import breaks
from keystroke.assist.completion import gate
from keystroke.assist.completion.cache import Kept, TypeThrough
from keystroke.assist.completion.extent import Extent, ending_for, extent_at, line_at
from keystroke.assist.completion.reasons import Hidden
from keystroke.assist.completion.stream import Stream
from keystroke.assist.completion.window import PromptWindow, TextWindow, Window
from keystroke.config import AssistSettings
from keystroke.engine.model import Model

CONTEXT_TOKENS = 768  # a screenful above and below the cursor; where nothing was measured yet
LEAST_CONTEXT, MOST_CONTEXT = 512, 2048
WAIT = 1.0  # seconds that warming a file's context may take
GROWTH = 1.5  # a budget that differs by less is not worth computing everything anew
_OPENER = re.compile(r"[:{(\[]\s*$")


def context_budget(settings: AssistSettings, rate: float | None) -> int:
    """Tokens of prompt: what the settings say, else what this machine reads in about a second. `rate`: tokens
    a second, measured; None where nothing was."""
    if settings.context_tokens:
        return settings.context_tokens
    if rate is None:
        return CONTEXT_TOKENS
    return max(LEAST_CONTEXT, min(MOST_CONTEXT, int(rate * WAIT)))


@dataclass(frozen=True, slots=True)
class Offer:
    """Insert `text` at the cursor it was asked for. `typed`: how much of it stood there already."""

    text: str
    extent: Extent
    confidence: float
    typed: int = 0
    done: bool = True


@dataclass(frozen=True, slots=True)
class Withheld:
    reason: Hidden
    text: str = ""


class LiveCompletion:
    """`model` None: the model is elsewhere, so prompts are text."""

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
        self.window: Window = PromptWindow(model, budget, path) if model is not None else TextWindow(budget)
        self.budget = budget
        self.rhythm = gate.Rhythm()
        self.dismissed = gate.Dismissed()
        self.cache = TypeThrough()
        self._name = PurePath(path).name if path else ""

    def grow(self, budget: int) -> bool:
        """Take a larger context where the machine turned out to be fast. True if that changed anything, which
        costs a prefill: do it when nobody types."""
        if budget < GROWTH * self.budget:
            return False
        self.budget = budget
        self.window.resize(budget)
        return True

    def refusal(self, text: str) -> Hidden | None:
        """Why this buffer gets no completions at all, if so."""
        if not self.settings.completion:
            return Hidden.DISABLED
        if any(fnmatch.fnmatch(self._name, pattern) for pattern in self.settings.exclude):
            return Hidden.EXCLUDED
        if len(text) > self.settings.max_file_kb * 1024:
            return Hidden.TOO_LARGE
        return None

    def look(self, text: str, cursor: int, *, invoked: bool = False) -> Offer | Withheld | None:
        """An answer that needs no computing, or None."""
        reason = self.refusal(text) or gate.before_computing(text, cursor, invoked=invoked)
        if reason is not None:
            return Withheld(reason)
        found = self.cache.find(text[:cursor], text[cursor:])
        if found is None:
            return None
        kept, typed = found
        return self._judged(text, cursor, kept, typed, invoked)

    def begin(self, text: str, cursor: int, extent: Extent | None = None) -> Stream:
        """A stream to run for this place."""
        extent = extent or extent_at(text, cursor, self.language)
        prompt = self.window.prompt(text, cursor)
        return Stream(text[:cursor], text[cursor:], extent, prompt, ending_for(text, cursor, extent))

    def answer(
        self, stream: Stream, text: str, cursor: int, *, invoked: bool = False
    ) -> Offer | Withheld | None:
        """What the stream says about this place by now; None while that is open. Call again as it grows."""
        typed = stream.typed(text, cursor)
        if typed is None or typed < 0:
            return Withheld(Hidden.SUPERSEDED)
        if not stream.done:
            first = stream.text.lstrip("\n").partition("\n")
            if stream.extent is not Extent.BLOCK or not first[1] or typed:
                return None
            # A block's first line is shown while the rest is made.
            line = stream.text[: len(stream.text) - len(first[2]) - 1]
            early = self._judged(text, cursor, stream.kept(self._fitted(stream, line)), 0, invoked)
            return (
                Offer(early.text, Extent.BLOCK, early.confidence, done=False)
                if isinstance(early, Offer)
                else None
            )
        kept = self.keep(stream)
        if not kept.text.startswith(text[len(stream.before) : cursor]):
            kept = stream.kept(stream.text)  # what was typed is the model's own form, not the project's
        return self._judged(text, cursor, kept, typed, invoked)

    def keep(self, stream: Stream) -> Kept:
        """Put a finished stream into the cache."""
        kept = stream.kept(self._fitted(stream, stream.text))
        self.cache.put(stream.before, stream.after, kept)
        return kept

    def ahead(self, text: str, cursor: int, offer: Offer) -> Stream | None:
        """The stream for the line after this one, as if the offer had been accepted."""
        if text[cursor : line_at(text, cursor)[1]].strip():
            return None
        accepted = text[:cursor] + offer.text
        line = accepted[accepted.rfind("\n") + 1 :]
        indent = line[: len(line) - len(line.lstrip())]
        if _OPENER.search(line):
            indent += "\t" if self.rules.tabs else " " * (self.rules.indent_width or 4)
        place = f"{accepted}\n{indent}"
        if self.cache.find(place, text[cursor:]) is not None:
            return None
        return self.begin(place + text[cursor:], len(place), Extent.LINE)

    def _fitted(self, stream: Stream, said: str) -> str:
        return self.rules.fit(said, stream.before[stream.before.rfind("\n") + 1 :])

    def _judged(self, text: str, cursor: int, kept: Kept, typed: int, invoked: bool) -> Offer | Withheld:
        rest = kept.text[typed:]
        sure = gate.confidence(kept.sureness(typed))
        followed = kept.shown and typed > 0
        candidate = gate.Candidate(
            text, cursor, rest, sure, invoked, self.rhythm.fast(), followed, self.rules.max_line
        )
        reason = gate.judge(candidate, self.settings.eagerness, self.dismissed)
        if reason is None and self.language is not None:
            # Looked at once: typing through a suggestion leads to the same text.
            if kept.broken is None:
                kept.broken = breaks(text, cursor, rest, self.language)
            reason = Hidden.BREAKS_SYNTAX if kept.broken else None
        if reason is not None:
            return Withheld(reason, rest)
        kept.shown = True
        return Offer(rest, Extent(kept.extent), sure, typed)
