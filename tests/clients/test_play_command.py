"""`keystroke play` leads to the page and keeps the key to this user."""

from __future__ import annotations

import stat
import webbrowser
from pathlib import Path

import pytest

from keystroke.clients.cli import _run as cli


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KEYSTROKE_API_KEY", "a key & more")
    return tmp_path


def test_the_address_is_printed_where_no_browser_is_wanted(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli(["play", "--url", "http://10.0.0.1:8012/", "--no-browser"]) == 0
    assert capsys.readouterr().out == "http://10.0.0.1:8012/#key=a%20key%20%26%20more\n"


def test_a_browser_gets_the_key_through_a_file_of_this_user_alone(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def take(address: str) -> bool:
        opened.append(address)
        return True

    monkeypatch.setattr(webbrowser, "open", take)
    assert cli(["--set", f"paths.state={state}", "play", "--url", "http://10.0.0.1:8012"]) == 0
    (address,) = opened
    assert address.startswith("file://")
    assert "a%20key" not in address
    (file,) = state.glob("play.html")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "http://10.0.0.1:8012/#key=a%20key%20%26%20more" in file.read_text()
