"""Fixes for C copies, formats and readers: pass the size of the buffer they write to.

A size is added only if it is known: `sizeof` of an array or the constant size of an allocation. A call whose
result is used keeps its result or gets no fix.
"""

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
from keystroke.analysis.audit.memory.library import LIBRARY
from keystroke.analysis.audit.rules.catalog import FixSpec
from keystroke.analysis.audit.source import ir
from keystroke.text import Edit

_NEEDED = re.compile(
    r"(\d+) bytes .* into a buffer of (\d+)|index (\d+) is past the end of a buffer of (\d+) elements"
)
_ALLOCATES = re.compile(r"\b(?:malloc|alloca)\s*\(")


def size_text(site: FixSite, node: ir.Syntax, unit: int = 1) -> str:
    """A C expression for the number of elements of `unit` bytes in a buffer."""
    memory = required_value(site.value(node).memory)
    require(memory.start == 0)
    name = node.text() if node.kind() == "identifier" else ""
    arrays = site.match.known.arrays(memory.block) if site.match.known is not None else []
    declared = [array for array in (name, *arrays) if is_array(site, array, node)]
    # A pointer that moves may point behind the start when the statement runs again.
    moves = name not in declared and len(list(site.bindings(name, site.enclosing_function(node)))) > 1
    require(not name or not moves)
    if not declared:
        return str(required_value(memory.capacity) // unit)
    holder = declared[0]
    return f"sizeof({holder})" if unit == 1 else f"sizeof({holder}) / sizeof({holder}[0])"


def is_array(site: FixSite, name: str, node: ir.Syntax) -> bool:
    """Whether a name is an array of the enclosing function, so that sizeof gives its size."""
    return any(
        declared.field("declarator") is not None and declared.field("declarator").text() == name
        for declared in (site.enclosing_function(node).find_all(kind="array_declarator") if name else ())
        if not _is_parameter(declared)
    )


def _is_parameter(node: ir.Syntax) -> bool:
    at = node.parent()
    while at is not None and at.kind() in ("pointer_declarator", "array_declarator", "init_declarator"):
        at = at.parent()
    return at is not None and at.kind() == "parameter_declaration"


def bound_copy(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Bounds strcpy and strcat by the size of the destination."""
    call, given = required_value(site.call), site.arguments()
    require(len(given) == 2 and site.is_statement(call.node) and site.method in _COPIES)
    require(not _overlaps(given))
    wide = site.method.startswith("w")
    size = size_text(site, given[0], 4 if wide else 1)
    to, source = site.source(given[0]), site.source(given[1])
    start, end = span(call.node)
    if site.method == "strcpy":
        text = f'snprintf({to}, {size}, "%s", {source})'
    elif site.method == "strcat":
        text = f"strncat({to}, {source}, {size} - strlen({to}) - 1)"
    elif site.method == "wcscpy":
        text = f"wcsncpy({to}, {source}, {size} - 1), {to}[{size} - 1] = L'\\0'"
    else:
        text = f"wcsncat({to}, {source}, {size} - wcslen({to}) - 1)"
    needs = ("<stdio.h>",) if site.method == "strcpy" else ("<wchar.h>",) if wide else ("<string.h>",)
    return FixEdits((Edit(start, end, text),), needs)


def _overlaps(given: list[ir.Syntax]) -> bool:
    """Whether a copy reads the memory it writes; a bounded copy loses its text then."""
    root = re.match(r"\w+", given[0].text())
    return root is None or any(
        re.search(rf"\b{root[0]}\b", re.sub(r"sizeof\s*\([^)]*\)|\"[^\"]*\"", "", node.text()))
        for node in given[1:]
    )


_COPIES = ("strcpy", "strcat", "wcscpy", "wcscat")


def bound_print(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Replaces sprintf by snprintf with the size of the destination."""
    call, given = required_value(site.call), site.arguments()
    require(len(given) >= 2 and site.method in ("sprintf", "vsprintf") and site.is_statement(call.node))
    require(not _overlaps(given))
    size = size_text(site, given[0])
    at, end = span(call.func.node)[0], span(given[0])[1]
    name = site.method.replace("sprintf", "snprintf")
    return FixEdits((Edit(at, end, f"{name}({site.source(given[0])}, {size}"),))  # both are in one header


def print_as_text(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Prints data through "%s" instead of using it as a format."""
    given = site.arguments()
    at = required_value(LIBRARY.printers.get(site.method))
    require(len(given) == at + 1)
    start = span(given[at])[0]
    return site.insert_at(start, 'L"%ls", ' if "w" in site.method else '"%s", ')


def use_fgets(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Replaces gets by fgets and removes the line end."""
    call, given = required_value(site.call), site.arguments()
    require(len(given) == 1 and site.method == "gets")
    size = size_text(site, given[0])
    name = site.source(given[0])
    require(re.fullmatch(r"\w+", name))
    start, end = span(call.node)
    text = f"fgets({name}, {size}, stdin)"
    cut = f"{name}[strcspn({name}, \"\\n\")] = '\\0'"
    parent = call.node.parent()
    if site.is_statement(call.node):
        held = parent.parent() if parent is not None else None
        require(held is not None and held.kind() == "compound_statement")
        whole = f"if ({text} != NULL) {cut}"
    else:
        whole = f"({text} ? ({cut}, {name}) : NULL)"
    return FixEdits((Edit(start, end, whole),), ("<string.h>",))


def add_scan_width(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Adds widths to a scanf format."""
    given = site.arguments()
    at = required_value({"scanf": 0, "fscanf": 1, "sscanf": 1}.get(site.method))
    require(len(given) > at and given[at].kind() == "string_literal")
    start = span(given[at])[0]
    edits: list[Edit] = []
    used = at + 1
    for found in re.finditer(r"%(\*?)(\d*)(?:hh|h|ll|l|z|j|t|L)?(m?)([a-zA-Z\[%])", given[at].text()):
        if found[4] == "%" or found[1]:
            continue
        target = given[used] if used < len(given) else None
        used += 1
        if found[4] not in "s[" or found[2] or found[3]:
            continue
        memory = required_value(site.value(required_value(target)).memory)
        capacity = required_value(memory.capacity)
        require(memory.start == 0 and capacity >= 2)
        place = start + found.start() + 1
        edits.append(Edit(place, place, str(capacity - 1)))
    return FixEdits(tuple(edits)) if edits else None


def use_calloc(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Replaces malloc(n * size) by calloc(n, size), which checks the product for overflow.

    Not where a factor is no whole number, which calloc would cut off.
    """
    call, given = required_value(site.call), site.arguments()
    require(site.source(call.node).startswith("malloc") and len(given) == 1)
    product = given[0]
    require(product.kind() == "binary_expression" and product.field("operator").text() == "*")
    count, size = product.field("left"), product.field("right")
    require(count.kind() != "binary_expression" and not _may_be_fraction(site, count, size))
    if count.kind() == "sizeof_expression" and size.kind() != "sizeof_expression":
        count, size = size, count  # compilers warn about a size in front
    return site.replace_node(
        call.node, f"calloc({_without_parentheses(site, count)}, {_without_parentheses(site, size)})"
    )


_FRACTION = re.compile(
    r"\d\.|\.\d|\b(?:float|double)\b|\b(?:sqrt|pow|log\w*|exp|ceil|floor|round|fabs|fmod)f?\s*\("
)


def _may_be_fraction(site: FixSite, *factors: ir.Syntax) -> bool:
    """Whether a factor is written as a fraction, or has a name that the function declares as one."""
    for factor in factors:
        source = site.source(factor) if factor.kind() != "sizeof_expression" else ""
        names = "|".join(map(re.escape, set(re.findall(r"[A-Za-z_]\w*", source))))
        if _FRACTION.search(source):
            return True
        if names and re.search(rf"\b(?:float|double)\b[^;{{}}()]*?\b(?:{names})\b", site.text):
            return True
    return False


def _without_parentheses(site: FixSite, node: ir.Syntax) -> str:
    """An argument without parentheses that only a product needs."""
    inner = named_children(node) if node.kind() == "parenthesized_expression" else []
    return site.source(inner[0] if len(inner) == 1 and inner[0].kind() != "comma_expression" else node)


def enlarge_buffer(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Enlarges an array or allocation of constant size to what is written to it."""
    found = required_value(_NEEDED.search(site.match.message))
    name = required_value(_written_variable(site))
    wanted = int(found[1]) if found[1] else int(found[3]) + 1
    held = int(found[2] or found[4])
    require(wanted <= 1_000_000)
    memory = required_value(site.match.evaluate(ir.NameExpr(site.match.node, name)).memory)
    require(memory.start == 0)
    unit = max(memory.unit, 1) if found[1] else 1
    arrays = site.match.known.arrays(memory.block) if site.match.known is not None else []
    scope = site.enclosing_function(site.match.node)
    for array in [name, *arrays]:
        edit = _declared_size(site, scope, array, held // unit, -(-wanted // unit))
        if edit is not None:
            return FixEdits((edit,))
    return None


def _written_variable(site: FixSite) -> str | None:
    """The variable whose memory is written."""
    node = site.match.node
    if node.kind() == "subscript_expression":
        held = node.field("argument")
    else:
        given = site.arguments()
        held = given[0] if given else None
    return held.text() if held is not None and held.kind() == "identifier" else None


def _declared_size(site: FixSite, scope: ir.Syntax, name: str, held: int, wanted: int) -> Edit | None:
    """The edit of the size of an array, or of the only allocation assigned to a pointer."""
    for node in scope.find_all(kind="array_declarator"):
        declared, size = node.field("declarator"), node.field("size")
        if declared is not None and declared.text() == name and size is not None:
            return Edit(*span(size), str(wanted)) if size.text() == str(held) else None
    blocks = [
        value
        for _, value in site.bindings(name, scope)
        if value is not None and _ALLOCATES.search(value.text()) is not None
    ]
    if len(blocks) != 1:
        return None
    number = re.search(rf"\(\s*({held})\b", blocks[0].text()[_ALLOCATES.search(blocks[0].text()).start() :])  # type: ignore[union-attr]
    if number is None:
        return None
    at = span(blocks[0])[0] + _ALLOCATES.search(blocks[0].text()).start() + number.start(1)  # type: ignore[union-attr]
    return Edit(at, at + len(number[1]), str(wanted))
