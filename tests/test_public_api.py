"""The public Python API: a list of names that only grows between major versions."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import keystroke

ROOT = Path(__file__).parents[1]
NAMES = {
    "Auditor", "BlockingModel", "Chunk", "Client", "Completion", "Diagnostic", "Document", "Edit",
    "EditPlan", "Endpoint", "Finding", "Fix", "Generation", "GenerationParams", "Journal",
    "KeystrokeError", "LiveAudit", "LiveClient", "Model", "ModelWriter", "NotShown", "Project",
    "Refactoring", "Region", "RemoteModel", "RemoteWriter", "Settings", "Suggestion", "Usage",
    "Workspace", "__version__", "apply_edits", "check", "complete", "drafter_for", "fixes_for",
    "load_model", "load_settings", "minimal_diff", "plan_edit", "plan_patch", "unified_diff",
}  # fmt: skip


def test_the_public_names_are_these() -> None:
    assert set(keystroke.__all__) == NAMES
    assert set(dir(keystroke)) >= NAMES


@pytest.mark.parametrize("name", sorted(NAMES - {"__version__"}))
def test_a_public_name_is_there_and_explains_itself(name: str) -> None:
    found = getattr(keystroke, name)
    assert found.__name__ == name
    assert found.__doc__
    assert not found.__doc__.startswith(f"{name}("), "this is only what a dataclass says by itself"


def test_what_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        keystroke.no_such_name  # noqa: B018 the question is the test


def test_type_checkers_see_the_same_names_at_the_same_homes() -> None:
    tree = ast.parse(Path(keystroke.__file__).read_text(encoding="utf-8"))
    seen = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("keystroke.")
        for alias in node.names
    }
    homes = {name: f"keystroke.{home}" for name, home in keystroke._HOME.items()}
    assert seen == homes
    assert {*homes, "__version__"} == NAMES


def test_importing_the_package_imports_nothing_of_it() -> None:
    script = "import sys, keystroke; print([m for m in sys.modules if m.startswith('keystroke.')])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_use_the_public_api_only(example: Path) -> None:
    for node in ast.walk(ast.parse(example.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            assert not [alias.name for alias in node.names if alias.name.startswith("keystroke.")]
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "keystroke":
            assert node.module == "keystroke"
            assert {alias.name for alias in node.names} <= NAMES


def test_python_m_keystroke_is_the_command_line() -> None:
    said = [
        subprocess.run(
            [sys.executable, "-m", "keystroke", *arguments], capture_output=True, text=True, check=False
        )
        for arguments in (["--version"], ["no-such-command"])
    ]
    assert said[0].stdout == f"keystroke {keystroke.__version__}\n"
    assert said[1].returncode == 2
    assert said[1].stderr.startswith("keystroke: ")
