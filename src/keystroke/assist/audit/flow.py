"""Data flow inside one function: a walk over the neutral form with what is known of each variable.

Law: branches are walked apart and joined, loops twice at most, tests narrow what they check. The walk tells a
listener of each call, assignment, return, index and definition with the values involved; it knows libraries
only through `Knowledge` and knows no rule.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from keystroke.assist.audit import ir
from keystroke.assist.audit.knowledge import Knowledge
from keystroke.assist.audit.values import (
    ALL,
    CONSTANT,
    HOLE,
    LOCAL,
    NONE,
    PARAMETER,
    PLAIN,
    REMOTE,
    UNKNOWN,
    Value,
    constant,
    join,
    mix,
    text_of,
)

Env = dict[str, Value]
_SELF = frozenset({"self", "cls", "this", "super"})
_CAPS = re.compile(r"_?[A-Z][A-Z0-9_]+")
_PACKAGE = re.compile(r"(?:java|javax|jakarta|org|com|io|net)(?:\.[a-z][\w]*)*")
_DIRECTIVE = re.compile(r"%(?:\(\w+\))?[-+ #0]*\d*(?:\.\d+)?(?:hh|h|ll|l|z|j)?([a-zA-Z%])|\{[^{}]*\}")
_VALIDATING = re.compile(
    r"(?i)(?:^|\.)_?(?:is_?)?(?:valid|safe|allow|permit|sanit|whitelist|allowlist|check_?(?:path|url|host|name|input))\w*$"
)
_ESCAPING = re.compile(
    r"(?i)(?:^|\.)_?\w*(?:sanitiz|sanitis|escape|purify|slugify|secure_?(?:file)?name)\w*$"
)
MAX_INLINE = 2
MAX_STATES = 4
MAX_STEPS = 60_000  # a unit that needs more than this is machine-made; its walk ends there, findings kept


class ExhaustedError(Exception):
    """The step budget of one unit is spent."""


@dataclass(slots=True)
class CallEvent:
    call: ir.Call
    path: str
    receiver: Value | None
    args: list[Value]
    kwargs: dict[str, Value]
    function: ir.Function | None
    awaited: bool = False


class Listener:
    """Hears what the walk sees; every method may be left as it is."""

    def call(self, event: CallEvent) -> Value | None:
        """A call; a value returned here replaces the walk's own idea of the result."""
        return None

    def bind(self, path: str, key: str, value: Value, node: ir.Syntax, target: ir.Expr) -> None: ...
    def returned(self, value: Value, node: ir.Syntax, function: ir.Function | None) -> None: ...
    def define(self, function: ir.Function, handler: bool) -> None: ...
    def classdef(self, stmt: ir.ClassDef) -> None: ...
    def imported(self, path: str, node: ir.Syntax) -> None: ...
    def index(self, base: Value, key: Value, node: ir.Syntax, expr: ir.Index) -> None: ...
    def used(self, name: str, value: Value, node: ir.Syntax) -> None: ...
    def literal(self, value: Value, node: ir.Syntax, coll: ir.Coll) -> None: ...
    def arithmetic(self, op: str, args: list[Value], node: ir.Syntax) -> None: ...
    def tested(self, test: ir.Op, args: list[Value]) -> None: ...
    def let(self, stmt: ir.Let, value: Value) -> Value:
        return value

    def leave(self, env: Env, function: ir.Function) -> None: ...
    def narrowed(self, flow: Flow, test: ir.Op, truth: bool) -> None: ...


