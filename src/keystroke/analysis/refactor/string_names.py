"""Renames names inside strings: entries of `__all__`, forward references and dotted paths.

A string is renamed only if its meaning is certain: an entry of `__all__` in a module that defines or
re-exports the name, a quoted annotation that would otherwise be undefined, and a path that names the module
and then the name (`"package.module.name"`, as tests replace it).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from pathlib import PurePosixPath

from keystroke.analysis.check.check import check
from keystroke.analysis.check.diagnostic import Diagnostic
from keystroke.analysis.check.scope import PythonSource, bound_names, find_words, parse_source
from keystroke.analysis.refactor.import_roots import dotted_module
from keystroke.text import Edit, apply_edits

_ROUNDS = 3
_PATH = re.compile(r"[A-Za-z_]\w*(?:[.:][A-Za-z_]\w*)+")
_REPLACING = ("patch", "setattr", "delattr")  # calls whose first argument is the path of what is replaced


def rename_in_strings(
    texts: MutableMapping[str, str],
    old: str,
    new: str,
    home: str | None,
    paths: Iterable[str],
    before: Callable[[str], str],
) -> None:
    """Rename `old` to `new` in strings. `texts` holds the texts after the rename and gets those of more
    files; `before` gives a file's earlier text; `home` is the file that defines the name."""
    plain = {path: before(path).replace("\r\n", "\n") for path in dict.fromkeys((*texts, *paths))}
    for path in list(texts):
        texts[path] = _rename_annotations(texts[path], plain[path], old, new)
    homes = {home} if home is not None else set()
    found = homes
    while found:  # re-exports of re-exports
        found = {
            path
            for path, was in plain.items()
            if path not in homes and _reexports(texts.get(path, was), was, path, homes, old)
        }
        homes = homes | found
    for path in homes & plain.keys():
        text = texts.get(path, plain[path])
        if (exported := _rename_exports(text, old, new)) != text:
            texts[path] = exported
    modules = {dotted_module(path) for path in homes}
    for path in plain:
        text = texts.get(path, plain[path])
        if (named := _by_path(text, old, new, modules)) != text:
            texts[path] = named


def _rename_annotations(text: str, plain: str, old: str, new: str) -> str:
    """Rename quoted annotations that still use the old name."""
    if any(item.subject == old for item in _undefined_names(plain)):
        return text  # it was not defined there before either
    now, then = parse_source(text), parse_source(plain)
    if now is not None and then is not None and old in bound_names(then.tree) - bound_names(now.tree):
        text = apply_edits(text, list(_annotation_edits(now, old, new)))
    for _ in range(_ROUNDS):
        edits = {Edit(item.start, item.end, new) for item in _undefined_names(text) if item.subject == old}
        if not edits:
            break
        text = apply_edits(text, sorted(edits, key=lambda edit: edit.start))
    return text


def _annotation_edits(source: PythonSource, old: str, new: str) -> Iterator[Edit]:
    hints: list[ast.expr | None] = [node.annotation for node in source.nodes(ast.arg)]
    hints += [node.annotation for node in source.nodes(ast.AnnAssign)]
    hints += [node.returns for node in source.nodes(ast.FunctionDef)]
    hints += [node.returns for node in source.nodes(ast.AsyncFunctionDef)]
    for hint in hints:
        for node in ast.walk(hint) if hint is not None else ():
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                start, end = source.span(node)
                places = find_words(source.text[start:end], old)
                yield from (Edit(start + at, start + at + len(old), new) for at in places)


def _undefined_names(text: str) -> list[Diagnostic]:
    return [item for item in check(text, fixes=False) if item.code == "undefined-name"]


def _reexports(text: str, plain: str, path: str, homes: set[str], old: str) -> bool:
    """Whether a module re-exports the renamed name: by an import of it, or by a star import."""
    now, then = parse_source(text), parse_source(plain)
    if now is None or then is None:
        return False
    if old in bound_names(then.tree) and old not in bound_names(now.tree):
        return True
    stars = [node for node in then.nodes(ast.ImportFrom) if node.names[0].name == "*"]
    return any(_is_home(node, path, home) for node in stars for home in homes)


def _is_home(node: ast.ImportFrom, path: str, home: str) -> bool:
    wanted = [*PurePosixPath(home).with_suffix("").parts]
    if wanted[-1] == "__init__":
        wanted.pop()
    parts = (node.module or "").split(".") if node.module else []
    if node.level:
        base = list(PurePosixPath(path).parent.parts)
        base = base[: len(base) - (node.level - 1)] if node.level > 1 else base
        return [*base, *parts] == wanted
    return wanted[-len(parts) :] == parts if parts else False


def _rename_exports(text: str, old: str, new: str) -> str:
    source = parse_source(text)
    if source is None:
        return text
    edits = []
    for node in _export_entries(source):
        if node.value == old:
            start, end = source.span(node)
            edits += [
                Edit(start + at, start + at + len(old), new) for at in find_words(text[start:end], old)
            ][:1]
    return apply_edits(text, edits)


def _by_path(text: str, old: str, new: str, modules: set[str]) -> str:
    """Rename strings that are the dotted path of the name. The path of a module without a package is too
    short to be certain, except where something is replaced by it."""
    source = parse_source(text) if old in text else None
    if source is None:
        return text
    replaced = {
        argument
        for call in source.nodes(ast.Call)
        if isinstance(call.func, (ast.Attribute, ast.Name))
        and (call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id) in _REPLACING
        for argument in call.args[:1]
    }
    edits = []
    for node in source.nodes(ast.Constant):
        if not isinstance(node.value, str) or not _PATH.fullmatch(node.value):
            continue
        parts = re.split("[.:]", node.value)
        for at, part in enumerate(parts):
            module = ".".join(parts[:at])
            if part != old or at < (1 if node in replaced else 2):
                continue
            if any(f".{known}".endswith(f".{module}") for known in modules):
                start, end = source.span(node)
                place = source.text.find(node.value, start, end) + len(module) + 1
                if source.text[place : place + len(old)] == old:  # not so in a string with escapes
                    edits.append(Edit(place, place + len(old), new))
    return apply_edits(text, sorted(edits, key=lambda edit: edit.start))


def _export_entries(source: PythonSource) -> Iterator[ast.Constant]:
    for node in source.tree.body:
        target: ast.expr | None = None
        if isinstance(node, ast.Assign):
            target = node.targets[0]
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            target = node.target
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            function = node.value.func
            target = function.value if isinstance(function, ast.Attribute) else None
        if isinstance(target, ast.Name) and target.id == "__all__":
            yield from (
                inner
                for inner in ast.walk(node)
                if isinstance(inner, ast.Constant) and isinstance(inner.value, str)
            )
