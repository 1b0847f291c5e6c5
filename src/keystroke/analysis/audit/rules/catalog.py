"""The audit rules, read from `rules/LANGUAGE/*.toml`; validation errors name the file and the rule.

A rule says what to look for, why it matters and how to fix it. What its conditions cannot express is found by
a detector in code, which the rule names.
"""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import Any

import msgspec

from keystroke.analysis.audit.finding import Severity
from keystroke.analysis.audit.flow.knowledge import Globs, family_of
from keystroke.errors import ConfigError, NotFound

LANGUAGES = ("python", "javascript", "typescript", "tsx", "c", "cpp", "go", "java")
_TEST_WORDS = """
any missing present const literal true false none falsy truthy numeric text single words runaway
runaway-script foreign lines dynamic tainted remote built built-tainted built-remote built-dynamic
"""
_TESTS = frozenset(_TEST_WORDS.split())
_KINDS = ("call", "bind", "literal", "imports", "pattern", "ast", "returns", "detector")


class ArgumentNames(tuple[str, ...]):
    """Alternative names or positions of an argument; the file writes them as "1|file"."""


class ArgumentTests(tuple[tuple[ArgumentNames, str], ...]):
    """What each of several arguments must satisfy; the file writes a table."""


class _RuleTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class RuleCondition(
    _RuleTable,
    frozen=True,
    rename={"excluded": "except", "imports": "import", "test": "is", "options": "with"},
):
    """One way to break a rule, a [[rule.when]] table; everything it names must hold."""

    call: Globs | None = None
    excluded: Globs | None = None
    bind: Globs | None = None
    literal: Globs | None = None
    imports: Globs | None = None
    pattern: str = ""
    ast: dict[str, Any] | None = None
    needs: tuple[str, ...] = ()  # the text must contain one of these words for the syntax pattern to match
    returns: bool = False
    detector: str = ""
    arg: ArgumentNames = ArgumentNames(("0",))
    test: str = "any"
    text: re.Pattern[str] | None = None
    options: ArgumentTests = ArgumentTests()
    without: tuple[str, ...] = ()
    handler: bool = False
    function: re.Pattern[str] | None = None
    unless: re.Pattern[str] | None = None  # must not occur in the enclosing function
    severity: Severity | None = None
    message: str = ""
    cwe: int = 0

    def __post_init__(self) -> None:
        if sum(bool(getattr(self, kind)) for kind in _KINDS) != 1:
            raise ValueError(
                "each [[rule.when]] has exactly one of "
                "call, bind, literal, import, pattern, ast, returns, detector"
            )
        if (self.pattern or self.ast) and not self.needs:
            raise ValueError("a syntax pattern must list in 'needs' the words one of which its text contains")
        if self.pattern:
            msgspec.structs.force_setattr(self, "ast", {"pattern": self.pattern})
        for test in (self.test, *(test for _, test in self.options)):
            _check_test(test)


class FixSpec(_RuleTable, frozen=True, rename={"imports": "import"}):
    """How a rule's findings are fixed, a [[rule.fix]] table."""

    title: str = "Use the safe form"
    callee: str = ""
    keyword: dict[str, str] = {}
    drop: tuple[str, ...] = ()
    replace: str = ""
    value: str = ""
    array: int = -1  # this argument must be an array whose size sizeof gives
    imports: str = ""
    fixer: str = ""
    only: re.Pattern[str] | None = None  # the callee as written must match
    suggest: bool = False  # shown, never applied automatically
    changes: str = ""  # what a suggestion may change
    evidence: tuple[str, ...] = ()  # what the program must show for the fix to be safe; fixes/evidence.py
    alone: bool = False  # only where the call's result is unused
    unless: re.Pattern[str] | None = None  # must not occur in the enclosing function
    wrap: str = ""  # the call a value is passed through, "{}" for the value
    wrap_text: str = ""  # the same where the value is known to be text
    places: tuple[int, ...] = ()  # the arguments to wrap; empty for all
    context: str = ""  # what the text before the value must be
    statement: str = ""  # the statement to insert
    path: re.Pattern[str] | None = None  # the resolved name of the callee must match

    def __post_init__(self) -> None:
        if self.suggest == bool(self.evidence):
            raise ValueError("a fix has either 'suggest' or the 'evidence' that makes it safe")
        if self.suggest and not self.changes:
            raise ValueError("a suggestion says in 'changes' what it may change")


