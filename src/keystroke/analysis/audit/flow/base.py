"""The base of the data flow walk: its state, its step budget and the listener it notifies.

Subclasses add narrowing, calls, expressions and statements; they call each other through the methods declared
here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keystroke.analysis.audit.flow.folding import key_of
from keystroke.analysis.audit.flow.knowledge import Knowledge, family_of
from keystroke.analysis.audit.flow.memo import StatementMemo
from keystroke.analysis.audit.flow.values import HTML, NONE, Value, join
from keystroke.analysis.audit.source import ir

Env = dict[str, Value]
SELF = frozenset({"self", "cls", "this", "super"})
CAPS = re.compile(r"_?[A-Z][A-Z0-9_]+")
VALIDATING = re.compile(
    r"(?i)(?:^|\.)_?(?:is_?)?(?:valid|safe|allow|permit|sanit|whitelist|allowlist|check_?(?:path|url|host|name|input))\w*$"
)
ESCAPING = re.compile(
    r"(?i)(?:^|\.)_?[\w-]*(?:sanitiz|sanitis|escape|purify|slugify|secure_?(?:file)?name)[\w-]*$"
)

_MARKUP = re.compile(r"(?:[hH]tml|HTML|[sS]vg|SVG|[mM]arkup)(?:Text|Str|String|Content|Code)?$")

MAX_STEPS = 60_000  # longer units are generated code: the walk stops, findings are kept


class ExhaustedError(Exception):
    """The step budget of one unit is spent."""


@dataclass(slots=True)
class CallEvent:
    call: ir.CallExpr
    path: str
    receiver: Value | None
    args: list[Value]
    kwargs: dict[str, Value]
    function: ir.Function | None
    awaited: bool = False


class FlowListener:
    """Receives the events of a walk; every method may be left unimplemented."""

    # The inlined call, and the rules reported in the called function itself.
    call_site: tuple[ir.Syntax, frozenset[str]] | None = None
    match_count = 0  # grows with each match

    def on_call(self, event: CallEvent) -> Value | None:
        """A call; a returned value replaces the result of the walk."""
        return None

    def on_assign(self, path: str, key: str, value: Value, node: ir.Syntax, target: ir.Expr) -> None: ...
    def on_return(self, value: Value, node: ir.Syntax, function: ir.Function | None) -> None: ...
    def on_function(self, function: ir.Function, handler: bool) -> None: ...
    def on_class(self, stmt: ir.ClassStmt) -> None: ...
    def on_import(self, path: str, node: ir.Syntax) -> None: ...
    def on_index(self, base: Value, key: Value, node: ir.Syntax, expr: ir.IndexExpr) -> None: ...
    def on_use(self, name: str, value: Value, node: ir.Syntax) -> None: ...
    def on_block_lost(self, block: int) -> None:
        """The last pointer to a block was overwritten."""

    def on_remark(self, detector: str, node: ir.Syntax) -> None:
        """Something suspicious that the walk itself found."""

    def on_field_access(self, base: Value, expr: ir.AttrExpr) -> None:
        """A field accessed through a pointer."""

    def on_collection(self, value: Value, node: ir.Syntax, coll: ir.CollectionExpr) -> None: ...
    def on_arithmetic(self, op: str, args: list[Value], node: ir.Syntax) -> None: ...
    def on_comparison(self, test: ir.OpExpr, args: list[Value]) -> None: ...
    def on_declare(self, stmt: ir.DeclareStmt, value: Value) -> Value:
        return value

    def on_leave(self, env: Env, function: ir.Function) -> None: ...
    def on_narrow(self, flow: FlowBase, test: ir.OpExpr, truth: bool) -> None: ...


def _no_text(name: str) -> str:
    return ""


class FlowBase:
    """State and helpers of a walk."""

    # Subclasses implement these.
    eval: Callable[[ir.Expr], Value]
    declared_value: Callable[[str, Value], Value]
    run: Callable[[list[ir.Stmt]], bool]
    narrow: Callable[[ir.Expr, bool], None]
    mark_clean: Callable[[ir.Expr, frozenset[str]], None]
    element_of: Callable[[Value], Value]
    join_path: Callable[[list[Value]], Value]
    store_item: Callable[[str, Any, Value], None]
    eval_closure: Callable[[ir.ClosureExpr, Value | None, tuple[str, ...]], Value]
    inline_call: Callable[[ir.Function, list[Value]], Value | None]

    def __init__(
        self, language: str, knowledge: Knowledge, listener: FlowListener, env: Env | None = None
    ) -> None:
        self.language = language
        self.family = family_of(language)
        self.knowledge = knowledge
        self.listener = listener
        self.file_env: Env = env or {}  # values of the file's names; read-only
        self.env: Env = {}  # values of this walk
        self.dotted_keys: set[str] = set()  # keys such as `self.x` that an assignment to `self` invalidates
        self.functions: list[ir.Function] = []
        self.returns: list[list[Value]] = [[]]
        self.closure_result: Value | None = None  # what the function that was walked last returns
        self.breaks: list[list[Env]] = []
        self.gotos: dict[str, Env] = {}
        self.loop_assignments: dict[int, frozenset[str]] = {}  # names that a loop assigns
        self.find_function: Callable[[str], ir.Function | None] | None = None  # functions of the same file
        self.function_text: Callable[[str], str] = _no_text  # their texts
        self.lookups: dict[str, str] = {}  # the functions that the walk looked up, with their texts
        self.dispatch: dict[type, Callable[[Any], Value]] = {}  # evaluates each kind of expression
        self.memo: StatementMemo | None = None  # effects remembered by earlier walks
        self.error_spans: list[tuple[int, int]] = []  # spans that do not parse: nothing there is remembered
        self.scopes: list[tuple[str, bool]] = []  # enclosing functions, and whether each is a handler
        self.declared_types: dict[str, str] = {}  # Java: declared types of variables
        self.inline_depth = 0
        self.silent = 0
        self.steps = 0

    def uses_by_name(self, name: str) -> frozenset[str]:
        """What a value of the program is safe for by its name: who calls it markup means markup."""
        return HTML if self.family == "javascript" and _MARKUP.search(name) else NONE

    def lookup(self, key: str) -> Value | None:
        """The value of a variable, local or of the file."""
        value = self.env.get(key)
        return value if value is not None else self.file_env.get(key)

    def resolve_type(self, kind: str) -> str:
        base = kind.lstrip("*[]&")
        package, dot, name = base.partition(".")
        if dot:
            held = self.lookup(package)
            if held is not None:
                return f"{held.path}.{name}"
        return base

    def join_envs(self, envs: list[Env]) -> Env:
        out = dict(envs[0])
        for env in envs[1:]:
            for key, value in [item for item in env.items() if out.get(item[0]) is not item[1]]:
                known = out.get(key)
                out[key] = value if known is None else join(known, value)
        return out

    def eval_silently(self, expr: ir.Expr) -> Value:
        self.silent += 1
        try:
            return self.eval(expr)
        finally:
            self.silent -= 1

    def pointed_variable(self, expr: ir.Expr) -> str | None:
        """The variable whose memory an expression points into."""
        return key_of(expr)

    def aliases_of(self, block: int) -> list[str]:
        """The variables that point into a block of memory."""
        return []
