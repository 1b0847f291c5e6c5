"""Splits a text into units that are audited separately: each outermost function or method, and the rest.

Splitting is lexical and depends on the text alone, so an audit after an edit and an audit from scratch see
the same units, also where the text has syntax errors.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

Nesting = int | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SourceUnit:
    """`text[start:end]`, parsed between `before` and `after` to be valid on its own."""

    start: int
    end: int
    before: str = ""
    after: str = ""
    outer: Nesting = 0  # enclosing classes, namespaces and wrappers
    recovered: bool = False  # its braces never close: its end depends on the text behind it
    skipped: bool = False  # the head or tail of a wrapper: neither audited nor part of the outline


@dataclass(frozen=True, slots=True)
class FileOutline:
    """The text with each unit replaced by an empty statement; `origin` maps offsets back to the text."""

    text: str
    starts: tuple[int, ...]
    origins: tuple[int, ...]

    def origin(self, offset: int) -> int:
        at = bisect_right(self.starts, offset) - 1
        return self.origins[at] + offset - self.starts[at]


Stop = Callable[[int, Nesting], bool]  # (start of a unit, its `outer`) -> whether the rest is known


def split(
    text: str, language: str, at: int = 0, outer: Nesting = 0, stop: Stop | None = None
) -> list[SourceUnit]:
    """The units from `at` on, which is 0 or the start of a unit with this `outer`."""
    if language == "python":
        return _split_python(text, at, stop or _never)
    if language in ("javascript", "typescript", "tsx"):
        return _split_script(text, at, outer, stop or _never)
    assert isinstance(outer, int)
    return _split_braces(text, language, at, outer, stop or _never)


def resplit(
    text: str, language: str, old: list[SourceUnit], start: int, end: int, delta: int
) -> list[SourceUnit]:
    """Equals `split(text)`, from the units before an edit of `[start, end)` that added `delta` characters.

    Splitting resumes one unit before the edit and stops at a unit start that the old text had too. In Python
    an edit behind the first word of a unit resumes at that unit.
    """
    resume = 0
    while resume < len(old) and old[resume].end < start and not old[resume].recovered:
        resume += 1
    if language == "python" and resume < len(old) and _head_end(text, old[resume].start) < start:
        first: SourceUnit | None = old[resume]
    else:
        resume = max(0, resume - 1)
        first = old[resume] if old and resume and old[resume].end < start else None
    kept = old[:resume] if first else []
    later = {(unit.start + delta, unit.outer): at for at, unit in enumerate(old) if unit.start > end}
    tail: list[int] = []

    def known(at: int, outer: Nesting) -> bool:
        found = later.get((at, outer))
        if found is None:
            return False
        tail.append(found)
        return True

    fresh = split(text, language, first.start if first else 0, first.outer if first else 0, known)
    rest = old[tail[0] :] if tail else []
    if delta:
        rest = [
            SourceUnit(u.start + delta, u.end + delta, u.before, u.after, u.outer, u.recovered, u.skipped)
            for u in rest
        ]
    return kept + fresh + rest


def _never(at: int, outer: Nesting) -> bool:
    return False


def outline_of(text: str, units: list[SourceUnit], language: str) -> FileOutline:
    pieces: list[str] = []
    starts: list[int] = []
    origins: list[int] = []
    at = length = 0
    for unit in units:
        kept = text[at : unit.start]
        # `pass` needs the unit's own indentation: a unit starts at the start of its line.
        filler = _indent(text, unit.start) + "pass\n" if language == "python" else ";\n"
        starts += [length, length + len(kept)]
        origins += [at, unit.start]
        pieces += [kept, filler]
        length += len(kept) + len(filler)
        at = unit.end
    starts.append(length)
    origins.append(at)
    pieces.append(text[at:])
    return FileOutline("".join(pieces), tuple(starts), tuple(origins))


_BLANK = re.compile(r"[ \t]*")


def _indent(text: str, at: int) -> str:
    found = _BLANK.match(text, at)
    return found.group() if found is not None else ""


_PYTHON = re.compile(
    r"""(?P<long>'''|\"\"\")"""
    r"""|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?"""
    r"""|\#[^\n]*"""
    r"""|^(?P<indent>[ \t]*)(?:(?P<define>async[ \t]+def\b|def\b)|(?P<mark>@)|[^\s\#)\]}"'])""",
    re.MULTILINE | re.DOTALL,
)
_LONG_END = {
    quote * 3: re.compile(
        rf"[^\\{quote}]*+(?:(?:\\.|{quote}(?!{quote}{quote}))[^\\{quote}]*+)*+{quote}{quote}{quote}",
        re.DOTALL,
    )
    for quote in "'\""
}


def _split_python(text: str, at: int, stop: Stop) -> list[SourceUnit]:
    units: list[SourceUnit] = []
    inside = -1  # the indentation of the current unit, -1 between units
    start = 0
    mark: tuple[int, int] | None = None  # (offset, indentation) of the first decorator of the next definition
    scan = _PYTHON.search
    while found := scan(text, at):
        at = found.end()
        if found["long"]:
            closed = _LONG_END[found["long"]].match(text, at)
            at = closed.end() if closed else len(text)
            continue
        indent = found["indent"]
        if indent is None:
            continue
        depth = len(indent)
        if inside >= 0:
            if depth > inside:
                continue
            units.append(_python_unit(text, start, found.start(), inside))
            inside = -1
        if found["define"]:
            start = mark[0] if mark and mark[1] == depth else found.start()
            inside, mark = depth, None
            if stop(start, 0):
                return units
        elif found["mark"]:
            mark = mark or (found.start(), depth)
        else:
            mark = None
    if inside >= 0:
        units.append(_python_unit(text, start, len(text), inside))
    return units


def _head_end(text: str, at: int) -> int:
    """The end of the first word of a unit."""
    found = _PYTHON.match(text, at)
    return found.end() if found is not None else len(text)


def _python_unit(text: str, start: int, end: int, indent: int) -> SourceUnit:
    return SourceUnit(start, end, "class _:\n" if indent else "")


_BRACES = re.compile(
    r"""//[^\n]*|/\*.*?(?:\*/|\Z)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?|`[^`]*`?"""
    r"""|^[ \t]*\#(?:[^\n\\]|\\.)*|[{};]|^\}|^func\b""",
    re.MULTILINE | re.DOTALL,
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?(?:\*/|\Z)", re.DOTALL)
_CONTAINER = {
    "java": re.compile(r"\b(?:class|interface|enum|record)\s+\w"),
    "c": re.compile(r'\bextern\s*"C"\s*$'),
    "cpp": re.compile(
        r'\bextern\s*"C"\s*$|\bnamespace\b[^()=;]*$|^(?!.*\()(?!.*=).*\b(?:class|struct)\s+\w', re.DOTALL
    ),
    "go": re.compile(r"(?!)"),
}


def _split_braces(text: str, language: str, at: int, outer: int, stop: Stop) -> list[SourceUnit]:
    container = _CONTAINER[language]
    wrap = ("class _ {", "}") if language == "java" else ("", "")
    units: list[SourceUnit] = []
    depth = outer  # open braces, including `outer` containers
    head = at  # start of the current declaration
    start = -1  # start of the current unit
    recover = False  # the unit has unbalanced braces: a closing brace in the first column ends it
    while True:
        found = _BRACES.search(text, at)
        if found is None:
            if start < 0:
                break
            if not recover and depth > outer:
                recover, depth, at = True, outer, start
                continue
            units.append(SourceUnit(start, len(text), *wrap, outer, recover))
            break
        at = found.end()
        mark = text[found.start()]
        if mark == "{":
            if depth == outer and start < 0:
                header = _COMMENT.sub(" ", text[head : found.start()])
                if container.search(header):
                    depth += 1
                    outer += 1
                    head = at
                    continue
                if header.startswith("func") if language == "go" else _defines(header):
                    start = _skip_space(text, head)
                if start >= 0 and stop(start, outer):
                    return units
            depth += 1
        elif mark == "}":
            depth -= 1
            if recover and start >= 0 and (found.start() == 0 or text[found.start() - 1] == "\n"):
                depth = outer
            if depth < outer:
                outer = depth = max(depth, 0)
                head = at
            elif depth == outer:
                if start >= 0:
                    units.append(SourceUnit(start, at, *wrap, outer, recover))
                    start, recover = -1, False
                head = at
        elif mark == "f":
            if depth == outer and start < 0 and language == "go":
                head = found.start()
        elif (
            depth == outer
            and start < 0
            and (mark == ";" or text[found.start() : at].lstrip().startswith("#"))
        ):
            head = at
    return units


def _defines(header: str) -> bool:
    opening = header.find("(")
    if opening < 0:
        return False
    assigned = header.find("=")
    if 0 <= assigned < opening and "operator" not in header:
        return False
    return ")" in header


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


_SCRIPT = re.compile(
    r"""//[^\n]*|/\*.*?(?:\*/|\Z)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?"""
    r"""|`(?:\\.|\$\{(?:[^{}`]|\{[^{}]*\}|`[^`]*`)*\}|[^`\\])*`?"""
    r"""|(?:(?<=[=(,:;!&|?{}\[\n])|(?<=return))[ \t]*/(?![/*])(?:\\.|\[(?:\\.|[^\]\n\\])*\]|[^/\n\\\[])+/"""
    r"""|[(){}\[\];]|^[ \t]*(?=[\w$@'"(])""",
    re.MULTILINE | re.DOTALL,
)
_SCRIPT_CLASS = re.compile(
    r"^\s*(?:export\s+)?(?:default\s+)?(?:abstract\s+)?class\b(?:[^({=<]|<[^({]*>)*$", re.DOTALL
)
# Functions that only wrap the statements of a module: their statements are split like those of a file.
_FUNCTION = r"(?:async\s*)?(?:function\b[^(]*\([^()]*\)|(?:\([^()]*\)|[\w$]+)\s*=>)\s*$"
# What an exported function is given if it sets up a part of a program, rather than computing something.
_PLUGIN = "app|router|server|grunt|gulp|passport|io|fastify|express|hexo|plop"
_WRAPPER = re.compile(
    r"^\s*(?:"
    rf"(?:(?:(?:var|let|const)\s+)?[\w$.]+\s*=\s*)*[;!+~\s]*(?:\(\s*|(?<=[!+~;])\s*){_FUNCTION}"
    rf"|(?:exports\s*=\s*)?module\.exports\s*=\s*(?=[^(]*\(\s*(?:{_PLUGIN})\b){_FUNCTION}"
    rf"|(?:define|require|requirejs|describe|context|suite|(?:\$|jQuery)(?:\s*\(\s*document\s*\)\s*\.ready)?)"
    rf"\s*\((?:[^{{}}]*,)?\s*{_FUNCTION}"
    r"|(?:export\s+)?(?:declare\s+)?(?:namespace|module|global)\s+[\w$.\"']*\s*$"
    r")",
    re.DOTALL,
)
_RETURN_TYPE = re.compile(r"\)\s*:\s*([^;={}()]*[^;={}(),:|&<\s])$")


def _returns_type(before: str) -> bool:
    """Whether the text before a brace ends with the type that a method returns."""
    found = _RETURN_TYPE.search(before)
    return found is not None and found[1].count("<") == found[1].count(">")


_IN_TAIL = re.compile(_FUNCTION, re.DOTALL)
_MAX_HEADER = 2000  # characters; a longer head of a statement is no wrapper
CLASS = -1
_PARTNER = {")": "(", "]": "["}
_DECLARES = re.compile(
    r"[ \t]*(?:(?P<value>(?:async[ \t]+)?function\b[ \t*]*(?P<name>\w*)|class\b)"
    r"|(?:var|let|const|export|module\.exports)\b|import\b(?![ \t]*\())"
)
_LINE_COMMENT = re.compile(r"//[^\n]*$")
_FOR = re.compile(r"\bfor(?:\s+await)?\s*\($")


def _starts_statement(text: str, at: int) -> bool:
    """Whether the line at `at` starts a statement, so that a bracket before it is still to be closed."""
    found = _DECLARES.match(text, at)
    if found is None:
        return False
    before = text[max(0, at - 200) : at].rstrip()
    before = _LINE_COMMENT.sub("", before).rstrip()
    if found["value"] is None:
        return _FOR.search(before) is None
    # A function or class behind a comma is an argument; behind a bracket only one without a name.
    return not before.endswith((",", "=", ":", "?", "&&", "||", "=>", "(" if not found["name"] else ","))


def _split_script(text: str, at: int, outer: Nesting, stop: Stop) -> list[SourceUnit]:
    units: list[SourceUnit] = []
    # The enclosing containers: for a wrapper the brackets open before its brace, CLASS for a class.
    nest: tuple[int, ...] = outer if isinstance(outer, tuple) else ()
    open_brackets: list[str] = []  # in the current statement
    head = at
    kept = False  # the current statement contains a function and becomes a unit
    tail: tuple[int, ...] | None = None  # behind a wrapper's end: the containers before it

    def emit(start: int, end: int, inside: tuple[int, ...], skipped: bool) -> bool:
        """Adds a unit; True if the remaining units are known."""
        if stop(start, inside):
            return True
        wrap = ("class _ {", "}") if inside and inside[-1] == CLASS and not skipped else ("", "")
        units.append(SourceUnit(start, end, *wrap, inside, skipped=skipped))
        return False

    def close(end: int) -> bool:
        """Ends the statement at `end`; True if the remaining units are known."""
        nonlocal head, kept, tail
        start = _skip_space(text, head)
        head, was, kept, behind, tail = end, kept, False, tail, None
        if start >= end:
            return False
        if behind is not None:
            return emit(start, end, behind, True)
        return was and emit(start, end, nest, False)

    while found := _SCRIPT.search(text, at):
        at = found.end() if found.end() > found.start() else found.start() + 1
        piece = found.group()
        mark = piece.lstrip()[:1]
        single = len(piece) == 1
        done = False
        if not mark:
            if open_brackets and "{" not in open_brackets and _starts_statement(text, found.start()):
                open_brackets = []  # a bracket that is still to be closed
            done = not open_brackets and close(found.start())
        elif single and mark in "([":
            open_brackets.append(mark)
        elif single and mark == "{":
            header = text[head : found.start()] if found.start() - head < _MAX_HEADER else ""
            opened = None
            if header and not kept and (tail is not None or header.lstrip()[:1] != "{"):
                header = _COMMENT.sub(" ", header)
                if not open_brackets and tail is None and _SCRIPT_CLASS.match(header):
                    opened = CLASS
                elif nest[-1:] != (CLASS,) and (_WRAPPER if tail is None else _IN_TAIL).search(header):
                    opened = len(open_brackets)
            if opened is not None:
                if opened != CLASS and emit(
                    _skip_space(text, head), at, nest if tail is None else tail, True
                ):
                    return units
                nest = (*nest, opened)
                open_brackets, head, kept, tail = [], at, False, None
                continue
            if not kept and tail is None:
                before = text[max(head, found.start() - 160) : found.start()].rstrip()
                kept = (
                    before.endswith((")", "=>"))
                    or "function" in before
                    or (nest[-1:] == (CLASS,) and _returns_type(before))
                )
            open_brackets.append(mark)
        elif single and mark in ")]":
            if open_brackets and open_brackets[-1] == _PARTNER[mark]:
                open_brackets.pop()  # any other closes nothing
        elif single and mark == "}":
            ended = True
            while open_brackets and ended:  # brackets inside the braces that are still to be closed
                ended = open_brackets.pop() != "{"
            if ended and nest:
                done = close(found.start())
                behind, opened = nest, nest[-1]
                nest = nest[:-1]
                if opened == CLASS:
                    head = at
                else:
                    open_brackets, head, tail = ["("] * opened, found.start(), behind
            elif ended:
                kept, head, tail = False, at, None
            elif not open_brackets and nest[-1:] == (CLASS,):
                done = close(at)
        elif single and mark == ";" and not open_brackets:
            done = close(at)
        if done:
            return units
    close(len(text))
    return units
