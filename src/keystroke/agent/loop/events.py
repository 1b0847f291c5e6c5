"""The events of a task in progress. Each is complete in itself and can be sent to an editor."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import msgspec

from keystroke.agent.chat.receipt import StepReceipt


class EndStatus(StrEnum):
    DONE = "done"  # the change was applied, or there was nothing to change
    PROPOSED = "proposed"  # there is a change that was not applied: a dry run, or not approved
    FAILED = "failed"  # no change that passes was found
    INTERRUPTED = "interrupted"


class StartedEvent(msgspec.Struct, frozen=True, tag="began"):
    id: str
    instruction: str
    model: str
    sandbox: str


class StepEvent(msgspec.Struct, frozen=True, tag="doing"):
    """The step that begins now, in one line."""

    line: str


class TextEvent(msgspec.Struct, frozen=True, tag="wrote"):
    """A piece of a model's text."""

    text: str


class OutputEvent(msgspec.Struct, frozen=True, tag="printed"):
    """A piece of a command's output."""

    text: str


class NoteEvent(msgspec.Struct, frozen=True, tag="noted"):
    """The result of a step, in one line."""

    line: str
    failed: bool = False


class DiffEvent(msgspec.Struct, frozen=True, tag="changed"):
    """The task's whole change so far, as a unified diff."""

    diff: str


class CostEvent(msgspec.Struct, frozen=True, tag="spent"):
    receipt: StepReceipt


class EndedEvent(msgspec.Struct, frozen=True, tag="ended"):
    status: EndStatus
    line: str
    diff: str = ""
    entry: str = ""  # of the undo journal
    receipts: tuple[StepReceipt, ...] = ()  # one per model
    overhead_s: float = 0.0  # seconds in which neither a model computed nor a command ran


Event = StartedEvent | StepEvent | TextEvent | OutputEvent | NoteEvent | DiffEvent | CostEvent | EndedEvent
EventHandler = Callable[[Event], None]
