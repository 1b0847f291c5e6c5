"""C control flow: infinite recursion and loops, reachable assertions, data shared between threads.

Uses the syntax of one function and, from the file, which functions run as threads or handle signals. A loop
or recursion is reported only if nothing in it can end it.
"""

from __future__ import annotations

import re

from keystroke.analysis.audit.flow.base import CallEvent
from keystroke.analysis.audit.flow.values import REMOTE, Value
from keystroke.analysis.audit.memory.library import LIBRARY
from keystroke.analysis.audit.rules.match import RuleMatcher
from keystroke.analysis.audit.source import ir

THREAD, SIGNAL, ATOMIC = "@thread", "@signal", "@atomic"
# What starts a thread or installs a signal handler; the word before each pattern is a cheap pre-check.
_STARTS = (
    (THREAD, "pthread_create", re.compile(r"pthread_create\s*\([^,;]+,[^,;]+,\s*(?:\([^)]*\)\s*)?&?(\w+)")),
    (THREAD, "thrd_create", re.compile(r"thrd_create\s*\([^,;]+,\s*&?(\w+)")),
    (THREAD, "std::thread", re.compile(r"std::thread(?:\s+\w+)?\s*[({]\s*&?(\w+)")),
    (THREAD, "std::jthread", re.compile(r"std::jthread(?:\s+\w+)?\s*[({]\s*&?(\w+)")),
    (THREAD, "emplace_back", re.compile(r"\bth\w*\.emplace_back\(\s*&?(\w+)")),
    (
        ATOMIC,
        "tomic",
        re.compile(r"(?:\batomic<[^;>]*>|_Atomic(?:\([^)]*\)|\s+\w+)|\batomic_\w+)\s+(\w+)\s*[=({;]"),
    ),
    (SIGNAL, "signal", re.compile(r"\bsignal\s*\(\s*SIG\w+\s*,\s*&?(\w+)")),
    (SIGNAL, "sa_", re.compile(r"sa_(?:handler|sigaction)\s*=\s*&?(\w+)")),
)
_BRANCHES = frozenset(
    {"if_statement", "switch_statement", "case_statement", "conditional_expression", "while_statement"}
    | {"for_statement", "do_statement", "catch_clause", "for_range_loop"}
)
_LEAVES = re.compile(
    r"\b(?:return|goto|throw|exit|_exit|_Exit|abort|longjmp|siglongjmp|pthread_exit|ExitProcess|quick_exit|co_return)\b"
)
_OUTPUT = re.compile(r"^(?:printf|puts|putchar|fputs|fputc|fprintf|wprintf|std::cout)$")
_LOCKS = re.compile(r"(?i)lock|mutex|atomic|sem_wait|__sync|critical|\bomp\b|_Atomic|barrier")
_READER = re.compile(
    r"(?i)parse|decode|unpack|deserial|unmarshal|read_(?:value|object|array|node|expr|block)|skip_"
)
_DEPTH = re.compile(r"(?i)depth|level|nest|recurs|limit|\bmax|stack|remain")
_NULL = re.compile(
    r"\(\s*(?:!\s*(\w+)|(\w+)\s*==\s*(?:NULL|nullptr|nil|0)|(?:NULL|nullptr|nil)\s*==\s*(\w+))\s*\)"
)
_CONDITIONAL = re.compile(r"&&|\?|\|\||sizeof|offsetof|assert|typeof")
_WORD = re.compile(r"[A-Za-z_]\w*")


def thread_and_signal_functions(text: str) -> dict[str, str]:
    """The functions of a file that run as threads or handle signals, and its atomic variables."""
    found: dict[str, str] = {}
    for kind, word, pattern in _STARTS:
        if word in text:
            found.update(dict.fromkeys(pattern.findall(text), kind))
    return {name: kind for name, kind in found.items() if name not in ("NULL", "SIG_IGN", "SIG_DFL")}


_UNREACHABLE = re.compile(
    r"\(*\s*(?:!|(?:0|false|FALSE)\s*&&)\s*\"|\"[^\"]*\"\s*&&\s*(?:0|false)\b|\(*!\(?\s*\""
)
_CONVERTED = re.compile(
    r"\(\s*(?:const\s+)?(?:unsigned\s+)?[A-Za-z_][\w:]*[\s*&]*\)\s*\w|\w+_cast\s*<|[\w:]+\s*\{"
)
_OVERLOADS = re.compile(r"::|\w_cast\s*<|\btemplate\s*<|\w\s*&\s*\w+\s*[,)]")


