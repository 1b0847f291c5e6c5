"""Checks that a change follows the project's written rules (AGENTS.md and similar files), as far as they can
be checked: forbidden calls and imports, names, type hints, docstrings, line length, comments.

Only what the change adds is judged. A rule that is not understood is left to the model.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from keystroke.analysis.syntax import language_of, parse_tree, try_parse, walk
from keystroke.text.compare import compare

_FORBIDS = re.compile(
    r"\b(?:never|do not|don't|must not|mustn't|no|avoid|forbidden|not allowed|instead of|rather than)\b",
    re.IGNORECASE,
)
_CODE = re.compile(r"`([^`\n]{1,60})`")
_NAME = re.compile(r"(?:import\s+|from\s+)?([A-Za-z_$][\w$]*(?:\.[A-Za-z_$][\w$]*)*)(?:\(.*\))?")
_STYLES = {
    "snake_case": re.compile(r"_{0,2}[a-z0-9]+(?:_[a-z0-9]+)*_{0,2}"),
    "camelCase": re.compile(r"_?[a-z][a-zA-Z0-9]*|[A-Z]\w*"),
}
_LENGTH = re.compile(
    r"\blines?\b[^.\n]{0,40}?\b(\d{2,3})\b(?:\s*(?:characters|columns|chars))?|"
    r"\b(\d{2,3})\s*(?:characters|columns|chars)\b[^.\n]{0,20}\bline",
    re.IGNORECASE,
)
_TESTS = re.compile(
    r"(?:\btests?\b|\bcheck)[^`\n]{0,40}`([^`\n]+)`|"
    r"`([^`\n]*\b(?:pytest|npm test|cargo test|go test|make test)\b[^`\n]*)`",
    re.IGNORECASE,
)
_HINTS = re.compile(
    r"\b(?:every|all|each|new)\b.*\bfunctions?\b.*\b(?:type hints?|annotat)|"
    r"\btype hints?\b.*\b(?:required|everywhere|always|all|every)"
)


@dataclass(frozen=True, slots=True)
class RuleCheck:
    """`line`: the rule as written. `find` takes the old text, the new text and the path and returns what
    breaks the rule."""

    line: str
    find: Callable[[str, str, str], str | None]


@lru_cache(maxsize=16)
def rule_checks(rules: str) -> tuple[RuleCheck, ...]:
    """The checks that a text of rules contains."""
    return tuple(check for line in _split_sentences(rules) for check in _checks_of(line))


def find_violation(old: str, new: str, path: str, rules: str) -> str | None:
    """One sentence that says which rule the change breaks and how; None where it breaks none."""
    if not rules.strip() or old == new or language_of(path) is None:
        return None
    for check in rule_checks(rules):
        if (what := check.find(old, new, path)) is not None:
            return f'the project\'s rules say "{check.line[:120]}", and your code {what}'
    return None


def command_for_tests(rules: str) -> str | None:
    """The command for the tests that the rules name."""
    for line in _split_sentences(rules):
        if (found := _TESTS.search(line)) is not None and not _FORBIDS.search(line[: found.start()]):
            return (found[1] or found[2]).strip()
    return None


def _split_sentences(rules: str) -> Iterator[str]:
    for line in rules.splitlines():
        text = line.strip().lstrip("-*•0123456789.) ").strip()
        yield from (part.strip() for part in re.split(r"(?<=[.;!])\s+(?=[A-Z`])", text) if part.strip())


def _checks_of(line: str) -> Iterator[RuleCheck]:
    low = line.lower()
    found = _FORBIDS.search(line)
    if found is not None:
        for quoted in _CODE.findall(line[found.start() :].split("; use")[0].split(", use")[0]):
            if (name := _NAME.fullmatch(quoted.strip())) is not None:
                yield RuleCheck(line, _check_forbidden(name[1]))
    if re.search(
        r"\b(?:no|without|don't (?:write|add)|do not (?:write|add)|never (?:write|add)) (?:\w+ )?comments?\b",
        low,
    ):
        yield RuleCheck(line, _find_added_comment)
    if _HINTS.search(low):
        yield RuleCheck(line, _find_missing_hint)
    if re.search(r"\b(?:every|all|each|new|public)\b.*\bfunctions?\b.*\bdocstrings?\b", low):
        yield RuleCheck(line, _find_missing_docstring)
    for style, pattern in _STYLES.items():
        if style.lower() in low and re.search(r"\b(?:function|method|name|variable)", low) and found is None:
            yield RuleCheck(line, _check_name_style(style, pattern))
    length = _LENGTH.search(line)
    if length is not None and (found is None or "longer" in low):
        limit = int(length[1] or length[2])
        if 40 <= limit <= 200:
            yield RuleCheck(line, _check_line_length(limit))


def _check_forbidden(name: str) -> Callable[[str, str, str], str | None]:
    first, _, _ = name.partition(".")
    pattern = re.compile(rf"(?<![\w$.]){re.escape(name)}(?![\w$])")

    def count(text: str, path: str) -> int:
        return len(pattern.findall(_code_only(text, language_of(path) or "")))

    def find(old: str, new: str, path: str) -> str | None:
        return f"uses {name}" if first and count(new, path) > count(old, path) else None

    return find


def _code_only(text: str, language: str) -> str:
    """The text with strings and comments blanked."""
    out = list(text)
    for node in walk(parse_tree(text, language)):
        if node.kind().startswith(("string", "comment", "line_comment", "block_comment", "template_string")):
            span = node.range()
            for at in range(span.start.index, min(span.end.index, len(out))):
                out[at] = " "
    return "".join(out)


def _list_comments(text: str, language: str) -> list[str]:
    return [node.text() for node in walk(parse_tree(text, language)) if "comment" in node.kind()]


def _find_added_comment(old: str, new: str, path: str) -> str | None:
    language = language_of(path) or ""
    fresh = set(_list_comments(new, language)) - set(_list_comments(old, language))
    return f"adds the comment {min(fresh).strip()[:60]!r}" if fresh else None


def _functions_by_name(text: str) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = try_parse(text)
    if tree is None:
        return {}
    return {
        node.name: node
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }


def _changed_functions(
    old: str, new: str, path: str, *, fresh: bool
) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions of Python that the change adds or, unless `fresh`, whose parameters it changes."""
    if not path.endswith((".py", ".pyi")):
        return
    before = _functions_by_name(old)
    for name, node in _functions_by_name(new).items():
        known = before.get(name)
        if known is None or (not fresh and ast.dump(known.args) != ast.dump(node.args)):
            yield node


