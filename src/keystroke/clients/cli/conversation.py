"""A conversation and the answer being made in it.

Messages are the truth; whatever was said, by interrupt or redirection too, is in them. The answer runs
on a thread of its own (an engine wants one), so the thread that watches the keyboard never waits for a step.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keystroke.clients.cli.answering import Answer, Message, Report, Speaker
from keystroke.engine.base import Interrupt
from keystroke.engine.generation import GenerationParams
from keystroke.errors import InputError
from keystroke.text.repetition import LoopWatch, loop_start


@dataclass
class Conversation:
    system: str | None = None
    messages: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.messages:
            self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def say(self, line: str) -> None:
        self.messages.append({"role": "user", "content": line})

    def unsay(self) -> None:
        """Take back a question that got no answer at all."""
        if self.messages and self.messages[-1]["role"] == "user":
            self.messages.pop()

    def save(self, path: Path) -> None:
        """Write the messages as JSON; never over something else."""
        try:
            with path.expanduser().open("x", encoding="utf-8") as file:
                json.dump({"messages": self.messages}, file, ensure_ascii=False, indent=1)
                file.write("\n")
        except FileExistsError:
            raise InputError(f"{path} exists already; choose another name") from None
        except OSError as error:
            raise InputError(f"{path} cannot be written: {error.strerror}") from None

    @classmethod
    def load(cls, path: Path) -> Conversation:
        try:
            messages = json.loads(path.expanduser().read_text(encoding="utf-8"))["messages"]
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{path} is not a saved conversation") from None
        if not isinstance(messages, list) or not all(_is_message(m) for m in messages):
            raise InputError(f"{path} is not a saved conversation")
        first = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
        return cls(first, messages)


class Turn:
    """One answer under way. `wake` is readable whenever there is something to take."""

    def __init__(
        self, speaker: Speaker, conversation: Conversation, params: GenerationParams, interrupt: Interrupt
    ) -> None:
        self._speaker, self._conversation, self._params = speaker, conversation, params
        self.interrupt = interrupt
        self.error: BaseException | None = None
        self.report: Report | None = None
        self.looped = False  # the answer was ended because it repeated itself
        self._pieces: deque[str] = deque()
        self._lines: deque[str] = deque()
        self._ended = False
        self.wake, self._signal = os.pipe()
        os.set_blocking(self._signal, False)
        self._thread = threading.Thread(target=self._work, name="answer", daemon=True)

    def __enter__(self) -> Turn:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.interrupt.set()
        self._thread.join()
        os.close(self.wake)
        os.close(self._signal)

    def redirect(self, line: str) -> None:
        """Splice `line` in at the next token boundary."""
        self._lines.append(line)

    def take(self) -> tuple[str, bool]:
        """The text that came since the last call, and whether that was all."""
        os.read(self.wake, 65536)
        ended = self._ended  # read first: pieces appended before it was set are taken below
        text = ""
        while self._pieces:
            text += self._pieces.popleft()
        return text, ended

    def _work(self) -> None:
        answer: Answer | None = None
        said: list[str] = []
        conversation = self._conversation
        try:
            answer = self._speaker.chat(conversation.messages, self._params, self.interrupt)
            watch = LoopWatch()
            for piece in answer:
                said.append(piece)
                self._give(piece)
                if watch.looping(piece):
                    self.looped = True
                    answer.cut()
                    break
                while self._lines and answer.finish is None:
                    line = self._lines.popleft()
                    conversation.messages.append({"role": "assistant", "content": "".join(said)})
                    said.clear()
                    self._give(f"\n[{line}]\n")
                    answer.redirect(conversation.messages, line)
                    conversation.say(line)
        except BaseException as error:
            self.error = error
        if said:
            text = "".join(said)
            # One round is remembered: a model that reads its own circles goes on in them.
            kept = text[: loop_start(text)] if self.looped else text
            conversation.messages.append({"role": "assistant", "content": kept})
        elif conversation.messages and conversation.messages[-1]["role"] == "user":
            conversation.unsay()
        if answer is not None:
            report = answer.report()
            self.report = dataclasses.replace(report, finish="repetition") if self.looped else report
        self._ended = True
        self._give("")

    def _give(self, piece: str) -> None:
        self._pieces.append(piece)
        with suppress(BlockingIOError):  # full: the reader has reason enough to wake already
            os.write(self._signal, b".")

    def left_over(self) -> list[str]:
        """Lines that came too late to be spliced in: the next things said."""
        return list(self._lines)


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("role"), str)
        and isinstance(value.get("content"), str)
    )
