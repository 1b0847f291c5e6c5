"""Extracts the examples in a function's description, as assertions.

Understands `>>>` sessions, assertions, lines such as `f(2) -> 4`, `Input: x = 2` with `Output: 4` below,
and `for x = 2 the output should be 4`; both sides must be literals. Unclear examples are left out: a wrong
one would refuse right answers.
"""

from __future__ import annotations

import ast
import doctest
import re
from collections.abc import Iterator

_ARROW = re.compile(
    r"\s*(?:==>|=>|==|->|➞|→|=(?!=)|(?:#\s*)?(?:should\s+|will\s+)?(?:returns?|gives|evaluates\s+to)|#\s*=?>?)"
    r"\s*:?\s*"
)
_GIVEN = re.compile(
    r"\bfor\s+(?P<given>\w+\s*=[^\n]+?),?\s+the\s+(?:output|result|answer)\s+(?:should|will|must)\s+be\s+"
    r"(?P<want>[^\n]+)",
    re.IGNORECASE,
)
_SHOWN = re.compile(
    r"^[ \t]*Input\s*:(?P<given>(?:(?!^[ \t]*(?:Input|Output)\b)[\s\S]){1,400}?)"
    r"^[ \t]*Output\s*:\s*(?P<want>[^\n]+)",
    re.IGNORECASE | re.MULTILINE,
)
_NAMED = re.compile(r"\b(?P<name>[A-Za-z_]\w*)\s*[=:]\s*")


def find_examples(text: str, entry: str) -> tuple[str, ...]:
    """Assertions about `entry` that `text` states, each once, in order."""
    text = text.replace('"""', "\n").replace("'''", "\n")  # the end of a docstring ends an example
    found = [*_find_assertions(text, entry), *_find_sessions(text, entry)]
    if not found:
        found = [*_find_calls(text, entry), *_find_inputs(text, entry)]
    return tuple(dict.fromkeys(found))


def _find_assertions(text: str, entry: str) -> Iterator[str]:
    for line in map(str.strip, text.splitlines()):
        if line.startswith("assert ") and entry in line and _parses(line):
            yield line


def _find_sessions(text: str, entry: str) -> Iterator[str]:
    try:
        known = doctest.DocTestParser().get_examples(text)
    except ValueError:
        return
    for example in known:
        source, want = example.source.strip(), example.want.strip()
        if entry not in source or not want or want.startswith("Traceback") or not _parses(source, "eval"):
            continue
        value = _leading_literal(want)
        if value is not None:
            yield f"assert {source} == {value}"


def _find_calls(text: str, entry: str) -> Iterator[str]:
    for found in re.finditer(rf"(?<![\w.]){re.escape(entry)}\s*\(", text):
        end = _closing_bracket(text, found.end() - 1)
        if end is None:
            continue
        call = re.sub(r"\s*\n\s*", " ", text[found.start() : end])
        rest = text[end:].split("\n", 1)[0]
        arrow = _ARROW.match(rest)
        if arrow is None or _leading_literal(f"[{call[call.index('(') + 1 : -1]}]") is None:
            continue
        value = _leading_literal(rest[arrow.end() :])
        if value is not None:
            yield f"assert {call} == {value}"


def _find_inputs(text: str, entry: str) -> Iterator[str]:
    """Examples that name parameters."""
    parameters = _parameter_names(text, entry)
    for found in (*_SHOWN.finditer(text), *_GIVEN.finditer(text)):
        value, given = _leading_literal(found["want"]), _format_arguments(found["given"], parameters)
        if value is not None and given is not None:
            yield f"assert {entry}({given}) == {value}"


def _parameter_names(text: str, entry: str) -> list[str]:
    found = re.search(rf"^def\s+{re.escape(entry)}\s*\(", text, re.MULTILINE)
    end = _closing_bracket(text, found.end() - 1) if found else None
    if found is None or end is None:
        return []
    try:
        (function,) = ast.parse(f"{text[found.start() : end]}: pass").body
    except (SyntaxError, ValueError):
        return []
    return [a.arg for a in function.args.args] if isinstance(function, ast.FunctionDef) else []


def _format_arguments(given: str, parameters: list[str]) -> str | None:
    """`a = 1, b = 2` as arguments, in the function's order; a lone literal where there is one parameter."""
    starts = list(_NAMED.finditer(given))
    if not starts and len(parameters) == 1:
        return _leading_literal(given)
    values: dict[str, str] = {}
    for at, found in enumerate(starts):
        end = starts[at + 1].start() if at + 1 < len(starts) else len(given)
        value = _leading_literal(given[found.end() : end].strip().rstrip(","))
        if value is None:
            return None
        values[found["name"]] = value
    by_name = {name.lower(): value for name, value in values.items()}
    if not parameters or any(name.lower() not in by_name for name in parameters):
        return None
    return ", ".join(by_name[name.lower()] for name in parameters)


def _closing_bracket(text: str, start: int) -> int | None:
    """The end of the bracket at `start`; strings are skipped."""
    depth, quote = 0, ""
    for at in range(start, min(len(text), start + 2000)):
        sign = text[at]
        if quote:
            if sign == quote and text[at - 1] != "\\":
                quote = ""
        elif sign in "'\"":
            quote = sign
        elif sign in "([{":
            depth += 1
        elif sign in ")]}":
            depth -= 1
            if depth == 0:
                return at + 1
    return None


def _leading_literal(text: str) -> str | None:
    """The literal that a line begins with, as source; None where there is none."""
    text = re.sub(r"\b(?:true|false)\b", lambda word: word[0].capitalize(), text.strip())
    for candidate in (text, text.rstrip(".,;"), re.split(r"\s+#|\s{2,}|\.\s|;", text)[0].rstrip(".,")):
        try:
            value = repr(ast.literal_eval(candidate))
            return value if "Ellipsis" not in value else None  # it marks an omission
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return None


def _parses(text: str, mode: str = "exec") -> bool:
    try:
        compile(text, "<example>", mode, flags=ast.PyCF_ONLY_AST)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
