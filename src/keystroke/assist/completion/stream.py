"""One suggestion while it is generated: the cursor it is for, the text so far and its probabilities.

It stays usable for as long as what the user types agrees with it, also where the user types ahead of the
model. It runs nothing: the caller feeds it chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from keystroke.assist.completion.cache import CachedSuggestion, text_below
from keystroke.assist.completion.ending import Ending
from keystroke.assist.completion.extent import Extent
from keystroke.assist.completion.gate import find_loop
from keystroke.assist.completion.run import strip_repeated
from keystroke.assist.completion.window import WindowPrompt
from keystroke.engine.base import Sampling
from keystroke.engine.generation import Chunk, Finish, GenerationParams
from keystroke.engine.mixing import Predictor

LINE_TOKENS, BLOCK_TOKENS = 48, 256
# A line whose first tokens are this unlikely is abandoned: the gate would never show it.
HOPELESS = -2.6  # mean logprob
HOPELESS_AFTER = 5  # tokens


@dataclass(slots=True)
class SuggestionStream:
    before: str  # the text before the cursor
    below: str  # identifies the text below (`text_below`)
    extent: Extent
    prompt: WindowPrompt
    ending: Ending
    predictor: Predictor | None = None  # mixed into the model's probabilities
    text: str = ""  # what is settled of the answer, without the repeated half word
    done: bool = False  # no more text follows
    complete: bool = True  # it ended by itself, not at the token limit
    visible_end: int = 0  # length of the beginning that is on the screen already; 0: none
    rejected_at: int | None = None  # number of typed characters for which no beginning is to be shown
    _raw: str = ""
    _ends: list[int] = field(default_factory=list)
    _logprobs: list[float] = field(default_factory=list)

    def params(self) -> GenerationParams:
        line = self.extent is not Extent.BLOCK
        return GenerationParams(
            # The repeated half word is not counted; a letter is at most one token.
            max_tokens=(LINE_TOKENS if line else BLOCK_TOKENS) + len(self.prompt.begin),
            sampling=Sampling(logprobs=0 if self.prompt.tokens else None),  # not every server reports them
            stop=("\n",) if line else (),
            stop_tokens=self.prompt.stops,
            begin=self.prompt.begin,
        )

    def feed(self, chunk: Chunk) -> None:
        """Add the tokens of one step one by one, so that the result does not depend on the size of a step.

        Sets `done` once the ending is decided; later tokens of the step are ignored.
        """
        for number, part in enumerate(chunk.split()):
            if number and self.done:
                return
            self._add(part)

    def _add(self, chunk: Chunk) -> None:
        self._raw += chunk.text
        text = strip_repeated(self.prompt.repeated, self._raw)
        if chunk.logprobs:
            ended = len(chunk.tokens) - (1 if chunk.finish is not None else 0)  # the end token has no text
            for chosen in chunk.logprobs[: max(ended, 0)]:
                self._ends.append(len(text))
                self._logprobs.append(chosen.logprob)
        cut = self.ending.cut(text, final=chunk.finish is not None)
        self.text = cut.text
        if chunk.finish is Finish.LENGTH and self.extent is Extent.BLOCK and not self.ending.cut(text).done:
            self.text = cut.text.rpartition("\n")[0].rstrip() or cut.text  # drop the unfinished line
        self.done = cut.done or chunk.finish is not None
        self.complete = cut.done and chunk.finish is not Finish.LENGTH
        if not self.done and self.extent is Extent.BLOCK and find_loop(self.text) is not None:
            self.done, self.complete = True, False
        if not self.done and len(self._logprobs) == HOPELESS_AFTER:
            self.done = sum(self._logprobs) / HOPELESS_AFTER < HOPELESS

    def typed_length(self, text: str, cursor: int) -> int | None:
        """How many of its characters have been typed at this cursor.

        Negative where the cursor is still before the stream's own, None where the text disagrees.
        """
        if self.below != text_below(text, cursor):
            return None
        ahead = cursor - len(self.before)
        if ahead < 0:
            return ahead if self.before.startswith(text[:cursor]) else None
        if not text.startswith(self.before):
            return None
        typed = text[len(self.before) : cursor]
        if self.text.startswith(typed) or (not self.done and typed.startswith(self.text)):
            return ahead
        return None

    def to_cached(self, text: str) -> CachedSuggestion:
        """An entry for the cache; `text` is the suggestion as it would be inserted."""
        pairs = [(min(e, len(text)), p) for e, p in zip(self._ends, self._logprobs, strict=True)]
        inside = [pair for pair in pairs if pair[0] <= len(text)]
        # Tokens past the cut do not count for what is shown.
        while len(inside) > 1 and inside[-1][0] == inside[-2][0] == len(text):
            inside.pop()
        ends, logprobs = tuple(e for e, _ in inside), tuple(p for _, p in inside)
        return CachedSuggestion(
            text, self.extent, ends, logprobs, complete=self.complete, visible_end=self.visible_end
        )
