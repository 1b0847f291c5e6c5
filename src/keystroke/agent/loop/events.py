"""What a task tells while it works: each event complete in itself, fit to be sent to an editor.

Msgspec structs with a tag; nothing of a model's or a command's text in them is ever interpreted.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import msgspec

from keystroke.agent.chat import Receipt


class Status(StrEnum):
    DONE = "done"  # the change was made (or there was nothing to land but an answer)
    PROPOSED = "proposed"  # the change is there and was not landed: a dry run, or the user said no
    FAILED = "failed"  # no change that holds was found
    INTERRUPTED = "interrupted"


class Began(msgspec.Struct, frozen=True, tag="began"):
    id: str
    instruction: str
    model: str
    sandbox: str


class Doing(msgspec.Struct, frozen=True, tag="doing"):
    """One line: what is about to be done."""

    line: str


class Wrote(msgspec.Struct, frozen=True, tag="wrote"):
    """A piece of a model's text."""

    text: str


class Printed(msgspec.Struct, frozen=True, tag="printed"):
    """A piece of a command's output."""

    text: str


class Noted(msgspec.Struct, frozen=True, tag="noted"):
    """What came of a step, in one line."""

    line: str
    failed: bool = False


class Changed(msgspec.Struct, frozen=True, tag="changed"):
    """The task's whole change so far, as a unified diff."""

    diff: str


class Spent(msgspec.Struct, frozen=True, tag="spent"):
    receipt: Receipt


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    status: Status
    line: str
    diff: str = ""
    entry: str = ""  # of the undo journal
    receipts: tuple[Receipt, ...] = ()  # one a model


Event = Began | Doing | Wrote | Printed | Noted | Changed | Spent | Ended
Sink = Callable[[Event], None]
