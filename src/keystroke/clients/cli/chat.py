"""`keystroke chat`: a conversation on a terminal, or one line of input for one answer in a pipe.

Owns the keyboard and the screen. Ctrl-C stops the answer and keeps what was said; a line typed while
the answer comes, on a line of its own below it, is spliced into it. Lines that begin with / are for this
program, not for the model.
"""

from __future__ import annotations

import dataclasses
import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keystroke.clients.cli import options
from keystroke.clients.cli.invocation import Invocation, of
from keystroke.errors import InputError, KeystrokeError

if TYPE_CHECKING:
    from keystroke.clients.cli.answering import Report, Speaker
    from keystroke.clients.cli.conversation import Conversation
    from keystroke.clients.cli.input_line import InputLine
    from keystroke.engine.generation import GenerationParams

HELP = """/reset         forget the conversation
/save FILE     write it to FILE as JSON
/file PATH     show the model a file with your next message (or write @path, @path:10-20 in it)
/model [NAME]  go on with another model, or say which one answers
/stats         what the last answer cost
/help          this list
/exit          leave (or Ctrl-D)
While an answer comes: Ctrl-C stops it; a line and Enter redirects it."""
PROMPT = "> "


def chat(
    ctx: typer.Context,
    model: options.Model = None,
    system: Annotated[
        str | None, typer.Option(help="Instructions that stand before the conversation.")
    ] = None,
    load: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Go on from a saved conversation.")
    ] = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    seed: options.Seed = None,
    json: options.Json = False,
) -> None:
    from keystroke.clients.cli.conversation import Conversation
    from keystroke.clients.cli.speaker import chat_model, open_speaker, params

    run = of(ctx)
    conversation = Conversation.load(load) if load is not None else Conversation(system)
    chosen = params(run.settings, max_tokens=max_tokens, temperature=temperature, seed=seed)
    speaker = open_speaker(chat_model(model, run), run)
    room = Room(run, speaker, conversation, chosen, as_json=run.wants_json(json))
    try:
        speaker.check_chat()
        if sys.stdin.isatty():
            room.run_terminal()
        else:
            room.run_pipe()
    finally:
        room.speaker.close()


