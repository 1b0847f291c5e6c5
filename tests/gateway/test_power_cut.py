"""What the store has acknowledged survives a power cut at any moment.

The system calls of a program that stores responses are recorded. Then the power is cut after each of them: a
file holds what was synced before, and of its later writes either all or none. SQLite opens what is left.
"""

from __future__ import annotations

import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import pytest

PROGRAM = """
import asyncio, os, sys
from pathlib import Path
from keystroke.gateway.record.store import Store, default_url
from keystroke.protocol.response import Response

async def main():
    store = Store(default_url(Path(sys.argv[1])))
    acknowledged = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in range(8):
        for part in range(1 + number % 3):  # several in one commit
            made = Response(id=f"r{number}.{part}", created_at=1, model="m", status="completed")
            store.save_response("key", [], made)
        assert await store.flush()
        for part in range(1 + number % 3):
            os.write(acknowledged, f"r{number}.{part}\\n".encode())
    store.close()

asyncio.run(main())
"""
CALLS = "pwrite64,write,ftruncate,fsync,fdatasync"
LINE = re.compile(r"^\d+ +(\w+)\(\d+<([^>]*)>(?:, (.*))?")
DATA = re.compile(r'^"((?:\\x[0-9a-f]{2})*)"(\.\.\.)?, \d+(?:, (\d+))?')


@dataclass
class _File:
    now: bytearray = field(default_factory=bytearray)
    durable: bytes = b""

    def write(self, data: bytes, at: int) -> None:
        self.now.extend(bytes(max(0, at + len(data) - len(self.now))))
        self.now[at : at + len(data)] = data


def test_nothing_acknowledged_is_lost_wherever_the_power_is_cut(tmp_path: Path) -> None:
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("needs strace")
    folder, acknowledged, trace = tmp_path / "state", tmp_path / "acknowledged", tmp_path / "trace"
    folder.mkdir()
    command = [strace, "-f", "-y", "-xx", "-s", "200000", "-e", f"trace={CALLS}", "-o", str(trace)]
    here = Path(__file__).parent
    done = subprocess.run(
        [*command, sys.executable, "-c", PROGRAM, str(folder), str(acknowledged)],
        cwd=here, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    if "Operation not permitted" in done.stderr or "ptrace" in done.stderr:
        pytest.skip("processes cannot be traced here")
    assert done.returncode == 0, done.stderr
    files: dict[str, _File] = {"gateway.db": _File(), "gateway.db-wal": _File()}
    promised: list[str] = []
    cuts = 0
    for line in trace.read_text().splitlines():
        found = LINE.match(line)
        if found is None:
            continue
        call, path = found[1], found[2]
        if "\\x" in path:
            path = bytes.fromhex(path.replace("\\x", "")).decode()
        if path == str(acknowledged):
            data = DATA.match(found[3] or "")
            assert data is not None
            promised.append(bytes.fromhex(data[1].replace("\\x", "")).decode().strip())
        elif Path(path).name in files and Path(path).parent == folder:
            _apply(files[Path(path).name], call, found[3] or "")
        else:
            continue
        cuts += 1
        for written in ((), ("gateway.db",), ("gateway.db-wal",), tuple(files)):
            survivors = _survivors(files, tmp_path / "after", written)
            assert set(promised) <= survivors, f"lost after {line[:60]}, {written} written"
    assert len(promised) == 15
    assert cuts > 40


def _apply(file: _File, call: str, arguments: str) -> None:
    if call in ("fsync", "fdatasync"):
        file.durable = bytes(file.now)
    elif call == "ftruncate":
        size = int(arguments.split(")")[0].split()[0])
        del file.now[size:]
        file.now.extend(bytes(size - len(file.now)))
    else:
        data = DATA.match(arguments)
        assert data is not None, arguments[-80:]
        assert not data[2], "a write was cut in the trace"
        file.write(bytes.fromhex(data[1].replace("\\x", "")), int(data[3] or 0))


def _survivors(files: dict[str, _File], folder: Path, written: Collection[str]) -> set[str]:
    """The responses found after the cut; of the files in `written` what was not synced survived too."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, file in files.items():
        (folder / name).write_bytes(bytes(file.now) if name in written else file.durable)
    base = sqlite3.connect(folder / "gateway.db")
    try:
        return {identity for (identity,) in base.execute("SELECT id FROM responses")}
    except sqlite3.OperationalError:  # no table yet
        return set()
    finally:
        base.close()
