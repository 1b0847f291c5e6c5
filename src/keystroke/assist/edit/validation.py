"""Checks that a changed file still holds together, and repairs what needs no question.

Only what the change did is judged: a file that was broken before may stay so. Missing definitions are
restored and names of the standard library are imported. Nothing is run.
"""

from __future__ import annotations

import re

from keystroke.analysis.check import Diagnostic, check
from keystroke.analysis.check.check import is_python
from keystroke.analysis.syntax import error_count, language_of
from keystroke.assist.edit.definitions import find_duplicate, find_lost, restore_lost
from keystroke.assist.edit.mentions import read_mentions
from keystroke.assist.edit.operations import EditFailure
from keystroke.assist.edit.operations import EditFailureReason as Reason
from keystroke.assist.edit.rewrite import LONG_TASK
from keystroke.text import apply_edits
from keystroke.text.compare import compare

_REMOVING = re.compile(
    r"\b(?:remov|delet|drop|renam|replac|merg|mov|inlin|extract|split|convert|refactor|instead|get rid|turn|"
    r"simplif|combin|unif|rid of|no longer|without|eliminat|strip|clean|into|unused|dead|rewrit|restructur)",
    re.IGNORECASE,
)
_NAMES = ("undefined-name", "undefined-local")
_MOST_IMPORTS = 4
_ADDED = re.compile(r"\b(?:add|define|introduce|create|declare)\b([^.;,]*)", re.IGNORECASE)
# How names are defined in the supported languages: declared, assigned, imported, a parameter, a field, a
# method; or the name only occurs in a string.
_DEFINING = (
    r"\b(?:def|class|func|function|fn|struct|enum|interface|type|const|let|var|val|static|import|as|from|use|new)"
    r"\s+(?:\([^)\n]*\)\s*)?\*?NAME\b"
    r"|(?:^|[^=!<>\w])NAME\s*(?::[^=\n]+)?:?=(?!=)|\bNAME\??\s*:(?!:)|[(,*&]\s*NAME\s*[,:=)]"
    r"|\bNAME\s*\([^)\n]*\)\s*(?:\{|->|:|throws)|\w[\s*&]+NAME\s*(?:\(|;|\[)|^\s*NAME\s*(?:,|\(|$)|['\"`]NAME\b|@\w*NAME\b"
)
# A line that declares a variable: `let x`, `x := 1`, `size_t x = 1;`.
_DECLARED = re.compile(
    r"\s*(?:(?:export\s+)?(?:let|const|var|val|auto)\s+(?:mut\s+)?(\w+)\b|(\w+)\s*:=|"
    r"(?!return\b|else\b|throw\b|delete\b|new\b|goto\b|case\b|import\b|package\b|use\b)"
    r"(?:[A-Za-z_][\w:.<>,\[\]]*[\s*&]+)+(\w+)\s*(?:=(?!=)|;))"
)
# Anything that may declare it again: an assignment, a pattern, a typed parameter. False positives are
# accepted.
_STILL = (
    r"\bNAME\s*(?:,[\w\s,]*)?:?=(?!=)|\b(?:let|const|var|val|auto|for|catch)\b[^=;\n]*\bNAME\b|\bNAME\??\s*:"
    r"|(?<!return)(?<!throw)(?<!else)[\w>\]*&]\s+[*&]*NAME\s*[,);=\[]|[(,]\s*NAME\s+[\w*\[.]"
    r"|\|[^|\n]*\bNAME\b[^|\n]*\||\([^()\n]*\bNAME\b[^()\n]*\)\s*(?:=>|\{)"
)


def validate_change(old: str, new: str, path: str, instruction: str) -> str | EditFailure:
    """The new text with simple repairs, or what is wrong with it."""
    if not _REMOVING.search(instruction):
        complete = _complete(old, new, path)
        if isinstance(complete, EditFailure):
            return complete
        new = complete
    if (problem := _syntax(old, new, path)) is not None:
        return problem
    if (name := find_duplicate(old, new, language_of(path))) is not None:
        return EditFailure(
            Reason.DOUBLED, path, f"the answer defines {name} twice; change the one that is there"
        )
    if (name := _undeclared(old, new, path)) is not None:
        return EditFailure(Reason.LOST, path, f"the answer still uses {name!r} and no longer declares it")
    if (name := _only_used(old, new, path, instruction)) is not None:
        return EditFailure(Reason.UNDEFINED, path, f"the answer uses {name!r} and does not define it")
    return _with_imports(old, new, path) if path.endswith((".py", ".pyi")) else new


