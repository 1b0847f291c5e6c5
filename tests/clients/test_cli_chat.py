"""A conversation on a terminal: stopped, redirected, and gone on with. The terminal is a real pty."""
# ruff: noqa: F811 - fixtures are imported by name

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from cli_home import PROGRAM, Home, home, remote_home, server  # noqa: F401
from openai_server import OpenAIServer, answer, echo_chat


class Terminal:
    """The program on a pseudo-terminal."""

    def __init__(self, pid: int, fd: int) -> None:
        self.pid, self.fd = pid, fd
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def expect(self, pattern: str, seconds: float = 60) -> str:
        """Wait until the screen shows `pattern`; gives what came up to it and forgets that."""
        limit = time.monotonic() + seconds
        while (match := re.search(pattern, self.shown)) is None:
            ready, _, _ = select.select([self.fd], [], [], max(0.0, limit - time.monotonic()))
            assert ready, f"{pattern!r} did not appear in: {self.shown!r}"
            try:
                self.shown += os.read(self.fd, 4096).decode("utf-8", "replace")
            except OSError:
                raise AssertionError(f"the program ended before {pattern!r} in: {self.shown!r}") from None
        seen, self.shown = self.shown[: match.end()], self.shown[match.end() :]
        return seen

    def leave(self) -> int:
        """Wait for the program's end; its exit code."""
        try:
            while part := os.read(self.fd, 4096):
                self.shown += part.decode("utf-8", "replace")
        except OSError:
            pass
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        return os.waitstatus_to_exitcode(status)


@contextmanager
def terminal(home: Home, *arguments: str) -> Iterator[Terminal]:
    pid, fd = pty.fork()
    if pid == 0:
        os.chdir(home.root)
        os.execve(PROGRAM, [PROGRAM, *arguments], {**home.environment, "NO_COLOR": "1"})
    opened = Terminal(pid, fd)
    try:
        yield opened
    finally:
        if opened.pid:
            os.kill(opened.pid, signal.SIGKILL)
            os.waitpid(opened.pid, 0)
        os.close(fd)


def contents(server: OpenAIServer) -> list[str]:
    return [m["content"] for m in server.bodies[-1]["messages"]]


def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(remote_home: Home, server: OpenAIServer) -> None:
    server.on("/chat/completions", echo_chat(words=[" more"], count=2000, pause=0.02))
    with terminal(remote_home, "chat") as screen:
        screen.expect("> ")
        screen.type("first\n")
        screen.expect("you said first. more")
        screen.type("\x03")
        screen.expect(r"\(stopped\)")
        screen.expect("> ")
        assert server.cut.wait(10)
        server.on("/chat/completions", echo_chat())
        screen.type("second\n")
        screen.expect("you said second")
        screen.expect("> ")
        screen.type("/exit\n")
        assert screen.leave() == 0
    first, said, second = contents(server)
    assert (first, second) == ("first", "second")
    assert said.startswith("you said first. more")


def test_a_line_typed_during_the_answer_is_spliced_in_and_the_answer_goes_on(
    remote_home: Home, server: OpenAIServer
) -> None:
    slow = echo_chat(words=[" more"], count=2000, pause=0.02)
    server.on("/chat/completions", slow, echo_chat(words=[" done"]))
    with terminal(remote_home, "chat") as screen:
        screen.expect("> ")
        screen.type("first\n")
        screen.expect("you said first. more")
        screen.type("rather this\n")
        screen.expect(r"\[rather this\]")
        screen.expect(r"you said rather this\. done")
        screen.expect("> ")
        screen.type("/save talk.json\n")
        screen.expect("saved 4 messages")
        screen.expect("> ")
        screen.type("\x04")
        assert screen.leave() == 0
    assert len(server.bodies) == 2
    saved = json.loads((remote_home.root / "talk.json").read_text())["messages"]
    assert [m["role"] for m in saved] == ["user", "assistant", "user", "assistant"]
    assert saved[1]["content"].startswith("you said first. more")
    assert saved[2:] == [
        {"role": "user", "content": "rather this"},
        {"role": "assistant", "content": "you said rather this. done"},
    ]


def test_a_command_typed_during_the_answer_waits_for_its_end(remote_home: Home, server: OpenAIServer) -> None:
    server.on("/chat/completions", echo_chat(words=[" more"], count=20, pause=0.05))
    with terminal(remote_home, "chat") as screen:
        screen.expect("> ")
        screen.type("first\n")
        screen.expect("you said first")
        screen.type("/save talk.json\n/exit\n")
        screen.expect("saved 2 messages")
        assert screen.leave() == 0
    assert len(server.bodies) == 1


def test_a_model_cannot_write_control_characters_to_the_terminal(
    remote_home: Home, server: OpenAIServer
) -> None:
    server.on("/chat/completions", echo_chat(words=["\x1b]0;owned\x07", "\x1b[2J", "\x9b1m", "fine"]))
    with terminal(remote_home, "chat") as screen:
        screen.expect("> ")
        screen.type("first\n")
        screen.expect("you said first")
        seen = screen.expect("fine")
        screen.expect("> ")
        screen.type("\x04")
        screen.leave()
    assert seen == ".]0;owned[2J1mfine"


def test_half_a_line_typed_during_the_answer_waits_at_the_prompt(
    remote_home: Home, server: OpenAIServer
) -> None:
    server.on("/chat/completions", echo_chat(words=[" more"], count=20, pause=0.05), echo_chat())
    with terminal(remote_home, "chat") as screen:
        screen.expect("> ")
        screen.type("first\n")
        screen.expect("you said first")
        screen.type("half of")
        screen.expect("> ")
        screen.type(" a line\n")
        screen.expect("you said half of a line")
        screen.expect("> ")
        screen.type("\x04")
        screen.leave()
    assert contents(server)[-1] == "half of a line"


def test_an_error_is_one_sentence_and_the_conversation_goes_on_without_the_question(
    remote_home: Home, server: OpenAIServer
) -> None:
    server.on("/chat/completions", answer({"error": "broken"}, 500), echo_chat())
    with terminal(remote_home, "chat") as screen:
        screen.expect("> ")
        screen.type("first\n")
        screen.expect(r"failed \(status 500\): broken")
        screen.expect("> ")
        screen.type("/model nobody\n")
        screen.expect("no model called nobody")
        screen.type("second\n")
        screen.expect("you said second")
        screen.expect("> ")
        screen.type("/exit\n")
        screen.leave()
    assert contents(server) == ["second"]


def test_ctrl_c_at_the_prompt_clears_and_twice_leaves_with_130(remote_home: Home) -> None:
    with terminal(remote_home, "chat") as screen:
        screen.expect("> ")
        screen.type("never mind")
        screen.expect("never mind")
        time.sleep(0.5)  # a signal while readline handles a key is noticed with the next key only
        screen.type("\x03")
        screen.expect("Ctrl-C again")
        screen.expect("> ")
        time.sleep(0.5)
        screen.type("\x03")
        assert screen.leave() == 130


def test_lines_are_remembered_from_one_conversation_to_the_next(
    remote_home: Home, server: OpenAIServer
) -> None:
    pytest.importorskip("readline")
    server.on("/chat/completions", echo_chat())
    for keys, heard in (("remember me\n", "remember me"), ("\x1b[A\n", "remember me")):
        with terminal(remote_home, "chat") as screen:
            screen.expect("> ")
            screen.type(keys)
            screen.expect(f"you said {heard}")
            screen.expect("> ")
            screen.type("\x04")
            screen.leave()
    assert (remote_home.root / "state" / "chat_history").stat().st_mode & 0o777 == 0o600
