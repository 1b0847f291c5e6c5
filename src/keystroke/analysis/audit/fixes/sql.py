"""SQL fixes: moves values from a statement to its parameters.

The imported driver decides how a parameter is written. There is no fix if the driver is unknown or a part of
the statement may not be a value.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from keystroke.analysis.audit.fixes.site import (
    ChangedValue,
    FixEdits,
    FixSite,
    named_children,
    require,
    required_value,
    span,
)
from keystroke.analysis.audit.fixes.text_parts import TextChar, TextComposition, TextHole, compose
from keystroke.analysis.audit.flow.knowledge import load_table
from keystroke.analysis.audit.flow.values import CONSTANT, HOLE, LOCAL, REMOTE
from keystroke.analysis.audit.rules.catalog import FixSpec
from keystroke.analysis.audit.source import ir
from keystroke.text import Edit

# How each driver marks a parameter, by language and imported module.
_DRIVERS = load_table("sql_drivers", dict[str, dict[str, str]])
_METHODS = {
    "python": frozenset({"execute", "raw", "fetch", "fetchrow", "fetchval"}),
    "javascript": frozenset({"query", "execute", "all", "get", "run", "each", "raw"}),
    "go": frozenset(
        {"Query", "QueryRow", "Exec", "QueryContext", "QueryRowContext", "ExecContext", "Raw", "Queryx"}
        | {"QueryRowx", "MustExec"}
    ),
}
# A bare value follows a column and a comparison, or a keyword that only a value can follow.
_COMPARED = re.compile(r"(?i)(?:^|[\s(,])[\w.\"`\[\]]*[A-Za-z_\"`\]][\w.\"`\]]*\s*(?:=|<>|!=|<=|>=|<|>)\s*$")
_WORDED = re.compile(r"(?i)\bbetween\s+$|\bbetween\s+\0\s+and\s+$")
_COUNTED = re.compile(r"(?i)\b(?:limit|offset)\s+$")
_LISTED = re.compile(r"(?is)\binsert\s+(?:or\s+\w+\s+)?into\b[^;]*\bvalues\s*\((?:[^()]*,)?\s*$")
_ENDED = re.compile(
    r"\s*(?:$|[,;)]|--|\s(?i:and|or|order|group|limit|offset|where|union|having|returning|on)\b)"
)
_WORDS = re.compile(
    r"(?i)\b(?:select|insert|update|delete|replace|merge|with|call|exec|create|drop|alter|from)\b"
)


@dataclass(frozen=True, slots=True)
class BoundValue:
    """One value of the statement: the atoms it replaces, and the bound expression."""

    first: int
    last: int
    value: str
    number: bool = False  # it must be a whole number


def bind_parameters(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Replaces values by placeholders and passes them as parameters."""
    call = required_value(site.call)
    require(not call.kwargs and site.method in _METHODS.get(site.family, ()))
    given = site.arguments()
    at = 1 if site.family == "go" and site.method.endswith("Context") else 0
    require(at < len(given))
    holder, behind = given[at], given[at + 1 :]
    wrapped = _wrapper(site, holder)
    statement = composed_text(site, wrapped or holder)
    require(not behind or _callback_only(site, behind))
    mark = required_value(_mark(site, wrapped is not None) or ("?" if spec.suggest else None))
    bound = bindable_values(site, statement)
    edits = place_marks(statement, bound, mark)
    end = span(holder)[1]
    return FixEdits((*edits, Edit(end, end, _pass_parameters(site, [item.value for item in bound], mark))))


def composed_text(site: FixSite, node: ir.Syntax) -> TextComposition:
    """The text composed here, or in a variable used only here if its values are unchanged since."""
    written = (site.definition(node) if node.kind() == "identifier" else None) or node
    text = required_value(compose(written, site.language, site.text))
    require(span(written) == span(node) or all(site.is_unchanged(hole.node, written) for hole in text.holes))
    return text


def _wrapper(site: FixSite, node: ir.Syntax) -> ir.Syntax | None:
    """The argument of SQLAlchemy's `text("...")`."""
    if site.family != "python" or node.kind() != "call":
        return None
    func, arguments = node.field("function"), node.field("arguments")
    if func is None or func.text().rsplit(".", 1)[-1] != "text" or arguments is None:
        return None
    inner = named_children(arguments)
    return inner[0] if len(inner) == 1 else None


