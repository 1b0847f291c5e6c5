"""Ray's environment: a local Ray bound to loopback, or the way into a cluster. Set before Ray is imported,
completed in each replica.

Without a cluster every port that Ray opens is bound to loopback, nothing is reported to anybody, and calls
between replicas go directly (gRPC, one loop), which is four times as fast as the object store. A test checks
the open ports.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

_LOCAL = "RAY_KEYSTROKE_ON_LOOPBACK"  # set by Keystroke; KEYSTROKE_ is the prefix of settings

# Read by Ray at import, here and in every process it starts.
_ALWAYS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_worker_niceness": "0",  # Ray's 15 is for batch work: beside a build, answers would hardly come
}
_ON_LOOPBACK = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # despite its name: use 127.0.0.1 as this node's address
    _LOCAL: "1",
}


_JOINING = {"RAY_NUM_REDIS_GET_RETRIES": "3"}  # seconds; Ray's default of twenty looks like a hang


def prepare_environment(environ: MutableMapping[str, str] | None = None, *, local: bool) -> None:
    """Set the variables that Ray reads at import; call before. User settings are kept, except usage
    reports."""
    environ = os.environ if environ is None else environ
    for name, value in _ALWAYS.items():
        environ.setdefault(name, value)
    environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if local:
        environ.update(_ON_LOOPBACK)
        return
    for name, value in _JOINING.items():
        environ.setdefault(name, value)
    # `ray start --head` requires a token by default; a client has to say that it has one.
    if "RAY_AUTH_MODE" not in environ and has_token(environ):
        environ["RAY_AUTH_MODE"] = "token"


def has_token(environ: Mapping[str, str]) -> bool:
    """Whether a cluster token exists where Ray looks for it."""
    if environ.get("RAY_AUTH_TOKEN"):
        return True
    path = environ.get("RAY_AUTH_TOKEN_PATH")
    home = environ.get("HOME") or environ.get("USERPROFILE")
    if path is None and home is None:
        return False
    return (Path(path) if path else Path(home or "") / ".ray" / "auth_token").is_file()


def on_loopback() -> bool:
    """Whether this process belongs to a local Ray."""
    return os.environ.get(_LOCAL) == "1"


def bind_node() -> None:
    """In the process that starts a local Ray, even if Ray was imported before `prepare_environment`. Ray has
    no public setting for the bindings in this file; the test of open ports notices a release that changes
    them."""
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = False


def bind_replica() -> None:
    """In a replica of a local Ray, before it opens its port, which Serve binds to every interface."""
    if not on_loopback():
        return
    from ray.serve._private import replica

    bind = replica.add_port_to_grpc_server

    def bound(server: object, address: str) -> int:
        port: int = bind(server, address.replace("[::]", "127.0.0.1").replace("0.0.0.0", "127.0.0.1"))
        return port

    if getattr(bind, "__name__", "") != "bound":
        replica.add_port_to_grpc_server = bound
