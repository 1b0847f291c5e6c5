"""Matches rules against the events of the data flow.

The matcher looks up rules by the name of what is called or assigned, evaluates their conditions on the
values, and keeps one match per rule and position.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from keystroke.analysis.audit.finding import Severity
from keystroke.analysis.audit.flow.base import CallEvent, ExhaustedError, FlowListener
from keystroke.analysis.audit.flow.data_flow import DataFlow
from keystroke.analysis.audit.flow.values import HOLE, LOCAL, REMOTE, Value
from keystroke.analysis.audit.rules.catalog import Rule, RuleCondition, load_rules
from keystroke.analysis.audit.rules.conditions import satisfies
from keystroke.analysis.audit.rules.triggers import WORD
from keystroke.analysis.audit.source import ir


@dataclass(slots=True)
class RuleMatch:
    rule: Rule
    start: int
    end: int
    severity: Severity
    message: str
    cwe: int
    origin: str
    subject: ir.Expr | None  # the expression that a fix changes
    value: Value | None
    args: list[Value]
    node: ir.Syntax = None  # where it was found
    known: FlowSnapshot | None = None  # the environment at the match

    def evaluate(self, expr: ir.Expr) -> Value:
        """The value of an expression at the match; REMOTE if unknown."""
        return self.known(expr) if self.known is not None else Value(level=REMOTE)


class RuleIndex:
    """The rules of one language by what triggers them."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self.calls: dict[str, list[tuple[Rule, RuleCondition]]] = defaultdict(list)
        self.any_call: list[tuple[Rule, RuleCondition]] = []
        self.binds: list[tuple[Rule, RuleCondition]] = []
        self.literals: list[tuple[Rule, RuleCondition]] = []
        self.imports: list[tuple[Rule, RuleCondition]] = []
        self.returns: list[tuple[Rule, RuleCondition]] = []
        self.patterns: list[tuple[Rule, RuleCondition]] = []
        self.detectors: dict[str, tuple[Rule, RuleCondition]] = {}
        for rule in rules:
            for condition in rule.conditions:
                pair = (rule, condition)
                if condition.call is not None:
                    for last in {pattern.rsplit(".", 1)[-1] for pattern in condition.call.patterns}:
                        (self.any_call if "*" in last else self.calls[last]).append(pair)
                for trigger, group in (
                    (condition.bind, self.binds),
                    (condition.literal, self.literals),
                    (condition.imports, self.imports),
                    (condition.ast, self.patterns),
                    (condition.returns, self.returns),
                ):
                    if trigger:
                        group.append(pair)
                if condition.detector:
                    self.detectors[condition.detector] = pair
        waited = [condition for _, condition in [*self.any_call, *self.patterns]]
        needed = dict.fromkeys(word for condition in waited for word in condition.needs)
        self.needed = tuple(word for word in needed if WORD.fullmatch(word))
        self.marks = tuple(word for word in needed if not WORD.fullmatch(word))  # not words
        self.binds_for = lru_cache(maxsize=4096)(self._binds_for)

    def _binds_for(self, path: str) -> list[tuple[Rule, RuleCondition]]:
        return [pair for pair in self.binds if pair[1].bind is not None and pair[1].bind.match(path)]


@cache
def index_of(language: str) -> RuleIndex:
    return RuleIndex(load_rules(language))


# What stands before the name of a table, a column or another object of a database, or a whole clause.
_NAMED = re.compile(
    r"(?i)(?:\b(?:from|join|into|update|table|exists|index|view|database|schema|sequence|column|references|"
    r"pragma|truncate|describe|explain|as|by|select|distinct|vacuum|analyze|on|trigger|only|limit|offset|"
    r"level|where|having)\s+|\b(?:from|join)\s*\(\s*|\b(?:from|join)\s+[\w.\0]+:|"
    r"pragma \w+\s*(?:=|\()\s*'?|\bcolumn\s+[\"`\[]?\0[\"`\]]?\s+|[\"`\[.])$"
)
_QUOTED_VALUE = re.compile(r"(?i)(?:[=<>,(]|\blike|\bin|\bvalues)\s*\"$")
# Where a list of columns, of placeholders or of comparisons with placeholders may stand.
_LISTED = re.compile(r"(?i)\b(?:in|values)\s*\(\s*$|\b(?:where|set|and|or|having|returning)\s+$|[,(\0]\s*$")
_BOUND = ("params", "parameters", "vars", "args", "values", "replacements", "bind")


