"""Tells from the words of a text, without parsing, whether any rule can match it.

SILENT guarantees that no rule matches; the other answers guarantee nothing. Most functions contain no word
that a rule needs, so most keys cost one search for words.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from keystroke.analysis.audit.flow.knowledge import Knowledge, load_knowledge
from keystroke.analysis.audit.flow.roles import STANDARD, VIEW
from keystroke.analysis.audit.flow.values import REMOTE, Value
from keystroke.analysis.audit.rules.catalog import Rule, RuleCondition, load_rules
from keystroke.analysis.audit.rules.conditions import satisfies
from keystroke.analysis.audit.rules.secrets import ASSIGNED, FORMAT_MARKS, SECRET_WORDS

WORD = re.compile(r"[A-Za-z_$][\w$]*")
_CALLED = re.compile(r"[A-Za-z_$][\w$]*+(?:\s*+\()?")
_ALIAS = re.compile(r"=\s*+((?:\w++\.)*+)(\w++)[ \t]*+$", re.MULTILINE)
_ALIASED = re.compile(r"\w+$")
MAX_NAME = 200  # characters of a name and the space behind it
MAX_CONSTANT = 400  # longer constants of the file are ignored
MAX_KEYS = 20  # keys of a mapping that count as words where it is used
SILENT, SYNTAX, FLOW = range(3)  # what a unit needs: nothing, syntax patterns, data flow

# Words that the detectors in code need.
_DETECTORS = {
    "javascript": ("_blank",),
    "typescript": ("_blank",),
    "tsx": ("_blank",),
    "go": ("strconv.", "make("),
    "java": ("XML", "SAX", "DocumentBuilder", "TransformerFactory", "SchemaFactory", "addCookie"),
}
_PROPERTY = re.compile(r"\]\s*=[^=]")  # JavaScript: an assignment to a computed property

_TIMED = r"(?:ignature|mac|igest|csrf\w*|oken|ecret|[_kK]ey|assword|asswd)(?:\(\))?"
_EQUALS = re.compile(r"[!=]==?")
_BEFORE = re.compile(rf"{_TIMED}[\"'\])]*$")
_AFTER = re.compile(rf"[\w.\[\]\"'()]*{_TIMED}")
_WRITES = ("print", "console.", "log", "Log")
_LOGGED = re.compile(  # a secret's name in a logging call
    r"(?:print|console\.\w+|[lL]og\w*\.\w+)\s*\([^\n]*(?:\n[^\n]*){0,3}?"
    r"(?:assw(?:or)?d|PASSWORD|assphrase|[kK]ey|KEY|oken|TOKEN|ecret|SECRET|redit_?[cC]ard|ssn|SSN|cvv|CVV)"
)


@dataclass(frozen=True, slots=True)
class _Need:
    """What else a text must contain for one condition: one of each group, and a source of foreign data."""

    groups: tuple[tuple[str, ...], ...]
    function: re.Pattern[str] | None
    remote: bool


@dataclass(frozen=True, slots=True)
class _Name:
    """A glob that triggers a condition: its whole words, and the parts of words next to a "*"."""

    words: frozenset[str]
    pieces: tuple[str, ...]
    bare: bool  # must be called without a receiver
    need: _Need


_FREE = _Need((), None, False)


class Triggers:
    """The rules of one language by the words that a text must contain."""

    def __init__(self, language: str, rules: Iterable[Rule], knowledge: Knowledge) -> None:
        self.python = language == "python"
        self.script = language in ("javascript", "typescript", "tsx")
        self.know = knowledge
        self.words = _DETECTORS.get(language, ())
        self.names: dict[str, list[_Name]] = defaultdict(list)
        self.holes: list[_Name] = []  # globs without a whole word
        self.holed: dict[str, list[_Name]] = defaultdict(
            list
        )  # other globs ending in "*", by their longest word
        self.binds: list[tuple[str, re.Pattern[str], _Need]] = []
        self.returns: list[_Need] = []
        self.syntax: list[_Need] = []
        for rule in rules:
            for condition in rule.conditions:
                self._add(condition, _need(rule, condition))
        self.sources: dict[str, list[_Name]] = defaultdict(list)
        self.loose: list[_Name] = []
        self.exact: list[str] = []
        for pattern in (
            *knowledge.sources.patterns,
            *knowledge.handler_types.patterns,
            *knowledge.handler_marks,
            *knowledge.fills,
        ):
            self._source(pattern)
        self.handlers = frozenset(
            word for pattern in knowledge.handler_decorators.patterns for word in WORD.findall(pattern)[-1:]
        )
        self.spelled = [
            (name.rsplit(".", 1)[-1], name, re.compile(rf"\b{re.escape(name)}\b")) for name in self.exact
        ]

    def _add(self, condition: RuleCondition, need: _Need) -> None:
        if condition.call is not None:
            for pattern in condition.call.patterns:
                last = pattern.rsplit(".", 1)[-1]
                if "*" in last:
                    self._hole(pattern, need)
                else:
                    word = (WORD.findall(last) or [last])[-1]
                    self.names[word].append(
                        _Name(_words(pattern), _pieces(pattern), self.python and pattern == word, need)
                    )
        for globs in (condition.bind, condition.literal, condition.imports):
            for pattern in globs.patterns if globs is not None else ():
                if self.python and condition.bind is not None and pattern[-1].isalnum():
                    word = re.findall(r"\w+", pattern)[-1]
                    self.binds.append((word, re.compile(rf"{word}\s*(?::[^=\n]*)?=(?!=)"), need))
                else:
                    self._hole(pattern, need)
        if condition.returns:
            self.returns.append(need)
        if condition.ast is not None:
            self.syntax.append(need)

    def _hole(self, pattern: str, need: _Need) -> None:
        name = _Name(_words(pattern), _pieces(pattern), False, need)
        if name.words:
            self.holed[max(name.words, key=len)].append(name)
        else:
            self.holes.append(name)

    def _source(self, pattern: str) -> None:
        if pattern.startswith("self.") and "*" not in pattern:
            self.exact.append(pattern.removesuffix("()"))
            return
        name = _Name(_words(pattern), _pieces(pattern), pattern.endswith("()"), _FREE)
        last = re.search(r"(?<![\w*])(\w+)(?:\(\))?$", pattern)
        if last is not None:
            self.sources[last[1]].append(name)
        else:
            self.loose.append(name)

    def required_analysis(
        self,
        source: str,
        names: frozenset[str],
        calls: frozenset[str],
        context: Mapping[str, Value],
        apart: bool,
    ) -> int:
        """SILENT, SYNTAX or FLOW for a unit with these words and calls; `apart`: nothing inlined."""
        known = [context[name] for name in names & context.keys()]
        text, words, called = source, names, set(calls)
        if known:
            extra = _spelling(known)
            more, meant = words_of(extra)
            text, words = source + extra, names | more
            called |= meant
        foreign: bool | None = None if apart and not any(value.level >= REMOTE for value in known) else True

        def holds(need: _Need) -> bool:
            nonlocal foreign
            for group in need.groups:
                for piece in group:
                    if piece in text:
                        break
                else:
                    return False
            if need.function is not None and not need.function.search(text):
                return False
            if not need.remote:
                return True
            if foreign is None:
                foreign = self._foreign(text, words, called)
            return foreign

        bare: set[str] = set()
        for alias, dots, word in _aliases(text):
            if alias in called:
                called.add(word)
                if not dots:
                    bare.add(word)
        # Outside Python a call may be spelled in more ways than a name before a parenthesis.
        for word in (called if self.python else words) & self.names.keys():
            for name in self.names[word]:
                if (
                    (not name.bare or word in bare or _plain(word, text))
                    and _there(name, text, words)
                    and holds(name.need)
                ):
                    return FLOW
        if self._literal(text) or any(map(holds, self.returns)):
            return FLOW
        if any(_all(name.pieces, text) and holds(name.need) for name in self.holes):
            return FLOW
        for word in words & self.holed.keys():
            if any(_there(name, text, words) and holds(name.need) for name in self.holed[word]):
                return FLOW
        for word, pattern, need in self.binds:
            if word in text and holds(need) and pattern.search(text):
                return FLOW
        return SYNTAX if any(map(holds, self.syntax)) else SILENT

    def _literal(self, text: str) -> bool:
        """Whether a detector in code may find something."""
        return (
            any(mark in text for mark in self.words)
            or any(mark in text for mark in FORMAT_MARKS)
            or (any(word in text for word in SECRET_WORDS) and ASSIGNED.search(text) is not None)
            or (self.script and _PROPERTY.search(text) is not None)
            or ((self.python or self.script) and (_compares_secret(text) or _logs_secret(text)))
        )

    def _foreign(self, text: str, words: frozenset[str], called: set[str]) -> bool:
        """Whether a text contains a source of foreign data."""
        if (
            "main(" in text
            or (("request" in words or "context" in words) and VIEW.search(text))
            or any(
                word in words and name in text and whole.search(text) for word, name, whole in self.spelled
            )
            or any(_there(n, text, words) for n in self.loose)
        ):
            return True
        if "@" in text and not words.isdisjoint(self.handlers):
            return True
        return any(
            (word in called or not name.bare) and _there(name, text, words)
            for word in words & self.sources.keys()
            for name in self.sources[word]
        )


def words_of(text: str) -> tuple[frozenset[str], frozenset[str]]:
    """The words of a text, and those followed by a parenthesis."""
    found = set(_CALLED.findall(text))
    called = frozenset(piece[:-1].rstrip() for piece in found if piece[-1] == "(")
    return called.union(piece for piece in found if piece[-1] != "("), called


def _plain(word: str, text: str) -> bool:
    """Whether a word is called without a receiver."""
    at = text.find(word)
    while at >= 0:
        end = at + len(word)
        if (not at or not (text[at - 1].isalnum() or text[at - 1] in "_$.")) and (
            text[end : end + MAX_NAME].lstrip()[:1] == "("
        ):
            return True
        at = text.find(word, end)
    return False


def _aliases(text: str) -> Iterator[tuple[str, str, str]]:
    """Assignments of one name to another: the new name, the prefix of the old one, and its last part."""
    for found in _ALIAS.finditer(text):
        at = found.start()
        before = text[max(0, at - MAX_NAME) : at].split()
        alias = _ALIASED.search(before[-1]) if before else None
        if alias is not None:
            yield alias.group(), found[1], found[2]


def _compares_secret(text: str) -> bool:
    """Whether something with a secret's name is compared."""
    for found in _EQUALS.finditer(text):
        start, end = found.span()
        if (
            _BEFORE.search(text[max(0, start - 40) : start].rstrip()) is not None
            or _AFTER.match(text[end : end + 60].lstrip()) is not None
        ):
            return True
    return False


