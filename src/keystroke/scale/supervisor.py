"""Keeps a local Ray running: starts the process that owns it, and starts it again when its head is lost.

Does not import Ray. `serve_locally` returns after a signal or raises the error of the first start; after that
it tries again for as long as it runs. The state file says what runs, for `keystroke scale status` and for
Prometheus; nothing of a run is left behind when it ends, however it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keystroke.config import Settings
from keystroke.errors import KeystrokeError, Unavailable
from keystroke.replacing import replace_file
from keystroke.scale.cluster_query import Reports, reported_error, start_child
from keystroke.scale.local_ray import LOST, RUN, ServeOrder

_STARTING = 15.0  # seconds for a start that was interrupted to end in order
_RETRY = (1.0, 2.0, 5.0, 10.0, 30.0)  # seconds before each further attempt
_STALE = 60.0  # seconds after which a state file that nobody renews is no longer believed


@dataclass(slots=True)
class LocalState:
    """What `keystroke scale up` runs on this machine, as its state file says."""

    pid: int
    url: str
    started: float
    log: str
    status: str = "STARTING"
    deployments: dict[str, Any] = field(default_factory=dict)
    restarts: int = 0
    metrics: list[str] = field(default_factory=list)
    updated: float = 0.0


def state_file(settings: Settings) -> Path:
    return settings.paths.state / "scale.json"


def targets_file() -> Path:
    """The addresses of Ray's metrics for Prometheus, in the file that Ray's documentation names."""
    return Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "prom_metrics_service_discovery.json"


def read_state(settings: Settings) -> LocalState | None:
    """The local run of these settings; None where there is none."""
    try:
        state = LocalState(**json.loads(state_file(settings).read_text()))
        os.kill(state.pid, 0)
    except (OSError, ValueError, TypeError):
        return None
    return state if time.time() - state.updated < _STALE else None


class Supervisor:
    """One `keystroke scale up` on this machine. `say` gets lines for the user, `ready` is called when the
    replicas serve for the first time."""

    def __init__(
        self, order: ServeOrder, url: str, *, say: Callable[[str], object], ready: Callable[[], object]
    ) -> None:
        self._order, self._say, self._ready = order, say, ready
        settings = order.settings
        self._file, self._targets = state_file(settings), targets_file()
        self.log = settings.paths.state / "scale.log"
        self._state = LocalState(os.getpid(), url, time.time(), str(self.log))
        self._run = secrets.token_hex(16)
        self._child: subprocess.Popen[bytes] | None = None
        self._reports: Reports
        self._signals = 0
        self._drain = settings.server.drain_s * 2 + 30.0

    def serve(self) -> None:
        """Serve until a signal. Raises KeystrokeError where the first start fails."""
        self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._handling_signals():
            try:
                self._keep_serving()
            finally:
                self._clean_up()
                self._file.unlink(missing_ok=True)
                if self._state.metrics:
                    with contextlib.suppress(OSError):  # another user's run may have replaced it
                        self._targets.unlink()

    def _keep_serving(self) -> None:
        failures = 0
        while not self._is_interrupted():
            served, error = self._run_once()
            if self._is_interrupted():
                return
            if not served and not self._state.restarts:
                raise error or Unavailable(f"Ray ended while it started; its messages are in {self.log}.")
            failures = 0 if served else failures + 1
            pause = _RETRY[min(failures, len(_RETRY) - 1)]
            self._state.restarts += 1
            self._write("RESTARTING")
            self._say(f"Ray was lost ({error or 'its head ended'}); starting it again in {pause:g} s")
            self._wait(pause)

    def _run_once(self) -> tuple[bool, KeystrokeError | None]:
        """Start the process and follow it to its end. Returns whether it served, and its error."""
        served, error = False, None
        self._start()
        assert self._child is not None
        self._write("STARTING")
        while True:
            try:
                report = self._reports.get(timeout=1.0)
            except queue.Empty:
                self._write(self._state.status)
                continue
            if report is None:
                break
            if "error" in report:
                error = reported_error(report)
            elif "note" in report:
                self._say(report["note"])
            elif "serving" in report:
                served = True
                self._announce(report["metrics"])
                self._write("RUNNING")
                if self._state.restarts:
                    self._say("serving again")
                else:
                    self._ready()
            elif "state" in report:
                self._state.deployments = report["state"]["deployments"]
                self._write(report["state"]["status"])
        code = self._child.wait()
        self._clean_up()
        if code not in (0, LOST) and error is None and not self._signals:
            error = Unavailable(f"Ray's process ended with status {code}; its messages are in {self.log}")
        return served, error

    def _start(self) -> None:
        with open(self.log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as log:
            # In a session of its own: Ctrl-C is for this process, which then ends Ray in order.
            self._child, self._reports = start_child(
                "keystroke.scale.local_ray", self._order, stderr=log, env={**os.environ, RUN: self._run}
            )

    def _announce(self, metrics: list[str]) -> None:
        self._state.metrics = metrics
        with contextlib.suppress(OSError):  # only Prometheus misses it
            targets = [{"targets": metrics, "labels": {"job": "keystroke"}}]
            replace_file(self._targets, json.dumps(targets).encode(), 0o644)

    def _write(self, status: str) -> None:
        self._state.status, self._state.updated = status, time.time()
        values = {name: getattr(self._state, name) for name in LocalState.__dataclass_fields__}
        replace_file(self._file, json.dumps(values).encode())

    # Ending

    @contextlib.contextmanager
    def _handling_signals(self) -> Iterator[None]:
        before = {n: signal.signal(n, self._on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, *_: object) -> None:
        self._signals += 1
        child = self._child
        if child is None or child.poll() is not None:
            return
        if self._signals > 1:
            child.kill()  # the rest of its family is found by its environment
            return
        serving = self._state.status == "RUNNING"
        if serving:
            self._say("waiting for running answers to finish; Ctrl-C again ends them")
        child.terminate()
        timer = threading.Timer(self._drain if serving else _STARTING, child.kill)
        timer.daemon = True
        timer.start()

    def _is_interrupted(self) -> bool:
        return self._signals > 0

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._signals and time.monotonic() < end:
            self._write(self._state.status)
            time.sleep(0.1)

    def _clean_up(self) -> None:
        """End what is left of the run: replicas outlive a Ray that was killed."""
        child = self._child
        if child is not None and child.poll() is None:
            child.kill()
            child.wait()
        for _ in range(20):
            left = list(processes_of(self._run))
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if not left:
                return
            time.sleep(0.1)


def processes_of(run: str) -> Iterator[int]:
    """The processes with this run in their environment, other than this one."""
    mark = f"{RUN}={run}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if int(entry.name) != os.getpid() and mark in (entry / "environ").read_bytes():
                yield int(entry.name)
        except OSError:
            continue
