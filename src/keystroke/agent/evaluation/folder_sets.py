"""Reads sets of folder tasks: Terminal-Bench's format, and exercises of the polyglot benchmark.

Nothing is run or downloaded. Containers are not built: downloads are removed from test scripts, and a task
whose tools this machine lacks is skipped when it is due. A solver sees only what the instruction is about.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from keystroke.agent.evaluation.tasks import FolderTask
from keystroke.errors import InputError

_TESTS = "tests"
_FETCHING = re.compile(
    r"^\s*(?:sudo\s+)?(?:apt(?:-get)?|curl|wget|pip3?|python3?\s+-m\s+pip|uv\s+(?:init|add|pip|venv|sync)|npm\s+(?:ci|i|install)|"
    r"source\s+\S*env\b|\.\s+\S*env\b|go\s+mod\s+download)\b"
)
_FILES = re.compile(
    r"(?:supplied files|write (?:it|your solution|the code) to|in the file)s?:?\s+"
    r"([\w/-][\w./-]*\.\w+\b(?:,? +[\w/-][\w./-]*\.\w+\b)*)",
    re.IGNORECASE,
)
EXERCISE_SECONDS = 15.0  # for an exercise's tests, which take about one; more only makes endless loops costly
_HANGING = 8  # seconds after which a hanging test prints its stack
_PLAIN = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # a task's tests need none of this machine's plugins
_PROGRAMS = {"go": "go", "rust": "cargo", "javascript": "npm", "java": "javac", "cpp": "cmake"}


def folder_tasks(root: Path) -> list[FolderTask] | None:
    """The tasks of a folder; None where it has none in a known format."""
    found = [_read_terminal_bench(path.parent) for path in sorted(root.glob("**/task.yaml"))]
    if not found:
        found = [_read_exercise(path.parents[1]) for path in sorted(root.glob("**/.meta/config.json"))]
    return [task for task in found if task is not None] or None


def _read_terminal_bench(folder: Path) -> FolderTask | None:
    try:
        config: Any = yaml.safe_load((folder / "task.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"{folder / 'task.yaml'} cannot be read: {error}") from None
    script = folder / "run-tests.sh"
    if not isinstance(config, dict) or not isinstance(config.get("instruction"), str) or not script.is_file():
        return None
    instruction = config["instruction"].strip()
    found = (path for path in sorted((folder / "tests").rglob("*")) if path.is_file())
    tests = {f"{_TESTS}/{path.relative_to(folder / 'tests').as_posix()}": path for path in found}
    return FolderTask(
        id=folder.name,
        instruction=instruction.replace("/app/", ""),
        source=folder / "workspace",
        files=_mentioned_files(instruction),
        tests={**tests, f"{_TESTS}/run-tests.sh": script},
        command=f"bash ../{_TESTS}/run-tests.sh",
        seconds=min(float(config.get("max_test_timeout_sec") or 180.0), 300.0),
        needs=_list_needs(folder.name, script),
        container=True,
        environment={"TEST_DIR": "{root}/" + _TESTS, **_PLAIN},
    )


def strip_downloads(script: str) -> str:
    """A test script without its downloads; this machine's packages are used."""
    lines = [line for line in script.splitlines() if not _FETCHING.match(line)]
    return "\n".join(lines).replace("uv run ", "") + "\n"


def _list_needs(name: str, script: Path) -> tuple[str, ...]:
    """The tools that a task's tests need, judged by its name and its script."""
    text = script.read_text(encoding="utf-8", errors="replace")
    language = next((key for key in _PROGRAMS if f"_{key}_" in name), "")
    if language:
        return (f"program:{_PROGRAMS[language]}",)
    return ("program:bash", "pytest") if "pytest" in text else ("program:bash",)


def _mentioned_files(instruction: str) -> tuple[str, ...]:
    """Files that an instruction asks to be written."""
    found = _FILES.search(instruction)
    names = re.split(r"[\s,]+", found[1].strip()) if found else []
    return tuple(name.removeprefix("/app/").rstrip(".") for name in names if "." in name)


def _read_exercise(folder: Path) -> FolderTask | None:
    """A Python exercise: a stub, instructions, tests."""
    try:
        config: Any = json.loads((folder / ".meta" / "config.json").read_text(encoding="utf-8"))
        stubs, tests = config["files"]["solution"], config["files"]["test"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not all(isinstance(name, str) and name.endswith(".py") for name in (*stubs, *tests)):
        return None
    texts = []
    for name in ("introduction.md", "instructions.md", "instructions.append.md"):
        path = folder / ".docs" / name
        if path.is_file():
            texts.append(path.read_text(encoding="utf-8").strip())
    texts.append(
        f"Write {', '.join(stubs)} as described above. Keep the names of functions and classes that are "
        "there, since tests call them, and use the standard library only."
    )
    helpers = [name for name in config["files"].get("editor", ()) if isinstance(name, str)]
    return FolderTask(
        id=folder.name,
        instruction="\n\n".join(texts),
        source=folder,
        files=tuple(stubs),
        tests={name: folder / name for name in (*tests, *helpers) if (folder / name).is_file()},
        command="{python} -m pytest -q -p no:cacheprovider --no-header "
        f"-o faulthandler_timeout={_HANGING} {shlex.join(tests)}",
        seconds=EXERCISE_SECONDS,
        needs=("pytest",),
        environment=_PLAIN,
    )