# ── syntax ──


def _syntax(old: str, new: str, path: str) -> EditFailure | None:
    if path.endswith((".py", ".pyi")):
        if (error := _compiled(new)) is None or _compiled(old) is not None:
            return None
        line = new.split("\n")[(error.lineno or 1) - 1].strip() if error.lineno else ""
        return EditFailure(
            Reason.SYNTAX, path, f"the code does not parse: {error.msg} at the line {line[:80]!r}"
        )
    language = language_of(path)
    if language is None or error_count(new, language) <= error_count(old, language):
        return None
    return EditFailure(Reason.SYNTAX, path, "the code does not parse; check its brackets and its last lines")


def _compiled(text: str) -> SyntaxError | None:
    try:
        compile(text, "text", "exec", dont_inherit=True)
    except SyntaxError as error:
        return error
    except ValueError:  # null bytes
        return SyntaxError("null bytes")
    except (MemoryError, RecursionError):  # raised for extremely nested texts
        return SyntaxError("too long or too deeply nested")
    return None


# ── definitions ──


def _complete(old: str, new: str, path: str) -> str | EditFailure:
    """The new text with definitions that were merely left out put back."""
    language = language_of(path)
    new = restore_lost(old, new, language)
    if still := find_lost(old, new, language):
        names = ", ".join(unit.name for unit in still[:3])
        return EditFailure(
            Reason.LOST, path, f"the answer leaves out {names}; write every part that was there"
        )
    return new


# ── names ──


def _with_imports(old: str, new: str, path: str) -> str | EditFailure:
    """The new text with imports of what it newly uses; a failure where a name cannot be explained."""
    known = {item.subject for item in _undefined(old, path)}
    for _ in range(_MOST_IMPORTS):
        fresh = [item for item in _undefined(new, path, fixes=True) if item.subject not in known]
        if not fresh:
            return new
        fix = next((f for item in fresh for f in item.fixes if "import " in f.edits[0].text), None)
        if fix is None:
            name = fresh[0].subject
            return EditFailure(
                Reason.UNDEFINED, path, f"the answer uses {name!r}, which is not defined; define or import it"
            )
        new = apply_edits(new, fix.edits)
    return new


def _only_used(old: str, new: str, path: str, instruction: str) -> str | None:
    """A name that the instruction asks to add, and which the new text uses without defining it."""
    if len(instruction) > LONG_TASK:
        return None  # a long description names many things that are not to be defined
    code = {mention.text for mention in read_mentions(instruction) if mention.code}
    for clause in _ADDED.findall(instruction):
        words: list[str] = re.findall(r"[A-Za-z_]\w*", clause)
        fresh = [word for word in words if word in code and not re.search(rf"\b{word}\b", old)]
        name = fresh[0] if fresh else None
        if name is None or not re.search(rf"\b{name}\b", new):
            continue
        if not re.search(_DEFINING.replace("NAME", name), new, re.MULTILINE):
            return name
    return None


def _undeclared(old: str, new: str, path: str) -> str | None:
    """A variable whose declaration was removed while its uses stayed. Python has its own check."""
    if is_python(path) or language_of(path) is None:
        return None
    before = old.split("\n")
    gone = [line for a0, a1, _, _ in compare(before, new.split("\n")) for line in before[a0:a1]]
    for line in gone:
        found = _DECLARED.match(line)
        name = next(filter(None, found.groups()), "") if found is not None else ""
        if name and re.search(rf"\b{name}\b", new) and not re.search(_STILL.replace("NAME", name), new):
            return name
    return None


def _undefined(text: str, path: str, *, fixes: bool = False) -> list[Diagnostic]:
    if not is_python(path):
        return []
    return [item for item in check(text, path, fixes=fixes) if item.code in _NAMES]
