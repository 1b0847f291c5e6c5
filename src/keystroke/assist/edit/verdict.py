"""Whether a changed file still holds together, and the small things that can be put right without asking.

Law: pure text in, text or a named failure out; nothing is run. Judged is only what the change did: a file
that was broken before may stay so. What is put right: definitions that fell out of a rewrite come back, and
a name of the standard library that is used for the first time is imported.
"""

from __future__ import annotations

import re

from keystroke.analysis.check import Diagnostic, check
from keystroke.analysis.check.check import is_python
from keystroke.analysis.outline import Kind, Unit, flattened, outline
from keystroke.analysis.syntax import error_count, language_of
from keystroke.assist.edit.operations import Failure, Reason
from keystroke.text import apply_edits
from keystroke.text.compare import compare

_REMOVING = re.compile(
    r"\b(?:remov|delet|drop|renam|replac|merg|mov|inlin|extract|split|convert|refactor|instead|get rid|turn|"
    r"simplif|combin|unif|rid of|no longer|without|eliminat|strip|clean|into|unused|dead|rewrit|restructur)",
    re.IGNORECASE,
)
_NAMES = ("undefined-name", "undefined-local")
_MOST_IMPORTS = 4


def judged(old: str, new: str, path: str, instruction: str) -> str | Failure:
    """The new text, put right where that needs no question; or what is wrong with it, in one sentence."""
    if not _REMOVING.search(instruction):
        restored = _restored(old, new, path)
        if isinstance(restored, Failure):
            return restored
        new = restored
    if (problem := _syntax(old, new, path)) is not None:
        return problem
    return _with_imports(old, new, path) if path.endswith((".py", ".pyi")) else new


# ── syntax ────────────────────────────────────────────────────────────────────────────────────


def _syntax(old: str, new: str, path: str) -> Failure | None:
    if path.endswith((".py", ".pyi")):
        if (error := _compiled(new)) is None or _compiled(old) is not None:
            return None
        line = new.split("\n")[(error.lineno or 1) - 1].strip() if error.lineno else ""
        return Failure(Reason.SYNTAX, path, f"the code does not parse: {error.msg} at the line {line[:80]!r}")
    language = language_of(path)
    if language is None or error_count(new, language) <= error_count(old, language):
        return None
    return Failure(Reason.SYNTAX, path, "the code does not parse; check its brackets and its last lines")


def _compiled(text: str) -> SyntaxError | None:
    try:
        compile(text, "text", "exec", dont_inherit=True)
    except SyntaxError as error:
        return error
    except ValueError:  # null bytes
        return SyntaxError("null bytes")
    return None


# ── definitions that fell out ─────────────────────────────────────────────────────────────────


def _restored(old: str, new: str, path: str) -> str | Failure:
    """The new text with definitions that were merely left out put back."""
    language = language_of(path)
    lost = _lost(old, new, language)
    if not lost:
        return new
    before, after = old.splitlines(keepends=True), new.splitlines(keepends=True)
    for a0, a1, b0, b1 in reversed(compare(before, after)):
        if b0 == b1 and any(a0 <= unit.start + 1 and unit.end <= a1 + 1 for unit in lost):
            after[b0:b0] = before[a0:a1]
    text = "".join(after)
    if still := _lost(old, text, language):
        names = ", ".join(unit.name for unit in still[:3])
        return Failure(Reason.LOST, path, f"the answer leaves out {names}; write every part that was there")
    return text


def _lost(old: str, new: str, language: str | None) -> list[Unit]:
    """Definitions of the old text that the new one does not have, outermost first."""
    if language is None:
        return []
    have = {unit.name for unit in flattened(outline(new, language))}
    result: list[Unit] = []
    for unit in flattened(outline(old, language)):
        if unit.kind not in (Kind.FUNCTION, Kind.CLASS) or not unit.name or unit.name in have:
            continue
        if not any(other.start <= unit.start and unit.end <= other.end for other in result):
            result.append(unit)
    return result


# ── names ─────────────────────────────────────────────────────────────────────────────────────


def _with_imports(old: str, new: str, path: str) -> str | Failure:
    """The new text with imports of what it newly uses; a failure where a name cannot be explained."""
    known = {item.subject for item in _undefined(old, path)}
    for _ in range(_MOST_IMPORTS):
        fresh = [item for item in _undefined(new, path, fixes=True) if item.subject not in known]
        if not fresh:
            return new
        fix = next((f for item in fresh for f in item.fixes if "import " in f.edits[0].text), None)
        if fix is None:
            name = fresh[0].subject
            return Failure(
                Reason.UNDEFINED, path, f"the answer uses {name!r}, which is not defined; define or import it"
            )
        new = apply_edits(new, fix.edits)
    return new


def _undefined(text: str, path: str, *, fixes: bool = False) -> list[Diagnostic]:
    if not is_python(path):
        return []
    return [item for item in check(text, path, fixes=fixes) if item.code in _NAMES]
