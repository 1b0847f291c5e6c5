"""Does a task that is nothing but a rename, in every file of the project, without a model.

Conservative: the whole instruction must be the rename. A name with several definitions that do not belong
together is asked about. Python is renamed semantically, other languages only where `assist/edit/renaming` is
certain.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from keystroke.agent.loop.locate import read_text
from keystroke.agent.workspace import Overlay
from keystroke.analysis.outline import OutlineUnit
from keystroke.analysis.syntax import language_of
from keystroke.assist.edit.renaming import (
    RenameInstruction,
    apply_renaming,
    describe_definitions,
    find_definitions,
    parse_renaming,
)
from keystroke.errors import InputError, KeystrokeError
from keystroke.text import Document, apply_edits


def rename_in_project(overlay: Overlay, instruction: str, files: Sequence[str] = ()) -> dict[str, str] | None:
    """The files that the rename changes; None where the instruction is not certainly a rename. `files`: where
    the definition is. InputError where several definitions have the name."""
    rename = parse_renaming(instruction)
    if rename is None:
        return None
    word = re.compile(rf"\b{rename.old}\b")
    names = [name for name in overlay.files() if language_of(name) is not None]
    texts = {name: text for name in names if word.search(text := read_text(overlay, name))}
    places = [place for place in find_definitions(texts, rename) if not files or place[0] in files]
    if not places:
        return None
    (home, unit), text = places[0], texts[places[0][0]]
    if language_of(home) != "python":
        if len(places) > 1:
            raise _ambiguous(rename, places)
        return apply_renaming(texts, instruction)
    head = text.find(unit.header, Document(text).line_span(unit.start)[0])
    found = word.search(text, head)
    if head < 0 or found is None:
        return None
    changed = _rename_semantically(overlay, home, found.start(), rename.new)
    # A property with its setter, or a method with its overrides, are several definitions of one thing.
    if changed is not None and len(places) > 1 and find_definitions({**texts, **changed}, rename):
        raise _ambiguous(rename, places)
    return changed


def _ambiguous(rename: RenameInstruction, places: Sequence[tuple[str, OutlineUnit]]) -> InputError:
    return InputError(
        f"{describe_definitions(rename, places)}; say which one with --file FILE or as "
        "CLASS.NAME, or use `keystroke refactor rename FILE:LINE:COLUMN NAME`"
    )


def _rename_semantically(overlay: Overlay, path: str, offset: int, new: str) -> dict[str, str] | None:
    from keystroke.analysis.refactor import Refactoring  # here: other tasks need not load it

    changed = {name: text for name, text in overlay.texts.items() if text is not None}
    work = Refactoring(overlay.workspace.root, changed)
    try:
        plan = work.rename(path, offset, new)
        if plan.moves:
            return None
        return {name: apply_edits(work.text(name), edits) for name, edits in plan.edits.items()}
    except KeystrokeError:
        return None
    finally:
        work.close()
