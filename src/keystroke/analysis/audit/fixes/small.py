"""Small fixes: file modes, disabled settings, XPath variables, assertions, redirects, error messages."""

from __future__ import annotations

import re

from keystroke.analysis.audit.fixes.site import (
    FixEdits,
    FixSite,
    named_children,
    require,
    required_value,
    span,
)
from keystroke.analysis.audit.fixes.sql import as_text, composed_text
from keystroke.analysis.audit.fixes.text_parts import TextHole, compose
from keystroke.analysis.audit.flow.values import CONSTANT, HOLE, LOCAL
from keystroke.analysis.audit.rules.catalog import FixSpec
from keystroke.analysis.audit.source import ir
from keystroke.text import Edit


def mask_mode(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Removes the bits of a file mode that the rule forbids."""
    mask = int(spec.value, 8)
    call, given = required_value(site.call), site.arguments()
    nodes = [given[at] for at in spec.places if at < len(given)]
    nodes += [call.kwargs["mode"].node] if "mode" in call.kwargs else []
    for node in nodes:
        text = node.text()
        found = re.fullmatch(r"0[oO]?([0-7]{3,5})", text)
        if found is None:
            continue
        mode = int(found[1], 8)
        if mode & ~mask & 0o777:
            start, end = span(node)
            return FixEdits(
                (Edit(start, end, f"{text[: -len(found[1])]}{mode & (mask | 0o7000):0{len(found[1])}o}"),)
            )
    return None


def correct_settings(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Corrects wrong settings; adds none."""
    call = site.call
    held: dict[str, ir.Expr] = dict(call.kwargs) if call is not None else {}
    colls = [arg for arg in call.args if isinstance(arg, ir.CollectionExpr)] if call is not None else []
    if isinstance(site.match.subject, ir.CollectionExpr):
        colls.append(site.match.subject)
    for coll in colls:
        for key, item in zip(coll.keys or [], coll.items, strict=False):
            if isinstance(key, ir.ConstExpr) and isinstance(key.value, str):
                held.setdefault(key.value, item)
    edits: list[Edit] = []
    for name, value in spec.keyword.items():
        expr = held.get(name)
        if expr is None or expr.node.text() == value or expr.node.text() not in _WRONG:
            continue
        if expr.node.text() == "ssl.CERT_NONE":  # the constant, not urllib3's text
            require("ca_certs" in held)
            value = "ssl.CERT_REQUIRED"
        edits.append(Edit(*span(expr.node), value))
    return FixEdits(tuple(edits)) if edits else None


_WRONG = frozenset(
    {"False", "false", "None", "null", "True", "true", "0", "1", "0L", "1L", "ssl.CERT_NONE"}
    | {'"CERT_NONE"', "'CERT_NONE'"}
)


def bind_xpath_variables(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """lxml: moves values from the expression to its variables."""
    call, given = required_value(site.call), site.arguments()
    require(not call.kwargs and len(given) == 1 and site.method == "xpath")
    require(any(path == "lxml" or path.startswith("lxml.") for path in site.imports))
    text = composed_text(site, given[0])
    skeleton = text.skeleton
    edits: list[Edit] = []
    values: list[str] = []
    at = 0
    quote = start = None
    for at, char in enumerate(skeleton):
        if quote is None and char in "'\"":
            quote, start = char, at
        elif char == quote and start is not None:
            inside = skeleton[start + 1 : at]
            if HOLE in inside:
                require(inside == HOLE)
                hole = text.atoms[start + 1]
                assert isinstance(hole, TextHole)
                value = required_value(as_text(site, hole))
                values.append(value)
                edits += text.substitute(start, at, f"$p{len(values)}")
            quote = start = None
        elif char == HOLE and quote is None:
            held = text.atoms[at]
            require(
                not text.template and isinstance(held, TextHole) and site.value(held.node).level == CONSTANT
            )
    require(values and quote is None)
    if text.template:
        edits += [*text.unwrap, *text.undouble]
    end = span(given[0])[1]
    listed = "".join(f", p{number}={value}" for number, value in enumerate(values, 1))
    return FixEdits((*edits, Edit(end, end, listed)))


def raise_assertion(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Python: replaces an assertion, which -O removes, by a check that raises the same error."""
    node = site.match.node
    inner = named_children(node)
    require(node.kind() == "assert_statement" and inner and len(inner) <= 2)
    start, end = span(node)
    said = site.source(inner[1]) if len(inner) == 2 else ""
    test = site.source(inner[0])
    require("\n" not in test and "\n" not in said)
    indent = site.indent(start)
    return FixEdits((Edit(start, end, f"if not ({test}):\n{indent}    raise AssertionError({said})"),))


def use_named_temporary_file(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Python: replaces `mktemp(...)` by a temporary file that is created at once."""
    call = required_value(site.call)
    require(not set(call.kwargs) - {"suffix", "prefix", "dir"} and len(call.args) <= 3)
    listed = [
        f"{name}={site.source(arg.node)}"
        for name, arg in zip(("suffix", "prefix", "dir"), call.args, strict=False)
    ]
    listed += [f"{name}={site.source(arg.node)}" for name, arg in call.kwargs.items()]
    start, end = span(call.node)
    callee = site.source(call.func.node)
    base = callee.rpartition(".")[0]
    require(base)
    return FixEdits(
        (Edit(start, end, f"{base}.NamedTemporaryFile({', '.join([*listed, 'delete=False'])}).name"),)
    )


def use_system_random(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Python: replaces the `random` module by the system's random source."""
    edits: list[Edit] = []
    for node in site.match.node.find_all(kind="call"):
        func = node.field("function")
        if func is None or func.kind() != "attribute":
            continue
        base, name = func.field("object"), func.field("attribute")
        if base.kind() == "identifier" and site.value(base).path == "random" and name.text() in _DRAWS:
            edits.append(Edit(*span(base), "secrets.SystemRandom()"))
    return FixEdits(tuple(edits)) if edits else None


_DRAWS = frozenset(
    {"random", "randint", "randrange", "choice", "choices", "sample", "uniform", "getrandbits", "randbytes"}
)


_ERROR = re.compile(r"^(?:@error|err|error|exception)(?:\.stack|\.toString\(\))?$")
_THROWN = re.compile(
    r"^(?:e|ex|err|exception)\.(?:getMessage|toString|getStackTrace|getLocalizedMessage)\(\)$"
)


def hide_error(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Replaces an error in a response by a neutral message."""
    edits: list[Edit] = []
    for node in site.arguments():
        text = compose(node, site.language, site.text)
        if text is not None:
            for at, hole in enumerate(text.atoms):
                if isinstance(hole, TextHole) and _is_error(site, hole.node):
                    edits += text.substitute(at, at, "internal error")
            continue
        edits += [
            Edit(*span(held), '"Internal Server Error"') for held in _values(node) if _is_error(site, held)
        ]
    return FixEdits(tuple(edits)) if edits else None


def _is_error(site: FixSite, node: ir.Syntax) -> bool:
    if node.kind() == "method_invocation":
        return _THROWN.match(node.text()) is not None
    return (
        node.kind() in ("identifier", "member_expression") and _ERROR.match(site.value(node).path) is not None
    )


def _values(node: ir.Syntax) -> list[ir.Syntax]:
    """The values of an object literal, or the expression itself."""
    if node.kind() != "object":
        return [node]
    pairs = [pair.field("value") for pair in node.children() if pair.kind() == "pair"]
    return [value for value in pairs if value is not None]


_OPPOSITE = {"false": "true", "False": "True", '"0"': '"1"', "'0'": "'1'", "0": "1"}


def enable_check(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Enables a check that an assignment disables."""
    right = site.match.node.field("right") if site.call is None else None
    opposite = _OPPOSITE.get(right.text()) if right is not None else None
    return site.replace_node(right, opposite) if opposite else None


_PURE = frozenset(
    {"identifier", "attribute", "subscript", "member_expression", "subscript_expression"}
    | {"call", "call_expression"}
)


def restrict_redirect(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Restricts a redirect to paths of this site; anything else goes to "/"."""
    given = site.arguments()
    nodes = [given[at] for at in spec.places if at < len(given)] if spec.places else given[:1]
    if site.call is None:
        right = site.match.node.field("right")
        nodes = [right] if right is not None else []
    for node in nodes:
        value = site.value(node)
        if node.kind() not in _PURE or value.level <= LOCAL or value.built or value.numeric:
            continue
        source = site.source(node)
        require(
            "\n" not in source and (node.kind() != "call" or re.search(r"\.(?:get|getlist|pop)\(", source))
        )
        plain = node.kind() == "identifier"
        if site.family == "javascript":
            require(node.kind() != "call_expression")
            text = f'/^\\/(?![\\/\\\\\\s])/.test({source}) ? {source} : "/"'
            parent = node.parent()
            text = f"({text})" if parent is not None and parent.kind() != "arguments" else text
        elif site.family == "java":
            require(plain)
            text = f'{source} != null && {source}.matches("/(?![/\\\\\\\\\\\\s]).*") ? {source} : "/"'
        elif plain:
            text = f'{source} if re.match(r"/(?![/\\\\\\s])", str({source})) else "/"'
        elif re.search(r"\btarget\b", site.enclosing_function(node).text()):
            return None
        else:
            text = f'target if re.match(r"/(?![/\\\\\\s])", (target := str({source}))) else "/"'
        return site.replace_node(node, text)
    return None
