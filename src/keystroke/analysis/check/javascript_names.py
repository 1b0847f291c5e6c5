"""Names of JavaScript and TypeScript: which are used without a visible declaration, which are declared twice.

Works on one file. Scopes are those of the language; types are not looked at. Where the syntax leaves doubt, a
name counts as declared.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from ast_grep_py import SgNode

from keystroke.analysis.syntax import parse_tree, walk

LANGUAGES = frozenset({"javascript", "typescript", "tsx"})

# Of the language, of browsers, of Node and of common test runners.
_GLOBALS = frozenset(
    re.findall(
        r"\S+",
        """Array ArrayBuffer AggregateError Atomics BigInt BigInt64Array BigUint64Array Boolean
        DataView Date Error EvalError FinalizationRegistry Float32Array Float64Array Function
        Infinity Int16Array Int32Array Int8Array Intl Iterator JSON Map Math NaN Number Object
        Promise Proxy RangeError ReferenceError Reflect RegExp Set SharedArrayBuffer String Symbol
        SyntaxError TypeError URIError Uint16Array Uint32Array Uint8Array Uint8ClampedArray WeakMap
        WeakRef WeakSet arguments decodeURI decodeURIComponent encodeURI encodeURIComponent escape
        eval globalThis isFinite isNaN parseFloat parseInt undefined unescape AbortController
        AbortSignal Audio Blob BroadcastChannel CSS CustomEvent DOMException DOMParser Document
        Element Event EventSource EventTarget File FileList FileReader FormData HTMLElement
        HTMLInputElement Headers Image ImageData IntersectionObserver KeyboardEvent MessageChannel
        MouseEvent MutationObserver Node NodeList Notification Option Path2D PerformanceObserver
        Range ReadableStream Request ResizeObserver Response TextDecoder TextEncoder TransformStream
        URL URLSearchParams WebAssembly WebSocket Worker WritableStream XMLHttpRequest XMLSerializer
        alert atob btoa caches cancelAnimationFrame cancelIdleCallback clearInterval clearTimeout
        close confirm console crypto customElements document event fetch frames getComputedStyle
        getSelection history indexedDB innerHeight innerWidth localStorage location matchMedia name
        navigator open parent performance postMessage print prompt queueMicrotask reportError
        requestAnimationFrame requestIdleCallback screen scroll scrollTo self sessionStorage
        setInterval setTimeout status structuredClone top window addEventListener
        removeEventListener dispatchEvent importScripts Buffer __dirname __filename clearImmediate
        exports global module process require setImmediate Deno Bun after afterAll afterEach assert
        before beforeAll beforeEach cy describe expect fail it jest jasmine sinon suite test vi
        xdescribe xit JSX React $ jQuery await""",
    )
)
_PLATFORM = re.compile(
    r"(?:HTML|SVG|CSS|DOM|Web|RTC|IDB|Media|Audio|File|Data|Input|Pointer|Touch)\w*[a-z]|\w+(?:Stream|Event)"
)
_FUNCTIONS = frozenset(
    ("function_declaration", "generator_function_declaration", "function_expression", "generator_function",
     "function", "arrow_function", "method_definition", "function_signature", "class_static_block")
)  # fmt: skip
_BLOCKS = frozenset(
    ("statement_block", "for_statement", "for_in_statement", "catch_clause", "switch_body", "class_body",
     "class", "class_declaration", "abstract_class_declaration", "internal_module", "module")
)  # fmt: skip
_NAMED = frozenset(
    ("function_declaration", "generator_function_declaration", "function_signature", "class_declaration",
     "abstract_class_declaration", "enum_declaration", "internal_module", "module", "interface_declaration",
     "type_alias_declaration", "import_alias")
)  # fmt: skip
_TYPES = frozenset(
    ("type_annotation", "type_arguments", "type_parameters", "interface_body", "object_type", "function_type",
     "type_alias_declaration", "interface_declaration", "implements_clause", "extends_type_clause",
     "generic_type", "union_type", "intersection_type", "array_type", "tuple_type", "literal_type",
     "predefined_type", "type_predicate_annotation", "asserts_annotation", "constructor_type",
     "conditional_type", "lookup_type", "nested_type_identifier", "type_query", "index_type_query",
     "method_signature", "property_signature", "call_signature", "construct_signature", "index_signature",
     "template_literal_type", "parenthesized_type", "readonly_type")
)  # fmt: skip
_DECLARED_GLOBAL = re.compile(r"/\*\s*globals?\s+([^*]*)\*/")
_ONCE = frozenset(("let", "const", "class", "var"))


@dataclass(slots=True)
class _Scope:
    function: bool
    outer: _Scope | None = None
    names: dict[str, list[str]] = field(default_factory=dict)  # name: how it is declared, once for each

    def declare(self, name: str, how: str) -> None:
        self.names.setdefault(name, []).append(how)

    def of_function(self) -> _Scope:
        scope = self
        while not scope.function and scope.outer is not None:
            scope = scope.outer
        return scope

    def sees(self, name: str) -> bool:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.names:
                return True
            scope = scope.outer
        return False


@dataclass(slots=True)
class JavaScriptNames:
    """`free`: names that are used where no declaration of them is visible, globals excepted. `twice`: names
    that one scope declares more than once, by how often, with functions left out."""

    free: set[str]
    twice: dict[str, int]


def javascript_names(text: str, language: str) -> JavaScriptNames:
    """The free and the repeatedly declared names of a file that parses."""
    scopes: list[_Scope] = []
    uses: list[tuple[str, _Scope]] = []
    top = _Scope(True)
    scopes.append(top)
    _collect(parse_tree(text, language), top, scopes, uses)
    for found in _DECLARED_GLOBAL.finditer(text):
        for name in re.findall(r"[\w$]+", found[1]):
            top.declare(name, "global")
    twice: dict[str, int] = {}
    for scope in scopes:
        for name, kinds in scope.names.items():
            count = sum(how in _ONCE for how in kinds)
            if count > 1:
                twice[name] = twice.get(name, 0) + count
    known = {name for name, _ in uses if name in _GLOBALS or _PLATFORM.fullmatch(name)}
    free = {name for name, scope in uses if name not in known and not scope.sees(name)}
    return JavaScriptNames(free, twice)


def _collect(root: SgNode, top: _Scope, scopes: list[_Scope], uses: list[tuple[str, _Scope]]) -> None:
    todo: list[tuple[SgNode, _Scope]] = [(root, top)]
    while todo:
        node, scope = todo.pop()
        kind = str(node.kind())
        if kind in _NAMED and (name := node.field("name")) is not None:
            how = "class" if "class" in kind else "function"
            inner = next((part.text() for part in walk(name) if "identifier" in part.kind()), name.text())
            scope.of_function().declare(inner, how)
            scope.declare(inner, "also")
        if kind in _TYPES:
            continue
        inside = scope
        if kind in _FUNCTIONS or kind in _BLOCKS:
            inside = _Scope(kind in _FUNCTIONS, scope)
            scopes.append(inside)
            own = node.field("name") if kind not in _NAMED else None
            if own is not None and kind != "method_definition":
                inside.declare(own.text(), "own")
        if kind == "import_specifier":
            scope.declare((node.field("alias") or node.field("name") or node).text(), "import")
            continue
        if kind in ("import_clause", "namespace_import", "import_require_clause"):
            for part in node.children():
                if part.kind() == "identifier":
                    scope.declare(part.text(), "import")
                else:
                    todo.append((part, scope))
            continue
        if kind == "export_statement" and node.field("source") is not None:
            continue
        if kind == "variable_declarator" and (name := node.field("name")) is not None:
            how = _declaration_keyword(node)
            target = scope.of_function() if how == "var" else scope
            around = str(outer.kind()) if (outer := _parent_of(_parent_of(node))) is not None else ""
            for inner in _pattern_names(name):
                # A loop may declare its variable again, and a declaration for the type checker is none.
                target.declare(inner, around if around in ("for_statement", "ambient_declaration") else how)
        elif kind == "formal_parameters":
            for child in node.children():
                for inner in _pattern_names(child):
                    inside.declare(inner, "parameter")
        elif kind == "arrow_function" and (single := node.field("parameter")) is not None:
            inside.declare(single.text(), "parameter")
        elif kind == "catch_clause" and (caught := node.field("parameter")) is not None:
            for inner in _pattern_names(caught):
                inside.declare(inner, "parameter")
        elif kind == "for_in_statement" and (word := node.field("kind")) is not None:
            target = scope.of_function() if word.text() == "var" else inside
            for inner in _pattern_names(left) if (left := node.field("left")) is not None else ():
                target.declare(inner, "loop")
        elif kind in ("identifier", "shorthand_property_identifier") and _is_use(node):
            uses.append((node.text(), scope))
        todo.extend((child, inside) for child in reversed(node.children()))


def _parent_of(node: SgNode | None) -> SgNode | None:
    return None if node is None else node.parent()


def _declaration_keyword(declarator: SgNode) -> str:
    parent = declarator.parent()
    children = parent.children() if parent is not None else []
    return next((c.text() for c in children if c.kind() in ("var", "let", "const")), "const")


def _pattern_names(node: SgNode) -> Iterator[str]:
    """The names that a pattern binds; default values and types are left out."""
    kind = node.kind()
    if kind in ("identifier", "shorthand_property_identifier_pattern"):
        yield node.text()
    elif kind in ("required_parameter", "optional_parameter"):
        if (pattern := node.field("pattern")) is not None:
            yield from _pattern_names(pattern)
    elif kind in ("assignment_pattern", "object_assignment_pattern"):
        if (left := node.field("left")) is not None:
            yield from _pattern_names(left)
    elif kind == "pair_pattern":
        if (value := node.field("value")) is not None:
            yield from _pattern_names(value)
    elif kind in ("object_pattern", "array_pattern", "rest_pattern"):
        for child in node.children():
            yield from _pattern_names(child)


def _is_use(node: SgNode) -> bool:
    """Whether an identifier refers to a variable, and is not a tag, a label or a test with `typeof`."""
    parent = node.parent()
    if parent is None:
        return True
    kind = parent.kind()
    if kind == "unary_expression" and parent.text().startswith("typeof"):
        return False
    if kind.startswith("jsx_"):
        tag = kind in ("jsx_opening_element", "jsx_closing_element", "jsx_self_closing_element")
        return not (tag and node.text()[:1].islower()) and kind not in ("jsx_attribute", "jsx_namespace_name")
    if kind == "export_specifier":
        name = parent.field("name")
        return name is None or name.range().start.index == node.range().start.index
    return kind not in (
        "namespace_export",
        "import_attribute",
        "enum_body",
        "enum_assignment",
        "nested_identifier",
    )
