"""Rules as data: `rules/LANGUAGE/*.toml`, read once, validated with errors that name the file and the rule.

A rule says what to look for, why it matters and how to fix it. It holds no code; what cannot be said
with calls, assignments, literals or a syntax pattern names a detector by its name.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from itertools import pairwise
from typing import Any

from keystroke.analysis.audit.finding import Severity
from keystroke.analysis.audit.flow.knowledge import Globs
from keystroke.errors import ConfigError, NotFound

LANGUAGES = ("python", "javascript", "typescript", "tsx", "c", "cpp", "go", "java")
_FOLDERS = {
    "python": ("python",),
    "javascript": ("javascript",),
    "typescript": ("javascript",),
    "tsx": ("javascript",),
    "c": ("c",),
    "cpp": ("c", "cpp"),
    "go": ("go",),
    "java": ("java",),
}
_RULE_KEYS = {
    "id",
    "cwe",
    "also",
    "severity",
    "title",
    "message",
    "why",
    "references",
    "use",
    "when",
    "fix",
    "tests",
}
_WHEN_KEYS = {
    "call",
    "except",
    "bind",
    "literal",
    "import",
    "pattern",
    "ast",
    "needs",
    "returns",
    "detector",
    "arg",
    "is",
    "text",
    "with",
    "without",
    "handler",
    "function",
    "unless",
    "severity",
    "message",
    "cwe",
    "uses_result",
}
_FIX_KEYS = {
    "title",
    "callee",
    "keyword",
    "drop",
    "replace",
    "value",
    "array",
    "import",
    "fixer",
    "only",
    "suggest",
    "alone",
    "unless",
    "wrap",
    "wrap_text",
    "places",
    "context",
    "statement",
    "path",
}


@dataclass(frozen=True, slots=True)
class When:
    """One way to break a rule; every condition named must hold."""

    call: Globs | None
    excluded: Globs | None
    bind: Globs | None
    literal: Globs | None
    imports: Globs | None
    ast: dict[str, Any] | None
    needs: tuple[str, ...]  # one of these must occur in the text for the syntax pattern to match at all
    returns: bool
    detector: str
    arg: tuple[str, ...]
    test: str
    text: re.Pattern[str] | None
    options: tuple[tuple[tuple[str, ...], str], ...]
    without: tuple[str, ...]
    handler: bool
    function: re.Pattern[str] | None
    unless: re.Pattern[str] | None  # what the function around must not hold
    severity: Severity | None
    message: str
    cwe: int


@dataclass(frozen=True, slots=True)
class FixSpec:
    title: str
    callee: str = ""
    keyword: tuple[tuple[str, str], ...] = ()
    drop: tuple[str, ...] = ()
    replace: str = ""
    value: str = ""
    array: int = -1  # this argument must be an array whose size sizeof knows
    imports: str = ""
    fixer: str = ""
    only: str = ""  # the call's own text must match this
    suggest: bool = False  # only the direction is known: shown, never applied by itself
    alone: bool = False  # only where the call's result is not used
    unless: str = ""  # the function around must not match this
    wrap: str = ""  # what a value goes through, "{}" for the value
    wrap_text: str = ""  # the same where the value is surely a text already
    places: tuple[int, ...] = ()  # the arguments that are wrapped; none: all
    context: str = ""  # what the text around the value must be
    statement: str = ""  # what is inserted
    path: str = ""  # the full name of what is called must match this


@dataclass(frozen=True, slots=True)
class Rule:
    id: str
    language: str
    cwe: int
    severity: Severity
    title: str
    message: str
    why: str
    references: tuple[str, ...]
    use: str
    whens: tuple[When, ...]
    fixes: tuple[FixSpec, ...]
    bad: tuple[str, ...]
    good: tuple[str, ...]
    also: tuple[int, ...] = ()  # other numbers of the same weakness


@cache
def load_rules(language: str) -> tuple[Rule, ...]:
    """All rules for a language, ordered by id."""
    if language not in _FOLDERS:
        raise NotFound(f"there are no audit rules for {language!r}; known languages: {', '.join(LANGUAGES)}")
    rules: list[Rule] = []
    for folder in _FOLDERS[language]:
        for source in sorted(_folder(folder).iterdir(), key=lambda item: item.name):
            if source.name.endswith(".toml"):
                rules.extend(parse_rules(source.read_text(encoding="utf-8"), folder, source.name))
    rules.sort(key=lambda rule: rule.id)
    for one, other in pairwise(rules):
        if one.id == other.id:
            raise ConfigError(f"two audit rules for {language} are called {one.id!r}; rename one")
    return tuple(rules)


@cache
def all_rules() -> dict[str, Rule]:
    """Every rule by id."""
    return {
        rule.id: rule
        for language in ("python", "javascript", "cpp", "go", "java")
        for rule in load_rules(language)
    }


def find_rule(rule_id: str) -> Rule:
    rule = all_rules().get(rule_id)
    if rule is None:
        raise NotFound(f"there is no audit rule {rule_id!r}; `keystroke audit --rules list` names them all")
    return rule


def _folder(name: str) -> Traversable:
    return files(__package__).joinpath(name)


def parse_rules(text: str, language: str, where: str) -> list[Rule]:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{language}/{where}: not valid TOML: {error}") from error
    entries = data.get("rule")
    if not isinstance(entries, list) or set(data) != {"rule"}:
        raise ConfigError(f"{language}/{where}: expected only [[rule]] tables")
    return [_rule(entry, language, f"{language}/{where}") for entry in entries]


def _rule(entry: dict[str, Any], language: str, where: str) -> Rule:
    name = entry.get("id", "a rule without id")
    place = f"{where}: {name}"

    def need(key: str, kind: type) -> Any:
        value = entry.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ConfigError(f"{place}: {key!r} must be a {kind.__name__}")
        return value

    _only(entry, _RULE_KEYS, place)
    if not re.fullmatch(r"[a-z]+(?:-[a-z0-9]+)+", need("id", str)):
        raise ConfigError(f"{place}: an id is lower-case words joined by hyphens")
    tests = entry.get("tests", {})
    _only(tests, {"bad", "good"}, place)
    fixes = entry.get("fix", [])
    return Rule(
        name,
        language,
        need("cwe", int),
        _severity(need("severity", str), place),
        need("title", str),
        need("message", str),
        need("why", str),
        tuple(entry.get("references", ())),
        entry.get("use", "*"),
        tuple(_when(when, place) for when in need("when", list)),
        tuple(_fix(fix, place) for fix in (fixes if isinstance(fixes, list) else [fixes])),
        tuple(tests.get("bad", ())),
        tuple(tests.get("good", ())),
        tuple(int(number) for number in entry.get("also", ())),
    )


def _when(when: dict[str, Any], place: str) -> When:
    _only(when, _WHEN_KEYS, place)
    kinds = [
        key
        for key in ("call", "bind", "literal", "import", "pattern", "ast", "returns", "detector")
        if key in when
    ]
    if len(kinds) != 1:
        raise ConfigError(
            f"{place}: each [[rule.when]] has exactly one of "
            "call, bind, literal, import, pattern, ast, returns, detector"
        )
    ast = when.get("ast")
    if "pattern" in when:
        ast = {"pattern": when["pattern"]}
    if ast is not None and not when.get("needs"):
        raise ConfigError(
            f"{place}: a syntax pattern says in 'needs' which words its text must hold (asking costs time)"
        )
    options = tuple((tuple(name.split("|")), test) for name, test in when.get("with", {}).items())
    severity = when.get("severity")
    for test in [str(when.get("is", "any")), *(test for _, test in options)]:
        _check_test(test, place)

    def regex(key: str) -> re.Pattern[str] | None:
        if key not in when:
            return None
        try:
            return re.compile(when[key], re.DOTALL)
        except re.error as error:
            raise ConfigError(f"{place}: {key!r} is not a valid regular expression: {error}") from error

    def globs(key: str) -> Globs | None:
        if key not in when:
            return None
        if not isinstance(when[key], list) or not all(isinstance(item, str) for item in when[key]):
            raise ConfigError(f"{place}: {key!r} must be a list of names")
        return Globs(when[key])

    return When(
        globs("call"),
        globs("except"),
        globs("bind"),
        globs("literal"),
        globs("import"),
        ast,
        tuple(when.get("needs", ())),
        bool(when.get("returns")),
        when.get("detector", ""),
        tuple(str(when.get("arg", "0")).split("|")),
        when.get("is", "any"),
        regex("text"),
        options,
        tuple(when.get("without", ())),
        bool(when.get("handler")),
        regex("function"),
        regex("unless"),
        _severity(severity, place) if severity else None,
        when.get("message", ""),
        int(when.get("cwe", 0)),
    )


def _fix(fix: dict[str, Any], place: str) -> FixSpec:
    _only(fix, _FIX_KEYS, place)
    for key in ("only", "unless", "path"):
        try:
            re.compile(fix.get(key, ""))
        except re.error as error:
            raise ConfigError(f"{place}: {key!r} is not a valid regular expression: {error}") from error
    return FixSpec(
        fix.get("title", "Use the safe form"),
        fix.get("callee", ""),
        tuple(fix.get("keyword", {}).items()),
        tuple(fix.get("drop", ())),
        fix.get("replace", ""),
        fix.get("value", ""),
        int(fix.get("array", -1)),
        fix.get("import", ""),
        fix.get("fixer", ""),
        fix.get("only", ""),
        bool(fix.get("suggest")),
        bool(fix.get("alone")),
        fix.get("unless", ""),
        fix.get("wrap", ""),
        fix.get("wrap_text", ""),
        tuple(fix.get("places", ())),
        fix.get("context", ""),
        fix.get("statement", ""),
        fix.get("path", ""),
    )


_WORDS = {
    "any",
    "missing",
    "present",
    "const",
    "literal",
    "true",
    "false",
    "none",
    "falsy",
    "truthy",
    "numeric",
    "text",
}
_WORDS |= {
    "single",
    "runaway",
    "foreign",
    "dynamic",
    "tainted",
    "remote",
    "built",
    "built-tainted",
    "built-remote",
    "built-dynamic",
}


def _check_test(test: str, place: str) -> None:
    """Refuse a condition the matcher would not understand."""
    for part in re.split(r"\|\||&&", test):
        word = part.strip().removeprefix("not:")
        try:
            if word[:1] in ("~", "@", "^"):
                re.compile(word.lstrip("~@"))
            elif word[:1] in ("<", ">", "+"):
                int(word[1:], 0)
            elif word[:1] != "=" and word not in _WORDS:
                raise ValueError("no such word")
        except (re.error, ValueError) as error:
            raise ConfigError(f"{place}: the condition {word!r} cannot be read: {error}") from error


def _severity(text: str, place: str) -> Severity:
    try:
        return Severity(text)
    except ValueError:
        raise ConfigError(f"{place}: severity {text!r} is not one of {', '.join(Severity)}") from None


def _only(data: dict[str, Any], known: set[str], place: str) -> None:
    if not isinstance(data, dict):
        raise ConfigError(f"{place}: expected a table")
    unknown = set(data) - known
    if unknown:
        raise ConfigError(
            f"{place}: unknown key {sorted(unknown)[0]!r}; known keys: {', '.join(sorted(known))}"
        )
