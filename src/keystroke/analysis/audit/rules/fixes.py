"""Fixes as edits of the unit they repair.

Law: a fix is built from the rule's data and the syntax at hand; where a piece is missing there is no fix.
Nothing here claims that a fix works: the auditor proves it by auditing the fixed text.
"""

from __future__ import annotations

import re

from keystroke.analysis.audit.rules.catalog import FixSpec
from keystroke.analysis.audit.rules.match import Match
from keystroke.analysis.audit.source import ir
from keystroke.text import Edit

_SLOT = re.compile(r"\{(\d+|base|callee|name|args|value|rest\d+)\}")


def build(match: Match, spec: FixSpec, language: str, text: str, imports: str) -> tuple[Edit, ...] | None:
    """The edits on the parsed text, or None where this fix does not apply; `imports`: what the file knows."""
    subject = match.subject
    if spec.array >= 0:
        memory = match.args[spec.array].memory if spec.array < len(match.args) else None
        if memory is None or not memory.array:
            return None
    if spec.only:
        if not isinstance(subject, ir.Call):
            return None
        start, end = _callee(subject, text)
        if not re.search(spec.only, text[start:end]):
            return None
    if spec.fixer == "shell-quote":
        return _shell_quoted(subject) if isinstance(subject, ir.Call) else None
    if spec.fixer == "sql-parameters":
        return _parameters(subject, language, text, imports) if isinstance(subject, ir.Call) else None
    if isinstance(subject, ir.Call):
        return _call(subject, spec, language, text)
    if isinstance(subject, ir.Coll) and spec.keyword:
        return _set_items(subject, spec.keyword)
    if spec.value:
        return _right_side(match, spec.value, text)
    if spec.replace:
        return (Edit(match.start, match.end, spec.replace.replace("{text}", text[match.start : match.end])),)
    return None


def _span(node: ir.Syntax) -> tuple[int, int]:
    span = node.range()
    return span.start.index, span.end.index


def _source(node: ir.Syntax, text: str) -> str:
    start, end = _span(node)
    return text[start:end]


def _right_side(match: Match, value: str, text: str) -> tuple[Edit, ...] | None:
    target = match.subject
    node = target.node if target is not None else None
    while node is not None:
        right = node.field("right") or node.field("value")
        if right is not None:
            start, end = _span(right)
            if start >= match.start:
                return (Edit(start, end, value.replace("{value}", text[start:end])),)
        node = node.parent()
        if node is not None and _span(node)[0] < match.start:
            return None
    return None


def _call(call: ir.Call, spec: FixSpec, language: str, text: str) -> tuple[Edit, ...] | None:
    start, end = _span(call.node)
    if spec.replace:
        whole = _fill(spec.replace, call, text)
        return None if whole is None else (Edit(start, end, whole),)
    edits: list[Edit] = []
    if spec.callee:
        callee = _fill(spec.callee, call, text)
        if callee is None:
            return None
        at, stop = _callee(call, text)
        edits.append(Edit(at, stop, callee))
    for name, value in spec.keyword:
        edit = _set_keyword(call, name, value, language, text)
        if edit is None:
            return None
        edits.append(edit)
    for name in spec.drop:
        edit = _drop(call, name, text)
        if edit is not None:
            edits.append(edit)
    return tuple(edits) or None


def _callee(call: ir.Call, text: str) -> tuple[int, int]:
    start, end = _span(call.func.node)
    node_start, node_end = _span(call.node)
    if (start, end) == (node_start, node_end):  # Java: the callee has no node of its own
        name = call.node.field("name")
        if name is not None:
            return start, _span(name)[1]
    return start, end


def _fill(template: str, call: ir.Call, text: str) -> str | None:
    missing = False

    def slot(found: re.Match[str]) -> str:
        nonlocal missing
        name = found[1]
        if name.isdigit():
            if int(name) >= len(call.args):
                missing = True
                return ""
            return _source(call.args[int(name)].node, text)
        if name.startswith("rest"):
            return "".join(", " + _source(arg.node, text) for arg in call.args[int(name[4:]) :])
        if name == "args":
            return ", ".join(_source(arg.node, text) for arg in call.args)
        if name == "base" and isinstance(call.func, ir.Attr):
            return _source(call.func.base.node, text)
        if name == "callee":
            start, end = _callee(call, text)
            return text[start:end]
        missing = True
        return ""

    whole = _SLOT.sub(slot, template)
    return None if missing else whole


def _set_keyword(call: ir.Call, name: str, value: str, language: str, text: str) -> Edit | None:
    if name.isdigit():
        if int(name) >= len(call.args):
            return None
        start, end = _span(call.args[int(name)].node)
        return Edit(start, end, value)
    if name in call.kwargs:
        start, end = _span(call.kwargs[name].node)
        return Edit(start, end, value)
    for arg in call.args:
        if isinstance(arg, ir.Coll) and arg.keys is not None:
            edits = _set_items(arg, ((name, value),))
            return edits[0] if edits else None
    if language != "python":
        return None
    _, end = _span(call.node)
    inner = text[:end].rstrip()
    if not inner.endswith(")"):
        return None
    close = len(inner) - 1
    before = text[:close].rstrip()
    glue = "" if before.endswith("(") else " " if before.endswith(",") else ", "
    return Edit(len(before), close, f"{glue}{name}={value}")


