"""Path fixes: a foreign name is made absolute and normalised, so that it cannot leave its folder.

Normalising "/" + name removes every `..`; a name below the folder stays unchanged. Only names that follow a
folder are changed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from keystroke.analysis.audit.fixes.site import (
    LOOSE,
    ChangedValue,
    FixEdits,
    FixSite,
    named_children,
    require,
    required_value,
    span,
    without_parentheses,
)
from keystroke.analysis.audit.fixes.sql import is_text
from keystroke.analysis.audit.fixes.text_parts import TextHole, compose
from keystroke.analysis.audit.flow.values import CONSTANT
from keystroke.analysis.audit.rules.catalog import FixSpec
from keystroke.analysis.audit.source import ir
from keystroke.text import Edit

_JOINS = {
    "python": re.compile(r"^(?:os\.path|posixpath|path)\.join$|^join$"),
    "javascript": re.compile(r"^path\.(?:posix\.)?(?:join|resolve)$"),
    "go": re.compile(r"^(?:filepath|path)\.Join$"),
    "java": re.compile(r"^(?:\w+\.)*(?:Paths\.get|Path\.of)$"),
}


def anchor_names(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Anchors every foreign name in the path."""
    edits: list[Edit] = []
    needs: list[str] = []
    joined = _join_arguments(site, site.match.node) is not None
    for node in [site.match.node] if joined else _paths(site):
        if not joined and not _open(site, node):
            continue
        for name, known in _names(site, _definition_of(site, node)) or ():
            step = required_value(_anchor(site, name, known))
            site.changed.append(ChangedValue(name))
            edits += step[0]
            needs += step[1]
    return FixEdits(tuple(dict.fromkeys(edits)), tuple(dict.fromkeys(needs))) if edits else None


def _definition_of(site: FixSite, node: ir.Syntax) -> ir.Syntax:
    """The expression that defines a path."""
    java = site.family == "java" and node.kind() == "method_invocation" and node.field("object") is not None
    if java and node.text().endswith((".toPath()", ".getPath()", ".getAbsolutePath()", ".toFile()")):
        node = node.field("object")
    if node.kind() == "identifier":
        return site.definition(node, many=True) or node
    return node


def _paths(site: FixSite) -> list[ir.Syntax]:
    """The paths passed to a call, and the one it is called on."""
    out = site.arguments()
    call = site.call
    if call is not None and isinstance(call.func, ir.AttrExpr) and site.family in ("python", "java"):
        base = call.func.base.node
        if base.kind() in ("call", "binary_operator", "parenthesized_expression", "identifier"):
            out = [base, *out]
    return out


def _names(site: FixSite, node: ir.Syntax) -> list[tuple[ir.Syntax, bool]] | None:
    """The foreign names after a folder in a path, and whether each is text; None for other forms."""
    node = without_parentheses(node)
    kind = node.kind()
    joined = _join_arguments(site, node)
    if joined is not None:
        if len(joined) < 2 or _open(site, joined[0]):
            return None
        if any(child.kind() in ("list_splat", "spread_element") for child in joined):
            return None
        return [(child, site.family == "go") for child in joined[1:] if _open(site, child)]
    if kind == "binary_operator" and node.field("operator").text() == "/":
        left, right = node.field("left"), node.field("right")
        if left is None or right is None or _open(site, left) or not _open(site, right):
            return None
        return [(right, False)]
    text = compose(node, site.language, site.text)
    if text is None or text.template:
        return None
    out: list[tuple[ir.Syntax, bool]] = []
    skeleton = text.skeleton
    for at, hole in enumerate(text.atoms):
        if not isinstance(hole, TextHole) or not _open(site, hole.node):
            continue
        before = skeleton[:at]
        if not (before.endswith("/") or _separator(text.atoms[at - 1 : at], site)) or len(before) < 2:
            return None
        if hole.format:
            return None
        out.append((hole.node, hole.text or site.family == "go"))
    return out


def _separator(before: Sequence[object], site: FixSite) -> bool:
    """Whether the part before a name is the path separator."""
    hole = before[0] if before else None
    return (
        isinstance(hole, TextHole)
        and re.fullmatch(r"(?:java\.io\.)?File\.separator|os\.sep|path\.sep", hole.node.text()) is not None
    )


def _join_arguments(site: FixSite, node: ir.Syntax) -> list[ir.Syntax] | None:
    """The arguments of a call that joins paths."""
    kind = node.kind()
    arguments = node.field("arguments") if kind in _CALLS else None
    if arguments is None:
        return None
    given = named_children(arguments)
    if kind == "object_creation_expression":
        name = node.field("type")
        return (
            given
            if name is not None and name.text().rsplit(".", 1)[-1] == "File" and len(given) == 2
            else None
        )
    func = node.field("function")
    called = func.text() if func is not None else ""
    if kind == "method_invocation":
        owner, name = node.field("object"), node.field("name")
        called = f"{owner.text() if owner is not None else ''}.{name.text() if name is not None else ''}"
        if name is not None and name.text() == "resolve" and owner is not None:
            return [owner, *given]
    return given if _JOINS[site.family].match(called) else None


_CALLS = ("call", "call_expression", "method_invocation", "object_creation_expression")


def _open(site: FixSite, node: ir.Syntax) -> bool:
    if "zip-slip" in site.match.rule.id:  # names of archive entries
        return _ENTRY.search(node.text()) is not None
    return site.is_open(node, "path")


_ENTRY = re.compile(r"(?i)entry|header|getName\(\)|\.name\b|filename")


def _is_module(site: FixSite, node: ir.Syntax, name: str) -> bool:
    """Whether a name stands for the module of that name where the fix is written."""
    value = site.match.evaluate(ir.NameExpr(node, name))
    return value.path == name and value.level == CONSTANT


def _anchor(site: FixSite, node: ir.Syntax, known: bool) -> tuple[list[Edit], list[str]] | None:
    source = site.source(node)
    require("\n" not in source)
    needs: list[str] = []
    known = known or is_text(site, node)
    if site.family == "python":
        require(not re.search(r"\bos\s*=(?!=)", site.text))
        needs.append("import os")
        # A path that joins "/" can neither name another host nor climb above it, also on Windows.
        before, after = 'os.path.relpath(os.path.join("/", ', '), "/")'
        if not known:
            before, after = f"{before}str(", f"){after}"
        parent = node.parent()
        if parent is not None and parent.kind() == "interpolation":
            quote = site.text[span(parent.parent())[0] :].lstrip("fFrR")[:1]
            if quote == '"':
                before, after = before.replace('"', "'"), after.replace('"', "'")
    elif site.family == "javascript":
        require("path" in site.imports and _is_module(site, node, "path"))
        before, after = '"." + path.join("/", ', ")"
        parent = node.parent()
        if parent is not None and parent.kind() != "arguments":
            before, after = f"{before}String(", f"){after}"
            if parent.kind() != "template_substitution":
                before = before.removeprefix('"." + ')
    elif site.family == "go":
        needs.append("path/filepath")
        before, after = 'filepath.Join("/", ', ")"
    else:
        before, after = 'java.nio.file.Paths.get("/" + ', ").normalize().toString().substring(1)"
    if node.kind() in LOOSE:
        before, after = f"{before}(", f"){after}"
    start, end = span(node)
    return [Edit(start, start, before), Edit(end, end, after)], needs
