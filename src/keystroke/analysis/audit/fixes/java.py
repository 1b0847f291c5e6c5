"""Java fixes: prepared statements, XML parser settings, cookie flags, commands as lists.

Statements are added only next to a simple statement of the same block, so that they run exactly when it does
and throw only exceptions that it can throw too.
"""

from __future__ import annotations

import re

from keystroke.analysis.audit.fixes import sql
from keystroke.analysis.audit.fixes.shell import command_words, composed_command
from keystroke.analysis.audit.fixes.site import (
    FixEdits,
    FixSite,
    NoFix,
    named_children,
    require,
    required_value,
    span,
)
from keystroke.analysis.audit.fixes.text_parts import TextComposition
from keystroke.analysis.audit.flow.knowledge import XML_FACTORIES
from keystroke.analysis.audit.rules.catalog import FixSpec
from keystroke.analysis.audit.source import ir
from keystroke.text import Edit

_PLAIN = ("local_variable_declaration", "expression_statement", "return_statement")
_LATER = re.compile(
    r"\.\s*(?:getResultSet|getUpdateCount|getGeneratedKeys|getMoreResults|getWarnings|addBatch)\b"
)
_QUERIES = ("createQuery", "createNativeQuery", "createSQLQuery")
_TEMPLATE = re.compile(r"^(?:queryFor\w+|query|update)$")


