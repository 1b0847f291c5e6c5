"""Narrows values by tests: after a check, the checked values are safe for the uses the check is for."""

from __future__ import annotations

from keystroke.analysis.audit.flow.base import VALIDATING, Env, FlowBase
from keystroke.analysis.audit.flow.folding import key_of, uses_without
from keystroke.analysis.audit.flow.values import ALL, CONSTANT, LOCAL, replace
from keystroke.analysis.audit.source import ir

_SCALARS = ("string", "number", "boolean", "bigint")
_ALWAYS = frozenset(
    {"path", "sql", "html", "shell", "url", "redirect", "header", "log", "code", "regex", "template", "nosql"}
)  # own properties of an object are an allowlist, except for keys that every object has


class NarrowingFlow(FlowBase):
    def narrow(self, test: ir.Expr, truth: bool) -> None:
        """Updates the environment for `test` having the result `truth`."""
        if isinstance(test, ir.OpExpr):
            if test.op in ("!", "not"):
                self.narrow(test.args[0], not truth)
            elif test.op in ("and", "&&"):
                if truth:
                    for arg in test.args:
                        self.narrow(arg, True)
                else:
                    self.narrow_either(test.args, False)
            elif test.op in ("or", "||"):
                if not truth:
                    for arg in test.args:
                        self.narrow(arg, False)
                else:
                    self.narrow_either(test.args, True)
            else:
                self.narrow_comparison(test, truth)
            return
        if isinstance(test, ir.AssignExpr):
            self.narrow(test.target, truth)
            return
        if isinstance(test, ir.CallExpr):
            self.narrow_validation(test, truth)
        if isinstance(test, ir.NameExpr | ir.AttrExpr):
            self.listener.on_narrow(
                self, ir.OpExpr(test.node, "!=", [test, ir.ConstExpr(test.node, None)]), truth
            )
            if truth and isinstance(test, ir.NameExpr):
                known = self.lookup(test.id)
                if (
                    known is not None
                    and known.numeric
                    and known.path.endswith("()")
                    and known.roots
                    and VALIDATING.search(known.path[:-2])
                ):
                    self.mark_clean(test, ALL)

    def narrow_either(self, tests: list[ir.Expr], truth: bool) -> None:
        """One of the tests has the result `truth`: keeps what all of them imply."""
        before = self.env
        ends: list[Env] = []
        for test in tests:
            self.env = dict(before)
            self.narrow(test, truth)
            ends.append(self.env)
        self.env = self.join_envs(ends)

    def narrow_comparison(self, test: ir.OpExpr, truth: bool) -> None:
        if len(test.args) != 2:
            return
        left, right = test.args
        op = test.op
        self.listener.on_narrow(self, test, truth)
        if isinstance(left, ir.OpExpr) and left.op == "typeof" and isinstance(right, ir.ConstExpr):
            if truth == (op in ("==", "===")) and right.value in _SCALARS:
                self.mark_clean(
                    left.args[0], frozenset({"nosql", "proto"} if right.value != "string" else {"nosql"})
                )
            return
        if op in ("in", "not in"):
            held = truth == (op == "in")
            if isinstance(left, ir.ConstExpr) and isinstance(left.value, str):
                if not held:  # `".." in path` was false
                    self.mark_clean(right, frozenset({"path", "header", "log"}) | uses_without(left.value))
            elif held:
                group = self.eval_silently(right)
                if group.level <= LOCAL:
                    self.mark_clean(left, ALL)
        elif op in ("==", "===", "is", "!=", "!==", "is not"):
            if truth == (op in ("==", "===", "is")):
                for side, other in ((left, right), (right, left)):
                    value = self.eval_silently(other)
                    if (
                        value.level == CONSTANT
                        and value.const is not None
                        and value.const != ""
                        and not isinstance(value.const, bool)
                    ):
                        whole = isinstance(side, ir.NameExpr | ir.AttrExpr)
                        self.mark_clean(
                            side,
                            ALL if whole and not value.numeric else frozenset({"path", "url", "redirect"}),
                        )
                    elif value.level <= LOCAL and isinstance(side, ir.CallExpr | ir.AttrExpr):
                        self.mark_clean(side, frozenset({"path", "url", "redirect"}))
            elif isinstance(right, ir.ConstExpr) and right.value in ("__proto__", "constructor", "prototype"):
                self.mark_clean(left, frozenset({"proto"}))
            elif isinstance(left, ir.CallExpr) and self.eval_silently(right).const == -1:
                self.mark_clean(left, frozenset({"path"}))  # indexOf("..") != -1 was false

        elif op in ("<", "<=", ">", ">=") and self.family in ("python", "javascript"):
            small, limit = (left, right) if (op in ("<", "<=")) == truth else (right, left)
            key = key_of(small)
            known = self.lookup(key) if key is not None else None
            if key is not None and known is not None and self.eval_silently(limit).level <= LOCAL:
                self.env[key] = replace(known, bounded=True)

    def narrow_validation(self, test: ir.CallExpr, truth: bool) -> None:
        func = test.func
        path = self.eval_silently(func).path if isinstance(func, ir.NameExpr) else ""
        if isinstance(func, ir.AttrExpr):
            base = self.eval_silently(func.base)
            path = f"{base.path or ('str' if isinstance(base.const, str) else '?')}.{func.name}"
        uses = self.knowledge.validators.uses(path)
        if self.knowledge.own_property_tests.match(path):
            uses = _ALWAYS
        if self.knowledge.membership_tests.match(path) and isinstance(func, ir.AttrExpr):
            group = self.eval_silently(func.base)
            if not truth and any(item.const == "__proto__" for _, item in group.items or ()):
                for arg in test.args:
                    self.mark_clean(arg, frozenset({"proto"}))
                return
        if not uses and VALIDATING.search(path):
            uses = ALL
        if not uses:
            return
        negative = self.knowledge.negative_tests.match(path) and any(
            isinstance(arg, ir.ConstExpr) for arg in test.args
        )
        if truth == negative:
            return
        if negative:  # `x.contains("..")` was false
            uses = frozenset({"path", "header", "log"})
        for arg in test.args:
            self.mark_clean(arg, uses)
        if isinstance(func, ir.AttrExpr):
            self.mark_clean(func.base, uses)

    def mark_clean(self, expr: ir.Expr, uses: frozenset[str]) -> None:
        """Marks everything that flowed into `expr` as safe for `uses`."""
        if isinstance(expr, ir.AssignExpr):
            expr = expr.target
        keys: set[str] = set()
        key = key_of(expr)
        if key is not None:
            keys.add(key)
        value = self.eval_silently(expr)
        keys |= value.roots
        for name in keys:
            known = self.lookup(name)
            if known is None and isinstance(expr, ir.AttrExpr | ir.IndexExpr) and name == key:
                known = value
            if known is not None and known.level:
                self.env[name] = known.as_safe_for(uses)
        if keys:
            for name, known in self.env.items():
                if (
                    known.level
                    and known.roots & keys
                    and name not in keys
                    and len(known.roots & keys) == len(known.roots - {name})
                ):
                    self.env[name] = known.as_safe_for(uses)
