"""A local Ray that nobody else reaches: set up before Ray is imported, finished inside each replica.

Law: environment and bindings only. Without a cluster, every port that Ray opens is bound to loopback, nothing
is reported to anybody, and calls between replicas take the direct way (gRPC, one loop), which is four times
quicker than the object store. A test looks at the ports that are really open.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

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


def prepare(environ: MutableMapping[str, str] | None = None, *, local: bool) -> None:
    """Set what Ray reads at its import. Call before that. What the user has set stands, but for reports."""
    environ = os.environ if environ is None else environ
    for name, value in _ALWAYS.items():
        environ.setdefault(name, value)
    environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if local:
        environ.update(_ON_LOOPBACK)


def bind_node() -> None:
    """In the process that starts a local Ray: also where Ray was imported before `prepare` was called."""
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
