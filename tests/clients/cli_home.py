"""The `keystroke` command in a home of its own, in this process (quick) or as the installed program (real).

The fixtures of the tests beside it; the server they talk to is a real one on loopback.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engine" / "remote"))

from openai_server import OpenAIServer, running

from installed import lend_operators
from keystroke.clients.cli import main

PROGRAM = str(Path(sys.executable).with_name("keystroke"))


@dataclass(frozen=True)
class Result:
    code: int
    stdout: str
    stderr: str


@dataclass
class Home:
    """A user's world: configuration, models and state under one temporary folder."""

    root: Path
    environment: dict[str, str]
    monkeypatch: pytest.MonkeyPatch

    def configure(self, text: str) -> None:
        (self.root / "keystroke.toml").write_text(text)

    def keystroke(
        self, *arguments: str, stdin: str | bytes = "", code: int | None = 0, **environment: str
    ) -> Result:
        """Run the command here; unless `code` is None it must end with that exit code."""
        out, err = io.StringIO(), io.StringIO()
        ended = 0
        data = stdin.encode() if isinstance(stdin, str) else stdin
        with self.monkeypatch.context() as patch:
            for name in set(os.environ) - set(self.environment):
                patch.delenv(name)
            for name, value in {**self.environment, **environment}.items():
                patch.setenv(name, value)
            patch.chdir(self.root)
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                try:
                    main(arguments)
                except SystemExit as end:
                    ended = int(end.code or 0)
        return self._checked(Result(ended, out.getvalue(), err.getvalue()), code)

    def program(
        self, *arguments: str, stdin: str | bytes = "", code: int | None = 0, **environment: str
    ) -> Result:
        """The same through the installed entry point, in a process of its own."""
        done = subprocess.run(
            [PROGRAM, *arguments],
            input=stdin.encode() if isinstance(stdin, str) else stdin,
            capture_output=True,
            env={**self.environment, **environment},
            cwd=self.root,
            timeout=200,
            check=False,
        )
        return self._checked(Result(done.returncode, done.stdout.decode(), done.stderr.decode()), code)

    def refused(self, *arguments: str, stdin: str | bytes = "", code: int = 2) -> str:
        """The one sentence that a run which must fail prints, and nothing on standard output."""
        result = self.keystroke(*arguments, stdin=stdin, code=code)
        assert result.stdout == ""
        (line,) = result.stderr.splitlines()
        assert line.startswith("keystroke: ")
        return line.removeprefix("keystroke: ")

    def _checked(self, result: Result, code: int | None) -> Result:
        assert "Traceback" not in result.stderr, result.stderr
        if code is not None:
            assert result.code == code, result.stderr
        return result


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    root = tmp_path / "home"
    root.mkdir()
    lend_operators(root / "cache")
    ours = ("KEYSTROKE", "XDG_", "OPENAI_")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(ours)},
        "HOME": str(root),
        "KEYSTROKE_CONFIG": str(root),
        "KEYSTROKE_PATHS_MODELS": str(root / "models"),
        "KEYSTROKE_PATHS_CACHE": str(root / "cache"),
        "KEYSTROKE_PATHS_STATE": str(root / "state"),
        "KEYSTROKE_SHARING_ENABLED": "0",  # a gateway in the background is tried where it is the subject
        "TERM": "xterm",
    }
    return Home(root, environment, monkeypatch)


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with running() as started:
        yield started


@pytest.fixture
def remote_home(home: Home, server: OpenAIServer) -> Home:
    """A home whose default model is the server's."""
    model = f'engine = "remote"\nbase_url = "{server.url}"\nmodel = "test-model"'
    home.configure(f'[model]\ndefault = "far"\n[models.far]\n{model}\n')
    return home
