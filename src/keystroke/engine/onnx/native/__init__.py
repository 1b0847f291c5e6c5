"""Compiles the native ONNX operators for the processor of this machine.

The C source in this folder is compiled into a folder that only the user can write. There is no library if
there is no compiler, the processor lacks the required vector instructions, or the compiled library fails its
self-check.
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
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_FOLDER = Path(__file__).parent
_PARTS = ("operators.c", "product.c", "attention.c")  # compiled at the same time, the longest first
# The library is only used on this machine; on ARM not every clang supports -march=native.
_NATIVE = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
_FLAGS = ("-std=gnu11", "-O3", _NATIVE, "-fPIC", "-fvisibility=hidden")
# What vector_x86.h and vector_arm.h require.
_VECTORS = (
    frozenset({"__x86_64__", "__AVX2__", "__FMA__", "__F16C__"}),
    frozenset({"__aarch64__", "__ARM_NEON"}),
)
_PATIENCE = 240  # seconds; compiling takes five on an idle machine and up to a minute on a busy one
# Runs in another process, which an unsupported instruction would crash.
_compiling = threading.Lock()
_CHECK = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).self_check())"


@functools.cache
def operators_library(cache: Path) -> Path | None:
    """The compiled operators, built the first time for this processor, compiler and source; None if that is
    not possible. Waits for a compilation that `start_compiling` began. Never raises."""
    with _compiling:
        try:
            return _compile(cache / "native")
        except (_Unavailable, OSError, subprocess.SubprocessError, ValueError):
            return None


def start_compiling(cache: Path) -> None:
    """Begin to compile on another thread, if that is needed: a model is read and converted meanwhile."""
    if must_compile(cache):
        threading.Thread(target=operators_library, args=(cache,), name="compile", daemon=True).start()


def must_compile(cache: Path) -> bool:
    """Whether `operators_library` will have to compile, which takes seconds. Never raises."""
    try:
        return not _library(cache / "native")[1].exists()
    except (_Unavailable, OSError, subprocess.SubprocessError):
        return False


def unavailable_reason(cache: Path) -> str | None:
    """Why there is no library; None if there is one. Never raises."""
    try:
        _compile(cache / "native")
    except _Unavailable as reason:
        return str(reason)
    except subprocess.CalledProcessError as error:
        if error.cmd[0] == sys.executable:
            return "what was compiled does not pass its check on this machine"
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        return f"{error.cmd[0]} cannot compile them" + (f" ({lines[0][:100]})" if lines else "")
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return f"compiling failed ({error})"
    return None


class _Unavailable(Exception):
    """The library cannot be built; the message says why."""


def _library(folder: Path) -> tuple[list[str], Path]:
    """The compiler, and the library's file for this processor, compiler and source."""
    compiler = _compiler()
    if compiler is None:
        raise _Unavailable("there is no C compiler (cc, gcc or clang); install one for more speed")
    macros = _macros(tuple(compiler))
    defined = set(macros.decode(errors="replace").split())
    if not any(defined >= least for least in _VECTORS):
        raise _Unavailable("this processor has neither AVX2 nor the vectors of 64-bit ARM")
    sources = sorted(path for path in _FOLDER.iterdir() if path.suffix in (".c", ".h"))
    parts = [macros, " ".join(_FLAGS).encode(), *map(Path.read_bytes, sources)]
    digest = hashlib.sha256(b"\0".join(parts))
    return compiler, folder / f"operators-{digest.hexdigest()[:20]}.so"


@functools.cache
def _macros(compiler: tuple[str, ...]) -> bytes:
    """What the compiler defines for this processor."""
    return _run_compiler([*compiler, _NATIVE, "-dM", "-E", "-x", "c", os.devnull])


def _compile(folder: Path) -> Path:
    compiler, place = _library(folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_private(folder):
        raise _Unavailable(f"{folder} belongs to another user")
    if not place.exists():
        with tempfile.TemporaryDirectory(prefix="making-", dir=folder) as making:
            partial = Path(making) / place.name
            objects = [str(Path(making) / f"{part}.o") for part in _PARTS]
            commands = [
                [*compiler, *_FLAGS, "-c", "-o", made, str(_FOLDER / part)]
                for part, made in zip(_PARTS, objects, strict=True)
            ]
            with ThreadPoolExecutor(len(commands)) as pool:
                list(pool.map(_run_compiler, commands))
            _run_compiler([*compiler, "-shared", "-o", str(partial), *objects, "-lm"])
            _run_compiler([sys.executable, "-I", "-S", "-c", _CHECK, str(partial)])
            partial.replace(place)  # atomic, also if another process compiles at the same time
    return place


def _is_private(folder: Path) -> bool:
    """Whether only this user can write to the folder. If others could write, its content is deleted."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return False
    if found.st_mode & 0o077:
        shutil.rmtree(folder)
        folder.mkdir(mode=0o700)
    return True


def _compiler() -> list[str] | None:
    """The command that compiles C here: $CC, or the usual names."""
    chosen = shlex.split(os.environ.get("CC", ""))
    for command in (chosen, ["cc"], ["gcc"], ["clang"]):
        if command and shutil.which(command[0]):
            return command
    return None


def _run_compiler(command: list[str]) -> bytes:
    done = subprocess.run(
        command, capture_output=True, check=True, timeout=_PATIENCE, stdin=subprocess.DEVNULL
    )
    return done.stdout
