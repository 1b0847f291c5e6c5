"""What an answer asks for, file by file, and the names of everything that can keep it from being done.

Values only. An operation names a path as the answer wrote it; whether that path may be touched is
decided by the workspace, and whether a search block fits is decided by matching.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """Why an answer could not be turned into edits. Nothing of it is applied then."""

    NO_HUNKS = "no_hunks"  # the answer holds no edit in a known format
    TRUNCATED = "truncated"  # a block begins and never ends
    NO_PATH = "no_path"  # a block does not say which file it is for
    UNKNOWN_FILE = "unknown_file"  # the file does not exist or was not part of the request
    FILE_EXISTS = "file_exists"  # a file to be added is already there
    EMPTY_SEARCH = "empty_search"  # nothing to look for in a file that is not empty
    NOT_FOUND = "not_found"  # the search text is not in the file
    AMBIGUOUS = "ambiguous"  # it is there more than once
    INDENTATION = "indentation"  # found, but its indentation cannot be mapped onto the file's
    ELIDED = "elided"  # the new text leaves code out with a remark such as "rest unchanged"
    UNCHANGED = "unchanged"  # the answer changes nothing
    SYNTAX = "syntax"  # the changed file no longer parses
    LOST = "lost"  # a definition is gone that nobody asked to remove
    DOUBLED = "doubled"  # a definition is there twice
    UNDEFINED = "undefined"  # the change uses a name that is not there
    NO_PLACE = "no_place"  # nothing in the files answers to the instruction


@dataclass(frozen=True, slots=True)
class Failure:
    """One operation that could not be done: why, and one sentence that a model or a person can act on."""

    reason: Reason
    path: str
    message: str


@dataclass(frozen=True, slots=True)
class Split:
    """One reading of a block: these lines (without line ends) become those."""

    search: tuple[str, ...]
    replace: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Replacement:
    """Replace some lines of a file. `readings` holds more than one split where a divider line is itself
    content, longest search first; the first that fits is meant. `near` is the line (from 0) a diff claims;
    `within` are header lines to be found first; `in_order` hunks come one below the other; `final_newline` is
    False or True where the format says so."""

    path: str
    readings: tuple[Split, ...]
    near: int | None = None
    within: tuple[str, ...] = ()
    in_order: bool = False
    at_end: bool = False
    final_newline: bool | None = None


@dataclass(frozen=True, slots=True)
class Addition:
    """Make a new file. `overwrite` replaces one that exists."""

    path: str
    text: str
    overwrite: bool = False


@dataclass(frozen=True, slots=True)
class Removal:
    path: str


@dataclass(frozen=True, slots=True)
class Move:
    """Give a file another name. Comes after the replacements of the same file."""

    path: str
    to: str


Operation = Replacement | Addition | Removal | Move
