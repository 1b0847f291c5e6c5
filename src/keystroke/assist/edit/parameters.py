"""Finds a parameter that a change adds to a function and that nothing in the function uses."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ast_grep_py import SgNode

from keystroke.analysis.syntax import parse_tree, walk

_FUNCTION = re.compile(r"function|method|constructor")
_STUB = re.compile(
    r"(?:pass|\.\.\.|raise NotImplementedError\b.*|throw new (?:\w*Error)\(.*not implemented.*|\{\s*\}|)",
    re.IGNORECASE | re.DOTALL,
)
_MEANT_UNUSED = re.compile(
    r"unused|ignor|placeholder|compatib|reserved|for later|signature|interface|override|callback|stub",
    re.IGNORECASE,
)
# An instruction that does not say what the parameter is for.
_ONLY_ADD = re.compile(
    r"\s*(?:please\s+)?add\s+(?:an?\s+|the\s+)?(?:\w+\s+){0,3}?(?:parameter|argument|param|arg|keyword)s?\b"
    r"[^.;:]{0,60}?(?:\bto\s+[`'\"]?[\w.]+(?:\(\))?[`'\"]?)?"
    r"(?:\s*,?\s*(?:with\s+(?:a\s+)?default(?:\s+value)?(?:\s+of)?|defaulting\s+to|default)\s+\S+)?\s*[.!]?\s*",
    re.IGNORECASE,
)


def find_unused_parameter(
    old: str, new: str, language: str | None, instruction: str
) -> tuple[str, str] | None:
    """The function and the parameter that the change adds to it and that its body does not use."""
    if language is None or _MEANT_UNUSED.search(instruction) or _ONLY_ADD.fullmatch(instruction):
        return None
    before = {name: set(parameters) for name, parameters, _ in _list_functions(old, language)}
    for name, parameters, body in _list_functions(new, language):
        if name not in before or not body:
            continue
        for parameter, text in parameters.items():
            fresh = parameter not in before[name] and not parameter.startswith("_")
            others = " ".join(part for other, part in parameters.items() if other != parameter)
            if (
                fresh
                and not text.startswith(("*", "..."))
                and not has_name(parameter, body)
                and not has_name(parameter, others)
            ):
                # A renamed parameter whose old name is still used is another fault.
                return name, parameter
    return None


def has_name(name: str, text: str) -> bool:
    return re.search(rf"(?<![\w$]){re.escape(name)}(?![\w$])", text) is not None


def _list_functions(text: str, language: str) -> Iterator[tuple[str, Mapping[str, str], str]]:
    """Each function: its name with those of the definitions around it, its parameters with their text, and
    its body; the body is empty where it is only a stub."""
    for node in walk(parse_tree(text, language)):
        if not _FUNCTION.search(node.kind()):
            continue
        head = node.field("declarator") or node  # C and C++ put name and parameters there
        name = head.field("name") or head.field("declarator")
        parameters, body = head.field("parameters"), node.field("body")
        if name is None or parameters is None or body is None:
            continue
        owners = [
            inner.text()
            for outer in node.ancestors()
            if (inner := outer.field("name")) is not None
            and re.search(r"class|function|impl|method", outer.kind())
        ]
        found = {}
        for child in parameters.children():
            if (declared := _parameter_name(child)) is not None:
                found[declared] = child.text()
        yield ".".join([*reversed(owners), name.text()]), found, _statement_text(body, language)


def _statement_text(body: SgNode, language: str) -> str:
    """The text of a body without comments and docstrings; empty for a stub."""
    parts = []
    for child in body.children():
        string = language == "python" and [c.kind() for c in child.children()] == ["string"]
        if "comment" not in child.kind() and not string:
            parts.append(child.text())
    text = "\n".join(parts).strip()
    inner = text.removeprefix("{").removesuffix("}").strip() if text.startswith("{") else text
    return "" if _STUB.fullmatch(inner) else text


def _parameter_name(node: SgNode) -> str | None:
    """The name that a parameter declares; None for brackets, patterns and `self`."""
    for _ in range(4):
        if node.kind() in ("identifier", "simple_identifier", "variable_name"):
            return None if node.text() in ("self", "cls", "this") else node.text()
        inner = node.field("pattern") or node.field("name") or node.field("declarator") or node.field("left")
        if inner is None and node.kind() == "typed_parameter":
            inner = next(iter(node.children()), None)
        if inner is None:
            return None
        node = inner
    return None
