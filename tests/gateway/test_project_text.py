"""What other files of a project hold reaches ghost text; what must not be read is not."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from gateway_support import serving

from keystroke.analysis.project_files import project_files
from keystroke.analysis.text_index import TextIndex
from keystroke.clients.live_connection import LiveClient
from keystroke.config import AssistSettings, Settings
from keystroke.engine.load import load_model
from keystroke.errors import KeystrokeError
from keystroke.gateway.live import project_text
from keystroke.gateway.live.project_text import ProjectIndex, sort_by_distance
from keystroke.protocol import live_messages as live

Write = Callable[[Mapping[str, str]], None]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def files(texts: Mapping[str, str]) -> None:
        for name, text in texts.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    return files


def names(index: TextIndex) -> set[str]:
    return set(index.spans)


def looked(text: ProjectIndex, path: str = "a.py", **buffers: str) -> TextIndex:
    return asyncio.run(text.update(path, "python", buffers))


def test_files_of_the_language_are_read_and_no_others(tmp_path: Path, write: Write) -> None:
    write({"a.py": "one\n", "lib/b.py": "two\n", "c.js": "three\n", "notes.txt": "four\n"})
    assert names(looked(ProjectIndex(str(tmp_path), ()))) == {"a.py", "lib/b.py"}
    both = asyncio.run(ProjectIndex(str(tmp_path), ()).update("x.tsx", "tsx", {}))
    assert names(both) == {"c.js"}


def test_secrets_links_out_and_what_git_ignores_are_not_read(tmp_path: Path, write: Write) -> None:
    root = tmp_path / "project"
    write({
        "outside.py": "secret = 1\n", "project/a.py": "one\n", "project/key_file.py": "secret = 2\n",
        "project/made/gen.py": "generated\n", "project/.gitignore": "made/\n", "project/broken.py": "ok\n",
        "project/big.py": "x = 1\n" * 60_000, "project/min.py": "y" * 3000 + "\n",
    })  # fmt: skip
    (root / "link.py").symlink_to(tmp_path / "outside.py")
    (root / "broken.py").write_bytes(b"\xff\xfe broken")
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    assert names(looked(ProjectIndex(str(root), ("key_*",)))) == {"a.py"}


def test_a_repository_cannot_have_a_program_run(tmp_path: Path, write: Write) -> None:
    write({"a.py": "one\n", "monitor.sh": f"#!/bin/sh\ntouch {tmp_path}/ran\n"})
    os.chmod(tmp_path / "monitor.sh", 0o755)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monitor = f"{tmp_path}/monitor.sh"
    subprocess.run(["git", "-C", str(tmp_path), "config", "core.fsmonitor", monitor], check=True)
    subprocess.run(["git", "-C", str(tmp_path), "status"], check=True, capture_output=True)
    assert (tmp_path / "ran").exists()  # it would
    (tmp_path / "ran").unlink()
    assert tmp_path / "a.py" in project_files(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_pipe_is_not_read_and_a_whole_disk_not_walked(tmp_path: Path, write: Write) -> None:
    write({"a.py": "one\n", "deep/b.py": "two\n"})
    os.mkfifo(tmp_path / "pipe.py")
    assert names(looked(ProjectIndex(str(tmp_path), ()))) == {"a.py", "deep/b.py"}
    assert project_files(tmp_path, seconds=1e-9) == []
    assert project_files(tmp_path) == [tmp_path / "a.py", tmp_path / "deep" / "b.py"]


def test_an_open_buffer_is_taken_as_the_editor_has_it(tmp_path: Path, write: Write) -> None:
    write({"a.py": "on disk\n", "b.py": "too\n"})
    assert "in editor" in looked(ProjectIndex(str(tmp_path), ()), **{"a.py": "in editor\n"}).text


def test_changed_files_are_read_again_and_the_others_are_not(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write({"a.py": "one\n", "b.py": "two\n"})
    text = ProjectIndex(str(tmp_path), ())
    looked(text)
    write({"b.py": "other words\n"})
    (tmp_path / "c.py").write_text("three\n")
    (tmp_path / "a.py").chmod(0o644)
    read: list[str] = []
    plain = Path.read_text

    def noted(self: Path, **how: str) -> str:
        read.append(self.name)
        return plain(self, **how)

    monkeypatch.setattr(Path, "read_text", noted)
    index = looked(text)
    assert sorted(read) == ["b.py", "c.py"]
    assert "other words" in index.text
    assert "two" not in index.text


def test_the_nearest_files_come_first_and_the_rest_is_left_out(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(dict.fromkeys(("src/a/one.py", "src/a/two.py", "src/b/far.py", "tests/other.py"), "x = 1\n"))
    assert (
        sort_by_distance("src/a/me.py", ["tests/other.py", "src/b/far.py", "src/a/two.py"])[0]
        == "src/a/two.py"
    )
    monkeypatch.setattr(project_text, "CHARACTERS", 13)
    assert names(looked(ProjectIndex(str(tmp_path), ()), "src/a/me.py")) == {"src/a/one.py", "src/a/two.py"}


def test_where_not_all_found_room_a_file_elsewhere_is_looked_around_when_it_is_opened(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(dict.fromkeys(("src/a/one.py", "tests/other.py"), "x = 1\n"))
    text = ProjectIndex(str(tmp_path), ())
    looked(text, "src/a/me.py")
    assert not text.needs_update("python", "tests/new.py")
    monkeypatch.setattr(project_text, "CHARACTERS", 7)
    assert names(looked(text, "src/a/me.py")) == {"src/a/one.py"}
    assert text.needs_update("python", "tests/new.py")
    assert not text.needs_update("python", "src/a/new.py")
    assert not text.needs_update("python")
    assert names(looked(text, "tests/new.py")) == {"tests/other.py"}


def test_it_is_looked_at_again_only_after_a_while(tmp_path: Path, write: Write) -> None:
    write({"a.py": "one\n"})
    text = ProjectIndex(str(tmp_path), ())
    assert text.needs_update("python")
    assert text.latest("python") is None
    index = looked(text)
    assert not text.needs_update("python")
    assert text.latest("python") is index
    assert text.needs_update("go")


HELPER = '''"""Tanks."""


def refill_station(tank_identifier, litres_wanted, overflow_valve):
    return tank_identifier, litres_wanted, overflow_valve


def refill_all(tanks):
    for tank_identifier in tanks:
        refill_station(tank_identifier, litres_wanted=40, overflow_valve=None)
'''
CALLER = """from tanks import refill_station


