"""`keystroke chat`: a conversation on a terminal, or one answer per line of input in a pipe.

Ctrl-C stops the answer and keeps its text; a line typed during an answer is inserted into it. Lines that
begin with / are commands of this program.
"""

from __future__ import annotations

import dataclasses
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keystroke.clients.cli import options
from keystroke.clients.cli.console import print_error
from keystroke.clients.cli.input_line import InputLine, can_draw, read_lines
from keystroke.clients.cli.interruption import interruptible
from keystroke.clients.cli.open_model import chat_model, generation_params, open_model
from keystroke.clients.cli.options import Invocation, invocation_of, option
from keystroke.clients.cli.text_file import decode
from keystroke.errors import InputError, KeystrokeError

if TYPE_CHECKING:
    from keystroke.agent.chat.model import AnswerReport, CompletionModel
    from keystroke.clients.cli.conversation import ChatConversation
    from keystroke.engine.generation import GenerationParams

HELP = """/reset         clear the conversation
/save FILE     write it to FILE as JSON
/file PATH     add a file to your next message (or write @path, @path:10-20 in it)
/model [NAME]  continue with another model, or show which one answers
/stats         cost of the last answer
/help          this list
/exit          leave (or Ctrl-D)
During an answer: Ctrl-C stops it; a line and Enter redirects it."""
PROMPT = "> "


def chat(
    ctx: typer.Context,
    model: options.Model = None,
    system: Annotated[str | None, option("Instructions before the conversation.")] = None,
    load: Annotated[Path | None, option("Continue a saved conversation.", metavar="FILE")] = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    seed: options.Seed = None,
    json: options.Json = False,
    local: options.Local = False,
) -> None:
    from keystroke.clients.cli.conversation import ChatConversation

    run = invocation_of(ctx)
    conversation = ChatConversation.load(load) if load is not None else ChatConversation(system)
    params = generation_params(run.settings, max_tokens=max_tokens, temperature=temperature, seed=seed)
    opened = open_model(chat_model(model, run), run)
    session = ChatSession(run, opened, conversation, params)
    try:
        opened.check_chat()
        if sys.stdin.isatty():
            session.run_terminal()
        else:
            session.run_pipe()
    finally:
        session.model.close()


