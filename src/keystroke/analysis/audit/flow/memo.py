"""Remembers the effects of statements on the environment while their function is being edited.

A statement with the same text, in the same function, with the same values of everything it can read has the
same effect. Only statements without matches are remembered, so a walk that skips them reports what a full
walk reports.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from keystroke.analysis.audit.flow.values import Value

Env = dict[str, Value]
WAYS = 3  # environments remembered per statement; a loop body is walked with two
MAX_KEPT = 6000  # statements
_WORD = re.compile(r"[A-Za-z_$][\w$]*")
Key = tuple[str, bool, str, str]  # function name, whether it is a handler, kind and text of the statement


@dataclass(slots=True)
class StatementEffect:
    """One walk of a statement: environments before and after, whether control ends there, and its steps."""

    seen: frozenset[str]  # every name whose value it may read or change
    before: Env
    after: Env
    changed: Env
    removed: tuple[str, ...]
    dead: bool
    steps: int
    dotted: frozenset[str]
    lookups: dict[str, str]  # functions of the file that it evaluates, with their texts
    returns: tuple[Value, ...]  # what the function around it returns there

    def difference(self, env: Env) -> set[str] | None:
        """The keys in which `env` differs from `before`; None if the statement can read one of them."""
        before = self.before
        out: set[str] = set()
        if env is before:
            return out
        for key, value in [item for item in env.items() if before.get(item[0]) is not item[1]]:
            known = before.get(key)
            if known is not None and is_same(known, value):
                env[key] = known  # share the object, so that the next comparison is fast
                continue
            if self.reads(key, value) or (known is not None and self.reads(key, known)):
                return None
            out.add(key)
        if len(before) != len(env) or out:
            for key, value in before.items():
                if key not in env:
                    if self.reads(key, value):
                        return None
                    out.add(key)
        return out

    def apply_to(self, env: Env, apart: set[str]) -> Env:
        """The environment after the statement runs in `env`, which differs in the keys `apart`."""
        if not apart:
            return self.after
        out = dict(env)
        for key in self.removed:
            out.pop(key, None)
        out.update(self.changed)
        return out

    def reads(self, key: str, value: Value) -> bool:
        return _root(key) in self.seen or not value.roots.isdisjoint(self.seen)


class StatementMemo:
    def __init__(self) -> None:
        self.effects: dict[Key, list[StatementEffect]] = {}
        self.changes: dict[tuple[str, str], frozenset[str]] = {}  # names that a statement assigns
        self._env: Env | None = None  # the last environment returned, the remembered one it was derived from,
        self._twin: Env = {}
        self._apart: set[str] = set()  # the keys in which they differ,
        self._reach: set[str] = set()  # and the names read by statements affected by that

    def clear(self) -> None:
        self.effects.clear()
        self.changes.clear()

    def forget(self, names: set[str]) -> None:
        """Drops the effects of statements that could have read these names."""
        for key in [
            key
            for key, effects in self.effects.items()
            if any(not effect.seen.isdisjoint(names) for effect in effects)
        ]:
            del self.effects[key]

    def find(
        self, key: Key, env: Env, function_text: Callable[[str], str]
    ) -> tuple[StatementEffect, Env] | None:
        for effect in self.effects.get(key, ()):
            if any(function_text(name) != text for name, text in effect.lookups.items()):
                continue
            followed = env is self._env and effect.before is self._twin
            if followed:  # the difference is known from the previous statement
                apart = self._apart if effect.seen.isdisjoint(self._reach) else None
            else:
                apart = effect.difference(env)
            if apart is not None:
                after = effect.apply_to(env, apart)
                left = apart - effect.changed.keys()
                if not followed or len(left) != len(apart):
                    self._reach = _reach(left, after, effect.after)
                self._env, self._twin, self._apart = after, effect.after, left
                return effect, after
        return None

    def remember(
        self,
        key: Key,
        before: Env,
        after: Env,
        dead: bool,
        steps: int,
        dotted: Iterable[str],
        lookups: dict[str, str],
        returns: tuple[Value, ...],
    ) -> None:
        if len(self.effects) > MAX_KEPT:
            self.clear()
        known = self.effects.setdefault(key, [])
        changed = {name: value for name, value in after.items() if before.get(name) is not value}
        removed = tuple(name for name in before if name not in after)
        effect = StatementEffect(
            reachable_names(frozenset(_WORD.findall(key[-1])), before, after),
            before,
            after,
            changed,
            removed,
            dead,
            steps,
            frozenset(dotted),
            lookups,
            returns,
        )
        self.effects[key] = [effect, *known[: WAYS - 1]]


def reachable_names(names: frozenset[str], *envs: Env) -> frozenset[str]:
    """The names that a statement with these words can read or change, including what flowed into them."""
    seen = set(names)
    fresh = names
    parts = [(_root(key), value) for env in envs for key, value in env.items() if "." in key]
    while fresh:
        more: set[str] = set()
        values = [value for root, value in parts if root in fresh]
        values += [env[key] for env in envs for key in env.keys() & fresh]
        for value in values:
            more |= value.roots
            if value.function is not None:  # its body is read where it is called
                more.update(_WORD.findall(value.function.node.text()))
        fresh = frozenset(more - seen)
        seen |= fresh
    return frozenset(seen)


def _reach(names: set[str], *envs: Env) -> set[str]:
    """The names read by a statement that reads one of these names."""
    out = {_root(name) for name in names}
    for env in envs:
        for name in names & env.keys():
            out |= env[name].roots
    return out


def _root(key: str) -> str:
    dot = key.find(".")
    return key if dot < 0 else key[:dot]


def is_same(one: Value, other: Value) -> bool:
    return one is other or (
        one == other and one.function is other.function and type(one.const) is type(other.const)
    )