class Flow:
    def __init__(
        self, language: str, knowledge: Knowledge, listener: Listener, env: Env | None = None
    ) -> None:
        self.language = language
        self.family = {"cpp": "c", "typescript": "javascript", "tsx": "javascript"}.get(language, language)
        self.know = knowledge
        self.hear = listener
        self.outside: Env = env or {}  # facts of the file; read, never changed
        self.env: Env = {}  # what this walk knows
        self.dotted: set[str] = set()  # keys such as `self.x` that assigning `self` makes stale
        self.functions: list[ir.Function] = []
        self.returns: list[list[Value]] = [[]]
        self.breaks: list[list[Env]] = []
        self.gotos: dict[str, Env] = {}
        self.changes: dict[int, frozenset[str]] = {}  # names a loop assigns
        self.inline = 0
        self.quiet = 0
        self.steps = 0
        self.dispatch: dict[type, Callable[[Any], Value]] = {
            ir.Const: lambda e: constant(e.value),
            ir.Name: self.name,
            ir.Attr: self.attr,
            ir.Index: self.index,
            ir.Call: self.call,
            ir.Text: lambda e: text_of([self.eval(part) for part in e.parts]),
            ir.Op: self.op,
            ir.Coll: self.coll,
            ir.Cond: self.cond,
            ir.Closure: self.closure,
            ir.Bind: self.bind,
            ir.Cast: self.cast,
            ir.Other: lambda e: mix([self.eval(part) for part in e.parts]) if e.parts else Value(level=LOCAL),
        }

    def held(self, key: str) -> Value | None:
        """What is known of a variable, here or outside."""
        value = self.env.get(key)
        return value if value is not None else self.outside.get(key)

    # Statements: each answers whether control never gets past it

    def run(self, stmts: list[ir.Stmt]) -> bool:
        dead = False
        for stmt in stmts:
            if dead:
                if isinstance(stmt, ir.Label) and stmt.name in self.gotos:
                    self.env = dict(self.gotos[stmt.name])
                    dead = False
                elif isinstance(stmt, ir.Def | ir.ClassDef):
                    self.stmt(stmt)
                continue
            if isinstance(stmt, ir.Label) and stmt.name in self.gotos:
                self.env = self.joined([self.env, self.gotos[stmt.name]])
            dead = self.stmt(stmt)
        return dead

    def stmt(self, stmt: ir.Stmt) -> bool:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise ExhaustedError
        kind = type(stmt)
        if kind is ir.Do:
            return self.do(stmt)  # type: ignore[arg-type]
        if kind is ir.Let:
            self.let(stmt)  # type: ignore[arg-type]
            return False
        if isinstance(stmt, ir.If):
            return self.branch(stmt)
        if isinstance(stmt, ir.Return):
            value = self.eval(stmt.value) if stmt.value is not None else PLAIN
            self.returns[-1].append(value)
            if not self.quiet and stmt.value is not None:
                self.hear.returned(value, stmt.value.node, self.functions[-1] if self.functions else None)
            if self.functions and not self.quiet:
                self.hear.leave(self.env, self.functions[-1])
            return True
        if isinstance(stmt, ir.Loop):
            return self.loop(stmt)
        if isinstance(stmt, ir.Block):
            return self.run(stmt.body)
        if isinstance(stmt, ir.Try):
            return self.attempt(stmt)
        if isinstance(stmt, ir.Switch):
            return self.switch(stmt)
        if isinstance(stmt, ir.Jump):
            return self.jump(stmt)
        if isinstance(stmt, ir.Def):
            self.define(stmt.function)
        elif isinstance(stmt, ir.ClassDef):
            if not self.quiet:
                self.hear.classdef(stmt)
            for mark in stmt.decorators:
                self.eval(mark)
            self.run(stmt.body)
        elif isinstance(stmt, ir.Import):
            if stmt.name not in ("*", "#include"):
                root = stmt.name.split(".", 1)[0] if self.family == "python" else stmt.name
                path = stmt.path if root == stmt.name else root
                self.env[root] = Value(path=self.importable(path))
            if not self.quiet:
                self.hear.imported(stmt.path, stmt.node)
        return False

    def importable(self, path: str) -> str:
        return path.rsplit(".", 1)[-1] if self.family == "java" else path

    def do(self, stmt: ir.Do) -> bool:
        expr = stmt.expr
        value = self.eval(expr)
        if isinstance(expr, ir.Call):
            path = value.path.removesuffix("()")
            if path and self.know.exits.match(path):
                return True
            if path == "assert" and expr.args:
                self.narrow(expr.args[0], True)
            else:
                # A validator called for its exception makes what it saw safe.
                uses = self.know.validates(path) or (
                    ALL if _VALIDATING.search(path) and _raises(path) else NONE
                )
                if uses:
                    for arg in [*expr.args, *([expr.func.base] if isinstance(expr.func, ir.Attr) else [])]:
                        self.clean(arg, uses)
        return False

    def let(self, stmt: ir.Let) -> None:
        value = (
            self.eval(stmt.value) if stmt.value is not None else Value(path="", roots=frozenset({stmt.name}))
        )
        kind = stmt.type
        if self.family == "java" and kind and kind not in ("var", "String", "Object"):
            value = replace(
                value, path=value.path if value.path.endswith("()") and kind[:1].islower() else kind
            )
        elif self.family == "go" and kind:
            value = replace(value, path=value.path or self.typed(kind))
        elif self.family == "c" and kind and not value.path:
            value = replace(value, path=kind.replace("::", ".").split("<", 1)[0])
        if kind in self.know.numeric_types and not stmt.pointer and stmt.size is None:
            value = replace(value, numeric=True)
        written = value
        value = self.hear.let(stmt, value)
        self.store(stmt.name, value)
        if not self.quiet and stmt.value is not None:
            self.hear.bind(stmt.name, stmt.name, written, stmt.node, ir.Name(stmt.node, stmt.name))

    def typed(self, kind: str) -> str:
        base = kind.lstrip("*[]&")
        package, dot, name = base.partition(".")
        if dot:
            held = self.held(package)
            if held is not None:
                return f"{held.path}.{name}"
        return base

    def branch(self, stmt: ir.If) -> bool:
        test = self.eval(stmt.test)
        if test.known and test.level == CONSTANT:
            return self.run(stmt.then if test.const else stmt.other)
        before = self.env
        self.env = dict(before)
        self.narrow(stmt.test, True)
        left = self.run(stmt.then)
        after_then = self.env
        self.env = dict(before)
        self.narrow(stmt.test, False)
        right = self.run(stmt.other)
        if left and right:
            return True
        if left:
            return False
        self.env = after_then if right else self.joined([after_then, self.env])
        return False

    def loop(self, stmt: ir.Loop) -> bool:
        self.run(stmt.init)
        changed = self.changes.get(id(stmt))
        if changed is None:
            changed = self.changes[id(stmt)] = assigned(stmt.body) | assigned(stmt.step)
        first = self.eval(stmt.test) if stmt.test is not None else PLAIN
        if stmt.test is not None and first.known and not first.const:
            return False
        before = self.env
        self.breaks.append([])
        after = before
        for again in (False, True):
            self.env = self.joined([before, after]) if again else dict(before)
            self.widen(changed)
            if stmt.iterable is not None and stmt.target is not None:
                whole = self.eval(stmt.iterable)
                self.assign(stmt.target, self.element(whole), stmt.target.node)
            if stmt.test is not None:
                self.eval(stmt.test)
                self.narrow(stmt.test, True)
            self.run(stmt.body)
            self.run(stmt.step)
            if again or len(self.breaks) > 1 or not self.worse(before, self.env):
                break
            after = self.env
        ends = [*self.breaks.pop()]
        endless = (
            stmt.test is not None and first.known and bool(first.const) and not changed & names(stmt.test)
        )
        if not endless or not ends:
            self.env = self.joined([before, self.env])
            if stmt.test is not None:
                self.narrow(stmt.test, False)
            ends.append(self.env)
        self.env = self.joined(ends)
        return False

    def widen(self, changed: frozenset[str]) -> None:
        for key in changed:
            value = self.held(key)
            if value is not None and (value.known or value.high is not None):
                low = value.low if isinstance(value.low, int) else None
                text = value.text
                self.env[key] = replace(
                    value, const=UNKNOWN, high=None, low=low, skeleton=text, level=value.level
                )

    def worse(self, before: Env, after: Env) -> bool:
        """Whether a second walk of the loop can see something the first could not."""
        for key, value in before.items():
            now = after.get(key)
            if (
                now is not None
                and now is not value
                and (now.level > value.level or now.memory != value.memory or now.built != value.built)
            ):
                return True
        return False

    def switch(self, stmt: ir.Switch) -> bool:
        subject = self.eval(stmt.subject)
        before = self.env
        self.breaks.append([])
        ends: list[Env] = []
        chosen = None
        if subject.known and subject.level == CONSTANT and self.family != "go":
            for at, (labels, _) in enumerate(stmt.cases):
                if any(self.eval(label).const == subject.const for label in labels):
                    chosen = at
                    break
            else:
                chosen = next((at for at, (labels, _) in enumerate(stmt.cases) if not labels), None)
        covered = chosen is not None
        fall: Env | None = None
        for at, (labels, body) in enumerate(stmt.cases):
            if chosen is not None and at < chosen:
                continue
            if chosen is not None and at > chosen and fall is None:
                break
            self.env = (
                dict(before) if fall is None else self.joined([before, fall] if chosen is None else [fall])
            )
            covered = covered or not labels
            constants = [self.eval(label) for label in labels]
            if labels and all(label.known for label in constants) and chosen is None:
                self.clean(stmt.subject, ALL)
            fall = None if self.run(body) else self.env
        ends = self.breaks.pop()
        if fall is not None:
            ends.append(fall)
        if not covered:
            ends.append(before)
        if not ends:
            return True
        self.env = self.joined(ends)
        return False

    def attempt(self, stmt: ir.Try) -> bool:
        before = dict(self.env)
        # A handler may start after any statement of the body; the first few tell the states apart.
        states = [before]
        dead = False
        for at, part in enumerate(stmt.body):
            dead = self.run([part, *stmt.body[at + 1 :]]) if at == MAX_STATES else self.stmt(part)
            states.append(dict(self.env))
            if dead or at == MAX_STATES:
                break
        after = self.env
        ends = [] if dead else [after]
        for handler in stmt.handlers:
            self.env = self.joined(states)
            if not self.run(handler):
                ends.append(self.env)
        self.env = self.joined(ends) if ends else self.joined([before, after])
        final = self.run(stmt.final)
        return final or not ends

    def jump(self, stmt: ir.Jump) -> bool:
        if stmt.value is not None and stmt.kind != "goto":
            self.eval(stmt.value)
        if stmt.kind == "break" and self.breaks:
            self.breaks[-1].append(dict(self.env))
        elif stmt.kind == "goto" and isinstance(stmt.value, ir.Name):
            known = self.gotos.get(stmt.value.id)
            self.gotos[stmt.value.id] = self.joined([known, self.env]) if known else dict(self.env)
        return True

    def joined(self, envs: list[Env]) -> Env:
        if len(envs) == 1:
            return dict(envs[0])
        out = dict(envs[0])
        for env in envs[1:]:
            for key, value in env.items():
                known = out.get(key)
                if known is None:
                    out[key] = value
                elif known is not value:
                    out[key] = join(known, value)
        return out

    # Functions

    def define(self, function: ir.Function) -> None:
        if function.name:
            self.env[function.name] = Value(path=function.name, function=function)
        marks = [self.eval(mark) for mark in function.decorators]
        handler = any(self.know.handler_decorators.match(mark.path) for mark in marks) or any(
            self.know.handler_types.match(self.typed(param.type)) for param in function.params
        )
        if not self.quiet:
            self.hear.define(function, handler)
        self.enter(function, handler)

    def enter(
        self, function: ir.Function, handler: bool, level: int = PARAMETER, first: Value | None = None
    ) -> None:
        """Walk a body on its own: parameters are what any caller may pass."""
        outer, breaks, gotos = self.env, self.breaks, self.gotos
        self.env, self.breaks, self.gotos = dict(outer), [], {}
        main = function.name == "main" and self.family in ("c", "java")
        for at, param in enumerate(function.params):
            value = self.parameter(param, REMOTE if handler or main else level)
            if at == 0 and first is not None:
                value = replace(first, roots=first.roots | {param.name})
            self.env[param.name] = value
            if param.default is not None:
                self.eval(param.default)
        self.functions.append(function)
        self.returns.append([])
        try:
            if not self.run(function.body) and not self.quiet:
                self.hear.leave(self.env, function)
        finally:
            self.env, self.breaks, self.gotos = outer, breaks, gotos
            self.functions.pop()
            self.returns.pop()

    def parameter(self, param: ir.Param, level: int) -> Value:
        if param.name in _SELF:
            return Value(level=LOCAL, path=param.name)
        path = param.name
        if self.family in ("java", "go", "c") and param.type:
            path = (
                self.typed(param.type)
                if self.family == "go"
                else param.type.replace("::", ".").split("<", 1)[0].strip("*& ")
            )
        numeric = param.type.split("=", 1)[0].strip() in self.know.numeric_types
        if any(mark.split("(", 1)[0].lstrip("@") in self.know.handler_marks for mark in param.marks):
            level = REMOTE
        if self.know.sources.match(path):
            level = REMOTE
        if numeric and self.family != "c":
            return Value(level=LOCAL, numeric=True, path=path, roots=frozenset({param.name}), clean=ALL)
        return Value(
            level=level, path=path, numeric=numeric, origin=param.name, roots=frozenset({param.name})
        )

    def closure(self, expr: ir.Closure, first: Value | None = None) -> Value:
        handler = any(
            self.know.handler_types.match(self.typed(param.type))
            for param in expr.function.params
            if param.type
        )
        if not self.quiet:
            self.hear.define(expr.function, handler)
        self.enter(expr.function, handler, LOCAL if first is not None else PARAMETER, first)
        return Value(level=CONSTANT, function=expr.function)

    def inlined(self, function: ir.Function, args: list[Value]) -> Value | None:
        if self.inline >= MAX_INLINE or not function.body:
            return None
        outer, breaks, gotos = self.env, self.breaks, self.gotos
        self.env, self.breaks, self.gotos = dict(outer), [], {}
        params = [param for param in function.params if param.name not in _SELF]
        for at, param in enumerate(params):
            self.env[param.name] = args[at] if at < len(args) else self.parameter(param, LOCAL)
        self.inline += 1
        self.quiet += 1
        self.functions.append(function)
        self.returns.append([])
        try:
            self.run(function.body)
        finally:
            self.env, self.breaks, self.gotos = outer, breaks, gotos
            self.inline -= 1
            self.quiet -= 1
            self.functions.pop()
            results = self.returns.pop()
        if not results:
            return None
        whole = results[0]
        for result in results[1:]:
            whole = join(whole, result)
        return whole

    # Expressions

    def eval(self, expr: ir.Expr) -> Value:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise ExhaustedError
        return self.dispatch[type(expr)](expr)

    def name(self, expr: ir.Name) -> Value:
        known = self.held(expr.id)
        if known is None:
            known = self.unknown(expr.id)
        elif not self.quiet and known.memory is not None:
            self.hear.used(expr.id, known, expr.node)
        return known

    def unknown(self, path: str) -> Value:
        if self.know.sources.match(path):
            return Value(level=REMOTE, path=path, origin=path, roots=frozenset({path}))
        last = path.rsplit(".", 1)[-1]
        level = CONSTANT if _CAPS.fullmatch(last) or self.know.constants.match(path) else LOCAL
        return Value(level=level, path=path, roots=frozenset({path}))

    def attr(self, expr: ir.Attr) -> Value:
        key = key_of(expr)
        if key is not None:
            known = self.held(key)
            if known is not None:
                if not self.quiet and known.memory is not None:
                    self.hear.used(key, known, expr.node)
                return known
        return self.member(self.eval(expr.base), expr.name)

    def member(self, base: Value, name: str) -> Value:
        item = base.item(name)
        if item is not None:
            return item
        path = f"{base.path}.{name}" if base.path else f"?.{name}"
        if self.family == "java" and name[:1].isupper() and _PACKAGE.fullmatch(base.path):
            return Value(path=name)
        if self.know.sources.match(path):
            return Value(level=REMOTE, path=path, origin=path, roots=base.roots)
        if name == "length" and self.family in ("javascript", "java"):
            return Value(level=base.level, numeric=True, path=path, roots=base.roots)
        level = base.level
        if base.level == CONSTANT and not base.known and base.items is None:
            level = (
                CONSTANT
                if _CAPS.fullmatch(name) or self.know.constants.match(path) or not base.path
                else LOCAL
            )
        elif base.level == PARAMETER and self.family == "c":
            level = LOCAL
        return Value(level=level, path=path, origin=base.origin, roots=base.roots, clean=base.clean)

    def element(self, whole: Value) -> Value:
        """Any one item of a collection."""
        if whole.items:
            value = whole.items[0][1]
            for _, other in whole.items[1:]:
                value = join(value, other)
            return value
        if whole.known:
            return replace(whole, const=UNKNOWN)
        return replace(
            whole, path=f"{whole.path}[]" if whole.path else "", items=None, memory=None, skeleton=None
        )

    def index(self, expr: ir.Index) -> Value:
        base = self.eval(expr.base)
        key = self.eval(expr.key)
        if not self.quiet:
            self.hear.index(base, key, expr.node, expr)
        if base.items is not None:
            if key.known:
                item = base.item(key.const)
                if item is not None:
                    return item
            return self.element(base)
        if isinstance(key.const, str) and base.path:
            return self.member(base, key.const)
        element = self.element(base)
        if base.memory is not None and base.memory.length is not None:
            element = replace(element, numeric=True)
        return element

    def coll(self, expr: ir.Coll) -> Value:
        values = [self.eval(item) for item in expr.items]
        if expr.keys is None:
            items: tuple[tuple[Any, Value], ...] = tuple(enumerate(values))
        else:
            keys = [self.eval(key) for key in expr.keys]
            items = tuple(
                (key.const if key.known else f"?{at}", value)
                for at, (key, value) in enumerate(zip(keys, values, strict=True))
            )
        whole = mix(values)
        path = self.typed(expr.type) if expr.type else ""
        value = replace(whole, items=items[:200], path=path, roots=whole.roots)
        if not self.quiet:
            self.hear.literal(value, expr.node, expr)
        return value

    def cond(self, expr: ir.Cond) -> Value:
        test = self.eval(expr.test)
        if test.known and test.level == CONSTANT:
            return self.eval(expr.then if test.const else expr.other)
        before = self.env
        self.env = dict(before)
        self.narrow(expr.test, True)
        left = self.eval(expr.then)
        self.env = dict(before)
        self.narrow(expr.test, False)
        right = self.eval(expr.other)
        self.env = before
        return join(left, right)

    def cast(self, expr: ir.Cast) -> Value:
        value = self.eval(expr.value)
        kind = expr.type.strip("()* ")
        if kind in self.know.numeric_types and "*" not in expr.type:
            return replace(value, numeric=True)
        if self.family == "java" and kind and kind not in ("String", "Object"):
            return replace(value, path=kind)
        return value

    def op(self, expr: ir.Op) -> Value:
        op = expr.op
        if op in ("and", "&&", "or", "||", "??"):
            return self.logical(expr)
        args = [self.eval(arg) for arg in expr.args]
        if len(args) == 1:
            return self.unary(op, args[0])
        if op == "+" and not all(arg.numeric for arg in args):
            if any(arg.memory is not None for arg in args):
                return self.offset(args)
            texts = [arg for arg in args if arg.text is not None]
            if texts or not any(isinstance(arg.const, int) for arg in args):
                if self.family == "c" and not texts:
                    return mix(args)
                return text_of(args)
            return mix(args)
        if (
            op == "*"
            and any(isinstance(arg.const, str | bytes) for arg in args)
            and max(arg.level for arg in args) <= LOCAL
        ):
            return next(
                arg for arg in args if isinstance(arg.const, str | bytes)
            )  # repeated: as constant as it was
        if op == "+" or op in ("-", "*", "/", "%", "//", "<<", ">>", "&", "|", "^"):
            folded = fold(op, args[0].const, args[1].const, self.family)
            if folded is not UNKNOWN:
                return constant(folded)
            if not self.quiet:
                self.hear.arithmetic(op, args, expr.node)
            if op == "/" and self.family == "python" and not args[0].numeric:
                return self.path_joined(args)
            if op == "-" and args[0].memory is not None:
                return replace(args[0], memory=replace(args[0].memory, capacity=None, array=False))
            return self.ranged(op, args)
        if op in ("==", "===", "!=", "!==", "<", ">", "<=", ">=", "is", "is not"):
            if not self.quiet and op in ("==", "===", "!=", "!=="):
                self.hear.tested(expr, args)
            result = compare(op, args[0], args[1])
            return Value(numeric=True) if result is UNKNOWN else Value(result)
        return Value(numeric=True, level=mix(args).level if op not in ("in", "not in") else CONSTANT)

    def ranged(self, op: str, args: list[Value]) -> Value:
        worst = max(args, key=lambda arg: arg.level)
        low = high = None
        a, b = args
        if op == "+" and a.high is not None and b.high is not None:
            high = a.high + b.high
        if op == "+" and a.low is not None and b.low is not None:
            low = a.low + b.low
        if op == "-" and a.high is not None and b.low is not None:
            high = a.high - b.low
        if op == "%" and isinstance(b.const, int) and b.const > 0:
            high, low = b.const - 1, (0 if a.low is not None and a.low >= 0 else None)
        if op == "&" and isinstance(b.const, int) and b.const >= 0:
            low, high = 0, b.const
        bounded = (
            all(arg.bounded or arg.known or arg.high is not None or not arg.level for arg in args)
            or high is not None
            or (op == "%" and not b.level)
        )
        return Value(
            level=worst.level,
            numeric=True,
            origin=worst.origin,
            roots=a.roots | b.roots,
            low=low,
            high=high,
            bounded=bounded,
        )

    def offset(self, args: list[Value]) -> Value:
        pointer = next(arg for arg in args if arg.memory is not None)
        step = next((arg for arg in args if arg is not pointer), PLAIN)
        memory = pointer.memory
        if memory is None:
            return pointer
        capacity = None
        if memory.capacity is not None and isinstance(step.const, int):
            capacity = memory.capacity - step.const * memory.unit
        return replace(pointer, memory=replace(memory, capacity=capacity, length=None, array=False, fits=""))

    def path_joined(self, args: list[Value]) -> Value:
        pieces: list[Value] = []
        for at, arg in enumerate(args):
            if at and not (pieces[-1].text or "").endswith("/"):
                pieces.append(constant("/"))
            pieces.append(arg)
        return replace(text_of(pieces), path=args[0].path)

    def unary(self, op: str, arg: Value) -> Value:
        if op in ("!", "not"):
            return Value(not arg.const) if arg.known and arg.level == CONSTANT else Value(numeric=True)
        if op == "-" and isinstance(arg.const, int | float):
            return constant(-arg.const)
        if op == "&":
            return replace(arg, numeric=False)
        if op in ("-", "~", "+"):
            return replace(arg, numeric=True, const=UNKNOWN)
        if op == "typeof":
            return PLAIN
        return arg

    def logical(self, expr: ir.Op) -> Value:
        left = self.eval(expr.args[0])
        both = expr.op in ("and", "&&")
        if left.known and left.level == CONSTANT and expr.op != "??":
            if bool(left.const) != both:
                return left
            return self.eval(expr.args[1])
        before = self.env
        self.env = dict(before)
        self.narrow(expr.args[0], both)
        right = self.eval(expr.args[1])
        self.env = before
        if both and self.family != "javascript":
            return right if not left.numeric else replace(right, const=UNKNOWN)
        return join(left, right)

    # Assignment

    def bind(self, expr: ir.Bind) -> Value:
        value = self.eval(expr.value)
        if expr.op and expr.op != ":":
            old = self.eval(expr.target)
            if expr.op == "+":
                if not (old.numeric and value.numeric):
                    value = (
                        self.offset([old, value])
                        if old.memory is not None
                        else (mix([old, value]) if old.items is not None else text_of([old, value]))
                    )
                else:
                    folded = fold("+", old.const, value.const, self.family)
                    value = constant(folded) if folded is not UNKNOWN else self.ranged("+", [old, value])
            elif expr.op in ("||", "??", "&&", "|"):
                value = join(old, value)
            else:
                folded = fold(expr.op, old.const, value.const, self.family)
                value = constant(folded) if folded is not UNKNOWN else self.ranged(expr.op, [old, value])
        self.assign(expr.target, value, expr.node)
        return value

    def assign(self, target: ir.Expr, value: Value, node: ir.Syntax) -> None:
        if isinstance(target, ir.Coll):
            for at, item in enumerate(target.items):
                part = value.item(at) if target.keys is None else None
                if part is None and target.keys is not None:
                    label = target.keys[at]
                    name = label.value if isinstance(label, ir.Const) else "*"
                    part = self.member(value, str(name)) if name != "..." else value
                elif part is None:
                    part = value if at == 0 else replace(value, memory=None)
                self.assign(item, part, node)
            return
        if isinstance(target, ir.Bind):  # a default: {a = 1}
            self.assign(target.target, value, node)
            return
        key = key_of(target)
        path = key or ""
        if isinstance(target, ir.Attr):
            base = self.eval(target.base)
            path = f"{base.path}.{target.name}" if base.path else key or f"?.{target.name}"
        elif isinstance(target, ir.Index):
            base = self.eval(target.base)
            index = self.eval(target.key)
            if not self.quiet:
                self.hear.index(base, index, target.node, target)
            path = f"{base.path or key_of(target.base) or '?'}[]"
            holder = key_of(target.base)
            if holder is not None and self.held(holder) is not None:
                self.put(holder, index.const if index.known else UNKNOWN, value)
        if key is not None and not isinstance(target, ir.Index):
            self.store(key, value)
        if not self.quiet:
            self.hear.bind(path, key or path, value, node, target)

    def store(self, key: str, value: Value) -> None:
        if value.level and key not in value.roots:
            value = replace(value, roots=value.roots | {key})
        self.env[key] = value
        if "." in key:
            self.dotted.add(key)
        if self.dotted:
            prefix = key + "."
            for other in [name for name in self.dotted if name.startswith(prefix)]:
                self.env.pop(other, None)

    def put(self, holder: str, key: Any, value: Value) -> None:
        """`holder[key] = value`: precise where the key is constant."""
        whole = self.held(holder) or PLAIN
        if whole.memory is not None:
            length = None if not (value.const == 0 and isinstance(key, int)) else key
            if length is not None:
                self.env[holder] = replace(whole, memory=replace(whole.memory, length=length))
            elif value.level > whole.level:
                self.env[holder] = replace(whole, level=value.level, origin=value.origin)
            return
        items = dict(whole.items) if whole.items is not None else None
        if items is not None and key is not UNKNOWN and not isinstance(key, float):
            items[key] = value
            mixed = mix(list(items.values()))
            self.env[holder] = replace(
                whole,
                items=tuple(items.items()),
                level=mixed.level,
                clean=mixed.clean,
                origin=mixed.origin,
                roots=whole.roots | mixed.roots,
            )
            return
        mixed = mix([whole, value])
        self.env[holder] = replace(mixed, path=whole.path, const=UNKNOWN, roots=whole.roots | mixed.roots)

    # Calls

    def call(self, expr: ir.Call) -> Value:
        receiver: Value | None = None
        func = expr.func
        function = None
        if isinstance(func, ir.Attr):
            receiver = self.eval(func.base)
            if receiver.path:
                path = f"{receiver.path}.{func.name}"
            elif isinstance(receiver.const, str):
                path = f"str.{func.name}"
            else:
                path = f"?.{func.name}"
            method = receiver.item(func.name)
            if method is not None and method.path and method.function is None:
                path = method.path
            elif receiver.path in _SELF:
                held = self.held(func.name)
                function = held.function if held is not None else None
        else:
            callee = self.eval(func)
            path, function = callee.path or "?", callee.function
        args = []
        for arg in expr.args:
            if isinstance(arg, ir.Closure):
                args.append(
                    self.closure(
                        arg,
                        self.element(receiver)
                        if receiver is not None and receiver.level > CONSTANT and _maps(path)
                        else None,
                    )
                )
            else:
                args.append(self.eval(arg))
        kwargs = {name: self.eval(arg) for name, arg in expr.kwargs.items()}
        event = CallEvent(expr, path, receiver, args, kwargs, self.functions[-1] if self.functions else None)
        replaced = self.hear.call(event) if not self.quiet else None
        self.effects(expr, path, receiver, args)
        if replaced is not None:
            return replaced
        if function is not None and function is not (self.functions[-1] if self.functions else None):
            result = self.inlined(function, args)
            if result is not None:
                return replace(result, path=result.path or f"{path}()")
        return self.result(expr, path, receiver, args, kwargs)

    def result(
        self, expr: ir.Call, path: str, receiver: Value | None, args: list[Value], kwargs: dict[str, Value]
    ) -> Value:
        know = self.know
        out = f"{path}()"
        if know.sources.match(out):
            return Value(level=REMOTE, path=out, origin=out, numeric=know.numeric.match(out))
        inputs = ([receiver] if receiver is not None else []) + args + list(kwargs.values())
        if expr.new and not inputs:
            return Value(path=out)
        mixed = mix(inputs)
        if know.numeric.match(out):
            return Value(level=mixed.level, numeric=True, path=out, origin=mixed.origin, roots=mixed.roots)
        uses = know.cleans(out)
        if not uses and _ESCAPING.search(path):
            uses = ALL
        if uses:
            return Value(
                level=max(mixed.level, LOCAL),
                clean=mixed.clean | uses,
                path=out,
                origin=mixed.origin,
                roots=mixed.roots,
            )
        last = path.rsplit(".", 1)[-1]
        special = self.special(path, last, receiver, args)
        if special is not None:
            return special
        if know.joiners.match(out):
            joined = self.path_joined(args) if args else mixed
            return replace(joined, path=out)
        if know.transparent.match(out):
            told = [
                item
                for item in inputs
                if item.level or item.known or item.items is not None or item.text is not None
            ]
            single = told[0] if len(told) == 1 else None
            if single is not None:
                return replace(
                    single,
                    path=out,
                    memory=None,
                    items=None,
                    const=single.const if isinstance(single.const, str | bytes) else UNKNOWN,
                )
            text = receiver.skeleton if receiver is not None else (args[0].skeleton if args else None)
            return replace(mixed, path=out, skeleton=text)
        level = mixed.level if mixed.level > LOCAL or (receiver is not None and receiver.known) else LOCAL
        if (
            receiver is not None
            and receiver.level == CONSTANT
            and not receiver.path
            and level == LOCAL
            and not mixed.level
        ):
            level = CONSTANT
        return Value(level=level, path=out, clean=mixed.clean, origin=mixed.origin, roots=mixed.roots)

    def special(self, path: str, last: str, receiver: Value | None, args: list[Value]) -> Value | None:
        """Calls whose result we can say exactly: formatting, joining, and access to known contents."""
        at = self.know.formatters.get(path)
        if at is None and path.startswith(("str.", "?.")):
            at = self.know.formatters.get(f"*.{last}")
        if at is not None:
            template = receiver if at < 0 else (args[at] if at < len(args) else None)
            rest = args if at < 0 else args[at + 1 :]
            if template is not None and template.text is not None:
                return formatted(template, rest)
            if template is not None:
                return replace(mix([template, *rest]), skeleton=HOLE)
        if last == "join" and receiver is not None and isinstance(receiver.const, str) and args:
            items = [value for _, value in args[0].items] if args[0].items else [args[0]]
            parts: list[Value] = []
            for item in items:
                parts += [receiver, item] if parts else [item]
            return text_of(parts)
        if (
            receiver is not None
            and last in ("concat", "append", "WriteString")
            and receiver.text is not None
            and args
        ):
            return replace(text_of([receiver, *args]), path=receiver.path)
        if (
            receiver is not None
            and receiver.items is not None
            and args
            and last in ("get", "getProperty", "getOrDefault")
        ):
            if args[0].known:
                found = receiver.item(args[0].const)
                return found if found is not None else (args[1] if len(args) > 1 else constant(None))
            return self.element(receiver)
        if (
            receiver is not None
            and last == "charAt"
            and isinstance(receiver.const, str)
            and args
            and isinstance(args[0].const, int)
        ):
            place = args[0].const
            return constant(receiver.const[place]) if 0 <= place < len(receiver.const) else None
        if last == "promisify" and args:
            return args[0]
        return None

    def effects(self, expr: ir.Call, path: str, receiver: Value | None, args: list[Value]) -> None:
        """What a call does to the variables it is given."""
        last = path.rsplit(".", 1)[-1]
        fills = self.know.fills.get(path) or self.know.fills.get(f"*.{last}")
        if fills is not None:
            for at in range(fills[0], len(expr.args)) if fills[-1] < 0 else fills:
                if at < len(expr.args):
                    key = key_of(expr.args[at])
                    if key is not None:
                        known = self.held(key) or PLAIN
                        self.env[key] = replace(
                            known,
                            level=REMOTE,
                            const=UNKNOWN,
                            clean=NONE,
                            origin=f"{path}()",
                            roots=known.roots | {key},
                            low=None,
                            high=None,
                            bounded=False,
                            skeleton=None,
                        )
        copies = self.know.copies.get(path)
        if copies is not None and len(expr.args) > max(copies):
            target = key_of(expr.args[copies[0]])
            if target is not None:
                known = self.held(target) or PLAIN
                printed = "printf" in last and args[copies[1]].text is not None
                whole = formatted(args[copies[1]], args[copies[1] + 1 :]) if printed else args[copies[1]]
                if "cat" in last:
                    whole = text_of([known, whole])
                level = max(known.level if "cat" in last else CONSTANT, mix(args[copies[1] :]).level)
                self.env[target] = replace(
                    known,
                    level=level,
                    const=UNKNOWN,
                    origin=whole.origin,
                    roots=known.roots | whole.roots,
                    skeleton=whole.text,
                    clean=whole.clean,
                )
        if receiver is None or not isinstance(expr.func, ir.Attr):
            return
        holder = key_of(expr.func.base)
        if holder is None or self.held(holder) is None:
            return
        if (
            last
            in (
                "append",
                "push",
                "add",
                "addElement",
                "insert",
                "extend",
                "update",
                "write",
                "put",
                "set",
                "WriteString",
                "setProperty",
                "unshift",
                "push_back",
                "addAll",
                "setdefault",
            )
            and args
        ):
            known = self.held(holder) or PLAIN
            if last in ("put", "setProperty", "set") and len(args) > 1:
                if (
                    known.items is None
                    and known.path.endswith(("Map", "Map()", "Properties", "Properties()"))
                    and known.level <= LOCAL
                ):
                    self.env[holder] = replace(known, items=())
                self.put(holder, args[0].const, args[1])
            elif known.text is not None or known.path in (
                "StringBuilder",
                "StringBuffer",
                "StringBuilder()",
                "strings.Builder",
            ):
                start = known if known.text is not None else constant("")
                self.env[holder] = replace(text_of([start, *args]), path=known.path)
            elif (
                known.items is not None
                and last in ("append", "push", "add", "push_back")
                and all(isinstance(key, int) for key, _ in known.items)
            ):
                self.put(holder, len(known.items), args[0])
            elif (
                known.path.endswith(("List", "List()"))
                and known.items is None
                and known.level <= LOCAL
                and last == "add"
            ):
                self.env[holder] = replace(
                    known,
                    items=((0, args[0]),),
                    level=args[0].level,
                    clean=args[0].clean,
                    origin=args[0].origin,
                )
            else:
                self.put(holder, UNKNOWN, mix(args))
        elif last == "remove" and args and isinstance(args[0].const, int):
            known = self.held(holder) or PLAIN
            if known.items is not None:
                left = [value for key, value in known.items if key != args[0].const]
                self.env[holder] = replace(known, items=tuple(enumerate(left)))

    # Narrowing

    def narrow(self, test: ir.Expr, truth: bool) -> None:
        """What the environment knows more once `test` turned out `truth`."""
        if isinstance(test, ir.Op):
            if test.op in ("!", "not"):
                self.narrow(test.args[0], not truth)
            elif test.op in ("and", "&&"):
                if truth:
                    for arg in test.args:
                        self.narrow(arg, True)
                else:
                    self.either(test.args, False)
            elif test.op in ("or", "||"):
                if not truth:
                    for arg in test.args:
                        self.narrow(arg, False)
                else:
                    self.either(test.args, True)
            else:
                self.compared(test, truth)
            return
        if isinstance(test, ir.Bind):
            self.narrow(test.target, truth)
            return
        if isinstance(test, ir.Call):
            self.validated(test, truth)
        if isinstance(test, ir.Name | ir.Attr):
            self.hear.narrowed(self, ir.Op(test.node, "!=", [test, ir.Const(test.node, None)]), truth)
            if truth and isinstance(test, ir.Name):
                known = self.held(test.id)
                if (
                    known is not None
                    and known.numeric
                    and known.path.endswith("()")
                    and known.roots
                    and _VALIDATING.search(known.path[:-2])
                ):
                    self.clean(test, ALL)

    def either(self, tests: list[ir.Expr], truth: bool) -> None:
        """One of the tests came out `truth`: only what each of them implies is known."""
        before = self.env
        ends: list[Env] = []
        for test in tests:
            self.env = dict(before)
            self.narrow(test, truth)
            ends.append(self.env)
        self.env = self.joined(ends)

    def compared(self, test: ir.Op, truth: bool) -> None:
        if len(test.args) != 2:
            return
        left, right = test.args
        op = test.op
        self.hear.narrowed(self, test, truth)
        if op in ("in", "not in"):
            held = truth == (op == "in")
            if isinstance(left, ir.Const) and isinstance(left.value, str):
                if not held:  # `".." in path` was false
                    self.clean(right, frozenset({"path", "header", "log"}))
            elif held:
                group = self.eval_quiet(right)
                if group.level <= LOCAL:
                    self.clean(left, ALL)
        elif op in ("==", "===", "is", "!=", "!==", "is not"):
            if truth == (op in ("==", "===", "is")):
                for side, other in ((left, right), (right, left)):
                    value = self.eval_quiet(other)
                    if (
                        value.level == CONSTANT
                        and value.const is not None
                        and value.const != ""
                        and not isinstance(value.const, bool)
                    ):
                        whole = isinstance(side, ir.Name | ir.Attr)
                        self.clean(
                            side,
                            ALL if whole and not value.numeric else frozenset({"path", "url", "redirect"}),
                        )
                    elif value.level <= LOCAL and isinstance(side, ir.Call | ir.Attr):
                        self.clean(side, frozenset({"path", "url", "redirect"}))
            elif isinstance(right, ir.Const) and right.value in ("__proto__", "constructor", "prototype"):
                self.clean(left, frozenset({"proto"}))
            elif isinstance(left, ir.Call) and self.eval_quiet(right).const == -1:
                self.clean(left, frozenset({"path"}))  # indexOf("..") != -1 was false

    def validated(self, test: ir.Call, truth: bool) -> None:
        func = test.func
        path = self.eval_quiet(func).path if isinstance(func, ir.Name) else ""
        if isinstance(func, ir.Attr):
            base = self.eval_quiet(func.base)
            path = f"{base.path or ('str' if isinstance(base.const, str) else '?')}.{func.name}"
        uses = self.know.validates(path)
        if not uses and _VALIDATING.search(path):
            uses = ALL
        if not uses:
            return
        negative = path.endswith(
            (".contains", ".Contains", ".includes", ".indexOf", ".isAbs", ".find", ".some")
        ) and any(isinstance(arg, ir.Const) for arg in test.args)
        if truth == negative:
            return
        if negative:  # `x.contains("..")` was false: only what such a check is for
            uses = frozenset({"path", "header", "log"})
        for arg in test.args:
            self.clean(arg, uses)
        if isinstance(func, ir.Attr):
            self.clean(func.base, uses)

    def clean(self, expr: ir.Expr, uses: frozenset[str]) -> None:
        """Everything that flowed into `expr` is safe for `uses` from here on."""
        keys: set[str] = set()
        key = key_of(expr)
        if key is not None:
            keys.add(key)
        value = self.eval_quiet(expr)
        keys |= value.roots
        for name in keys:
            known = self.held(name)
            if known is None and isinstance(expr, ir.Attr | ir.Index) and name == key:
                known = value
            if known is not None and known.level:
                self.env[name] = known.cleaned(uses)
        if keys:
            for name, known in self.env.items():
                if (
                    known.level
                    and known.roots & keys
                    and name not in keys
                    and len(known.roots & keys) == len(known.roots - {name})
                ):
                    self.env[name] = known.cleaned(uses)

    def eval_quiet(self, expr: ir.Expr) -> Value:
        self.quiet += 1
        try:
            return self.eval(expr)
        finally:
            self.quiet -= 1


