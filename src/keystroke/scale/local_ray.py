"""The process that owns a local Ray: it starts Ray, deploys the application and watches both.

Run by `keystroke.scale.supervisor`, which sends an `ServeOrder` on standard input and reads reports, one JSON
object a line, from standard output. Whatever Ray prints goes to the supervisor's log. The process ends when
its standard input closes, so it does not outlive its supervisor, and with `LOST` when Ray itself is lost.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keystroke.config import Settings
from keystroke.errors import KeystrokeError
from keystroke.scale.cluster import connect_ray
from keystroke.scale.rollout import application_state
from keystroke.scale.served_models import NAME

LOST = 70  # exit status: Ray's head is gone, start again
_POLL = 0.5  # seconds between two checks of Ray's processes
_SILENT = 120.0  # seconds without a status after which a head whose processes run counts as lost
_FAREWELL = 5.0  # seconds for gateways to end their turns once the head is gone

Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class ServeOrder:
    """What to serve. `patience`: seconds to wait for replicas, None for ever."""

    settings: Settings
    echo: bool = False
    patience: float | None = None


class Stopped(BaseException):
    """Raised in the main thread by a signal while Ray starts."""


def main() -> None:
    with os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8") as out:
        os.dup2(2, 1)
        lock = threading.Lock()

        def report(message: dict[str, Any]) -> None:
            with lock:
                out.write(json.dumps(message) + "\n")
                out.flush()

        order: ServeOrder = pickle.load(sys.stdin.buffer)
        threading.Thread(target=_end_with_supervisor, daemon=True).start()
        try:
            _serve(order, report)
        except (Stopped, KeyboardInterrupt, SystemExit):
            sys.exit(0)
        except KeystrokeError as error:
            report({"error": str(error), "kind": type(error).__name__})
            sys.exit(error.exit_code)


def _serve(order: ServeOrder, report: Report) -> None:
    stop = threading.Event()
    threading.Thread(target=_watch_head, args=(stop,), daemon=True).start()
    _on_signal(_raise_stopped)
    settings = order.settings
    with connect_ray(settings) as serve, _stop_watching_first(stop):
        import ray

        _on_signal(_raise_stopped)  # Ray installs a handler of its own
        from keystroke.scale.application import deploy_settings

        say = lambda line: report({"note": line})  # noqa: E731
        deploy_settings(serve, settings, order.echo, order.patience, say, final=True)
        _on_signal(lambda *_: stop.set())
        metrics = [f"127.0.0.1:{node['MetricsExportPort']}" for node in ray.nodes() if node["Alive"]]
        report({"serving": True, "metrics": metrics})
        status = _StatusReader(serve, report)
        status.start()
        while not stop.wait(_POLL):
            if time.monotonic() - status.last > _SILENT:
                _leave_lost_ray()
        status.ended = True


@contextmanager
def _stop_watching_first(stop: threading.Event) -> Iterator[None]:
    """Set `stop` before Ray is stopped, however the block ends."""
    try:
        yield
    finally:
        stop.set()


class _StatusReader(threading.Thread):
    """Reports the application's status whenever it changes. Reading it blocks while the head is away."""

    def __init__(self, serve: Any, report: Report) -> None:
        super().__init__(daemon=True)
        self._serve, self._report = serve, report
        self.last, self.ended = time.monotonic(), False

    def run(self) -> None:
        before: Any = None
        while not self.ended:
            try:
                state = application_state(self._serve, NAME)
            except Exception:  # whatever it is, the main thread decides by the age of the last one
                time.sleep(1.0)
                continue
            self.last = time.monotonic()
            if state != before and not self.ended:
                before = state
                self._report({"state": state})
            time.sleep(1.0)


def _watch_head(stop: threading.Event) -> None:
    """Leave when a process of the head ends too early, also while Ray starts, which would wait for it."""
    seen: set[int] = set()
    while not stop.wait(_POLL):
        seen |= set(_ray_processes())
        if not all(map(_runs, seen)) and not stop.wait(_POLL):
            _leave_lost_ray()


def _leave_lost_ray() -> None:
    """End this process at once, after the gateways: leaving in order would wait for the head."""
    _wait_for_gateways()
    os._exit(LOST)


def _ray_processes() -> list[int]:
    """The head's processes, which are children of this one."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            title = (entry / "cmdline").read_bytes().split(b"\0", 1)[0]
        except (OSError, ValueError, IndexError):
            continue
        if parent == os.getpid() and Path(os.fsdecode(title)).name in ("gcs_server", "raylet"):
            found.append(int(entry.name))
    return found


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _wait_for_gateways() -> None:
    """Wait until the gateways have told their clients; they see the head's end by themselves."""
    deadline = time.monotonic() + _FAREWELL
    while time.monotonic() < deadline and any(":gateway" in title for title in _titles()):
        time.sleep(0.1)


def _titles() -> list[str]:
    titles = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            title = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            environ = (entry / "environ").read_bytes() if title.startswith("ray::ServeReplica") else b""
        except OSError:
            continue
        if os.environ.get(RUN, "-").encode() in environ:
            titles.append(title)
    return titles


RUN = "RAY_KEYSTROKE_RUN"  # names one run of the supervisor in the environment of all its processes


def _on_signal(handler: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def _raise_stopped(*_: object) -> None:
    _on_signal(signal.SIG_IGN)  # once: what follows is the orderly end
    raise Stopped


def _end_with_supervisor() -> None:
    while os.read(0, 1 << 12):  # not through sys.stdin, whose lock would be in the way of the end
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
