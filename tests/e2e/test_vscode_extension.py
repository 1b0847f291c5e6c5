"""The VS Code extension: it builds, and it speaks of commands that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from installed import program
from keystroke.clients.lsp.commands import COMMANDS

EXTENSION = Path(__file__).parents[2] / "editors" / "vscode"
SOURCE = "".join(file.read_text() for file in sorted((EXTENSION / "src").glob("*.ts")))
MANIFEST: dict[str, Any] = json.loads((EXTENSION / "package.json").read_text())


def test_every_declared_command_and_key_is_registered() -> None:
    declared = {command["command"] for command in MANIFEST["contributes"]["commands"]}
    registered = set(re.findall(r'\bcommand\("([^"]+)"', SOURCE))
    assert declared == registered
    assert not declared & set(COMMANDS)  # those of the server the language client registers by itself
    assert {key["command"] for key in MANIFEST["contributes"]["keybindings"]} <= declared


def test_every_setting_is_read_and_every_one_read_is_declared() -> None:
    declared = {
        name.removeprefix("keystroke.") for name in MANIFEST["contributes"]["configuration"]["properties"]
    }
    read = set(re.findall(r'\.get<[^>]+>\("([^"]+)"', SOURCE)) | set(re.findall(r'wanted\("([^"]+)"', SOURCE))
    assert read == declared


def test_what_it_asks_of_the_server_the_server_has() -> None:
    asked = set(re.findall(r'run\("([^"]+)"', SOURCE))
    assert asked
    assert asked <= set(COMMANDS)


@pytest.mark.slow
def test_it_builds(tmp_path: Path) -> None:
    npm = program("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    folder = tmp_path / "vscode"
    shutil.copytree(EXTENSION, folder, ignore=shutil.ignore_patterns("node_modules", "out", "*.vsix"))
    options = ["--no-audit", "--no-fund", "--ignore-scripts", "--fetch-retries=0", "--fetch-timeout=20000"]
    try:
        installed = subprocess.run(
            [npm, "install", *options], cwd=folder, capture_output=True, text=True, timeout=120, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip("the npm registry did not answer within two minutes")
    if installed.returncode:
        pytest.skip(f"npm cannot install here: {installed.stderr.strip().splitlines()[-1:]}")
    built = subprocess.run(
        [npm, "run", "--silent", "build"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert built.returncode == 0, built.stdout
    assert (folder / "out" / "extension.js").is_file()
