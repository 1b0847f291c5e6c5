"""`keystroke cache`: all that is kept is shown; only what is made again goes unless more is named."""
# ruff: noqa: F811 - fixtures are imported by name

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli_home import PROGRAM, Home, home  # noqa: F401

from keystroke.clients.cli.stored_files import stored_files
from keystroke.config import load_settings
from keystroke.engine.library import ModelLibrary
from keystroke.engine.onnx.cache import ConversionCache

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from tiny_model import write_tiny_model

ROOT = Path(__file__).parents[2]
AGAIN = {"converted", "tokenizers", "prefixes", "probes", "kernels", "benchmarks", "gateways"}
KEPT = {"models", "undo", "tasks", "sessions", "history", "learned", "database", "scale", "setup", "settings"}


def converted(folder: Path) -> None:
    (folder / "weights").write_bytes(b"1" * 1000)


@pytest.fixture
def full(home: Home) -> Home:
    """A home in which something of every kind is kept."""
    cache, state = home.root / "cache", home.root / "state"
    ConversionCache(cache / "onnx").entry("m", "key", converted, 1000)
    shared = home.root / ".cache" / "keystroke"
    places = [cache / "tokenizers" / "t", shared / "cuda" / "k", shared / "bench-audit" / "deep" / "b"]
    places += [state / "gateways" / "old.log", state / "undo" / "w" / "1.json", state / "chat_history"]
    places += [cache / "prefixes" / "p.kv", cache / "probes.json", state / "tasks" / "w" / "1.json"]
    places += [
        state / "learned.db",
        state / "gateway.db",
        state / "gateway.db-wal",
        state / "setup.json",
        state / "play.html",
        state / "scale.log",
        state / "sessions" / "1.json",
        cache / "eval" / "sets" / "1",
        home.root / "keystroke.toml",
    ]
    for place in places:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("# kept\n")
    home.keystroke(
        "models", "add", str(write_tiny_model(home.root / "elsewhere" / "tiny")), "--name", "linked"
    )
    return home


def shown(home: Home) -> dict[str, int]:
    rows = json.loads(home.keystroke("cache", "--json").stdout)
    assert {row["name"] for row in rows if row["made_again"]} == AGAIN
    return {row["name"]: row["files"] for row in rows}


def test_everything_kept_is_shown_with_its_place_and_size(full: Home) -> None:
    assert {name for name, files in shown(full).items() if files} == AGAIN | KEPT
    table = full.keystroke("cache").stdout
    assert all(name in table for name in AGAIN | KEPT)
    assert str(full.root / "cache" / "onnx") in table
    (row,) = json.loads(full.keystroke("cache", "converted", "--json").stdout)
    assert (row["files"], row["bytes"] > 1000) == (3, True)  # weights, manifest, lock


def test_clearing_takes_only_what_is_made_again(full: Home) -> None:
    freed = json.loads(full.keystroke("cache", "--clear", "--yes", "--json").stdout)["freed"]
    assert set(freed) == AGAIN
    assert all(freed.values())
    assert {name for name, files in shown(full).items() if files} == KEPT


def test_what_is_named_goes_and_nothing_else(full: Home) -> None:
    full.keystroke("cache", "undo", "history", "--clear", "-y")
    assert {name for name, files in shown(full).items() if files} == (AGAIN | KEPT) - {"undo", "history"}


def test_models_added_from_elsewhere_are_forgotten_and_stay_where_they_are(full: Home) -> None:
    files = sorted((full.root / "elsewhere").rglob("*"))
    full.keystroke("cache", "--clear", "-y")
    assert ModelLibrary(full.root / "models").names() == ["linked"]
    full.keystroke("cache", "models", "--clear", "-y")
    assert ModelLibrary(full.root / "models").names() == []
    assert sorted((full.root / "elsewhere").rglob("*")) == files


def test_everything_leaves_no_file_of_ours(full: Home) -> None:
    full.keystroke("cache", "--clear", "--everything", "--yes")
    assert not any(shown(full).values())
    left = {path.relative_to(full.root).parts[0] for path in full.root.rglob("*") if path.is_file()}
    assert left == {"elsewhere"}


def test_every_file_that_the_program_names_is_known(home: Home) -> None:
    known = {
        place.relative_to(folder).parts[0]
        for kind in stored_files(load_settings(environ=home.environment), home.environment)
        for place in kind.where
        for folder in (home.root / "state", home.root / "cache")
        if place.is_relative_to(folder)
    }
    named = {
        found
        for file in (ROOT / "src" / "keystroke").rglob("*.py")
        if "evaluation" not in file.parts  # its cache is a folder of the cache
        for found in re.findall(r'\b(?:state|cache) / "([\w.]+)"', file.read_text(encoding="utf-8"))
    }
    assert {"undo", "sessions", "native"} <= named
    # Files of gateways that run stay; archives are in the folder of the evaluation.
    assert named - {"gateways", "archives"} <= known


def test_what_a_setting_points_to_is_never_removed_whole(full: Home) -> None:
    for folder in ("cache", "state", "models"):
        (full.root / folder / "somebody's own.txt").write_text("mine")
    full.keystroke("cache", "--clear", "--everything", "--yes")
    assert [
        (full.root / folder / "somebody's own.txt").exists() for folder in ("cache", "state", "models")
    ] == [True] * 3


def test_a_link_to_another_disk_is_emptied_and_stays(full: Home) -> None:
    tokenizers, other = full.root / "cache" / "tokenizers", full.root / "disk"
    tokenizers.rename(other)
    tokenizers.symlink_to(other)
    full.keystroke("cache", "tokenizers", "--clear", "-y")
    assert (tokenizers.is_symlink(), list(other.iterdir())) == (True, [])


def test_a_gateway_that_runs_keeps_its_files(full: Home) -> None:
    folder = full.root / "state" / "gateways"
    (folder / "here.json").write_text(json.dumps({"url": "http://127.0.0.1:1", "pid": os.getpid()}))
    (folder / "here.log").write_text("running")
    full.keystroke("cache", "--clear", "--everything", "-y")
    assert sorted(path.name for path in folder.iterdir()) == ["here.json", "here.log"]


def test_without_a_terminal_nothing_goes_unasked(full: Home) -> None:
    before = shown(full)
    assert "--yes" in full.refused("cache", "--clear")
    assert shown(full) == before


def test_an_unknown_kind_is_one_sentence_that_names_the_known(full: Home) -> None:
    said = full.refused("cache", "no-such", "--clear", "--yes")
    assert all(name in said for name in AGAIN | KEPT)


def test_a_converted_model_that_is_being_made_is_left_alone(full: Home) -> None:
    cache = ConversionCache(full.root / "cache" / "onnx")

    def make(folder: Path) -> None:
        (folder / "w").write_bytes(b"2" * 10)
        full.keystroke("cache", "--clear", "-y")

    place = cache.entry("n", "other", make, 10)
    assert (place / "w").read_bytes() == b"2" * 10


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo terminal")
@pytest.mark.parametrize(("answer", "left"), [("n", KEPT | AGAIN), ("y", KEPT)])
def test_at_a_terminal_it_asks_and_takes_no_for_an_answer(full: Home, answer: str, left: set[str]) -> None:
    import pty

    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [PROGRAM, "cache", "--clear"], stdin=theirs, stderr=theirs, env=full.environment, cwd=full.root
    )
    said = b""
    while b"[y/N]" not in said:
        said += os.read(ours, 1000)
    assert b"models" not in said
    os.write(ours, answer.encode())
    assert child.wait(60) == (0 if answer == "y" else 1)
    assert {name for name, files in shown(full).items() if files} == left
