"""Which parameters of a function carry what a client sent, whatever they are called.

A role is told from a parameter's name, its type, its neighbours, or the call its function is given to.
In scripts it is the name under which rules and sources know the parameter: `req`, `res`, `ctx`; in Python it
says only that the caller is a client.
"""

from __future__ import annotations

import re

from keystroke.analysis.audit.flow.values import Value
from keystroke.analysis.audit.source import ir

LAMBDA = "clientEvent"  # the event of a cloud function, the arguments of a resolver
MESSAGE = "messageEvent"  # what another window or a socket sent
STANDARD = frozenset({"req", "res", "ctx"})
_NAMES = {
    "req": "req",
    "_req": "req",
    "request": "req",
    "_request": "req",
    "res": "res",
    "_res": "res",
    "response": "res",
    "_response": "res",
    "resp": "res",
    "reply": "res",
    "ctx": "ctx",
}
_TYPES = (
    (re.compile(r"(?:^|[.<])(?:\w*(?:Api|Http|Express|Fastify|Next)?Request|IncomingMessage)\b"), "req"),
    (re.compile(r"(?:^|[.<])(?:\w*(?:Api|Http|Express|Server|Next)?Response|FastifyReply)\b"), "res"),
    (re.compile(r"(?:^|[.<])(?:Koa|Router|Parameterized)\w*Context\b"), "ctx"),
)
_ROUTES = frozenset({"get", "post", "put", "delete", "patch", "all", "use", "head", "options", "any", "del"})
_PARENTS = frozenset({"parent", "root", "obj", "source", "_", "__", "_parent", "_root", "_obj", "_source"})
_VERBS = frozenset({"get", "post", "put", "patch", "delete", "dispatch"})
_HANDED = frozenset(
    [
        "user",
        "backend",
        "template",
        "template_name",
        "context",
        "response",
        "form",
        "obj",
        "instance",
        "queryset",
        "exception",
        "exc",
        "error",
        "view",
        "func",
        "callback",
        "view_func",
        "get_response",
        "f",
        "args",
        "kwargs",
        "model",
        "serializer",
        "app",
        "client",
        "session",
        "db",
        "logger",
        "config",
        "settings",
        "cls",
        "timeout",
        "verify",
    ]
)
_FIELDS = frozenset({"self.path", "self.headers", "self.requestline"})
_SERVES = re.compile(r"do_[A-Z]+$|handle|log_message|end_headers")
VIEW = re.compile(r"def\s+\w+\(\s*(?:self\s*,\s*)?request\b|\bevent\s*(?::[^,()]*)?,\s*_?context\b")


def scripted(param: ir.Param) -> str:
    """The role of a script's parameter by its type or its own name; "" for none."""
    for pattern, role in _TYPES if param.type else ():
        if pattern.search(param.type):
            return role
    return _NAMES.get(param.name, "")


def among(params: list[ir.Param]) -> tuple[str, ...]:
    """Roles told from the parameters together: `(event, context)`, `(parent, args)`."""
    names = [param.name for param in params[:2]]
    if len(names) == 2:
        if names[0] == "event" and names[1] in ("context", "_context"):
            return (LAMBDA,)
        if names[1] == "args" and names[0] in _PARENTS:
            return ("", LAMBDA)
    return ()


def given(path: str, args: list[Value], function: ir.Function) -> tuple[str, ...]:
    """Roles of a function by the call it is an argument of: a route, a server, a listener."""
    last = path.rsplit(".", 1)[-1]
    count = len(function.params)
    told = args[0].const if args else None
    if last == "createServer":
        return ("req", "res")
    if last in _ROUTES and (
        (isinstance(told, str) and told[:1] in ("/", "*", "")) or "oute(" in path or last == "use"
    ):
        if count == 1:
            return (scripted(function.params[0]) or "ctx",)
        return ("", "req", "res") if count == 4 else ("req", "res")
    if last in ("addEventListener", "on", "addListener") and told == "message":
        return (MESSAGE,)
    if last == "on" and told == "data" and path.split(".", 1)[0] in ("req", "socket", "conn", "ws"):
        return (LAMBDA,)
    return ()


def served(path: str, function: ir.Function | None) -> bool:
    """Whether a source holds here: such fields are a client's only in the methods of an HTTP handler."""
    return path not in _FIELDS or (function is not None and _SERVES.match(function.name) is not None)


def sent(param: ir.Param) -> bool:
    """Whether such a parameter of a view is a part of the address rather than something handed over."""
    return param.name not in _HANDED and param.default is None


def called_by_client(function: ir.Function) -> bool:
    """Whether a Python function is a view or a cloud function by the look of its parameters."""
    names = [param.name for param in function.params]
    if (names[:1] == ["request"] and not function.name.startswith("_")) or (
        names[:2] == ["event", "context"]
    ):
        return True
    return names[:2] == ["self", "request"] and function.name in _VERBS
