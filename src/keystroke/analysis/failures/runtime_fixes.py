"""Candidate fixes for runtime errors: attributes, keys, arguments, mixed types.

Proposes similar names from the file and the project for the failing line, likeliest first. The caller checks
the candidates.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

from keystroke.analysis.check.candidates import candidate_fixes
from keystroke.analysis.check.diagnostic import Diagnostic, Fix, Level
from keystroke.analysis.check.knowledge import FOREIGN_METHODS
from keystroke.analysis.check.modules import Project
from keystroke.analysis.check.scope import ClassTable, PythonSource, closest_names, own_members
from keystroke.analysis.failures.failure import Failure
from keystroke.analysis.project_files import python_files
from keystroke.analysis.syntax import parse_quietly
from keystroke.text import Document, Edit

_CLASS_FILES = 200


def runtime_fixes(
    failure: Failure, line: int, source: PythonSource, project: Project, path: Path
) -> Iterator[Fix]:
    kind, message = failure.kind, failure.message
    if kind == "AttributeError":
        yield from _fix_attribute(failure, line, source, project, path)
    elif kind == "KeyError":
        yield from _fix_key(message, line, source)
    elif kind == "TypeError":
        yield from _fix_arguments(message, line, source, project)
        yield from _fix_mixed_types(message, line, source)
    elif kind in ("NameError", "ImportError", "ModuleNotFoundError"):
        yield from _fix_name(failure, line, source, project, path)


def _is_on_line(line: int, node: ast.expr | ast.keyword) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _fix_name(
    failure: Failure, line: int, source: PythonSource, project: Project, path: Path
) -> Iterator[Fix]:
    """Names and modules for which the check reports nothing."""
    codes = {"NameError": "undefined-name", "ModuleNotFoundError": "unresolved-import"}
    if (wanted := re.search(r"'([\w.]+)'(?: from '([\w.]+)')?", failure.message)) is None:
        return
    first, last = source.document.line_span(min(line, source.document.line_count) - 1)
    place = re.search(rf"(?<![\w.]){re.escape(wanted[1])}\b", source.text[first:last])
    if place is None:
        return
    start, end = first + place.start(), first + place.end()
    code = codes.get(failure.kind, "unknown-import-name")
    if failure.hint:
        yield Fix(f"Change to `{failure.hint}`", (Edit(start, end, failure.hint),))
    stand_in = Diagnostic(code, Level.ERROR, failure.message, start, end, wanted[1], wanted[2] or "")
    yield from candidate_fixes(source, stand_in, project, path)


def _fix_attribute(
    failure: Failure, line: int, source: PythonSource, project: Project, path: Path
) -> Iterator[Fix]:
    wanted = re.search(r"has no attribute '(\w+)'", failure.message)
    owner = re.search(r"^(?:type object |module |partially initialized module )?'([\w.]+)'", failure.message)
    if wanted is None:
        return
    name = wanted[1]
    places = [
        source.span(node)[1]
        for node in source.nodes(ast.Attribute)
        if node.attr == name and (node.end_lineno or node.lineno) >= line >= node.lineno
    ]
    names: list[str] = [failure.hint] if failure.hint else []
    if owner is not None:
        kind = owner[1]
        if (foreign := FOREIGN_METHODS.get(kind, {}).get(name)) is not None:
            names.append(foreign)
        if failure.message.startswith("module"):
            names += closest_names(name, project.names(kind, path) or ())
        elif isinstance(builtin := getattr(builtins, kind, None), type):
            names += closest_names(name, dir(builtin))
        elif (found := _find_class(kind, source, project)) is not None:
            names += closest_names(name, own_members(found))
    for at in places:
        for item in dict.fromkeys(names):
            if source.text[at - len(name) : at] == name and item.isidentifier():
                yield Fix(f"Change to `{item}`", (Edit(at - len(name), at, item),))


def _find_class(name: str, source: PythonSource, project: Project) -> ast.ClassDef | None:
    """The class of that name, in this file or in the project."""
    for place in chain((source,), _project_sources(project, f"class {name}")):
        if (found := ClassTable(place).known.get(name)) is not None:
            return found
    return None


def _project_sources(project: Project, word: str) -> Iterator[PythonSource]:
    if project.root is None:
        return
    for path in islice(python_files(project.root), _CLASS_FILES):
        try:
            text = (project.root / path).read_bytes().decode("utf-8-sig")
            if word in text:
                yield PythonSource(text, parse_quietly(text), Document(text))
        except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
            continue


def _fix_key(message: str, line: int, source: PythonSource) -> Iterator[Fix]:
    try:
        key = ast.literal_eval(message.strip())
    except (ValueError, SyntaxError, MemoryError):
        return
    if not isinstance(key, str):
        return
    known = {
        node.value for d in source.nodes(ast.Dict) for node in d.keys
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }  # fmt: skip
    known |= {
        node.slice.value for node in source.nodes(ast.Subscript)
        if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str)
        and isinstance(node.ctx, ast.Store)
    }  # fmt: skip
    known |= {word.arg for call in source.nodes(ast.Call) for word in call.keywords
              if word.arg and isinstance(call.func, ast.Name) and call.func.id == "dict"}  # fmt: skip
    for node in source.nodes(ast.Subscript):
        wanted = node.slice
        if not (_is_on_line(line, node) and isinstance(wanted, ast.Constant) and wanted.value == key):
            continue
        start, end = source.span(wanted)
        quote = source.text[start : start + 1]
        for item in closest_names(key, known):
            if quote and quote in "\"'" and item.isprintable() and quote not in item and "\\" not in item:
                yield Fix(
                    f"Change the key to {quote}{item}{quote}", (Edit(start, end, f"{quote}{item}{quote}"),)
                )
        if isinstance(node.ctx, ast.Load):
            opened, last = source.span(node.value)[1], source.span(node)[1]
            inner = source.text[start:end]
            if source.text[opened : opened + 1] == "[":
                yield Fix(
                    "Use `.get`, which gives None where the key is not there",
                    (Edit(opened, last, f".get({inner})"),),
                )


def _fix_arguments(message: str, line: int, source: PythonSource, project: Project) -> Iterator[Fix]:
    if wrong := re.search(r"([\w.]+)\(\) got an unexpected keyword argument '(\w+)'", message):
        parameters = _parameters_of(wrong[1], source, project)
        hint = re.search(r"Did you mean '(\w+)'", message)
        for call in source.nodes(ast.Call):
            for word in call.keywords:
                if word.arg != wrong[2] or not _is_on_line(line, call):
                    continue
                start = source.span(word)[0]
                given = {other.arg for other in call.keywords}
                pool = [item for item in parameters if item not in given]
                for item in dict.fromkeys(
                    [*([hint[1]] if hint else []), *closest_names(wrong[2], pool, least=0.5)]
                ):
                    yield Fix(f"Change to `{item}=`", (Edit(start, start + len(wrong[2]), item),))
    elif lacking := re.search(r"(\w+)\.(\w+)\(\) missing 1 required positional argument: 'self'", message):
        for call in source.nodes(ast.Call):
            function = call.func
            if (
                _is_on_line(line, call)
                and isinstance(function, ast.Attribute)
                and isinstance(function.value, ast.Name)
                and (function.value.id, function.attr) == (lacking[1], lacking[2])
            ):
                end = source.span(function.value)[1]
                yield Fix(f"Call it on an object: `{lacking[1]}().{lacking[2]}`", (Edit(end, end, "()"),))


def _parameters_of(function: str, source: PythonSource, project: Project) -> list[str]:
    """The parameters of a function by its qualified name, here or in the project."""
    owner, _, name = function.rpartition(".")
    for place in (source, *_project_sources(project, f"def {name}")):
        for kind in (ast.FunctionDef, ast.AsyncFunctionDef):
            for node in place.nodes(kind):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
                    named = [*node.args.args, *node.args.kwonlyargs]
                    return [item.arg for item in named if item.arg not in ("self", "cls")]
        fields = ClassTable(place).known.get(owner.rpartition(".")[2] if name == "__init__" else name)
        if fields is not None:  # a dataclass has its fields as parameters
            return [
                n.target.id
                for n in fields.body
                if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
            ]
    return []


def _fix_mixed_types(message: str, line: int, source: PythonSource) -> Iterator[Fix]:
    """`str` and another type added."""
    if not re.search(
        r"can only concatenate str|unsupported operand type\(s\) for \+: '\w+' and 'str'", message
    ):
        return
    for node in source.nodes(ast.BinOp):
        if not _is_on_line(line, node) or not isinstance(node.op, ast.Add):
            continue
        left, right = _is_text(node.left), _is_text(node.right)
        if left == right:
            continue
        other = node.right if left else node.left
        if isinstance(other, (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant)):
            start, end = source.span(other)
            yield Fix("Turn it into text with `str()`", (Edit(start, start, "str("), Edit(end, end, ")")))


def _is_text(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _is_text(node.left) or _is_text(node.right)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "str"
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