class ChatSession:
    """Reads messages and commands, and shows answers."""

    def __init__(
        self,
        run: Invocation,
        model: CompletionModel,
        conversation: ChatConversation,
        params: GenerationParams,
    ) -> None:
        self.run, self.model, self.conversation, self.params = run, model, conversation, params
        self.report: AnswerReport | None = None
        self.leaving = False
        self.queued_lines: list[str] = []  # typed during an answer, for after it
        self.typed_ahead = ""  # typed during an answer, without Enter
        self.attached: list[str] = []  # files for the next message

    def run_pipe(self) -> None:
        """Each line of standard input is one message. The first error ends the run."""
        for raw in sys.stdin.buffer:
            line = decode(raw, "standard input").strip()
            if line and not self._command(line):
                self.answer(line)
            if line == "/exit":
                return

    def run_terminal(self) -> None:
        self.run.console.note(f"{self.model.name} is ready; /help for help, Ctrl-D to leave")
        warned = False  # Ctrl-C at the prompt: once clears the line, twice leaves
        with _history(self.run):
            while not self.leaving:
                try:
                    line = self.queued_lines.pop(0) if self.queued_lines else self._read_line()
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
                    print_error(str(error))

    def _read_line(self) -> str:
        """A line from the prompt, which starts with what was typed during the answer."""
        typed, self.typed_ahead = self.typed_ahead, ""
        if not typed:
            return input(PROMPT).strip()
        try:
            import readline
        except ImportError:
            return f"{typed}{input(PROMPT + typed)}".strip()
        readline.set_startup_hook(lambda: readline.insert_text(typed))
        try:
            return input(PROMPT).strip()
        finally:
            readline.set_startup_hook(None)

    def answer(self, line: str, *, keyboard: bool = False) -> None:
        """Show the answer to `line`."""
        from keystroke.agent.chat.model import AnswerOptions
        from keystroke.clients.cli.conversation import ChatTurn

        self.conversation.add_user_message(self._message(line))
        with interruptible() as interrupt:
            with (
                ChatTurn(
                    self.model, self.conversation, AnswerOptions(self.params, interrupt=interrupt)
                ) as turn,
                self._open_input_line(keyboard) as typing,
            ):
                keys = [sys.stdin.fileno()] if keyboard else []
                ended = False
                while not ended:
                    ready, _, _ = select.select([turn.wake, *keys], [], [])
                    if keys and keys[0] in ready and not self._read_keyboard(turn.redirect, typing):
                        keys, self.leaving = [], True  # Ctrl-D: the answer is still finished
                    if turn.wake in ready:
                        text, ended = turn.read()
                        self._show(text, typing)
            stopped = interrupt.is_set and turn.report is not None and turn.report.finish == "interrupted"
        self.report = turn.report
        if turn.error is not None:
            if not self.run.json:
                self.run.console.line()
            raise turn.error
        self._close_answer(stopped, turn.looped)
        if stopped and not keyboard:
            raise KeyboardInterrupt
        self.queued_lines += turn.pending_lines()

    def _message(self, line: str) -> str:
        """The line with the files it mentions and those added by /file."""
        from keystroke.clients.cli.attachments import attach_mentions

        message, names = attach_mentions(line, self.run.settings.assist.exclude)
        if names:
            self.run.console.note(f"with {', '.join(names)}")
        files, self.attached = self.attached, []
        return "\n\n".join([*files, message])

    @contextmanager
    def _open_input_line(self, keyboard: bool) -> Iterator[InputLine | None]:
        """An input line below the answer, where the terminal can draw it."""
        if not keyboard or self.run.json or not can_draw():
            yield None
            return
        with InputLine(sys.stdin.fileno(), sys.stdout.write) as typing:
            yield typing
        self.typed_ahead = typing.typed

    def _read_keyboard(self, redirect: Callable[[str], None], typing: InputLine | None) -> bool:
        """Handle lines typed during the answer. False at the end of input."""
        lines = read_lines(typing)
        for line in lines or ():
            if line.startswith("/"):
                self.queued_lines.append(line)
            elif line:
                redirect(line)
        return lines is not None

    def _show(self, text: str, typing: InputLine | None = None) -> None:
        if not text:
            return
        if self.run.json:
            self.run.console.json({"type": "text", "text": text})
        elif typing is not None:
            typing.show(self.run.console.plain(text))
            sys.stdout.flush()
        else:
            self.run.console.write(text)

    def _close_answer(self, stopped: bool, looped: bool) -> None:
        if self.run.json:
            self.run.console.json({"type": "end", **(dataclasses.asdict(self.report) if self.report else {})})
            return
        self.run.console.line()
        if looped:
            self.run.console.note("(stopped: the answer repeated itself)")
        elif stopped:
            self.run.console.note("(stopped)")

    def _command(self, line: str) -> bool:
        """Run `line` if it is a command; False if it is a message."""
        if not line.startswith("/"):
            return False
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name == "/help":
            self.run.console.line(HELP)
        elif name == "/reset":
            self.conversation.reset()
            self.run.console.note("the conversation is cleared")
        elif name == "/save":
            if not rest:
                raise InputError("/save needs a file name")
            self.conversation.save(Path(rest))
            self.run.console.note(f"saved {len(self.conversation.messages)} messages to {rest}")
        elif name == "/file":
            self._attach_file(rest)
        elif name == "/model":
            self._switch_model(rest)
        elif name == "/stats":
            self._stats()
        elif name != "/exit":
            raise InputError(f"{name} is not a command; /help lists them")
        return True

    def _attach_file(self, name: str) -> None:
        from keystroke.clients.cli.attachments import attach_file

        if not name:
            raise InputError("/file needs the path of a file")
        self.attached.append(attach_file(name, self.run.settings.assist.exclude))
        self.run.console.note(f"{name} is added to your next message")

    def _switch_model(self, name: str) -> None:
        """Continue with another model. If it cannot be opened the old one stays."""
        if name:
            other = open_model(name, self.run)
            try:
                other.check_chat()
            except KeystrokeError:
                other.close()
                raise
            self.model.close()
            self.model = other
        self.run.console.line(f"{self.model.name} answers")

    def _stats(self) -> None:
        if self.report is None:
            self.run.console.line("there is no answer yet")
            return
        for key, value in dataclasses.asdict(self.report).items():
            self.run.console.line(f"{key:20}{value:.3f}" if isinstance(value, float) else f"{key:20}{value}")


@contextmanager
def _history(run: Invocation) -> Iterator[None]:
    """Line editing with a history file."""
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
            run.console.note(f"the history could not be written to {file}")