def _logs_secret(text: str) -> bool:
    return any(word in text for word in _WRITES) and _LOGGED.search(text) is not None


def _there(name: _Name, text: str, words: frozenset[str]) -> bool:
    return name.words <= words and _all(name.pieces, text)


def _all(pieces: tuple[str, ...], text: str) -> bool:
    return all(piece in text for piece in pieces)


def _words(pattern: str) -> frozenset[str]:
    # A parameter with a role may have any name in the text.
    return frozenset(re.findall(r"(?<![\w*])[A-Za-z_]\w*(?![\w*])", pattern)) - STANDARD


def _pieces(pattern: str) -> tuple[str, ...]:
    whole = _words(pattern) | STANDARD
    return tuple(piece for piece in re.findall(r"\w+", pattern) if piece not in whole)


@cache
def triggers_of(language: str) -> Triggers:
    return Triggers(language, load_rules(language), load_knowledge(language))


def _spelling(values: list[Value]) -> str:
    """The meaning of names of the file, written as if they were called."""
    out: list[str] = []
    for value in values:
        out.append(f"\n{value.path}(")
        if isinstance(value.const, str) and len(value.const) < MAX_CONSTANT:
            out.append(f"\n{value.const!r}")
        if value.items:
            out.extend(f"\n{key}" for key, _ in value.items[:MAX_KEYS] if isinstance(key, str))
    return "".join(out)


def _need(rule: Rule, condition: RuleCondition) -> _Need:
    groups: list[tuple[str, ...]] = [condition.needs] if condition.needs else []
    remote = condition.handler or _remote(condition.test)
    for places, test in ((condition.arg, condition.test), *condition.options):
        if condition.call is None or satisfies(None, test, rule.use):
            continue
        remote = remote or _remote(test)
        if not any(place in ("receiver", "*") or place.lstrip("-")[:1].isdigit() for place in places):
            groups.append(tuple(place.rsplit(".", 1)[-1] for place in places))
    function = condition.function
    if function is not None and re.search(r"[\^$]", function.pattern):
        function = None
    return _Need(tuple(groups), function, remote)


def _remote(test: str) -> bool:
    if "||" in test:
        return all(_remote(part) for part in test.split("||"))
    return any(part.strip() in ("remote", "built-remote", "foreign", "lines") for part in test.split("&&"))
