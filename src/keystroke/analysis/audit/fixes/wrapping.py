"""Escaping fixes: passes each foreign part of a text through a function.

Constant parts are not escaped. In markup a value is escaped only where escaping is enough: between tags, or
in a quoted attribute that holds no URL and no script.
"""

from __future__ import annotations

import re

from keystroke.analysis.audit.fixes.site import (
    LOOSE,
    ChangedValue,
    FixEdits,
    FixSite,
    named_children,
    span,
)
from keystroke.analysis.audit.fixes.sql import is_text
from keystroke.analysis.audit.fixes.text_parts import TextComposition, TextHole, compose, compose_format
from keystroke.analysis.audit.flow.values import CONSTANT, REMOTE
from keystroke.analysis.audit.rules.catalog import FixSpec
from keystroke.analysis.audit.source import ir
from keystroke.text import Edit

_OPEN = re.compile(
    r"<\s*(script|style|textarea|title|iframe|object|embed|noscript)\b[^>]*>(?:(?!</\s*\1).)*$", re.I | re.S
)
_ATTRIBUTE = re.compile(r"<[a-zA-Z][^<>]*?\s([\w:-]+)\s*=\s*([\"'])(?:(?!\2)[^<>])*$", re.S)
_RISKY = re.compile(r"(?i)^(?:on\w+|href|src|srcset|action|formaction|style|data|background|xlink:href)$")


def in_markup(before: str) -> bool:
    """Whether an escaped value is safe after this markup."""
    if _OPEN.search(before):
        return False
    if before.rfind("<") > before.rfind(">"):
        attribute = _ATTRIBUTE.search(before)
        return attribute is not None and not _RISKY.match(attribute[1])
    return True


def _fits(context: str, before: str) -> bool:
    """Whether an escaped value is safe after this text."""
    if context == "html":
        return in_markup(before)
    return context != "ldap" or re.search(r"\([\w;.-]+\s*[~<>]?=\s*\*?$", before) is not None


def wrap_values(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Wraps every foreign part of the matched expressions."""
    edits: list[Edit] = []
    if site.method in _PRINTS:
        edits = _wrap_format(site, spec) or []
    else:
        for node in _subjects(site, spec):
            if site.is_open(node):
                edits += _wrap(site, spec, node) or []  # if a part stays unsafe, the auditor drops the fix
    return FixEdits(tuple(dict.fromkeys(edits))) if edits else None


_PRINTS = {"Fprintf": 1, "Printf": 0, "Infof": 0, "Errorf": 0, "printf": 0, "format": 0}


def _wrap_format(site: FixSite, spec: FixSpec) -> list[Edit] | None:
    """Wraps the values of a format."""
    given = site.arguments()
    at = _PRINTS[site.method]
    if len(given) <= at + 1:
        return _wrap(site, spec, given[at]) if len(given) == at + 1 else None
    text = compose_format(site.match.node, given[at], given[at + 1 :], site.language, site.text)
    return _wrap_parts(site, spec, text) if text is not None else None


def wrap_assigned_value(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """The same for an assigned value."""
    return wrap_values(site, spec) if site.call is None else None


def _subjects(site: FixSite, spec: FixSpec) -> list[ir.Syntax]:
    """The expressions that reach the sink: arguments, or the assigned or returned value."""
    if site.call is not None:
        given = site.arguments()
        if spec.places:
            return [given[at] for at in spec.places if at < len(given)]
        return given
    node = site.match.node
    for name in () if node.kind() in _SUMS else ("right", "value"):
        found = node.field(name)
        if found is not None:
            return [found]
    if node.kind() in ("assignment", "assignment_expression", "expression_statement"):
        return []
    return [node]


_SUMS = ("binary_operator", "binary_expression", "boolean_operator", "logical_expression")


def _wrap(site: FixSite, spec: FixSpec, node: ir.Syntax) -> list[Edit] | None:
    if site.family == "go" and re.match(r"\[\]byte\(", node.text()):
        node = _operand(node)
    text = compose(node, site.language, site.text)
    if text is None and node.kind() == "identifier" and site.value(node).built:
        defined = site.definition(node)
        text = compose(defined, site.language, site.text) if defined is not None else None
        if text is None:
            return None
    if text is None:
        if site.value(node).built or node.kind() in _PUT_TOGETHER or spec.context == "ldap":
            return None
        if spec.context == "joined" and not is_text(site, node):
            return None  # composed elsewhere; its constant parts must not be escaped
        if spec.context == "html" and not _read_directly(site, node):
            return None  # a page, a node or what a template rendered
        site.changed.append(ChangedValue(node))
        return _around(site, spec, node, TextHole(node, *span(node), "operand"), "")
    return _wrap_parts(site, spec, text)


def _read_directly(site: FixSite, node: ir.Syntax) -> bool:
    """Whether a value is what its source gave, and not what a function made of it."""
    value = site.value(node)
    return value.level >= REMOTE and bool(value.origin) and value.path.startswith(value.origin)


def _operand(node: ir.Syntax) -> ir.Syntax:
    """Go: the operand of `[]byte(...)`."""
    held = node.field("operand")
    listed = node.field("arguments")
    if held is None and listed is not None:
        inner = named_children(listed)
        held = inner[0] if len(inner) == 1 else None
    return held if held is not None else node


def _wrap_parts(site: FixSite, spec: FixSpec, text: TextComposition) -> list[Edit] | None:
    edits: list[Edit] = []
    skeleton = text.skeleton
    for at, hole in enumerate(text.atoms):
        if not isinstance(hole, TextHole) or not site.is_open(hole.node):
            continue
        if site.value(hole.node).level == CONSTANT:
            continue
        if not _fits(spec.context, skeleton[:at]):
            return None
        if hole.format or site.value(hole.node).built:
            return None
        step = _around(site, spec, hole.node, hole, _quote_of(text, hole))
        if step is None:
            return None
        site.changed.append(ChangedValue(hole.node, skeleton[:at], skeleton[at + 1 :]))
        edits += step
    return edits or None


_PUT_TOGETHER = frozenset(
    {"list", "tuple", "dictionary", "object", "array", "conditional_expression", "ternary_expression"}
    | {"boolean_operator", "array_creation_expression", "composite_literal"}
)


def _quote_of(text: TextComposition, hole: TextHole) -> str:
    """The quote of the literal that contains a hole."""
    if hole.form != "inside":
        return ""
    return next((operand.quote for operand in text.operands if hole in operand.atoms), "")


def _around(site: FixSite, spec: FixSpec, node: ir.Syntax, hole: TextHole, quote: str) -> list[Edit] | None:
    known = hole.text or is_text(site, node)
    template = spec.wrap_text if known and spec.wrap_text else spec.wrap
    if not template:
        return None  # only text can be escaped
    source = site.source(node)
    if "\n" in source or _whole_request(source):
        return None
    before, _, after = template.partition("{}")
    if quote and site.family == "python":
        # Before Python 3.12 the quotes of an f-string cannot be used inside it, nor can a backslash.
        if "\\" in template:
            return None
        if '"' in template and quote[0] == '"':
            before, after = before.replace('"', "'"), after.replace('"', "'")
    start, end = span(node)
    if node.kind() in LOOSE and not before.endswith("("):
        before, after = f"{before}(", f"){after}"
    return [Edit(start, start, before), Edit(end, end, after)]


def _whole_request(source: str) -> bool:
    """Whether an expression is a client's whole body or query, which may be an object."""
    return (
        re.fullmatch(r"(?:\w+\.)*(?:body|query|params|headers|cookies|json|args|form|data|payload)", source)
        is not None
    )
