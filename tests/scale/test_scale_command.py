"""`keystroke scale` before any Ray is started: what cannot work is said in one sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from keystroke.scale.loopback import prepare_environment
from keystroke.scale.rollout import missing_resources


def keystroke(folder: Path, *arguments: str, without: str = "") -> subprocess.CompletedProcess[str]:
    """The program, in an environment of its own; `without`: a package that is not installed there."""
    environ = {**os.environ, "KEYSTROKE_CONFIG": str(folder), "KEYSTROKE_PATHS_STATE": str(folder / "state")}
    if without:
        hidden = folder / "hidden" / without
        hidden.mkdir(parents=True)
        (hidden / "__init__.py").write_text(
            f"raise ModuleNotFoundError('No module named {without}', name={without!r})\n"
        )
        environ["PYTHONPATH"] = os.pathsep.join([str(hidden.parent), environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "keystroke", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environ)


def test_without_the_extra_the_command_says_what_to_install(tmp_path: Path) -> None:
    done = keystroke(tmp_path, "scale", "up", "--echo", "--port", "0", without="ray")
    assert done.returncode == 2
    assert "pip install 'keystroke[scale]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("scale", "up", "--address", "127.0.0.1:1"), "server.database"),
        (("scale", "status"), "--address"),
        (("scale", "down"), "--address"),
        (("scale", "up", "--host", "0.0.0.0"), "a key is needed"),
        (("scale", "up", "--gateways", "0"), "gateways"),
    ],
)
def test_what_cannot_work_is_said_in_one_sentence(
    tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    done = keystroke(tmp_path, *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


GPU = {"engine-coder": {"CPU": 1.0, "GPU": 1.0}, "gateway": {"CPU": 0.1}}


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ([{"CPU": 8.0, "GPU": 1.0}], []),
        ([{"CPU": 8.0}], ["a replica of engine-coder takes 1 GPU, and a node has at most 0 GPU"]),
        (
            [{"CPU": 0.5, "GPU": 1.0}, {"CPU": 8.0}],
            ["a replica of engine-coder takes 1 CPU, 1 GPU, and no node has all of it"],
        ),
        (
            [],
            [
                "a replica of engine-coder takes 1 CPU, 1 GPU, and a node has at most 0 CPU, 0 GPU",
                "a replica of gateway takes 0.1 CPU, and a node has at most 0 CPU",
            ],
        ),
    ],
    ids=["fits", "no card", "not together", "no node"],
)
def test_what_no_node_has_is_named(nodes: list[dict[str, float]], said: list[str]) -> None:
    assert missing_resources(GPU, nodes) == said


def test_a_store_is_copied_and_brought_back_by_command(tmp_path: Path) -> None:
    one, two, file = tmp_path / "one", tmp_path / "two", tmp_path / "backup.gz"
    one.mkdir()
    two.mkdir()
    made = json.loads(keystroke(one, "--json", "keys", "create", "alice").stdout)
    told = json.loads(keystroke(one, "--json", "store", "backup", str(file)).stdout)
    assert told["rows"] == {"keys": 1, "usage": 0, "responses": 0}
    assert keystroke(two, "store", "restore", str(file)).returncode == 0
    assert made["id"] in keystroke(two, "--json", "keys", "list").stdout
    refused = keystroke(two, "store", "restore", str(tmp_path / "nothing.gz"))
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    ("environ", "mode"),
    [
        ({}, None),
        ({"RAY_AUTH_TOKEN": "t"}, "token"),
        ({"RAY_AUTH_TOKEN": "t", "RAY_AUTH_MODE": "disabled"}, "disabled"),
        ({"RAY_AUTH_TOKEN_PATH": "FOLDER/token"}, "token"),
        ({"RAY_AUTH_TOKEN_PATH": "FOLDER/none"}, None),
        ({"HOME": "FOLDER"}, "token"),
    ],
)
def test_who_joins_a_cluster_says_that_they_have_its_token(
    tmp_path: Path, environ: dict[str, str], mode: str | None
) -> None:
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("t")
    (tmp_path / "token").write_text("t")
    given = {name: value.replace("FOLDER", str(tmp_path)) for name, value in environ.items()}
    prepare_environment(given, local=False)
    assert given.get("RAY_AUTH_MODE") == mode


def test_a_card_that_this_machine_has_not_is_said_at_once(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the [scale] extra is not installed")
    (tmp_path / "keystroke.toml").write_text("[models.embedded]\nrole = 'fast'\ngpus = 64\n")
    done = keystroke(tmp_path, "scale", "up", "--port", "0")
    assert done.returncode == 2
    assert "a replica of engine-embedded takes 64 GPU" in done.stderr
    assert "Traceback" not in done.stderr
