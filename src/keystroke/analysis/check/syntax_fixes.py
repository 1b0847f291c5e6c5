"""Small edits that make a Python text parse.

Proposes edits near a syntax error and keeps those with which the parser reaches the end of the text, or else
an error on a later line.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from keystroke.analysis.check.candidates import line_end
from keystroke.analysis.check.diagnostic import Fix
from keystroke.analysis.syntax import parse_quietly
from keystroke.text import Document, Edit, apply_edits

MAX_TRIES = 60
LONGEST_LINE = 2000  # characters of a line that a fix is looked for in
_HEADER = re.compile(
    r"^\s*(?:async\s+)?(?:if|elif|else|for|while|try|except|finally|with|def|class|match|case)\b"
)
_CLOSERS = {"(": ")", "[": "]", "{": "}"}
_TYPOGRAPHIC = {
    "\u201c": '"', "\u201d": '"', "\u2018": "'", "\u2019": "'", "\u00a0": " ", "\u200b": "", "\ufeff": "",
    "\uff08": "(", "\uff09": ")", "\uff0c": ",", "\uff1a": ":", "\u2212": "-", "\u2013": "-", "\u2260": "!=",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ParseFailure:
    """The position and the message of a syntax error. Lines count from 0."""

    message: str
    line: int
    start: int
    end: int


def parse_failure(text: str) -> ParseFailure | None:
    """The first syntax error; None for a text that parses."""
    try:
        parse_quietly(text)
    except SyntaxError as error:
        document = Document(text)
        line = min(max((error.lineno or 1) - 1, 0), document.line_count - 1)
        first, last = document.line_span(line)
        start = min(first + max((error.offset or 1) - 1, 0), last)
        end = start
        if error.end_lineno and error.end_offset and error.end_lineno > 0:
            end_line = min(error.end_lineno - 1, document.line_count - 1)
            end = min(document.line_span(end_line)[0] + max(error.end_offset - 1, 0), len(text))
        return ParseFailure(error.msg, line, start, max(end, start))
    except (ValueError, RecursionError, MemoryError) as error:
        return ParseFailure(f"cannot be parsed: {error}", 0, 0, 0)
    return None


def syntax_fixes(text: str, error: ParseFailure, limit: int = 3) -> tuple[Fix, ...]:
    """Checked fixes, those after which the whole text parses first. Very long lines get none, because the
    patterns take quadratic time on them."""
    if any(len(line) > LONGEST_LINE for line in _lines_around(text, error)):
        return ()
    whole: list[Fix] = []
    partly: list[Fix] = []
    seen: set[tuple[Edit, ...]] = set()
    for title, edits in islice(_candidates(text, error), MAX_TRIES):
        if edits in seen:
            continue
        seen.add(edits)
        left = parse_failure(apply_edits(text, edits))
        if left is None:
            whole.append(Fix(title, edits))
        elif left.line > error.line + 1 and left.message != error.message:
            partly.append(Fix(title, edits))
        if len(whole) >= limit:
            break
    return tuple((whole or partly)[:limit])


_Candidate = tuple[str, tuple[Edit, ...]]


def _lines_around(text: str, error: ParseFailure) -> list[str]:
    """The lines next to the error, which candidates are looked for in."""
    return text.split("\n", error.line + 3)[max(error.line - 2, 0) : error.line + 3]


def _candidates(text: str, error: ParseFailure) -> Iterator[_Candidate]:
    document = Document(text)
    makers = (_fix_characters, _fix_indent, _fix_assignment, _fix_brackets, _fix_strings)
    for maker in (*makers, _fix_fstrings, _fix_words, _insert_colon, _insert_comma, _insert_sign):
        yield from maker(text, document, error, error.message)


def _edit(title: str, start: int, end: int, new: str) -> _Candidate:
    return title, (Edit(start, end, new),)


def _code_end(line: str) -> int:
    """The end of the code of a line, without its comment and trailing blanks."""
    try:
        for token in tokenize.generate_tokens(io.StringIO(line.lstrip()).readline):
            if token.type == tokenize.COMMENT:
                at = len(line) - len(line.lstrip()) + token.start[1]
                return len(line[:at].rstrip())
    except (tokenize.TokenError, SyntaxError):
        pass
    return len(line.rstrip())


def _nearby_lines(document: Document, line: int) -> Iterator[int]:
    """The error's line, then the previous line of code, where the cause often is."""
    yield line
    for before in range(line - 1, max(-1, line - 6), -1):
        if document.line(before).strip():
            yield before
            return


