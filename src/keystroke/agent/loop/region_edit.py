"""The rewrite of one region of a file: its prompt, and how its answer changes the file.

`assist/edit` owns the format. The fence that opens the answer is written for the model, so the answer
starts with code.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from keystroke.agent.chat.steering import Message
from keystroke.analysis.syntax import language_of
from keystroke.assist.edit import EditFailure, Region, RewriteQuestion
from keystroke.assist.edit.blocks import fence_text
from keystroke.assist.edit.excerpt import excerpt
from keystroke.assist.edit.rewrite import rewrite_messages
from keystroke.assist.edit.steps import read_rewrite

# Some models open another fence, with the file's name before it.
_FENCED = re.compile(r"\s*(?:[\w./-]+\n)?```[\w+-]*\n")

_WRONG = "The tests are right and this code is wrong: correct it."


@dataclass(frozen=True, slots=True)
class RegionEdit:
    """`text` is the file's current text; `failure` is what fails now; `refused` is what was wrong with an
    earlier answer."""

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
        return fence_text(self.region.parts(self.text)[1]).partition("\n")[2]

    def messages(self) -> list[Message]:
        instruction = self.instruction
        if self.failure:
            instruction += f"\n\nThis is what fails now:\n{fence_text(self.failure)}"
        if self.refused:
            instruction += f"\n\nAn answer before this one was refused: {self.refused}"
        shown = {self.region.path: excerpt(self.text, self.region.path, self.region, self.instruction)}
        messages: list[Message] = list(
            rewrite_messages(self.region, self.text, instruction, self.rules, shown)
        )
        if self.failure:  # without it, small models copy the code that has to be repaired
            messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}\n\n{_WRONG}"}
        return messages

    def retry_messages(self, answer: str, problem: str) -> list[Message]:
        """The conversation that shows a failed answer."""
        message = f"That cannot be used: {problem}\nWrite it again, corrected and complete."
        return [
            *self.messages(),
            {"role": "assistant", "content": self.opening + answer},
            {"role": "user", "content": message},
        ]

    def watch(self) -> Callable[[str], bool]:
        """A function to call with each piece of an answer: True once nothing useful can follow."""
        ended = RewriteQuestion((), inside=self.region.parts(self.text)[1]).end_detector()
        ended(self.opening)
        return ended

    def apply_answer(self, answer: str) -> str | EditFailure:
        """The whole file with an answer applied, or what is wrong with the answer."""
        complete = answer if _FENCED.match(answer) else self.opening + answer
        return read_rewrite(complete, self.region, self.text, self.instruction)
