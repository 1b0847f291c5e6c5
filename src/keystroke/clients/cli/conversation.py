"""A chat conversation on the command line, and the turn in which an answer is generated.

The messages hold everything that was said, also where an answer was interrupted or redirected. An answer
runs on a thread of its own, so the thread that reads the keyboard never waits for the engine.
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
from typing import TYPE_CHECKING, Any

from keystroke.agent.chat.model import AnswerOptions, AnswerReport, ModelAnswer
from keystroke.errors import InputError
from keystroke.text.repetition import LoopDetector, loop_start

if TYPE_CHECKING:
    from keystroke.agent.chat.model import ChatModel
    from keystroke.agent.chat.steering import Message


@dataclass
class ChatConversation:
    system: str | None = None
    messages: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.messages:
            self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def add_user_message(self, line: str) -> None:
        self.messages.append({"role": "user", "content": line})

    def save(self, path: Path) -> None:
        """Write the messages as JSON. Raises InputError where the file exists or cannot be written."""
        try:
            with path.expanduser().open("x", encoding="utf-8") as file:
                json.dump({"messages": self.messages}, file, ensure_ascii=False, indent=1)
                file.write("\n")
        except FileExistsError:
            raise InputError(f"{path} exists already; choose another name") from None
        except OSError as error:
            raise InputError(f"{path} cannot be written: {error.strerror}") from None

    @classmethod
    def load(cls, path: Path) -> ChatConversation:
        try:
            messages = json.loads(path.expanduser().read_text(encoding="utf-8"))["messages"]
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{path} is not a saved conversation") from None
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise InputError(f"{path} is not a saved conversation")
        first = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
        return cls(first, messages)


class ChatTurn:
    """One answer in progress. `wake` is a file descriptor that is readable whenever `read` has something."""

    def __init__(self, model: ChatModel, conversation: ChatConversation, options: AnswerOptions) -> None:
        self._model, self._conversation, self._options = model, conversation, options
        self.error: BaseException | None = None
        self.report: AnswerReport | None = None
        self.looped = False  # the answer was ended because it repeated itself
        self._pieces: deque[str] = deque()
        self._lines: deque[str] = deque()
        self._ended = False
        self.wake, self._signal = os.pipe()
        os.set_blocking(self._signal, False)
        self._thread = threading.Thread(target=self._work, name="answer", daemon=True)

    def __enter__(self) -> ChatTurn:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._options.interrupt.set()
        self._thread.join()
        os.close(self.wake)
        os.close(self._signal)

    def redirect(self, line: str) -> None:
        """Insert `line` into the answer at the next token."""
        self._lines.append(line)

    def read(self) -> tuple[str, bool]:
        """The text that came since the last call, and whether the answer has ended."""
        os.read(self.wake, 65536)
        ended = self._ended  # before the pieces: those appended before it was set are read below
        text = ""
        while self._pieces:
            text += self._pieces.popleft()
        return text, ended

    def pending_lines(self) -> list[str]:
        """Lines that came too late to be inserted: the next user messages."""
        return list(self._lines)

    def _work(self) -> None:
        stream: ModelAnswer | None = None
        conversation = self._conversation
        try:
            stream = self._model.answer(conversation.messages, self._options)
            self._generate(stream)
        except BaseException as error:
            self.error = error
        if stream is not None:
            conversation.messages = list(stream.messages)
            if text := stream.text:
                # The loop is kept once: a model that reads its own repetitions continues them.
                answer = text[: loop_start(text)] if self.looped else text
                conversation.messages.append({"role": "assistant", "content": answer})
            report = stream.report()
            self.report = dataclasses.replace(report, finish="repetition") if self.looped else report
        if conversation.messages and conversation.messages[-1]["role"] == "user":
            conversation.messages.pop()  # it got no answer at all
        self._ended = True
        self._put("")

    def _generate(self, stream: ModelAnswer) -> None:
        watch = LoopDetector()
        with stream:
            for piece in stream:
                self._put(piece)
                if watch.feed(piece):
                    self.looped = True
                    return
                while self._lines and stream.finish is None:
                    line = self._lines.popleft()
                    self._put(f"\n[{line}]\n")
                    stream.redirect(line)

    def _put(self, piece: str) -> None:
        self._pieces.append(piece)
        with suppress(BlockingIOError):  # full: the reader has something to wake for already
            os.write(self._signal, b".")


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("role"), str)
        and isinstance(value.get("content"), str)
    )
