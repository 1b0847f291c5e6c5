"""What the package says it needs is what it imports; its lock and its floors agree with that."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "keystroke"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LOCK = ROOT / "requirements-dev.lock"

# Declared and never imported by us, and why.
SERVED = {"uvloop": "uvicorn's loop where it is installed"}
# Imported where the user may have it; what to do without it is said there.
OPTIONAL = {"llama_cpp": "a peer of the benchmarks", "nvidia": "where torch keeps CUDA's compiler"}


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(*extras: str) -> set[str]:
    named = [*PROJECT["dependencies"]]
    for extra in extras:
        named += PROJECT["optional-dependencies"][extra]
    return {plain(re.match(r"[\w.-]+", requirement)[0]) for requirement in named}  # type: ignore[index]


def imports(files: Iterator[Path]) -> dict[str, Path]:
    """Third-party modules by their first name, each with a file that imports it."""
    local = {path.stem for folder in ("tests", "bench", "examples") for path in (ROOT / folder).rglob("*.py")}
    local |= {"keystroke", "keystroke_lab", "bench", "tests"}
    found: dict[str, Path] = {}
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            else:
                continue
            found |= {name.partition(".")[0]: path for name in names}
    return {name: path for name, path in found.items() if name not in sys.stdlib_module_names | local}


def undeclared(files: Iterator[Path], known: set[str]) -> dict[str, Path]:
    homes = packages_distributions()
    return {
        module: path
        for module, path in imports(files).items()
        if module not in OPTIONAL and not {plain(home) for home in homes.get(module, [module])} & known
    }


def part(extra: str) -> Iterator[Path]:
    for place in (SOURCE / name for name in EXTRAS[extra]):
        yield from [place] if place.is_file() else place.rglob("*.py")


EXTRAS = {
    "acp": ["clients/acp", "clients/cli/acp.py"],
    "cuda": ["engine/cuda"],
    "mcp": ["agent/tools/mcp.py"],
    "scale": ["scale"],
}


def base() -> Iterator[Path]:
    extra = {SOURCE / place for places in EXTRAS.values() for place in places}
    return (path for path in SOURCE.rglob("*.py") if not extra & {path, *path.parents})


def test_the_base_install_has_all_that_the_base_imports() -> None:
    gpu = {"torch"}  # asked for by name where a GPU is looked for; without it there is none
    assert undeclared(base(), declared() | gpu) == {}


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_has_all_that_its_part_imports(extra: str) -> None:
    assert undeclared(part(extra), declared(extra)) == {}


def test_the_development_tools_have_all_that_tests_and_benchmarks_import() -> None:
    files = (
        path for folder in ("tests", "bench", "examples", "docs") for path in (ROOT / folder).rglob("*.py")
    )
    assert undeclared(files, declared("dev", "docs")) == {}


def test_the_lab_has_all_that_it_imports() -> None:
    lab = tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    own = {plain(re.match(r"[\w.-]+", requirement)[0]) for requirement in lab["dependencies"]}  # type: ignore[index]
    assert undeclared((ROOT / "lab").rglob("*.py"), declared() | own) == {}


def test_nothing_is_declared_that_is_not_imported() -> None:
    homes = packages_distributions()
    used = {plain(home) for module in imports(base()) for home in homes.get(module, [module])}
    assert declared() - used == set(SERVED)


def test_floors_are_written_as_constraints() -> None:
    said = subprocess.run(
        [sys.executable, ROOT / ".ci" / "lowest.py", "dev"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    held = {plain(line.partition("==")[0]) for line in said}
    assert held == declared("dev") - {"torch", "mypy", "ruff"}, "all but what is pinned anyway"


def test_the_lock_holds_every_dependency_within_its_bounds_and_names_no_host() -> None:
    text = LOCK.read_text(encoding="utf-8")
    assert not re.search(r"https?:|--(extra-)?index|--find-links|file:|@ ", text)
    locked = {
        plain(name): version
        for name, version in re.findall(r"^([\w.-]+)(?:\[[^]]*\])?==(\S+)", text, re.MULTILINE)
    }
    assert declared("dev", "docs") - {"torch"} <= set(locked)
    floors = subprocess.run(
        [sys.executable, ROOT / ".ci" / "lowest.py", "dev", "docs"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    for line in floors:
        name, _, floor = line.partition(";")[0].partition("==")
        assert numbers(locked[plain(name)]) >= numbers(floor), (
            f"{name} is locked below its floor; run `make lock`"
        )


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