class ControlMatcher(RuleMatcher):
    def on_function(self, function: ir.Function, handler: bool) -> None:
        super().on_function(function, handler)
        if self.flow.inline_depth or function.node.kind() != "function_definition":
            return
        body = function.node.field("body")
        if body is None:
            return
        text = body.text()
        if function.name and re.search(rf"\b{re.escape(function.name)}\s*\(", text):
            self.check_recursion(function, body, function.node.get_root().root().text())
            self.check_nested_input(function, body, text)
        if "while" in text or "for" in text:
            self.check_endless_loops(function, body)
        self.check_late_null_test(function, body)
        role = self.flow.file_env.get(function.name)
        if role is not None and role.path == THREAD and not _LOCKS.search(text):
            self.check_shared_data(function, body)
        elif role is not None and role.path == SIGNAL:
            self.check_signal_handler(body)

    def on_call(self, event: CallEvent) -> Value | None:
        if event.path == "assert" and event.args:
            self.check_assertion(event)
        return super().on_call(event)

    # Recursion

    def check_recursion(self, function: ir.Function, body: ir.Syntax, text: str) -> None:
        names = [param.name for param in function.params if param.name.isidentifier()]
        for call in body.find_all(kind="call_expression"):
            callee = call.field("function")
            if callee is None or callee.text() != function.name:
                continue
            given = call.field("arguments")
            args = (
                [child.text() for child in given.children() if child.is_named()] if given is not None else []
            )
            another = len(args) != len(names) or any(map(_CONVERTED.match, args))
            if len(args) < len(names) and "..." not in function.node.text():
                continue  # C takes as many as are declared: C++ in a header
            if args != names and (_OVERLOADS.search(text) or (self.language == "cpp" and another)):
                continue  # C++: another function of the same name
            if not _is_guarded(call, body):
                self.report("recursion", call)
            elif (
                names
                and len(args) == len(names)
                and all(
                    arg in (name, f"{name}--", f"{name}++") for arg, name in zip(args, names, strict=True)
                )
                and not any(param.type.endswith("*") or "*" in param.type for param in function.params)
                and not any(_is_changed(body, name, call) for name in names)
            ):
                self.report("recursion", call, "the function calls itself with the same arguments again")

    def check_nested_input(self, function: ir.Function, body: ir.Syntax, text: str) -> None:
        """A parser whose recursion depth is chosen by the input."""
        if not _READER.search(function.name) or _DEPTH.search(function.node.text()):
            return
        if not any("*" in param.type for param in function.params):
            return
        for call in body.find_all(kind="call_expression"):
            callee = call.field("function")
            if callee is not None and callee.text() == function.name:
                self.report(
                    "recursion", call, "the input decides how deep this recursion goes; count the levels"
                )
                return

    # Pointers

    def check_late_null_test(self, function: ir.Function, body: ir.Syntax) -> None:
        """A pointer parameter that is dereferenced before it is compared with null."""
        followed: dict[str, ir.Syntax] = {}
        names = [param.name for param in function.params if param.name.isidentifier()]
        for stmt in body.children():
            kind, text = stmt.kind(), stmt.text()
            if kind == "if_statement":
                test = stmt.field("condition")
                found = _NULL.fullmatch(test.text()) if test is not None else None
                name = next((group for group in found.groups() if group), "") if found is not None else ""
                if name in followed:
                    self.report(
                        "null-dereference", followed[name], "dereferenced here, and compared with null later"
                    )
                return
            if kind not in ("declaration", "expression_statement"):
                continue
            for name in names:
                if re.search(rf"(?<![\w.>]){name}\s*=(?!=)", text):
                    return
                place = re.search(rf"(?<![\w.>&]){name}->", text)
                if place is not None and not _CONDITIONAL.search(text):
                    followed.setdefault(name, stmt)

    # Loops

    def check_endless_loops(self, function: ir.Function, body: ir.Syntax) -> None:
        for kind in ("while_statement", "for_statement"):
            for loop in body.find_all(kind=kind):
                inner, test = loop.field("body"), loop.field("condition")
                if inner is None or _LEAVES.search(inner.text()) or _breaks(inner):
                    continue
                if self.is_endless(function, body, loop, inner, test):
                    self.report("endless-loop", loop)

    def is_endless(
        self,
        function: ir.Function,
        body: ir.Syntax,
        loop: ir.Syntax,
        inner: ir.Syntax,
        test: ir.Syntax | None,
    ) -> bool:
        condition = test.text().strip("() ") if test is not None else "1"
        if condition in ("1", "true", "TRUE"):
            calls = [call.field("function") for call in inner.find_all(kind="call_expression")]
            return all(callee is not None and _OUTPUT.match(callee.text()) for callee in calls)
        names = set(_WORD.findall(condition)) - {"NULL", "true", "false", "sizeof"}
        if not names or any(mark in condition for mark in ("(", "[", "*", "->", ".", "++", "--", "=&")):
            return False
        if re.search(r"(?<![=!<>])=(?!=)|(?:<<|>>)=", condition):
            return False
        local = {param.name for param in function.params} | _declared_names(body)
        if not names <= {name for name in local if name.islower() or not name.isupper()}:
            return False
        whole = body.text()
        update = loop.field("update")
        changing = inner.text() + (update.text() if update is not None else "")
        if any(
            re.search(rf"&\s*{name}\b|\bvolatile\b[^;]*\b{name}\b|\bstatic\b[^;]*\b{name}\b", whole)
            for name in names
        ):
            return False
        if re.search(r"\basm\b|__asm|\b[A-Z_]{3,}\s*\(", inner.text()):
            return False
        if not any(_is_assigned(changing, name) for name in names):
            return True
        return _wrong_way(loop, condition)

    # Assertions

    def check_assertion(self, event: CallEvent) -> None:
        expr, value = event.call.args[0], event.args[0]
        if _UNREACHABLE.match(expr.node.text()):
            return
        if value.known and not value.const and not isinstance(expr, ir.ConstExpr):
            self.report("reachable-assertion", event.call.node, "this assertion fails whenever it is reached")
            return
        for name in _WORD.findall(expr.node.text()):
            held = self.flow.lookup(name)
            if held is None or held.level < REMOTE or "*" in held.clean:
                continue
            received = held.origin in ("recv()", "read()", "recvfrom()") and held.low == 0
            if received or (not held.bounded and held.low is None and held.high is None):
                self.report("reachable-assertion", event.call.node, origin=held.origin)
                return

    # Threads and signals

    def check_shared_data(self, function: ir.Function, body: ir.Syntax) -> None:
        local = {param.name for param in function.params} | _declared_names(body)
        for kind, target in (("assignment_expression", "left"), ("update_expression", "argument")):
            for node in body.find_all(kind=kind):
                held = node.field(target)
                name = held.text() if held is not None and held.kind() == "identifier" else ""
                known = self.flow.file_env.get(name) if name and name not in local else None
                if known is not None and known.path != ATOMIC:
                    self.report("unlocked-share", node)

    def check_signal_handler(self, body: ir.Syntax) -> None:
        for call in body.find_all(kind="call_expression"):
            callee = call.field("function")
            if callee is not None and callee.text() in LIBRARY.signal_unsafe:
                self.report("signal-unsafe", call)


