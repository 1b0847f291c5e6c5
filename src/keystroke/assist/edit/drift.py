"""Removes unrequested changes from a rewritten text: lost comments, other quotes, other layout.

A line whose code is unchanged stays as it was, comments included; a hunk that changes no code token is
reverted. If nothing but comments and layout changed, or the instruction speaks of them, they stay.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from ast_grep_py import SgNode

from keystroke.analysis.syntax import INDENTED, language_of, parse_tree, walk
from keystroke.text.compare import compare

_ABOUT_REMARKS = re.compile(
    r"comment|remark|docstring|document|explain|describ|annotat|licen[cs]e|header|todo|typo|spell|wording|"
    r"javadoc|jsdoc|rustdoc|docs?\b|translat",
    re.IGNORECASE,
)
_ABOUT_LAYOUT = re.compile(
    r"format|quote|indent|white ?space|blank|line length|wrap|layout|pep ?8|style|trailing|tabs?\b|spaces\b|"
    r"lint|black\b|prettier|align|lines?\b|comma|parenthes|bracket|import",
    re.IGNORECASE,
)
_MOST_HUNKS = 60
_MOST_PLACES = 24
_ALIKE = 0.6


def remove_drift(old: str, new: str, path: str, instruction: str) -> str:
    """`new` without changes that change no code."""
    language = language_of(path)
    if language is None or old == new:
        return new
    remarks = bool(_ABOUT_REMARKS.search(instruction))
    layout = bool(_ABOUT_LAYOUT.search(instruction))
    if remarks and layout:
        return new
    wanted = code_tokens(new, language, remarks=remarks, layout=layout)
    if code_tokens(old, language, remarks=remarks, layout=layout) == wanted:
        # In other indented languages the tokens do not contain the indentation.
        free = language == "python" or language not in INDENTED
        same = free and code_tokens(old, language, remarks=True) == code_tokens(new, language, remarks=True)
        if same and not layout:
            return old  # only blank lines, quotes or commas
        return new  # only comments and layout changed: that was the task
    text = new
    if not remarks:
        kept = _with_old_remarks(old, new, language)
        if code_tokens(kept, language, layout=layout) == wanted:
            text = kept
    before, after = old.splitlines(keepends=True), text.splitlines(keepends=True)
    spans = compare(before, after)
    for a0, a1, b0, b1 in reversed(spans if len(spans) <= _MOST_HUNKS else []):
        # Try the old lines in place of all new ones, then of the first or last of them.
        places = [(b0, b1), *((k, b1) for k in range(b0 + 1, b1)), *((b0, k) for k in range(b1 - 1, b0, -1))]
        for start, end in places[: _MOST_PLACES if a1 > a0 else 1]:
            trial = [*after[:start], *before[a0:a1], *after[end:]]
            if code_tokens("".join(trial), language, remarks=remarks, layout=layout) == wanted:
                after = trial
                break
    return "".join(after)


# ── comments stay with the line below them ──


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of code with the comments and blank lines above it. `key` is its code."""

    above: tuple[tuple[str, bool], ...]  # text, and whether it is a docstring's
    text: str
    key: str
    defines: bool


def _with_old_remarks(old: str, new: str, language: str) -> str:
    before, end = _code_lines(old, language)
    after, _ = _code_lines(new, language)
    out: list[str] = []
    i = j = 0
    spans = compare([line.key for line in before], [line.key for line in after])
    for a0, a1, b0, b1 in [*spans, (len(before), len(before), len(after), len(after))]:
        for k in range(i, a0):
            # After an insertion, keep the model's blank lines.
            inserted = k == i and bool(out) and i > 0 and j > 0 and _only_blank(before[k].above)
            out += [text for text, _ in (after[j].above if inserted else before[k].above)]
            out.append(before[k].text)
            j += 1
        for k in range(b0, b1):
            twin = before[a0 + k - b0] if a0 + k - b0 < a1 else None
            out += _above(after, k, b0, twin)
            out.append(_with_trailing(after[k], twin, language))
        i, j = a1, b1
    return "".join([*out, *end])


