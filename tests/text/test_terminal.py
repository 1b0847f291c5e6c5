"""What files, models and commands say cannot act on a terminal."""

from __future__ import annotations

import os
import pty
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keystroke.clients.cli.console import Console
from keystroke.text.terminal import safe_for_terminal

HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b31m\u202egnp\u2066\rover\udcff"


@given(st.text() | st.just(HOSTILE))
def test_no_control_or_bidirectional_character_is_left(text: str) -> None:
    safe = safe_for_terminal(text)
    assert not {c for c in safe if c not in "\n\t" and (ord(c) < 32 or 127 <= ord(c) < 160)}
    assert not set(safe) & set("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
    assert safe.isascii() or safe.encode()


def test_ordinary_text_stays_as_it_is() -> None:
    for text in ("plain\n\ttext", "été 日本語 עברית 👩‍💻", "a\u200bb"):
        assert safe_for_terminal(text) == text


@pytest.mark.parametrize("say", ["write", "line", "note", "prompt_line"])
def test_the_console_filters_every_way_to_say_something(say: str, monkeypatch: pytest.MonkeyPatch) -> None:
    outer, inner = pty.openpty()
    with os.fdopen(inner, "w", encoding="utf-8", errors="replace") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setattr(sys, "stderr", terminal)
        getattr(Console(), say)(f"name {HOSTILE}")
        terminal.flush()
        shown = os.read(outer, 10_000).decode()
    os.close(outer)
    for sign in ("\x1b]0", "\x1b[2J", "\x9b", "\u202e", "\u2066", "\x07"):
        assert sign not in shown
    assert "name" in shown
