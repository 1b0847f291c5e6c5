"""Fixes that a rule describes as a template: another callee, arguments set or dropped, a rewritten call.

There is no fix if a part is missing or an argument would be lost.
"""

from __future__ import annotations

import re

from keystroke.analysis.audit.fixes.site import FixEdits, FixSite, NoFix, require, required_value, span
from keystroke.analysis.audit.rules.catalog import FixSpec
from keystroke.analysis.audit.source import ir
from keystroke.text import Edit

_SLOT = re.compile(r"\{(\d+|base|callee|method|args|rest\d+)\}")


def fill_template(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """The edits of a rule's template."""
    subject = site.match.subject
    if isinstance(subject, ir.CallExpr):
        edits = _call(site, subject, spec)
    elif isinstance(subject, ir.CollectionExpr) and spec.keyword:
        edits = _set_items(subject, spec.keyword, site.language)
    elif spec.value:
        edits = _right_side(site, spec.value)
    elif spec.replace:
        start, end = site.match.start, site.match.end
        edits = (Edit(start, end, spec.replace.replace("{text}", site.text[start:end])),)
    else:
        edits = None
    return FixEdits(edits) if edits else None


def _right_side(site: FixSite, value: str) -> tuple[Edit, ...] | None:
    match = site.match
    node = match.subject.node if match.subject is not None else None
    while node is not None:
        right = node.field("right") or node.field("value")
        if right is not None:
            start, end = span(right)
            if start >= match.start:
                return (Edit(start, end, value.replace("{value}", site.text[start:end])),)
        node = node.parent()
        require(node is None or span(node)[0] >= match.start)
    return None


def _call(site: FixSite, call: ir.CallExpr, spec: FixSpec) -> tuple[Edit, ...] | None:
    start, end = span(call.node)
    if spec.replace:
        if "{args}" not in spec.replace and "{rest" not in spec.replace:
            used = {int(found) for found in re.findall(r"\{(\d+)\}", spec.replace)}
            lost = {str(at) for at in range(len(call.args)) if at not in used} | call.kwargs.keys()
            require(not lost - set(spec.drop))  # an argument would be lost
        return (Edit(start, end, _fill(spec.replace, call, site.text)),)
    edits: list[Edit] = []
    if spec.callee:
        edits.append(Edit(*callee_span(call), _fill(spec.callee, call, site.text)))
    for name, value in spec.keyword.items():
        edits.append(_set_keyword(call, name, value, site.language, site.text))
    edits += [_drop(call, name, site.text) for name in spec.drop if name in call.kwargs]
    return tuple(edits) or None


def callee_span(call: ir.CallExpr) -> tuple[int, int]:
    start, end = span(call.func.node)
    if (start, end) == span(call.node):  # Java: the callee has no node of its own
        name = call.node.field("name")
        if name is not None:
            return start, span(name)[1]
    return start, end


def _source(node: ir.Syntax, text: str) -> str:
    start, end = span(node)
    return text[start:end]


def _fill(template: str, call: ir.CallExpr, text: str) -> str:
    def slot(found: re.Match[str]) -> str:
        name = found[1]
        if name.isdigit():
            require(int(name) < len(call.args))
            return _source(call.args[int(name)].node, text)
        if name.startswith("rest"):
            return "".join(", " + _source(arg.node, text) for arg in call.args[int(name[4:]) :])
        if name == "args":
            listed = call.node.field("arguments")
            return _source(listed, text)[1:-1] if listed is not None else ""
        if name == "base" and isinstance(call.func, ir.AttrExpr):
            return _source(call.func.base.node, text)
        if name == "method":
            return ir.last_name(call.func)
        if name == "callee":
            start, end = callee_span(call)
            return text[start:end]
        raise NoFix

    return _SLOT.sub(slot, template)


def _set_keyword(call: ir.CallExpr, name: str, value: str, language: str, text: str) -> Edit:
    if name.isdigit():
        require(int(name) < len(call.args))
        start, end = span(call.args[int(name)].node)
        return Edit(start, end, value)
    if name in call.kwargs:
        start, end = span(call.kwargs[name].node)
        return Edit(start, end, value)
    require("**" not in call.kwargs)  # it may be passed there
    for arg in call.args:
        if isinstance(arg, ir.CollectionExpr) and arg.keys is not None:
            return _set_items(arg, {name: value}, language)[0]
    require(language == "python")
    _, end = span(call.node)
    inner = text[:end].rstrip()
    require(inner.endswith(")"))
    close = len(inner) - 1
    before = text[:close].rstrip()
    require("#" not in before.rsplit("\n", 1)[-1])  # it would be after a comment
    glue = "" if before.endswith("(") else " " if before.endswith(",") else ", "
    return Edit(len(before), close, f"{glue}{name}={value}")


def _set_items(coll: ir.CollectionExpr, wanted: dict[str, str], language: str) -> tuple[Edit, ...]:
    """Sets fields of an object literal; appends missing ones."""
    keys = required_value(coll.keys)
    require(keys and len(keys) == len(coll.items))
    if language == "python":
        wanted = {f'"{name}"': value for name, value in wanted.items()}
    places = {
        key.value: item for key, item in zip(keys, coll.items, strict=True) if isinstance(key, ir.ConstExpr)
    }
    edits = [
        Edit(*span(places[name.strip(chr(34))].node), value)
        for name, value in wanted.items()
        if name.strip('"') in places
    ]
    missing = "".join(f", {name}: {value}" for name, value in wanted.items() if name.strip('"') not in places)
    if missing:
        end = span(coll.items[-1].node)[1]
        edits.append(Edit(end, end, missing))
    return tuple(sorted(edits, key=lambda edit: edit.start))


def _drop(call: ir.CallExpr, name: str, text: str) -> Edit:
    node = call.kwargs[name].node.parent()
    start, end = span(node)
    before = text[:start].rstrip()
    if before.endswith(","):
        return Edit(len(before) - 1, end, "")
    after = re.compile(r"\s*,\s*").match(text, end)
    return Edit(start, after.end() if after else end, "")
