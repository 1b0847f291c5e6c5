"""Data flow inside one function: a walk over the IR with an abstract value for each variable.

Branches are walked separately and joined, loops are walked at most twice, tests narrow the values they check.
The walk notifies a listener of calls, assignments, returns, indexing and definitions.
"""

from __future__ import annotations

import re
from functools import reduce

from keystroke.analysis.audit.flow.base import MAX_STEPS, SELF, VALIDATING, Env, ExhaustedError, FlowListener
from keystroke.analysis.audit.flow.expressions import ExpressionFlow
from keystroke.analysis.audit.flow.folding import AssignedNames, assigned_names, names, raises
from keystroke.analysis.audit.flow.knowledge import Knowledge
from keystroke.analysis.audit.flow.roles import (
    has_own_type,
    is_called_by_client,
    is_client_parameter,
    is_given_by_program,
    is_header,
    neighbour_roles,
    parameter_role,
)
from keystroke.analysis.audit.flow.values import (
    ALL,
    CONSTANT,
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
    replace,
    text_of,
)
from keystroke.analysis.audit.source import ir

MAX_INLINE = 2
# Characters of a function that is evaluated at its calls: every key in it costs all of them.
MAX_INLINED = 2_000
MAX_STATES = 4
_WIDE_TYPES = frozenset({"double", "float", "__uint128_t", "__int128_t", "__int128", "unsigned __int128"})
_ASSERT = re.compile(r"(?i)(?:^|_)assert$")
_CONTAINERS = ("program", "class_body")
_DEFINITIONS = frozenset(
    {"function_definition", "class_definition", "decorated_definition", "function_declaration"}
    | {"generator_function_declaration", "class_declaration", "method_declaration"}
)


def _is_short(node: ir.Syntax) -> bool:
    span = node.range()
    return bool(span.end.index - span.start.index <= MAX_INLINED)