def bind_parameters(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Moves values from a SQL statement to its parameters."""
    call, given = required_value(site.call), site.arguments()
    if not given or not isinstance(call.func, ir.AttrExpr):
        raise NoFix
    statement = sql.composed_text(site, given[0])
    require(statement.holes)
    bound = sql.bindable_values(site, statement)
    first = _marks(statement, bound)
    method = site.method
    if method in _QUERIES:
        return _query(site, statement, bound, method)
    edits = sql.place_marks(statement, bound, "?")
    if method in ("executeQuery", "executeUpdate", "execute") and len(given) == 1:
        return _prepare_statement(site, call, given[0], edits, bound, first)
    if method in ("prepareStatement", "prepareCall"):
        return _set_behind(site, call, edits, bound, first)
    base = site.source(call.func.base.node)
    if _TEMPLATE.match(method) and re.search(r"(?i)jdbc\w*$|template$", base) and first == 1:
        end = span(given[-1])[1]
        listed = "".join(f", {item.value}" for item in bound)
        require(
            not any(node.kind() in ("array_creation_expression", "lambda_expression") for node in given[1:])
        )
        return FixEdits((*edits, Edit(end, end, listed)))
    return None


def _marks(statement: TextComposition, bound: list[sql.BoundValue]) -> int:
    """The number of the first new parameter, if no existing one would be renumbered."""
    skeleton = statement.skeleton
    plain = re.sub(r"'[^']*'", lambda found: " " * len(found.group()), skeleton)
    there = [at for at, char in enumerate(plain) if char == "?"]
    require(all(at <= bound[0].first for at in there))
    return len(there) + 1


def _prepare_statement(
    site: FixSite,
    call: ir.CallExpr,
    holder: ir.Syntax,
    edits: list[Edit],
    bound: list[sql.BoundValue],
    first: int,
) -> FixEdits | None:
    """Replaces `statement.execute(text)` by a prepared statement of the same connection."""
    func = call.func
    assert isinstance(func, ir.AttrExpr)
    owner = func.base.node
    scope = site.enclosing_function(call.node).text()
    require(owner.kind() == "identifier" and first == 1 and not _LATER.search(scope))
    name = owner.text()
    require(
        not re.search(rf"\b{name}\s*\.\s*set\w+\(", scope)
        and re.search(rf"\bStatement\s+{name}\b", site.text)
    )
    place = _statement(call.node)
    fresh = _fresh(site, "prepared")
    at = span(place)[0]
    indent = site.indent(at)
    moved = [edit for edit in edits if span(holder)[0] <= edit.start < span(holder)[1]]
    text = _apply(site.source(holder), moved, span(holder)[0])
    lines = [f"java.sql.PreparedStatement {fresh} = {name}.getConnection().prepareStatement({text});"]
    lines += [f"{fresh}.{_setter(number, item)};" for number, item in enumerate(bound, 1)]
    inserted = "".join(f"{line}\n{indent}" for line in lines)
    start, end = span(call.node)
    kept = [edit for edit in edits if edit not in moved]
    replaced = Edit(start, end, f"{fresh}.{func.name}()")
    return FixEdits((*kept, Edit(at, at, inserted), replaced))


def _apply(text: str, edits: list[Edit], shift: int) -> str:
    for edit in sorted(edits, key=lambda item: item.start, reverse=True):
        text = text[: edit.start - shift] + edit.text + text[edit.end - shift :]
    return text


def _setter(number: int, item: sql.BoundValue) -> str:
    kind = "setString" if item.last > item.first else "setObject"
    return f"{kind}({number}, {item.value})"


def _set_behind(
    site: FixSite, call: ir.CallExpr, edits: list[Edit], bound: list[sql.BoundValue], first: int
) -> FixEdits | None:
    """Sets the parameters of a prepared statement after its declaration."""
    declared = required_value(ir.outside_casts(call.node))
    if declared.kind() == "resource":
        name, tried = declared.field("name"), declared.parent()
        body = tried.parent().field("body") if tried is not None and tried.parent() is not None else None
        inner = named_children(body) if body is not None else []
        require(name is not None and inner)
        at = span(inner[0])[0]
        glue = f"\n{site.indent(at)}"
        lines = [f"{name.text()}.{_setter(number, item)};{glue}" for number, item in enumerate(bound, first)]
        return FixEdits((*edits, Edit(at, at, "".join(lines))))
    holder = declared.field("name") if declared.kind() == "variable_declarator" else declared.field("left")
    require(declared.kind() in ("variable_declarator", "assignment_expression") and holder is not None)
    require(holder.kind() == "identifier")
    place = _statement(call.node)
    require(place.kind() != "return_statement")
    at = span(place)[1]
    glue = f"\n{site.indent(span(place)[0])}"
    lines = [f"{glue}{holder.text()}.{_setter(number, item)};" for number, item in enumerate(bound, first)]
    return FixEdits((*edits, Edit(at, at, "".join(lines))))


def _query(
    site: FixSite, statement: TextComposition, bound: list[sql.BoundValue], method: str
) -> FixEdits | None:
    """JPA and Hibernate: sets the parameters of the query."""
    named = method != "createNativeQuery"
    edits: list[Edit] = []
    require("?" not in statement.skeleton and not re.search(r":\w", statement.skeleton))
    listed = ""
    for number, item in enumerate(bound, 1):
        edits += statement.substitute(item.first, item.last, f":p{number}" if named else f"?{number}")
        listed += (
            f'.setParameter("p{number}", {item.value})' if named else f".setParameter({number}, {item.value})"
        )
    if statement.template:
        require(len(bound) == len(statement.holes))
        edits += [*statement.unwrap, *statement.undouble]
    end = span(site.match.node)[1]
    return FixEdits((*edits, Edit(end, end, listed)))


def _statement(node: ir.Syntax) -> ir.Syntax:
    """The simple statement of a block that evaluates a call exactly once."""
    at = node
    while (parent := at.parent()) is not None:
        require(parent.kind() not in ("lambda_expression", "ternary_expression", "resource", "class_body"))
        if parent.kind() in ("block", "constructor_body", "switch_block_statement_group"):
            require(at.kind() in _PLAIN)
            return at
        at = parent
    raise NoFix


def _fresh(site: FixSite, name: str) -> str:
    """An unused name."""
    number = 1
    chosen = name
    while re.search(rf"\b{chosen}\b", site.text):
        number += 1
        chosen = f"{name}{number}"
    return chosen


def insert_before(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Inserts missing statements before the call; `{0}` is its first argument, a name."""
    given = site.arguments()
    place = _statement(site.match.node)
    require(place.kind() != "return_statement")
    require(given and given[0].kind() == "identifier")
    name = given[0].text()
    wanted = [line.strip() for line in spec.statement.replace("{0}", name).split(";") if line.strip()]
    lines = [line for line in wanted if f"{line.split('(', 1)[0]}(" not in site.text]
    at = span(place)[0]
    return site.insert_at(at, "".join(f"{line};\n{site.indent(at)}" for line in lines)) if lines else None


def _settings(kind: str, name: str) -> list[str]:
    """The statements that disable external entities of a parser."""
    factory = required_value(XML_FACTORIES.get(kind))
    require(factory.settings)
    return [f"{name}.{setting};" for setting in factory.settings]


_MADE = re.compile(r"([\w.]+)\.new(?:Default)?(?:Instance|Factory)\(\)")
_CREATED = re.compile(r"new\s+([\w.]+)\(\)")


def disable_external_entities(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Disables external entities of an XML parser before it is used."""
    call = required_value(site.call)
    place = _statement(site.match.node)
    if not isinstance(call.func, ir.AttrExpr):
        raise NoFix
    owner = call.func.base.node
    kind = site.value(owner).path.split(".", 1)[0].removesuffix("()")
    at = span(place)[0]
    indent = site.indent(at)
    if owner.kind() == "identifier":
        lines = _settings(kind, owner.text())
        return site.insert_at(at, "".join(f"{line}\n{indent}" for line in lines))
    made = site.source(owner)
    found = required_value(_MADE.fullmatch(made) or _CREATED.fullmatch(made))
    require(found[1].rsplit(".", 1)[-1] == kind)
    fresh = _fresh(site, "factory")
    lines = [f"{found[1]} {fresh} = {made};", *_settings(kind, fresh)]
    return FixEdits((Edit(at, at, "".join(f"{line}\n{indent}" for line in lines)), Edit(*span(owner), fresh)))


def exec_word_list(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Passes the words of `exec("tool " + value)` as an array."""
    given = site.arguments()
    require(given and site.method == "exec")
    text = composed_command(site, given[0])
    require(not any(quote in text.skeleton for quote in "'\""))
    listed = command_words(site, text)
    require(span(text.node) == span(given[0]))
    listed = [
        word if word.startswith('"') or _is_text(site, word) else f"String.valueOf({word})" for word in listed
    ]
    start, end = span(given[0])
    return FixEdits((Edit(start, end, f"new String[] {{{', '.join(listed)}}}"),))


def _is_text(site: FixSite, word: str) -> bool:
    return '"' in word or re.search(rf"\bString\s+{re.escape(word)}\b", site.text) is not None


def use_private_temporary_file(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Replaces `File.createTempFile` by `Files.createTempFile`, which only the owner can read."""
    call, given = required_value(site.call), site.arguments()
    require(site.method == "createTempFile" and len(given) in (2, 3))
    texts = [site.source(node) for node in given]
    if len(texts) == 3:
        require(texts[2] != "null")
        folder = texts[2] if re.fullmatch(r"[\w.()]+", texts[2]) else f"({texts[2]})"
        texts = [f"{folder}.toPath()", texts[0], texts[1]]
    return site.replace_node(call.node, f"java.nio.file.Files.createTempFile({', '.join(texts)}).toFile()")
