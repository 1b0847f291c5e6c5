"""Access to a match, its syntax and its values for the code that builds fixes.

A fixer calls `require` and `needed` for what its fix depends on; where that is missing, there is no fix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from keystroke.analysis.audit.flow.knowledge import family_of
from keystroke.analysis.audit.flow.values import LOCAL, Value
from keystroke.analysis.audit.project import ProjectFacts
from keystroke.analysis.audit.rules.match import RuleMatch
from keystroke.analysis.audit.source import ir
from keystroke.text import Edit

# Assignments by language: kind of node, field of the name, field of the value.
_BINDINGS = {
    "python": (("assignment", "left", "right"), ("augmented_assignment", "left", "right")),
    "javascript": (
        ("variable_declarator", "name", "value"),
        ("assignment_expression", "left", "right"),
        ("augmented_assignment_expression", "left", "right"),
        ("update_expression", "argument", "argument"),
    ),
    "java": (
        ("variable_declarator", "name", "value"),
        ("assignment_expression", "left", "right"),
        ("update_expression", "", ""),
    ),
    "go": (
        ("short_var_declaration", "left", "right"),
        ("assignment_statement", "left", "right"),
        ("var_spec", "name", "value"),
    ),
    "c": (
        ("init_declarator", "declarator", "value"),
        ("assignment_expression", "left", "right"),
        ("update_expression", "argument", "argument"),
    ),
}
_FUNCTIONS = frozenset(
    {"function_definition", "lambda", "function_declaration", "function_expression"}
    | {"arrow_function", "method_definition", "generator_function_declaration"}
    | {"method_declaration", "constructor_declaration", "lambda_expression", "func_literal"}
)
_CALLS = frozenset(
    {"call", "call_expression", "method_invocation", "object_creation_expression", "new_expression"}
)
_READ = {"javascript": ("identifier", "shorthand_property_identifier")}
_STEADY = frozenset(
    {"identifier", "attribute", "subscript", "member_expression", "subscript_expression"}
    | {"selector_expression", "index_expression", "field_access", "array_access"}
    | {"property_identifier", "field_identifier", "string", "string_start", "string_content"}
    | {"string_fragment", "string_end", "string_literal", "interpreted_string_literal"}
    | {"interpreted_string_literal_content", "integer", "number", "int_literal"}
    | {"decimal_integer_literal", "parenthesized_expression", "this"}
)


T = TypeVar("T")


class NoFix(Exception):
    """The match cannot be fixed here."""


def require(condition: object) -> None:
    """Gives the fix up unless the condition holds."""
    if not condition:
        raise NoFix


def required_value(value: T | None) -> T:
    """The value; gives the fix up if it is None."""
    if value is None:
        raise NoFix
    return value


@dataclass(frozen=True, slots=True)
class FixEdits:
    """Edits of the unit, and the imports they need."""

    edits: tuple[Edit, ...]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ChangedValue:
    """A value that a fix converts, with the constant text around it."""

    node: ir.Syntax
    before: str = ""
    after: str = ""


@dataclass(slots=True)
class FixSite:
    match: RuleMatch
    language: str
    text: str  # of the unit, as it was parsed
    imports: frozenset[str]  # dotted paths of what the file imports
    lower: Callable[[ir.Syntax], ir.Expr]
    project: ProjectFacts | None = None
    changed: list[ChangedValue] = field(default_factory=list)  # what the fix converts; set by the fixer
    family: str = field(init=False)

    def __post_init__(self) -> None:
        self.family = family_of(self.language)

    # The match

    @property
    def call(self) -> ir.CallExpr | None:
        """The call that matched."""
        if self.match.subject is None and self.match.node.kind() in _CALLS:
            self.match.subject = self.lower(self.match.node)
        return self.match.subject if isinstance(self.match.subject, ir.CallExpr) else None

    @property
    def method(self) -> str:
        """The last part of the name of the callee."""
        return ir.last_name(self.call.func) if self.call is not None else ""

    @property
    def path(self) -> str:
        """The resolved name of the callee."""
        func = self.call.func if self.call is not None else None
        if isinstance(func, ir.AttrExpr):
            base = self.match.evaluate(func.base).path
            return f"{base}.{func.name}" if base else func.name
        return self.match.evaluate(func).path if func is not None else ""

    def arguments(self) -> list[ir.Syntax]:
        """The nodes of the positional arguments."""
        call = self.call
        if call is None:
            return []
        listed = call.node.field("arguments") or next(
            (child for child in call.node.children() if child.kind() == "argument_list"), None
        )
        if listed is None:
            return []
        return [
            child
            for child in listed.children()
            if child.is_named()
            and child.kind()
            not in ("comment", "line_comment", "block_comment", "keyword_argument", "dictionary_splat")
        ]

    def value(self, node: ir.Syntax) -> Value:
        """The value of an expression at the match."""
        return self.match.evaluate(self.lower(node))

    def is_open(self, node: ir.Syntax, use: str = "") -> bool:
        """Whether an expression carries data of a caller that is not safe for the use of the rule."""
        value = self.value(node)
        return value.level > LOCAL and not value.numeric and not value.is_safe_for(use or self.match.rule.use)

    # Text

    def source(self, node: ir.Syntax) -> str:
        start, end = span(node)
        return self.text[start:end]

    def indent(self, at: int) -> str:
        """The indentation of the line of an offset."""
        start = self.text.rfind("\n", 0, at) + 1
        found = re.compile(r"[ \t]*").match(self.text, start)
        return found.group() if found is not None else ""

    # Edits

    def replace_node(self, node: ir.Syntax, text: str, needs: tuple[str, ...] = ()) -> FixEdits:
        return FixEdits((Edit(*span(node), text),), needs)

    def insert_at(self, offset: int, text: str) -> FixEdits:
        return FixEdits((Edit(offset, offset, text),))

    # Enclosing syntax

    def enclosing_function(self, node: ir.Syntax) -> ir.Syntax:
        """The innermost enclosing function, or the whole unit."""
        at = node
        while (parent := at.parent()) is not None:
            at = parent
            if at.kind() in _FUNCTIONS:
                return at
        return at

    def enclosing_statement(self, node: ir.Syntax) -> ir.Syntax | None:
        """The enclosing statement of a block."""
        at = node
        while (parent := at.parent()) is not None:
            if parent.kind() in _BLOCKS:
                return at
            at = parent
        return None

    def is_statement(self, node: ir.Syntax) -> bool:
        """Whether an expression is a statement, its value unused."""
        parent = node.parent()
        return parent is not None and parent.kind() == "expression_statement"

    def bindings(self, name: str, scope: ir.Syntax) -> Iterator[tuple[ir.Syntax, ir.Syntax | None]]:
        """Every assignment of a variable in `scope`, with the assigned expression if it is simple."""
        for kind, target, value in _BINDINGS[self.family]:
            for node in scope.find_all(kind=kind):
                held = node.field(target) if target else None
                if held is None:
                    if not target and name in node.text():
                        yield node, None
                    continue
                if held.text() == name or (self.family == "c" and held.text().lstrip("* ") == name):
                    plain = kind not in _CHANGES and _single(held)
                    given = node.field(value)
                    if given is None and kind in ("variable_declarator", "var_spec"):
                        continue  # declared only
                    operator = node.field("operator")
                    if operator is not None and operator.text() not in ("=", ":="):
                        plain = False
                    yield node, _single_value(given) if plain else None
                elif held.kind() not in ("attribute", "subscript", "member_expression") and re.search(
                    rf"(?<![\w.$]){re.escape(name)}(?![\w$])", held.text()
                ):
                    yield node, None

    def reads(self, name: str, scope: ir.Syntax) -> list[ir.Syntax]:
        """Every use of a variable in `scope`."""
        given = set()
        for kind, target, _ in _BINDINGS[self.family]:
            for node in scope.find_all(kind=kind) if target else ():
                held = node.field(target)
                if held is not None and held.text() == name:
                    given.add(span(held)[0])
        return [
            node
            for kind in _READ.get(self.family, ("identifier",))
            for node in scope.find_all(kind=kind)
            if node.text() == name and span(node)[0] not in given
        ]

    def definition(self, name: ir.Syntax, many: bool = False) -> ir.Syntax | None:
        """The expression assigned to a variable, if assigned once and, unless `many`, used only here."""
        if name.kind() != "identifier":
            return None
        scope = self.enclosing_function(name)
        word = name.text()
        found = list(self.bindings(word, scope))
        if len(found) != 1 or found[0][1] is None:
            return None
        place, value = found[0]
        if value is None or span(place)[1] > span(name)[0]:
            return None
        if not many and len([node for node in self.reads(word, scope) if not _is_logged(node)]) != 1:
            return None
        return value

    def is_unchanged(self, node: ir.Syntax, since: ir.Syntax) -> bool:
        """Whether an expression in `since` has the same value at the match: none of its names changed."""
        scope = self.enclosing_function(since)
        begun, here = span(since)[1], self.match.start
        if not self._adjacent(since) and any(part.kind() not in _STEADY for part in _inside(node)):
            return False
        for part in _inside(node):
            if part.kind() != "identifier":
                continue
            for place, _ in self.bindings(part.text(), scope):
                at = span(place)[0]
                if begun <= at < here:
                    return False
                if at > here and not self._same_block(since):
                    return False
        return True

    def _adjacent(self, since: ir.Syntax) -> bool:
        one, other = self.enclosing_statement(since), self.enclosing_statement(self.match.node)
        following = one.next() if one is not None else None
        while following is not None and following.kind() in ("comment", "line_comment"):
            following = following.next()
        return following is not None and other is not None and span(following) == span(other)

    def _same_block(self, since: ir.Syntax) -> bool:
        one, other = self.enclosing_statement(since), self.enclosing_statement(self.match.node)
        if one is None or other is None:
            return False
        left, right = one.parent(), other.parent()
        return left is not None and right is not None and span(left) == span(right)


_LOGGING = re.compile(
    r"^(?:print|System\.(?:out|err)\.print\w*|console\.\w+|fmt\.Print\w*|log\.\w+|(?:\w+\.)*[lL]ogg?(?:er|ing)?\.\w+|LOG(?:GER)?\.\w+)\($"
)


def _is_logged(node: ir.Syntax) -> bool:
    """Whether a use of a variable only prints or logs it."""
    parent = node.parent()
    if parent is None or parent.kind() not in ("argument_list", "arguments"):
        return False
    call = parent.parent()
    if call is None:
        return False
    return _LOGGING.match(call.text()[: span(parent)[0] - span(call)[0] + 1]) is not None


# Expressions that need parentheses as an operand.
LOOSE = frozenset(
    {"binary_operator", "binary_expression", "conditional_expression", "ternary_expression"}
    | {"boolean_operator", "await", "await_expression", "cast_expression", "lambda"}
)
_BLOCKS = frozenset(
    {"block", "module", "statement_block", "program", "source_file", "statement_list", "constructor_body"}
    | {"compound_statement", "translation_unit", "switch_block_statement_group", "class_body"}
)
_CHANGES = frozenset({"augmented_assignment", "augmented_assignment_expression", "update_expression"})


def _single(target: ir.Syntax) -> bool:
    return target.kind() in ("identifier", "pointer_declarator", "array_declarator") or (
        target.kind() == "expression_list" and len(named_children(target)) == 1
    )


def _single_value(node: ir.Syntax | None) -> ir.Syntax | None:
    """The single value of a Go expression list."""
    if node is not None and node.kind() == "expression_list":
        inner = named_children(node)
        return inner[0] if len(inner) == 1 else None
    return node


def _inside(node: ir.Syntax) -> Iterator[ir.Syntax]:
    """A node and every named node below it."""
    yield node
    for child in named_children(node):
        yield from _inside(child)


def named_children(node: ir.Syntax) -> list[ir.Syntax]:
    return [child for child in node.children() if child.is_named()]


def without_parentheses(node: ir.Syntax) -> ir.Syntax:
    while node.kind() == "parenthesized_expression":
        inner = named_children(node)
        if len(inner) != 1:
            break
        node = inner[0]
    return node


def span(node: ir.Syntax) -> tuple[int, int]:
    found = node.range()
    return found.start.index, found.end.index
