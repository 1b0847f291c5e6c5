"""Java fixes: prepared statements, XML parser settings, cookie flags, commands as lists.

Statements are added only next to a simple statement of the same block, so that they run exactly when it does
and throw only exceptions that it can throw too.
"""

from __future__ import annotations

import re

from keystroke.analysis.audit.fixes import sql
from keystroke.analysis.audit.fixes.shell import command_words, composed_command
from keystroke.analysis.audit.fixes.site import FixEdits, FixSite, named_children, span
from keystroke.analysis.audit.fixes.text_parts import TextComposition, compose
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
    call, given = site.call, site.arguments()
    if call is None or not given or not isinstance(call.func, ir.AttrExpr):
        return None
    written = sql.resolve_variable(site, given[0])
    statement = compose(written, site.language, site.text)
    if statement is None or not statement.holes:
        return None
    if span(written) != span(given[0]) and not all(
        site.is_unchanged(hole.node, written) for hole in statement.holes
    ):
        return None
    bound = sql.bindable_values(site, statement)
    if not bound:
        return None
    first = _marks(statement, bound)
    if first is None:
        return None
    method = site.method
    if method in _QUERIES:
        return _query(site, statement, bound, method)
    edits = sql.place_marks(statement, bound, "?")
    if edits is None:
        return None
    if method in ("executeQuery", "executeUpdate", "execute") and len(given) == 1:
        return _prepared(site, call, given[0], edits, bound, first)
    if method in ("prepareStatement", "prepareCall"):
        return _set_behind(site, call, edits, bound, first)
    base = site.source(call.func.base.node)
    if _TEMPLATE.match(method) and re.search(r"(?i)jdbc\w*$|template$", base) and first == 1:
        end = span(given[-1])[1]
        listed = "".join(f", {item.value}" for item in bound)
        if any(node.kind() in ("array_creation_expression", "lambda_expression") for node in given[1:]):
            return None
        return FixEdits((*edits, Edit(end, end, listed)))
    return None


def _marks(statement: TextComposition, bound: list[sql.BoundValue]) -> int | None:
    """The number of the first new parameter; None if existing ones would be renumbered."""
    skeleton = statement.skeleton
    plain = re.sub(r"'[^']*'", lambda found: " " * len(found.group()), skeleton)
    there = [at for at, char in enumerate(plain) if char == "?"]
    if any(at > bound[0].first for at in there):
        return None
    return len(there) + 1