def _callback_only(site: FixSite, behind: list[ir.Syntax]) -> bool:
    return (
        site.family == "javascript"
        and len(behind) == 1
        and behind[0].kind() in ("arrow_function", "function_expression", "function")
    )


def _mark(site: FixSite, wrapped: bool) -> str | None:
    """How the driver marks a parameter; None if the imports are ambiguous."""
    drivers = _DRIVERS.get(site.family, {})
    styles = {style for path in site.imports for module, style in drivers.items() if _within(path, module)}
    if wrapped:
        return ":p" if ":p" in styles else None
    if len(styles) != 1:
        return None
    mark = next(iter(styles))
    if mark == ":p" or not mark:
        return None  # SQLAlchemy needs text(); other drivers bind differently
    if site.family == "python":
        if site.method == "raw" and mark != "%s":
            return None
        if site.method.startswith("fetch") != (mark == "$1") and site.method != "execute":
            return None
    return mark


def _within(path: str, module: str) -> bool:
    return path == module or path.startswith((f"{module}.", f"{module}/") if module[-1] != "/" else module)


def bindable_values(site: FixSite, statement: TextComposition) -> list[BoundValue]:
    """The holes as values that can be bound, if none may be anything else."""
    skeleton, atoms = statement.skeleton, statement.atoms
    require(_WORDS.search(skeleton.split(HOLE, 1)[0]))
    quotes = _quotes(skeleton)
    out: list[BoundValue] = []
    for at, atom in enumerate(atoms):
        if not isinstance(atom, TextHole):
            continue
        require(not out or out[-1].last < at)  # two holes in one quoted text
        value = site.value(atom.node)
        if value.level == CONSTANT and not statement.template:
            continue  # a table's name kept in a constant stays where it is
        inside = next(((left, right) for left, right in quotes if left < at < right), None)
        bound = (
            _bind_quoted(site, atoms[inside[0] + 1 : inside[1]], atom, inside)
            if inside is not None
            else _bare(site, skeleton, at, atom)
        )
        if bound is None and value.level <= LOCAL and not statement.template:
            continue  # local data
        site.changed.append(ChangedValue(atom.node, skeleton[:at]))
        out.append(required_value(bound))
    require(out)
    return out


def _quotes(skeleton: str) -> list[tuple[int, int]]:
    """The spans of quoted texts, if no hole is in another kind of quotes."""
    out: list[tuple[int, int]] = []
    at, size = 0, len(skeleton)
    while at < size:
        char = skeleton[at]
        require(not skeleton.startswith("--", at) and not skeleton.startswith("/*", at))
        if char == "'":
            end = at + 1
            while end < size and (skeleton[end] != "'" or skeleton[end + 1 : end + 2] == "'"):
                end += 2 if skeleton[end] == "'" else 1
            require(end < size)
            out.append((at, end))
            at = end
        elif char in '"`[':
            end = skeleton.find("]" if char == "[" else char, at + 1)
            require(end >= 0 and HOLE not in skeleton[at:end])
            at = end
        at += 1
    return out


def _bind_quoted(
    site: FixSite, atoms: list[TextChar | TextHole], hole: TextHole, quotes: tuple[int, int]
) -> BoundValue | None:
    """The value of a quoted text, including the text around the hole."""
    if len([atom for atom in atoms if isinstance(atom, TextHole)]) != 1:
        return None
    at = next(number for number, atom in enumerate(atoms) if isinstance(atom, TextHole))
    before = "".join(atom.text for atom in atoms[:at] if isinstance(atom, TextChar)).replace("''", "'")
    after = "".join(atom.text for atom in atoms[at + 1 :] if isinstance(atom, TextChar)).replace("''", "'")
    written = as_text(site, hole)
    if written is None or not re.fullmatch(r"[\w %.,:;@/()+*=-]*", before + after):
        return None
    if site.family == "java" and (before or after) and " " in written and not written.endswith(")"):
        written = f"({written})"
    value = " + ".join(
        part for part in (f'"{before}"' * bool(before), written, f'"{after}"' * bool(after)) if part
    )
    return BoundValue(quotes[0], quotes[1], value)