class Room:
    """Where the conversation takes place."""

    def __init__(
        self,
        run: Invocation,
        speaker: Speaker,
        conversation: Conversation,
        params: GenerationParams,
        *,
        as_json: bool,
    ) -> None:
        self.run, self.speaker, self.conversation, self.params = run, speaker, conversation, params
        self.as_json = as_json
        self.report: Report | None = None
        self.leaving = False
        self.later: list[str] = []  # lines typed during an answer that are not for the model
        self.unfinished = ""  # typed during an answer and not ended by Enter
        self.shown: list[str] = []  # files that go with the next message

    # ── two ways in ──────────────────────────────────────────────────────────────────────────

    def run_pipe(self) -> None:
        """Each line of standard input is one message. The first error ends the run."""
        from keystroke.clients.cli.source import decode

        for raw in sys.stdin.buffer:
            line = decode(raw, "standard input").strip()
            if line and not self._command(line):
                self.answer(line)
            if line == "/exit":
                return

    def run_terminal(self) -> None:
        self.run.console.note(f"{self.speaker.name} listens; /help for help, Ctrl-D to leave")
        warned = False  # Ctrl-C at the prompt: once clears the line, twice leaves
        with _history(self.run):
            while not self.leaving:
                try:
                    line = self.later.pop(0) if self.later else self._input()
                    warned = False
                except KeyboardInterrupt:
                    if warned:
                        raise
                    warned = True
                    self.run.console.note("\nCtrl-C again, or Ctrl-D, leaves")
                    continue
                except EOFError:
                    self.run.console.note("")
                    return
                except UnicodeDecodeError:
                    self.run.console.note("that line was not UTF-8 text; try again")
                    continue
                if line == "/exit":
                    return
                try:
                    if line and not self._command(line):
                        self.answer(line, keyboard=True)
                except KeystrokeError as error:
                    from keystroke.clients.cli.console import complain

                    complain(str(error))

    def _input(self) -> str:
        """A line from the prompt, begun with what was typed during the answer."""
        begun, self.unfinished = self.unfinished, ""
        if not begun:
            return input(PROMPT).strip()
        try:
            import readline
        except ImportError:
            return f"{begun}{input(PROMPT + begun)}".strip()
        readline.set_startup_hook(lambda: readline.insert_text(begun))
        try:
            return input(PROMPT).strip()
        finally:
            readline.set_startup_hook(None)

    # ── one answer ───────────────────────────────────────────────────────────────────────────

    def answer(self, line: str, *, keyboard: bool = False) -> None:
        """Show the answer to `line`."""
        from keystroke.clients.cli.conversation import Turn
        from keystroke.clients.cli.interruption import interruptible

        self.conversation.say(self._message(line))
        with interruptible() as interrupt:
            with (
                Turn(self.speaker, self.conversation, self.params, interrupt) as turn,
                self._keys(keyboard) as typing,
            ):
                keys = [sys.stdin.fileno()] if keyboard else []
                ended = False
                while not ended:
                    ready, _, _ = select.select([turn.wake, *keys], [], [])
                    if keys and keys[0] in ready and not self._typed(turn.redirect, typing):
                        keys, self.leaving = [], True  # Ctrl-D: the answer still comes to its end
                    if turn.wake in ready:
                        text, ended = turn.take()
                        self._show(text, typing)
            stopped = interrupt.is_set and turn.report is not None and turn.report.finish == "interrupted"
        self.report = turn.report
        if turn.error is not None:
            if not self.as_json:
                self.run.console.line()
            raise turn.error
        self._close_answer(stopped, turn.looped)
        if stopped and not keyboard:
            raise KeyboardInterrupt
        self.later += turn.left_over()

    def _message(self, line: str) -> str:
        """The line with the files it mentions, and those that were put beside it."""
        from keystroke.clients.cli.attachments import with_files

        message, names = with_files(line, self.run.settings.assist.exclude)
        if names:
            self.run.console.note(f"with {', '.join(names)}")
        files, self.shown = self.shown, []
        return "\n\n".join([*files, message])

    @contextmanager
    def _keys(self, keyboard: bool) -> Iterator[InputLine | None]:
        """A line to type on below the answer, where there is a terminal to draw it on."""
        from keystroke.clients.cli.input_line import InputLine

        if not keyboard or self.as_json or not sys.stdout.isatty() or not _drawable():
            yield None
            return
        with InputLine(sys.stdin.fileno(), sys.stdout.write) as typing:
            yield typing
        self.unfinished = typing.typed

    def _typed(self, redirect: Callable[[str], None], typing: InputLine | None) -> bool:
        """Take what was typed during the answer. False at the end of input."""
        if typing is not None:
            lines = typing.read()
        else:
            data = os.read(sys.stdin.fileno(), 65536)
            lines = [line.strip() for line in data.decode("utf-8", "replace").splitlines()] if data else None
        for line in lines or ():
            if line.startswith("/"):
                self.later.append(line)
            elif line:
                redirect(line)
        return lines is not None

    def _show(self, text: str, typing: InputLine | None = None) -> None:
        if not text:
            return
        if self.as_json:
            self.run.console.json({"type": "text", "text": text})
        elif typing is not None:
            typing.show(self.run.console.plain(text))
            sys.stdout.flush()
        else:
            self.run.console.write(text)

    def _close_answer(self, stopped: bool, looped: bool) -> None:
        if self.as_json:
            self.run.console.json({"type": "end", **(dataclasses.asdict(self.report) if self.report else {})})
            return
        self.run.console.line()
        if looped:
            self.run.console.note("(stopped: it began to repeat itself)")
        elif stopped:
            self.run.console.note("(stopped)")

    # ── commands ─────────────────────────────────────────────────────────────────────────────

    def _command(self, line: str) -> bool:
        """Whether `line` was for this program; if so it is done."""
        if not line.startswith("/"):
            return False
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name == "/help":
            self.run.console.line(HELP)
        elif name == "/reset":
            self.conversation.reset()
            self.run.console.note("the conversation begins anew")
        elif name == "/save":
            if not rest:
                raise InputError("/save needs a file name")
            self.conversation.save(Path(rest))
            self.run.console.note(f"saved {len(self.conversation.messages)} messages to {rest}")
        elif name == "/file":
            self._file(rest)
        elif name == "/model":
            self._switch(rest)
        elif name == "/stats":
            self._stats()
        elif name != "/exit":
            raise InputError(f"{name} is not a command; /help lists them")
        return True

    def _file(self, name: str) -> None:
        from keystroke.clients.cli.attachments import attached

        if not name:
            raise InputError("/file needs the path of a file")
        self.shown.append(attached(name, self.run.settings.assist.exclude))
        self.run.console.note(f"{name} goes with your next message")

    def _switch(self, name: str) -> None:
        """Another model goes on with the same conversation. If it cannot be opened the old one stays."""
        from keystroke.clients.cli.speaker import open_speaker

        if name:
            other = open_speaker(name, self.run)
            try:
                other.check_chat()
            except KeystrokeError:
                other.close()
                raise
            self.speaker.close()
            self.speaker = other
        self.run.console.line(f"{self.speaker.name} answers")

    def _stats(self) -> None:
        if self.report is None:
            self.run.console.line("nothing was answered yet")
            return
        for key, value in dataclasses.asdict(self.report).items():
            self.run.console.line(f"{key:20}{value:.3f}" if isinstance(value, float) else f"{key:20}{value}")


def _drawable() -> bool:
    """Whether the terminal understands how a line is drawn below another."""
    return os.environ.get("TERM", "dumb") not in ("dumb", "") and sys.platform != "win32"


@contextmanager
def _history(run: Invocation) -> Iterator[None]:
    """Line editing and history, kept from one conversation to the next where that is possible."""
    try:
        import readline
    except ImportError:
        yield
        return
    file = run.settings.paths.state / "chat_history"
    with suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(1000)
    try:
        yield
    finally:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(file)
            file.chmod(0o600)
        except OSError:
            run.console.note(f"the history could not be kept in {file}")
