"""Divides a source file into functions, classes with their members, imports and other statements.

Lines count from 0, and units do not overlap. Comments and decorators directly above a definition belong to
it. A language without a grammar is divided at lines that are not indented.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from ast_grep_py import SgNode

from keystroke.analysis.syntax import parse_tree, walk


class UnitKind(StrEnum):
    FUNCTION = "function"
    CLASS = "class"  # also structs, interfaces, impls and modules
    IMPORTS = "imports"
    STATEMENT = "statement"


@dataclass(frozen=True, slots=True)
class OutlineUnit:
    """Lines `start` to `end` (excluded). `name` is qualified (`Account.transfer`); empty for imports and
    statements that define nothing. `header` is the first line of the definition, stripped."""

    kind: UnitKind
    name: str
    start: int
    end: int
    header: str = ""
    members: tuple[OutlineUnit, ...] = field(default=())

    @property
    def short(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def size(self) -> int:
        return self.end - self.start


_WRAPPERS = ("decorated_definition", "export_statement", "template_declaration", "ambient_declaration",
             "internal_module", "expression_statement", "linkage_specification")  # fmt: skip
_BODIES = ("block", "class_body", "declaration_list", "interface_body", "enum_body", "field_declaration_list",
           "object_type", "struct_type", "body_statement", "template_body", "enum_body_declarations",
           "class_declaration_body", "ordered_field_declaration_list", "enum_member_declaration_list",
           "enum_variant_list")  # fmt: skip
_CLASSES = re.compile(
    r"class|struct|interface|impl_item|trait|enum|union|module|namespace|object_declaration|record|"
    r"protocol|extension|type_declaration|type_definition"
)
_FUNCTIONS = re.compile(r"function|method|constructor|destructor|operator|property_decl|getter|setter")
_IMPORTS = re.compile(
    r"^(?:future_)?(?:import|using|use|package|preproc_include|include|require|extern_crate)"
)
_ASSIGNED = ("assignment", "lexical_declaration", "variable_declaration", "const_declaration",
             "var_declaration", "const_item", "static_item", "declaration", "type_alias_declaration",
             "type_alias_statement", "assignment_expression", "public_field_definition", "field_definition",
             "field_declaration", "property_signature", "preproc_def")  # fmt: skip


def outline(text: str, language: str | None) -> tuple[OutlineUnit, ...]:
    """The units of a file in order; every line that is not blank belongs to one."""
    lines = text.split("\n")
    if language is None:
        return tuple(_by_margin(lines))
    return tuple(_units(parse_tree(text, language).children(), lines, "", 0, len(lines)))


def walk_units(units: Sequence[OutlineUnit]) -> Iterator[OutlineUnit]:
    """Every unit and every member, parents first."""
    for unit in units:
        yield unit
        yield from walk_units(unit.members)


def _units(
    nodes: Sequence[SgNode], lines: list[str], owner: str, floor: int, ceiling: int
) -> Iterator[OutlineUnit]:
    """The units of an owner, whose lines are `floor` to `ceiling`."""
    pending: int | None = None  # the first line of comments above the next definition
    units: list[OutlineUnit] = []
    for node in nodes:
        if not node.is_named():
            continue  # before its range, which is slow to compute on long lines
        span = node.range()
        first, last = span.start.line, span.end.line
        if span.end.column == 0 and last > first:
            last -= 1
        if "comment" in node.kind() or node.kind() in ("attribute_item", "decorator", "attribute_list"):
            trailing = units and first < units[-1].end
            if not trailing:
                near = pending is not None and not any(not line.strip() for line in lines[pending:first])
                pending = pending if near else first
            continue
        if not node.text().strip():
            continue
        if pending is not None and any(not line.strip() for line in lines[pending:first]):
            pending = None
        start = max(first if pending is None else pending, units[-1].end if units else floor)
        pending = None
        if last < start:
            continue  # shares its line with the one before
        unit = _unit(node, lines, owner, start, min(last + 1, ceiling))
        if units and unit.kind is UnitKind.IMPORTS and units[-1].kind is UnitKind.IMPORTS:
            units[-1] = OutlineUnit(UnitKind.IMPORTS, "", units[-1].start, unit.end, units[-1].header)
        else:
            units.append(unit)
    yield from units


def _unit(node: SgNode, lines: list[str], owner: str, start: int, end: int) -> OutlineUnit:
    inner = _unwrap(node)
    kind, at = inner.kind(), inner.range().start.line
    header = lines[at].strip()
    if _IMPORTS.match(kind):
        return OutlineUnit(UnitKind.IMPORTS, "", start, end, header)
    body = _find_body(inner)
    if _FUNCTIONS.search(kind) or _is_function_value(inner):
        return OutlineUnit(UnitKind.FUNCTION, _qualify(owner, _function_name(inner)), start, end, header)
    if _CLASSES.search(kind) and body is not None:
        name = _qualify(owner, _name_of(inner))
        members = tuple(_units(body.children(), lines, name, at + (at < end - 1), end))
        return OutlineUnit(UnitKind.CLASS, name, start, end, header, members)
    if kind == "module" or (body is not None and kind == "block"):
        return OutlineUnit(UnitKind.STATEMENT, "", start, end, header)
    return OutlineUnit(UnitKind.STATEMENT, _qualify(owner, _assigned_name(inner)), start, end, header)


def _unwrap(node: SgNode) -> SgNode:
    while node.kind() in _WRAPPERS:
        inner = [c for c in node.children() if c.is_named() and "comment" not in c.kind()]
        inner = [c for c in inner if c.kind() not in ("decorator", "template_parameter_list")] or inner
        if not inner:
            return node
        node = inner[-1]
    if node.kind() in ("type_declaration", "type_definition"):  # Go's type X struct, C's typedef struct
        specs = [
            c for c in node.children() if c.kind() in ("type_spec", "struct_specifier", "enum_specifier")
        ]
        if len(specs) == 1:
            return specs[0] if specs[0].kind() != "type_spec" else node
    return node


def _find_body(node: SgNode) -> SgNode | None:
    for child in node.children():
        if child.kind() in _BODIES:
            return child
        if child.kind() == "type_spec" and (found := _find_body(child)) is not None:
            return _find_body(found) or found
    return None


def _is_function_value(node: SgNode) -> bool:
    """Whether a declaration is like `const f = () => {...}`."""
    if node.kind() not in ("lexical_declaration", "variable_declaration"):
        return False
    values = [d.field("value") for d in node.children() if d.kind() == "variable_declarator"]
    return len(values) == 1 and values[0] is not None and values[0].kind() in _VALUES


_VALUES = ("arrow_function", "function_expression", "function", "generator_function")


def _function_name(node: SgNode) -> str:
    if _is_function_value(node):
        return _assigned_name(node)
    name = _name_of(node)
    receiver = node.field("receiver")
    if receiver is not None:  # Go: func (q *Queue) Push
        types = [n.text() for n in walk(receiver) if n.kind() == "type_identifier"]
        return f"{types[0]}.{name}" if types else name
    return name


def _name_of(node: SgNode) -> str:
    declarator = None if node.field("name") is not None else node.field("declarator")
    for inner in walk(declarator) if declarator is not None else ():
        if inner.kind() in ("identifier", "field_identifier", "qualified_identifier", "operator_name"):
            return str(inner.text()).replace("::", ".")
    found = node.field("name") or node.field("type")
    if found is not None:
        return re.split(r"[<(\s]", found.text(), maxsplit=1)[0]
    for inner in node.children():
        if inner.kind() == "type_spec":
            return _name_of(inner)
        if inner.kind() in ("identifier", "type_identifier", "simple_identifier", "constant", "name"):
            return str(inner.text())
    return ""


def _assigned_name(node: SgNode) -> str:
    if not any(n.kind() in _ASSIGNED for n in (node, *node.children()[:1])):
        return ""
    declarator = node.field("declarator") or node
    for inner in walk(declarator):
        if inner.kind() in ("identifier", "property_identifier", "type_identifier", "field_identifier"):
            return str(inner.text())
    return ""


def _qualify(owner: str, name: str) -> str:
    return f"{owner}.{name}" if owner and name else name


def _by_margin(lines: list[str]) -> Iterator[OutlineUnit]:
    """Units that start with an unindented line after a blank or indented one."""
    starts: list[int] = []
    for number, line in enumerate(lines):
        before = lines[number - 1] if number else ""
        head = bool(line.strip()) and not line[0].isspace() and line[0] not in ")]}"
        if head and (not starts or not before.strip() or before[0].isspace() or before[0] in ")]}"):
            starts.append(number)
    for start, after in zip(starts, [*starts[1:], len(lines)], strict=False):
        end = after
        while end > start and not lines[end - 1].strip():
            end -= 1
        words = re.findall(r"[A-Za-z_]\w*", lines[start])
        yield OutlineUnit(UnitKind.STATEMENT, words[-1] if words else "", start, end, lines[start].strip())