def as_text(site: FixSite, hole: TextHole) -> str | None:
    """The expression for the text that a hole adds to the statement."""
    source = site.source(hole.node)
    if "\n" in source:
        return None
    if hole.format in ("%d", "%i") and site.family == "python":
        return f"str(int({source}))"
    if hole.format:
        return None
    if hole.text or is_text(site, hole.node):
        return source if _simple(hole.node) else f"({source})"
    return {
        "python": f"str({source})",
        "javascript": f"String({source})",
        "java": f"String.valueOf({source})",
        "go": source if hole.form == "operand" or _text_mark(site, hole) else f"fmt.Sprint({source})",
    }[site.family]


def _text_mark(site: FixSite, hole: TextHole) -> bool:
    return site.text[hole.start : hole.end] == "%s" and not hole.node.text().startswith(("[]byte", "&"))


def _simple(node: ir.Syntax) -> bool:
    return node.kind() not in (
        *("binary_operator", "binary_expression", "conditional_expression", "ternary_expression"),
        *("boolean_operator", "lambda", "await", "await_expression"),
    )


def is_text(site: FixSite, node: ir.Syntax) -> bool:
    """Whether an expression is known to be text."""
    value = site.value(node)
    if isinstance(value.const, str):
        return True
    kind = node.kind()
    if kind in ("string", "template_string", "string_literal", "concatenated_string"):
        return True
    if site.family == "python":
        if value.level >= REMOTE and re.search(
            r"args|form\b|cookies|headers|input\(\)|argv|environ", value.origin
        ):
            return not re.search(r"getlist|\bint\b", value.path)
        return _is_declared(site, node, r"str")
    if site.family == "java":
        return _is_declared(site, node, r"String") or bool(
            re.search(
                r"\.(?:getParameter|getHeader|getValue|toString|trim|substring|replace\w*|toLowerCase|toUpperCase)\(",
                node.text(),
            )
        )
    if site.family == "javascript":
        sent = re.search(
            r"\.(?:query|params|headers|cookies|url|originalUrl|hostname|hash|search)\b", value.origin
        )
        return (sent is not None and node.kind() != "object") or _is_declared(site, node, r"string")
    if site.family == "go":
        return _GO_TEXT.search(value.path) is not None or _is_declared(site, node, r"string")
    return False


_GO_TEXT = re.compile(
    r"\.(?:Get|FormValue|PostFormValue|PathValue|Query|Param|Params|PostForm|DefaultQuery|QueryParam|Referer|UserAgent"
    r"|GetHeader|ReadString|Text|Getenv|Sprintf|TrimSpace|ToLower|ToUpper)\(\)$"
)


def _is_declared(site: FixSite, node: ir.Syntax, kind: str) -> bool:
    """Whether the enclosing function declares a name with a type."""
    if node.kind() != "identifier":
        return False
    name = re.escape(node.text())
    scope = site.enclosing_function(node).text()
    if site.family == "java":
        return re.search(rf"\b{kind}\s+{name}\b", scope) is not None
    if site.family == "go":
        return re.search(rf"\b{name}(?:\s*,\s*\w+)*\s+{kind}\b", scope) is not None
    return re.search(rf"\b{name}\s*\??:\s*(?:Optional\[)?{kind}\b", scope) is not None


def is_number(site: FixSite, node: ir.Syntax) -> bool:
    value = site.value(node)
    if value.numeric:
        return True
    if site.family == "java":
        return _is_declared(site, node, r"(?:int|long|Integer|Long|short|double|Double|float|BigDecimal)")
    return _is_declared(site, node, {"python": r"int", "javascript": r"number"}.get(site.family, r"\0"))


