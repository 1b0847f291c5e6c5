"""Output of the command line: results on standard output, everything else on standard error.

Colours and progress bars appear only on a terminal, colours never with NO_COLOR. Rich is imported only when a
progress bar is drawn.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from keystroke.text.terminal import safe_for_terminal

if TYPE_CHECKING:
    from keystroke.engine.library import Progress

BOLD, DIM, RED, GREEN, PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[32m", "\x1b[0m"
WAIT_SHOWN_AFTER = 0.7  # seconds
NARROWEST = 24  # columns; text is not wrapped to fewer
PROGRESS_INTERVAL = 5.0  # seconds between progress lines without a terminal


def typeable(text: str) -> str:
    """`text` with `keystroke` commands in backticks as this user can type them."""
    return text.replace("`keystroke ", f"`{_command_name()} ") if "`keystroke " in text else text


@cache
def _command_name() -> str:
    """The command of this program: its name if it is on the PATH, else the path or module that was run."""
    ran = Path(sys.argv[0])
    if ran.name == "__main__.py" and ran.parent.name == "keystroke":
        return f"{Path(sys.executable).name} -m keystroke"
    if ran.stem != "keystroke" or shutil.which("keystroke") or not ran.exists():
        return "keystroke"
    ran = Path(os.path.abspath(ran))
    here = Path.cwd()
    return shlex.quote(str(ran.relative_to(here) if ran.is_relative_to(here) else ran))


def print_error(sentence: str) -> None:
    """Print an error as one line on standard error."""
    try:
        line = "".join(c if c.isprintable() else " " for c in typeable(sentence))
        _write_line(f"{RED}keystroke:{PLAIN} {line}" if supports_colour(sys.stderr) else f"keystroke: {line}")
    except (BrokenPipeError, ValueError):
        pass


def _write_line(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def supports_colour(stream: TextIO) -> bool:
    """Whether colours may be written to `stream`."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and stream.isatty()