class RuleTests(_RuleTable, frozen=True):
    bad: tuple[str, ...] = ()
    good: tuple[str, ...] = ()


class Rule(_RuleTable, frozen=True, rename={"conditions": "when", "fixes": "fix"}):
    id: str
    cwe: int
    severity: Severity
    title: str
    message: str
    why: str
    conditions: tuple[RuleCondition, ...]
    language: str = ""
    references: tuple[str, ...] = ()
    use: str = "*"
    fixes: tuple[FixSpec, ...] = ()
    tests: RuleTests = RuleTests()
    also: tuple[int, ...] = ()  # other CWE numbers of the same weakness

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z]+(?:-[a-z0-9]+)+", self.id):
            raise ValueError("an id is lower-case words joined by hyphens")


@cache
def load_rules(language: str) -> tuple[Rule, ...]:
    """All rules for a language, ordered by id."""
    if language not in LANGUAGES:
        raise NotFound(f"there are no audit rules for {language!r}; known languages: {', '.join(LANGUAGES)}")
    rules: list[Rule] = []
    for folder in ("c", "cpp") if language == "cpp" else (family_of(language),):
        for source in files(__package__).joinpath(folder).iterdir():
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


def parse_rules(text: str, language: str, file_name: str) -> list[Rule]:
    """The rules in the text of one file. Raises ConfigError for anything malformed or unknown."""
    where = f"{language}/{file_name}"
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where}: not valid TOML: {error}") from error
    entries = data.get("rule")
    if not isinstance(entries, list) or set(data) != {"rule"}:
        raise ConfigError(f"{where}: expected only [[rule]] tables")
    rules: list[Rule] = []
    for entry in entries:
        try:
            if "language" in entry:
                raise msgspec.ValidationError("the folder of a rule names its language")
            rules.append(msgspec.convert({**entry, "language": language}, Rule, dec_hook=_decode))
        except msgspec.ValidationError as error:
            name = entry.get("id", "a rule without id")
            raise ConfigError(f"{where}: {name}: {error}") from error
    return rules


def _decode(kind: type, value: Any) -> Any:
    """Converts TOML values to the types of a rule that msgspec does not know."""
    try:
        if kind is Globs:
            return Globs(msgspec.convert(value, list[str]))
        if kind is ArgumentNames:
            return ArgumentNames(msgspec.convert(value, str).split("|"))
        if kind is ArgumentTests:
            tests = msgspec.convert(value, dict[str, str])
            return ArgumentTests((ArgumentNames(names.split("|")), test) for names, test in tests.items())
        return re.compile(msgspec.convert(value, str), re.DOTALL)
    except re.error as error:
        raise ValueError(f"not a valid regular expression: {error}") from error
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error  # so that msgspec adds where in the rule it is


def _check_test(test: str) -> None:
    """Raises ValueError for a condition that rules/conditions.py does not know."""
    for part in re.split(r"\|\||&&", test):
        word = part.strip().removeprefix("not:")
        try:
            if word[:1] in ("~", "@", "^"):
                re.compile(word.lstrip("~@"))
            elif word[:1] in ("<", ">", "+"):
                int(word[1:], 0)
            elif word[:1] != "=" and word not in _TESTS:
                raise ValueError("no such word")
        except (re.error, ValueError) as error:
            raise ValueError(f"the condition {word!r} cannot be read: {error}") from error
