"""Renames the other uses of a name that was changed at its definition.

The text before the change is analysed. Only the scope of the definition counts; a nested function with its
own parameter of that name, strings and comments are left alone.
"""

from __future__ import annotations

import keyword
from collections.abc import Iterator

from ast_grep_py import SgNode

from keystroke.analysis.syntax import leaf_at, parse_tree, walk
from keystroke.assist.next_edit.burst import IDENTIFIER, Burst
from keystroke.text import Edit

_NAMES = frozenset({
    "identifier", "type_identifier", "property_identifier", "field_identifier",
    "shorthand_property_identifier", "shorthand_property_identifier_pattern", "constant", "name",
})  # fmt: skip
_MEMBERS = {
    "attribute": "attribute", "member_expression": "property", "field_expression": "field",
    "selector_expression": "field", "field_access": "field",
}  # fmt: skip
_PARAMETERS = frozenset({
    "parameters", "lambda_parameters", "typed_parameter", "default_parameter", "typed_default_parameter",
    "formal_parameters", "formal_parameter", "required_parameter", "optional_parameter",
    "parameter_declaration", "parameter", "list_splat_pattern", "dictionary_splat_pattern",
})  # fmt: skip
_TARGETS = {
    "assignment": "left", "for_statement": "left", "for_in_clause": "left", "named_expression": "name",
    "as_pattern_target": None, "init_declarator": "declarator", "function_declarator": "declarator",
    "short_var_declaration": "left", "let_declaration": "pattern", "declaration": "declarator",
}  # fmt: skip
_CLASSES = ("class", "interface", "struct", "impl", "trait", "enum")
Span = tuple[int, int]


def find_rename(burst: Burst, language: str) -> tuple[str, str, list[Edit]] | None:
    """Old name, new name, and the edits of the other places in `burst.after`."""
    change = burst.words()
    old, new = change.old, change.new
    if old == new or not IDENTIFIER.fullmatch(old) or not IDENTIFIER.fullmatch(new):
        return None
    if keyword.iskeyword(new) or keyword.iskeyword(old):
        return None
    root = parse_tree(change.before, language)
    name = leaf_at(root, change.start)
    if name is None or name.kind() not in _NAMES or name.text() != old:
        return None
    owner = _find_definition(name)
    if owner is None:
        return None
    scope, member = _find_scope(name, owner, root)
    edits = []
    for node in _find_occurrences(scope, old, name, member=member, parameter=owner.kind() in _PARAMETERS):
        span = node.range()
        start = change.shift_offset(span.start.index)
        edits.append(Edit(start, start + len(old), new))
    return (old, new, edits) if edits else None


def find_uses(text: str, language: str, old: str, new: str) -> list[Edit]:
    """Uses of a top-level name in another file that imports it."""
    root = parse_tree(text, language)
    found = [
        node
        for node in walk(root)
        if node.is_leaf() and node.kind() in _NAMES and node.text() == old and not _is_member(node)
    ]
    if not any(_is_imported(node) for node in found):
        return []
    return [Edit(n.range().start.index, n.range().end.index, new) for n in found if not _is_keyword_name(n)]


def is_top_level(burst: Burst, language: str) -> bool:
    """Whether the renamed definition is one that other files can see."""
    change = burst.words()
    name = leaf_at(parse_tree(change.before, language), change.start)
    owner = _find_definition(name) if name is not None else None
    if name is None or owner is None or owner.kind() in _PARAMETERS:
        return False
    outer = owner.parent()
    while outer is not None:
        if _is_function(outer) or outer.kind().startswith(_CLASSES):
            return False
        outer = outer.parent()
    return True


def _find_definition(name: SgNode) -> SgNode | None:
    """The node that `name` is the name of, where it is defined there."""
    parent = name.parent()
    if parent is None:
        return None
    kind = parent.kind()
    if kind in _PARAMETERS:
        return None if _is_same(parent.field("value"), name) else parent
    if kind in _TARGETS:
        field = _TARGETS[kind]
        if field is None:
            return parent
        return parent if _is_same(parent.field(field), name) else None
    if kind in ("pattern_list", "tuple_pattern", "expression_list"):
        outer = parent.parent()
        field = _TARGETS.get(outer.kind()) if outer is not None else None
        if outer is None or field is None:
            return None
        return outer if _is_same(outer.field(field), parent) else None
    if kind.endswith(
        ("_definition", "_declaration", "_declarator", "_item", "_spec", "_alias", "_signature")
    ):
        return parent if _is_same(parent.field("name"), name) else None
    return None


def _find_scope(name: SgNode, owner: SgNode, root: SgNode) -> tuple[SgNode, bool]:
    """The node inside which the name holds, and whether it is reached through its class."""
    # A function's own name belongs to what is around it; a parameter to the function itself.
    at: SgNode | None = owner
    if owner.kind() == "function_declarator":  # C: the name lies deeper than the function
        function = next((node for node in owner.ancestors() if _is_function(node)), None)
        at = function.parent() if function is not None else None
    elif owner.kind() not in _PARAMETERS and (_is_function(owner) or owner.kind().startswith(_CLASSES)):
        at = owner.parent()
    while at is not None:
        if _is_function(at):
            return at, False
        if at.kind().startswith(_CLASSES):
            return root, True
        at = at.parent()
    return root, False


def _find_occurrences(
    scope: SgNode, old: str, definition: SgNode, *, member: bool, parameter: bool
) -> Iterator[SgNode]:
    stack = [scope]
    while stack:
        node = stack.pop()
        if node.is_leaf():
            if node.kind() not in _NAMES or node.text() != old or _is_same(node, definition):
                continue
            if _is_member(node) is not member or _is_keyword_name(node):
                continue
            yield node
            continue
        if node.range() != scope.range() and not member and _is_function(node) and _has_parameter(node, old):
            continue
        stack.extend(reversed(node.children()))


def _has_parameter(function: SgNode, name: str) -> bool:
    """Whether a nested function has a parameter of that name."""
    parameters = function.field("parameters")
    if parameters is None:
        return False
    return any(n.is_leaf() and n.kind() in _NAMES and n.text() == name for n in walk(parameters))


def _is_function(node: SgNode) -> bool:
    kind = node.kind()
    if kind.endswith(("_type", "_declarator", "_invocation", "_call")):
        return False
    return "function" in kind or "method" in kind or "lambda" in kind


def _is_member(node: SgNode) -> bool:
    parent = node.parent()
    field = _MEMBERS.get(parent.kind()) if parent is not None else None
    return parent is not None and field is not None and _is_same(parent.field(field), node)


def _is_keyword_name(node: SgNode) -> bool:
    """`name=` in a call names the other side's parameter."""
    parent = node.parent()
    return parent is not None and parent.kind() == "keyword_argument" and _is_same(parent.field("name"), node)


def _is_imported(node: SgNode) -> bool:
    return any("import" in ancestor.kind() for ancestor in node.ancestors())


def _is_same(a: SgNode | None, b: SgNode) -> bool:
    if a is None:
        return False
    x, y = a.range(), b.range()
    return bool(x.start.index == y.start.index and x.end.index == y.end.index)
