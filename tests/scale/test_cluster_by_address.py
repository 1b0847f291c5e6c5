"""`keystroke scale up | status | down --address` on a cluster that somebody else started, as a user would: by
command, with the cluster's token, over one Postgres.

One cluster serves the whole file; two nodes on one machine, the second with a resource that gateways want."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
from bench.free_port import free_port
from scale_support import HANG, until

from postgres_server import postgres_server

ray = pytest.importorskip("ray", reason="the [scale] extra is not installed")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("ray"),
    pytest.mark.timeout(3 * HANG),
    pytest.mark.skipif("TEST_SCALE" not in os.environ, reason="takes a minute: make test-scale"),
]


@dataclass
class Cluster:
    address: str
    port: int  # that gateways listen on
    environ: dict[str, str]

    def keystroke(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "keystroke", *arguments, "--address", self.address]
        told = {**self.environ, **environ}
        return subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False, env=told)


@contextmanager
def node(log: Path, environ: dict[str, str], *flags: str) -> Iterator[None]:
    """A Ray node, and all that it started, for as long as the block lasts."""
    command = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--block",
        "--object-store-memory=90000000",
    ]
    with log.open("w") as said:
        process = subprocess.Popen(
            [*command, *flags], env=environ, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield
    finally:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        process.send_signal(signal.SIGTERM)
        _, left = psutil.wait_procs(family, timeout=60)
        for one in left:
            one.kill()
        process.wait(HANG)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    head, port = free_port(), free_port()
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # otherwise replicas start only where nothing else runs
        "RAY_AUTH_TOKEN_PATH": str(token),
        "KEYSTROKE_CONFIG": str(folder),
    }
    source = str(Path(__file__).parents[2] / "src")
    environ["PYTHONPATH"] = os.pathsep.join([source, environ.get("PYTHONPATH", "")])
    address = f"{ray.util.get_node_ip_address()}:{head}"  # Ray takes no other for a cluster of several nodes
    started = {**environ, "RAY_AUTH_MODE": "token"}
    with ExitStack() as stack:
        database = stack.enter_context(postgres_server())
        place = tempfile.mkdtemp(prefix="ks-ray-", dir="/tmp")  # its sockets' paths must be short
        stack.callback(shutil.rmtree, place, ignore_errors=True)
        where = [f"--port={head}", f"--temp-dir={place}", "--include-dashboard=false", "--num-cpus=8"]
        stack.enter_context(node(folder / "head.log", started, "--head", *where))
        with until("the cluster's head") as wait:
            wait(lambda: _listens(head))
        second = [f"--address={address}", "--num-cpus=4", '--resources={"gateway": 4}']
        stack.enter_context(node(folder / "second.log", started, *second))
        environ |= {
            "KEYSTROKE_SERVER_DATABASE": database,
            "KEYSTROKE_SERVER_PORT": str(port),
            "KEYSTROKE_SCALE_GATEWAY_RESOURCE": "gateway",
        }
        yield Cluster(address, port, environ)


def _listens(port: int) -> bool:
    return any(c.laddr.port == port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN)


def test_who_has_not_the_clusters_token_is_told_so_and_does_not_wait(cluster: Cluster) -> None:
    done = cluster.keystroke("scale", "status", RAY_AUTH_TOKEN="0" * 64)
    assert done.returncode == 2
    assert "RAY_AUTH_TOKEN" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_an_application_comes_up_is_shown_renewed_and_taken_off_by_address(cluster: Cluster) -> None:
    before = cluster.keystroke("scale", "status")
    assert (before.returncode, "does not run on this cluster" in before.stderr) == (2, True)
    assert cluster.keystroke("scale", "down").returncode == 2

    up = cluster.keystroke("scale", "up", "--echo", "--gateways", "1", "--json")
    assert up.returncode == 0, up.stderr
    url = f"http://127.0.0.1:{cluster.port}"
    said = {"model": "auto", "input": "hello"}
    first = httpx.post(f"{url}/v1/responses", json=said, timeout=HANG).json()
    assert first["status"] == "completed"

    renewed = cluster.keystroke("scale", "up", "--echo", "--gateways", "2", "--replicas", "2", "--json")
    assert renewed.returncode == 0, renewed.stderr
    shown = json.loads(cluster.keystroke("scale", "status", "--json").stdout)
    assert {name: row["replicas"] for name, row in shown["deployments"].items()} == {
        "gateway": {"RUNNING": 2},
        "engine-echo": {"RUNNING": 2},
    }
    kept = httpx.get(f"{url}/v1/responses/{first['id']}", timeout=HANG).json()
    assert kept["output"] == first["output"]

    down = cluster.keystroke("scale", "down")
    assert down.returncode == 0, down.stderr
    with until("the end of the gateways") as wait:
        wait(lambda: not _listens(cluster.port))
    assert "does not run on this cluster" in cluster.keystroke("scale", "status").stderr


def test_where_nobody_listens_is_said_at_once(cluster: Cluster) -> None:
    nowhere = Cluster(f"127.0.0.1:{free_port()}", cluster.port, cluster.environ)
    done = nowhere.keystroke("scale", "status")
    assert (done.returncode, "check scale.address" in done.stderr) == (2, True)


def test_replicas_that_fit_nowhere_are_named_and_waited_for_no_longer_than_told(cluster: Cluster) -> None:
    told = {"KEYSTROKE_SCALE_GATEWAY_RESOURCE": "rack"}  # which no node has
    done = cluster.keystroke("scale", "up", "--echo", "--timeout", "8", **told)
    try:
        assert done.returncode != 0
        assert (
            "still waiting: a replica of gateway takes 1 rack, and a node has at most 0 rack" in done.stderr
        )
        assert "did not come up within 8 seconds" in done.stderr
        assert "Traceback" not in done.stderr
    finally:
        assert cluster.keystroke("scale", "down").returncode == 0
