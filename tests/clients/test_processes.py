"""`keystroke ps` and `keystroke stop` on a real gateway, and removal that leaves nothing."""
# ruff: noqa: F811 - fixtures are imported by name

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli_home import PROGRAM, Home, home  # noqa: F401
from tiny_model import write_tiny_model

from keystroke.clients.local_gateway import running_gateways
from keystroke.clients.running import parse_ps, running_processes, stop_process, subcommand


def eventually(true: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def shared(home: Home) -> Iterator[Home]:
    write_tiny_model(home.root / "tiny", context=4096)
    home.configure('[model]\ndefault = "tiny"\n[models.tiny]\npath = "tiny"\n')
    (home.root / "a.py").write_text("x = 1\ny = \n")
    home.environment |= {"KEYSTROKE_SHARING_ENABLED": "1", "KEYSTROKE_SHARING_IDLE_S": "60"}
    yield home
    for one in running_gateways(home.root / "state"):
        stop_process(one.pid)


def own(home: Home) -> list[dict[str, object]]:
    """The rows of `keystroke ps` that belong to this test."""
    pids = {one.pid for one in running_gateways(home.root / "state")}
    return [row for row in json.loads(home.keystroke("ps", "--json").stdout) if row["pid"] in pids]


@pytest.mark.skipif(sys.platform == "win32", reason="processes are found over /proc or ps")
def test_a_gateway_is_shown_with_its_models_and_stop_leaves_nothing_of_it(shared: Home) -> None:
    shared.keystroke("complete", "a.py:2", "--max-tokens", "4")
    (row,) = own(shared)
    assert row["name"] == "gateway"
    assert row["models"] == ["tiny"]
    assert isinstance(row["memory_bytes"], int)
    assert row["memory_bytes"] > 10_000_000
    assert "nobody; ends when unused for 1 min" in str(row["used_by"])
    assert "tiny" in shared.keystroke("ps").stdout
    done = shared.keystroke("stop")
    assert f"stopped gateway (process {row['pid']}" in done.stderr
    assert not running_gateways(shared.root / "state")
    assert not list((shared.root / "state" / "gateways").iterdir())
    assert "nothing to stop" in shared.keystroke("stop").stderr
    assert "there is no process teapot" in shared.refused("stop", "teapot")


@pytest.mark.skipif(sys.platform == "win32", reason="processes are found over /proc or ps")
def test_removing_everything_ends_the_gateway_and_leaves_no_file(shared: Home) -> None:
    shared.keystroke("complete", "a.py:2", "--max-tokens", "4")
    (gateway,) = running_gateways(shared.root / "state")
    shared.keystroke("cache", "--clear", "--everything", "--yes")
    assert gateway.pid not in {one.pid for one in running_processes()}
    left = [p for p in (shared.root / "state").rglob("*") if p.is_file()]
    assert left == []
    assert not [p for p in (shared.root / "cache").rglob("*") if p.is_file()]


@pytest.mark.skipif(sys.platform == "win32", reason="processes are found over /proc or ps")
def test_a_gateway_whose_program_is_removed_ends_by_itself(home: Home, tmp_path: Path) -> None:
    copy = tmp_path / "site"
    source = Path(__file__).parents[2] / "src" / "keystroke"
    shutil.copytree(source, copy / "keystroke", ignore=shutil.ignore_patterns("__pycache__", "*.cu", "*.cuh"))
    start = f"import sys; sys.path.insert(0, {str(copy)!r}); from keystroke.clients.cli import main; main()"
    ready = tmp_path / "ready.json"
    command = [sys.executable, "-c", start, "serve", "--port", "0", "--idle-exit", "600", "--echo"]
    server = subprocess.Popen(
        [*command, "--announce", str(ready)],
        env=home.environment,
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
    )
    try:
        eventually(lambda: ready.exists() or server.poll() is not None)
        assert server.poll() is None
        shutil.rmtree(copy)
        assert server.wait(60) in (0, 130, -2)
        assert not ready.exists()
    finally:
        server.kill()
        server.wait()


@pytest.mark.skipif(sys.platform == "win32", reason="processes are found over /proc or ps")
def test_a_server_that_listens_where_it_was_told_is_shown_with_its_models(home: Home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "keystroke", "serve", "--echo", f"--port={port}"]
    server = subprocess.Popen(command, env=home.environment, cwd=home.root, stderr=subprocess.DEVNULL)

    def row() -> dict[str, object]:
        rows = json.loads(home.keystroke("ps", "--json").stdout)
        return next((row for row in rows if row["pid"] == server.pid), {})

    try:
        eventually(lambda: row().get("models") == ["echo"])
        assert row()["url"] == f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def test_only_command_lines_of_this_program_count() -> None:
    assert subcommand(["/usr/bin/python3", "/home/me/.local/bin/keystroke", "--quiet", "serve"]) == "serve"
    assert subcommand(["python", "-m", "keystroke", "--set", "a=b", "lsp"]) == "lsp"
    start = "from keystroke.clients.cli import main; main()"
    assert subcommand(["python", "-c", start, "serve", "--announce", "x"]) == "serve"
    assert subcommand(["/home/me/.local/bin/keystroke"]) == "tui"
    assert subcommand(["vim", "docs", "keystroke"]) is None
    assert subcommand(["grep", "-r", "keystroke", "."]) is None
    assert not stop_process(os.getppid())


def test_the_listing_of_a_system_without_proc_is_read() -> None:
    listing = (
        "  1     0     0   900 10-00:00:00 /sbin/launchd\n"
        " 40     1   501 12000    01:02:03 /Applications/Code.app/Code\n"
        " 41    40   501 90000       02:03 /usr/bin/python3 /usr/local/bin/keystroke lsp\n"
        " 42     1   501 2000000 1-00:00:01 python3 -c from keystroke.clients.cli import main; main() serve"
        " --announce /Users/me/Library/Application Support/keystroke/gateways/a.json\n"
        " 43     1   502 90000       02:03 /usr/local/bin/keystroke lsp\n"
    )
    server, gateway = parse_ps(listing, 501, 1_000_000.0)
    assert (server.pid, server.name, server.parent, server.started) == (41, "lsp", "Code", 1_000_000.0 - 123)
    assert (gateway.pid, gateway.name) == (42, "gateway")
    assert gateway.memory_bytes == 2000000 * 1024
    assert gateway.belongs_to(Path("/Users/me/Library/Application Support/keystroke"))
