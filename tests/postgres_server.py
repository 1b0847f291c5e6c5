"""A Postgres server for tests."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from bench.free_port import free_port


@contextmanager
def postgres_server() -> Iterator[str]:
    """A Postgres server of this test's own, where one is installed."""
    pytest.importorskip("psycopg", reason="the Postgres driver is not installed")
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl"))
    if not programs:
        pytest.skip("no Postgres server is installed here")
    owner = None
    if os.geteuid() == 0:  # which the server refuses to run as
        try:
            owner = pwd.getpwnam("postgres").pw_uid
        except KeyError:
            pytest.skip("no user to run a Postgres server as")
    folder = Path(tempfile.mkdtemp(prefix="keystroke-pg-"))
    folder.chmod(0o777)
    port = free_port()
    data, bin_ = folder / "data", programs[-1].parent
    options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
    start = [str(bin_ / "pg_ctl"), "-D", str(data), "-w", "-l", str(folder / "log"), "-o", options, "start"]
    try:
        make = [str(bin_ / "initdb"), "-D", str(data), "-U", "keystroke", "-A", "trust"]
        subprocess.run(make, check=True, capture_output=True, timeout=120, user=owner, cwd=folder)
        subprocess.run(start, check=True, stdout=subprocess.DEVNULL, timeout=120, user=owner, cwd=folder)
        yield f"postgresql://keystroke@127.0.0.1:{port}/postgres"
    finally:
        stop = [str(bin_ / "pg_ctl"), "-D", str(data), "-m", "immediate", "stop"]
        subprocess.run(stop, check=False, capture_output=True, timeout=60, user=owner, cwd=folder)
        shutil.rmtree(folder, ignore_errors=True)
