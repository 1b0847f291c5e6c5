"""Completion for one live buffer: what to compute, what to keep, what to show.

No engine is run and no message sent here; whoever drives it asks `look` first (an answer without
computing), else runs the stream that `begin` returns and asks `answer` as it grows. Everything made is kept
for typing through, shown or not. After an answer `ahead` says what to compute as if it had been accepted.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import TYPE_CHECKING

from keystroke.analysis.rules import ProjectRules
from keystroke.analysis.syntax import breaks
from keystroke.assist.completion import gate
from keystroke.assist.completion.beginning import confident_beginning, confident_lines, doubtful
from keystroke.assist.completion.cache import Kept, TypeThrough
from keystroke.assist.completion.extent import Extent, body_floor, ending_for, extent_at, line_at, line_before
from keystroke.assist.completion.reasons import Hidden
from keystroke.assist.completion.stream import Stream
from keystroke.assist.completion.tuning import moved
from keystroke.assist.completion.window import PromptWindow, TextWindow, Window
from keystroke.config import AssistSettings
from keystroke.engine.mixing import Predictor
from keystroke.engine.model import Model

if TYPE_CHECKING:  # they work with numpy
    from keystroke.analysis.text_index import TextIndex
    from keystroke.assist.completion.ngram_cache import FileText

CONTEXT_TOKENS = 768  # a screenful above and below the cursor; where nothing was measured yet
LEAST_CONTEXT, MOST_CONTEXT = 512, 2048
WAIT = 1.0  # seconds that warming a file's context may take
LINES_SURER = 0.05  # how much surer than a whole body its first lines must be, to be shown alone
GROWTH = 1.5  # a budget that differs by less is not worth computing everything anew
# Why a line is not shown that may have a beginning which is.
_WHOLE_LINE = (Hidden.LOW_CONFIDENCE, Hidden.TYPING_FAST, Hidden.LINE_TOO_LONG, Hidden.LOOPS)
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
    begun: bool = False  # the confident beginning of something longer


@dataclass(frozen=True, slots=True)
class Withheld:
    reason: Hidden
    text: str = ""
    confidence: float = field(default=0.0, compare=False)  # of the text, for who learns from it


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
        self._learned = model is None or model.knows(language)
        self._recalls = model is not None and settings.project_text
        self._calm = model is not None and language in model.follows
        # What the project says carries a model through a language it has not learned.
        self._follows = self._recalls and self._calm
        self.rhythm = gate.Rhythm()
        self.dismissed = gate.Dismissed()
        self.cache = TypeThrough()
        self.shift = 0.0  # how much stricter than the settings say: learned from what was taken before
        self._name = PurePath(path).name if path else ""
        self._path = path
        self.project: TextIndex | None = None  # what other files of the project hold, once it is known
        self._file: FileText | None = None

    @property
    def eagerness(self) -> str:
        """How readily to show; calmly where the model is surer than right or has not learned."""
        return self.settings.eagerness if self._learned and not self._calm else "calm"

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
        if not (self._learned or self._follows):
            return Hidden.UNLEARNED
        if len(text) > self.settings.max_file_kb * 1024:
            return Hidden.TOO_LARGE
        return None

    def look(self, text: str, cursor: int, *, invoked: bool = False) -> Offer | Withheld | None:
        """An answer that needs no computing, or None."""
        reason = self.refusal(text) or gate.before_computing(text, cursor, invoked=invoked)
        if reason is not None and reason is not Hidden.UNLEARNED:
            return Withheld(reason)
        found = self.cache.find(text[:cursor], text[cursor:])
        if found is None:  # a larger model may know what this one has not learned
            return Withheld(reason) if reason is not None else None
        kept, typed = found
        return self._judged(text, cursor, kept, typed, invoked)

    def begin(self, text: str, cursor: int, extent: Extent | None = None) -> Stream:
        """A stream to run for this place."""
        extent = extent or extent_at(text, cursor, self.language)
        prompt = self.window.prompt(text, cursor)
        ending = ending_for(text, cursor, extent, self.language)
        predictor = self._remembered(text, cursor, extent, prompt.held) if self._recalls else None
        return Stream(text[:cursor], text[cursor:], extent, prompt, ending, predictor)

    def _remembered(self, text: str, cursor: int, extent: Extent, held: str) -> Predictor:
        """What the file and the project have said before in such a place."""
        from keystroke.assist.completion.ngram_cache import FileText, NgramCache  # here: they need numpy

        self._file = self._file or FileText()
        before, after = text[: cursor - len(held)], text[cursor:]
        one_line = extent is not Extent.BLOCK
        return NgramCache(before, after, self._file, self.project, self._path, ends_line=one_line)

    def answer(
        self, stream: Stream, text: str, cursor: int, *, invoked: bool = False
    ) -> Offer | Withheld | None:
        """What the stream says about this place by now; None while that is open. Call again as it grows."""
        typed = stream.typed(text, cursor)
        if typed is None or typed < 0:
            return Withheld(Hidden.SUPERSEDED)
        if not stream.done and stream.extent is not Extent.BLOCK:
            return None if invoked else self._early(stream, text, cursor, typed)
        if not stream.done:
            first = stream.text.lstrip("\n").partition("\n")
            if not first[1] or typed:
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

    def _early(self, stream: Stream, text: str, cursor: int, typed: int) -> Offer | None:
        """The confident beginning of a line that is not said to its end, once the line as a whole is too
        unlikely to be shown: chances only fall, so whatever is still to be said changes neither."""
        if stream.judged == typed:
            return None
        kept = stream.kept(self._fitted(stream, stream.text))
        agrees = kept.text.startswith(text[len(stream.before) : cursor])
        if agrees and (shown := self._on_screen(text, cursor, kept, typed)) is not None:
            return shown
        if not doubtful(kept, typed, self.eagerness, self.shift):
            return None
        line = line_before(text, cursor)
        if stream.ending.may_repeat(stream.text) or self.dismissed.may_become(line, kept.text[typed:]):
            return None  # by its end it may be something that is not shown at all
        stream.judged = typed
        if not agrees:
            return None
        early = self._judged(text, cursor, kept, typed, invoked=False)
        if not isinstance(early, Offer):
            return None
        stream.begun, stream.judged = kept.begun, None
        return early

    def keep(self, stream: Stream) -> Kept:
        """Put a finished stream into the cache. Where its beginning was shown before it ended, somebody who
        knows better may have put something else there meanwhile: that stays."""
        kept = stream.kept(self._fitted(stream, stream.text))
        found = self.cache.find(stream.before, stream.after) if stream.begun else None
        if found is None or found[1]:
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
            text,
            cursor,
            rest,
            sure,
            invoked,
            self.rhythm.fast(),
            followed,
            self.rules.max_line,
            # Editors indent the first line of a body by themselves: there Tab need not.
            indented=kept.extent == Extent.BLOCK and self._indented(text, cursor),
        )
        reason = gate.judge(candidate, self.eagerness, self.dismissed, self.shift)
        alone = not invoked and not followed and kept.extent != Extent.BLOCK
        if reason is None and alone and doubtful(kept, typed, self.eagerness, self.shift):
            reason = Hidden.LOW_CONFIDENCE
        if reason in _WHOLE_LINE and (offer := self._begun(text, cursor, kept, typed, candidate)):
            return offer
        if reason is None and self.language is not None:
            # Looked at once: typing through a suggestion leads to the same text.
            if kept.broken is None:
                kept.broken = self._breaks(text, cursor, rest)
            if kept.broken and (shown := self._on_screen(text, cursor, kept, typed)) is not None:
                return shown
            reason = Hidden.BREAKS_SYNTAX if kept.broken else None
        if reason is not None:
            return Withheld(reason, rest, sure)
        kept.shown = True
        return Offer(rest, Extent(kept.extent), sure, typed)

    def _indented(self, text: str, cursor: int) -> bool:
        """Whether the cursor stands on the blank line of a body, already further in than what opened it."""
        line = line_before(text, cursor)
        floor = body_floor(text, cursor, self.language)
        return not line.strip() and floor is not None and len(line.expandtabs(4)) > floor

    def _begun(
        self, text: str, cursor: int, kept: Kept, typed: int, candidate: gate.Candidate
    ) -> Offer | None:
        """The confident beginning of what is not worth showing whole. In a burst of keys only what a calm
        user would be shown; what is on the screen already stays while it is typed."""
        eagerness = "calm" if candidate.fast and not candidate.invoked else self.eagerness
        begun, chance = "", 0.0
        if kept.extent == Extent.BLOCK:
            least = moved(gate.THRESHOLDS[eagerness], self.shift)
            begun, chance = confident_lines(kept, typed, min(least + LINES_SURER, max(least, 0.95)))
        if not begun:
            begun, chance = confident_beginning(kept, typed, eagerness, self.shift)
        if 0 < typed < kept.begun and len(begun) < kept.begun - typed:
            begun, chance = kept.text[typed : kept.begun], gate.confidence(kept.sureness(typed))
        if not begun:
            return None
        sure = replace(candidate, inserted=begun, confidence=1.0, fast=False)  # its chance was looked at
        if gate.judge(sure, eagerness, self.dismissed) is not None or self._breaks(text, cursor, begun):
            return None
        kept.begun = typed + len(begun)
        return Offer(begun, Extent.BLOCK if "\n" in begun else Extent.REST, chance, typed, begun=True)

    def _on_screen(self, text: str, cursor: int, kept: Kept, typed: int) -> Offer | None:
        """What is left of a beginning that is shown already: it stays while it is typed, unless it was turned
        down."""
        left = kept.text[typed : kept.begun]
        line = line_before(text, cursor)
        if not typed or not left or (line, left) in self.dismissed:
            return None
        extent = Extent.BLOCK if "\n" in left else Extent.REST
        return Offer(left, extent, gate.confidence(kept.sureness(typed)), typed, begun=True)

    def _breaks(self, text: str, cursor: int, inserted: str) -> bool:
        return self.language is not None and breaks(text, cursor, inserted, self.language)
