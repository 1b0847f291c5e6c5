"""The Textual application: a log, an input line and a status bar.

State lives in the session and on the gateway. Enter sends a line, or redirects a running answer or task;
Escape stops it. A change is applied only after approval. Rewinding reverts conversation and files together,
newest first, and stops at a file that was changed since.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from msgspec import UNSET
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.events import Key
from textual.widget import Widget
from textual.widgets import Footer, Input

from keystroke.clients.gateway_address import GatewayAddress
from keystroke.clients.task_client import TaskClient
from keystroke.clients.tui.chat import ChatClient, format_speed
from keystroke.clients.tui.session import SessionEntry, SessionStore, TuiSession, rewind
from keystroke.clients.tui.task_view import TaskPresenter
from keystroke.clients.tui.widgets import ChoiceScreen, LogEntry, QuestionPanel, StatusBar
from keystroke.errors import KeystrokeError
from keystroke.protocol import tasks

HELP = """Enter sends the line; while an answer or a task is running, it redirects it. Escape stops it.
Ctrl+T  switch between chat and task. A task edits files in this folder after you approve
        (y approve, n reject, Space excludes a hunk)
Ctrl+R  rewind conversation and files to before an earlier message
Ctrl+O  open an earlier session        Ctrl+N  new session
/model NAME  choose the model    /check COMMAND  command a task must pass    /do ...  run one task
/help  show this help    /quit  leave"""


_CHAT_PLACEHOLDER = "Type a message; /help for help"


class TerminalApp(App[None]):
    TITLE = "keystroke"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #log { height: 1fr; padding: 0 1; }
    .said { margin: 0 0 1 0; height: auto; }
    .said.user, .said.task { border-left: thick $accent; padding-left: 1; }
    .said.problem { color: $text-error; }
    .diff { height: auto; margin: 0 0 1 2; }
    #question { height: auto; max-height: 40%; border: round $accent; padding: 0 1; }
    #question SelectionList { height: auto; max-height: 10; border: none; }
    #line { border: round $primary; }
    #status { height: 1; background: $panel; padding: 0 1; }
    ChoiceScreen { align: center middle; }
    #choice { width: 90%; max-width: 110; height: 70%; border: round $accent; padding: 0 1; }
    #choice { background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "stop", "Stop"),
        Binding("ctrl+t", "mode", "Chat/Task"),
        Binding("ctrl+r", "rewind", "Rewind"),
        Binding("ctrl+o", "sessions", "Sessions"),
        Binding("ctrl+n", "fresh", "New"),
        Binding("ctrl+q", "quit", "Quit", priority=True),
    ]

    def __init__(self, address: GatewayAddress, workspace: Path, state: Path, *, model: str = "auto") -> None:
        super().__init__()
        self._chat, self._tasks = ChatClient(address), TaskClient(address)
        self._sessions = SessionStore(state)
        self.session = self._sessions.create(workspace)
        self.session.model = model
        self._workspace = workspace
        self._running_task: str | None = None  # its id
        self._answer: LogEntry | None = None  # the answer being received
        self._redirections: list[str] = []  # lines sent to steer the answer, not in effect yet
        self._check = ""
        self._task_mode = False  # the next line starts a task
        # Held here because queries find no widget of an app that is closing, while answers still end.
        self._entries = VerticalScroll(id="log")
        self._line = Input(placeholder=_CHAT_PLACEHOLDER, id="line")
        self.bar = StatusBar()

    def compose(self) -> ComposeResult:
        yield self._entries
        yield self._line
        yield self.bar
        yield Footer()

    async def on_mount(self) -> None:
        self._entries.can_focus = True
        self.bar.set_fields(folder=self._workspace.name, model=self.session.model)
        self._line.focus()
        self._show_model()

    async def on_unmount(self) -> None:
        await self._chat.close()
        await self._tasks.close()

    @work
    async def _show_model(self) -> None:
        try:
            known = (await self._tasks.status()).models
            self.bar.set_fields(model=self.session.model if self.session.model != "auto" else known[0].name)
        except (KeystrokeError, IndexError) as error:
            self._problem(error)

    # Input

    async def on_input_submitted(self, event: Input.Submitted) -> None:
        line = event.value.strip()
        event.input.value = ""
        if not line:
            return
        if line.startswith("/"):
            await self._command(line)
        elif self._running_task is not None:
            self._steer_task(line)
        elif self._chat.answering:
            self._steer_chat(line)
        elif self._task_mode:
            self._start_task(line)
        else:
            self._send_message(line)

    async def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name == "/do" and rest:
            self._start_task(rest)
        elif name == "/model" and rest:
            self.session.model = rest
            self.bar.set_fields(model=rest)
        elif name == "/check":
            self._check = rest
            self._note(f"tasks must pass: {rest}" if rest else "tasks are not checked")
        elif name in ("/quit", "/exit"):
            self.exit()
        elif name == "/sessions":
            self.action_sessions()
        elif name == "/rewind":
            self.action_rewind()
        else:
            self._note(HELP)

    # Chat

    @work
    async def _send_message(self, line: str) -> None:
        self.session.entries.append(SessionEntry(kind="user", text=line))
        await self.add_entry(LogEntry("user", line))
        self._answer = LogEntry("assistant")
        await self.add_entry(self._answer)
        self.bar.set_fields(state="answering")

        try:
            response = await self._chat.send_turn(self.session.messages(), self.session.model, self)
            if response.receipt is not UNSET:
                self.bar.set_fields(speed=format_speed(response.receipt), model=response.model)
            if response.status == "cancelled":
                self._note("stopped")
        except KeystrokeError as error:
            self._problem(error)
        finally:
            self._save_answer()
            self._sessions.save(self.session)
            self.bar.set_fields(state="ready")

    def on_text(self, piece: str) -> None:
        if self._answer is not None:
            self._answer.append_text(piece)
            self.scroll_to_end()

    def on_restart(self) -> None:
        if self._answer is not None:
            self._answer.set_text("")

    def on_redirect(self) -> None:
        line = self._redirections.pop(0) if self._redirections else ""
        self._save_answer()
        self.session.entries.append(SessionEntry(kind="user", text=line))
        self._answer = LogEntry("assistant")
        self._entries.mount(LogEntry("user", line), self._answer)
        self.scroll_to_end()

    def _save_answer(self) -> None:
        """Add the answer so far to the session."""
        if self._answer is not None and self._answer.body:
            self.session.entries.append(SessionEntry(kind="assistant", text=self._answer.body))
        self._answer = None

    @work
    async def _steer_chat(self, line: str) -> None:
        self._redirections.append(line)
        try:
            await self._chat.steer(line)
        except KeystrokeError as error:
            self._redirections.remove(line)
            self._problem(error)

    # Tasks

    @work
    async def _start_task(self, instruction: str) -> None:
        await self.add_entry(LogEntry("task", instruction))
        model = self.session.model
        try:
            task = await self._tasks.create(str(self._workspace), instruction, model=model, check=self._check)
        except KeystrokeError as error:
            self._problem(error)
            return
        self.session.entries.append(SessionEntry(kind="task", text=instruction, task=task.id))
        self._sessions.save(self.session)
        self._running_task = task.id
        try:
            view = TaskPresenter(self)
            async for event in self._tasks.events(task.id):
                await view.show(event)
        except KeystrokeError as error:
            self._problem(error)
        finally:
            self._running_task = None
            await self.show_question(None)
            self.bar.set_fields(state="ready")

    @work
    async def _steer_task(self, line: str) -> None:
        await self._act_on_task("steer", line=line)

    async def _act_on_task(self, action: str, **fields: object) -> None:
        if self._running_task is None:
            return
        try:
            await self._tasks.act(self._running_task, action, **fields)
        except KeystrokeError as error:
            self._problem(error)

    async def show_question(self, question: tasks.TaskQuestion | None) -> None:
        screen = self._line.screen
        await screen.query(QuestionPanel).remove()
        if question is not None:
            await screen.mount(QuestionPanel(question), before=self._line)
            lists = screen.query("#question SelectionList")
            (lists.first() if lists else self._entries).focus()
        else:
            self._line.focus()

    async def on_key(self, event: Key) -> None:
        key = event.key
        panels = self.query(QuestionPanel)
        if not panels or key not in ("y", "n") or isinstance(self.focused, Input):
            return
        panel = panels.first()
        if key == "y":
            await self._act_on_task("approve", question=panel.question.id, hunks=panel.selected_hunks())
        else:
            await self._act_on_task("reject", question=panel.question.id)

    # Keys

    async def action_stop(self) -> None:
        if self._running_task is not None:
            await self._act_on_task("cancel")
        else:
            await self._chat.stop()

    def action_mode(self) -> None:
        self._task_mode = not self._task_mode
        self.bar.set_fields(mode="task" if self._task_mode else "chat")
        self._line.placeholder = "What to do in this folder" if self._task_mode else _CHAT_PLACEHOLDER

    async def action_fresh(self) -> None:
        if self._busy():
            return
        model = self.session.model
        await self._show(self._sessions.create(self._workspace))
        self.session.model = model

    def action_sessions(self) -> None:
        if self._busy():
            return
        known = self._sessions.list(self._workspace)
        lines = [(s.id, f"{s.title}  ({len(s.entries)} entries)") for s in known]
        self.push_screen(ChoiceScreen("Sessions of this folder", lines), self._open_session)

    async def _open_session(self, name: str | None) -> None:
        if name is not None:
            try:
                await self._show(self._sessions.load(name))
            except KeystrokeError as error:
                self._problem(error)

    def action_rewind(self) -> None:
        if self._busy():
            return
        entries = self.session.entries
        lines = [
            (str(n), f"before: {' '.join(entries[n].text.split())[:90]}")
            for n in self.session.rewind_points()
        ]
        self.push_screen(ChoiceScreen("Rewind conversation and files to", lines), self._rewind_to)

    def _rewind_to(self, name: str | None) -> None:
        if name is not None:
            self._rewind(int(name))

    @work
    async def _rewind(self, point: int) -> None:
        first, refused = await rewind(self.session, point, self._tasks)
        self._sessions.save(self.session)
        await self._show(self.session)
        if refused is not None:
            self._problem(refused)
        elif first is not None:
            self._line.value = first.text

    def _busy(self) -> bool:
        busy = self._running_task is not None or self._chat.answering
        if busy:
            self._note("press Escape to stop the running answer or task first")
        return busy

    # The log

    async def _show(self, session: TuiSession) -> None:
        """Display a session."""
        self.session = session
        self._chat.reset()
        self.bar.set_fields(model=session.model)
        await self._entries.remove_children()
        for entry in session.entries:
            await self.add_entry(LogEntry(entry.kind, entry.text))
        self._line.focus()

    async def add_entry(self, widget: Widget) -> None:
        await self._entries.mount(widget)
        self.scroll_to_end()

    def scroll_to_end(self) -> None:
        self._entries.scroll_end(animate=False)

    def _note(self, text: str) -> None:
        self._entries.mount(LogEntry("note", text))
        self.scroll_to_end()

    def _problem(self, error: Exception) -> None:
        self._entries.mount(LogEntry("problem", str(error)))
        self.scroll_to_end()
