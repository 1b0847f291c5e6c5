"""The checks that every change of a user's file passes, whoever wrote it: no file is worse than before.

Only the change is judged: a file that was broken before may stay broken. Unambiguous faults are repaired:
missing definitions, missing imports of the standard library, foreign text on lines of its own. Nothing is
run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from keystroke.analysis.check import Diagnostic, check
from keystroke.analysis.check.check import is_python
from keystroke.analysis.check.javascript_names import LANGUAGES as JAVASCRIPT
from keystroke.analysis.check.javascript_names import javascript_names
from keystroke.analysis.syntax import language_of
from keystroke.assist.edit.definitions import find_duplicate, find_lost, find_stray_method, restore_lost
from keystroke.assist.edit.drift import restore_remarks
from keystroke.assist.edit.foreign_text import (
    compile_error,
    find_foreign_text,
    remove_foreign_text,
    syntax_error_count,
)
from keystroke.assist.edit.mentions import read_mentions
from keystroke.assist.edit.operations import EditFailure
from keystroke.assist.edit.operations import EditFailureReason as Reason
from keystroke.assist.edit.parameters import find_unused_parameter, has_name
from keystroke.assist.edit.rewrite import LONG_TASK
from keystroke.text import apply_edits
from keystroke.text.compare import compare

_REMOVING = re.compile(
    r"\b(?:remov|delet|drop|renam|replac|merg|mov|inlin|extract|split|convert|refactor|instead|get rid|turn|"
    r"simplif|combin|unif|rid of|no longer|without|eliminat|strip|clean|into|unused|dead|rewrit|restructur)",
    re.IGNORECASE,
)
_NAMES = ("undefined-name", "undefined-local")
_MODULE = re.compile(r"^\s*(?:import|export)\b|\brequire\(|\bmodule\.exports\b", re.MULTILINE)
_MOST_IMPORTS = 4
_SHORT = 8  # lines; a shorter file may be replaced completely
_LEAST_LEFT = 0.25  # of the lines of a file that a change leaves as they are
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


def validate_change(
    old: str, new: str, path: str, instruction: str, *, complete: bool = True
) -> str | EditFailure:
    """The new text with simple repairs, or the fault. `old` is empty for a new file. `complete` False: the
    change may be one of several that belong together, so only faults count that no later change can
    correct."""
    language = language_of(path)
    if new == old:
        return new
    new = remove_foreign_text(old, new, path, language, instruction)
    if (foreign := find_foreign_text(old, new, path, language, instruction)) is not None:
        return EditFailure(Reason.FOREIGN, path, f"the answer is not only the file: {foreign}")
    if (problem := _find_loss(old, new, path, instruction)) is not None:
        return problem
    removing = _REMOVING.search(instruction) is not None
    if complete and not removing:
        new = restore_lost(old, new, language)
        if still := find_lost(old, new, language):
            names = ", ".join(unit.name for unit in still[:3])
            return EditFailure(
                Reason.LOST, path, f"the answer leaves out {names}; write every part that was there"
            )
    problem = syntax_failure(old, new, path) or _find_duplicate_definition(old, new, path)
    if problem is not None or not complete:
        return problem or new
    if not removing:
        new = restore_remarks(old, new, path, instruction)
    if (fault := next(_faulty_names(old, new, path, instruction), None)) is not None:
        return EditFailure(fault[0], path, fault[1])
    return _add_imports(old, new, path) if path.endswith((".py", ".pyi")) else new


# ── the whole file ──


def _find_loss(old: str, new: str, path: str, instruction: str) -> EditFailure | None:
    """The failure of a change that empties a file, or removes most of its lines, without being asked to."""
    before = [line.strip() for line in old.split("\n") if line.strip()]
    after = {line.strip() for line in new.split("\n") if line.strip()}
    if before and not after:
        return EditFailure(Reason.LOST, path, "the answer empties the file; write all of it")
    if len(before) < _SHORT or _REMOVING.search(instruction) or len(instruction) > LONG_TASK:
        return None
    left = sum(line in after for line in before)
    if left < _LEAST_LEFT * len(before) and len(after) < len(before) / 2:
        return EditFailure(
            Reason.LOST, path, f"the answer has only {left} of the {len(before)} lines; write all of it"
        )
    return None


# ── syntax ──


def syntax_failure(old: str, new: str, path: str) -> EditFailure | None:
    """Why a text that replaces one that parses does not."""
    if path.endswith((".py", ".pyi")):
        if (error := compile_error(new)) is None or compile_error(old) is not None:
            return None
        line = new.split("\n")[(error.lineno or 1) - 1].strip() if error.lineno else ""
        return EditFailure(
            Reason.SYNTAX, path, f"the code does not parse: {error.msg} at the line {line[:80]!r}"
        )
    language = language_of(path)
    if syntax_error_count(new, language, path) <= syntax_error_count(old, language, path):
        return None
    return EditFailure(Reason.SYNTAX, path, "the code does not parse; check its brackets and its last lines")


def _find_duplicate_definition(old: str, new: str, path: str) -> EditFailure | None:
    language = language_of(path)
    name = find_duplicate(old, new, language)
    if name is None and language in JAVASCRIPT:
        before = javascript_names(old, language).twice
        after = javascript_names(new, language).twice
        name = next((name for name, count in after.items() if count > before.get(name, 1)), None)
    if name is None:
        return None
    return EditFailure(Reason.DOUBLED, path, f"the answer defines {name} twice; change the one that is there")


# ── names ──


def _faulty_names(old: str, new: str, path: str, instruction: str) -> Iterator[tuple[Reason, str]]:
    """Names that are used or defined where they should not be, each fault with its reason."""
    language = language_of(path)
    if (name := _find_undeclared(old, new, path)) is not None:
        yield Reason.LOST, f"the answer still uses {name!r} and no longer declares it"
    if (name := _find_used_addition(old, new, path, instruction)) is not None:
        yield Reason.UNDEFINED, f"the answer uses {name!r} and does not define it"
    if (name := _find_free_name(old, new, path, instruction)) is not None:
        yield Reason.UNDEFINED, f"the answer uses {name!r}, which is not defined there; define or import it"
    if (name := find_stray_method(old, new, language)) is not None:
        yield Reason.UNDEFINED, f"the answer has the method {name} outside of its class; put it inside"
    if (unused := find_unused_parameter(old, new, language, instruction)) is not None:
        function, parameter = unused
        yield Reason.UNUSED, f"the answer gives {function} the parameter {parameter} and never uses it"


def _add_imports(old: str, new: str, path: str) -> str | EditFailure:
    """The new text with imports of what it newly uses; a failure where a name cannot be explained."""
    known = {item.subject for item in _undefined_names(old, path)}
    for _ in range(_MOST_IMPORTS):
        fresh = [item for item in _undefined_names(new, path, fixes=True) if item.subject not in known]
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


def _find_used_addition(old: str, new: str, path: str, instruction: str) -> str | None:
    """A name that the instruction asks to add, and which the new text uses without defining it."""
    if len(instruction) > LONG_TASK or language_of(path) is None:
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


def _find_undeclared(old: str, new: str, path: str) -> str | None:
    """A variable whose declaration was removed while its uses stayed. Python has its own check."""
    if is_python(path) or language_of(path) is None:
        return None
    before = old.split("\n")
    removed = [line for a0, a1, _, _ in compare(before, new.split("\n")) for line in before[a0:a1]]
    for line in removed:
        found = _DECLARED.match(line)
        name = next(filter(None, found.groups()), "") if found is not None else ""
        if name and re.search(rf"\b{name}\b", new) and not re.search(_STILL.replace("NAME", name), new):
            return name
    return None


def _find_free_name(old: str, new: str, path: str, instruction: str) -> str | None:
    """A name of JavaScript or TypeScript that the change uses where it is not visible. In a script without
    modules a name of the instruction may come from another script."""
    language = language_of(path)
    if language not in JAVASCRIPT or not old.strip():
        return None
    fresh = javascript_names(new, language).free - javascript_names(old, language).free
    if not _MODULE.search(new):
        fresh = {name for name in fresh if not has_name(name, instruction)}
    return min(fresh, default=None)


def _undefined_names(text: str, path: str, *, fixes: bool = False) -> list[Diagnostic]:
    if not is_python(path):
        return []
    return [item for item in check(text, path, fixes=fixes) if item.code in _NAMES]