def _is_guarded(call: ir.Syntax, body: ir.Syntax) -> bool:
    """Whether an enclosing branch, or an earlier one that leaves, can prevent a call."""
    at = call
    first = body.range().start.index
    while (parent := at.parent()) is not None and at.range().start.index >= first:
        if parent.kind() in _BRANCHES:
            return True
        if parent.kind() == "binary_expression" and parent.field("operator").text() in ("&&", "||"):
            return True
        if parent.kind() == "compound_statement":
            for sibling in parent.children():
                if sibling.range().start.index >= at.range().start.index:
                    break
                if sibling.kind() in _BRANCHES and _LEAVES.search(sibling.text()):
                    return True
        if parent.range().start.index == first:
            return False
        at = parent
    return False


def _is_changed(body: ir.Syntax, name: str, before: ir.Syntax) -> bool:
    start = body.range().start.index
    return _is_assigned(body.text()[: before.range().start.index - start], name)


def _is_assigned(text: str, name: str) -> bool:
    return (
        re.search(
            rf"(?<![\w.>])(?:\+\+|--)\s*{name}\b|\b{name}\s*(?:\+\+|--|(?:[-+*/%&|^]|<<|>>)?=(?!=))|&\s*{name}\b",
            text,
        )
        is not None
    )


def _breaks(body: ir.Syntax) -> bool:
    """Whether a `break` in the body ends this loop and not an inner one."""
    for node in body.find_all(kind="break_statement"):
        at = node.parent()
        inside = False
        while at is not None and at.range().start.index > body.range().start.index:
            if at.kind() in ("while_statement", "for_statement", "do_statement", "switch_statement"):
                inside = True
                break
            at = at.parent()
        if not inside:
            return True
    return False


def _declared_names(body: ir.Syntax) -> set[str]:
    out: set[str] = set()
    for declaration in body.find_all(kind="declaration"):
        for child in declaration.children():
            held = (
                child.field("declarator")
                if child.kind() in ("init_declarator", "array_declarator")
                else child
            )
            while held is not None and held.kind() in ("pointer_declarator", "array_declarator"):
                held = held.field("declarator")
            if held is not None and held.kind() == "identifier":
                out.add(held.text())
    return out


def _wrong_way(loop: ir.Syntax, test: str) -> bool:
    """Whether a counter moves away from its bound."""
    init, update = loop.field("initializer"), loop.field("update")
    found = re.fullmatch(r"(\w+)\s*(<=?|>=?)\s*(-?\d+)", test)
    if init is None or update is None or found is None:
        return False
    start = re.search(rf"\b{found[1]}\s*=\s*(-?\d+)\s*[,;]?\s*$", init.text().rstrip(";"))
    up = re.fullmatch(rf"{found[1]}\+\+|\+\+{found[1]}", update.text()) is not None
    down = re.fullmatch(rf"{found[1]}--|--{found[1]}", update.text()) is not None
    if start is None or not (up or down):
        return False
    first, bound = int(start[1]), int(found[3])
    holds = {"<": first < bound, "<=": first <= bound, ">": first > bound, ">=": first >= bound}[found[2]]
    return holds and ((up and found[2][0] == ">") or (down and found[2][0] == "<"))
