"""A task that is nothing but a renaming: done by the program, in every file of the project.

Shy. The whole instruction must be the renaming, and the name must be defined in one place; Python is
renamed by its meaning, other languages only where `assist/edit/renaming` is certain. Else a model is asked.
"""

from __future__ import annotations

import re

from keystroke.agent.loop.place import text_of
from keystroke.agent.workspace import Overlay
from keystroke.analysis.outline import flattened, outline
from keystroke.analysis.syntax import language_of
from keystroke.assist.edit.renaming import read_renaming, renamed
from keystroke.errors import KeystrokeError
from keystroke.text import Document, apply_edits


def project_renamed(overlay: Overlay, instruction: str) -> dict[str, str] | None:
    """The files that the renaming changes; None where the instruction is none, or not one for certain."""
    asked = read_renaming(instruction)
    if asked is None:
        return None
    word = re.compile(rf"\b{asked.old}\b")
    names = [name for name in overlay.files() if language_of(name) is not None]
    texts = {name: text for name in names if word.search(text := text_of(overlay, name))}
    places = [
        (name, unit)
        for name, text in texts.items()
        for unit in flattened(outline(text, language_of(name)))
        if unit.short == asked.old and f".{unit.name}".endswith(f".{asked.qualified}")
    ]
    if len(places) != 1:
        return None
    (home, unit), text = places[0], texts[places[0][0]]
    if language_of(home) != "python":
        return renamed(texts, instruction)
    head = text.find(unit.header, Document(text).line_span(unit.start)[0])
    found = word.search(text, head)
    if head < 0 or found is None:
        return None
    return _by_meaning(overlay, home, found.start(), asked.new)


def _by_meaning(overlay: Overlay, path: str, offset: int, new: str) -> dict[str, str] | None:
    from keystroke.analysis.refactor import Refactoring  # not loaded for tasks that are none

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
