"""An input line at the bottom of the terminal while text streams above it.

While open it reads the keys and draws the last line, and restores the terminal afterwards. It returns whole
lines; unfinished input stays in `typed`. Ctrl-C remains a signal.
"""

from __future__ import annotations

import codecs
import os
import re
import shutil
import sys
import unicodedata
from collections.abc import Callable
from typing import Any

PROMPT = "> "
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|O.|.)?")
_BELOW = "\x1bD\x1b[A"  # ensure that there is a line below, keeping the column
_SAVE, _BACK, _CLEARED = "\x1b7", "\x1b8", "\x1b[B\r\x1b[K"


class InputLine:
    """`fd` is the terminal to read keys from; `write` prints text."""

    def __init__(self, fd: int, write: Callable[[str], object]) -> None:
        self._fd, self._write = fd, write
        self.typed = ""
        self._shown = False
        self._before: list[Any] | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __enter__(self) -> InputLine:
        import termios

        self._before = termios.tcgetattr(self._fd)
        mode = termios.tcgetattr(self._fd)
        mode[3] &= ~(termios.ICANON | termios.ECHO)
        # TCSADRAIN keeps the keys typed ahead.
        termios.tcsetattr(self._fd, termios.TCSADRAIN, mode)
        return self

    def __exit__(self, *_: object) -> None:
        import termios

        self._hide()
        if self._before is not None:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    def show(self, text: str) -> None:
        """Print a piece of the answer above the input line."""
        self._hide()
        self._write(text)
        self._draw()

    def read(self) -> list[str] | None:
        """Read the available keys and return the completed lines; None after Ctrl-D on an empty line. Call it
        when the terminal is readable."""
        data = os.read(self._fd, 4096)
        lines: list[str] = []
        ended = not data
        text = _ESCAPE.sub("", self._decoder.decode(data))
        for key in text:
            if key in "\r\n":
                if self.typed.strip():
                    lines.append(self.typed.strip())
                self.typed = ""
            elif key in "\x7f\x08":
                self.typed = self.typed[:-1]
            elif key == "\x15":  # Ctrl-U
                self.typed = ""
            elif key == "\x17":  # Ctrl-W
                self.typed = self.typed.rstrip().rpartition(" ")[0]
            elif key == "\x04":
                ended = ended or not self.typed
            elif key == "\t":
                self.typed += " "
            elif key.isprintable():
                self.typed += key
        self._hide()
        self._draw()
        return None if ended and not lines else lines

    def _draw(self) -> None:
        if not self.typed:
            return
        self._write(f"{_BELOW}{_SAVE}{_CLEARED}{PROMPT}{self._visible()}{_BACK}")
        self._shown = True
        sys.stdout.flush()

    def _hide(self) -> None:
        if self._shown:
            self._write(f"{_SAVE}{_CLEARED}{_BACK}")
            self._shown = False
            sys.stdout.flush()

    def _visible(self) -> str:
        """The end of the line, as much as fits into one row."""
        room = max(8, shutil.get_terminal_size().columns - len(PROMPT) - 1)
        width = at = 0
        for at, sign in enumerate(reversed(self.typed), 1):
            width += 2 if unicodedata.east_asian_width(sign) in "WF" else 1
            if width > room:
                return self.typed[len(self.typed) - at + 1 :]
        return self.typed[len(self.typed) - at :]


def can_draw() -> bool:
    """Whether the terminal can draw an input line below the text."""
    drawable = os.environ.get("TERM", "dumb") not in ("dumb", "") and sys.platform != "win32"
    return drawable and sys.stdout.isatty()


def read_lines(line: InputLine | None) -> list[str] | None:
    """The lines typed since the last call, from `line` or from standard input; None at the end of input."""
    if line is not None:
        return line.read()
    data = os.read(sys.stdin.fileno(), 65536)
    return [typed.strip() for typed in data.decode("utf-8", "replace").splitlines()] if data else None
