"""Which parameters of a function carry what a client sent, whatever they are called.

A role follows from a parameter's name, its type, its neighbours, or the call its function is passed to. In
JavaScript it is the name under which rules and sources know the parameter: `req`, `res`, `ctx`. In Python it
only says that a client calls the function.
"""

from __future__ import annotations

import re

import msgspec

from keystroke.analysis.audit.flow.knowledge import load_table
from keystroke.analysis.audit.flow.values import Value
from keystroke.analysis.audit.source import ir

CLIENT_EVENT = "clientEvent"  # the event of a cloud function, the arguments of a resolver
MESSAGE_EVENT = "messageEvent"  # a message from another window or a socket
STANDARD = frozenset({"req", "res", "ctx"})
_HANDLER_METHODS = re.compile(r"do_[A-Z]+$|handle|log_message|end_headers")
_ROUTE = re.compile(r"\.(?:route|get|post|put|patch|delete)\(\s*[rf]?[\"']([^\"']*)[\"']")
# What only the `request` of a test's fixture has.
_FIXTURE = re.compile(r"\brequest\.(?:config\.|node\.|param\b|addfinalizer\b|getfixturevalue\b|fixturename)")
VIEW = re.compile(r"def\s+\w+\(\s*(?:self\s*,\s*)?request\b|\bevent\s*(?::[^,()]*)?,\s*_?context\b")


# Parameters of a FastAPI handler: what another function gives, and the headers of a request, whose values
# hold no line break. An empty `Depends()` builds its type from the request.
_DEPENDENCY = re.compile(r"\b(?:Depends|Security)\(\s*[\w.]|\bBackgroundTasks\b|Dependency$")
_HEADERS = re.compile(r"\bHeader\(|Headers$")


class _ScriptRoles(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    routes: frozenset[str]
    listeners: frozenset[str]
    streams: frozenset[str]
    servers: frozenset[str]
    parents: frozenset[str]


class _PythonRoles(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    verbs: frozenset[str]
    injected: frozenset[str]
    handler_fields: frozenset[str]


class RoleTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`knowledge/roles.toml`."""

    names: dict[str, str]
    types: dict[str, str]
    javascript: _ScriptRoles
    python: _PythonRoles


_ROLES = load_table("roles", RoleTable)
_TYPES = tuple((re.compile(pattern), role) for pattern, role in _ROLES.types.items())


def parameter_role(param: ir.Param) -> str:
    """The role of a JavaScript parameter by its type or its own name; "" for none."""
    for pattern, role in _TYPES if param.type else ():
        if pattern.search(param.type):
            return role
    return _ROLES.names.get(param.name, "")


def has_own_type(param: ir.Param) -> bool:
    """Whether the type of a parameter is written out in place; those of frameworks have names."""
    return param.type.lstrip(": ").startswith("{")


def neighbour_roles(params: list[ir.Param]) -> tuple[str, ...]:
    """Roles that follow from the parameters together: `(event, context)`, `(parent, args)`."""
    names = [param.name for param in params[:2]]
    if len(names) == 2:
        if names[0] == "event" and names[1] in ("context", "_context"):
            return (CLIENT_EVENT,)
        if names[1] == "args" and names[0] in _ROLES.javascript.parents:
            return ("", CLIENT_EVENT)
    return ()


def callback_roles(path: str, args: list[Value], function: ir.Function) -> tuple[str, ...]:
    """Roles of a function by the call it is an argument of: a route, a server, a listener."""
    table = _ROLES.javascript
    last = path.rsplit(".", 1)[-1]
    count = len(function.params)
    topic = args[0].const if args else None
    if last in table.servers:
        return ("req", "res")
    if last in table.routes and (
        (isinstance(topic, str) and topic[:1] in ("/", "*", "")) or "oute(" in path or last == "use"
    ):
        if count == 1:
            return (parameter_role(function.params[0]) or "ctx",)
        return ("", "req", "res") if count == 4 else ("req", "res")
    if last in table.listeners and topic == "message":
        return (MESSAGE_EVENT,)
    if last == "on" and topic == "data" and path.split(".", 1)[0] in table.streams:
        return (CLIENT_EVENT,)
    return ()


def is_source_here(path: str, function: ir.Function | None) -> bool:
    """Whether a source applies in a function: some fields are sources only in methods of an HTTP handler.

    The path of a request is no source behind a route without a variable.
    """
    if path.endswith("request.path") and function is not None and function.decorators:
        routes = [found[1] for item in function.decorators if (found := _ROUTE.search(item.node.text()))]
        return not routes or any(mark in route for route in routes for mark in "<{(*")
    return path not in _ROLES.python.handler_fields or (
        function is not None and _HANDLER_METHODS.match(function.name) is not None
    )


def is_client_parameter(param: ir.Param) -> bool:
    """Whether a parameter of a view is part of the address rather than passed by the framework."""
    return param.name not in _ROLES.python.injected and param.default is None


def is_given_by_program(param: ir.Param) -> bool:
    """Whether the framework calls a function of the program for the value of this parameter of a handler."""
    return _DEPENDENCY.search(_declaration(param)) is not None


def is_header(param: ir.Param) -> bool:
    return _HEADERS.search(_declaration(param)) is not None


def _declaration(param: ir.Param) -> str:
    return f"{param.default.node.text()} {param.type}" if param.default is not None else param.type


def is_called_by_client(function: ir.Function) -> bool:
    """Whether the parameters of a Python function are those of a view or a cloud function."""
    names = [param.name for param in function.params]
    if "request" in names[:2] and (
        any("fixture" in item.node.text() for item in function.decorators)
        or _FIXTURE.search(function.node.text())
    ):
        return False
    if (names[:1] == ["request"] and not function.name.startswith("_")) or (
        names[:2] == ["event", "context"]
    ):
        return True
    return names[:2] == ["self", "request"] and function.name in _ROLES.python.verbs
