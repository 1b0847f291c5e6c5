"""Confines a command with namespaces or Landlock, by system calls, where no tool does it.

Runs as a program of its own (`python -I -S launcher.py SPEC COMMAND...`), so it imports only the standard
library. It confines itself first, then executes the command; a failing step ends it with code 125 before
the command runs. It remains the command's parent: it adopts orphans and kills them when the command has
ended. The kind `none` confines nothing and only does that.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys
from typing import Any, NoReturn

FAILED = 125
_libc = ctypes.CDLL(None, use_errno=True)

# clone flags
_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = (
    0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
# mount flags
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000
_AT_FDCWD, _AT_RECURSIVE, _ATTR_RDONLY = -100, 0x8000, 0x1
# prctl
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = (
    1, 22, 24, 36, 38,
)  # fmt: skip
# system calls without a function in libc; the numbers are the same on every architecture
_MOUNT_SETATTR, _LL_CREATE, _LL_ADD, _LL_RESTRICT, _IO_URING_SETUP = 442, 444, 445, 446, 425
_ARCHITECTURES = {"x86_64": (0xC000003E, 41, 126), "aarch64": (0xC00000B7, 198, 91)}  # audit, socket, capset

# Landlock's rights over files, by the version of its interface that knows them
_LL_EXECUTE, _LL_READ_FILE, _LL_READ_DIR = 1 << 0, 1 << 2, 1 << 3
_LL_FILE = 1 << 1 | _LL_EXECUTE | _LL_READ_FILE | 1 << 14 | 1 << 15  # what a rule for a single file may say
_LL_READ = _LL_EXECUTE | _LL_READ_FILE | _LL_READ_DIR
_LL_SCOPES = 0b11  # abstract sockets, signals


def main() -> None:
    given, command = sys.argv[1], sys.argv[2:]
    if given.startswith("@"):  # too long for an argument
        with open(given[1:], encoding="utf-8") as file:
            given = file.read()
        os.unlink(file.name)
    spec = json.loads(given)
    try:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _limit(spec)
        if spec["kind"] == "namespaces":
            _enter_namespaces(spec)
            child = os.fork()  # the first process of the new namespace
            if child:
                _wait_for(child)
            _finish_namespaces(spec)
        else:
            _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "become a subreaper")
        if spec["kind"] == "landlock":
            _no_new_privileges()
            _landlock(spec)
            if not spec["network"]:
                _deny_sockets(unix=spec["unix"])
        os.chdir(spec["cwd"])
    except (OSError, KeyError, ValueError) as error:
        os.write(2, f"keystroke: the sandbox failed: {error}\n".encode())
        os._exit(FAILED)
    child = os.fork()
    if child:
        _wait_for(child)
    _execute(command)


def _execute(command: list[str]) -> NoReturn:
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"keystroke: {command[0]} cannot be run: {error.strerror}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _wait_for(child: int) -> NoReturn:
    """Reap until the command has ended, kill what it left, and exit as it did."""
    code = 0
    while True:
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            break
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            break
    _kill_rest()
    os._exit(code if code >= 0 else 128 - code)


def _kill_rest() -> None:
    """Kill remaining processes. In a namespace the kernel does so when its first process ends."""
    if os.getpid() == 1:
        return
    for _ in range(50):
        mine = _children_of(os.getpid())
        if not mine:
            return
        for pid in mine:
            os.kill(pid, signal.SIGKILL)
        for pid in mine:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children_of(parent: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    stat = file.read()
            except OSError:
                continue
            if int(stat[stat.rindex(b")") + 2 :].split()[1]) == parent:
                found.append(int(name))
    return found


def _limit(spec: dict[str, Any]) -> None:
    for kind, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, spec["file"]),
        (resource.RLIMIT_DATA, spec["memory"]),
        (resource.RLIMIT_NPROC, spec["processes"]),
    ):
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot {what}: {os.strerror(number)}")
    return result


def _no_new_privileges() -> None:
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "give up new privileges")


# ── namespaces ────────────────────────────────────────────────────────────────────────────────


def _enter_namespaces(spec: dict[str, Any]) -> None:
    user, group = os.getuid(), os.getgid()
    flags = _NEWUSER | _NEWNS | _NEWPID | _NEWIPC | _NEWUTS | (0 if spec["network"] else _NEWNET)
    _check(_libc.unshare(flags), "make namespaces")
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{user} {user} 1")
    _write("/proc/self/gid_map", f"{group} {group} 1")
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    # Kept open: the mounts below cover these paths.
    sources = {path: os.open(path, os.O_PATH) for path in [spec["root"], *spec["readonly"].values()]}
    _set_readonly("/", True)
    for folder in spec["emptied"]:
        _mount("tmpfs", folder, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={spec['scratch_bytes']},mode=1777")
    _bind(sources[spec["root"]], spec["seen"])
    _set_readonly(spec["seen"], False)
    for shown, real in spec["readonly"].items():
        _bind(sources[real], shown)
        _set_readonly(shown, True)
    for hidden in spec["hidden"]:
        if os.path.isdir(hidden):
            _mount("tmpfs", hidden, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=4096,mode=700")
        elif os.path.lexists(hidden):  # a mount above may have covered it already
            _mount("/dev/null", hidden, None, _MS_BIND)
    for descriptor in sources.values():
        os.close(descriptor)


def _finish_namespaces(spec: dict[str, Any]) -> None:
    """In the first process of the new namespace: mount /proc, then drop all privileges."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV)
    _no_new_privileges()
    for capability in range(64):
        if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break
    header = struct.pack("=II", 0x20080522, 0)
    _check(
        _libc.syscall(
            _architecture()[2], ctypes.create_string_buffer(header), ctypes.create_string_buffer(24)
        ),
        "drop capabilities",
    )


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    _check(
        _libc.mount(
            source.encode(),
            target.encode(),
            kind.encode() if kind else None,
            ctypes.c_ulong(flags),
            data.encode() if data else None,
        ),
        f"mount {target}",
    )


