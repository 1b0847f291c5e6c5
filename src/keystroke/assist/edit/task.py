"""A change asked of a model, for texts in memory: what to send and how to read the answer.

Law: no disk. Model output is data here: it is parsed, matched and compared, never run. An answer becomes a
complete proposal or named failures, nothing between.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field

from keystroke.assist.edit.blocks import Message, block_messages, fenced, retry_messages
from keystroke.assist.edit.operations import Addition, Failure, Operation, Reason
from keystroke.assist.edit.resolve import Resolution, parse_answer, resolve
from keystroke.assist.edit.rewrite import FenceWatch, Region, parse_rewrite, rewrite_messages
from keystroke.assist.edit.writer import Writer
from keystroke.errors import InputError
from keystroke.text import Edit, minimal_diff

MAX_ANSWER = 4 << 20  # characters; a model that writes more has lost its way


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a model proposes for some texts: new ones by path (None: remove it), or why there are none."""

    files: Mapping[str, str]
    answer: str
    texts: Mapping[str, str | None] = field(default_factory=dict)
    moves: Mapping[str, str] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()

    def edits(self, path: str) -> tuple[Edit, ...]:
        """The smallest edits of one of the files."""
        after = self.texts.get(path, self.files.get(path, ""))
        return minimal_diff(self.files.get(path, ""), after or "")


@dataclass(frozen=True, slots=True)
class EditTask:
    """A change asked of a model, for texts that are in memory: what to send it and how to read its answer.

    With a `region` the model rewrites those lines; without, it writes search/replace blocks.
    """

    files: Mapping[str, str]
    instruction: str
    region: Region | None = None
    rules: str = ""

    def __post_init__(self) -> None:
        if not self.instruction.strip():
            raise InputError("the instruction is empty; say what to change")
        if not self.files:
            raise InputError("no file was given; name at least one")
        if self.region is not None and self.region.path not in self.files:
            raise InputError(f"the region's file {self.region.path} is not among the files given")

    def messages(self) -> list[Message]:
        if self.region is None:
            return block_messages(self.files, self.instruction, self.rules)
        return rewrite_messages(self.region, self.files[self.region.path], self.instruction, self.rules)

    def prediction(self) -> str:
        """Text that the answer will mostly repeat: the draft for speculative decoding."""
        if self.region is None:
            return "\n".join(self.files.values())
        return fenced(self.region.parts(self.files[self.region.path])[1])

    def watch(self) -> Callable[[str], bool]:
        """Called with each piece of a streamed answer: True once nothing of use can follow."""
        if self.region is None:
            return lambda piece: False
        return FenceWatch(self.region.parts(self.files[self.region.path])[1]).ended

    def read(self, answer: str, exists: Callable[[str], bool] = lambda path: False) -> Proposal:
        """The proposal an answer makes. `exists` says which paths beyond `files` are taken."""
        found = self._resolved(answer, exists)
        return Proposal(self.files, answer, found.texts, found.moves, found.failures)

    def _resolved(self, answer: str, exists: Callable[[str], bool]) -> Resolution:
        if (region := self.region) is not None:
            text = parse_rewrite(answer, region, self.files[region.path])
            if isinstance(text, Failure):
                return Resolution(failures=(text,))
            if text == self.files[region.path]:
                return Resolution(
                    failures=(Failure(Reason.UNCHANGED, region.path, "the answer changes nothing"),)
                )
            return Resolution({region.path: text})
        operations = parse_answer(answer, tuple(self.files))
        if isinstance(operations, Failure):
            return Resolution(failures=(operations,))
        operations = [self._meant(operation, exists) for operation in operations]
        for operation in operations:
            if operation.path not in self.files and exists(operation.path):
                unseen = Failure(Reason.UNKNOWN_FILE, operation.path, "this file is not part of the task")
                return Resolution(failures=(unseen,))
        return resolve(operations, self.files.get)

    def _meant(self, operation: Operation, exists: Callable[[str], bool]) -> Operation:
        """Models shorten paths: `app.py` means `src/app.py` where that is the only file it can mean."""
        path = operation.path
        if isinstance(operation, Addition) or path in self.files or exists(path):
            return operation
        longer = [name for name in self.files if name.endswith(f"/{path}")]
        return dataclasses.replace(operation, path=longer[0]) if len(longer) == 1 else operation


def propose_edit(
    task: EditTask,
    writer: Writer,
    *,
    retries: int = 1,
    on_text: Callable[[str], None] | None = None,
    exists: Callable[[str], bool] = lambda path: False,
) -> Proposal:
    """Let a model do a task. An answer that does not fit goes back to it `retries` times, with reasons."""
    messages = task.messages()
    prediction = task.prediction()
    for attempt in range(retries + 1):
        answer = _answered(writer.write(messages, prediction), task.watch(), on_text)
        proposal = task.read(answer, exists)
        if not proposal.failures or attempt == retries:
            break
        messages = [*messages, *retry_messages(answer, proposal.failures)]
    return proposal


def _answered(
    stream: Iterator[str], ended: Callable[[str], bool], on_text: Callable[[str], None] | None
) -> str:
    pieces: list[str] = []
    size = 0
    for piece in stream:
        pieces.append(piece)
        size += len(piece)
        if on_text is not None:
            on_text(piece)
        if size > MAX_ANSWER:
            raise InputError(f"the model wrote more than {MAX_ANSWER:,} characters; ask for a smaller change")
        if ended(piece):
            break
    if isinstance(stream, Generator):
        stream.close()  # gives the model's session or connection back now, not when memory is collected
    return "".join(pieces)
