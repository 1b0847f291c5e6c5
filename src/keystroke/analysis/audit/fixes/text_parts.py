"""A text composed in the source, as a sequence of characters and holes with their spans.

A part can be replaced by edits that touch nothing else. Anything unsupported gives None.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from keystroke.analysis.audit.fixes.site import require, required_value, span, without_parentheses
from keystroke.analysis.audit.flow.knowledge import family_of
from keystroke.analysis.audit.flow.values import HOLE
from keystroke.analysis.audit.source import ir
from keystroke.text import Edit

_LITERALS = frozenset(
    {"string", "template_string", "string_literal", "interpreted_string_literal"} | {"raw_string_literal"}
)
_SUMS = frozenset({"binary_operator", "binary_expression"})
_PERCENT = re.compile(r"%(?:\(\w+\))?([-+ #0]*\d*(?:\.\d+)?)([a-zA-Z%])")
_FIELD = re.compile(r"\{(\w*)((?:![a-z])?(?::[^{}]*)?)\}|\{\{|\}\}")
_ESCAPE = re.compile(
    r"\\(?:x[0-9a-fA-F]{1,2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|u\{[0-9a-fA-F]+\}|[0-7]{1,3}|.)", re.S
)
_SIMPLE = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "`": "`", "\n": "", "$": "$"}


@dataclass(frozen=True, slots=True)
class TextChar:
    """A character of a literal and its span in the source."""

    text: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TextHole:
    """A computed part: its expression, and the span that represents it."""

    node: ir.Syntax
    start: int
    end: int
    form: str  # "inside" a literal, an "operand" of a sum, or the "mark" of a template
    format: str = ""  # its format, if not plain text
    text: bool = False  # known to be text: an operand of a sum in Python


TextAtom = TextChar | TextHole


@dataclass(slots=True)
class TextOperand:
    """An operand of a sum: a literal with its atoms, or a hole."""

    start: int
    end: int
    inner: tuple[int, int] | None  # the content of a literal
    quote: str
    atoms: list[TextAtom]


@dataclass(slots=True)
class TextComposition:
    node: ir.Syntax
    start: int
    end: int
    operands: list[TextOperand]
    unwrap: list[Edit] = field(default_factory=list)  # removes the formatting call
    undouble: list[Edit] = field(default_factory=list)  # replaces "%%" by "%" without formatting
    template: bool = False

    @property
    def atoms(self) -> list[TextAtom]:
        return [atom for operand in self.operands for atom in operand.atoms]

    @property
    def holes(self) -> list[TextHole]:
        return [atom for atom in self.atoms if isinstance(atom, TextHole)]

    @property
    def skeleton(self) -> str:
        """The text with a NUL for each hole; one character per atom."""
        return "".join(HOLE if isinstance(atom, TextHole) else atom.text for atom in self.atoms)

    def substitute(self, first: int, last: int, text: str) -> list[Edit]:
        """Edits that replace the atoms `first` to `last` by `text`, if a literal can hold it."""
        edits: list[Edit] = []
        placed = False
        reached = 0
        previous: TextOperand | None = None
        for operand in self.operands:
            start, stop = reached, reached + len(operand.atoms)
            reached = stop
            covered = operand.atoms[max(first - start, 0) : max(last + 1 - start, 0)] if stop > first else []
            if start <= last and stop > first:
                if operand.inner is not None and not placed:
                    # The literal takes the text.
                    edits.append(Edit(covered[0].start, covered[-1].end, _spell(text, operand.quote)))
                    placed = True
                elif operand.inner is None and not placed:
                    before = required_value(previous)
                    at = required_value(before.inner)[1]
                    edits += [Edit(at, at, _spell(text, before.quote)), Edit(before.end, operand.end, "")]
                    placed = True
                elif len(covered) == len(operand.atoms) and previous is not None:
                    edits.append(Edit(previous.end, operand.end, ""))
                else:
                    edits.append(Edit(covered[0].start, covered[-1].end, ""))
            elif start > last and not operand.atoms and previous is not None and placed:
                edits.append(Edit(previous.end, operand.end, ""))  # an empty literal is left over
            previous = operand
        require(placed)
        return _merge(edits)


def _spell(text: str, quote: str) -> str:
    """The text as written in a literal with this quote."""
    require("\\" not in text and "\n" not in text)
    if len(quote) == 1 and quote in "\"'":
        return text.replace(quote, f"\\{quote}")
    require(not quote or quote[-1] not in text)
    return text


def _merge(edits: list[Edit]) -> list[Edit]:
    """Merges adjacent edits."""
    out: list[Edit] = []
    for edit in sorted(edits, key=lambda item: (item.start, item.end)):
        if out and out[-1].end == edit.start and (out[-1].end > out[-1].start or edit.end > edit.start):
            out[-1] = Edit(out[-1].start, edit.end, out[-1].text + edit.text)
        else:
            out.append(edit)
    return out


def compose(node: ir.Syntax, language: str, text: str) -> TextComposition | None:
    """The text that an expression composes; None if it composes none."""
    reader = _Reader(language, text)
    node = without_parentheses(node)
    template = reader.template(node)
    if template is not None:
        return template
    operands = list(reader.operands(node))
    if not operands or not any(operand.inner is not None for operand in operands):
        return None
    start, end = span(node)
    return TextComposition(node, start, end, operands)


def compose_format(
    node: ir.Syntax, held: ir.Syntax, values: list[ir.Syntax], language: str, text: str
) -> TextComposition | None:
    """The text that a call such as `printf` makes of its format and values."""
    reader = _Reader(language, text)
    constant = reader.constant(held)
    return reader.marked(node, constant, values, {}, [], _PERCENT) if constant is not None else None


class _Reader:
    def __init__(self, language: str, text: str) -> None:
        self.language, self.source = language, text
        self.family = family_of(language)

    def operands(self, node: ir.Syntax) -> Iterator[TextOperand]:
        """The operands of a sum from left to right, without recursion."""
        parts: list[ir.Syntax] = []
        while (
            node.kind() in _SUMS
            and (operator := node.field("operator")) is not None
            and operator.text() == "+"
        ):
            right, left = node.field("right"), node.field("left")
            if right is None or left is None:
                break
            parts.append(right)
            node = left
        parts.append(node)
        for part in reversed(parts):
            kind = part.kind()
            if kind == "concatenated_string":
                for child in _named_parts(part):
                    yield self.literal(child)
            elif kind in _LITERALS and not self.binary(part):
                yield self.literal(part)
            else:
                start, end = span(part)
                yield TextOperand(
                    start, end, None, "", [TextHole(part, start, end, "operand", "", self.family == "python")]
                )

    def binary(self, node: ir.Syntax) -> bool:
        return self.family == "python" and "b" in self.opening(node)[0].lower()

    def opening(self, node: ir.Syntax) -> tuple[str, str]:
        """A literal's prefix and its quote."""
        text = node.text()
        found = re.match(r"([A-Za-z]*)(\"\"\"|'''|[\"'`])", text)
        return (found[1], found[2]) if found else ("", text[:1])

    def literal(self, node: ir.Syntax) -> TextOperand:
        start, end = span(node)
        prefix, quote = self.opening(node)
        if self.binary(node):
            return TextOperand(start, end, None, "", [TextHole(node, start, end, "operand")])
        inner = (start + len(prefix) + len(quote), end - len(quote))
        raw = "r" in prefix.lower() if self.family == "python" else self.family == "go" and quote == "`"
        formatted = "f" in prefix.lower()
        atoms: list[TextAtom] = []
        at = inner[0]
        for child in node.children():
            if child.kind() in ("interpolation", "template_substitution"):
                from_, to = span(child)
                atoms += self.chars(at, from_, raw, formatted)
                atoms.append(self.hole(child, from_, to))
                at = to
        atoms += self.chars(at, inner[1], raw, formatted)
        return TextOperand(start, end, inner, quote, atoms)

    def hole(self, child: ir.Syntax, start: int, end: int) -> TextHole:
        inner = child.field("expression") or (_named_parts(child) or [child])[0]
        kinds = ("=", "type_conversion", "format_specifier")  # {x=} writes the expression too
        spec = "".join(part.text() for part in child.children() if part.kind() in kinds)
        named = [
            part for part in _named_parts(child) if part.kind() not in ("type_conversion", "format_specifier")
        ]
        return TextHole(inner, start, end, "inside", spec if len(named) == 1 else "?")

    def chars(self, start: int, end: int, raw: bool, formatted: bool) -> Iterator[TextChar]:
        text = self.source
        at = start
        while at < end:
            if not raw and text[at] == "\\":
                found = _ESCAPE.match(text, at, end)
                if found is not None:
                    spelled = found.group()[1:]
                    char = _SIMPLE.get(spelled, spelled if len(spelled) == 1 else "?")
                    yield TextChar(char or " ", at, found.end())
                    at = found.end()
                    continue
            if formatted and text[at : at + 2] in ("{{", "}}"):
                yield TextChar(text[at], at, at + 2)
                at += 2
                continue
            yield TextChar(text[at], at, at + 1)
            at += 1

    # Templates: "..." % (a, b), "...".format(a, b), fmt.Sprintf("...", a), String.format("...", a)

    def template(self, node: ir.Syntax) -> TextComposition | None:
        start, end = span(node)
        kind = node.kind()
        if self.family == "python" and kind == "binary_operator" and node.field("operator").text() == "%":
            held = self.constant(node.field("left"))
            right = without_parentheses(node.field("right"))
            if held is None or right.kind() in ("dictionary", "list_splat"):
                return None
            values = _named_parts(right) if right.kind() == "tuple" else [right]
            inner_end = span(node.field("left"))[1]
            return self.marked(node, held, values, {}, [Edit(inner_end, end, "")], _PERCENT)
        if self.family == "python" and kind == "call":
            func = node.field("function")
            if func is None or func.kind() != "attribute" or func.field("attribute").text() != "format":
                return None
            held = self.constant(func.field("object"))
            if held is None:
                return None
            values, names = [], {}
            for child in _named_parts(node.field("arguments")):
                if child.kind() == "keyword_argument":
                    names[child.field("name").text()] = child.field("value")
                elif child.kind() in ("list_splat", "dictionary_splat"):
                    return None
                else:
                    values.append(child)
            inner_end = span(func.field("object"))[1]
            return self.marked(node, held, values, names, [Edit(inner_end, end, "")], _FIELD)
        if kind in ("call_expression", "method_invocation"):
            called = {"go": "fmt.Sprintf", "java": "String.format"}.get(self.family, "")
            arguments = node.field("arguments")
            if not called or arguments is None or not node.text().startswith(f"{called}("):
                return None
            given = _named_parts(arguments)
            held = self.constant(given[0]) if given else None
            if held is None:
                return None
            first_start, first_end = span(given[0])
            unwrap = [Edit(start, first_start, ""), Edit(first_end, end, "")]
            return self.marked(node, held, given[1:], {}, unwrap, _PERCENT)
        return None

    def constant(self, node: ir.Syntax | None) -> list[TextOperand] | None:
        """The literals of a constant text; None if it is not constant."""
        if node is None:
            return None
        operands = list(self.operands(without_parentheses(node)))
        if any(operand.inner is None for operand in operands):
            return None
        if any(isinstance(atom, TextHole) for operand in operands for atom in operand.atoms):
            return None
        return operands

    def marked(
        self,
        node: ir.Syntax,
        operands: list[TextOperand],
        values: list[ir.Syntax],
        names: dict[str, ir.Syntax],
        unwrap: list[Edit],
        pattern: re.Pattern[str],
    ) -> TextComposition | None:
        """The template with its marks as holes; None if marks and values do not match."""
        undouble: list[Edit] = []
        used: set[int] = set()
        taken: set[str] = set()
        counted = 0
        for operand in operands:
            atoms = operand.atoms
            text = "".join(atom.text for atom in atoms if isinstance(atom, TextChar))
            out: list[TextAtom] = []
            at = 0
            for found in pattern.finditer(text):
                out += atoms[at : found.start()]
                begun, ended = atoms[found.start()].start, atoms[found.end() - 1].end
                at = found.end()
                if found.group() in ("%%", "{{", "}}"):
                    out.append(TextChar(found.group()[0], begun, ended))
                    undouble.append(Edit(begun, ended, found.group()[0]))
                    continue
                if "(" in found.group():
                    return None  # by name from a mapping
                if pattern is _FIELD:
                    name, spec = found[1], found[2]
                else:
                    name, spec = "", "" if found[2] in "sv" and not found[1] else found.group()
                if name and not name.isdigit():
                    if name not in names:
                        return None
                    value = names[name]
                    taken.add(name)
                else:
                    number = int(name) if name else counted
                    counted += 1
                    if number >= len(values):
                        return None
                    value = values[number]
                    used.add(number)
                out.append(TextHole(value, begun, ended, "mark", spec))
            out += atoms[at:]
            operand.atoms = out
        if used != set(range(len(values))) or taken != names.keys():
            return None
        start, end = span(node)
        return TextComposition(node, start, end, operands, unwrap, undouble, True)


def _named_parts(node: ir.Syntax | None) -> list[ir.Syntax]:
    return (
        [child for child in node.children() if child.is_named() and child.kind() != "comment"] if node else []
    )
