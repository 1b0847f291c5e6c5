"""A modal list to choose from, used for sessions and for rewind points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from keystroke.clients.tui.widgets import escape_controls


class ChoiceScreen(ModalScreen[str | None]):
    """Returns the id of the chosen line, or None after Escape."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", "Back")]

    def __init__(self, title: str, lines: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self._title, self._lines = title, lines

    def compose(self) -> ComposeResult:
        with Vertical(id="choice"):
            yield Static(Text(escape_controls(self._title), "bold"), markup=False)
            yield OptionList(*(Option(Text(escape_controls(words)), id=name) for name, words in self._lines))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option_id)

    def action_leave(self) -> None:
        self.dismiss(None)
