"""What the package says it needs is what it imports; its lock and its floors agree with that."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "keystroke"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LOCK = ROOT / "requirements-dev.lock"

# Declared and never imported by us, and why.
SERVED = {"uvloop": "uvicorn's loop where it is installed"}
# Imported where the user may have it; what to do without it is said there.
OPTIONAL = {
    "kubernetes": "a script that writes the schemas of manifests, run by hand",
    "llama_cpp": "a peer of the benchmarks",
    "nvidia": "where torch keeps CUDA's compiler",
    "pip": "virtual environments have it",
}


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
    local |= sys.stdlib_module_names
    return {name: path for path in files for name in imported(path) if name not in local}


@cache
def imported(path: Path) -> frozenset[str]:
    """The first names of the modules that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return frozenset(found)


homes_of_modules = cache(packages_distributions)


def undeclared(files: Iterator[Path], known: set[str]) -> dict[str, Path]:
    homes = homes_of_modules()
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
    "scale": ["scale", "gateway/record/usage_export.py"],
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
    homes = homes_of_modules()
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


def _lock(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "package-lock.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("folder", ["editors/vscode", "web"])
def test_locks_of_node_agree_with_their_packages_and_name_no_host(folder: str) -> None:
    package = json.loads((ROOT / folder / "package.json").read_text(encoding="utf-8"))
    lock = _lock(ROOT / folder)
    own = lock["packages"][""]
    for kind in ("dependencies", "devDependencies"):
        assert own.get(kind, {}) == package.get(kind, {})
    assert all("integrity" in entry for name, entry in lock["packages"].items() if name)
    assert "http" not in "".join(str(entry.get("resolved", "")) for entry in lock["packages"].values())


def _editors_module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"editors_{name}", ROOT / "editors" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_wheel_takes_the_extension_for_vscode_if_it_was_built(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="the wheel is built with hatchling: pip install 'keystroke[dev]'")
    hook = _editors_module("wheel_hook").ExtensionHook(str(tmp_path), {}, None, None, str(tmp_path), "wheel")
    data: dict[str, dict[str, str]] = {"force_include": {}}
    hook.initialize("standard", data)
    assert data == {"force_include": {}}
    extension = tmp_path / "dist" / "keystroke.vsix"
    extension.parent.mkdir()
    extension.touch()
    hook.initialize("standard", data)
    assert data == {"force_include": {str(extension): "keystroke/editors/keystroke.vsix"}}


def test_the_archives_for_editors_hold_what_an_editor_loads(tmp_path: Path) -> None:
    """The packer on a folder that looks like a compiled extension; `make editors` compiles the real one."""
    build = _editors_module("build")
    room = tmp_path / "room"
    (room / "out").mkdir(parents=True)
    (room / "out" / "extension.js").write_text("exports.activate = () => {};\n")
    (room / "out" / "extension.js.map").write_text("{}")
    for name in ("package.json", "README.md"):
        shutil.copy(ROOT / "editors" / "vscode" / name, room / name)
    shutil.copy(ROOT / "LICENSE", room / "LICENSE.txt")
    build.write_vsix(room, tmp_path / "a.vsix")
    build.write_vsix(room, tmp_path / "b.vsix")
    assert (tmp_path / "a.vsix").read_bytes() == (tmp_path / "b.vsix").read_bytes()
    with zipfile.ZipFile(tmp_path / "a.vsix") as archive:
        names = set(archive.namelist())
        assert {"extension.vsixmanifest", "[Content_Types].xml", "extension/LICENSE.txt"} <= names
        assert "extension/out/extension.js" in names
        assert "extension/out/extension.js.map" not in names
        manifest = ElementTree.fromstring(archive.read("extension.vsixmanifest"))
        ElementTree.fromstring(archive.read("[Content_Types].xml"))
    identity = next(node for node in manifest.iter() if node.tag.endswith("}Identity"))
    assert identity.attrib["Id"] == "keystroke"
    build.write_neovim(tmp_path / "n.tar.gz")
    with tarfile.open(tmp_path / "n.tar.gz") as archive_file:
        inside = archive_file.getnames()
    assert "keystroke.nvim/lua/keystroke/init.lua" in inside
    assert "keystroke.nvim/LICENSE" in inside


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program as a user installs it: unpacked from the wheel, far from the repository."""
    pytest.importorskip("hatchling", reason="the wheel is built with hatchling: pip install 'keystroke[dev]'")
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (file,) = folder.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def _installed(wheel: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the program of the wheel with the packages of this environment and a home of its own."""
    home = wheel.parent / "home"
    home.mkdir(exist_ok=True)
    clean = {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": str(wheel), "NO_COLOR": "1"}
    clean |= {"KEYSTROKE_SHARING_ENABLED": "0", **environment}
    command = [sys.executable, "-m", "keystroke", *arguments]
    return subprocess.run(command, cwd=home, env=clean, capture_output=True, text=True, check=False)


def test_the_wheel_holds_all_that_a_user_needs(wheel: Path) -> None:
    package = wheel / "keystroke"
    for file in (
        "engine/catalogue.toml",
        "engine/onnx/native/operators.c",
        "gateway/page/index.html",
        "gateway/page/app.js",
        "models/keystroke-80m/keystroke-80m.gguf",
        "editors/neovim/lua/keystroke/init.lua",
        "py.typed",
    ):
        assert (package / file).is_file(), file
    assert not (wheel / "keystroke_lab").exists()
    shown = _installed(wheel, "models", "list", "--json")
    rows = {row["name"]: row for row in json.loads(shown.stdout)}
    assert rows["embedded"]["where"].startswith(str(wheel))
    assert "qwen3-coder" in rows


@pytest.mark.skipif(sys.platform == "win32", reason="the PATH without a compiler is built of links")
def test_the_wheel_completes_code_offline_without_a_compiler_and_says_what_is_lost(wheel: Path) -> None:
    bare = wheel.parent / "bin"
    bare.mkdir(exist_ok=True)
    done = _installed(wheel, "demo", PATH=str(bare), CC="")
    assert "self.items.append(item)" in done.stdout, done.stderr
    assert "there is no C compiler" in done.stderr
