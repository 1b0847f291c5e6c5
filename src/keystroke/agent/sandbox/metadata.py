"""Changes modes, owners and times of files for commands in a sandbox that cannot mount.

Landlock controls neither chmod nor chown nor utime, so a seccomp filter hands these calls to this broker,
outside the sandbox. The broker opens the file itself, checks that it lies in a folder that the command may
write, and changes what it opened: the command cannot exchange the path in between. A call for any other
file fails with EPERM.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import select
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from keystroke.agent.sandbox.seccomp import BROKERED, this_architecture

_RECEIVE, _SEND, _IS_VALID = 0xC0502100, 0xC0182101, 0x40082102
_NOTIFICATION = struct.Struct("=QIIiIQ6Q")
_RESPONSE = struct.Struct("=QqiI")
_HERE, _NOFOLLOW, _EMPTY = -100, 0x100, 0x1000
_LONGEST = 4096  # bytes of a path

_libc = ctypes.CDLL(None, use_errno=True)


class MetadataBroker:
    """Serves the calls of one command. `serve` returns when the command's last process has ended."""

    def __init__(self, listener: int, folders: Sequence[Path]) -> None:
        self._listener = listener
        self._folders = [os.path.realpath(folder) for folder in folders]
        machine = this_architecture()
        self._names = {machine.number(name): name for name in BROKERED if machine.number(name)}

    def serve(self) -> None:
        ready = select.poll()
        ready.register(self._listener, select.POLLIN)
        while True:
            for _, event in ready.poll():
                if not event & select.POLLIN:
                    return
                with suppress(OSError):  # the process that asked has ended
                    self._answer()

    def _answer(self) -> None:
        buffer = bytearray(_NOTIFICATION.size)
        fcntl.ioctl(self._listener, _RECEIVE, buffer)
        call, pid, _, number, _, _, *arguments = _NOTIFICATION.unpack(buffer)
        error = 0
        try:
            self._perform(self._names[number], pid, arguments, call)
        except OSError as failure:
            error = failure.errno or errno.EPERM
        except (KeyError, ValueError):
            error = errno.EPERM
        fcntl.ioctl(self._listener, _SEND, _RESPONSE.pack(call, 0, -error, 0))

    def _perform(self, name: str, pid: int, arguments: list[int], call: int) -> None:
        folder, path, rest, flags = _locate(name, arguments)
        data = b"" if path == 0 else _read_text(pid, path)
        times = _times(name, pid, rest[0]) if "utime" in name or name == "futimesat" else b""
        target = _open(pid, folder, data, flags)
        try:
            fcntl.ioctl(self._listener, _IS_VALID, struct.pack("=Q", call))  # OSError: `pid` is another now
            if not self._may_change(target):
                raise PermissionError(errno.EPERM, "outside the workspace")
            if "chmod" in name:
                os.chmod(f"/proc/self/fd/{target}", rest[0] & 0o3777)  # never setuid
            elif "chown" in name:
                user, group = _signed(rest[0]), _signed(rest[1])
                if user not in (-1, os.getuid()) or group not in (-1, os.getgid(), *os.getgroups()):
                    raise PermissionError(errno.EPERM, "not the owner")
                _check(_libc.fchownat(target, b"", user, group, _EMPTY))
            else:
                _check(_libc.utimensat(target, b"", times or None, _EMPTY))
        finally:
            os.close(target)

    def _may_change(self, target: int) -> bool:
        path = os.readlink(f"/proc/self/fd/{target}")
        return any(path == folder or path.startswith(f"{folder}/") for folder in self._folders)


def _locate(name: str, arguments: list[int]) -> tuple[int, int, list[int], int]:
    """Where the call's folder, path, further arguments and flags are. A path of 0: the folder is meant."""
    if name in ("fchmod", "fchown"):
        return _signed(arguments[0]), 0, arguments[1:], 0
    if name in ("chmod", "chown", "lchown", "utime", "utimes"):
        return _HERE, arguments[0], arguments[1:], _NOFOLLOW if name == "lchown" else 0
    last = {"fchmodat2": 3, "fchownat": 4, "utimensat": 3}.get(name)
    return _signed(arguments[0]), arguments[1], arguments[2:], 0 if last is None else arguments[last]


def _open(pid: int, folder: int, path: bytes, flags: int) -> int:
    """The file that the process means, as a descriptor of this process."""
    base = f"/proc/{pid}/cwd" if folder == _HERE else f"/proc/{pid}/fd/{folder}"
    if not path:
        if folder == _HERE and not flags & _EMPTY:
            raise FileNotFoundError(errno.ENOENT, "no path")
        return os.open(base, os.O_PATH | os.O_CLOEXEC)
    for alias in (b"/proc/self/", b"/proc/thread-self/", b"/dev/fd/"):  # the process's own, not ours
        if path.startswith(alias):
            path = b"/proc/%d/%s" % (pid, (b"fd/" if alias == b"/dev/fd/" else b"") + path[len(alias) :])
    nofollow = os.O_NOFOLLOW if flags & _NOFOLLOW else 0
    if path.startswith(b"/"):
        return os.open(path, os.O_PATH | os.O_CLOEXEC | nofollow)
    start = os.open(base, os.O_PATH | os.O_CLOEXEC)
    try:
        return os.open(path, os.O_PATH | os.O_CLOEXEC | nofollow, dir_fd=start)
    finally:
        os.close(start)


def _times(name: str, pid: int, address: int) -> bytes:
    """The two times as `utimensat` takes them; empty for now."""
    if not address:
        return b""
    if name == "utimensat":
        return _read(pid, address, 32)
    if name == "utime":
        access, change = struct.unpack("=qq", _read(pid, address, 16))
        return struct.pack("=4q", access, 0, change, 0)
    access, micro, change, micro_change = struct.unpack("=4q", _read(pid, address, 32))
    return struct.pack("=4q", access, micro * 1000, change, micro_change * 1000)


def _read(pid: int, address: int, size: int) -> bytes:
    memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(memory, size, address)
    finally:
        os.close(memory)


def _read_text(pid: int, address: int) -> bytes:
    """A path; read by pages, since the next one may not be mapped."""
    found = b""
    while len(found) < _LONGEST:
        part = _read(pid, address + len(found), 4096 - (address + len(found)) % 4096)
        head, end, _ = part.partition(b"\0")
        found += head
        if end:
            return found
        if not part:
            raise OSError(errno.EFAULT, "no path")
    raise OSError(errno.ENAMETOOLONG, "a path that is too long")


def _signed(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def _check(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