class Console:
    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet

    def write(self, text: str, style: str = "") -> None:
        """Write and flush part of an answer. A terminal never gets a model's control characters, which could
        move its cursor or set its title."""
        text = self.plain(text)
        sys.stdout.write(f"{style}{text}{PLAIN}" if style and supports_colour(sys.stdout) else text)
        sys.stdout.flush()

    @staticmethod
    def plain(text: str) -> str:
        """Text of files and models without control characters, if it is written to a terminal."""
        return safe_for_terminal(text) if sys.stdout.isatty() else text

    def line(self, text: str = "", style: str = "") -> None:
        self.write(text, style)
        self.write("\n")

    def json(self, value: Any) -> None:
        """One JSON document on one line."""
        import msgspec

        self.line(msgspec.json.encode(value).decode())

    def note(self, text: str) -> None:
        """Print a message on standard error, unless --quiet was given."""
        if not self.quiet:
            text = safe_for_terminal(typeable(text)) if sys.stderr.isatty() else typeable(text)
            _write_line(f"{DIM}{text}{PLAIN}" if supports_colour(sys.stderr) else text)

    def prompt_line(self, text: str, style: str = "") -> None:
        """Print a line of a question on standard error, even with --quiet."""
        text = safe_for_terminal(text) if sys.stderr.isatty() else text
        _write_line(f"{style}{text}{PLAIN}" if style and supports_colour(sys.stderr) else text)

    def table(self, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print aligned columns; on a terminal the last one is wrapped."""
        widths = [max(len(row[i]) for row in (headings, *rows)) for i in range(len(headings) - 1)]
        for number, row in enumerate((headings, *rows)):
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
            self.field("".join(f"{cell}  " for cell in cells), row[-1], BOLD if number == 0 else "")

    def field(self, label: str, text: str, style: str = "") -> None:
        """Print a label and a text, whose further lines on a terminal stand below its first."""
        room = shutil.get_terminal_size().columns - len(label)
        lines = [text]
        if sys.stdout.isatty() and room >= NARROWEST and len(text) > room:
            lines = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)
        for at, line in enumerate(lines):
            self.line(f"{label if at == 0 else ' ' * len(label)}{line}".rstrip(), style)

    @contextmanager
    def progress(self, *, log: bool = False) -> Iterator[Progress]:
        """A function that shows progress: a bar on a terminal, occasional lines otherwise. `log`: lines
        that a client reads from the log of the gateway it starts."""
        if log:
            yield _LogLines()
        elif self.quiet:
            from keystroke.engine.library import no_progress

            yield no_progress
        elif supports_colour(sys.stderr) or (sys.stderr.isatty() and os.environ.get("TERM") != "dumb"):
            with _Bar() as bar:
                yield bar
        else:
            yield _Lines()

    @contextmanager
    def waiting(self, ask: Callable[[], tuple[str, int, int] | None]) -> Iterator[None]:
        """While the block runs, show the progress that `ask` returns, after a short delay. `ask` is called on
        another thread."""
        over = threading.Event()

        def show() -> None:
            if over.wait(WAIT_SHOWN_AFTER):
                return
            with self.progress() as progress:
                while not over.wait(0.2):
                    if (state := ask()) is not None:
                        progress(*state)

        if self.quiet:
            yield
            return
        watcher = threading.Thread(target=show, name="waiting", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()


READING = "reading the prompt"  # progress in tokens
READING_SHOWN_FROM = 3.0  # seconds; a shorter wait is not mentioned without a terminal
BYTES_FROM = 1_000_000  # a total this large counts bytes


class ProgressText:
    """Describes progress in words: how much is done of how much, how fast, and about how long it takes.
    `wait` is that time in seconds, if it is known."""

    def __init__(self) -> None:
        self._began: dict[str, tuple[float, int]] = {}
        self.wait: float | None = None

    def describe(self, what: str, done: int, total: int, now: float) -> str:
        began, first = self._began.setdefault(what, (now, done))
        seconds, progressed = now - began, done - first
        rate = progressed / seconds if seconds > 0 and progressed > 0 else 0.0
        self.wait = (total - done) / rate if rate and total > done else None
        remaining = f", about {format_duration(self.wait)}" if self.wait is not None else ""
        if not total:
            return f"{what} …"
        if what == READING:
            return f"reading {done:,} of {total:,} tokens{remaining}"
        if total >= BYTES_FROM:
            speed = f", {format_size(rate)}/s" if rate else ""
            return f"{what}: {format_size(done)} of {format_size(total)}{speed}{remaining}"
        if not done:
            return f"{what} …"
        return f"{what}: {done * 100 // total} %{remaining if seconds >= 2 else ''}"


class _LogLines:
    """Writes `what: N %` when a stage begins and whenever its percentage changes."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, what: str, done: int, total: int) -> None:
        if (line := f"{what}: {done * 100 // (total or 1)} %") != self._last:
            self._last = line
            _write_line(line)


class _Lines:
    """Writes a line every few seconds, none twice."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._text = ProgressText()
        self._last_text = ""
        self._reading_shown = False

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        text = self._text.describe(what, done, total, now)
        if what == READING:  # said once, as soon as the time can be estimated, unless it is short
            if not self._reading_shown and (wait := self._text.wait) is not None:
                self._reading_shown = True
                if wait >= READING_SHOWN_FROM:
                    _write_line(text)
        elif now - self._last >= PROGRESS_INTERVAL and text != self._last_text:
            self._last, self._last_text = now, text
            _write_line(text)


class _Bar:
    """A Rich progress bar that appears with the first report."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._tasks: dict[str, Any] = {}
        self._text = ProgressText()

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        if self._bar is None:
            from rich.console import Console as RichConsole
            from rich.progress import BarColumn, Progress, TextColumn

            columns = (BarColumn(), TextColumn("{task.description}", markup=False))
            self._bar = Progress(*columns, console=RichConsole(stderr=True), transient=True)
            self._bar.start()
        text = self._text.describe(what, done, total, time.monotonic())
        if what not in self._tasks:
            for task in self._tasks.values():
                self._bar.update(task, visible=False)  # an earlier stage is over
            self._tasks[what] = self._bar.add_task(text, total=total or None)
        self._bar.update(self._tasks[what], description=text, completed=done, total=total or None)


def format_duration(seconds: float) -> str:
    """A time to wait, rounded for people."""
    if seconds < 90:
        return f"{max(round(seconds), 1)} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def format_count(number: int, thing: str) -> str:
    """A number of things in words."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def format_time(at: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at)) if at else ""


def format_size(count: float) -> str:
    """A number of bytes with a unit."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