def _raises(path: str) -> bool:
    return not re.search(r"(?i)(?:^|\.)is_?[a-z]", path)


def _maps(path: str) -> bool:
    return path.endswith(
        (".map", ".forEach", ".filter", ".then", ".some", ".every", ".reduce", ".flatMap", ".find")
    )


def key_of(expr: ir.Expr) -> str | None:
    """The environment's name for a place: `x`, `self.x`, `x.y[0]`; None for anything computed."""
    if isinstance(expr, ir.Name):
        return expr.id
    if isinstance(expr, ir.Attr):
        base = key_of(expr.base)
        return f"{base}.{expr.name}" if base is not None else None
    if isinstance(expr, ir.Op) and expr.op == "&" and len(expr.args) == 1:
        return key_of(expr.args[0])
    if isinstance(expr, ir.Cast):
        return key_of(expr.value)
    return None


def formatted(template: Value, args: list[Value]) -> Value:
    text = template.text or ""
    parts: list[Value] = []
    at = used = 0
    for found in _DIRECTIVE.finditer(text):
        if found[1] == "%":
            continue
        parts.append(constant(text[at : found.start()]))
        at = found.end()
        if used < len(args):
            arg = args[used]
            parts.append(
                Value(numeric=True) if found[1] and found[1] in "diufxXeEgGcp" and not arg.level else arg
            )
            used += 1
        else:
            parts.append(mix(args) if args else Value(level=template.level))
    parts.append(constant(text[at:]))
    if used < len(args):
        parts.extend(
            replace(arg, skeleton=None, const="") if arg.level == CONSTANT else arg for arg in args[used:]
        )
    if template.level:
        parts.append(template)
    return text_of(parts)


