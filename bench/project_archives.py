"""Releases of packages drawn at random: their names, their source archives and whether they have tests.

The names are those of the Python package index that pip is configured for, and the packages of npm that
`npm-high-impact` lists. A release fits if it has a test suite, 300 to 50,000 lines and at most 3 MB.
data/audit_projects.json pins the name and version of those drawn for the audit.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import shutil
import ssl
import subprocess
import sys
import tarfile
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from urllib.error import URLError

import platformdirs

from keystroke.analysis.audit.files import SourceFile, find_sources
from keystroke.errors import KeystrokeError

PINNED = Path(__file__).resolve().parent / "data" / "audit_projects.json"
JUDGED = Path(__file__).resolve().parent / "results" / "judged" / "audit.json"
CACHE = Path(platformdirs.user_cache_dir("keystroke")) / "bench-audit" / "projects"
MAX_ARCHIVE = 3_000_000  # bytes
MIN_LINES = 300
MAX_LINES = 50_000  # more would decide the rate of all projects together, and is mostly generated
TESTS = re.compile(
    r"(?:^|/)(?:tests?|spec|__tests__)/|(?:^|/)(?:test_[^/]*|[^/]*_tests?|tests|conftest)\.py$|\.(?:test|spec)(?:-d)?\.[jt]sx?$"
)


@dataclass(frozen=True)
class ProjectPin:
    registry: str  # pypi or npm
    name: str
    version: str
    seed: int


def download(url: str, limit: int = 80_000_000) -> bytes:
    """What is at an address; ValueError if it is longer than `limit`."""
    request = urllib.request.Request(url, headers={"Accept": "text/html, */*"})
    with urllib.request.urlopen(request, timeout=60, context=_certificates()) as answer:
        data: bytes = answer.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"more than {limit} bytes")
    return data


@cache
def _certificates() -> ssl.SSLContext:
    """Read once: it takes longer than most answers."""
    return ssl.create_default_context()


@cache
def _index() -> str:
    """The Python package index that pip uses."""
    found = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True
    ).stdout.strip()
    if found:
        return found
    from pip._internal.models.index import PyPI

    return str(PyPI.simple_url)


@cache
def _registry() -> str:
    found = subprocess.run(["npm", "config", "get", "registry"], capture_output=True, text=True)
    return found.stdout.strip().rstrip("/")


def _python_archive(name: str, version: str = "") -> tuple[str, str] | None:
    """The version and address of a source archive: of this version, or the newest."""
    page = download(f"{_index().rstrip('/')}/{name}/").decode()
    found: list[tuple[tuple[int, ...], str, str]] = []
    for address, file in re.findall(r'<a href="([^"#]+)[^>]*>([^<]+)</a>', page):
        release = re.fullmatch(r".+?-([0-9]+(?:\.[0-9]+)*)\.tar\.gz", file)
        if release is not None and (not version or release[1] == version):
            found.append((tuple(map(int, release[1].split("."))), release[1], address))
    return max(found)[1:] if found else None


def _script_archive(name: str, version: str = "") -> tuple[str, str] | None:
    page = json.loads(download(f"{_registry()}/{name}/{version or 'latest'}"))
    return str(page["version"]), str(page["dist"]["tarball"])


def find_archive(registry: str, name: str, version: str = "") -> tuple[str, str] | None:
    """The version and address of a package's source archive: of this version, or the newest."""
    return (_python_archive if registry == "pypi" else _script_archive)(name, version)


def fetch_project(pin: ProjectPin) -> Path | None:
    """The unpacked release, from the cache or the registry; None if it cannot be had."""
    folder = CACHE / pin.registry / f"{pin.name.replace('/', '+')}-{pin.version}"
    if not folder.is_dir():
        with contextlib.suppress(URLError, OSError, ValueError, KeyError, TimeoutError, tarfile.TarError):
            found = find_archive(pin.registry, pin.name, pin.version)
            if found is not None:
                unpack(download(found[1], limit=MAX_ARCHIVE), folder)
    inside = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    return inside[0] if len(inside) == 1 else folder if inside else None


