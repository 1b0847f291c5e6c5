"""Syntax trees of text that is being typed: languages, errors, blocks.

Parses in-process with ast-grep, and Python also with its own parser. Offsets are code points. In large texts
only the region around the cursor is parsed, so that a key costs about a millisecond.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from pathlib import PurePath

from ast_grep_py import SgNode, SgRoot

_BY_SUFFIX = {
    ".py": "python", ".pyi": "python", ".js": "javascript", ".mjs": "javascript", ".cjs": "javascript",
    ".jsx": "tsx", ".ts": "typescript", ".mts": "typescript", ".cts": "typescript", ".tsx": "tsx", ".c": "c",
    ".h": "cpp", ".cc": "cpp", ".cpp": "cpp", ".cxx": "cpp", ".hpp": "cpp", ".go": "go", ".java": "java",
    ".rs": "rust", ".rb": "ruby", ".php": "php", ".kt": "kotlin", ".kts": "kotlin", ".swift": "swift",
    ".cs": "csharp", ".lua": "lua", ".sh": "bash", ".bash": "bash", ".scala": "scala", ".html": "html",
    ".css": "css", ".json": "json", ".yml": "yaml", ".yaml": "yaml", ".ex": "elixir", ".hs": "haskell",
}  # fmt: skip
_BY_EDITOR = {
    "javascriptreact": "tsx", "typescriptreact": "tsx", "shellscript": "bash", "sh": "bash", "c++": "cpp",
    "objective-cpp": "cpp", "c#": "csharp", "py": "python", "js": "javascript", "ts": "typescript",
}  # fmt: skip
LANGUAGES = frozenset(_BY_SUFFIX.values())
_SPELLED = {"cpp": "C++", "javascript": "JavaScript", "tsx": "TypeScript", "typescript": "TypeScript"}
INDENTED = frozenset({"python", "yaml", "haskell"})  # blocks without brackets
_REGION = 1500  # characters on each side of the cursor that are parsed, at least
_NOT_BLOCKS = ("object", "dictionary", "dict", "set", "array", "pattern", "string", "comment", "template",
               "initializer", "literal", "struct_expression", "hash")  # fmt: skip


def language_name(language: str) -> str:
    """The display name of a language."""
    return _SPELLED.get(language, language.capitalize())


def language_of(path: str | None, editor: str | None = None) -> str | None:
    """The grammar's name of a language: by the editor's language id, else by the file's suffix."""
    if editor:
        name = editor.lower()
        name = _BY_EDITOR.get(name, name)
        if name in LANGUAGES:
            return name
    return _BY_SUFFIX.get(PurePath(path).suffix.lower()) if path else None


def parse_tree(text: str, language: str) -> SgNode:
    return SgRoot(text, language).root()


def parse_quietly(text: str) -> ast.Module:
    """Parse a Python text without printing Python's warnings about it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text)


def try_parse(text: str) -> ast.Module | None:
    """The tree of a Python text; None where it does not parse."""
    try:
        return parse_quietly(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def error_count(text: str, language: str) -> int:
    return len(parse_tree(text, language).find_all(kind="ERROR"))


def surrounding_region(text: str, start: int, end: int) -> tuple[int, int]:
    """A part of `text` around [start, end) that starts and ends at top-level lines."""
    first = 0
    if start > _REGION:
        first = _top_level(text, start - _REGION, backwards=True)
    last = len(text)
    if len(text) - end > _REGION:
        last = _top_level(text, end + _REGION, backwards=False)
    return first, last


_TOP = re.compile(r"^(?=[^\s#/)\]}])", re.MULTILINE)


def _top_level(text: str, at: int, *, backwards: bool) -> int:
    if not backwards:
        found = _TOP.search(text, at, at + 4 * _REGION)
        return found.start() if found else min(len(text), at)
    window = max(0, at - 4 * _REGION)
    starts = [m.start() for m in _TOP.finditer(text, window, at)]
    return starts[-1] if starts else text.rfind("\n", 0, at) + 1


def adds_errors(text: str, cursor: int, inserted: str, language: str) -> bool:
    """Whether `inserted` at the cursor adds syntax errors to the text."""
    first, last = surrounding_region(text, cursor, cursor)
    before, after = text[first:cursor], text[cursor:last]
    now = error_count(before + inserted + after, language)
    return now > 0 and now > error_count(before + after, language)


def opens_block(text: str, end: int, language: str | None) -> bool:
    """Whether the line that ends at `end` opens a block that has no body yet."""
    line = text[text.rfind("\n", 0, end) + 1 : end].rstrip()
    if not line or not line.endswith((":", "{", " do", " then")):
        return False
    if language is None:
        return line.endswith((":", "{"))
    first, _ = surrounding_region(text, end, end)
    head = text[first : text.rfind("\n", 0, end) + 1] + line
    at = len(head) - 1
    if language == "python":
        indent = re.match(r"\s*", line)
        assert indent is not None
        root = parse_tree(f"{head}\n{indent[0]}    pass\n", language)
        leaf = leaf_at(root, at)
        parent = leaf.parent() if leaf is not None else None
        return parent is not None and parent.kind().endswith(("_statement", "_definition", "_clause"))
    leaf = leaf_at(parse_tree(f"{head}\n{_missing_closers(head)}\n", language), at)
    if leaf is None or leaf.kind() in ("comment", "string_content", "string_fragment"):
        return False
    parent = leaf.parent()
    return parent is None or not any(word in parent.kind() for word in _NOT_BLOCKS)


def _missing_closers(text: str) -> str:
    """The closers of the brackets that `text` leaves open. Strings are not recognised, which seldom
    matters."""
    pairs = {"(": ")", "[": "]", "{": "}"}
    open_ones: list[str] = []
    for sign in text:
        if sign in pairs:
            open_ones.append(pairs[sign])
        elif open_ones and sign == open_ones[-1]:
            open_ones.pop()
    return "".join(reversed(open_ones))


def leaf_at(node: SgNode, offset: int) -> SgNode | None:
    """The leaf that contains the character at `offset`."""
    while True:
        for child in node.children():
            span = child.range()
            if span.start.index <= offset < span.end.index:
                node = child
                break
        else:
            return node if node.is_leaf() else None


def walk(node: SgNode) -> Iterator[SgNode]:
    """Every node, parents first. Iterative, because generated code nests deeper than Python's stack."""
    stack = [node]
    while stack:
        current = stack.pop()
        yield current
        stack.extend(reversed(current.children()))