def _find_missing_hint(old: str, new: str, path: str) -> str | None:
    for node in _changed_functions(old, new, path, fresh=False):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        bare = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
        if bare or node.returns is None:
            return f"has no type hint for {bare[0] if bare else 'the result'} of {node.name}"
    return None


def _find_missing_docstring(old: str, new: str, path: str) -> str | None:
    for node in _changed_functions(old, new, path, fresh=True):
        if ast.get_docstring(node) is None and not node.name.startswith("_"):
            return f"has no docstring in {node.name}"
    return None


def _check_name_style(style: str, pattern: re.Pattern[str]) -> Callable[[str, str, str], str | None]:
    def find(old: str, new: str, path: str) -> str | None:
        for node in _changed_functions(old, new, path, fresh=True):
            if not pattern.fullmatch(node.name):
                return f"names a function {node.name}, which is not {style}"
        if not path.endswith((".py", ".pyi")):
            known = set(re.findall(r"\bfunction\s+(\w+)", old))
            for name in re.findall(r"\bfunction\s+(\w+)", new):
                if name not in known and not pattern.fullmatch(name):
                    return f"names a function {name}, which is not {style}"
        return None

    return find


def _check_line_length(limit: int) -> Callable[[str, str, str], str | None]:
    def find(old: str, new: str, path: str) -> str | None:
        after = new.split("\n")
        for _, _, first, last in compare(old.split("\n"), after):
            for line in after[first:last]:
                if len(line.expandtabs(4)) > limit:
                    return f"has a line of {len(line)} characters"
        return None

    return find
