"""Functions and classes of source files with their documentation, from a syntax tree.

Definitions come in file order; nothing is executed or imported. Files of unsupported languages give none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ast_grep_py import SgNode

from keystroke.analysis.syntax import language_of, parse_tree

_KNOWN = {"python", "javascript", "typescript", "tsx", "go", "rust", "c", "cpp", "java"}
_FUNCTIONS = (
    "function_definition", "function_declaration", "method_declaration", "method_definition", "function_item",
)  # fmt: skip
_CLASSES = ("class_definition", "class_declaration", "struct_item", "interface_declaration", "trait_item")
_COMMENTS = ("comment", "line_comment", "block_comment")
_MARKS = re.compile(r"^[ \t]*(?:/\*\*?|\*/|\*|//[/!]?|#|\"{3}|'{3})[ \t]?|(?:\*/|\"{3}|'{3})[ \t]*$", re.M)
_TAGS = re.compile(r"^\s*(?:@\w+|:\w+|Args:|Parameters|Returns|Raises|Example|>>>|---)", re.M)
SHORTEST, LONGEST = 80, 4000  # characters of a definition


@dataclass(frozen=True, slots=True)
class Definition:
    language: str
    name: str
    is_class: bool
    head: str  # its first line or lines, up to the body
    text: str
    start: int  # of its first line in the file
    said: str  # the first sentences of its documentation; empty where there is none


def knows(path: str) -> bool:
    """Whether files of this name have definitions that can be found."""
    return language_of(path) in _KNOWN


def definitions(path: str, text: str) -> Iterator[Definition]:
    """The functions and classes of a file that are neither trivial nor very long."""
    language = language_of(path)
    if language not in _KNOWN:
        return
    root = parse_tree(text, language)
    for kinds in (_FUNCTIONS, _CLASSES):
        for kind in kinds:
            try:
                found = root.find_all(kind=kind)
            except RuntimeError:  # no such kind in this language
                continue
            for node in found:
                if SHORTEST <= len(node.text()) <= LONGEST:
                    definition = _definition(node, text, language, kinds is _CLASSES)
                    if definition is not None:
                        yield definition


def _definition(node: SgNode, text: str, language: str, is_class: bool) -> Definition | None:
    name = node.field("name") or _declared(node)
    body = node.field("body")
    if name is None or body is None or not re.fullmatch(r"[A-Za-z_]\w{2,}", name.text()):
        return None
    if name.text().startswith("__"):
        return None
    start = text.rfind("\n", 0, node.range().start.index) + 1
    end = node.range().end.index
    head = text[node.range().start.index : body.range().start.index].rstrip()
    return Definition(
        language, name.text(), is_class, head, text[start:end], start, _said(node, body, language)
    )


def _declared(node: SgNode) -> SgNode | None:
    """C keeps a function's name inside its declarator."""
    inner = node.field("declarator")
    while inner is not None and inner.kind() != "identifier":
        inner = inner.field("declarator")
    return inner


def _said(node: SgNode, body: SgNode, language: str) -> str:
    if language == "python":
        first = body.child(0)
        inside = first.text() if first is not None and first.text().startswith(('"""', "'''")) else ""
        return _sentences(inside)
    lines: list[str] = []
    above = node.prev()
    while above is not None and above.kind() in _COMMENTS and len(lines) < 20:
        lines.insert(0, above.text())
        above = above.prev()
    return _sentences("\n".join(lines))


def _sentences(comment: str) -> str:
    """The first paragraph of a comment as one line, without its marks."""
    plain = _MARKS.sub("", comment).strip()
    tags = _TAGS.search(plain)
    plain = plain[: tags.start()] if tags else plain
    paragraph = re.split(r"\n\s*\n", plain.strip(), maxsplit=1)[0]
    line = " ".join(paragraph.split())
    return line if 20 <= len(line) <= 400 and line.isascii() else ""
