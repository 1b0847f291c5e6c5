"""Rewrites a Lark grammar for use inside a JSON string: the same language with every text JSON-escaped.

The strings and patterns of its terminals are rewritten with the escapes that JSON encoders use. An escaped
line end has two bytes, which the lexer could not distinguish from text, so that all rules become one
terminal. A grammar that is not regular, or has a construct without an exact equivalent, is refused.
"""

from __future__ import annotations

import ast
import json
import re

from keystroke.errors import GrammarError

_TERMINAL = re.compile(
    r"""(?P<comment>//[^\n]*)
      | (?P<range>"(?:\\.|[^"\\\n])"\s*\.\.\s*"(?:\\.|[^"\\\n])")
      | (?P<text>"(?:\\.|[^"\\\n])*")(?P<fold>i?)
      | (?P<regex>/(?!/)(?:\\.|[^/\\\n])+/)(?P<flags>[a-z]*)
      | (?P<import>%import\s+common\.(?P<name>\w+)(?:\s*->\s*(?P<alias>\w+))?)
      | (?P<alias_of_line>->\s*\w+)
      | (?P<foreign>%\w+|<[^>\s]+>|@\w+)
      | (?P<rule>[?!]?\b_*[a-z]\w*\b)""",
    re.VERBOSE,
)
_COMMON = {
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": r"(\+|-)?[0-9]+",
    "NUMBER": r"[0-9]+(\.[0-9]*)?([eE](\+|-)?[0-9]+)?",
    "SIGNED_NUMBER": r"(\+|-)?[0-9]+(\.[0-9]*)?([eE](\+|-)?[0-9]+)?",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "ESCAPED_STRING": r'"([^"\\]|\\.)*"',
}
_PLAIN = r"""[^"\\\x00-\x1f]"""  # not escaped
_ESCAPED = '"\\\n\r\t\b\f'  # characters with a short escape
_CATEGORIES = {r"\d": "0-9", r"\w": r"\w", r"\s": r" \t\n\r\f\x{b}", r"\W": r"\W", r"\S": r"\S", r"\D": r"\D"}
_ESCAPE = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|[xu]\{[0-9a-fA-F]+\}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL
)
# Set operations, named classes.
_OPERATION = re.compile(r"(?<!\\)(?:\\\\)*(?:\[|&&|--|~~|\|\|)|\\[pPBAZz1-9]")


def escape_grammar(grammar: str, origin: str = "grammar") -> str:
    """The Lark grammar of `grammar`'s texts between the quotes of a JSON string. Raises GrammarError if there
    is no exact equivalent; a grammar that is not regular fails to compile."""

    def rewrite(match: re.Match[str]) -> str:
        if match["comment"] or match["alias_of_line"]:
            return ""
        if match["rule"]:
            return "RULE_" + match["rule"].lstrip("?!").upper()
        if match["foreign"] or match["fold"]:
            raise GrammarError.of(origin, f"uses {match[0][:40]}, which cannot be held inside a JSON string.")
        if match["import"]:
            if match["name"] not in _COMMON:
                raise GrammarError.of(origin, f"imports common.{match['name']}, which is unknown.")
            return (
                f"{match['alias'] or match['name']}: /{_rewrite_regex(_COMMON[match['name']], '', origin)}/"
            )
        if match["range"]:
            first, last = (
                _literal_value(part, origin) for part in re.findall(r'"(?:\\.|[^"\\\n])"', match["range"])
            )
            return f"/{_rewrite_regex(f'[{re.escape(first)}-{re.escape(last)}]', '', origin)}/"
        if match["text"]:
            return json.dumps(_escape_text(_literal_value(match["text"], origin)), ensure_ascii=False)
        return f"/{_rewrite_regex(match['regex'][1:-1], match['flags'], origin)}/"

    return f"start: RULE_START\n{_TERMINAL.sub(rewrite, grammar)}"


def _literal_value(literal: str, origin: str) -> str:
    try:
        value = ast.literal_eval(literal)
    except (SyntaxError, ValueError) as error:
        raise GrammarError.of(origin, f"has a text that cannot be read: {literal[:40]}.") from error
    return str(value)