def is_internal_statement(value: Value, args: list[Value], kwargs: dict[str, Value]) -> bool:
    """Whether only names the program chose are put into a statement, and its values are bound.

    A name may come from a caller inside the program, never from outside. With bound values, lists of columns,
    of placeholders and of comparisons are names too.
    """
    text = value.skeleton
    if text is None or value.level >= REMOTE:
        return False
    at = next((number for number, item in enumerate(args) if item is value), len(args))
    bound = len(args) > at + 1 or any(name in kwargs for name in _BOUND)
    if bound and value.level <= LOCAL:
        return True
    before = [text[:place] for place, char in enumerate(text) if char == HOLE]
    return all(
        (_NAMED.search(part) and not _QUOTED_VALUE.search(part)) or (bound and _LISTED.search(part))
        for part in before
    )


class RuleMatcher(FlowListener):
    flow: DataFlow  # the walk it listens to; set before the walk starts

    def __init__(self, language: str, index: RuleIndex) -> None:
        self.language = language
        self.rules = index
        self.matches: dict[tuple[str, int], RuleMatch] = {}
        self.handlers: dict[int, bool] = {}
        self.told: set[tuple[str, str, int]] = (
            set()
        )  # rule and place in an inlined function, reported at a call
        self.any_call = index.any_call
        self.present: set[str] = set()  # the words that rules need and the text contains

    def set_text(self, text: str, words: str = "") -> None:
        """Sets the text to be walked, and optionally its distinct words, which are faster to search.

        Conditions that need words the text does not contain are skipped.
        """
        words = words or text
        self.present = {word for word in self.rules.needed if word in words}
        self.present.update(mark for mark in self.rules.marks if mark in text)
        self.any_call = [
            pair
            for pair in self.rules.any_call
            if not pair[1].needs or not self.present.isdisjoint(pair[1].needs)
        ]

    # Events

    def on_call(self, event: CallEvent) -> Value | None:
        path = event.path
        last = path.rsplit(".", 1)[-1]
        for rule, condition in [*self.rules.calls.get(last, ()), *self.any_call]:
            if (
                condition.call is None
                or not condition.call.match(path)
                or (condition.excluded is not None and condition.excluded.match(path))
            ):
                continue
            value = self.argument(event, condition.arg)
            if self.holds(rule, condition, value, event.args, event.kwargs, event.function):
                self.add_match(rule, condition, event.call.node, value, event.call, event.args)
        return None

    def on_assign(self, path: str, key: str, value: Value, node: ir.Syntax, target: ir.Expr) -> None:
        pairs = self.rules.binds_for(path)
        if isinstance(target, ir.IndexExpr) and isinstance(target.key, ir.ConstExpr) and path.endswith("[]"):
            pairs = [*pairs, *self.rules.binds_for(f"{path[:-1]}{target.key.value}]")]  # by name too
        for rule, condition in pairs:
            if self.holds(rule, condition, value, [value], {}, self.function):
                self.add_match(rule, condition, node, value, target, [value])

    def on_return(self, value: Value, node: ir.Syntax, function: ir.Function | None) -> None:
        if self.language == "python" and value.items is not None:  # (body, status, headers)
            value = value.item(0) or value
        for rule, condition in self.rules.returns:
            if self.holds(rule, condition, value, [value], {}, function):
                self.add_match(rule, condition, node, value, None, [value])

    def on_collection(self, value: Value, node: ir.Syntax, coll: ir.CollectionExpr) -> None:
        for rule, condition in self.rules.literals:
            if (
                condition.literal is not None
                and condition.literal.match(value.path)
                and self.holds(rule, condition, value, [value], {}, self.function)
            ):
                self.add_match(rule, condition, node, value, coll, [value])

    def on_import(self, path: str, node: ir.Syntax) -> None:
        for rule, condition in self.rules.imports:
            if condition.imports is not None and condition.imports.match(path):
                self.add_match(rule, condition, node, None, None, [])

    def on_function(self, function: ir.Function, handler: bool) -> None:
        self.handlers[id(function)] = handler

    @property
    def function(self) -> ir.Function | None:
        return self.flow.functions[-1] if self.flow.functions else None

    def match_patterns(self, root: Any) -> None:
        """Matches the syntax patterns whose needed words occur in the text."""
        for rule, condition in self.rules.patterns:
            if condition.ast is None or self.present.isdisjoint(condition.needs):
                continue
            for node in root.find_all({"rule": condition.ast}):
                if condition.unless is None or not condition.unless.search(_around(node).text()):
                    self.add_match(rule, condition, node, None, None, [])

    def report(
        self,
        detector: str,
        node: ir.Syntax,
        message: str = "",
        origin: str = "",
        subject: ir.Expr | None = None,
        args: list[Value] | None = None,
    ) -> None:
        """Adds a match of the rule that names this detector."""
        pair = self.rules.detectors.get(detector)
        if pair is not None and (pair[1].unless is None or not pair[1].unless.search(_around(node).text())):
            self.add_match(pair[0], pair[1], node, None, subject, args or [], message, origin)

    def report_call(
        self, detector: str, event: CallEvent, message: str = "", origin: str = "", with_args: bool = True
    ) -> None:
        """Reports a call, for fixes that change the call."""
        args = event.args if with_args else None
        self.report(detector, event.call.node, message, origin, event.call, args)

    # Conditions

    def argument(self, event: CallEvent, places: tuple[str, ...]) -> Value | None:
        if places == ("receiver",):
            return event.receiver
        if places in (("*",), ("positional",)):
            given = [*event.args, *(event.kwargs.values() if places == ("*",) else ())]
            return max(given, key=lambda value: (value.level, value.built)) if given else None
        for place in places:
            value = self.option(place, event.args, event.kwargs)
            if value is not None:
                return value
        return None

    def option(self, place: str, args: list[Value], kwargs: dict[str, Value]) -> Value | None:
        """An argument by position, by keyword, or by name inside an options object."""
        if place.lstrip("-").isdigit():
            at = int(place)
            return args[at] if -len(args) <= at < len(args) else None
        if place in kwargs:
            return kwargs[place]
        outer, dotted, inside = place.partition(".")
        if dotted and outer.isdigit() and inside.isdigit():  # an item of a tuple given as argument
            whole = args[int(outer)] if int(outer) < len(args) else None
            return whole.item(int(inside)) if whole is not None else None
        if dotted and outer in kwargs:
            held = kwargs[outer]
            return held.item(int(inside)) if inside.isdigit() else self.option(inside, [held], {})
        for value in args:
            if value.items is not None:
                found = value.item(place)
                if found is not None:
                    return found
                head, dot, rest = place.partition(".")
                if dot:
                    inner = value.item(head)
                    if inner is not None:
                        deeper = self.option(rest, [inner], {})
                        if deeper is not None:
                            return deeper
        return None

    def holds(
        self,
        rule: Rule,
        condition: RuleCondition,
        value: Value | None,
        args: list[Value],
        kwargs: dict[str, Value],
        function: ir.Function | None,
    ) -> bool:
        if condition.handler and not (function is not None and self.handlers.get(id(function))):
            return False
        if condition.function is not None and not (
            function is not None and condition.function.search(function.name)
        ):
            return False
        if value is None and "**" in kwargs and "missing" in condition.test:
            return False  # it may be passed there
        if not satisfies(value, condition.test, rule.use):
            return False
        if (
            rule.use == "sql"
            and value is not None
            and condition.test.startswith("built")
            and is_internal_statement(value, args, kwargs)
        ):
            return False
        if (
            condition.unless is not None
            and function is not None
            and condition.unless.search(function.node.text())
        ):
            return False
        if condition.text is not None:
            text = value.text if value is not None else None
            if text is None or not condition.text.search(text):
                return False
        for names, test in condition.options:
            found = next(
                (item for name in names if (item := self.option(name, args, kwargs)) is not None), None
            )
            if not satisfies(found, test, rule.use):
                return False
        if condition.without and "**" not in kwargs:
            return all(self.option(name, args, kwargs) is None for name in condition.without)
        return not condition.without

    def add_match(
        self,
        rule: Rule,
        condition: RuleCondition,
        node: ir.Syntax,
        value: Value | None,
        subject: ir.Expr | None,
        args: list[Value],
        message: str = "",
        origin: str = "",
    ) -> None:
        if self.flow.silent:
            return
        here: ir.Syntax | None = node
        if self.call_site is not None:  # in an inlined function: reported at the call, unless reported there
            inner = (
                rule.id,
                self.function.name if self.function is not None else "",
                node.range().start.index,
            )
            node, known = self.call_site
            if rule.id in known or inner in self.told:
                return
            self.told.add(inner)  # once for all calls
            subject, args, here = None, [], None
        span = node.range()
        self.record_match(
            rule, condition, span.start.index, span.end.index, value, subject, args, message, origin, here
        )

    def record_match(
        self,
        rule: Rule,
        condition: RuleCondition,
        start: int,
        end: int,
        value: Value | None = None,
        subject: ir.Expr | None = None,
        args: list[Value] | None = None,
        message: str = "",
        origin: str = "",
        node: ir.Syntax = None,
    ) -> None:
        self.match_count += 1
        key = (rule.id, start)
        if key in self.matches and self.matches[key].end >= end:
            return
        self.matches[key] = RuleMatch(
            rule,
            start,
            end,
            condition.severity or rule.severity,
            message or condition.message or rule.message,
            condition.cwe or rule.cwe,
            origin or (value.origin if value is not None else ""),
            subject,
            value,
            args or [],
            node,
        )
        if rule.fixes:
            self.matches[key].known = FlowSnapshot(self.flow)

    def scan_text(self, root: Any, text: str) -> None:
        """Checks the text itself."""


class FlowSnapshot:
    """The environment at one point of the walk, to evaluate expressions later."""

    def __init__(self, flow: DataFlow) -> None:
        self.flow, self.env, self.functions = flow, dict(flow.env), list(flow.functions)

    def __call__(self, expr: ir.Expr) -> Value:
        flow = self.flow
        held = flow.env, flow.functions, flow.steps, flow.memo
        flow.env, flow.functions, flow.memo = dict(self.env), list(self.functions), None
        try:
            return flow.eval_silently(expr)
        except (ExhaustedError, RecursionError):
            return Value(level=REMOTE)
        finally:
            flow.env, flow.functions, flow.steps, flow.memo = held

    def arrays(self, block: int) -> list[str]:
        """C: the arrays that a block belongs to."""
        return [
            name
            for name, value in self.env.items()
            if block and value.memory is not None and value.memory.block == block and value.memory.array
        ]


def _around(node: ir.Syntax) -> ir.Syntax:
    """The enclosing function of a node, or the whole text."""
    at = node
    while (parent := at.parent()) is not None:
        at = parent
        if at.kind() in _FUNCTIONS:
            break
    return at


_FUNCTIONS = frozenset(
    {"function_declaration", "method_declaration", "function_definition", "method_definition", "func_literal"}
)
