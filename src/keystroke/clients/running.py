"""Finds the Keystroke processes of this user, and ends them.

Reads /proc where there is one and asks the system's `ps` elsewhere. A process counts if its command line runs
this program; before a signal is sent, that is checked again, because process ids are reused.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from keystroke.clients.local_gateway import process_exists

_PROC = Path("/proc")
_MODULE = "keystroke.clients.cli import main"
_FLAGS_WITH_VALUE = ("--config", "--set")
_ANNOUNCE = "--announce"  # the last option of a shared gateway's command line
GATEWAY = "gateway"


@dataclass(frozen=True, slots=True)
class RunningProcess:
    """`command` is the subcommand (serve, lsp, ...); `parent` is the name of the program that started it. A
    shared gateway has an announcement file."""

    pid: int
    command: str
    memory_bytes: int
    started: float
    parent: str = ""
    announcement: Path | None = None
    arguments: tuple[str, ...] = ()  # of its command line

    @property
    def name(self) -> str:
        return self.command if self.announcement is None else GATEWAY

    def option(self, name: str) -> str | None:
        """The value of an option on its command line."""
        for place, argument in enumerate(self.arguments):
            if argument == name and place + 1 < len(self.arguments):
                return self.arguments[place + 1]
            if argument.startswith(f"{name}="):
                return argument.partition("=")[2]
        return None

    def belongs_to(self, state: Path) -> bool:
        """Whether it is a shared gateway of this state folder."""
        return self.announcement is not None and self.announcement.parent.parent == state


def running_processes() -> list[RunningProcess]:
    """The Keystroke processes of this user but this one, the oldest first."""
    found = _from_proc() if (_PROC / "self").exists() else _from_ps()
    return sorted((one for one in found if one.pid != os.getpid()), key=lambda one: one.started)


def stop_process(pid: int) -> bool:
    """Terminate a process, kill it if it runs after 15 seconds, and delete the files of a gateway. False if
    it is no longer a Keystroke process, or the system refuses."""
    one = next((found for found in running_processes() if found.pid == pid), None)
    if one is None:
        return False
    try:
        os.kill(pid, signal.SIGTERM)
        if not _wait_for_end(pid, 15.0):
            os.kill(pid, signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)
            _wait_for_end(pid, 5.0)
    except ProcessLookupError:
        pass
    except OSError:
        return False
    if one.announcement is not None:
        for ending in (".json", ".log", ".lock"):
            with suppress(OSError):
                one.announcement.with_suffix(ending).unlink()
    return True


def _wait_for_end(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while process_exists(pid) and not _is_zombie(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _is_zombie(pid: int) -> bool:
    """Whether the process has ended and only waits for its parent to notice; its memory is free."""
    with suppress(OSError, IndexError):
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return False


def subcommand(arguments: Sequence[str]) -> str | None:
    """The subcommand that a command line runs; None if it does not run Keystroke."""
    for place, argument in enumerate(arguments[:6]):
        by_name = Path(argument).name in ("keystroke", "keystroke.exe") and place < 2
        by_module = place > 0 and argument == "keystroke" and arguments[place - 1] == "-m"
        by_code = place > 0 and arguments[place - 1] == "-c" and _MODULE in argument
        if by_name or by_module or by_code:
            return _first_word(arguments[place + 1 :])
    return None


def _first_word(arguments: Sequence[str]) -> str:
    place = 0
    while place < len(arguments):
        if arguments[place] in _FLAGS_WITH_VALUE:
            place += 2
        elif arguments[place].startswith("-"):
            place += 1
        else:
            return arguments[place]
    return "tui"


def _from_proc() -> list[RunningProcess]:
    found = []
    for folder in _PROC.glob("[0-9]*"):
        try:
            facts = folder.stat()
            if facts.st_uid != os.getuid():
                continue
            raw = (folder / "cmdline").read_bytes()
            arguments = [part.decode(errors="replace") for part in raw.split(b"\0")[:-1]]
            command = subcommand(arguments)
            if command is None:
                continue
            pages = int((folder / "statm").read_text().split()[1])
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            name = (_PROC / parent / "comm").read_text().strip() if (_PROC / parent).exists() else ""
        except (OSError, ValueError, IndexError):
            continue  # it has ended meanwhile
        memory, pid = pages * os.sysconf("SC_PAGE_SIZE"), int(folder.name)
        file = Path(arguments[arguments.index(_ANNOUNCE) + 1]) if _ANNOUNCE in arguments[:-1] else None
        found.append(RunningProcess(pid, command, memory, facts.st_mtime, name, file, tuple(arguments)))
    return found


def _from_ps() -> list[RunningProcess]:
    query = ["ps", "-A", "-o", "pid=,ppid=,uid=,rss=,etime=,args="]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_ps(done.stdout, os.getuid(), time.time())


def parse_ps(listing: str, user: int, now: float) -> list[RunningProcess]:
    """The Keystroke processes in the output of `ps -A -o pid=,ppid=,uid=,rss=,etime=,args=`."""
    rows = [line.split(None, 5) for line in listing.splitlines()]
    names = {row[0]: Path(row[5].split()[0]).name for row in rows if len(row) == 6}
    found = []
    for row in rows:
        if len(row) < 6 or row[2] != str(user):
            continue
        pid, parent, _, memory, age, command_line = row
        # `ps` joins the arguments, so those of `python -c CODE` cannot be told apart: the code is one piece.
        arguments = command_line.split()
        command = subcommand(arguments)
        if command is None and _MODULE in command_line:
            command = "serve"
        if command is not None:
            started = now - _seconds(age)
            _, announces, rest = command_line.partition(f" {_ANNOUNCE} ")
            file = Path(rest) if announces else None
            size = int(memory) * 1024
            by = names.get(parent, "")
            found.append(RunningProcess(int(pid), command, size, started, by, file, tuple(arguments)))
    return found


def _seconds(age: str) -> float:
    """The seconds of `ps`'s [[days-]hours:]minutes:seconds."""
    days, _, rest = age.rpartition("-")
    total = 0
    for part in rest.split(":"):
        total = total * 60 + int(part)
    return total + int(days or 0) * 86400
