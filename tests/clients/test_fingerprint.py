"""What tells two installations of one version apart, and what does not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from keystroke.clients.cli import fingerprint as module

INSIDE = Path("keystroke", "clients", "cli", "fingerprint.py")
ASK = "from keystroke.clients.cli.fingerprint import fingerprint; print(fingerprint())"


def put(root: Path) -> Path:
    """A package with this module, and little else, below `root`."""
    here = root / INSIDE
    here.parent.mkdir(parents=True)
    for folder in here.relative_to(root).parents[:-1]:
        (root / folder / "__init__.py").touch()
    shutil.copy(module.__file__, here)
    return here


def asked(*roots: Path) -> str:
    """What a program of its own finds that takes its packages from these folders first."""
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, roots)), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder as an installer leaves it."""
    site = tmp_path / "site"
    put(site)
    told = site / "keystroke-0.1.0.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: keystroke\nVersion: 0.1.0\n")
    (told / "RECORD").write_text("keystroke/models/own/SHA256SUMS,sha256=one,80\n")
    return site


def test_an_installed_program_is_another_when_a_file_of_it_is_and_not_when_it_is_put_there_again(
    installed: Path,
) -> None:
    before = asked(installed)
    assert asked(installed) == before
    for file in (installed / INSIDE, installed / "keystroke-0.1.0.dist-info" / "RECORD"):
        os.utime(file, ns=(1, 1))
    assert asked(installed) == before, "the same files, installed once more"
    record = installed / "keystroke-0.1.0.dist-info" / "RECORD"
    record.write_text(record.read_text().replace("one", "two"))
    assert asked(installed) != before


def test_a_program_whose_record_is_missing_or_of_another_place_is_known_by_its_files(
    installed: Path, tmp_path: Path
) -> None:
    another = put(tmp_path / "another")
    before = asked(tmp_path / "another", installed)
    assert asked(tmp_path / "another", installed) == before
    os.utime(another, ns=(1, 1))
    assert asked(tmp_path / "another", installed) != before
    before = asked(installed)
    (installed / "keystroke-0.1.0.dist-info" / "RECORD").unlink()
    without = asked(installed)
    assert without != before
    os.utime(installed / INSIDE, ns=(1, 1))
    assert asked(installed) not in (before, without)


def test_a_checkout_is_another_when_its_code_or_its_weights_were_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = put(tmp_path / "src")
    weights = tmp_path / "models" / "own" / "own.gguf"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"weights")
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(module, "__file__", str(here))
    seen = [module.fingerprint()]
    assert module.fingerprint() == seen[0]
    assert module.checkout() == tmp_path
    changes: list[Callable[[], None]] = [
        lambda: os.utime(here, ns=(1, 1)),
        lambda: os.utime(weights, ns=(1, 1)),
        lambda: (here.parent / "__init__.py").unlink(),
    ]
    for change in changes:
        change()
        seen.append(module.fingerprint())
    assert len(set(seen)) == len(seen)
    for passing in (".fingerprint.py.swp", "__pycache__/fingerprint.pyc"):
        (here.parent / passing).parent.mkdir(exist_ok=True)
        (here.parent / passing).touch()
    assert module.fingerprint() == seen[-1], "what comes and goes by itself is no change"
