"""The file operations of an answer, and the reasons for which they can fail.

Whether a path may be touched is decided by the workspace, whether a search block fits by matching.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class EditFailureReason(StrEnum):
    """Why an answer could not be turned into edits. Nothing of it is applied."""

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
    UNUSED = "unused"  # the change adds a parameter that nothing uses
    FOREIGN = "foreign_text"  # markup, prompt text or escaped line ends that do not belong into a file
    RULES = "rules"  # the change breaks a rule of the project
    NO_PLACE = "no_place"  # nothing in the files answers to the instruction


@dataclass(frozen=True, slots=True)
class EditFailure:
    """One failed operation: the reason, and a sentence that a model or a person can act on."""

    reason: EditFailureReason
    path: str
    message: str


@dataclass(frozen=True, slots=True)
class SearchReplace:
    """One interpretation of a block: lines (without line ends) and their replacement."""

    search: tuple[str, ...]
    replace: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Replacement:
    """Replace lines of a file. `readings` holds several interpretations where a divider line may be content,
    longest search first; the first that matches is used. `near`: the line (from 0) that a diff names;
    `within`: header lines to find first; `in_order`: hunks follow one another; `final_newline` where the
    format specifies it."""

    path: str
    readings: tuple[SearchReplace, ...]
    near: int | None = None
    within: tuple[str, ...] = ()
    in_order: bool = False
    at_end: bool = False
    final_newline: bool | None = None


@dataclass(frozen=True, slots=True)
class Addition:
    """Create a file. `overwrite` replaces an existing one."""

    path: str
    text: str
    overwrite: bool = False


@dataclass(frozen=True, slots=True)
class Removal:
    path: str


@dataclass(frozen=True, slots=True)
class Move:
    """Rename a file, after its replacements."""

    path: str
    to: str


Operation = Replacement | Addition | Removal | Move
