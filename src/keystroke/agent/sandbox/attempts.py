"""Attempts of a command to reach beyond its sandbox: `python -I -S -c THIS TARGETS`, with targets as JSON.

Writes the names of those that succeeded into `result` in the workspace, as a JSON list. Effects that are
visible only from outside (a file that was written, a process that was killed) are checked by `probe.py`.
Imports only the standard library.
"""

from __future__ import annotations

import ctypes
import glob
import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)


def attempts(target: dict[str, Any]) -> dict[str, Callable[[], bool]]:
    """Every attempt by its name. Each returns whether it succeeded, or raises."""
    shown, workspace, victim = target["shown"], target["workspace"], int(target["victim"])

    def done(function: Callable[..., object], *arguments: Any) -> bool:
        function(*arguments)
        return True

    def tried(function: Callable[..., object], *arguments: Any) -> bool:
        function(*arguments)
        return False  # seen from outside

    def write(path: str) -> bool:
        with open(path, "w") as file:
            file.write("written from inside")
        return False  # seen from outside

    def write_through_link() -> bool:
        os.symlink(shown, f"{workspace}/link")
        return write(f"{workspace}/link/through-link")

    def read_secret() -> bool:
        with open(target["secret"]) as file:
            return str(target["mark"]) in file.read()

    def read_environment() -> bool:
        for path in glob.glob("/proc/[0-9]*/environ"):
            try:
                with open(path, "rb") as file:
                    if str(target["mark"]).encode() in file.read():
                        return True
            except OSError:
                continue
        return False

    def read_memory() -> bool:
        with open(f"/proc/{target['victim']}/environ", "rb") as file:
            own = str(target["mark"]).encode() not in file.read()
        if own:
            return False  # a process of this sandbox with the same number
        with open(f"/proc/{target['victim']}/mem", "rb"):
            return True

    def connect(family: int, address: Any) -> bool:
        with socket.socket(family, socket.SOCK_STREAM) as client:
            client.settimeout(2)
            client.connect(address)
            return True

    def send_datagram() -> bool:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.sendto(b"from inside", ("127.0.0.1", target["udp"]))
        return False  # seen from outside

    def open_socket(family: int, kind: int) -> bool:
        socket.socket(family, kind).close()
        return True

    def lift(limit: int) -> bool:
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.setrlimit(limit, unlimited)
        return True

    def status(field: str, expected: int) -> bool:
        with open("/proc/self/status") as file:
            values = dict(line.split(":", 1) for line in file if ":" in line)
        return int(values[field], 16) != expected

    def call(name: str, *arguments: Any) -> bool:
        return int(getattr(_libc, name)(*arguments)) >= 0

    def kill() -> bool:
        if victim not in (os.getpid(), os.getppid()):
            os.kill(victim, signal.SIGKILL)
        return False  # seen from outside

    def mount() -> bool:
        place = f"{workspace}/mounted"
        os.mkdir(place)
        return call("mount", b"none", place.encode(), b"tmpfs", 0, None) and call(
            "umount2", place.encode(), 2
        )

    def set_clock() -> bool:
        time.clock_settime(time.CLOCK_REALTIME, time.time())
        return True

    def type_into_terminal() -> bool:
        import fcntl

        terminal, _ = os.openpty()
        fcntl.ioctl(terminal, 0x5412, b"x")
        return True

    def open_disk() -> bool:
        for path in (*glob.glob("/dev/[svx]d[a-z]"), *glob.glob("/dev/nvme*n1"), "/dev/mem", "/dev/kmsg"):
            try:
                os.close(os.open(path, os.O_RDONLY))
            except OSError:
                continue
            return True
        return False

    return {
        "file: create outside": lambda: write(f"{shown}/created"),
        "file: overwrite outside": lambda: write(f"{shown}/file"),
        "file: write through a link": write_through_link,
        "file: remove outside": lambda: tried(os.unlink, f"{shown}/removable"),
        "file: move outside": lambda: tried(os.rename, f"{shown}/movable", f"{shown}/moved"),
        "file: link into the workspace": lambda: done(os.link, f"{shown}/file", f"{workspace}/hard"),
        "file: read a home": read_secret,
        "metadata: mode": lambda: tried(os.chmod, f"{shown}/file", 0o777),
        "metadata: by descriptor": lambda: tried(os.fchmod, os.open(f"{shown}/other", os.O_RDONLY), 0o777),
        "metadata: owner": lambda: done(os.chown, f"{shown}/file", os.getuid(), os.getgid()),
        "metadata: times": lambda: tried(os.utime, f"{shown}/file", (1, 1)),
        "metadata: attributes": lambda: done(os.setxattr, f"{shown}/file", "user.x", b"1"),
        "process: environment": read_environment,
        "process: memory": read_memory,
        "process: trace": lambda: call("ptrace", 16, victim, 0, 0),
        "process: signal": kill,
        "network: loopback": lambda: connect(socket.AF_INET, ("127.0.0.1", target["tcp"])),
        "network: datagram": send_datagram,
        "socket: by path": lambda: connect(socket.AF_UNIX, f"{shown}/socket"),
        "socket: abstract": lambda: connect(socket.AF_UNIX, "\0" + target["mark"]),
        "socket: virtual machine": lambda: open_socket(40, socket.SOCK_STREAM),
        "socket: packets": lambda: open_socket(17, socket.SOCK_RAW),
        "socket: crypto": lambda: open_socket(38, socket.SOCK_SEQPACKET),
        "device: disk": open_disk,
        "device: create": lambda: done(os.mknod, f"{workspace}/device", 0o60666, os.makedev(8, 0)),
        "device: terminal": type_into_terminal,
        "privilege: capabilities": lambda: status("CapEff", 0),
        "privilege: new privileges": lambda: status("NoNewPrivs", 1),
        "privilege: system calls": lambda: status("Seccomp", 2),
        "privilege: mount": mount,
        "privilege: host name": lambda: call("sethostname", *_same_name()),
        "privilege: key ring": lambda: int(_libc.syscall(_keyctl(), 0, -4, 1, 0, 0)) >= 0,
        "time: set the clock": set_clock,
        "memory: lift the limit": lambda: lift(resource.RLIMIT_DATA),
        "disk: lift the limit": lambda: lift(resource.RLIMIT_FSIZE),
        "privilege: user namespace": lambda: call("unshare", 0x10000000),
    }


def _same_name() -> tuple[bytes, int]:
    name = os.uname().nodename.encode()
    return name, len(name)


def _keyctl() -> int:
    return 219 if os.uname().machine == "aarch64" else 250


def main() -> None:
    target = json.loads(sys.argv[1])
    succeeded = []
    for name, attempt in attempts(target).items():
        try:
            if attempt():
                succeeded.append(name)
        except (OSError, ValueError, AttributeError, KeyError):
            continue
    with open(f"{target['workspace']}/result", "w") as file:
        json.dump(succeeded, file)


if __name__ == "__main__":
    main()