def fold(op: str, a: Any, b: Any, family: str) -> Any:
    """Constant arithmetic on whole numbers, bounded so that no text can make it large."""
    if not isinstance(a, int) or not isinstance(b, int) or isinstance(a, bool) or isinstance(b, bool):
        return UNKNOWN
    if abs(a) > 1 << 64 or abs(b) > 1 << 64:
        return UNKNOWN
    if op == "+":
        return a + b
    if op == "-":
        return a - b
    if op == "*":
        return a * b
    if op in ("/", "//") and b and not (op == "/" and family in ("python", "javascript")):
        return a // b
    if op == "%" and b:
        return a % b
    if op == "<<" and 0 <= b < 64:
        return a << b
    if op == ">>" and 0 <= b < 64:
        return a >> b
    if op == "&":
        return a & b
    if op == "|":
        return a | b
    return UNKNOWN


def compare(op: str, a: Value, b: Value) -> Any:
    if not (a.known and b.known) or a.level or b.level:
        return UNKNOWN
    x, y = a.const, b.const
    if op in ("==", "===", "is"):
        return x == y
    if op in ("!=", "!==", "is not"):
        return x != y
    if isinstance(x, int | float) and isinstance(y, int | float):
        return {"<": x < y, ">": x > y, "<=": x <= y, ">=": x >= y}[op]
    return UNKNOWN