def _set_items(coll: ir.Coll, wanted: tuple[tuple[str, str], ...]) -> tuple[Edit, ...] | None:
    """Fields of an object literal set to these values, new ones behind its last."""
    if not coll.keys or len(coll.keys) != len(coll.items):
        return None
    places = {
        key.value: item for key, item in zip(coll.keys, coll.items, strict=True) if isinstance(key, ir.Const)
    }
    edits = [Edit(*_span(places[name].node), value) for name, value in wanted if name in places]
    missing = "".join(f", {name}: {value}" for name, value in wanted if name not in places)
    if missing:
        end = _span(coll.items[-1].node)[1]
        edits.append(Edit(end, end, missing))
    return tuple(sorted(edits, key=lambda edit: edit.start))


def _drop(call: ir.Call, name: str, text: str) -> Edit | None:
    if name not in call.kwargs:
        return None
    node = call.kwargs[name].node.parent()
    start, end = _span(node)
    before = text[:start].rstrip()
    if before.endswith(","):
        return Edit(len(before) - 1, end, "")
    after = re.compile(r"\s*,\s*").match(text, end)
    return Edit(start, after.end() if after else end, "")


def _shell_quoted(call: ir.Call) -> tuple[Edit, ...] | None:
    """Quotes each foreign part of a command, where the command is put together in the call itself."""
    pieces = _pieces(call.args[0]) if call.args and not isinstance(call.args[0], ir.Const) else None
    edits: list[Edit] = []
    for piece in pieces or []:
        if not isinstance(piece, str):
            start, end = _span(piece.node)
            edits += [Edit(start, start, "shlex.quote("), Edit(end, end, ")")]
    return tuple(edits) or None


def _parameters(call: ir.Call, language: str, text: str, imports: str) -> tuple[Edit, ...] | None:
    """Values out of the statement and into its parameters, where it is written in the call itself."""
    if not call.args or (len(call.args) > 1 and language != "go") or call.kwargs:
        return None
    at = (
        1 if language == "go" and isinstance(call.func, ir.Attr) and call.func.name.endswith("Context") else 0
    )
    if at >= len(call.args) or len(call.args) > at + 1:
        return None
    pieces = _pieces(call.args[at])
    if pieces is None:
        return None
    lowered = f"{imports} {text}".lower()
    numbered = language == "go" and ("lib/pq" in lowered or "pgx" in lowered or "postgres" in lowered)
    mark = (
        "?" if language != "python" or "sqlite" in lowered or "sqlite" in str(call.func.node.text()) else "%s"
    )
    statement: list[str] = []
    values: list[str] = []
    for number, piece in enumerate(pieces):
        if isinstance(piece, str):
            statement.append(piece)
            continue
        before = statement[-1] if statement else ""
        after = pieces[number + 1] if number + 1 < len(pieces) else ""
        quoted = before.endswith(("'", '"'))
        if quoted:
            if not isinstance(after, str) or not after.startswith(before[-1]):
                return None
            statement[-1] = before[:-1]
            pieces[number + 1] = after[1:]
        # Only a value can be a parameter: a table or column name cannot.
        if not quoted and not re.search(
            r"(?i)(?:=|<|>|\blike|\bin\s*\(|\bvalues\s*\(|,|\blimit|\boffset|\band|\bbetween)\s*$", before
        ):
            return None
        if (
            not quoted
            and re.search(r"(?i)\bselect\b[^=]*,\s*$", "".join(statement))
            and not re.search(r"(?i)\bwhere\b|\bvalues\b", "".join(statement))
        ):
            return None
        values.append(_source(piece.node, text))
        statement.append(f"${len(values)}" if numbered else mark)
    if not values:
        return None
    whole = "".join(statement)
    literal = _quote(whole, language)
    if literal is None:
        return None
    start, end = _span(call.args[at].node)
    given = {
        "python": f"({', '.join(values)}{',' if len(values) == 1 else ''})",
        "go": ", ".join(values),
    }.get(language, f"[{', '.join(values)}]")
    return (Edit(start, end, f"{literal}, {given}"),)


def _pieces(expr: ir.Expr) -> list[str | ir.Expr] | None:
    """Constant and foreign parts of a statement in order; None where it is not built in place."""
    if isinstance(expr, ir.Const):
        return [expr.value] if isinstance(expr.value, str) else None
    if isinstance(expr, ir.Text) or (isinstance(expr, ir.Op) and expr.op == "+"):
        out: list[str | ir.Expr] = []
        for part in expr.parts if isinstance(expr, ir.Text) else expr.args:
            inner = _pieces(part) if isinstance(part, ir.Const | ir.Text | ir.Op) else [part]
            if inner is None:
                return None
            out.extend(inner)
        return out
    if isinstance(expr, ir.Call):
        template: ir.Expr | None = None
        values: list[ir.Expr] = []
        if isinstance(expr.func, ir.Attr) and expr.func.name in ("%", "format") and not expr.kwargs:
            template, values = expr.func.base, list(expr.args)
        elif isinstance(expr.func, ir.Attr) and expr.func.name == "Sprintf" and expr.args:
            template, values = expr.args[0], list(expr.args[1:])
        if isinstance(template, ir.Const) and isinstance(template.value, str):
            parts = re.split(r"%[sdvq]|\{\}", template.value)
            if len(parts) == len(values) + 1:
                mixed: list[str | ir.Expr] = [parts[0]]
                for value, rest in zip(values, parts[1:], strict=True):
                    mixed += [value, rest]
                return mixed
    return None


def _quote(text: str, language: str) -> str | None:
    if "\n" in text:
        if language == "python":
            return f'"""{text}"""' if '"""' not in text and not text.endswith('"') else None
        return f"`{text}`" if "`" not in text else None
    if "\\" in text:
        return None
    if '"' not in text:
        return f'"{text}"'
    return f"'{text}'" if "'" not in text and language != "go" else None