def _escape_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _rewrite_regex(pattern: str, flags: str, origin: str) -> str:
    if set(flags) - {"s"}:
        raise GrammarError.of(origin, "has a pattern with flags, which cannot be rewritten.")
    return _rewrite_pattern(pattern.replace(r"\/", "/"), "s" in flags, origin).replace("/", r"\/")


_PIECE = re.compile(
    r"""(?P<set>\[\^?\]?(?:\\.|[^\]\\])*\])
      | (?P<open>\((?:\?(?:(?P<on>s?):|P?<\w+>))?(?!\?))
      | (?P<dotall>\(\?s\))
      | (?P<close>\))
      | (?P<structure>\||(?:[*+?]|\{\d+(?:,\d*)?\})(?![?+]))
      | (?P<place>[\^$]|\\[AzZ])
      | (?P<any>\.)
      | (?P<category>\\[dDwWsS])
      | (?P<code>\\x[0-9a-fA-F]{2}|\\[xu]\{[0-9a-fA-F]+\}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8})
      | (?P<escape>\\(?:[nrtfva0]|[^\w\s]|\s))
      | (?P<literal>[^\\()\[*+?])""",
    re.VERBOSE | re.DOTALL,
)


def _rewrite_pattern(pattern: str, dotall: bool, origin: str) -> str:
    """The pattern with its structure unchanged and its characters escaped."""
    out: list[str] = []
    scopes = [dotall]  # whether a dot matches line ends, for each open group
    at = 0
    while at < len(pattern):
        piece = _PIECE.match(pattern, at)
        if piece is None:
            raise GrammarError.of(
                origin, f"has a pattern with {pattern[at : at + 8]}, which cannot be held in a JSON string."
            )
        kind, text, at = piece.lastgroup, piece[0], piece.end()
        if piece["open"]:
            scopes.append(scopes[-1] or piece["on"] == "s")
            out.append("(?:")
        elif kind == "close":
            if len(scopes) == 1:
                raise GrammarError.of(origin, "has a pattern that closes a group it did not open.")
            scopes.pop()
            out.append(")")
        elif kind == "structure":
            out.append(text)
        elif kind == "dotall":
            scopes[-1] = True
        elif kind == "any":
            out.append(_character_class(r"[\x{0}-\x{10ffff}]" if scopes[-1] else r"[^\n]"))
        elif kind == "set":
            out.append(_character_class(_rewrite_set(text, origin)))
        elif kind == "category":
            out.append(_character_class(f"[{_CATEGORIES[text]}]"))
        elif kind != "place":  # anchors: a terminal is always matched whole
            out.append(re.escape(_escape_text(_character(text))))
    return "".join(out)


def _rewrite_set(text: str, origin: str) -> str:
    """A character set in the notation that both regex libraries accept."""
    if _OPERATION.search(text[1:-1]):
        raise GrammarError.of(
            origin, f"has a pattern with {text[:40]}, which cannot be held inside a JSON string."
        )

    def plain(escape: re.Match[str]) -> str:
        if escape[0] in _CATEGORIES:
            return _CATEGORIES[escape[0]]
        return rf"\x{{{8 if escape[0] == chr(92) + 'b' else ord(_character(escape[0])):x}}}"

    return _ESCAPE.sub(plain, text)


def _character(text: str) -> str:
    """The character of a literal or escape."""
    if len(text) == 1:
        return text
    if text[1] in "xuU" and len(text) > 2:
        return chr(int(text[2:].strip("{}"), 16))
    return {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}.get(text[1], text[1])


def _character_class(written: str) -> str:
    """A pattern for one character of a set: plain characters as they are, the others escaped."""
    python = re.sub(r"\\x\{([0-9a-f]+)\}", lambda m: rf"\U{int(m[1], 16):08x}", written)
    escapes = [re.escape(_escape_text(c)) for c in _ESCAPED if re.fullmatch(python, c)]
    return f"(?:{'|'.join([f'[{written}&&{_PLAIN}]', *escapes])})"