def _indent_of(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _fix_characters(text: str, document: Document, error: ParseFailure, message: str) -> Iterator[_Candidate]:
    """Typographic characters of pasted code."""
    if "invalid character" not in message and "non-printable" not in message:
        return
    table = _TYPOGRAPHIC
    first, last = document.line_span(error.line)
    for start, end in ((first, last), (0, len(text))):
        edits = tuple(Edit(at, at + 1, table[text[at]]) for at in range(start, end) if text[at] in table)
        if edits:
            yield "Replace typographic characters by plain ones", edits


def _fix_indent(text: str, document: Document, error: ParseFailure, message: str) -> Iterator[_Candidate]:
    lines = [document.line(n) for n in range(document.line_count)]
    line = error.line
    first = document.line_span(line)[0]
    own = _indent_of(lines[line])
    unit = next((_indent_of(item) for item in lines if _indent_of(item)), "    ")
    unit = "\t" if unit.startswith("\t") else unit if 1 < len(unit) <= 8 else "    "
    if "inconsistent use of tabs" in message:
        for width in (4, 8, 2):
            edits = tuple(
                Edit(document.line_span(n)[0], document.line_span(n)[0] + len(_indent_of(item)), spaced)
                for n, item in enumerate(lines)
                if item.strip() and (spaced := _indent_of(item).expandtabs(width)) != _indent_of(item)
            )
            if edits:
                yield "Indent with spaces throughout", edits
    elif "expected an indented block" in message:
        header = next((n for n in range(line - 1, -1, -1) if _HEADER.match(lines[n])), None)
        if header is None and _HEADER.match(lines[line]):
            header = line  # the text ends after it
        if header is None:
            return
        inner = _indent_of(lines[header]) + unit
        if lines[line].strip() and line != header and len(own) <= len(_indent_of(lines[header])):
            last = line
            while last + 1 < len(lines) and lines[last + 1].strip() and _indent_of(lines[last + 1]) == own:
                if _HEADER.match(lines[last + 1]) and not own:
                    break
                last += 1
            for upto in dict.fromkeys((line, last)):
                edits = tuple(
                    Edit(at, at + len(own), inner)
                    for n in range(line, upto + 1)
                    for at in [document.line_span(n)[0]]
                )
                yield "Indent the body" if upto == line else "Indent the whole body", edits
        end = document.line_span(header)[1]
        yield _edit("Put `pass` for the missing body", end, end, f"{line_end(text)}{inner}pass")
    elif "unexpected indent" in message or "unindent does not match" in message:
        levels = dict.fromkeys(
            _indent_of(lines[n]) for n in range(line - 1, max(-1, line - 200), -1) if lines[n].strip()
        )
        for level in sorted(levels, key=lambda item: abs(len(item) - len(own))):
            if level != own:
                yield _edit("Line the indentation up", first, first + len(own), level)


def _fix_assignment(text: str, document: Document, error: ParseFailure, message: str) -> Iterator[_Candidate]:
    if "'=='" not in message and "cannot assign" not in message and "invalid syntax" not in message:
        return
    first, last = document.line_span(error.line)
    for found in re.finditer(r"(?<![=!<>:+\-*/%&|^@])=(?!=)", text[first:last]):
        at = first + found.start()
        yield _edit("Compare with `==`", at, at + 1, "==")


def _fix_brackets(text: str, document: Document, error: ParseFailure, message: str) -> Iterator[_Candidate]:
    if found := re.search(r"closing parenthesis '(.)' does not match opening parenthesis '(.)'", message):
        right = _CLOSERS.get(found[2], ")")
        yield _edit(f"Close with `{right}`", error.start, error.start + 1, right)
        yield _edit(f"Insert `{right}`", error.start, error.start, right)
        return
    if closed := re.search(r"unmatched '([)\]}])'", message):
        yield _edit("Remove the bracket that closes nothing", error.start, error.start + 1, "")
        opener = next(item for item, closer in _CLOSERS.items() if closer == closed[1])
        first = document.line_span(error.line)[0]
        # The opening bracket may be missing: after a name, before a character that cannot follow a name.
        for found in re.finditer(r"(?<=[^\W\d])(?=[\[\({\"'\-*)\]])", text[first : error.start + 1]):
            yield _edit(f"Insert `{opener}`", first + found.start(), first + found.start(), opener)
        return
    if "never closed" in message:
        closer = _CLOSERS.get(text[error.start : error.start + 1], ")")
        line = error.line
    elif "invalid syntax" in message or "EOF" in message or "forgot a comma" in message:
        opened = _open_before(text, error.start)
        if opened is None:
            return
        closer, line = _CLOSERS[text[opened]], document.position(opened).line
    else:
        return
    base = len(_indent_of(document.line(line)))
    for at in range(line, min(line + 20, document.line_count)):
        content = document.line(at)
        if at > line and (not content.strip() or len(_indent_of(content)) <= base) and at > line + 1:
            break
        end = document.line_span(at)[0] + _code_end(content)
        code = content[: _code_end(content)]
        if code.endswith(":") and _HEADER.match(document.line(line)):
            yield _edit(f"Close with `{closer}`", end - 1, end - 1, closer)
        elif _HEADER.match(document.line(line)) and at == line:
            yield _edit(f"Close with `{closer}:`", end, end, f"{closer}:")
        if code.endswith(","):
            yield _edit(f"Close with `{closer}`", end - 1, end, closer)
        yield _edit(f"Close with `{closer}`", end, end, closer)
    # An inner bracket: it may end before what follows it.
    last = document.line_span(line)[1]
    for found in re.finditer(r"[\]\)\},:]", text[error.start : last]):
        place = error.start + found.start()
        yield _edit(f"Close with `{closer}`", place, place, closer)


def _open_before(text: str, at: int) -> int | None:
    """The innermost bracket still open at `at`, as far as the tokenizer can tell."""
    stack: list[int] = []
    document = Document(text)
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            offset = document.offset(token.start[0] - 1, token.start[1], "utf-32", clamp=True)
            if offset >= at:
                break
            if token.type == tokenize.OP and token.string in _CLOSERS:
                stack.append(offset)
            elif token.type == tokenize.OP and token.string in ")]}" and stack:
                stack.pop()
    except (tokenize.TokenError, SyntaxError):
        pass
    return stack[-1] if stack else None


def _fix_strings(text: str, document: Document, error: ParseFailure, message: str) -> Iterator[_Candidate]:
    if "unterminated" not in message:
        return
    quote = text[error.start : error.start + 1]
    at = error.start
    while quote and quote not in "\"'" and at + 1 < len(text):  # past a prefix: f, rb, ...
        at += 1
        quote = text[at : at + 1]
    if "triple" in message:
        quote = text[at : at + 3]
        end = len(text.rstrip())
        yield _edit(f"Close the string with {quote}", end, end, quote)
        return
    first, last = document.line_span(error.line)
    end = first + len(text[first:last].rstrip())
    tail = re.search(r"[\s\)\]\},:;]*$", text[at:end])
    start = at + tail.start() if tail else end
    for place in dict.fromkeys((start, *range(start + 1, end), end)):
        yield _edit(f"Close the string with {quote}", place, place, quote)
    # The quote may be a closing one whose opening quote is missing.
    for found in list(re.finditer(r"(?<=[\[\({,=\s+])(?=[^\s,)\]}])", text[first:at]))[::-1][:12]:
        yield _edit(f"Open the string with {quote}", first + found.start(), first + found.start(), quote)


def _fix_fstrings(text: str, document: Document, error: ParseFailure, message: str) -> Iterator[_Candidate]:
    if "f-string" not in message:
        return
    first, last = document.line_span(error.line)
    line = text[first:last]
    for found in re.finditer(r"""[fF][rR]?(["'])""", line):
        quote = found[1]
        other = "'" if quote == '"' else '"'
        body = found.end()
        end = line.rfind(quote)
        if end <= body:
            continue
        inner = line[body:end]
        if quote in inner and other not in inner:
            edits = tuple(
                Edit(first + body + at, first + body + at + 1, other)
                for at, c in enumerate(inner)
                if c == quote
            )
            yield f"Use {other} inside the f-string", edits
        close = line.find(quote, body)
        yield _edit("Close the brace", first + close, first + close, "}")
        for brace in re.finditer(r"\{\s*\}", inner):
            yield (
                "Write literal braces as {{}}",
                (Edit(first + body + brace.start(), first + body + brace.end(), "{{}}"),),
            )
        for brace in re.finditer(r"[{}]", inner):
            place = first + body + brace.start()
            yield _edit(f"Write a literal {brace[0]} twice", place, place, brace[0])


def _fix_words(text: str, document: Document, error: ParseFailure, message: str) -> Iterator[_Candidate]:
    """Words and operators of other languages."""
    for number in _nearby_lines(document, error.line):
        first, last = document.line_span(number)
        line = text[first:last]
        if found := re.match(r"(\s*)(?:else\s+if|elseif|elsif)\b", line):
            yield _edit("Write `elif`", first + len(found[1]), first + found.end(), "elif")
        if found := re.match(r"\s*(?:print|exec)\b(\s+)(?=[^\s(=])", line):
            start, end = first + found.start(1), first + _code_end(line)
            yield "Call it with parentheses", (Edit(start, start + len(found[1]), "("), Edit(end, end, ")"))
        for pattern, new, title in (
            (r"\s*&&\s*", " and ", "Write `and`"),
            (r"\s*\|\|\s*", " or ", "Write `or`"),
            (r"!(?!=)\s*", "not ", "Write `not`"),
            (r"===", "==", "Compare with `==`"),
            (r"!==", "!=", "Compare with `!=`"),
            (r"<>", "!=", "Compare with `!=`"),
        ):
            edits = tuple(Edit(first + m.start(), first + m.end(), new) for m in re.finditer(pattern, line))
            if edits:
                yield title, edits
        if found := re.search(r"(\w+)\s*(\+\+|--)\s*;?$", line[: _code_end(line)]):
            yield _edit("Write `+= 1`", first + found.end(1), first + found.end(), f" {found[2][0]}= 1")
        if found := re.match(r"(\s*)(?:function|func|fn|fun)\s+(?=\w+\s*\()", line):
            yield _edit("Write `def`", first + len(found[1]), first + found.end(), "def ")
        if found := re.match(r"\s*except\s+([\w.]+)\s*,\s*(\w+)\s*:", line):
            yield _edit("Write `as`", first + found.end(1), first + found.start(2), " as ")
        if found := re.match(r"\s*except\s+([\w.]+(?:\s*,\s*[\w.]+)+)\s*:", line):
            start, end = first + found.start(1), first + found.end(1)
            yield "Put the exceptions in parentheses", (Edit(start, start, "("), Edit(end, end, ")"))
        if found := re.match(r"\s*import\s+(.+?)\s+from\s+([\w.]+)", line):
            start = first + len(_indent_of(line))
            yield _edit(
                "Turn the import round", start, first + found.end(), f"from {found[2]} import {found[1]}"
            )
        if found := re.match(r"(?:\s*)(?:async\s+)?def\s+\w+(?=\s*(?:->|:|$))", line):
            yield _edit("Add the parentheses", first + found.end(), first + found.end(), "()")
            yield _edit("Add `():`", first + found.end(), first + found.end(), "():")
        if found := re.search(r"(?<![\w.])0+(?=[1-9]\d*\b)", line):
            yield _edit("Remove the leading zeros", first + found.start(), first + found.end(), "")
        if line.rstrip().endswith("{") and _HEADER.match(line):
            at = first + line.rstrip().rindex("{")
            yield _edit("Open the block with `:`", first + len(line[: at - first].rstrip()), at + 1, ":")


def _insert_colon(text: str, document: Document, error: ParseFailure, message: str) -> Iterator[_Candidate]:
    if "expected ':'" in message:
        at = len(text[: error.start].rstrip(" \t"))
        yield _edit("Add the colon", at, at, ":")
    if "invalid syntax" not in message and "expected" not in message:
        return
    for number in _nearby_lines(document, error.line):
        line = document.line(number)
        if _HEADER.match(line) and not line[: _code_end(line)].endswith(":"):
            end = document.line_span(number)[0] + _code_end(line)
            if line[: _code_end(line)].endswith((";", ",", ".", "=")):
                yield _edit("End the line with a colon", end - 1, end, ":")
            yield _edit("Add the colon", end, end, ":")


def _insert_comma(text: str, document: Document, error: ParseFailure, message: str) -> Iterator[_Candidate]:
    if "comma" not in message and "invalid syntax" not in message:
        return
    for found in re.finditer(
        r"(?<=[\w\"'\)\]\}])(?=\s+[\w\"'\(\[\{])", text[error.start : error.end or None][:2000]
    ):
        at = error.start + found.start()
        yield _edit("Add the comma", at, at, ",")


def _insert_sign(text: str, document: Document, error: ParseFailure, message: str) -> Iterator[_Candidate]:
    """A missing sign before the unexpected word."""
    if "invalid syntax" not in message:
        return
    first = document.line_span(error.line)[0]
    at = len(text[: error.start].rstrip(" \t"))
    if at <= first:
        return
    for mark in (" =", ":", ",", "."):
        yield _edit(f"Add `{mark.strip()}`", at, at, mark)
