"""JavaScript and TypeScript fixes: element text, options, object keys, random numbers."""

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
from keystroke.analysis.audit.fixes.text_parts import compose
from keystroke.analysis.audit.flow.values import REMOTE
from keystroke.analysis.audit.rules.catalog import FixSpec
from keystroke.analysis.audit.source import ir
from keystroke.text import Edit

_TEXTUAL = re.compile(
    r"(?i)name|pass|mail|login|user|token|title|slug|code|word|text|search|phone|city|role|status|type"
)
_RISKY = ("__proto__", "constructor", "prototype")


def use_text_property(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Replaces `innerHTML` by `textContent` if the value is only a client's text."""
    node = site.match.node
    left, right = node.field("left"), node.field("right")
    require(node.kind() == "assignment_expression" and left is not None and right is not None)
    name = left.field("property")
    value = site.value(right)
    require(
        name is not None
        and name.text() == "innerHTML"
        and not value.built
        and not compose(right, site.language, site.text)
    )
    require(value.level >= REMOTE or spec.suggest)
    return site.replace_node(name, "textContent")


def use_text_method(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Replaces `.html(value)` by `.text(value)` if the value is only a client's text."""
    call, given = required_value(site.call), site.arguments()
    require(len(given) == 1 and site.method == "html")
    value = site.value(given[0])
    name = call.func.node.field("property")
    require(
        name is not None
        and not value.built
        and value.level >= REMOTE
        and not compose(given[0], site.language, site.text)
    )
    return site.replace_node(name, "text")


def set_options(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Sets options in the object passed to a call, or adds one."""
    given = site.arguments()
    require(given)
    wanted = spec.keyword
    last = given[-1]
    if last.kind() == "object":
        held = {_key(pair): pair for pair in last.children() if pair.kind() == "pair"}
        require(not any(child.kind() == "spread_element" for child in last.children()))
        edits = []
        for name, pair in held.items():
            value = pair.field("value")
            if name in wanted and value is not None and value.text() != wanted[name]:
                require(value.text() in ("true", "false"))
                edits.append(Edit(*span(value), wanted[name]))
        missing = [f"{name}: {value}" for name, value in wanted.items() if name not in held]
        if missing:
            start, end = span(last)
            inner = site.text[start + 1 : end - 1]
            if not inner.strip():
                edits.append(Edit(start, end, f"{{ {', '.join(missing)} }}"))
            else:
                at = start + 1 + len(inner) - len(inner.lstrip())
                edits.append(Edit(at, at, f"{', '.join(missing)}, "))
        return FixEdits(tuple(edits)) if edits else None
    require(len(given) == 2)
    end = span(last)[1]
    listed = ", ".join(f"{name}: {value}" for name, value in wanted.items())
    return site.insert_at(end, f", {{ {listed} }}")


def _key(pair: ir.Syntax) -> str:
    name = pair.field("key")
    return name.text().strip("\"'") if name is not None else ""


def convert_to_text(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Converts the values of a document query to text, so that they cannot be operators."""
    given = site.arguments()
    require(given and given[0].kind() == "object")
    edits: list[Edit] = []
    for pair in given[0].children():
        require(
            not (pair.kind() in ("shorthand_property_identifier", "spread_element") and site.is_open(pair))
        )
        if pair.kind() != "pair":
            continue
        value = pair.field("value")
        if value is None or not site.is_open(value):
            continue
        require(value.kind() in ("member_expression", "identifier", "subscript_expression"))
        origin = site.value(value).origin
        sent_as_text = re.search(r"\.(?:query|params)\b", origin) is not None
        require(sent_as_text or _TEXTUAL.search(_key(pair)))
        start, end = span(value)
        edits += [Edit(start, start, "String("), Edit(end, end, ")")]
    return FixEdits(tuple(edits)) if edits else None


def guard_key(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Skips prototype keys in a loop over foreign keys."""
    node = site.match.node
    left = node.field("left")
    key = required_value(left.field("index") if left is not None else None)
    require(key.kind() == "identifier" and left.field("object").kind() == "identifier")
    name = key.text()
    test = " || ".join(f'{name} === "{risky}"' for risky in _RISKY)
    at = node
    while (parent := at.parent()) is not None:
        at = parent
        if at.kind() == "for_in_statement":
            target, body = at.field("left"), at.field("body")
            if target is None or target.text() != name or body is None or body.kind() != "statement_block":
                continue
            return _first(site, body, f"if ({test}) continue;")
        if at.kind() in (
            "arrow_function",
            "function_expression",
            "function_declaration",
            "method_definition",
        ):
            return _returning(site, at, name, test)
    return None


def _returning(site: FixSite, function: ir.Syntax, name: str, test: str) -> FixEdits | None:
    """The same for a callback of forEach, which returns early."""
    parent = function.parent()
    called = parent.parent() if parent is not None and parent.kind() == "arguments" else None
    func = called.field("function") if called is not None else None
    require(func is not None and func.text().endswith(".forEach"))
    single, listed, body = function.field("parameter"), function.field("parameters"), function.field("body")
    names = (
        [single.text()]
        if single is not None
        else [child.text() for child in (named_children(listed) if listed is not None else [])]
    )
    require(names[:1] == [name] and body is not None and body.kind() == "statement_block")
    return _first(site, body, f"if ({test}) return;")


def _first(site: FixSite, body: ir.Syntax, statement: str) -> FixEdits | None:
    """Inserts a statement at the start of a block."""
    inner = named_children(body)
    require(inner)
    at = span(inner[0])[0]
    line = site.text.rfind("\n", 0, at) + 1
    glue = f"\n{site.text[line:at]}" if not site.text[line:at].strip() else " "
    return site.insert_at(at, f"{statement}{glue}")


def replace_every_match(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Makes `.replace(text, ...)` replace all occurrences."""
    given = site.arguments()
    require(len(given) == 2 and site.method == "replace")
    if given[0].kind() == "string":
        value = site.value(given[0]).const
        require(isinstance(value, str) and value)
        escaped = re.sub(r"[\\^$.*+?()\[\]{}|/]", r"\\\g<0>", str(value))
        require(escaped.isprintable() and not ("$" in given[1].text() and given[1].kind() != "string"))
        return site.replace_node(given[0], f"/{escaped}/g")  # replaceAll needs ES2021
    if given[0].kind() == "regex":
        end = span(given[0])[1]
        return site.insert_at(end, "g")
    return None


def use_secure_random(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Replaces `Math.random()` by a cryptographic source of the same range."""
    drawn = (
        'require("crypto").randomBytes(6).readUIntBE(0, 6) / 0x1000000000000'
        if re.search(r"\brequire\s*\(", site.text) or any(path in _NODE for path in site.imports)
        else "crypto.getRandomValues(new Uint32Array(1))[0] / 0x100000000"
    )
    require(not ("require" in drawn and _is_module(site)))
    require(not ("require" not in drawn and re.search(r"\bcrypto\s*=", site.text)))
    edits = [
        Edit(*span(node), f"({drawn})")
        for node in site.match.node.find_all(kind="call_expression")
        if node.text() == "Math.random()"
    ]
    return FixEdits(tuple(edits), ("require",) if "require" in drawn else ()) if edits else None


_NODE = frozenset(
    {"crypto", "fs", "http", "https", "express", "path", "util", "child_process", "koa", "fastify"}
)


def _is_module(site: FixSite) -> bool:
    return re.search(r"(?m)^\s*(?:import\s+[\w{*\"']|export\s)", site.text) is not None


def use_buffer_factory(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Replaces `new Buffer(...)` by `Buffer.from` for text and `Buffer.alloc` for a size."""
    call, given = required_value(site.call), site.arguments()
    require(given and call.new)
    value = site.value(given[0])
    texts = len(given) == 2 and given[1].kind() == "string"
    if texts or isinstance(value.const, str):
        name = "Buffer.from"
    elif value.numeric or isinstance(value.const, int):
        name = "Buffer.alloc"
    else:
        return None
    start, _ = span(call.node)
    listed = call.node.field("arguments")
    return FixEdits((Edit(start, span(listed)[0], name),))


def add_noopener(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Adds rel="noopener noreferrer" to a link."""
    for attribute in site.match.node.children():
        if attribute.kind() == "jsx_attribute" and attribute.text().startswith("target"):
            end = span(attribute)[1]
            return site.insert_at(end, ' rel="noopener noreferrer"')
    return None
