"""Operators of our own, compiled for the very processor they will run on.

Knows compilers and files, nothing of models. Compiles nothing but the C source beside it, into a folder
that is the user's alone. Where there is no compiler, or the processor lacks the vectors that the operators
are written in, or what was compiled does not pass its own check, there is no library and the caller goes
without.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

_FOLDER = Path(__file__).parent
_SOURCE = _FOLDER / "operators.c"
# The library never leaves this machine, so it may use all of its processor; on ARM not every clang knows
# -march=native.
_NATIVE = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
_FLAGS = ("-std=gnu11", "-O3", _NATIVE, "-fPIC", "-shared", "-fvisibility=hidden")
# The least that each half of vector.h is written for.
_VECTORS = (
    frozenset({"__x86_64__", "__AVX2__", "__FMA__", "__F16C__"}),
    frozenset({"__aarch64__", "__ARM_NEON"}),
)
_PATIENCE = 240  # seconds; compiling takes five of an idle processor, and a busy one can take a minute
# In a process of its own: an instruction that the compiler believes in and the machine does not have ends it.
_CHECK = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).self_check())"


@functools.cache
def operators_library(cache: Path) -> Path | None:
    """The compiled operators, made the first time this processor, compiler and source meet; None where that
    cannot be done. Never raises: whatever a compiler may suffer from, the caller has another way."""
    try:
        return _compile(cache / "native")
    except (_Unavailable, OSError, subprocess.SubprocessError, ValueError):
        return None


def must_compile(cache: Path) -> bool:
    """Whether `library` is about to compile for the first time here, which takes seconds."""
    return _compiler() is not None and not any((cache / "native").glob("operators-*.so"))


def unavailable_reason(cache: Path) -> str | None:
    """Why there is no library, in half a sentence; None where there is one. Never raises."""
    try:
        _compile(cache / "native")
    except _Unavailable as reason:
        return str(reason)
    except subprocess.CalledProcessError as error:
        if error.cmd[0] == sys.executable:
            return "what was compiled does not pass its check on this machine"
        said = error.stderr.decode(errors="replace").strip().splitlines()
        return f"{error.cmd[0]} cannot compile them" + (f" ({said[0][:100]})" if said else "")
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return f"compiling failed ({error})"
    return None


class _Unavailable(Exception):
    """There can be no library here; says why."""


def _compile(folder: Path) -> Path:
    compiler = _compiler()
    if compiler is None:
        raise _Unavailable("there is no C compiler (cc, gcc or clang); install one for more speed")
    macros = _output([*compiler, _NATIVE, "-dM", "-E", "-x", "c", os.devnull])
    defined = set(macros.decode(errors="replace").split())
    if not any(defined >= least for least in _VECTORS):
        raise _Unavailable("this processor has neither AVX2 nor the vectors of 64-bit ARM")
    digest = hashlib.sha256(
        b"\0".join([macros, " ".join(_FLAGS).encode(), *map(Path.read_bytes, _sources())])
    )
    place = folder / f"operators-{digest.hexdigest()[:20]}.so"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _private(folder):
        raise _Unavailable(f"{folder} belongs to somebody else")
    if not place.exists():
        with tempfile.TemporaryDirectory(prefix="making-", dir=folder) as making:
            partial = Path(making) / place.name
            _output([*compiler, *_FLAGS, "-o", str(partial), str(_SOURCE), "-lm"])
            _output([sys.executable, "-I", "-S", "-c", _CHECK, str(partial)])
            partial.replace(place)  # whole or absent, whoever else compiles at the same time
    return place


def _private(folder: Path) -> bool:
    """Whether nobody but us can have put a library here for us to load: what lies in a folder that others
    could write to is thrown away."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return False
    if found.st_mode & 0o077:
        shutil.rmtree(folder)
        folder.mkdir(mode=0o700)
    return True


def _sources() -> list[Path]:
    return sorted(path for path in _FOLDER.iterdir() if path.suffix in (".c", ".h"))


def _compiler() -> list[str] | None:
    """The command that compiles C here: $CC, or the usual names."""
    chosen = shlex.split(os.environ.get("CC", ""))
    for command in (chosen, ["cc"], ["gcc"], ["clang"]):
        if command and shutil.which(command[0]):
            return command
    return None


def _output(command: list[str]) -> bytes:
    done = subprocess.run(
        command, capture_output=True, check=True, timeout=_PATIENCE, stdin=subprocess.DEVNULL
    )
    return done.stdout
