"""WebSocket conformance: the Autobahn test suite against the frame protocol that serves our sockets.

Regime: the suite's fuzzing client (`wstest`, a Python 2.7 program: `pip install "autobahntestsuite<1"` there)
tests an echo application that runs on the gateway's own protocol classes: reading in slices, joined
fragments, frames written at once. Compression is declined, as the gateway declines it, so cases 12 and 13 are
not offered. The ceiling is every case OK; INFORMATIONAL and NON-STRICT are the suite's results for behaviour
that the RFC leaves open.

`python -m bench.autobahn --wstest "python2.7 -m autobahntestsuite.wstest" [--cases 1.*,2.*]`; last line JSON
with `cases`, `ok`, `failed`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import uvicorn

from bench.record import record
from keystroke.gateway.transport.frames import EXTENSION, AbortableHttp, FrameProtocol

PASSED = {"OK", "NON-STRICT", "INFORMATIONAL"}


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Says again what it is told: text by the short way where the socket takes it."""
    if scope["type"] != "websocket":
        return
    write = scope["extensions"][EXTENSION]["write"]
    await receive()
    await send({"type": "websocket.accept"})
    while (message := await receive())["type"] == "websocket.receive":
        text = message.get("text")
        if text is None or not write([text.encode()]):
            await send({"type": "websocket.send", "text": text, "bytes": message.get("bytes")})


class EchoServer:
    """The echo application on the gateway's protocol classes, in a thread."""

    def __enter__(self) -> int:
        config = uvicorn.Config(
            echo,
            port=0,
            http=AbortableHttp,
            ws=FrameProtocol,
            ws_max_size=64 << 20,
            ws_per_message_deflate=False,
            lifespan="off",
            log_config=None,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        port: int = self._server.servers[0].sockets[0].getsockname()[1]
        return port

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(10)


def run(wstest: str, cases: list[str], folder: Path) -> dict[str, dict[str, Any]]:
    """The suite's own report: each case with its `behavior`."""
    with EchoServer() as port:
        spec = {
            "outdir": str(folder / "report"),
            "servers": [{"agent": "keystroke", "url": f"ws://127.0.0.1:{port}"}],
            "cases": cases,
            "exclude-cases": ["12.*", "13.*"],
            "exclude-agent-cases": {},
        }
        (folder / "spec.json").write_text(json.dumps(spec))
        command = [*shlex.split(wstest), "-m", "fuzzingclient", "-s", str(folder / "spec.json")]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder)
    index = json.loads((folder / "report" / "index.json").read_text())
    found: dict[str, dict[str, Any]] = index["keystroke"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--wstest", default=os.environ.get("WSTEST", "wstest"), help="how the suite is started"
    )
    parser.add_argument("--cases", default="*", help="comma separated patterns")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = run(options.wstest, options.cases.split(","), Path(folder))
        except FileNotFoundError:
            sys.exit("wstest is not there; install autobahntestsuite with Python 2.7 and name it by --wstest")
    counts = Counter(case["behavior"] for case in found.values())
    for behavior, count in counts.most_common():
        print(f"{count:>6}  {behavior}")
    failed = sorted(name for name, case in found.items() if case["behavior"] not in PASSED)
    closed_badly = sorted(
        name for name, case in found.items() if case["behaviorClose"] not in PASSED and name not in failed
    )
    for name in (*failed, *closed_badly):
        print(f"failed  {name}: {found[name]['behavior']}, close {found[name]['behaviorClose']}")
    summary = {
        "cases": len(found),
        "ok": counts["OK"],
        "non_strict": counts["NON-STRICT"],
        "informational": counts["INFORMATIONAL"],
        "failed": failed + closed_badly,
    }
    record("autobahn", summary)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
