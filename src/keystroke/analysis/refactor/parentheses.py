"""Removes parentheses that are redundant after an expression became a name.

The syntax tree of the text stays the same.
"""

from __future__ import annotations

import ast
import io
import keyword
import tokenize

_BEFORE_CALL = {tokenize.STRING, tokenize.NUMBER}


def remove_redundant_parentheses(text: str, name: str) -> str:
    """`text` without the parentheses around `name` and around its assigned value, if that changes nothing."""
    try:
        bare = _unwrap_value(_unwrap_uses(text, name), name)
        return bare if ast.dump(ast.parse(bare)) == ast.dump(ast.parse(text)) else text
    except (SyntaxError, ValueError, tokenize.TokenError, RecursionError):
        return text


def _unwrap_uses(text: str, name: str) -> str:
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in (tokenize.NL, tokenize.COMMENT)
    ]
    lines = text.splitlines(keepends=True)
    for at in range(len(tokens) - 4, -1, -1):
        before, opened, inner, closed = tokens[at : at + 4]
        if (opened.string, inner.string, closed.string) != ("(", name, ")") or _is_callable(before):
            continue
        row, column = opened.start
        if closed.end[0] != row:
            continue  # over several lines the parentheses may be needed
        line = lines[row - 1]
        gap = " " if line[column - 1 : column].isalnum() else ""
        rest = line[closed.end[1] :]
        after = " " if rest[:1].isalnum() else ""
        lines[row - 1] = f"{line[:column]}{gap}{name}{after}{rest}"
    return "".join(lines)


def _is_callable(token: tokenize.TokenInfo) -> bool:
    """Whether a parenthesis after this token begins a call."""
    if token.type == tokenize.NAME:
        return not keyword.iskeyword(token.string)
    return token.type in _BEFORE_CALL or token.string in (")", "]", "}")


def _unwrap_value(text: str, name: str) -> str:
    """The value of the first assignment to `name`, on one line, without parentheses around all of it."""
    for node in ast.walk(ast.parse(text)):
        if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)):
            continue
        if node.targets[0].id != name or node.lineno != node.end_lineno:
            continue
        lines = text.splitlines(keepends=True)
        head, equals, value = lines[node.lineno - 1].partition("=")
        body = value.strip()
        while not isinstance(node.value, ast.Tuple) and body.startswith("(") and body.endswith(")"):
            try:
                inner = ast.parse(body[1:-1].strip(), mode="eval").body
            except SyntaxError:
                break
            if ast.dump(inner) != ast.dump(node.value):
                break
            body = body[1:-1].strip()
        end = value[len(value.rstrip()) :]
        lines[node.lineno - 1] = f"{head}{equals} {body}{end}"
        return "".join(lines)
    return text