def sunday(tanks):
    for tank_identifier in tanks:
        refill_"""
JS_HELPER = """export function refillAll(tanks) {
  for (const tankIdentifier of tanks) {
    refillStation(tankIdentifier, { litresWanted: 40, overflowValve: null });
  }
}
"""
JS_CALLER = """import { refillStation } from "./tanks.js";

export function sunday(tanks) {
  for (const tankIdentifier of tanks) {
    refillStation(tankIdentifier, """
PYTHON = ("tanks.py", HELPER, "week.py", CALLER, "litres_wanted=40, overflow_valve=None)")
JAVASCRIPT = ("tanks.js", JS_HELPER, "week.js", JS_CALLER, "{ litresWanted: 40, overflowValve: null });")


@pytest.mark.model
@pytest.mark.parametrize(("helper", "said", "name", "text", "wanted"), [PYTHON, JAVASCRIPT])
def test_what_only_another_file_knows_is_suggested(
    tmp_path: Path, write: Write, helper: str, said: str, name: str, text: str, wanted: str
) -> None:
    """With the shipped model, which is calm in JavaScript: the arguments stand in another
    file, and nowhere in this one."""
    write({helper: said, name: text})

    async def run(url: str, tries: int) -> int | None:
        """After how many answers it was suggested; None if it never was."""
        path = str(tmp_path / name)
        async with LiveClient(url) as client:
            for tried in range(1, tries + 1):  # until the project was read, in its own time
                client.open("week", text, path=path, root=str(tmp_path))
                answer = await client.complete("week", len(text), invoked=True)
                offered = answer.text if isinstance(answer, live.Suggestion) else answer.hidden
                client.close("week")
                if wanted in offered:
                    return tried
                await asyncio.sleep(0.1)
        return None

    def suggested(on: bool, tries: int) -> int | None:
        try:
            model = load_model("embedded", Settings())
        except KeystrokeError as error:
            pytest.skip(error.message)
        with serving(model, concurrent=0, assist=AssistSettings(project_text=on)) as running:
            return asyncio.run(run(running.url, tries))

    tries = suggested(True, 50)
    assert tries is not None
    assert suggested(False, 3 * tries + 5) is None
