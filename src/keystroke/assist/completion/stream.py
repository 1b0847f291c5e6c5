"""One suggestion being made, kept for as long as typing agrees with it.

Knows the place it was begun at, the text the model has said since and how sure it was. Typing ahead of
the model is agreement too, until the model says otherwise. It runs nothing: chunks are fed in.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from keystroke.assist.completion.cache import Kept, below
from keystroke.assist.completion.ending import Ending
from keystroke.assist.completion.extent import Extent
from keystroke.assist.completion.gate import loops_from
from keystroke.assist.completion.run import without_held
from keystroke.assist.completion.window import WindowPrompt
from keystroke.engine.base import Sampling
from keystroke.engine.generation import Chunk, Finish, GenerationParams
from keystroke.engine.mixing import Predictor

LINE_TOKENS, BLOCK_TOKENS = 48, 256
# A line whose first tokens are this unlikely is not worth its rest: the gate would never show it.
HOPELESS = -2.6  # mean logprob
HOPELESS_AFTER = 5  # tokens


@dataclass(slots=True)
class Stream:
    before: str
    after: str
    extent: Extent
    prompt: WindowPrompt
    ending: Ending
    predictor: Predictor | None = None  # whose opinion is mixed into the model's
    text: str = ""  # settled part of what the model said, without what it had to repeat
    done: bool = False  # nothing more will come
    whole: bool = True  # it ended by itself, not for want of tokens
    begun: int = 0  # where the beginning of it ends that is on the screen already; 0: none is
    judged: int | None = None  # the typed characters after which no beginning of it is worth showing
    _raw: str = ""
    _ends: list[int] = field(default_factory=list)
    _logprobs: list[float] = field(default_factory=list)

    def params(self) -> GenerationParams:
        line = self.extent is not Extent.BLOCK
        return GenerationParams(
            # What is said again is not counted: a letter is a token at most.
            max_tokens=(LINE_TOKENS if line else BLOCK_TOKENS) + len(self.prompt.begin),
            sampling=Sampling(logprobs=0 if self.prompt.tokens else None),  # not every server tells them
            # A line ends itself without asking back; its first line end is never part of it.
            stop=("\n",) if line else (),
            stop_tokens=self.prompt.stops,
            begin=self.prompt.begin,
        )

    def feed(self, chunk: Chunk) -> None:
        """Take what one step said, token by token: an answer and its confidence do not depend on how many
        tokens a step has. Sets `done` where the ending is decided; what the step said after that is not
        taken."""
        for number, part in enumerate(chunk.each()):
            if number and self.done:
                return
            self._take(part)

    def _take(self, chunk: Chunk) -> None:
        self._raw += chunk.text
        text = without_held(self.prompt.held, self._raw)
        if chunk.logprobs:
            ended = len(chunk.tokens) - (1 if chunk.finish is not None else 0)  # the end itself is no text
            for chosen in chunk.logprobs[: max(ended, 0)]:
                self._ends.append(len(text))
                self._logprobs.append(chosen.logprob)
        cut = self.ending.cut(text, final=chunk.finish is not None)
        self.text = cut.text
        if chunk.finish is Finish.LENGTH and self.extent is Extent.BLOCK and not self.ending.cut(text).done:
            self.text = cut.text.rpartition("\n")[0].rstrip() or cut.text  # half a line is no part of a body
        self.done = cut.done or chunk.finish is not None
        self.whole = cut.done and chunk.finish is not Finish.LENGTH
        if not self.done and self.extent is Extent.BLOCK and loops_from(self.text) is not None:
            self.done, self.whole = True, False  # more of it would be the same again
        if not self.done and len(self._logprobs) == HOPELESS_AFTER:
            self.done = sum(self._logprobs) / HOPELESS_AFTER < HOPELESS

    def typed(self, text: str, cursor: int) -> int | None:
        """How many of its characters have been typed at this cursor; negative where its place is yet to be
        reached, None where typing disagrees."""
        if below(self.after) != below(text[cursor:]):
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

    def kept(self, text: str) -> Kept:
        """What the cache keeps; `text` is the suggestion as it would be inserted."""
        pairs = [(min(e, len(text)), p) for e, p in zip(self._ends, self._logprobs, strict=True)]
        inside = [pair for pair in pairs if pair[0] <= len(text)]
        # Tokens wholly past the cut say nothing about what is shown.
        while len(inside) > 1 and inside[-1][0] == inside[-2][0] == len(text):
            inside.pop()
        ends, logprobs = tuple(e for e, _ in inside), tuple(p for _, p in inside)
        return Kept(text, self.extent, ends, logprobs, whole=self.whole, begun=self.begun)
