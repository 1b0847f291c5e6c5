"""Asks a Ray cluster about the application, or removes it from there, within a time limit.

Ray's client retries for minutes and cannot be interrupted, so it runs in a process of its own
(`python -m keystroke.scale.cluster_query`), which reports how far it came and is ended at the limit.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import queue
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from keystroke import errors
from keystroke.config import Settings
from keystroke.errors import ConfigError, KeystrokeError, Unavailable
from keystroke.scale.cluster import check_reachable, connect_ray
from keystroke.scale.rollout import application_state
from keystroke.scale.served_models import NAME


@dataclass(frozen=True, slots=True)
class ClusterQuery:
    """`removes`: take the application off the cluster."""

    settings: Settings
    removes: bool = False


def ask_cluster(query: ClusterQuery, timeout: float) -> dict[str, Any] | None:
    """The state of the application on the cluster at `scale.address`; None where it does not run there.
    Removing it may take longer than `timeout`, reaching the cluster may not. Raises ConfigError or
    Unavailable."""
    address = query.settings.scale.address
    assert address is not None
    deadline = time.monotonic() + timeout
    check_reachable(address, timeout)
    child, reports = start_child("keystroke.scale.cluster_query", query, stderr=subprocess.DEVNULL)
    joined = False
    try:
        while True:
            try:
                left = None if joined and query.removes else max(0.0, deadline - time.monotonic())
                report = reports.get(timeout=left)
            except queue.Empty:
                raise Unavailable(_silence(address, timeout, joined=joined)) from None
            if report is None:
                raise Unavailable(f"asking the Ray cluster at {address} failed; is its version the one here?")
            if "error" in report:
                raise reported_error(report)
            if "state" in report:
                state: dict[str, Any] | None = report["state"]
                return state
            joined = True
    finally:
        child.kill()
        child.wait()


def _silence(address: str, timeout: float, *, joined: bool) -> str:
    if joined:
        return (
            f"the Ray cluster at {address} answers, but Ray Serve on it did not within {timeout:g} s; look "
            "at its head, or give more time with --timeout"
        )
    return (
        f"something listens at {address}, but no Ray cluster answered there within {timeout:g} s: its head "
        "is stopped or overloaded, or the address is not Ray's; check scale.address, or give more time "
        "with --timeout"
    )


Reports = queue.Queue[dict[str, Any] | None]


def start_child(module: str, order: Any, **options: Any) -> tuple[subprocess.Popen[bytes], Reports]:
    """Run a module in a process of its own, with `order` pickled on its standard input. Returns the process
    and what it reports, one JSON object a line of its standard output; None follows the last one."""
    child = subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        **options,
    )
    reports: Reports = queue.Queue()
    threading.Thread(target=_read_reports, args=(child, reports), daemon=True).start()
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        pickle.dump(order, child.stdin)
        child.stdin.flush()
    return child, reports


def reported_error(report: dict[str, Any]) -> KeystrokeError:
    """The error that another process reported by the name of its class."""
    kind = getattr(errors, report["kind"], Unavailable)
    error: KeystrokeError = kind(report["error"])
    return error


def _read_reports(child: subprocess.Popen[bytes], reports: Reports) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith(b"{"):  # Ray may print lines of its own
            with contextlib.suppress(ValueError):
                reports.put(json.loads(line))
    reports.put(None)


def main() -> None:
    def report(**fields: Any) -> None:
        sys.stdout.write(json.dumps(fields) + "\n")
        sys.stdout.flush()

    query: ClusterQuery = pickle.load(sys.stdin.buffer)
    try:
        with connect_ray(query.settings, deploys=False) as serve:
            report(joined=True)
            state = application_state(serve, NAME)
            if query.removes:
                if state is None:
                    raise ConfigError("Keystroke does not run on this cluster, so there is nothing to remove")
                serve.delete(NAME)
            report(state=state)
    except KeystrokeError as error:
        report(error=str(error), kind=type(error).__name__)


if __name__ == "__main__":
    main()
