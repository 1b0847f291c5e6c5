"""C: allocation and release of memory and files, use after release, uninitialised use and leaks.

Each allocation has a number N. The environment holds its state under "#N" (released), "#lN" (tracked for
leaks) and "#eN" (escaped), so that branches join it like variables. A leak is reported only if nothing else
can hold the pointer.
"""

from __future__ import annotations

import re
from dataclasses import replace

from keystroke.analysis.audit.flow.base import CallEvent, Env
from keystroke.analysis.audit.flow.folding import key_of
from keystroke.analysis.audit.flow.values import LOCAL, NONE, PARAMETER, REMOTE, Memory, Value
from keystroke.analysis.audit.memory.copies import CopyMatcher, is_call_of
from keystroke.analysis.audit.memory.library import LIBRARY
from keystroke.analysis.audit.memory.sizes import size_of
from keystroke.analysis.audit.source import ir

_BORROWS = frozenset(
    (*LIBRARY.counted, *LIBRARY.string_copies, *LIBRARY.scans, *LIBRARY.releases, *LIBRARY.readers)
)
_SHOWS = re.compile(r"(?i)^(?:print|log|debug|trace|dump|show|puts|warn)")
_PATH_CALLS = LIBRARY.path_checks | LIBRARY.path_uses
_ONE_BYTE = re.compile(r"\bsizeof\s*\(\s*(?:(?:un)?signed\s+)?(?:char|u?int8_t|bool|byte|u?int8)\s*\)")
_EXCHANGES = re.compile(r"(?:std::)?(?:swap|exchange|move)\s*\(")
_LOOP = re.compile(r"^(?:for|while|do)_")
_SCALAR = re.compile(
    r"(?:const\s+|volatile\s+)*(?:(?:un)?signed(?:\s+\w+)*|char|short|int|long(?:\s+\w+)*|float|double|wchar_t"
    r"|size_t|ssize_t|u?int\d+_t|bool|off_t|time_t)"
)


