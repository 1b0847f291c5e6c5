"""Removes unrequested changes from a rewritten text: lost comments, other quotes, other layout.

A line whose code is unchanged stays as it was, comments included; a hunk that changes no code token is
reverted. If nothing but comments and layout changed, or the instruction speaks of them, they stay.
"""

from __future__ import annotations

import re
from collections import Counter
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
        kept = _restore_old_remarks(old, new, language)
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


def restore_remarks(old: str, new: str, path: str, instruction: str) -> str:
    """`new` with the comments and docstrings that it lost although their code stayed. Added and reworded ones
    are kept."""
    language = language_of(path)
    if language is None or old == new or _ABOUT_REMARKS.search(instruction):
        return new
    restored = _restore_old_remarks(old, new, language, additions=True)
    wanted = code_tokens(new, language)
    if code_tokens(old, language) == wanted or code_tokens(restored, language) != wanted:
        return new
    return restored


# ── comments stay with the line below them, docstrings with the line above ──


@dataclass(frozen=True, slots=True)
class _Remark:
    """A comment, a docstring or a blank line: whole lines."""

    text: str
    docstring: bool = False

    @property
    def blank(self) -> bool:
        return not self.text.strip()

    @property
    def key(self) -> str:
        return " ".join(self.text.split())


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of code with the remarks above it. `key` is its code."""

    above: tuple[_Remark, ...]
    text: str
    key: str
    defines: bool


def _restore_old_remarks(old: str, new: str, language: str, *, additions: bool = False) -> str:
    """`new` with the remarks of `old` wherever its code stays. A remark that both texts have stays where the
    new one has it; a lost one returns, unless the code it belongs to is gone; an added one is dropped outside
    new definitions. With `additions`, added ones stay, and replace lost ones at the same place."""
    before, before_end = _code_lines(old, language)
    after, after_end = _code_lines(new, language)
    out: list[str] = []
    i = j = 0
    spans = compare([line.key for line in before], [line.key for line in after])
    # A last line without text carries what follows the code.
    before.append(_Line(tuple(before_end), "", "", False))
    after.append(_Line(tuple(after_end), "", "", False))
    for a0, a1, b0, b1 in [*spans, (len(before), len(before), len(after), len(after))]:
        for line, other in zip(before[i:a0], after[j:b0], strict=True):
            above = (
                other.above if additions and any(not remark.blank for remark in other.above) else line.above
            )
            out += [*(remark.text for remark in above), line.text]
        if b1 > b0 or a1 > a0:
            if b1 > b0:
                out += _merge_changes(before[a0 : a1 + 1], after[b0 : b1 + 1], language, additions)
            else:
                out += _remarks_above(before[a0:a1], before[a1])
            out.append(before[a1].text)
            a1, b1 = a1 + 1, b1 + 1
        i, j = a1, b1
    return "".join(out)


def _merge_changes(
    before: Sequence[_Line], after: Sequence[_Line], language: str, additions: bool
) -> list[str]:
    """The text of changed lines `after`, all but the text of the last, which both have."""
    twins = _match_lines(before[:-1], after[:-1])
    owner = {**{old: new for new, old in twins.items()}, len(before) - 1: len(after) - 1}
    there = Counter(remark.key for line in after for remark in line.above)
    lost: dict[int, list[_Remark]] = {}
    for number, line in enumerate(before):
        for remark in line.above:
            if remark.blank:
                continue
            if there[remark.key] > 0:
                there[remark.key] -= 1
            elif remark.docstring:  # belongs to the line above it
                lost.setdefault(owner.get(number - 1, -1) + 1 if number else 0, []).append(remark)
            elif number in owner:
                lost.setdefault(owner[number], []).append(remark)
    known = Counter(remark.key for line in before for remark in line.above)
    if additions and any(not known[r.key] for line in after for r in line.above if not r.blank):
        lost = {}  # reworded
    out: list[str] = []
    inside = False  # a new definition, whose comments are part of the task
    for number, line in enumerate(after):
        inside = inside or (line.defines and number not in twins and number < len(after) - 1)
        back = lost.get(number, [])
        out += [remark.text for remark in back if remark.docstring]
        for remark in line.above:
            keep = additions or remark.blank or known[remark.key] > 0
            keep = keep or (inside and number < len(after) - 1)
            out += [remark.text] if keep else []
            known[remark.key] -= not remark.blank
        out += [remark.text for remark in back if not remark.docstring]
        if number < len(after) - 1:
            twin = before[twins[number]] if number in twins else None
            out.append(_restore_trailing_remark(line, twin, language))
    return out


def _remarks_above(removed: Sequence[_Line], line: _Line) -> list[str]:
    """What is above a line whose predecessors were removed: its own remarks, and the docstring of the
    definition that begins before them."""
    docstrings = [remark.text for remark in (removed[0].above if removed else ()) if remark.docstring]
    return [*docstrings, *(remark.text for remark in line.above)]


def _match_lines(before: Sequence[_Line], after: Sequence[_Line]) -> dict[int, int]:
    """Which old line each new one replaces, in order: the most similar, or its position where as many lines
    are added as removed."""
    if len(before) == len(after):
        return {number: number for number in range(len(after))}
    found: dict[int, int] = {}
    at = 0
    for number, line in enumerate(after):
        ratios = [
            (SequenceMatcher(None, other.text, line.text, autojunk=False).ratio(), -index, index)
            for index, other in enumerate(before)
            if index >= at
        ]
        best = max(ratios, default=(0.0, 0, 0))
        if best[0] >= _ALIKE:
            found[number] = best[2]
            at = best[2] + 1
    return found


def _restore_trailing_remark(line: _Line, twin: _Line | None, language: str) -> str:
    """The line with the trailing comment of the line it replaces."""
    if twin is None or SequenceMatcher(None, twin.text, line.text, autojunk=False).ratio() < _ALIKE:
        return line.text
    mark = {"python": "#", "ruby": "#", "bash": "#", "yaml": "#"}.get(language, "//")
    code, found, remark = twin.text.rstrip("\r\n").partition(f"  {mark}")
    if not found or mark in line.text or twin.key.strip() != " ".join(code.split()).replace("'", '"'):
        return line.text
    bare = line.text.rstrip("\r\n")
    return f"{bare}  {mark}{remark}{line.text[len(bare) :]}"


def _code_lines(text: str, language: str) -> tuple[list[_Line], list[_Remark]]:
    """The lines with code, and the remarks after the last of them."""
    lines = text.splitlines(keepends=True)
    remarks: dict[int, tuple[int, bool]] = {}  # first line: the line after the last, whether a docstring
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
            remarks.setdefault(span.start.line, (last + 1, docstring))
        elif re.search(r"(?:function|method|class|struct|constructor|impl|interface)_?", node.kind()) and (
            node.kind().endswith(("definition", "declaration", "item", "specifier"))
        ):
            defines.add(span.start.line)
    found: list[_Line] = []
    above: list[_Remark] = []
    number = 0
    while number < len(lines):
        line = lines[number]
        end, docstring = remarks.get(number, (number + 1, False))
        if number in remarks or not line.strip():
            above.append(_Remark("".join(lines[number:end]), docstring))
            number = end
            continue
        code = line[: trailing.get(number, len(line))]
        indent = line[: len(line) - len(line.lstrip())]
        key = indent + " ".join(code.split()).replace("'", '"')
        found.append(_Line(tuple(above), line, key, number in defines))
        above = []
        number += 1
    return found, above


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
