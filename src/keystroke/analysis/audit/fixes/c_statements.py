"""Fixes that add C statements: a check after an allocation, a guard around a use, a release before the end.

A statement is added only next to a declaration or expression statement of a block. A guard skips one
statement; a check returns as the function does on failure, or aborts.
"""

from __future__ import annotations

import re

from keystroke.analysis.audit.fixes.c_calls import is_array, size_text
from keystroke.analysis.audit.fixes.site import (
    FixEdits,
    FixSite,
    NoFix,
    named_children,
    require,
    required_value,
    span,
)
from keystroke.analysis.audit.rules.catalog import FixSpec
from keystroke.analysis.audit.source import ir
from keystroke.text import Edit

_ACQUIRES = re.compile(
    r"\b(?:malloc|calloc|realloc|strdup|strndup|wcsdup|fopen|fdopen|tmpfile|popen|aligned_alloc)\s*\("
)
_INTEGERS = re.compile(
    r"^(?:unsigned\s+)?(?:char|short|int|long(?:\s+long)?|u?int(?:8|16|32|64)_t|size_t|ssize_t)(?:\s+int)?$|^unsigned$"
)


def check_pointer(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Adds a null check after the statement that assigns a pointer."""
    name = required_value(_pointer(site))
    require("null here" not in site.match.message)
    scope = site.enclosing_function(site.match.node)
    place, holder = required_value(_find_allocation(site, scope, name, 0))
    whole = _plain(place)
    indent = site.indent(span(whole)[0])
    leave = _leaving(site, scope, span(whole)[0])
    at = span(whole)[1]
    text = f"\n{indent}if ({holder} == NULL) {{\n{indent}    {leave}\n{indent}}}"
    return FixEdits((Edit(at, at, text),), ("<stdlib.h>",) if leave == "abort();" else ())


def _pointer(site: FixSite) -> str | None:
    """The pointer variable that is dereferenced."""
    node = site.match.node
    for name in ("argument", "function"):
        held = node.field(name)
        if held is not None and name == "argument":
            while held.kind() in ("parenthesized_expression", "cast_expression", "pointer_expression"):
                inner = held.field("value") or held.field("argument")
                if inner is None:
                    break
                held = inner
            return held.text() if held.kind() == "identifier" else None
    for held in site.arguments():
        memory = site.value(held).memory
        if held.kind() == "identifier" and memory is not None and memory.nullable:
            return str(held.text())
    return None


def _find_allocation(site: FixSite, scope: ir.Syntax, name: str, depth: int) -> tuple[ir.Syntax, str] | None:
    """The last assignment of an allocation before the match, and the variable it assigns."""
    best: tuple[ir.Syntax, str] | None = None
    for place, value in site.bindings(name, scope):
        if value is None or span(place)[0] > site.match.start:
            continue
        if _ACQUIRES.search(value.text()) is not None:
            best = (place, name)
        elif value.kind() == "identifier" and depth < 2:
            best = _find_allocation(site, scope, value.text(), depth + 1) or best
    return best


def _plain(node: ir.Syntax) -> ir.Syntax:
    """The declaration or expression statement of a block that consists of a node."""
    at = node
    while (parent := at.parent()) is not None:
        kind = at.kind()
        if parent.kind() == "compound_statement":
            require(kind in ("declaration", "expression_statement"))
            return at
        require(kind in ("init_declarator", "assignment_expression", "expression_statement", "declaration"))
        at = parent
    raise NoFix


def _leaving(site: FixSite, scope: ir.Syntax, before: int) -> str:
    """The statement by which a function fails; `abort()` if it has none or would leak something."""
    require(scope.kind() == "function_definition")
    head = scope.text()[: span(scope.field("body"))[0] - span(scope)[0]] if scope.field("body") else ""
    body = scope.text()
    taken = _ACQUIRES.search(site.text, span(scope)[0], before) is not None
    kind = scope.field("type")
    name = kind.text() if kind is not None else ""
    if re.search(r"\bmain\s*\(", head):
        return "return 1;"
    if taken:
        return "abort();"
    if "*" in head.split("(", 1)[0]:
        return "return NULL;"
    if name == "void":
        return "return;"
    if name in ("bool", "_Bool"):
        return "return false;"
    if re.search(r"return\s+-1\s*;", body):
        return "return -1;"
    return "abort();"


# Guards


def _guard(site: FixSite, test: str, needs: tuple[str, ...] = ()) -> FixEdits | None:
    """Wraps the statement of the match in an `if`."""
    at = site.match.node
    while (parent := at.parent()) is not None and at.kind() != "expression_statement":
        require(
            parent.kind() not in ("compound_statement", "for_statement", "while_statement", "if_statement")
        )
        at = parent
    holder = required_value(at.parent())
    require(at.kind() == "expression_statement" and holder.kind() == "compound_statement")
    start, end = span(at)
    indent = site.indent(start)
    body = site.text[start:end].replace("\n", "\n    ")
    return FixEdits((Edit(start, end, f"if ({test}) {{\n{indent}    {body}\n{indent}}}"),), needs)


def guard_index(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Guards an access by a test of its index."""
    node = site.match.node
    require(node.kind() == "subscript_expression")
    base = node.field("argument")
    held = node.field("index") or node.field("indices")
    require(base is not None and held is not None)
    index = held.text().strip("[]")
    memory = required_value(site.value(base).memory)
    require(re.fullmatch(r"\w+", index))
    if base.kind() == "identifier" and is_array(site, base.text(), node):
        count = f"sizeof({base.text()}) / sizeof({base.text()}[0])"
    else:
        require(memory.capacity and memory.unit and not memory.start)
        count = str(required_value(memory.capacity) // memory.unit)
    return _guard(site, f"{index} >= 0 && (size_t){index} < {count}", ("<stddef.h>",))


def guard_length(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Guards a copy by a test of its length."""
    given = site.arguments()
    at = required_value({"memcpy": 2, "memmove": 2, "strncpy": 2, "memset": 2}.get(site.method))
    require(len(given) == 3)
    length = given[at].text()
    size = size_text(site, given[0])
    require(re.fullmatch(r"[\w>.-]+", length))
    return _guard(site, f"{length} >= 0 && (size_t){length} <= {size}", ("<stddef.h>",))


def guard_division(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Guards a division by a test of the divisor."""
    node = site.match.node
    right = node.field("right")
    require(right is not None and right.kind() == "identifier")
    return _guard(site, f"{right.text()} != 0")


def check_arithmetic(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Aborts before arithmetic that a compiler built-in finds to overflow."""
    node = site.match.node
    require(site.language == "c")
    kind = node.kind()
    if kind == "binary_expression":
        left, right, op = node.field("left"), node.field("right"), node.field("operator").text()
        holder = required_value(ir.outside_casts(node))
        require(holder.kind() in ("init_declarator", "assignment_expression"))
        target = holder.field("declarator") or holder.field("left")
    elif kind == "assignment_expression":
        left, right, target = node.field("left"), node.field("right"), node.field("left")
        op = node.field("operator").text().rstrip("=")
        holder = node
    else:
        raise NoFix
    name = required_value({"+": "add", "-": "sub", "*": "mul"}.get(op))
    whole = _plain(holder)
    require(target is not None and target.kind() == "identifier")
    require(all(re.fullmatch(r"[\w()]+", part.text()) for part in (left, right)))
    declared = required_value(
        re.search(rf"\b((?:unsigned\s+|signed\s+)?\w+(?:\s+long)?)\s+{target.text()}\b", site.text)
    )
    require(_INTEGERS.match(declared[1]))
    require(site.enclosing_function(node).kind() == "function_definition")
    at = span(whole)[0]
    indent = site.indent(at)
    test = f"__builtin_{name}_overflow({left.text()}, {right.text()}, &({declared[1]}){{0}})"
    text = f"if ({test}) {{\n{indent}    abort();\n{indent}}}\n{indent}"
    return FixEdits((Edit(at, at, text),), ("<stdlib.h>",))


# Values and releases


def initialise(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Initialises a variable or an array in its declaration."""
    node = site.match.node
    names = [node.text()] if node.kind() == "identifier" else []
    if node.kind() == "subscript_expression":
        names = [node.field("argument").text()]
    elif node.kind() == "call_expression":
        names = [held.text() for held in site.arguments()[:1]]
    scope = site.enclosing_function(node)
    for name in names:
        for declaration in scope.find_all(kind="declaration"):
            for child in declaration.children():
                if child.kind() == "identifier" and child.text() == name:
                    kind = declaration.field("type")
                    require(kind is not None and _INTEGERS.match(kind.text()))
                    return FixEdits((Edit(span(child)[1], span(child)[1], " = 0"),))
                if child.kind() == "array_declarator":
                    held, size = child.field("declarator"), child.field("size")
                    if held is None or held.text() != name or size is None:
                        continue
                    # A variable-length array cannot be initialised.
                    require(size.kind() == "number_literal" or size.text().isupper())
                    return FixEdits((Edit(span(child)[1], span(child)[1], " = {0}"),))
    return None


def release_before_end(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Releases a block at the end of the scope of its variable."""
    node = site.match.node
    holder = required_value(ir.outside_casts(node))
    require(holder.kind() in ("init_declarator", "assignment_expression"))
    target = holder.field("declarator") or holder.field("left")
    name = target.text().lstrip("* ")
    whole = _plain(holder)
    require(re.fullmatch(r"\w+", name))
    scope = site.enclosing_function(node)
    declared = [
        item
        for item in scope.find_all(kind="declaration")
        if re.search(rf"\*\s*{name}\b(?!\s*\()", item.text()) is not None
    ]
    require(len(declared) == 1 and len([1 for _ in site.bindings(name, scope)]) <= 2)
    block = required_value(declared[0].parent())
    here = required_value(whole.parent())
    require(block.kind() == "compound_statement" and span(block) == span(here))
    after = [item for item in block.children() if item.is_named() and span(item)[0] >= span(whole)[1]]
    rest = "\n".join(item.text() for item in after if not _handles_null(item, name))
    require(after and not re.search(r"\b(?:free|fclose|pclose|goto|break|continue|exit|longjmp)\b", rest))
    last = after[-1]
    require(rest.count("return") <= (last.kind() == "return_statement"))
    release = f"{_release_function(node.text(), declared[0].text())}({name});"
    if not release.startswith("free"):
        release = f"if ({name} != NULL) {release}"
    if last.kind() == "return_statement":
        require(not re.search(rf"\b{name}\b", last.text()))
        at = span(last)[0]
        return site.insert_at(at, f"{release}\n{site.indent(at)}")
    at = span(last)[1]
    return site.insert_at(at, f"\n{site.indent(span(last)[0])}{release}")


def _release_function(acquired: str, declared: str) -> str:
    """The function that releases what an expression acquires."""
    if re.search(r"\bpopen\s*\(", acquired):
        return "pclose"
    if re.search(r"\b(?:f?d?open|freopen|tmpfile|fmemopen)\s*\(", acquired) or "FILE" in declared:
        return "fclose"
    if re.search(r"\b(?:malloc|calloc|realloc|strdup|strndup|wcsdup|aligned_alloc)\s*\(", acquired):
        return "free"
    raise NoFix


def _handles_null(node: ir.Syntax, name: str) -> bool:
    """Whether a statement handles the case that a pointer is null."""
    test = node.field("condition") if node.kind() == "if_statement" else None
    return (
        test is not None
        and node.field("alternative") is None
        and re.fullmatch(rf"\(\s*(?:!\s*{name}|{name}\s*==\s*(?:NULL|0|nullptr))\s*\)", test.text())
        is not None
    )


def set_to_null(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Sets a pointer to NULL after its first release."""
    given = site.arguments()
    require(site.method == "free" and len(given) == 1 and given[0].kind() == "identifier")
    name = given[0].text()
    scope = site.enclosing_function(site.match.node)
    before = [
        call
        for call in scope.find_all(kind="call_expression")
        if re.fullmatch(rf"free\s*\(\s*{name}\s*\)", call.text()) and span(call)[0] < site.match.start
    ]
    require(before)
    whole = required_value(before[-1].parent())
    require(whole.kind() == "expression_statement")
    held = required_value(whole.parent())
    require(held.kind() == "compound_statement")
    at = span(whole)[1]
    return site.insert_at(at, f"\n{site.indent(span(whole)[0])}{name} = NULL;")


def free_on_failed_realloc(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Frees the old block if `p = realloc(p, n)` fails."""
    node = site.match.node
    whole = required_value(node.parent())
    require(node.kind() == "assignment_expression" and whole.kind() == "expression_statement")
    left, right = node.field("left"), node.field("right")
    require(
        left.kind() == "identifier"
        and re.fullmatch(r"(\(\s*[\w ]+\*+\s*\)\s*)?realloc\s*\(.*\)", right.text(), re.S)
    )
    cast = right.text()[: right.text().index("realloc")].strip()
    call = right.text()[right.text().index("realloc") :]
    name = left.text()
    require(site.language != "cpp" or cast)
    start, end = span(whole)
    indent = site.indent(start)
    lines = [
        "{",
        f"    void *grown = {call};",
        "    if (grown == NULL) {",
        f"        free({name});",
        "    }",
        f"    {name} = {cast}grown;",
        "}",
    ]
    return FixEdits((Edit(start, end, f"\n{indent}".join(lines)),))


def use_pointed_size(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Replaces `sizeof(p)` by `sizeof(*p)`."""
    node = site.match.node
    target = required_value(node.field("left") or node.field("declarator"))
    name = target.text().lstrip("* ")
    found = [
        item
        for item in node.find_all(kind="sizeof_expression")
        if re.fullmatch(rf"sizeof\s*\(?\s*{re.escape(name)}\s*\)?", item.text())
    ]
    require(len(found) == 1)
    return site.replace_node(found[0], f"sizeof(*{name})")


def match_release(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Releases memory with the function that matches its allocation."""
    node = site.match.node
    given = site.arguments()
    if node.kind() == "delete_expression":
        given = named_children(node)[-1:]
    require(given and given[0].kind() == "identifier")
    held = given[0]
    memory = site.value(held).memory
    text = {
        "malloc": f"free({held.text()})",
        "new": f"delete {held.text()}",
        "new[]": f"delete[] {held.text()}",
    }.get(memory.kind if memory is not None else "")
    return site.replace_node(node, text) if text else None


def remove_statement(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Removes a statement."""
    whole = required_value(site.match.node.parent())
    require(whole.kind() == "expression_statement")
    held = required_value(whole.parent())
    require(held.kind() == "compound_statement")
    start, end = span(whole)
    line = site.text.rfind("\n", 0, start) + 1
    if not site.text[line:start].strip() and site.text[end : end + 1] == "\n":
        return FixEdits((Edit(line, end + 1, ""),))
    return FixEdits((Edit(start, end, ""),))


def verify_peer(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Enables curl's checks of the peer and the host name."""
    given = site.arguments()
    require(site.method == "curl_easy_setopt" and len(given) == 3)
    value = {"CURLOPT_SSL_VERIFYPEER": "1L", "CURLOPT_SSL_VERIFYHOST": "2L"}.get(given[1].text())
    return site.replace_node(given[2], value) if value else None


def use_comparison(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Replaces `=` in a test by `==`."""
    operator = site.match.node.field("operator")
    require(
        site.match.node.kind() == "assignment_expression" and operator is not None and operator.text() == "="
    )
    return site.replace_node(operator, "==")


def make_static(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Makes a returned local array static."""
    name = site.match.node.text()
    scope = site.enclosing_function(site.match.node)
    for declaration in scope.find_all(kind="declaration"):
        if re.search(rf"\b{re.escape(name)}\s*\[", declaration.text()) and "static" not in declaration.text():
            at = span(declaration)[0]
            return site.insert_at(at, "static ")
    return None
