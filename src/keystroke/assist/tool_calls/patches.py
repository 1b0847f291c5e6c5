"""Patches as functions for small models, and the patch text that a call becomes.

The patch is in the format of Codex's `apply_patch`. Small models get its markers wrong but do well when asked
for old and new lines, or for the whole of a short file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keystroke.text.compare import common_ends

BEGIN, END = "*** Begin Patch", "*** End Patch"
_ADD, _DELETE, _UPDATE = "*** Add File: ", "*** Delete File: ", "*** Update File: "

# Name, description, and parameters in order.
EDITS: dict[str, tuple[str, dict[str, str]]] = {
    "replace_lines": (
        "Edits a file: replaces lines that you have read.",
        {
            "path": "File to edit.",
            "old": "Lines to be replaced, exactly as they are.",
            "new": "Lines to put in their place.",
        },
    ),
    "write_file": (
        "Writes a file, a new one or a short one anew.",
        {"path": "File to write.", "content": "The whole text of the file, with all that stays as it is."},
    ),
    "delete_file": ("Deletes a file.", {"path": "File to delete."}),
}


def patch_from_call(name: str, arguments: Any) -> str | None:
    """The patch of a call; None where the arguments are not those of the function."""
    _, parameters = EDITS[name]
    if not isinstance(arguments, dict) or not all(isinstance(arguments.get(key), str) for key in parameters):
        return None
    path = arguments["path"].strip()
    if not path or "\n" in path:
        return None
    if name == "delete_file":
        return _patch(f"{_DELETE}{path}")
    if name == "write_file":
        return _patch(f"{_ADD}{path}", *(f"+{line}" for line in _split_lines(arguments["content"]) or [""]))
    old, new = _split_lines(arguments["old"]), _split_lines(arguments["new"])
    head, tail = common_ends(old, new)  # they become context
    return _patch(
        f"{_UPDATE}{path}",
        "@@",
        *(f" {line}" for line in old[:head]),
        *(f"-{line}" for line in old[head : len(old) - tail]),
        *(f"+{line}" for line in new[head : len(new) - tail]),
        *(f" {line}" for line in old[len(old) - tail :]),
    )


def join_patches(patches: Sequence[str]) -> str:
    """Several patches as one, in order."""
    return _patch(*(line for patch in patches for line in patch.strip("\n").split("\n")[1:-1]))


def calls_from_patch(patch: str) -> list[tuple[str, dict[str, str]]] | None:
    """The calls that a patch corresponds to, so that a model sees its own; None for another format."""
    lines = patch.strip("\n").split("\n")
    if lines[:1] != [BEGIN] or lines[-1:] != [END]:
        return None
    calls: list[tuple[str, dict[str, str]]] = []
    for header, body in _split_sections(lines[1:-1]):
        if header.startswith(_DELETE):
            calls.append(("delete_file", {"path": header[len(_DELETE) :]}))
        elif header.startswith(_ADD):
            content = "".join(line[1:] + "\n" for line in body)
            calls.append(("write_file", {"path": header[len(_ADD) :], "content": content}))
        elif header.startswith(_UPDATE):
            for hunk in _split_hunks(body):
                old = "".join(line[1:] + "\n" for line in hunk if line[:1] in ("-", " "))
                new = "".join(line[1:] + "\n" for line in hunk if line[:1] in ("+", " "))
                calls.append(("replace_lines", {"path": header[len(_UPDATE) :], "old": old, "new": new}))
        else:
            return None
    return calls or None


def _patch(*lines: str) -> str:
    return "\n".join([BEGIN, *lines, END]) + "\n"


def _split_lines(text: str) -> list[str]:
    return text.removesuffix("\n").split("\n") if text else []


def _split_sections(lines: list[str]) -> list[tuple[str, list[str]]]:
    found: list[tuple[str, list[str]]] = []
    for line in lines:
        if line.startswith("*** ") and not line.startswith(("*** End of File", "*** Move to: ")):
            found.append((line, []))
        elif found:
            found[-1][1].append(line)
    return found


def _split_hunks(lines: list[str]) -> list[list[str]]:
    found: list[list[str]] = []
    for line in lines:
        if line.startswith("@@") or not found:
            found.append([])
        if not line.startswith(("@@", "*** ")):
            found[-1].append(line)
    return [hunk for hunk in found if hunk]
