"""Updates the calls of a function whose parameters changed.

Parameters are compared by name. One added without a default is added to every call, one removed is removed,
one renamed is renamed in keyword arguments. Calls with spread arguments are left alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from ast_grep_py import SgNode

from keystroke.analysis.syntax import parse_tree, walk
from keystroke.assist.next_edit.burst import Burst
from keystroke.text import Edit

_LISTS = frozenset({"parameters", "formal_parameters", "parameter_list"})
_CALLS = frozenset({"call", "call_expression", "method_invocation"})
_SPREAD = frozenset({"list_splat", "dictionary_splat", "spread_element", "variadic_argument"})
_RECEIVERS = frozenset({"self", "cls", "this"})


@dataclass(frozen=True, slots=True)
class SignatureParameter:
    name: str
    optional: bool


@dataclass(frozen=True, slots=True)
class Signature:
    name: str
    parameters: tuple[SignatureParameter, ...]
    method: bool
    start: int


def find_changed_calls(burst: Burst, language: str, text: str | None = None) -> tuple[str, list[Edit]] | None:
    """The function's name and the edits of its calls in `text`, another file of the same language; None: in
    `burst.after`."""
    old = _find_signature(parse_tree(burst.before, language), burst.start, burst.old_end)
    if old is None or (text is not None and old.name not in text):
        return None
    root = parse_tree(burst.after, language)
    new = _find_signature(root, burst.start, burst.new_end)
    if new is None or new.name != old.name or new.parameters == old.parameters:
        return None
    return _call_edits(root if text is None else parse_tree(text, language), old, new)


def _find_signature(root: SgNode, start: int, end: int) -> Signature | None:
    """The signature whose parameter list holds [start, end]."""
    for node in walk(root):
        if node.kind() not in _LISTS:
            continue
        span = node.range()
        if span.start.index < start and end < span.end.index:
            function = node.parent()
            name = function.field("name") if function is not None else None
            if function is None or name is None:
                return None
            parameters = tuple(p for child in node.children() if (p := _read_parameter(child)) is not None)
            method = bool(parameters) and parameters[0].name in _RECEIVERS
            return Signature(name.text(), parameters[method:], method, name.range().start.index)
    return None


def _read_parameter(node: SgNode) -> SignatureParameter | None:
    if not node.is_named() or "comment" in node.kind():
        return None
    if node.kind() in ("identifier", "self_parameter"):
        return SignatureParameter(node.text(), False)
    if "splat" in node.kind() or "rest" in node.kind() or "separator" in node.kind():
        return SignatureParameter(node.text(), True)
    name = node.field("name") or node.field("pattern") or node.field("left")
    if name is None:
        name = next((c for c in node.children() if c.kind() == "identifier"), None)
    if name is None:
        return None
    optional = node.field("value") is not None or node.field("right") is not None
    return SignatureParameter(name.text(), optional or node.kind() == "optional_parameter")


def _call_edits(root: SgNode, old: Signature, new: Signature) -> tuple[str, list[Edit]] | None:
    before, after = [p.name for p in old.parameters], [p.name for p in new.parameters]
    added = [(i, p) for i, p in enumerate(new.parameters) if p.name not in before]
    removed = [(i, name) for i, name in enumerate(before) if name not in after]
    if len(added) == len(removed) == 1 and added[0][0] == removed[0][0]:
        rename = {removed[0][1]: added[0][1].name}
        added, removed = [], []
    else:
        rename = {}
    edits: list[Edit] = []
    for node in walk(root):
        if node.kind() in _CALLS and _is_call_of(node, new):
            edits += _edits_of_call(node, len(before), added, removed, rename)
    return (new.name, edits) if edits else None


def _is_call_of(node: SgNode, signature: Signature) -> bool:
    function = node.field("function") or node.field("name")
    if function is None:
        return False
    called: str = function.text()
    return called.endswith(f".{signature.name}") if signature.method else called == signature.name


def _edits_of_call(
    call: SgNode,
    count: int,
    added: list[tuple[int, SignatureParameter]],
    removed: list[tuple[int, str]],
    rename: dict[str, str],
) -> list[Edit]:
    inner = call.field("arguments")
    if inner is None:
        return []
    arguments = [c for c in inner.children() if c.is_named() and "comment" not in c.kind()]
    if any(argument.kind() in _SPREAD for argument in arguments):
        return []
    named = {name.text(): c for c in arguments if (name := c.field("name")) is not None and "=" in c.text()}
    plain = [c for c in arguments if c not in named.values()]
    edits: list[Edit] = []
    for name, argument in named.items():
        if name in rename:
            start = argument.range().start.index
            edits.append(Edit(start, start + len(name), rename[name]))
    if added and len(arguments) > count - len(removed):
        return edits  # it has been brought up to date already
    for index, name in removed:
        dropped = named.get(name) or (plain[index] if index < len(plain) else None)
        if dropped is not None and dropped in arguments:
            edits.append(_remove_argument(arguments, arguments.index(dropped)))
    for index, parameter in added:
        if parameter.optional or parameter.name in named:
            continue
        if index < len(plain):
            at = plain[index].range().start.index
            edits.append(Edit(at, at, f"{parameter.name}, "))
        else:
            at = arguments[-1].range().end.index if arguments else inner.range().start.index + 1
            text = f"{parameter.name}={parameter.name}" if named else parameter.name
            edits.append(Edit(at, at, f", {text}" if arguments else text))
    return edits


def _remove_argument(arguments: list[SgNode], index: int) -> Edit:
    """Take one argument out with the comma that belongs to it."""
    span = arguments[index].range()
    if index + 1 < len(arguments):
        return Edit(span.start.index, arguments[index + 1].range().start.index, "")
    start = arguments[index - 1].range().end.index if index else span.start.index
    return Edit(start, span.end.index, "")
