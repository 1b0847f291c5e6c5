"""The widgets: log entries, a task's diff and question, the status bar, and a list to choose from.

Text of models, files and commands is shown without interpreting markup, and its control characters, which
could move the cursor or set a title, are replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import OptionList, SelectionList, Static
from textual.widgets.option_list import Option
from textual.widgets.selection_list import Selection

from keystroke.protocol.tasks import TaskHunk, TaskQuestion
from keystroke.text.terminal import safe_for_terminal

_NAMES = {"user": "you", "assistant": "keystroke", "task": "task", "problem": "problem", "note": ""}


def diff_text(diff: str) -> Text:
    """A unified diff, coloured by line."""
    coloured = Text()
    for line in safe_for_terminal(diff).splitlines(keepends=True):
        head = line.startswith(("+++", "---", "@@"))
        style = "bold" if head else "green" if line.startswith("+") else "red" if line.startswith("-") else ""
        coloured.append(line, style)
    return coloured


class LogEntry(Static):
    """One entry of the log, to which text can be appended."""

    def __init__(self, kind: str, text: str = "") -> None:
        super().__init__(classes=f"said {kind}", markup=False)
        self.kind, self.body = kind, text
        self._draw()

    def append_text(self, delta: str) -> None:
        self.body += delta
        self._draw()

    def set_text(self, text: str) -> None:
        self.body = text
        self._draw()

    def _draw(self) -> None:
        name = _NAMES.get(self.kind, self.kind)
        heading = Text(f"{name}\n", "bold") if name else Text()
        self.update(heading + Text(safe_for_terminal(self.body), "dim" if self.kind == "note" else ""))


class DiffView(Static):
    """The diff of a task so far."""

    def __init__(self) -> None:
        super().__init__(classes="diff", markup=False)

    def show(self, diff: str) -> None:
        self.display = bool(diff.strip())
        self.update(diff_text(diff))


class QuestionPanel(Vertical):
    """A task's question. Space toggles a hunk, y approves, n rejects."""

    def __init__(self, question: TaskQuestion) -> None:
        super().__init__(id="question")
        self.question = question

    def compose(self) -> ComposeResult:
        question = self.question
        words = f"Run this? {question.command}" if question.kind == "command" else question.text
        yield Static(Text(safe_for_terminal(words), "bold"), markup=False)
        if question.hunks:
            yield SelectionList(*(Selection(_heading(hunk), hunk.number, True) for hunk in question.hunks))
        yield Static(
            "y approve · n reject · Space excludes a hunk" if question.hunks else "y approve · n reject"
        )

    def selected_hunks(self) -> list[int] | None:
        """The numbers of the selected hunks; None if all are."""
        lists = self.query(SelectionList)
        if not lists:
            return None
        chosen: list[int] = sorted(lists.first().selected)
        return None if len(chosen) == len(self.question.hunks) else chosen


def _heading(hunk: TaskHunk) -> Text:
    first = next((line.strip() for line in (hunk.after or hunk.before).splitlines() if line.strip()), "")
    return Text(safe_for_terminal(f"{hunk.path}:{hunk.first}  {first}")[:120])


class StatusBar(Static):
    """Shows the model, its speed, the state, the mode and the folder."""

    def __init__(self) -> None:
        super().__init__(id="status", markup=False)
        self._parts = {"model": "…", "speed": "– tok/s", "state": "ready", "mode": "chat", "folder": ""}
        self._draw()

    def set_fields(self, **parts: str) -> None:
        self._parts.update(parts)
        self._draw()

    @property
    def body(self) -> str:
        p = self._parts
        return f"{p['model']}  {p['speed']}  {p['state']}  [{p['mode']}]  {p['folder']}"

    def _draw(self) -> None:
        self.update(safe_for_terminal(self.body))


class ChoiceScreen(ModalScreen[str | None]):
    """A modal list. Returns the id of the chosen line, or None after Escape."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", "Back")]

    def __init__(self, title: str, lines: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self._title, self._lines = title, lines

    def compose(self) -> ComposeResult:
        with Vertical(id="choice"):
            yield Static(Text(safe_for_terminal(self._title), "bold"), markup=False)
            yield OptionList(
                *(Option(Text(safe_for_terminal(words)), id=name) for name, words in self._lines)
            )

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option_id)

    def action_leave(self) -> None:
        self.dismiss(None)
