"""One region of one file to be written anew: what a model is told, and what its answer makes of the file.

A value over `assist/edit`, which owns the format on both sides. The fence that opens the answer is
written for the model, so it cannot begin with talk.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from keystroke.agent.chat import Message
from keystroke.analysis.syntax import language_of
from keystroke.assist.edit import Failure, Question, Region
from keystroke.assist.edit.blocks import fenced
from keystroke.assist.edit.excerpt import excerpt
from keystroke.assist.edit.ladder import read_rewrite
from keystroke.assist.edit.rewrite import rewrite_messages

# Some models open a fence of their own behind the one that is there, with the file's name before it.
_FENCED = re.compile(r"\s*(?:[\w./-]+\n)?```[\w+-]*\n")

_WRONG = "The tests are right and this code is wrong: correct it."


@dataclass(frozen=True, slots=True)
class RegionEdit:
    """`text` is the file as it is; `failure` is what fails now, shown as data; `refused` is what was wrong
    with an earlier answer."""

    region: Region
    text: str
    instruction: str
    rules: str = ""
    failure: str = ""
    refused: str = ""

    @property
    def opening(self) -> str:
        return f"```{language_of(self.region.path) or ''}\n"

    @property
    def prediction(self) -> str:
        return fenced(self.region.parts(self.text)[1]).partition("\n")[2]

    def messages(self) -> list[Message]:
        asked = self.instruction
        if self.failure:
            asked += f"\n\nThis is what fails now:\n{fenced(self.failure)}"
        if self.refused:
            asked += f"\n\nAn answer before this one was refused: {self.refused}"
        shown = {self.region.path: excerpt(self.text, self.region.path, self.region, self.instruction)}
        messages: list[Message] = list(rewrite_messages(self.region, self.text, asked, self.rules, shown))
        if self.failure:  # told to change nothing else, small models copy what has to be mended
            messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}\n\n{_WRONG}"}
        return messages

    def again(self, answer: str, problem: str) -> list[Message]:
        """The conversation that shows how an answer failed."""
        said = f"That cannot be used: {problem}\nWrite it again, corrected and complete."
        return [
            *self.messages(),
            {"role": "assistant", "content": self.opening + answer},
            {"role": "user", "content": said},
        ]

    def watch(self) -> Callable[[str], bool]:
        """Called with each piece of an answer: True once nothing of use can follow."""
        ended = Question((), inside=self.region.parts(self.text)[1]).watch()
        ended(self.opening)
        return ended

    def read(self, answer: str) -> str | Failure:
        """The whole file as an answer leaves it, or what is wrong with it."""
        whole = answer if _FENCED.match(answer) else self.opening + answer
        return read_rewrite(whole, self.region, self.text, self.instruction)
