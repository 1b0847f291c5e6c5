"""What a command loads before it does anything: by names, since times differ between machines."""
# ruff: noqa: F811 - fixtures are imported by name

from __future__ import annotations

import subprocess
import sys

import pytest
from cli_home import Home, home  # noqa: F401

HEAVY = (
    "gguf", "httpx", "jinja2", "numpy", "onnx", "onnxruntime", "pygls", "rich", "rope", "safetensors",
    "sqlalchemy", "starlette", "tokenizers", "torch", "transformers", "uvicorn",
)  # fmt: skip


def loaded(home: Home, script: str) -> set[str]:
    """The modules in memory after a script ran in a Python of its own; only their first names."""
    report = "\nimport sys\nprint('\\n' + ' '.join({name.partition('.')[0] for name in sys.modules}))\n"
    done = subprocess.run(
        [sys.executable, "-c", script + report],
        capture_output=True,
        text=True,
        env=home.environment,
        cwd=home.root,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


def command(*arguments: str) -> str:
    return (
        f"from keystroke.clients.cli import main\ntry:\n    main({list(arguments)!r})\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
    )


def test_the_command_line_itself_loads_nothing_heavy(home: Home) -> None:
    names = loaded(home, "import keystroke.clients.cli")
    assert not names & {*HEAVY, "typer", "pydantic", "msgspec"}


def test_every_command_is_found_without_loading_anything_heavy(home: Home) -> None:
    script = (
        "from keystroke.clients.cli.app import COMMANDS, load_command\n"
        "for name in COMMANDS: load_command(name)\n"
    )
    assert not loaded(home, script) & set(HEAVY)


@pytest.mark.parametrize("asked", ["--version", "-V", "version"])
def test_the_version_is_told_without_parsing_options(home: Home, asked: str) -> None:
    assert not loaded(home, command(asked)) & {*HEAVY, "typer", "pydantic"}
    told = home.keystroke(asked).stdout
    assert told.startswith("keystroke ")
    assert home.keystroke("--quiet", asked).stdout == told


@pytest.mark.parametrize(
    "arguments",
    [("run", "--", "true"), ("edit", "--patch", "change.diff", "--dry-run"), ("config", "path")],
    ids=["run", "edit", "config"],
)
def test_what_needs_no_model_loads_no_engine(home: Home, arguments: tuple[str, ...]) -> None:
    (home.root / "a.txt").write_text("one\ntwo\n")
    (home.root / "change.diff").write_text("--- a/a.txt\n+++ b/a.txt\n@@ -1,2 +1,2 @@\n-one\n+uno\n two\n")
    assert not loaded(home, command(*arguments)) & set(HEAVY)


def test_a_converted_model_is_run_without_what_converts_it(home: Home) -> None:
    (home.root / "a.py").write_text("def add(a, b):\n    \n")
    line = command("complete", "a.py:2:5", "--lines", "1", "--max-tokens", "4")
    loaded(home, line)  # converts it
    assert (home.root / "cache" / "tokenizers").is_dir()
    names = loaded(home, line)
    assert "onnxruntime" in names
    assert not names & {"gguf", "onnx", "jinja2", "torch", "yaml", "httpx", "safetensors"}


def test_a_command_that_asks_the_gateway_loads_no_engine_and_no_numbers(home: Home) -> None:
    script = "import keystroke.clients.cli.gateway_model\nimport keystroke.assist.completion\n"
    assert not loaded(home, script) & {*HEAVY} - {"httpx"}