class DataFlow(ExpressionFlow):
    def __init__(
        self, language: str, knowledge: Knowledge, listener: FlowListener, env: Env | None = None
    ) -> None:
        super().__init__(language, knowledge, listener, env)
        self.dispatch = {
            ir.ConstExpr: lambda e: constant(e.value),
            ir.NameExpr: self.eval_name,
            ir.AttrExpr: self.eval_attr,
            ir.IndexExpr: self.eval_index,
            ir.CallExpr: self.eval_call,
            ir.TextExpr: lambda e: text_of([self.eval(part) for part in e.parts]),
            ir.OpExpr: self.eval_op,
            ir.CollectionExpr: self.eval_collection,
            ir.ConditionalExpr: self.eval_conditional,
            ir.ClosureExpr: self.eval_closure,
            ir.AssignExpr: self.eval_assign,
            ir.CastExpr: self.eval_cast,
            ir.UnknownExpr: self.eval_unknown,
        }

    def eval_unknown(self, expr: ir.UnknownExpr) -> Value:
        if not expr.parts:
            return Value(level=LOCAL)
        values = [self.eval(part) for part in expr.parts]
        return mix(values[-1:] if expr.last else values)

    # Statements: each method returns whether control never continues behind it

    def run(self, stmts: list[ir.Stmt]) -> bool:
        dead = False
        for stmt in stmts:
            if dead:
                if isinstance(stmt, ir.LabelStmt) and stmt.name in self.gotos:
                    self.env = dict(self.gotos[stmt.name])
                    dead = False
                elif isinstance(stmt, ir.FunctionStmt | ir.ClassStmt) or (
                    isinstance(stmt, ir.LazyStmt) and stmt.node.kind() in _DEFINITIONS
                ):
                    self.run_stmt(stmt)
                continue
            if isinstance(stmt, ir.LabelStmt) and stmt.name in self.gotos:
                self.env = self.join_envs([self.env, self.gotos[stmt.name]])
            dead = self.run_stmt(stmt)
        return dead

    def run_stmt(self, stmt: ir.Stmt) -> bool:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise ExhaustedError
        kind = type(stmt)
        if kind is ir.LazyStmt:
            return self.run_lazy(stmt)  # type: ignore[arg-type]
        if kind is ir.ExprStmt:
            return self.run_expr(stmt)  # type: ignore[arg-type]
        if kind is ir.DeclareStmt:
            self.run_declare(stmt)  # type: ignore[arg-type]
            return False
        if isinstance(stmt, ir.IfStmt):
            return self.run_if(stmt)
        if isinstance(stmt, ir.ReturnStmt):
            value = self.eval(stmt.value) if stmt.value is not None else PLAIN
            if self.inline_depth and isinstance(stmt.value, ir.NameExpr):
                value = self.with_fields(stmt.value.id, value)
            self.returns[-1].append(value)
            if not self.silent and stmt.value is not None:
                self.listener.on_return(
                    value, stmt.value.node, self.functions[-1] if self.functions else None
                )
            if self.functions and not self.silent:
                self.listener.on_leave(self.env, self.functions[-1])
            return True
        if isinstance(stmt, ir.LoopStmt):
            return self.run_loop(stmt)
        if isinstance(stmt, ir.BlockStmt):
            return self.run(stmt.body)
        if isinstance(stmt, ir.TryStmt):
            return self.run_try(stmt)
        if isinstance(stmt, ir.SwitchStmt):
            return self.run_switch(stmt)
        if isinstance(stmt, ir.JumpStmt):
            return self.run_jump(stmt)
        if isinstance(stmt, ir.FunctionStmt):
            self.run_function(stmt.function)
        elif isinstance(stmt, ir.ClassStmt):
            if not self.silent:
                self.listener.on_class(stmt)
            for mark in stmt.decorators:
                self.eval(mark)
            if self.family == "python":
                self.run_class_body(stmt)
            else:
                if self.family == "javascript" and stmt.name:
                    self.env[stmt.name] = Value(path=f"@{stmt.name}")  # no library's class of that name
                self.run(stmt.body)
        elif isinstance(stmt, ir.ImportStmt):
            if stmt.name not in ("*", "#include"):
                root = stmt.name.split(".", 1)[0] if self.family == "python" else stmt.name
                path = stmt.path if root == stmt.name else root
                self.env[root] = Value(path=self.import_path(path))
            if not self.silent:
                self.listener.on_import(stmt.path, stmt.node)
        return False

    def run_class_body(self, stmt: ir.ClassStmt) -> None:
        """A class body of Python: its methods run when it is complete and see its string constants; its names
        are not visible outside."""
        outer = self.env
        self.env = dict(outer)
        methods = [each for each in stmt.body if each.node.kind() in _DEFINITIONS]
        self.run([each for each in stmt.body if each.node.kind() not in _DEFINITIONS])
        constants: Env = {}
        for name, value in self.env.items():
            if isinstance(value.const, str) and "." not in name and outer.get(name) is not value:
                constants |= {f"{owner}.{name}": value for owner in ("self", "cls", stmt.name)}
        self.env |= constants
        self.run(methods)
        self.env = outer
        outer |= constants

    def with_fields(self, name: str, value: Value) -> Value:
        """The value of an object together with the values assigned to its fields."""
        prefix = f"{name}."
        fields = [key for key in self.dotted_keys if key.startswith(prefix) and key in self.env]
        if not fields:
            return value
        items = dict(value.items or ()) | {key[len(prefix) :]: self.env[key] for key in sorted(fields)}
        mixed = mix([value, *items.values()])
        return replace(mixed, path=value.path, items=tuple(items.items()))

    def run_lazy(self, stmt: ir.LazyStmt) -> bool:
        """Reuses the remembered effect of a statement in an equivalent environment."""
        memo = self.memo
        if memo is None or self.silent or self._whole(stmt.node) or self._broken(stmt.node):
            self.env = dict(self.env)  # the old one may be remembered as the effect of the previous statement
            return self.run(stmt.statements())
        name, handler = self.scopes[-1] if self.scopes else ("", False)
        key = (name, handler, stmt.node.kind(), stmt.node.text())
        known = memo.find(key, self.env, self.function_text)
        if known is not None:
            effect, self.env = known
            self.lookups.update(effect.lookups)
            self.steps += effect.steps
            if self.steps > MAX_STEPS:
                raise ExhaustedError
            self.dotted_keys |= effect.dotted
            self.returns[-1].extend(effect.returns)
            return effect.dead
        before, matches, steps = self.env, self.listener.match_count, self.steps
        ends = len(self.breaks[-1]) if self.breaks else 0
        returned = len(self.returns[-1])
        self.env = dict(before)
        outer, self.lookups = self.lookups, {}
        try:
            dead = self.run(stmt.statements())
        finally:
            inner, self.lookups = self.lookups, outer
            outer.update(inner)
        if matches == self.listener.match_count and ends == (len(self.breaks[-1]) if self.breaks else 0):
            made, returns = self.steps - steps, tuple(self.returns[-1][returned:])
            memo.remember(key, before, self.env, dead, made, self.dotted_keys, inner, returns)
        return dead

    def _whole(self, node: ir.Syntax) -> bool:
        """Whether a statement is the whole unit; the auditor keeps the result of units.

        Statements of a function whose end is not written yet stand in an error and are remembered one by one.
        """
        if self.scopes or not self.file_env:
            return False
        if self.family == "python":
            return node.kind() in _DEFINITIONS
        parent = node.parent()
        return parent is None or parent.kind() in _CONTAINERS

    def _broken(self, node: ir.Syntax) -> bool:
        if not self.error_spans:
            return False
        span = node.range()
        start, end = span.start.index, span.end.index
        return any(start <= first and last <= end for first, last in self.error_spans)

    def import_path(self, path: str) -> str:
        return path.rsplit(".", 1)[-1] if self.family == "java" else path

    def run_expr(self, stmt: ir.ExprStmt) -> bool:
        expr = stmt.expr
        value = self.eval(expr)
        if isinstance(expr, ir.CallExpr):
            path = value.path.removesuffix("()")
            if path and (self.knowledge.exits.match(path) or self._never_returns(path)):
                return True
            if expr.args and (path == "assert" or (self.family == "c" and _ASSERT.search(path))):
                self.narrow(expr.args[0], True)
            else:
                # A validator that raises makes its arguments safe.
                uses = self.knowledge.validators.uses(path) or (
                    ALL if VALIDATING.search(path) and raises(path) else NONE
                )
                if uses:
                    for arg in [
                        *expr.args,
                        *([expr.func.base] if isinstance(expr.func, ir.AttrExpr) else []),
                    ]:
                        self.mark_clean(arg, uses)
        return False

    def _never_returns(self, name: str, depth: int = 0) -> bool:
        """Whether a C function of the file ends the program in every call, itself or by such a function."""
        if self.family != "c" or self.find_function is None or depth > 2:
            return False
        self.lookups[name] = self.function_text(name)
        function = self.find_function(name)
        for stmt in function.body if function is not None else ():
            for part in stmt.statements() if isinstance(stmt, ir.LazyStmt) else (stmt,):
                if isinstance(part, ir.ExprStmt) and isinstance(part.expr, ir.CallExpr):
                    called = part.expr.func.node.text()
                    if self.knowledge.exits.match(called) or self._never_returns(called, depth + 1):
                        return True
                elif "return" in part.node.text():
                    return False
        return False

    def run_declare(self, stmt: ir.DeclareStmt) -> None:
        value = (
            self.eval(stmt.value) if stmt.value is not None else Value(path="", roots=frozenset({stmt.name}))
        )
        kind = stmt.type
        if self.family == "java" and kind:
            self.declared_types[stmt.name] = kind
            value = self.declared_value(kind, value)
        elif self.family == "go" and kind:
            value = replace(value, path=value.path or self.resolve_type(kind))
        elif self.family == "c" and kind and (not value.path or kind in _WIDE_TYPES):
            value = replace(value, path=kind.replace("::", ".").split("<", 1)[0])
        if kind in self.knowledge.numeric_types and not stmt.pointer and stmt.size is None:
            value = replace(value, numeric=True)
        written = value
        value = self.listener.on_declare(stmt, value)
        self.store(stmt.name, value)
        if not self.silent and stmt.value is not None:
            self.listener.on_assign(
                stmt.name, stmt.name, written, stmt.node, ir.NameExpr(stmt.node, stmt.name)
            )

    def declared_value(self, kind: str, value: Value) -> Value:
        """Java: a value with its declared type, or the narrower type it was created with."""
        if kind in ("var", "String", "Object") or (value.path.endswith("()") and kind[:1].islower()):
            return value
        made = value.path.removesuffix("()")
        return replace(value, path=made if made.endswith(kind) and "." not in made else kind)

    def run_if(self, stmt: ir.IfStmt) -> bool:
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
        self.env = after_then if right else self.join_envs([after_then, self.env])
        return False

    def run_loop(self, stmt: ir.LoopStmt) -> bool:
        self.run(stmt.init)
        changed = self.loop_assignments.get(id(stmt))
        if changed is None:
            changed = self.loop_assignments[id(stmt)] = assigned_names(
                stmt.body, self.loop_memo()
            ) | assigned_names(stmt.step)
        first = self.eval(stmt.test) if stmt.test is not None else PLAIN
        if stmt.test is not None and first.known and not first.const:
            return False
        before = self.env
        self.breaks.append([])
        after = before
        for again in (False, True):
            self.env = self.join_envs([before, after]) if again else dict(before)
            self.widen(changed)
            if stmt.iterable is not None and stmt.target is not None:
                whole = self.eval(stmt.iterable)
                self.assign(stmt.target, self.element_of(whole), stmt.target.node)
            if stmt.test is not None:
                self.eval(stmt.test)
                self.narrow(stmt.test, True)
            self.run(stmt.body)
            self.run(stmt.step)
            if again or len(self.breaks) > 1 or not self.is_worse(before, self.env):
                break
            after = self.env
        ends = [*self.breaks.pop()]
        endless = (
            stmt.test is not None and first.known and bool(first.const) and not changed & names(stmt.test)
        )
        if not endless or not ends:
            self.env = self.join_envs([before, self.env])
            if stmt.test is not None:
                self.narrow(stmt.test, False)
            ends.append(self.env)
        self.env = self.join_envs(ends)
        return False

    def loop_memo(self) -> AssignedNames | None:
        return AssignedNames(self.memo.changes, self._broken) if self.memo is not None else None

    def widen(self, changed: frozenset[str]) -> None:
        for key in changed:
            value = self.lookup(key)
            if value is not None and (value.known or value.high is not None):
                low = value.low if isinstance(value.low, int) else None
                text = value.text
                self.env[key] = replace(
                    value, const=UNKNOWN, high=None, low=low, skeleton=text, level=value.level
                )

    def is_worse(self, before: Env, after: Env) -> bool:
        """Whether a second walk of the loop can find more than the first."""
        for key, value in before.items():
            now = after.get(key)
            if (
                now is not None
                and now is not value
                and (now.level > value.level or now.memory != value.memory or now.built != value.built)
            ):
                return True
        return False

    def run_switch(self, stmt: ir.SwitchStmt) -> bool:
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
                dict(before) if fall is None else self.join_envs([before, fall] if chosen is None else [fall])
            )
            covered = covered or not labels
            constants = [self.eval(label) for label in labels]
            if labels and all(label.known for label in constants) and chosen is None:
                self.mark_clean(stmt.subject, ALL)
            fall = None if self.run(body) else self.env
        ends = self.breaks.pop()
        if fall is not None:
            ends.append(fall)
        if not covered:
            ends.append(before)
        if not ends:
            return True
        self.env = self.join_envs(ends)
        return False

    def run_try(self, stmt: ir.TryStmt) -> bool:
        before = dict(self.env)
        # A handler may run after any statement of the body; the states after the first few are kept.
        states = [before]
        dead = False
        for at, part in enumerate(stmt.body):
            dead = self.run([part, *stmt.body[at + 1 :]]) if at == MAX_STATES else self.run_stmt(part)
            states.append(dict(self.env))
            if dead or at == MAX_STATES:
                break
        after = self.env
        ends = [] if dead else [after]
        for handler in stmt.handlers:
            self.env = self.join_envs(states)
            if not self.run(handler):
                ends.append(self.env)
        self.env = self.join_envs(ends) if ends else self.join_envs([before, after])
        final = self.run(stmt.final)
        return final or not ends

    def run_jump(self, stmt: ir.JumpStmt) -> bool:
        if stmt.value is not None and stmt.kind != "goto":
            self.eval(stmt.value)
        if stmt.kind == "break" and self.breaks:
            self.breaks[-1].append(dict(self.env))
        elif stmt.kind == "goto" and isinstance(stmt.value, ir.NameExpr):
            known = self.gotos.get(stmt.value.id)
            self.gotos[stmt.value.id] = self.join_envs([known, self.env]) if known else dict(self.env)
        return True

    # Functions

    def run_function(self, function: ir.Function) -> None:
        if function.name:
            self.env[function.name] = Value(path=function.name, function=function)
        marks = [self.eval(mark) for mark in function.decorators]
        handler = any(self.knowledge.handler_decorators.match(mark.path) for mark in marks) or any(
            self.knowledge.handler_types.match(self.resolve_type(param.type)) for param in function.params
        )
        if not self.silent:
            self.listener.on_function(function, handler)
        self.enter_function(function, handler)

    def enter_function(
        self,
        function: ir.Function,
        handler: bool,
        level: int = PARAMETER,
        first: Value | None = None,
        roles: tuple[str, ...] = (),
    ) -> Env:
        """Walks a function body with parameters of unknown callers; returns the environment at its end."""
        outer, breaks, gotos = self.env, self.breaks, self.gotos
        self.env, self.breaks, self.gotos = dict(outer), [], {}
        main = function.name == "main" and self.family in ("c", "java")
        if self.family == "python":
            main = is_called_by_client(function)
        elif self.family == "javascript" and not roles:
            roles = neighbour_roles(function.params)
        for at, param in enumerate(function.params):
            role = roles[at] if at < len(roles) else ""
            python = self.family == "python"
            foreign = handler and not (python and is_given_by_program(param))
            foreign = foreign or (main and (not python or is_client_parameter(param)))
            value = self.parameter_value(param, REMOTE if foreign else level, role)
            if python and handler and is_header(param):
                value = value.as_safe_for(frozenset({"log", "header"}))
            if at == 0 and first is not None and not role:
                value = replace(first, roots=first.roots | {param.name})
            self.env[param.name] = value
            if param.default is not None:
                self.eval(param.default)
        self.functions.append(function)
        self.scopes.append((function.name, handler))
        self.returns.append([])
        try:
            if not self.run(function.body) and not self.silent:
                self.listener.on_leave(self.env, function)
            return self.env
        finally:
            self.env, self.breaks, self.gotos = outer, breaks, gotos
            self.functions.pop()
            self.scopes.pop()
            results = self.returns.pop()
            self.closure_result = reduce(join, results) if results else None

    def parameter_value(self, param: ir.Param, level: int, role: str = "") -> Value:
        if param.name in SELF or (level == REMOTE and self.family == "python" and param.name == "request"):
            return Value(level=LOCAL, path=param.name)
        path = param.name
        if self.family == "javascript":
            path = role or ("" if has_own_type(param) else parameter_role(param) or path)
        if self.family in ("java", "go", "c") and param.type:
            path = (
                self.resolve_type(param.type)
                if self.family == "go"
                else param.type.replace("::", ".").split("<", 1)[0].strip("*& ")
            )
        numeric = param.type.split("=", 1)[0].strip() in self.knowledge.numeric_types
        if any(
            mark.split("(", 1)[0].lstrip("@") in self.knowledge.handler_marks for mark in param.annotations
        ):
            level = REMOTE
        if self.knowledge.sources.match(path):
            level = REMOTE
        if numeric and self.family != "c":
            return Value(level=LOCAL, numeric=True, path=path, roots=frozenset({param.name}), clean=ALL)
        clean = self.uses_by_name(param.name) if level < REMOTE else NONE
        roots = frozenset({param.name})
        return Value(level=level, path=path, numeric=numeric, origin=param.name, roots=roots, clean=clean)

    def eval_closure(
        self, expr: ir.ClosureExpr, first: Value | None = None, roles: tuple[str, ...] = ()
    ) -> Value:
        handler = any(
            self.knowledge.handler_types.match(self.resolve_type(param.type))
            for param in expr.function.params
            if param.type
        )
        if not self.silent:
            self.listener.on_function(expr.function, handler)
        after = self.enter_function(
            expr.function, handler, LOCAL if first is not None else PARAMETER, first, roles
        )
        if self.family == "javascript":  # later callbacks see what a callback assigns outside itself
            for key, value in after.items():
                known = self.env.get(key)
                if known is not None and known is not value and value.level > known.level:
                    self.env[key] = join(known, value)
        return Value(level=CONSTANT, function=expr.function)

    def inline_call(self, function: ir.Function, args: list[Value]) -> Value | None:
        if self.inline_depth >= MAX_INLINE or not function.body or not _is_short(function.node):
            return None
        outer, breaks, gotos = self.env, self.breaks, self.gotos
        self.env, self.breaks, self.gotos = dict(outer), [], {}
        params = [param for param in function.params if param.name not in SELF]
        for at, param in enumerate(params):
            self.env[param.name] = args[at] if at < len(args) else self.parameter_value(param, LOCAL)
        self.inline_depth += 1
        self.silent += 1
        self.functions.append(function)
        self.returns.append([])
        try:
            self.run(function.body)
        finally:
            self.env, self.breaks, self.gotos = outer, breaks, gotos
            self.inline_depth -= 1
            self.silent -= 1
            self.functions.pop()
            results = self.returns.pop()
        return reduce(join, results) if results else None
