"""A change requested of a model for texts in memory, the questions it takes, and the resulting proposal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from keystroke.assist.edit.blocks import Message
from keystroke.assist.edit.operations import EditFailure
from keystroke.assist.edit.rewrite import FenceDetector, Region
from keystroke.errors import InputError
from keystroke.text import Edit, minimal_diff
from keystroke.text.repetition import LoopDetector

_ROOM = 6_000  # characters an answer may have beyond three times the text it rewrites


@dataclass(frozen=True, slots=True)
class EditProposal:
    """New texts by path (None: remove the file), or failures. `answer` is the model's last answer."""

    files: Mapping[str, str]
    answer: str
    texts: Mapping[str, str | None] = field(default_factory=dict)
    moves: Mapping[str, str] = field(default_factory=dict)
    failures: tuple[EditFailure, ...] = ()
    answers: tuple[str, ...] = ()
    agreement: tuple[int, int] | None = None  # how many of how many usable candidates are this change

    def edits(self, path: str) -> tuple[Edit, ...]:
        """The smallest edits of one of the files."""
        after = self.texts.get(path, self.files.get(path, ""))
        return minimal_diff(self.files.get(path, ""), after or "")


@dataclass(frozen=True, slots=True)
class EditTask:
    """Texts by path and an instruction. With a `region` only those lines may change. Raises InputError for an
    empty instruction, no files, or a region of another file."""

    files: Mapping[str, str]
    instruction: str
    region: Region | None = None
    rules: str = ""
    near: tuple[str, int] | None = None  # the file and line (from 0) of the cursor

    def __post_init__(self) -> None:
        if not self.instruction.strip():
            raise InputError("the instruction is empty; say what to change")
        if not self.files:
            raise InputError("no file was given; name at least one")
        if self.region is not None and self.region.path not in self.files:
            raise InputError(f"the region's file {self.region.path} is not among the files given")


@dataclass(frozen=True, slots=True)
class RewriteQuestion:
    """`prediction`: text that the answer mostly repeats; `inside`: the text it rewrites, None where it is no
    rewrite; `most`: the longest useful answer in characters. With a `temperature` the answer is sampled.
    `also`: questions that follow; the caller may answer all of them at once."""

    messages: Sequence[Message]
    prediction: str = ""
    inside: str | None = None
    most: int | None = None
    temperature: float = 0.0
    seed: int = 0
    also: tuple[RewriteQuestion, ...] = ()

    def end_detector(self) -> Callable[[str], bool]:
        """A function that takes each streamed piece and returns True once nothing useful can follow."""
        if self.inside is None:
            return _length_detector(self.most)
        fence, is_long = FenceDetector(self.inside), _length_detector(3 * len(self.inside) + _ROOM)
        if _repeats(self.inside):  # a correct answer repeats, too
            return lambda piece: fence.feed(piece) | is_long(piece)
        loop = LoopDetector()
        return lambda piece: fence.feed(piece) | is_long(piece) | loop.feed(piece)


def _repeats(text: str) -> bool:
    """Whether the text itself repeats, as the loop detector sees it."""
    watch = LoopDetector()
    return any(watch.feed(text[at : at + 80]) for at in range(0, len(text), 80))


def _length_detector(most: int | None) -> Callable[[str], bool]:
    length = 0

    def is_long(piece: str) -> bool:
        nonlocal length
        length += len(piece)
        return most is not None and length > most

    return is_long
