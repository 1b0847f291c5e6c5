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

MORE = [f" more {number}" for number in range(2000)]  # never the same: that would be a loop


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
def terminal(home: Home, *arguments: str, kind: str = "xterm") -> Iterator[Terminal]:
    pid, fd = pty.fork()
    if pid == 0:
        os.chdir(home.root)
        os.execve(PROGRAM, [PROGRAM, *arguments], {**home.environment, "NO_COLOR": "1", "TERM": kind})
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
    server.on("/chat/completions", echo_chat(words=MORE, pause=0.02))
    with terminal(remote_home, "chat") as screen:
        screen.expect("> ")
        screen.type("first\n")
        screen.expect("you said first. more")
        screen.type("\x03")
        screen.expect(r"\(stopped\)")
        screen.expect("> ")
        assert server.cut.wait(60)
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
    slow = echo_chat(words=MORE, pause=0.02)
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
    server.on("/chat/completions", echo_chat(words=MORE[:20], pause=0.05))
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
    assert seen == ".�]0;owned��[2J�1mfine"


def test_half_a_line_typed_during_the_answer_waits_at_the_prompt(
    remote_home: Home, server: OpenAIServer
) -> None:
    server.on("/chat/completions", echo_chat(words=MORE[:20], pause=0.05), echo_chat())
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


def test_what_is_typed_stands_on_a_line_of_its_own_below_the_answer(
    remote_home: Home, server: OpenAIServer
) -> None:
    server.on("/chat/completions", echo_chat(words=MORE[:40], pause=0.05), echo_chat())
    with terminal(remote_home, "chat") as screen:
        screen.expect("> ")
        screen.type("first\n")
        screen.expect("you said first")
        screen.type("rat")
        # Saved, one line down, drawn, and back where the answer goes on.
        screen.expect(r"\x1bD\x1b\[A\x1b7\x1b\[B\r\x1b\[K> rat\x1b8")
        screen.expect(r"\x1b7\x1b\[B\r\x1b\[K\x1b8 more \d+\x1bD\x1b\[A\x1b7\x1b\[B\r\x1b\[K> rat\x1b8")
        screen.type("x\x7fher\n")
        screen.expect(r"\[rather\]")
        screen.expect("> ")
        screen.type("\x04")
        screen.leave()
    assert contents(server)[-1] == "rather"


def test_a_terminal_that_cannot_draw_still_takes_lines(remote_home: Home, server: OpenAIServer) -> None:
    server.on("/chat/completions", echo_chat(words=MORE, pause=0.02), echo_chat(words=[" done"]))
    with terminal(remote_home, "chat", kind="dumb") as screen:
        screen.expect("> ")
        screen.type("first\n")
        screen.expect("you said first. more")
        screen.type("other\n")
        assert "\x1b7" not in screen.expect(r"you said other\. done")
        screen.expect("> ")
        screen.type("\x04")
        screen.leave()


def test_an_answer_that_repeats_itself_is_stopped_and_one_round_is_remembered(
    remote_home: Home, server: OpenAIServer
) -> None:
    server.on("/chat/completions", echo_chat(words=["\nI will do that now!"], count=5000, pause=0.002))
    result = remote_home.keystroke("chat", "--json", stdin="first\n/save talk.json\n")
    last = json.loads(result.stdout.splitlines()[-1])
    assert last["finish"] == "repetition"
    assert server.cut.wait(60)
    saved = json.loads((remote_home.root / "talk.json").read_text())["messages"]
    assert saved[1]["content"] == "you said first.\nI will do that now!"


def test_files_go_with_the_message_that_mentions_them(remote_home: Home, server: OpenAIServer) -> None:
    server.on("/chat/completions", echo_chat())
    (remote_home.root / "one.py").write_text("x = 1\ny = 2\nz = 3\n")
    (remote_home.root / "two.txt").write_text("hello\n")
    (remote_home.root / ".env").write_text("SECRET=1\n")
    said = "what is @one.py:2-3, and who is @ann?\n/file two.txt\nand this\n"
    remote_home.keystroke("chat", stdin=said)
    sent = contents(server)
    assert sent[0] == "one.py:2-3\n```\ny = 2\nz = 3\n```\n\nwhat is @one.py:2-3, and who is @ann?"
    assert sent[2] == "two.txt\n```\nhello\n```\n\nand this"
    count = len(server.bodies)
    assert "may contain secrets" in remote_home.refused("chat", stdin="look at @.env\n")
    assert "no file nowhere.py" in remote_home.refused("chat", stdin="/file nowhere.py\n")
    assert len(server.bodies) == count
