"""Ray's environment: a local one that nobody else reaches, or the way into a cluster. Set up before Ray is
imported, finished inside each replica.

Environment and bindings only. Without a cluster, every port that Ray opens is bound to loopback, nothing
is reported to anybody, and calls between replicas take the direct way (gRPC, one loop), which is four times
quicker than the object store. A test looks at the ports that are really open.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

_LOCAL = "RAY_KEYSTROKE_ON_LOOPBACK"  # of ours; settings have the other prefix to themselves

# What Ray reads when it is imported, here and in every process it starts.
_ALWAYS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
}
_ON_LOOPBACK = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # its name notwithstanding: take 127.0.0.1 for this node
    _LOCAL: "1",
}


_JOINING = {"RAY_NUM_REDIS_GET_RETRIES": "3"}  # seconds of knocking; Ray's own twenty look like a hang


def prepare(environ: MutableMapping[str, str] | None = None, *, local: bool) -> None:
    """Set what Ray reads at its import. Call before that. What the user has set stands, but for reports."""
    environ = os.environ if environ is None else environ
    for name, value in _ALWAYS.items():
        environ.setdefault(name, value)
    environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if local:
        environ.update(_ON_LOOPBACK)
        return
    for name, value in _JOINING.items():
        environ.setdefault(name, value)
    # `ray start --head` asks for a token unless told otherwise; who joins must say that they have one.
    if "RAY_AUTH_MODE" not in environ and has_token(environ):
        environ["RAY_AUTH_MODE"] = "token"


def has_token(environ: Mapping[str, str]) -> bool:
    """Whether there is a cluster's token where Ray looks for one."""
    if environ.get("RAY_AUTH_TOKEN"):
        return True
    told = environ.get("RAY_AUTH_TOKEN_PATH")
    home = environ.get("HOME") or environ.get("USERPROFILE")
    if told is None and home is None:
        return False
    return (Path(told) if told else Path(home or "") / ".ray" / "auth_token").is_file()


def bind_node() -> None:
    """In the process that starts a local Ray: also where Ray was imported before `prepare` was called. Ray
    has no public switch for either binding in this file; a test looks at the open ports, so that a release
    which moves them is noticed."""
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = False


def bind_replica() -> None:
    """In a replica of a local Ray, before it opens its port: Serve would bind it to every interface."""
    if os.environ.get(_LOCAL) != "1":
        return
    from ray.serve._private import replica

    bind = replica.add_port_to_grpc_server

    def bound(server: object, address: str) -> int:
        port: int = bind(server, address.replace("[::]", "127.0.0.1").replace("0.0.0.0", "127.0.0.1"))
        return port

    if getattr(bind, "__name__", "") != "bound":
        replica.add_port_to_grpc_server = bound
