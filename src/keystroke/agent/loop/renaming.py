"""Does a task that is nothing but a rename, in every file of the project, without a model.

Conservative: the whole instruction must be the rename, and the name must have one definition. Python is
renamed semantically, other languages only where `assist/edit/renaming` is certain.
"""

from __future__ import annotations

import re

from keystroke.agent.loop.locate import read_text
from keystroke.agent.workspace import Overlay
from keystroke.analysis.outline import outline, walk_units
from keystroke.analysis.syntax import language_of
from keystroke.assist.edit.renaming import apply_renaming, parse_renaming
from keystroke.errors import KeystrokeError
from keystroke.text import Document, apply_edits


def rename_in_project(overlay: Overlay, instruction: str) -> dict[str, str] | None:
    """The files that the rename changes; None where the instruction is not certainly a rename."""
    rename = parse_renaming(instruction)
    if rename is None:
        return None
    word = re.compile(rf"\b{rename.old}\b")
    names = [name for name in overlay.files() if language_of(name) is not None]
    texts = {name: text for name in names if word.search(text := read_text(overlay, name))}
    places = [
        (name, unit)
        for name, text in texts.items()
        for unit in walk_units(outline(text, language_of(name)))
        if unit.short == rename.old and f".{unit.name}".endswith(f".{rename.qualified}")
    ]
    if len(places) != 1:
        return None
    (home, unit), text = places[0], texts[places[0][0]]
    if language_of(home) != "python":
        return apply_renaming(texts, instruction)
    head = text.find(unit.header, Document(text).line_span(unit.start)[0])
    found = word.search(text, head)
    if head < 0 or found is None:
        return None
    return _rename_semantically(overlay, home, found.start(), rename.new)


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
