"""One setting written into the user's file: the rest of it stays as it was."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from keystroke.config import load_settings
from keystroke.config.write import write_setting
from keystroke.errors import ConfigError

TEXT = """# mine
[engine]
threads = 2  # two

[model]  # which
default = "embedded"   # ours

[models.far]
base_url = "http://x"
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"KEYSTROKE_CONFIG": str(tmp_path)}


def test_a_setting_is_added_changed_and_removed_and_comments_stay(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    file = tmp_path / "keystroke.toml"
    file.write_text(TEXT)
    assert write_setting("model.deep", "coder", environ) == file
    assert load_settings(environ=environ, cwd=tmp_path).model.deep == "coder"
    write_setting("model.default", "fim", environ)
    assert 'default = "fim"   # ours' in file.read_text()
    write_setting("model.default", "embedded", environ)
    write_setting("model.deep", None, environ)
    assert file.read_text() == TEXT
    write_setting("model.deep", None, environ)
    assert file.read_text() == TEXT


def test_a_file_that_is_not_there_is_made(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    environ = {"KEYSTROKE_CONFIG": str(tmp_path / "config")}
    write_setting("model.chat", "coder", environ)
    assert (tmp_path / "config" / "keystroke.toml").read_text() == '[model]\nchat = "coder"\n'


def test_a_link_stays_a_link_and_permissions_stay(tmp_path: Path, environ: dict[str, str]) -> None:
    real = tmp_path / "dotfiles.toml"
    real.write_text(TEXT)
    real.chmod(0o600)
    (tmp_path / "keystroke.toml").symlink_to(real)
    write_setting("model.deep", "coder", environ)
    assert (tmp_path / "keystroke.toml").is_symlink()
    assert 'deep = "coder"' in real.read_text()
    assert real.stat().st_mode & 0o777 == 0o600


def test_what_cannot_be_changed_is_one_sentence_and_stays_as_it_was(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    file = tmp_path / "keystroke.toml"
    for text in ("[model\n", 'model = "embedded"\n'):
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"set model\.deep by hand"):
            write_setting("model.deep", "coder", environ)
        assert file.read_text() == text
    with pytest.raises(ConfigError, match=r"did you mean model\.deep"):
        write_setting("model.deeep", "coder", environ)
    assert os.listdir(tmp_path) == ["keystroke.toml"]
