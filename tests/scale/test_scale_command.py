"""`keystroke scale` before any Ray is started: what cannot work is said in one sentence."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from keystroke.config import NamedModel, load_settings
from keystroke.errors import ConfigError
from keystroke.scale import capacity
from keystroke.scale.capacity import check_fits
from keystroke.scale.loopback import prepare_environment
from keystroke.scale.rollout import _deploy_error, missing_resources


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
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=environ)


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
        (("--set", "model.default=nosuch", "scale", "up"), "there is no model called nosuch"),
        (("scale", "up", "--echo", "--replicas", "40000"), "this machine has"),
        (("scale", "status", "--address", "127.0.0.1:1"), "no Ray cluster was reached at 127.0.0.1:1"),
    ],
)
def test_what_cannot_work_is_said_in_one_sentence(
    tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    done = keystroke(tmp_path, *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_table_without_a_model_behind_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "keystroke.toml").write_text('[models.nosuch]\nrole = "chat"\n')
    done = keystroke(tmp_path, "scale", "up")
    assert done.returncode == 2
    assert "models.nosuch names neither a path nor a model of the library" in done.stderr


def test_a_cluster_that_does_not_answer_is_given_up_at_the_limit_with_the_reason(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and says nothing
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        done = keystroke(tmp_path, "scale", "status", "--address", address, "--timeout", "1")
    assert done.returncode == 1
    assert f"something listens at {address}, but no Ray cluster answered there within 1 s" in done.stderr
    assert "token" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_more_gpus_than_the_machine_has_are_refused_with_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    settings = load_settings({"scale.replicas": 6}, cwd=Path("/"), environ={})
    settings = replace(settings, models={"coder": NamedModel(gpus=1.0)})
    with pytest.raises(ConfigError, match="take 6 GPUs, and this machine has 4; start at most 4"):
        check_fits(settings)
    monkeypatch.setattr(capacity, "available_bytes", lambda: 64 << 30)
    check_fits(replace(settings, scale=replace(settings.scale, replicas=4)))


def test_replicas_that_do_not_fit_the_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "available_bytes", lambda: 2 << 30)
    monkeypatch.setattr(capacity, "usable_cores", lambda: 64)
    settings = load_settings({"scale.replicas": 40}, cwd=Path("/"), environ={})
    with pytest.raises(ConfigError, match=r"this machine has 2\.1 GB free; start at most 5 "):
        check_fits(settings, echo=True)


def test_the_error_of_a_replica_is_said_in_its_own_words() -> None:
    said = "ray::Replica\n  File ...\nkeystroke.errors.NotFound: there is no model called x; add one.\n"
    wanted = "The replicas did not come up: there is no model called x; add one."
    assert str(_deploy_error(said)) == str(_deploy_error("Failed to update gateway.", "", said)) == wanted


def test_the_last_error_of_a_replica_is_shown_where_it_is_not_ours() -> None:
    failed = _deploy_error(
        "Failed to update gateway.", "ray::Replica\nKeyError: 'x'\n  File ...\nOSError: no socket\n"
    )
    assert str(failed).startswith(
        "The replicas did not come up: Failed to update gateway: OSError: no socket;"
    )


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
