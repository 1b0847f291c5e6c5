"""Confines a command with namespaces or Landlock, and takes its privileges and system calls away.

Runs as a program of its own (`python -I -S launcher.py SPEC COMMAND...`), so it imports only the standard
library; bubblewrap runs it inside. It confines itself first, then executes the command; a failing step ends
it with code 125 before the command runs. It remains the command's parent: it adopts orphans and kills them
when the command has ended. It is killed when the other end of its lifeline is closed, at any moment; a signal
on the parent's death would miss a parent that dies before it is asked for. The kind `none` confines nothing
and only does that; the kind `layers` mounts layers and becomes bubblewrap, which can then show them.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import fcntl
import json
import os
import resource
import signal
import socket
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
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP = 1, 4, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
# system calls without a function in libc; the numbers are the same on every architecture
_MOUNT_SETATTR, _LL_CREATE, _LL_ADD, _LL_RESTRICT = 442, 444, 445, 446
_SECCOMP_FILTER, _SECCOMP_NEW_LISTENER = 1, 1 << 3
_GET_FLAGS, _SET_FLAGS, _IS_UP = 0x8913, 0x8914, 1  # of a network interface
_SET_SIGNAL = 10  # fcntl: the signal that reports a descriptor's state

# Landlock's rights over files, by the version of its interface that knows them
_LL_EXECUTE, _LL_READ_FILE, _LL_READ_DIR = 1 << 0, 1 << 2, 1 << 3
_LL_FILE = 1 << 1 | _LL_EXECUTE | _LL_READ_FILE | 1 << 14 | 1 << 15  # what a rule for a single file may allow
_LL_READ = _LL_EXECUTE | _LL_READ_FILE | _LL_READ_DIR
_LL_CONNECT_TCP = 1 << 1
_LL_SCOPES = 0b11  # abstract sockets, signals


def main() -> None:
    argument, command = sys.argv[1], sys.argv[2:]
    if argument.startswith("@"):  # too long for an argument
        with open(argument[1:], encoding="utf-8") as file:
            argument = file.read()
        os.unlink(file.name)
    spec = json.loads(argument)
    try:
        if spec["kind"] == "layers":
            _unshare(_NEWNS)
            _mount_layers(spec)
            os.execv(command[0], command)
        _watch_lifeline(spec["lifeline"])
        _set_limits(spec)
        if spec["kind"] == "namespaces":
            _enter_namespaces(spec)
            child = os.fork()  # the first process of the new namespace, which no signal of a lifeline kills
            if child:
                _wait_for(child)
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            _check_lifeline(spec["lifeline"])
            _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV)
        else:
            _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "become a subreaper")
        if spec["kind"] != "none":
            _confine(spec)
        _check(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "keep the command from tracing its launcher")
        os.chdir(spec["cwd"])
    except (OSError, KeyError, ValueError) as error:
        os.write(2, f"keystroke: the sandbox failed: {error}\n".encode())
        os._exit(FAILED)
    child = os.fork()
    if child:
        _wait_for(child)
    _execute(command)


def _watch_lifeline(lifeline: int) -> None:
    """Have the kernel end this process when the other end is closed: kill it, even if it is stopped, or tell
    it, if it is the first of a namespace, which others can neither stop nor kill."""
    os.set_inheritable(lifeline, False)
    signal.signal(signal.SIGIO, lambda *_: os._exit(FAILED))
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, _SET_SIGNAL, signal.SIGIO if os.getpid() == 1 else signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    _check_lifeline(lifeline)


def _check_lifeline(lifeline: int) -> None:
    """End where the other end was closed before it could be watched."""
    with contextlib.suppress(BlockingIOError):
        os.read(lifeline, 1)
        os._exit(FAILED)


def _confine(spec: dict[str, Any]) -> None:
    """Give up privileges, files and system calls; hand over the descriptors that are served outside."""
    channel = socket.socket(fileno=spec["channel"])
    if spec["network"] and not spec["proxy"]:
        listener = socket.create_server(("127.0.0.1", 0))
        _use_proxy(f"http://127.0.0.1:{listener.getsockname()[1]}")
        socket.send_fds(channel, [b"p"], [listener.fileno()])
        listener.close()
    elif spec["network"]:
        _use_proxy(spec["proxy"])
    _drop_capabilities(spec["capset"])
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "give up new privileges")
    if spec["kind"] == "landlock":
        _apply_landlock(spec)
    notifier = _filter_calls(base64.b64decode(spec["filter"]), spec["seccomp"], spec["broker"])
    if notifier is not None:
        socket.send_fds(channel, [b"m"], [notifier])
        os.close(notifier)
    channel.close()


def _use_proxy(url: str) -> None:
    for name in ("http_proxy", "https_proxy"):
        os.environ[name] = os.environ[name.upper()] = url
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = "localhost,127.0.0.1,::1"
    os.environ["NODE_USE_ENV_PROXY"] = "1"


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


def _set_limits(spec: dict[str, Any]) -> None:
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


def _drop_capabilities(capset: int) -> None:
    for capability in range(64):
        if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break
    header = ctypes.create_string_buffer(struct.pack("=II", 0x20080522, 0))
    _check(_libc.syscall(capset, header, ctypes.create_string_buffer(24)), "drop capabilities")


def _filter_calls(code: bytes, seccomp: int, broker: bool) -> int | None:
    """Install a seccomp filter; returns its listener, where calls are handed to a broker."""
    filters = ctypes.create_string_buffer(code)
    head = ctypes.create_string_buffer(struct.pack("@HP", len(code) // 8, ctypes.addressof(filters)))
    flags = _SECCOMP_NEW_LISTENER if broker else 0
    result = _check(_libc.syscall(seccomp, _SECCOMP_FILTER, flags, head), "filter system calls")
    return result if broker else None


# ── namespaces ────────────────────────────────────────────────────────────────────────────────


def _unshare(flags: int) -> None:
    user, group = os.getuid(), os.getgid()
    if _libc.unshare(flags | _NEWUSER) == 0:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{user} {user} 1")
        _write("/proc/self/gid_map", f"{group} {group} 1")
    else:  # an administrator may do without a user namespace
        _check(_libc.unshare(flags), "make namespaces")
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)


def _mount_layers(spec: dict[str, Any]) -> None:
    """Mount an overlay at the root. Paths are given as descriptors, since commas and colons separate."""
    opened = {name: os.open(path, os.O_PATH) for name, path in spec["layers"].items()}
    options = "".join(f"{name}dir=/proc/self/fd/{descriptor}," for name, descriptor in opened.items())
    _mount("overlay", spec["root"], "overlay", _MS_NOSUID | _MS_NODEV, f"{options}userxattr,index=off")
    for descriptor in opened.values():
        os.close(descriptor)


def _enter_namespaces(spec: dict[str, Any]) -> None:
    _unshare(_NEWNS | _NEWPID | _NEWIPC | _NEWUTS | _NEWNET)
    _start_loopback()
    if spec["layers"]:
        _mount_layers(spec)
    # Kept open: the mounts below cover these paths.
    shown_from = [spec["root"], *spec["lent"], *spec["readonly"].values()]
    sources = {path: os.open(path, os.O_PATH) for path in shown_from}
    _set_readonly("/", True)
    for folder, size in spec["emptied"].items():
        _mount("tmpfs", folder, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={size},mode=1777")
    with contextlib.suppress(OSError):  # a home elsewhere is read-only
        os.makedirs(spec["home"], exist_ok=True)
    for path in spec["lent"]:
        _bind(sources[path], path)
        _set_readonly(path, True)
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


def _start_loopback() -> None:
    """A new network's loopback is down; programs that talk to themselves need it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = bytearray(struct.pack("16sH22x", b"lo", 0))
        fcntl.ioctl(control, _GET_FLAGS, request)
        _, flags = struct.unpack("16sH22x", request)
        fcntl.ioctl(control, _SET_FLAGS, struct.pack("16sH22x", b"lo", flags | _IS_UP))


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


# ── Landlock ──────────────────────────────────────────────────────────────────────────────────


def _apply_landlock(spec: dict[str, Any]) -> None:
    version = _check(_libc.syscall(_LL_CREATE, None, ctypes.c_size_t(0), 1), "use Landlock")
    rights = (1 << (13 if version < 2 else 14 if version < 3 else 15 if version < 5 else 16)) - 1
    attributes = struct.pack("=Q", rights)
    if version >= 4:
        attributes += struct.pack("=Q", _LL_CONNECT_TCP)
    elif spec["network"]:
        raise OSError("this kernel cannot limit the network of a command; run it without --network")
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
    if spec["network"]:
        port = ctypes.create_string_buffer(struct.pack("=QQ", _LL_CONNECT_TCP, spec["proxy_port"]))
        _check(_libc.syscall(_LL_ADD, rules, 2, port, 0), "allow the proxy")
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


if __name__ == "__main__":
    main()
