"""Starts or joins Ray, and disconnects from it at the end.

A local Ray belongs to the process that started it and stops with it, replicas first, each drained. A cluster
is joined and left with the application on it.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from keystroke.config import Settings
from keystroke.errors import ConfigError
from keystroke.scale.loopback import bind_node, prepare_environment

_OBJECTS = 96 << 20  # bytes of Ray's object store: calls do not go through it


@contextmanager
def connect_ray(settings: Settings, *, deploys: bool = True) -> Iterator[Any]:
    """Start Ray on this machine or join the cluster at `scale.address`; with `deploys`, start Serve. Yields
    the `serve` module. Raises ConfigError where Ray is not installed or cannot be reached."""
    address = settings.scale.address
    prepare_environment(local=address is None)
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise ConfigError(
            f"`keystroke scale` needs {error.name or 'ray'}, which is not installed; "
            "install it with: pip install 'keystroke[scale]'"
        ) from None
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    quiet: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "namespace": "keystroke"}
    if address is not None:
        check_reachable(address)
    try:
        if address is None:
            bind_node()
            ray.init(
                address="local",
                num_cpus=max(os.cpu_count() or 1, _cores(settings)),
                include_dashboard=False,
                object_store_memory=_OBJECTS,
                _node_ip_address="127.0.0.1",
                **quiet,
            )
        else:
            ray.init(address=address, **quiet)
    except Exception as error:  # Ray raises a bare one where a busy machine does not start it within 30 s
        if address is None:
            raise ConfigError(
                f"a local Ray could not be started: {str(error).rstrip('.')}; see /tmp/ray"
            ) from None
        raise ConfigError(_refusal(address, error, ray.__version__)) from None
    try:
        if deploys:
            serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
        yield serve
    finally:
        # Ray prints every call that the end of its controller interrupts.
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            try:
                if address is None:
                    serve.shutdown()
            finally:
                ray.shutdown()


@contextmanager
def ray_output_to(log: Path) -> Iterator[None]:
    """Send what Ray's own threads print in this process to a log; messages of the program still reach the
    terminal."""
    log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    sys.stderr.flush()
    terminal, before = os.dup(2), sys.stderr
    with (
        open(log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as file,
        os.fdopen(os.dup(2), "w", encoding="utf-8", errors="replace", buffering=1) as shown,
    ):
        os.dup2(file.fileno(), 2)
        sys.stderr = shown
        try:
            yield
        finally:
            sys.stderr = before
            os.dup2(terminal, 2)
            os.close(terminal)


def _refusal(address: str, error: Exception, version: str) -> str:
    """Why a cluster that listens did not let this client join."""
    message = " ".join(str(error).split())
    if type(error).__name__ == "AuthenticationError" or re.search(r"auth|token", message, re.IGNORECASE):
        return (
            f"the Ray cluster at {address} refuses this client; its token must be in RAY_AUTH_TOKEN or "
            "~/.ray/auth_token (`ray get-auth-token` on its head shows it)"
        )
    if "ersion mismatch" in message:
        return f"the Ray cluster at {address} runs another version than {version}, which is installed here"
    return f"the Ray cluster at {address} could not be joined: {message:.200}"


def check_reachable(address: str, timeout: float = 5.0) -> None:
    """Raises ConfigError where nothing listens at `host:port`: Ray itself retries for minutes. Addresses of
    another form (`auto`, `ray://...`) are left to Ray."""
    host, colon, port = address.rpartition(":")
    if not colon or "/" in address or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=timeout).close()
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"no Ray cluster was reached at {address}: {why}; check scale.address") from None


def _cores(settings: Settings) -> int:
    """Enough for every replica: on one machine the system schedules the cores, not Ray."""
    cores = settings.scale.gateways + 4
    for table in (*settings.models.values(), None):
        replicas = max(table.max_replicas, table.replicas) if table is not None else 0
        cores += round((replicas or settings.scale.replicas) * (table.cpus if table is not None else 1) + 1)
    return cores * 2  # during a rolling update there are two generations