def _prepared(
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
    if owner.kind() != "identifier" or first != 1 or _LATER.search(scope):
        return None
    name = owner.text()
    if re.search(rf"\b{name}\s*\.\s*set\w+\(", scope) or not re.search(rf"\bStatement\s+{name}\b", site.text):
        return None
    place = _statement(site, call.node)
    if place is None:
        return None
    fresh = _fresh(site, "prepared")
    at = span(place)[0]
    indent = site.indent(at)
    moved = [edit for edit in edits if span(holder)[0] <= edit.start < span(holder)[1]]
    text = _applied(site.source(holder), moved, span(holder)[0])
    lines = [f"java.sql.PreparedStatement {fresh} = {name}.getConnection().prepareStatement({text});"]
    lines += [f"{fresh}.{_setter(number, item)};" for number, item in enumerate(bound, 1)]
    inserted = "".join(f"{line}\n{indent}" for line in lines)
    start, end = span(call.node)
    kept = [edit for edit in edits if edit not in moved]
    replaced = Edit(start, end, f"{fresh}.{func.name}()")
    return FixEdits((*kept, Edit(at, at, inserted), replaced))


def _applied(text: str, edits: list[Edit], shift: int) -> str:
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
    declared = site.outside_casts(call.node)
    if declared is None:
        return None
    if declared.kind() == "resource":
        name, tried = declared.field("name"), declared.parent()
        body = tried.parent().field("body") if tried is not None and tried.parent() is not None else None
        inner = named_children(body) if body is not None else []
        if name is None or not inner:
            return None
        at = span(inner[0])[0]
        glue = f"\n{site.indent(at)}"
        lines = [f"{name.text()}.{_setter(number, item)};{glue}" for number, item in enumerate(bound, first)]
        return FixEdits((*edits, Edit(at, at, "".join(lines))))
    holder = declared.field("name") if declared.kind() == "variable_declarator" else declared.field("left")
    if declared.kind() not in ("variable_declarator", "assignment_expression") or holder is None:
        return None
    if holder.kind() != "identifier":
        return None
    place = _statement(site, call.node)
    if place is None or place.kind() == "return_statement":
        return None
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
    if "?" in statement.skeleton or re.search(r":\w", statement.skeleton):
        return None
    listed = ""
    for number, item in enumerate(bound, 1):
        step = statement.substitute(item.first, item.last, f":p{number}" if named else f"?{number}")
        if step is None:
            return None
        edits += step
        listed += (
            f'.setParameter("p{number}", {item.value})' if named else f".setParameter({number}, {item.value})"
        )
    if statement.template:
        if len(bound) != len(statement.holes):
            return None
        edits += [*statement.unwrap, *statement.undouble]
    end = span(site.match.node)[1]
    return FixEdits((*edits, Edit(end, end, listed)))


def _statement(site: FixSite, node: ir.Syntax) -> ir.Syntax | None:
    """The simple statement of a block that evaluates a call exactly once."""
    at = node
    while (parent := at.parent()) is not None:
        if parent.kind() in ("lambda_expression", "ternary_expression", "resource", "class_body"):
            return None
        if parent.kind() in ("block", "constructor_body", "switch_block_statement_group"):
            return at if at.kind() in _PLAIN else None
        at = parent
    return None


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
    call = site.call
    place = _statement(site, site.match.node)
    if call is None or place is None or place.kind() == "return_statement":
        return None
    if not given or given[0].kind() != "identifier":
        return None
    name = given[0].text()
    wanted = [line.strip() for line in spec.statement.replace("{0}", name).split(";") if line.strip()]
    lines = [line for line in wanted if f"{line.split('(', 1)[0]}(" not in site.text]
    at = span(place)[0]
    return site.insert_at(at, "".join(f"{line};\n{site.indent(at)}" for line in lines)) if lines else None


def _settings(kind: str, name: str) -> list[str] | None:
    """The statements that disable external entities of a parser."""
    factory = XML_FACTORIES.get(kind)
    if factory is None or not factory.settings:
        return None
    return [f"{name}.{setting};" for setting in factory.settings]


_MADE = re.compile(r"([\w.]+)\.new(?:Default)?(?:Instance|Factory)\(\)")
_CREATED = re.compile(r"new\s+([\w.]+)\(\)")


def disable_external_entities(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Disables external entities of an XML parser before it is used."""
    call = site.call
    place = _statement(site, site.match.node)
    if call is None or place is None or not isinstance(call.func, ir.AttrExpr):
        return None
    owner = call.func.base.node
    kind = site.value(owner).path.split(".", 1)[0].removesuffix("()")
    at = span(place)[0]
    indent = site.indent(at)
    if owner.kind() == "identifier":
        lines = _settings(kind, owner.text())
        if lines is None:
            return None
        return site.insert_at(at, "".join(f"{line}\n{indent}" for line in lines))
    made = site.source(owner)
    found = _MADE.fullmatch(made) or _CREATED.fullmatch(made)
    if found is None or found[1].rsplit(".", 1)[-1] != kind:
        return None
    fresh = _fresh(site, "factory")
    lines = _settings(kind, fresh)
    if lines is None:
        return None
    lines = [f"{found[1]} {fresh} = {made};", *lines]
    return FixEdits((Edit(at, at, "".join(f"{line}\n{indent}" for line in lines)), Edit(*span(owner), fresh)))


def exec_word_list(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Passes the words of `exec("tool " + value)` as an array."""
    given = site.arguments()
    if not given or site.method != "exec":
        return None
    text = composed_command(site, given[0])
    if text is None or any(quote in text.skeleton for quote in "'\""):
        return None
    listed = command_words(site, text)
    if listed is None or len(listed) < 2 or not listed[0].startswith('"'):
        return None
    if span(text.node) != span(given[0]):
        return None
    listed = [
        word if word.startswith('"') or _is_text(site, word) else f"String.valueOf({word})" for word in listed
    ]
    start, end = span(given[0])
    return FixEdits((Edit(start, end, f"new String[] {{{', '.join(listed)}}}"),))


def _is_text(site: FixSite, word: str) -> bool:
    return '"' in word or re.search(rf"\bString\s+{re.escape(word)}\b", site.text) is not None


def use_private_temporary_file(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Replaces `File.createTempFile` by `Files.createTempFile`, which only the owner can read."""
    call, given = site.call, site.arguments()
    if call is None or site.method != "createTempFile" or len(given) not in (2, 3):
        return None
    texts = [site.source(node) for node in given]
    if len(texts) == 3:
        if texts[2] == "null":
            return None
        folder = texts[2] if re.fullmatch(r"[\w.()]+", texts[2]) else f"({texts[2]})"
        texts = [f"{folder}.toPath()", texts[0], texts[1]]
    return site.replace_node(call.node, f"java.nio.file.Files.createTempFile({', '.join(texts)}).toFile()")