def unpack(data: bytes, folder: Path) -> None:
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(part, filter="data")
    part.rename(folder)


def has_tests(root: Path) -> bool:
    """Whether a release has a test suite that can be started, and enough code."""
    names = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
    if not any(TESTS.search(name) for name in names):
        return False
    if (root / "package.json").is_file() and not any(name.endswith(".py") for name in names):
        try:
            declared = json.loads((root / "package.json").read_text(encoding="utf-8"))
            command = str(declared.get("scripts", {}).get("test", ""))
        except (ValueError, AttributeError):  # no table, or scripts that are none
            return False
        if not re.search(r"mocha|jest|tape|node|ava|vitest|tap", command):
            return False
    return MIN_LINES <= sum(source.text.count("\n") for source in sources(root)) <= MAX_LINES


def sources(root: Path) -> Iterator[SourceFile]:
    """The source files of a release without its tests."""
    for item in find_sources(root):
        if isinstance(item, SourceFile) and not TESTS.search(item.path.relative_to(root).as_posix()):
            yield item


def draw(seed: int, count: int) -> list[ProjectPin]:
    """Projects at random: two thirds from the Python index, one third from npm."""
    pick = random.Random(seed)
    page = download(f"{_index().rstrip('/')}/").decode()
    python = sorted(set(re.findall(r'<a href="(?:[^"]*/)?([^"/]+)/"', page)))
    _, address = _script_archive("npm-high-impact") or ("", "")
    with tarfile.open(fileobj=io.BytesIO(download(address))) as archive:
        member = archive.extractfile("package/lib/top.js")
        assert member is not None
        script = sorted(set(re.findall(r"'([^']+)'", member.read().decode())))
    pick.shuffle(python)
    pick.shuffle(script)
    known = {(pin.registry, pin.name) for pin in read_pins()} | judged_names()
    out: list[ProjectPin] = []
    for registry, names, wanted in (("pypi", python, count - count // 3), ("npm", script, count // 3)):
        found: list[ProjectPin] = []
        with ThreadPoolExecutor(8) as pool:
            for at in range(0, len(names), 32):
                part = [name for name in names[at : at + 32] if (registry, name) not in known]
                for pin in pool.map(lambda name, kind=registry: find_candidate(kind, name, seed), part):
                    if pin is not None and len(found) < wanted:
                        found.append(pin)
                if len(found) >= wanted:
                    break
        out += found
    return out


def judged_names() -> set[tuple[str, str]]:
    """The packages of which a reader has judged an alarm or a fix."""
    draws = json.loads(JUDGED.read_text(encoding="utf-8"))["draws"] if JUDGED.is_file() else []
    items = [item["project"] for draw in draws for item in (*draw["alarms"], *draw["fixes"])]
    return {(registry, name.rpartition("==")[0]) for registry, _, name in (i.partition(":") for i in items)}


def find_candidate(registry: str, name: str, seed: int, version: str = "") -> ProjectPin | None:
    """A release, or the newest, if it has tests; an answer that does not come is asked for twice."""
    for last in (False, True):
        try:
            found = find_archive(registry, name, version)
            break
        except (URLError, OSError, ValueError, KeyError, TimeoutError) as error:
            if last or getattr(error, "code", 0) == 404:
                return None
    if found is None:
        return None
    pin = ProjectPin(registry, name, found[0], seed)
    root = fetch_project(pin)
    try:
        fits = root is not None and has_tests(root)
    except (KeystrokeError, OSError):
        fits = False
    if not fits:
        shutil.rmtree(CACHE / registry / f"{name.replace('/', '+')}-{found[0]}", ignore_errors=True)
    return pin if fits else None


def read_pins(path: Path = PINNED) -> list[ProjectPin]:
    if not path.is_file():
        return []
    return [ProjectPin(**item) for item in json.loads(path.read_text(encoding="utf-8"))]


def write_pins(pins: list[ProjectPin]) -> None:
    PINNED.write_text(json.dumps([asdict(pin) for pin in pins], indent=1) + "\n", encoding="utf-8")