def _bare(site: FixSite, skeleton: str, at: int, hole: TextHole) -> BoundValue | None:
    """A value without quotes at a position where only a value is possible."""
    before, after = skeleton[:at], skeleton[at + 1 :]
    source = site.source(hole.node)
    if "\n" in source or not _ENDED.match(after):
        return None
    numeric = is_number(site, hole.node)
    if hole.format in ("%d", "%i", "%v"):
        numeric = numeric or hole.format != "%v"
    elif hole.format:
        return None
    if _COUNTED.search(before):
        if numeric:
            return BoundValue(at, at, source)
        counted = {"python": f"int({source})", "javascript": f"Number({source})"}.get(site.family)
        return BoundValue(at, at, counted, True) if counted else None
    if _COMPARED.search(before) or _WORDED.search(before):
        pass
    elif _LISTED.search(before):
        if re.search(r"\(\s*$", before) and re.match(r"\s*\)", after) and not numeric:
            return None  # may be a whole list of values
    else:
        return None
    if re.search(r"(?i)\bjoin\b|,|\.join", source) and not numeric:
        return None
    if site.family == "java" and not numeric:
        return None  # the database may not convert text
    return BoundValue(at, at, source)


def place_marks(statement: TextComposition, bound: list[BoundValue], mark: str) -> list[Edit]:
    """The edits that replace each value by the driver's mark."""
    edits: list[Edit] = []
    for number, item in enumerate(bound, 1):
        written = {"$1": f"${number}", ":1": f":{number}", ":p": f":p{number}"}.get(mark, mark)
        edits += statement.substitute(item.first, item.last, written)
    consumed = [atom for item in bound for atom in statement.atoms[item.first : item.last + 1]]
    if statement.template:
        require(all(hole in consumed for hole in statement.holes))
        edits += statement.unwrap
        gone = [(atom.start, atom.end) for atom in consumed]
        edits += [
            edit
            for edit in statement.undouble
            if (edit.text != "%" or mark != "%s") and (edit.start, edit.end) not in gone
        ]
    if mark == "%s":
        edits += _percent(statement, bound)
    edits += _drop_prefixes(statement, bound)
    return _tidy(edits)


def _percent(statement: TextComposition, bound: list[BoundValue]) -> list[Edit]:
    """Doubles percent signs of the statement, for drivers that mark parameters with %s."""
    covered = {at for item in bound for at in range(item.first, item.last + 1)}
    return [
        Edit(atom.start, atom.end, "%%")
        for at, atom in enumerate(statement.atoms)
        if isinstance(atom, TextChar)
        and atom.text == "%"
        and at not in covered
        and atom.end - atom.start == 1
    ]


def _drop_prefixes(statement: TextComposition, bound: list[BoundValue]) -> list[Edit]:
    """Removes the prefix of f-strings without holes or braces."""
    covered = {at for item in bound for at in range(item.first, item.last + 1)}
    edits: list[Edit] = []
    reached = 0
    for operand in statement.operands:
        atoms = list(enumerate(operand.atoms, reached))
        reached += len(operand.atoms)
        if operand.inner is None:
            continue
        left = [atom for at, atom in atoms if at not in covered]
        begun = operand.inner[0] - len(operand.quote)
        prefix = statement.node.text()[operand.start - statement.start : begun - statement.start]
        emptied = prefix.lower() in ("f", "fr", "rf") and any(isinstance(a, TextHole) for _, a in atoms)
        if emptied and not any(isinstance(atom, TextHole) or atom.text in "{}" for atom in left):
            edits.append(Edit(operand.start, begun, prefix.replace("f", "").replace("F", "")))
    return edits


def _tidy(edits: list[Edit]) -> list[Edit]:
    """The edits in order, if no two overlap."""
    ordered = sorted(set(edits), key=lambda edit: (edit.start, edit.end))
    for one, other in itertools.pairwise(ordered):
        require(other.start >= one.end)
    return ordered


def _pass_parameters(site: FixSite, values: list[str], mark: str) -> str:
    """The arguments that pass the parameters."""
    listed = ", ".join(values)
    if site.family == "go" or (mark == "$1" and site.family == "python"):
        return f", {listed}"
    if mark == ":p":
        pairs = ", ".join(f'"p{number}": {value}' for number, value in enumerate(values, 1))
        return f", {{{pairs}}}"
    if site.family == "javascript":
        if "sequelize" in site.imports and site.method == "query":
            return f", {{ replacements: [{listed}] }}"
        return f", [{listed}]"
    if site.method == "raw":
        return f", [{listed}]"
    return f", ({listed}{',' if len(values) == 1 else ''})"
