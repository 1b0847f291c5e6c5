"""A grammar as it reads inside a JSON string: the same language, every text of it escaped.

Law: rewrites the terminals of a Lark grammar (texts and patterns), what JSON must escape in the one way that
JSON encoders use. Where a line ended with one byte it now ends with two, which a lexer that never
looks back cannot tell from text; so the rules become one terminal, and a grammar that is not regular is
refused, as is whatever has no exact counterpart.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from keystroke.errors import GrammarError

# The standard library's own reader of patterns; it has no public name.
sre: Any = import_module("re._constants")
parser: Any = import_module("re._parser")

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
_PLAIN = r"""[^"\\\x00-\x1f]"""  # what stands for itself
_ESCAPED = '"\\\n\r\t\b\f'  # what has an escape of its own; other control characters no grammar asks for
_CATEGORIES = {
    sre.CATEGORY_DIGIT: "0-9",
    sre.CATEGORY_WORD: r"\w",
    sre.CATEGORY_SPACE: r" \t\n\r\f\x0b",
    sre.CATEGORY_NOT_WORD: r"\W",
    sre.CATEGORY_NOT_SPACE: r"\S",
    sre.CATEGORY_NOT_DIGIT: r"\D",
}


def in_json_string(grammar: str, origin: str = "grammar") -> str:
    """The Lark grammar of `grammar`'s texts as they stand between the quotes of a JSON string. Raises
    GrammarError where there is no exact counterpart; a grammar that is not regular fails to compile."""

    def rewritten(match: re.Match[str]) -> str:
        if match["comment"] or match["alias_of_line"]:
            return ""
        if match["rule"]:
            return "RULE_" + match["rule"].lstrip("?!").upper()
        if match["foreign"] or match["fold"]:
            raise GrammarError(
                f"{origin} uses {match[0][:40]}, which cannot be held inside a JSON string.", param=origin
            )
        if match["import"]:
            if match["name"] not in _COMMON:
                raise GrammarError(
                    f"{origin} imports common.{match['name']}, which is unknown.", param=origin
                )
            return f"{match['alias'] or match['name']}: /{_regex(_COMMON[match['name']], '', origin)}/"
        if match["range"]:
            first, last = (_text(part, origin) for part in re.findall(r'"(?:\\.|[^"\\\n])"', match["range"]))
            return f"/{_regex(f'[{re.escape(first)}-{re.escape(last)}]', '', origin)}/"
        if match["text"]:
            return json.dumps(_escaped(_text(match["text"], origin)), ensure_ascii=False)
        return f"/{_regex(match['regex'][1:-1], match['flags'], origin)}/"

    return f"start: RULE_START\n{_TERMINAL.sub(rewritten, grammar)}"


def _text(literal: str, origin: str) -> str:
    try:
        value = ast.literal_eval(literal)
    except (SyntaxError, ValueError) as error:
        raise GrammarError(
            f"{origin} has a text that cannot be read: {literal[:40]}.", param=origin
        ) from error
    return str(value)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _regex(pattern: str, flags: str, origin: str) -> str:
    try:
        tree = parser.parse(pattern.replace(r"\/", "/"))
    except re.error as error:
        raise GrammarError(f"{origin} has a pattern that cannot be read: {error}.", param=origin) from error
    if set(flags) - {"s"} or tree.state.flags & (re.IGNORECASE | re.MULTILINE):
        raise GrammarError(f"{origin} has a pattern with flags, which cannot be rewritten.", param=origin)
    dotall = "s" in flags or bool(tree.state.flags & re.DOTALL)
    return _Rewriter(origin).sequence(tree, dotall).replace("/", r"\/")


class _Rewriter:
    def __init__(self, origin: str) -> None:
        self._origin = origin

    def sequence(self, nodes: Iterable[Any], dotall: bool) -> str:
        return "".join(self._node(kind, value, dotall) for kind, value in nodes)

    def _node(self, kind: Any, value: Any, dotall: bool) -> str:
        if kind is sre.LITERAL:
            return re.escape(_escaped(chr(value)))
        if kind is sre.NOT_LITERAL:
            return _class(f"[^{_code(value)}]")
        if kind is sre.ANY:
            return _class(r"[\x00-\x{10ffff}]" if dotall else r"[^\n]")
        if kind is sre.IN:
            return _class(_written(value))
        if kind is sre.BRANCH:
            return f"(?:{'|'.join(self.sequence(branch, dotall) for branch in value[1])})"
        if kind is sre.SUBPATTERN:
            _, added, removed, inner = value
            if (added | removed) & ~re.DOTALL:
                raise self._refused("flags")
            return f"(?:{self.sequence(inner, (dotall or bool(added & re.DOTALL)) and not removed)})"
        if kind is sre.MAX_REPEAT:
            least, most, inner = value
            bound = "" if most is sre.MAXREPEAT else most
            return f"(?:{self.sequence(inner, dotall)}){{{least},{bound}}}"
        if kind is sre.AT and value in (
            sre.AT_BEGINNING,
            sre.AT_END,
            sre.AT_BEGINNING_STRING,
            sre.AT_END_STRING,
        ):
            return ""  # a terminal is matched whole
        raise self._refused(str(kind).lower())

    def _refused(self, what: str) -> GrammarError:
        return GrammarError(
            f"{self._origin} has a pattern with {what}, which cannot be held inside a JSON string.",
            param=self._origin,
        )


def _written(items: Iterable[tuple[Any, Any]]) -> str:
    body = ""
    for kind, value in items:
        if kind is sre.NEGATE:
            body += "^"
        elif kind is sre.LITERAL:
            body += _code(value)
        elif kind is sre.RANGE:
            body += f"{_code(value[0])}-{_code(value[1])}"
        else:
            body += _CATEGORIES[value]
    return f"[{body}]"


def _code(point: int) -> str:
    return rf"\x{{{point:x}}}"


def _class(written: str) -> str:
    """One character of a class: itself where it stands for itself, else the escapes of those it has."""
    python = re.sub(r"\\x\{([0-9a-f]+)\}", lambda m: rf"\U{int(m[1], 16):08x}", written)
    escapes = [re.escape(_escaped(c)) for c in _ESCAPED if re.fullmatch(python, c)]
    return f"(?:{'|'.join([f'[{written}&&{_PLAIN}]', *escapes])})"