def _bind(descriptor: int, target: str) -> None:
    source = f"/proc/self/fd/{descriptor}"
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    elif not os.path.exists(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o600))
    _mount(source, target, None, _MS_BIND | _MS_REC)


def _set_readonly(path: str, wanted: bool) -> None:
    attributes = struct.pack("=QQQQ", _ATTR_RDONLY * wanted, _ATTR_RDONLY * (not wanted), 0, 0)
    buffer = ctypes.create_string_buffer(attributes)
    _check(
        _libc.syscall(
            _MOUNT_SETATTR, _AT_FDCWD, path.encode(), _AT_RECURSIVE, buffer, ctypes.c_size_t(len(attributes))
        ),
        f"change {path}",
    )


def _architecture() -> tuple[int, int, int]:
    try:
        return _ARCHITECTURES[platform.machine()]
    except KeyError:
        raise OSError(f"{platform.machine()} is not an architecture this sandbox knows") from None


# ── Landlock ──────────────────────────────────────────────────────────────────────────────────


def _landlock(spec: dict[str, Any]) -> None:
    version = _check(_libc.syscall(_LL_CREATE, None, ctypes.c_size_t(0), 1), "use Landlock")
    rights = (1 << (13 if version < 2 else 14 if version < 3 else 15 if version < 5 else 16)) - 1
    attributes = struct.pack("=Q", rights)
    if version >= 4:
        attributes += struct.pack("=Q", 0)  # seccomp closes the network, UDP included
    if version >= 6:
        attributes += struct.pack("=Q", _LL_SCOPES)
    buffer = ctypes.create_string_buffer(attributes)
    rules = _check(
        _libc.syscall(_LL_CREATE, buffer, ctypes.c_size_t(len(attributes)), 0), "make Landlock rules"
    )
    for path in spec["readable"]:
        _allow(rules, path, _LL_READ & rights)
    for path in spec["writable"]:
        _allow(rules, path, rights)
    _check(_libc.syscall(_LL_RESTRICT, rules, 0), "apply Landlock rules")
    os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH)
    except OSError:
        return  # it does not exist or is unreachable: nothing is allowed there
    try:
        if not os.path.isdir(f"/proc/self/fd/{descriptor}"):
            rights &= _LL_FILE
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, descriptor))
        _check(_libc.syscall(_LL_ADD, rules, 1, rule, 0), f"allow {path}")
    finally:
        os.close(descriptor)


def _deny_sockets(*, unix: bool) -> None:
    """Install a seccomp filter: `socket` fails with EACCES, except `AF_UNIX` where that reaches nothing;
    io_uring, which could open sockets unseen, and system calls of other architectures fail too."""
    audit, socket, _ = _architecture()
    load, equal, above, done = 0x20, 0x15, 0x35, 0x06
    refuse, missing, allow = 0x00050000 | 13, 0x00050000 | 38, 0x7FFF0000
    family = 1 if unix else 0xFFFFFFFF
    program = [
        (load, 0, 0, 4),  # architecture
        (equal, 0, 7, audit),
        (load, 0, 0, 0),  # number of the system call
        (above, 5, 0, 0x40000000),  # x32
        (equal, 4, 0, _IO_URING_SETUP),
        (equal, 0, 4, socket),
        (load, 0, 0, 16),  # its first argument, the family
        (equal, 2, 0, family),
        (done, 0, 0, refuse),
        (done, 0, 0, missing),
        (done, 0, 0, allow),
    ]
    code = b"".join(struct.pack("=HBBI", *line) for line in program)
    filters = ctypes.create_string_buffer(code)
    head = struct.pack("@HP", len(program), ctypes.addressof(filters))
    _check(_libc.prctl(_PR_SET_SECCOMP, 2, ctypes.create_string_buffer(head), 0, 0), "filter system calls")


if __name__ == "__main__":
    main()