class LifetimeMatcher(CopyMatcher):
    blocks = 0  # number of allocations so far

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.sites: dict[int, ir.Syntax] = {}
        self.declared: set[str] = set()  # local variables
        self.checked: dict[str, ir.Syntax] = {}  # paths whose file was checked

    def new_block(self) -> int:
        self.blocks += 1
        return self.blocks

    # Allocation

    def allocate(self, event: CallEvent, name: str) -> Value:
        capacity: int | None = None
        fits = ""
        at = LIBRARY.allocators.get(name)
        if at is not None and at < len(event.args):
            size, expr = event.args[at], event.call.args[at]
            if isinstance(size.const, int):
                capacity = size.const
            if name == "calloc" and isinstance(event.args[0].const, int) and capacity is not None:
                capacity *= event.args[0].const
            elif name == "calloc":
                capacity = None
            if name == "new[]":
                unit = size_of(str(event.args[1].const)) if len(event.args) > 1 else 1
                capacity = capacity * unit if capacity is not None and unit else None
            fits = self.check_size(event, name, expr, size)
        elif name in LIBRARY.duplicators and event.args:
            memory = event.args[0].memory
            capacity = memory.length + 1 if memory is not None and memory.length is not None else None
        kind = name if name in ("new", "new[]") else "stack" if "alloca" in name.lower() else "malloc"
        number = self.new_block()
        fresh = kind == "stack" or name in ("malloc", "valloc", "kmalloc", "std.malloc", "aligned_alloc")
        nullable = kind == "malloc" and name != "xmalloc"
        memory = Memory(capacity, 1, None, number, nullable, fits, False, kind, 0, fresh)
        level = max((arg.level for arg in event.args), default=0) if name in LIBRARY.duplicators else 0
        origin = event.args[0].origin if name in LIBRARY.duplicators and event.args else ""
        if name == "realloc" and event.args:
            self.check_realloc(event)
        self.check_sizeof_pointer(event)
        if kind == "malloc" or (kind in ("new", "new[]") and self.is_scalar(event)):
            self.track_block(number, event)
        return Value(level=level, path=f"{event.path}()", memory=memory, roots=NONE, origin=origin)

    def check_sizeof_pointer(self, event: CallEvent) -> None:
        """Reports `p = malloc(sizeof(p))`, which allocates the size of a pointer."""
        node = ir.outside_casts(event.call.node)
        if node is None or node.kind() not in ("assignment_expression", "init_declarator"):
            return
        target = (node.field("left") or node.field("declarator")).text().lstrip("* ")
        for arg in event.call.args:
            for part in arg.args if isinstance(arg, ir.OpExpr) else [arg]:
                if (
                    isinstance(part, ir.CallExpr)
                    and is_call_of(part, "sizeof")
                    and "type" not in part.kwargs
                    and part.args
                    and part.args[0].node.text().strip("() ") == target
                ):
                    self.report("sizeof-pointer", node)

    def is_scalar(self, event: CallEvent) -> bool:
        kind = event.kwargs.get("type") or (event.args[1] if len(event.args) > 1 else None)
        return kind is not None and _SCALAR.fullmatch(str(kind.const)) is not None

    def open_file(self, event: CallEvent) -> Value:
        number = self.new_block()
        self.track_block(number, event)
        memory = Memory(block=number, nullable=True, kind="file")
        return Value(path=f"{event.path}()", memory=memory, level=LOCAL)

    def track_block(self, number: int, event: CallEvent) -> None:
        if len(self.flow.functions) == 1 and not _is_condition_operand(event.call.node):
            self.sites[number] = event.call.node
            self.flow.env[f"#l{number}"] = Value(path=event.path)

    def check_realloc(self, event: CallEvent) -> None:
        """Reports `p = realloc(p, n)`, which loses the old block on failure; otherwise the block escapes."""
        old = event.args[0]
        node = ir.outside_casts(event.call.node)
        if (
            node is not None
            and node.kind() == "assignment_expression"
            and node.field("left").text() == event.call.args[0].node.text()
            and not (old.known and old.const is None)
        ):
            self.report("realloc-leak", node, subject=event.call)
        if old.memory is not None:
            self.escape(old)

    def check_size(self, event: CallEvent, name: str, expr: ir.Expr, size: Value) -> str:
        """Checks an allocation size; returns the variable whose string it is for, or ""."""
        bare = expr
        if (
            isinstance(bare, ir.OpExpr)
            and bare.op == "*"
            and any(isinstance(arg, ir.CallExpr) and is_call_of(arg, "sizeof") for arg in bare.args)
        ):
            bare = next(
                arg for arg in bare.args if not (isinstance(arg, ir.CallExpr) and is_call_of(arg, "sizeof"))
            )
        if isinstance(bare, ir.CallExpr) and is_call_of(bare, "strlen", "wcslen"):
            self.report_call("strlen-allocation", event)
        limited = size.bounded or size.high is not None
        if (isinstance(expr, ir.OpExpr) and expr.op in ("*", "+", "<<")) or name == "new[]":
            foreign = size.level >= REMOTE or (
                size.level >= PARAMETER and isinstance(expr, ir.OpExpr) and expr.op in ("*", "<<")
            )
            lengths = "strlen" in str(event.call.node.text()) or size.origin.startswith("the length of ")
            single = isinstance(expr, ir.OpExpr) and expr.op == "*" and _ONE_BYTE.search(expr.node.text())
            if foreign and size.numeric and not limited and not lengths and not single:
                self.report_call("allocation-overflow", event, origin=size.origin, with_args=False)
        elif size.level >= REMOTE and size.numeric and not limited and name != "realloc":
            self.report_call("allocation-size", event, origin=size.origin, with_args=False)
        if isinstance(expr, ir.OpExpr) and expr.op == "+":
            for arg in expr.args:
                if isinstance(arg, ir.CallExpr) and is_call_of(arg, "strlen", "wcslen") and arg.args:
                    return str(arg.args[0].node.text())
        return ""

    # Release

    def release(self, event: CallEvent, name: str) -> None:
        expr = event.call.args[0]
        value = event.args[0]
        memory = value.memory
        if memory is not None and memory.block and memory.kind != "file" and memory.start != 0:
            self.report_call("moved-free", event, with_args=False)
            return
        key = key_of(expr)
        if key is None or (isinstance(expr, ir.OpExpr) and not value.target):
            return
        start = expr.node.range().start.index
        uaf = self.rules.detectors.get("use-after-free")
        if memory is not None and self.is_freed(memory.block):
            if uaf is not None:
                self.matches.pop((uaf[0].id, start), None)
            self.report("double-close" if memory.kind == "file" else "double-free", event.call.node)
            return
        literal = isinstance(value.const, str) and isinstance(expr, ir.NameExpr)
        if literal or value.target or (memory is not None and memory.kind in ("stack", "static")):
            if memory is None or memory.kind != "file":
                self.report_call("invalid-free", event, with_args=False)
            return
        if (
            memory is not None
            and memory.kind in ("malloc", "new", "new[]")
            and memory.block
            and memory.kind != LIBRARY.releases[name]
        ):
            self.report_call("mismatched-free", event, with_args=False)
        if memory is None or not memory.block:
            for other in [key for key in self.flow.env if key.startswith("#l")]:
                self.flow.env[f"#e{other[2:]}"] = Value(level=LOCAL)  # it may be any tracked block
            if memory is not None and memory.capacity is not None:
                return
            memory = Memory(block=self.new_block(), kind="file" if LIBRARY.releases[name] == "file" else "")
            self.flow.store(key, replace(value, memory=memory))
        self.flow.env[f"#{memory.block}"] = Value(level=LOCAL)

    def is_freed(self, block: int) -> bool:
        if not block:
            return False
        state = self.flow.lookup(f"#{block}")
        return state is not None and state.level > 0

    def escape(self, value: Value) -> None:
        """Marks a block as held elsewhere."""
        if value.memory is not None and value.memory.block:
            self.flow.env[f"#e{value.memory.block}"] = Value(level=LOCAL)

    def pass_pointers(self, event: CallEvent, name: str) -> None:
        """Effects of passing pointers to a call: it may keep them, write to them, or need an open file."""
        at = LIBRARY.streams.get(name)
        if at is not None and at < len(event.args):
            self.check_dereference(event.args[at], event.call.node, event.call.args[at])
        if name.isupper():  # a macro may write to any variable
            for key in [key for key, held in self.flow.env.items() if held.memory is not None]:
                held = self.flow.env[key]
                if held.memory is not None and (held.memory.fresh or held.memory.kind == "unset"):
                    bare = None if held.memory.kind == "unset" else replace(held.memory, fresh=False)
                    self.flow.env[key] = replace(held, memory=bare)
        if name in ("strcat", "strncat", "wcscat", "wcsncat") and event.args:
            start = event.args[0].memory
            if start is not None and start.fresh:
                self.report("uninitialised", event.call.node)
        keeps = name not in _BORROWS and not _SHOWS.match(name)
        for value in (*event.args, *event.kwargs.values()):
            memory = value.memory
            if memory is None or not memory.block:
                continue
            if keeps:
                self.escape(value)
            if memory.fresh and name not in ("free", "sizeof") and not _SHOWS.match(name):
                self.mark_written(memory.block)

    def mark_written(self, block: int) -> None:
        for key, value in self.flow.env.items():
            if value.memory is not None and value.memory.block == block and value.memory.fresh:
                self.flow.env[key] = replace(value, memory=replace(value.memory, fresh=False))

    def on_assign(self, path: str, key: str, value: Value, node: ir.Syntax, target: ir.Expr) -> None:
        super().on_assign(path, key, value, node, target)
        if value.memory is not None and (not isinstance(target, ir.NameExpr) or key not in self.declared):
            self.escape(value)  # stored in a structure, a parameter or a global

    def on_collection(self, value: Value, node: ir.Syntax, coll: ir.CollectionExpr) -> None:
        super().on_collection(value, node, coll)
        for _, item in value.items or ():
            self.escape(item)

    def on_return(self, value: Value, node: ir.Syntax, function: ir.Function | None) -> None:
        super().on_return(value, node, function)
        self.escape(value)

    def on_leave(self, env: Env, function: ir.Function) -> None:
        if len(self.flow.functions) != 1 or function.name in ("main", "wmain"):
            return
        held = {value.memory.block for value in env.values() if value.memory is not None}
        for key in env:
            if key.startswith("#l"):
                number = int(key[2:])
                if number in held and f"#{number}" not in env and f"#e{number}" not in env:
                    self.report_leak(number, env[key])

    def check_race(self, event: CallEvent, name: str) -> None:
        """Reports a path that one call checks and a later one uses (a race)."""
        if not event.call.args or name not in _PATH_CALLS:
            return
        path = event.call.args[0].node.text()
        if name in LIBRARY.path_checks:
            self.checked[path] = event.call.node
        elif path in self.checked:
            self.report("toctou", self.checked.pop(path))

    def on_block_lost(self, block: int) -> None:
        env = self.flow.env
        if f"#l{block}" in env and f"#e{block}" not in env and block in self.sites:
            self.report_leak(block, env[f"#l{block}"])

    def report_leak(self, block: int, state: Value) -> None:
        handle = state.path.rsplit(".", 1)[-1] in LIBRARY.openers
        self.report("handle-leak" if handle else "leak", self.sites[block])

    # Use

    def on_use(self, name: str, value: Value, node: ir.Syntax) -> None:
        memory = value.memory
        if memory is None:
            return
        parent = node.parent()
        kind = parent.kind() if parent is not None else ""
        if memory.kind == "unset":
            self.check_unset(name, node, parent, kind)
            return
        if self.is_freed(memory.block):
            if value.target:
                return  # the address of the variable, not the block
            if kind == "argument_list" and _EXCHANGES.match(parent.parent().text()):
                return
            if kind == "pointer_expression" and parent.text().startswith("&"):
                return  # the address of the pointer itself
            if kind in ("assignment_expression", "init_declarator"):
                return  # the pointer is copied or replaced, not dereferenced
            if kind == "binary_expression" and parent.field("operator").text() in ("==", "!="):
                return
            if kind == "argument_list" and parent.parent().text().startswith(("fclose", "free", "pclose")):
                return  # a double release, reported there
            if memory.kind != "file" or kind != "return_statement":
                self.report("use-after-close" if memory.kind == "file" else "use-after-free", node)

    def check_unset(self, name: str, node: ir.Syntax, parent: ir.Syntax | None, kind: str) -> None:
        """Reports the use of an uninitialised variable."""
        if parent is None:
            return
        quiet = kind in ("sizeof_expression", "parameter_declaration", "lambda_capture_specifier") or (
            kind in ("assignment_expression", "for_range_loop")
            and (parent.field("left") or parent).range().start.index == node.range().start.index
            and (parent.field("operator") is None or parent.field("operator").text() == "=")
        )
        if kind == "pointer_expression" and parent.text().startswith("&"):
            quiet = True
        if kind == "comma_expression" or (kind == "cast_expression" and parent.text().startswith("(void")):
            quiet = True
        if kind == "binary_expression" and parent.field("operator").text() in (">>", "<<", "&"):
            # A C++ stream writes to it, or the grammar reads a cast as a binary operator.
            quiet = self.language == "cpp" or parent.field("left").kind() == "parenthesized_expression"
        if kind == "argument_list":
            callee = parent.parent().field("function")
            text = callee.text() if callee is not None else ""
            quiet = text not in _BORROWS and not _SHOWS.match(text)  # a macro, or a reference in C++
        if not quiet and not kind.startswith("gnu_asm") and not _is_set_by_earlier_round(name, node):
            self.report("uninitialised", node)
        known = self.flow.lookup(name)
        if known is not None:
            self.flow.env[name] = replace(known, memory=None)

    def is_unwritten(self, stmt: ir.DeclareStmt) -> bool:
        """Whether a declaration leaves a scalar or pointer uninitialised."""
        return (
            stmt.value is None
            and not stmt.static
            and bool(self.flow.functions)
            and (stmt.pointer or _SCALAR.fullmatch(stmt.type.strip()) is not None)
        )


def _is_set_by_earlier_round(name: str, node: ir.Syntax) -> bool:
    """Whether a condition in a loop guards a use and the loop sets the variable behind it."""
    guarded = False
    at = node
    while (parent := at.parent()) is not None and parent.kind() != "function_definition":
        if _LOOP.search(parent.kind()):
            behind = parent.text()[node.range().end.index - parent.range().start.index :]
            if guarded and re.search(rf"\b{re.escape(name)}\s*=[^=]", behind):
                return True
        guarded = guarded or (
            parent.kind() == "if_statement"
            and at.kind() not in ("condition_clause", "parenthesized_expression")
        )
        at = parent
    return False


def _is_condition_operand(node: ir.Syntax) -> bool:
    """Whether an allocation is an operand of `&&` or `||` and may not happen."""
    parent = node.parent()
    while parent is not None and parent.kind().endswith("expression"):
        if parent.kind() == "binary_expression" and parent.field("operator").text() in ("||", "&&"):
            return True
        parent = parent.parent()
    return False