def _only_blank(above: Sequence[tuple[str, bool]]) -> bool:
    return not any(text.strip() for text, _ in above)


def _above(after: Sequence[_Line], at: int, first: int, twin: _Line | None) -> list[str]:
    """What goes above a new line: the comments of the line it replaces, else blank lines, and comments only
    in a new definition."""
    line = after[at]
    if twin is not None:
        return [text for text, _ in twin.above]
    within = line.defines or any(other.defines for other in after[first:at])
    return [text for text, _ in line.above if not text.strip() or within]


def _with_trailing(line: _Line, twin: _Line | None, language: str) -> str:
    """The line with the trailing comment of the line it replaces."""
    if twin is None or SequenceMatcher(None, twin.text, line.text, autojunk=False).ratio() < _ALIKE:
        return line.text
    mark = {"python": "#", "ruby": "#", "bash": "#", "yaml": "#"}.get(language, "//")
    code, found, remark = twin.text.rstrip("\r\n").partition(f"  {mark}")
    if not found or mark in line.text or twin.key.strip() != " ".join(code.split()).replace("'", '"'):
        return line.text
    bare = line.text.rstrip("\r\n")
    return f"{bare}  {mark}{remark}{line.text[len(bare) :]}"


def _code_lines(text: str, language: str) -> tuple[list[_Line], list[str]]:
    """The lines with code, and the lines after the last of them."""
    lines = text.splitlines(keepends=True)
    remark: dict[int, bool] = {}
    trailing: dict[int, int] = {}
    defines: set[int] = set()
    for node in walk(parse_tree(text, language)):
        span = node.range()
        docstring = language == "python" and _is_docstring(node)
        if "comment" in node.kind() or docstring:
            first = lines[span.start.line] if span.start.line < len(lines) else ""
            if first[: span.start.column].strip():
                trailing[span.start.line] = span.start.column
                continue
            last = span.end.line - (span.end.column == 0 and span.end.line > span.start.line)
            for number in range(span.start.line, last + 1):
                remark[number] = docstring
        elif re.search(r"(?:function|method|class|struct|constructor|impl|interface)_?", node.kind()) and (
            node.kind().endswith(("definition", "declaration", "item", "specifier"))
        ):
            defines.add(span.start.line)
    found: list[_Line] = []
    above: list[tuple[str, bool]] = []
    for number, line in enumerate(lines):
        if number in remark or not line.strip():
            above.append((line, remark.get(number, False)))
            continue
        code = line[: trailing.get(number, len(line))]
        indent = line[: len(line) - len(line.lstrip())]
        key = indent + " ".join(code.split()).replace("'", '"')
        found.append(_Line(tuple(above), line, key, number in defines))
        above = []
    return found, [line for line, _ in above]


# ── code tokens ──

_ENDS = (")", "]", "}")
_QUOTES = ("string_start", "string_end", '"', "'")


def code_tokens(text: str, language: str, *, remarks: bool = False, layout: bool = False) -> list[str]:
    """The tokens of a text. Without `remarks`, comments and docstrings are left out; without `layout`, the
    kind of quotes and trailing commas are ignored. Significant indentation is kept."""
    tokens: list[str] = []
    stack = [parse_tree(text, language)]
    while stack:
        node = stack.pop()
        kind = node.kind()
        if not remarks and ("comment" in kind or (language == "python" and _is_docstring(node))):
            continue
        children = node.children()
        if not children:
            plain = not layout and kind in _QUOTES
            tokens.append(node.text().replace("'", '"') if plain else node.text().strip())
            continue
        if kind == "block" and language == "python":
            tokens.append(f"\0{node.range().start.column}")
        stack.extend(reversed(children))
    if layout:
        return tokens
    following = [*tokens[1:], ""]
    return [t for t, after in zip(tokens, following, strict=True) if t and not (t == "," and after in _ENDS)]


def _is_docstring(node: SgNode) -> bool:
    """Whether the node is a string used as a statement."""
    return node.kind() == "expression_statement" and [c.kind() for c in node.children()] == ["string"]
