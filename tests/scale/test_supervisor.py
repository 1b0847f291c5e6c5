"""`keystroke scale up` on this machine, by command: it survives the loss of Ray's head, and leaves nothing.

One Ray serves the file's first test, another is interrupted while it starts.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import websockets
from bench.free_port import free_port
from scale_support import HANG

pytest.importorskip("ray", reason="the [scale] extra is not installed")

from keystroke.config import load_settings
from keystroke.scale.supervisor import read_state, targets_file

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("ray"),
    pytest.mark.timeout(3 * HANG),
    pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are found in /proc"),
]


class LocalUp:
    """One run of `keystroke scale up --echo`."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.place = Path(tempfile.mkdtemp(prefix="ks-ray-", dir="/tmp"))  # its sockets' paths must be short
        self.url = f"http://127.0.0.1:{self.port}"
        self.environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            "RAY_TMPDIR": str(self.place),  # another Ray of this machine uses the usual one
            "RAY_metrics_report_interval_ms": "1000",
            "KEYSTROKE_CONFIG": str(folder),
            "KEYSTROKE_PATHS_STATE": str(folder / "state"),
            "KEYSTROKE_SPECULATION_ENABLED": "false",
        }
        self.settings = load_settings(cwd=folder, environ=self.environ)
        command = [sys.executable, "-m", "keystroke", "scale", "up", "--echo", "--port", str(self.port)]
        self.process = subprocess.Popen(
            [*command, "--gateways", "1"], env=self.environ, stderr=subprocess.PIPE, text=True
        )

    def keystroke(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "keystroke", *arguments]
        return subprocess.run(
            command, env=self.environ, capture_output=True, text=True, timeout=HANG, check=False
        )

    def status(self) -> dict[str, Any]:
        done = self.keystroke("--json", "scale", "status")
        return dict(json.loads(done.stdout)) if done.returncode == 0 else {}

    def reaches(self, status: str, restarts: int = 0) -> None:
        deadline = time.monotonic() + HANG
        while True:
            assert self.process.poll() is None, self.process.stderr.read() if self.process.stderr else ""
            # From the file: a command for each look would take the cores from what is waited for.
            state = read_state(self.settings)
            assert time.monotonic() < deadline, state
            if state and state.status == status and state.restarts >= restarts and serves(self.url):
                return
            time.sleep(0.2)

    def family(self) -> list[psutil.Process]:
        found: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return found

    def end(self) -> str:
        """Everything it printed, after its end; kills what is left on failure."""
        family = self.family() if self.process.poll() is None else []
        try:
            _, said = self.process.communicate(timeout=HANG)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            _, left = psutil.wait_procs(family, timeout=HANG)
            for one in left:
                one.kill()
            shutil.rmtree(self.place, ignore_errors=True)
            assert not left
        return said


def serves(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=30).status_code == 200
    except httpx.TransportError:
        return False


async def test_a_turn_outlives_the_loss_of_the_head(tmp_path: Path) -> None:
    up = LocalUp(tmp_path)
    try:
        await asyncio.to_thread(up.reaches, "RUNNING")
        assert up.status()["deployments"]["gateway"]["status"] == "HEALTHY"
        head = next(p for p in up.family() if p.name() == "gcs_server")
        words = " ".join(f"word{n}" for n in range(250))  # ten seconds of it, within the longest answer
        async with websockets.connect(f"ws://127.0.0.1:{up.port}/v1/responses") as wire:
            body = {"type": "response.create", "model": "auto", "input": words, "on_disconnect": "continue"}
            await wire.send(json.dumps(body))
            heard = [json.loads(await asyncio.wait_for(wire.recv(), HANG))]
            head.kill()
            while heard[-1]["type"] not in ("response.failed", "response.completed"):
                heard.append(json.loads(await asyncio.wait_for(wire.recv(), HANG)))
        assert heard[-1]["type"] == "response.failed"
        assert heard[-1]["response"]["error"]["code"] == "server_restarting"
        identity = heard[0]["response"]["id"]
        await asyncio.to_thread(up.reaches, "RUNNING", 1)
        async with (
            httpx.AsyncClient(base_url=up.url, timeout=HANG) as client,
            client.stream("GET", f"/v1/responses/{identity}?stream=true") as stream,
        ):
            lines = [json.loads(line[6:]) async for line in stream.aiter_lines() if line[:7] == "data: {"]
        assert lines[0]["response"]["id"] == identity
        text = "".join(event["delta"] for event in lines if event["type"] == "response.output_text.delta")
        assert text == f"You said: {words}"
        (targets,) = json.loads((up.place / "ray" / targets_file().name).read_text())
        deadline = time.monotonic() + HANG
        async with httpx.AsyncClient(timeout=HANG) as client:  # Ray collects every few seconds
            while True:
                shown = (await client.get(f"http://{targets['targets'][0]}/metrics")).text
                if "ray_keystroke_responses_total" in shown and "ray_keystroke_replica_kv_bytes" in shown:
                    break
                assert time.monotonic() < deadline, shown[:2000]
                await asyncio.sleep(1)
        again = await asyncio.to_thread(up.keystroke, "scale", "up", "--echo", "--port", "0")
        assert again.returncode == 2
        assert "already runs here" in again.stderr
        down = await asyncio.to_thread(up.keystroke, "scale", "down")
        assert down.returncode == 0, down.stderr
        await asyncio.to_thread(up.process.wait, HANG)
    finally:
        if up.process.poll() is None:
            up.process.terminate()
        said = up.end()
    assert "Traceback" not in said
    assert not [line for line in said.splitlines() if "ray::" in line or "raylet" in line]
    assert "Ray was lost" in said
    assert "serving again" in said
    assert up.process.returncode == 0


def test_a_start_that_is_terminated_leaves_nothing(tmp_path: Path) -> None:
    up = LocalUp(tmp_path)
    deadline = time.monotonic() + HANG
    try:
        while not any(p.name() == "gcs_server" for p in up.family()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        up.process.send_signal(signal.SIGTERM)
        said = up.end()
    assert "Traceback" not in said
    assert up.status() == {}