def assigned(stmts: list[ir.Stmt]) -> frozenset[str]:
    """Names given a new value somewhere in these statements."""
    out: set[str] = set()
    for stmt in stmts:
        _assigned(stmt, out, 0)
    return frozenset(out)


def _assigned(node: Any, out: set[str], depth: int) -> None:
    if depth > 60:
        return
    if isinstance(node, ir.Bind):
        key = key_of(node.target)
        if key is not None:
            out.add(key)
    elif isinstance(node, ir.Let):
        out.add(node.name)
    elif isinstance(node, ir.Function | ir.Const | ir.Name):
        return
    for name in node.__slots__ if hasattr(node, "__slots__") else ():
        if name == "node":
            continue
        child = getattr(node, name)
        if isinstance(child, ir.Expr | ir.Stmt):
            _assigned(child, out, depth + 1)
        elif isinstance(child, list):
            for item in child:
                if isinstance(item, tuple):
                    for part in item[1]:
                        _assigned(part, out, depth + 1)
                elif isinstance(item, ir.Expr | ir.Stmt):
                    _assigned(item, out, depth + 1)


def names(expr: ir.Expr) -> frozenset[str]:
    out: set[str] = set()
    stack: list[ir.Expr] = [expr]
    while stack:
        item = stack.pop()
        if isinstance(item, ir.Name):
            out.add(item.id)
        elif isinstance(item, ir.Op):
            stack.extend(item.args)
        elif isinstance(item, ir.Attr):
            stack.append(item.base)
        elif isinstance(item, ir.Call):
            stack.extend(item.args)
    return frozenset(out)
