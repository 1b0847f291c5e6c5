"""Builds the seccomp filters that every sandbox of Linux installs before a command starts.

A filter refuses system calls that no build or test needs and that reach beyond the sandbox: mounting, new
namespaces, other processes' memory, kernel modules, keys, the clock, sockets of unusual families. Calls of
another architecture fail. Where a sandbox cannot mount, calls that change the metadata of a file are handed
to a broker (`metadata.py`), because Landlock does not control them.
"""

from __future__ import annotations

import platform
import struct
from dataclasses import dataclass

# Each table: name: number on x86_64, number on aarch64 (0: the architecture has no such call)
_INSPECTED = {
    "socket": (41, 198), "ioctl": (16, 29), "clone": (56, 220), "unshare": (272, 97), "sendto": (44, 206),
    "sendmsg": (46, 211), "sendmmsg": (307, 269),
}  # fmt: skip
_REFUSED = {
    # mounts and namespaces
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "setns": (308, 268), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    # other processes
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    # the kernel and the machine
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225),
    "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443, 443), "syslog": (103, 116),
    "iopl": (172, 0), "ioperm": (173, 0), "vhangup": (153, 58), "fanotify_init": (300, 262),
    "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264),
    "sethostname": (170, 161), "setdomainname": (171, 162),
    # the clock
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    # keys of the session
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
}  # fmt: skip
_MISSING = {  # callers use older calls; io_uring could make others unseen
    "clone3": (435, 435), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
}  # fmt: skip
BROKERED = {
    "chmod": (90, 0), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, 0),
    "fchown": (93, 55), "lchown": (94, 0), "fchownat": (260, 54), "utime": (132, 0), "utimes": (235, 0),
    "futimesat": (261, 0), "utimensat": (280, 88),
}  # fmt: skip
_UNSUPPORTED = {
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "removexattrat": (466, 466), "file_setattr": (469, 469),
}  # fmt: skip
_CALLS = _INSPECTED | _REFUSED | _MISSING | BROKERED | _UNSUPPORTED
_NAMESPACE_FLAGS = 0x7E020000
_MSG_FASTOPEN = 0x20000000  # connects without the call that Landlock controls
# TIOCSTI and TIOCLINUX type into a terminal; the others change attributes of files
_IOCTLS = (0x5412, 0x541C, 0x40086602, 0x401C5820)
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16

_LOAD, _AND, _EQUAL, _ABOVE, _ANY, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_ALLOW, _NOTIFY, _ERROR = 0x7FFF0000, 0x7FC00000, 0x00050000
_EPERM, _ENOSYS, _ENOTSUP, _EAFNOSUPPORT = 1, 38, 95, 97

Line = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Architecture:
    """The numbers of one architecture."""

    audit: int  # how the kernel names it
    column: int
    capset: int
    seccomp: int

    def number(self, name: str) -> int:
        return _CALLS[name][self.column]


_ARCHITECTURES = {
    "x86_64": Architecture(0xC000003E, 0, 126, 317),
    "aarch64": Architecture(0xC00000B7, 1, 91, 277),
}


def this_architecture() -> Architecture:
    """The architecture of this machine. OSError where its system calls are not known."""
    try:
        return _ARCHITECTURES[platform.machine()]
    except KeyError:
        raise OSError(f"{platform.machine()} is not an architecture that the sandbox knows") from None


def build_filter(machine: Architecture, *, own_network: bool, tcp: bool, broker: bool) -> bytes:
    """A filter as the kernel takes it. With `own_network` the command has a network and files of its own, so
    internet and Unix sockets are allowed; without, only TCP sockets, where `tcp`. `broker` hands calls that
    change metadata to a broker."""
    program: list[Line] = [
        (_LOAD, 0, 0, 4),  # architecture
        (_EQUAL, 1, 0, machine.audit),
        (_RETURN, 0, 0, _ERROR | _ENOSYS),
        (_LOAD, 0, 0, 0),  # number of the call
        (_ABOVE, 0, 1, 0x40000000),  # x32
        (_RETURN, 0, 0, _ERROR | _ENOSYS),
    ]

    def on(name: str, block: list[Line]) -> None:
        if machine.number(name):
            program.append((_EQUAL, 0, len(block), machine.number(name)))
            program.extend(block)

    families = (_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK) if own_network else ()
    on("socket", _socket_rules(families, tcp=tcp and not own_network))
    refused = [line for code in _IOCTLS for line in ((_EQUAL, 0, 1, code), _fail(_EPERM))]
    on("ioctl", [(_LOAD, 0, 0, 24), *refused, _allow()])
    for name in ("clone", "unshare"):
        on(name, _fail_if_any(0, _NAMESPACE_FLAGS))
    if not own_network:
        for name, argument in (("sendto", 3), ("sendmsg", 2), ("sendmmsg", 3)):
            on(name, _fail_if_any(argument, _MSG_FASTOPEN))
    for name in _REFUSED:
        on(name, [_fail(_EPERM)])
    for name in _MISSING:
        on(name, [_fail(_ENOSYS)])
    if broker:
        for name in BROKERED:
            on(name, [(_RETURN, 0, 0, _NOTIFY)])
        for name in _UNSUPPORTED:
            on(name, [_fail(_ENOTSUP)])
    program.append(_allow())
    return b"".join(struct.pack("=HBBI", *line) for line in program)


def _socket_rules(families: tuple[int, ...], *, tcp: bool) -> list[Line]:
    block: list[Line] = [(_LOAD, 0, 0, 16)]  # family
    for family in families:
        block += [(_EQUAL, 0, 1, family), _allow()]
    if not tcp:
        return [*block, _fail(_EAFNOSUPPORT)]
    return [
        *block,
        (_EQUAL, 2, 0, _AF_INET),
        (_EQUAL, 1, 0, _AF_INET6),
        _fail(_EAFNOSUPPORT),
        (_LOAD, 0, 0, 24),  # type, without its flags
        (_AND, 0, 0, 0xF),
        (_EQUAL, 1, 0, 1),
        _fail(_EAFNOSUPPORT),
        (_LOAD, 0, 0, 32),  # protocol: TCP, not MPTCP or SCTP, which Landlock does not control
        (_EQUAL, 2, 0, 0),
        (_EQUAL, 1, 0, 6),
        _fail(_EAFNOSUPPORT),
        _allow(),
    ]


def _fail_if_any(argument: int, bits: int) -> list[Line]:
    return [(_LOAD, 0, 0, 16 + 8 * argument), (_ANY, 0, 1, bits), _fail(_EPERM), _allow()]


def _fail(error: int) -> Line:
    return (_RETURN, 0, 0, _ERROR | error)


def _allow() -> Line:
    return (_RETURN, 0, 0, _ALLOW)
