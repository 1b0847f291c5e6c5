"""Finds packages with tests and at least one safe fix among many names, for `bench.audit_projects --tested`.

The names are shuffled by a seed. Of each package the newest source archive is read in memory; only files that
hold a word that a safe fix needs are audited, and an archive without such a file is never unpacked. What is
found is a guess: `--tested` audits all files of the package.

Every name looked at is kept in the cache with its outcome, so a run that has no more time is continued by the
next one. `--out` lists the finds as NAME==VERSION, the packages of npm with `npm:` in front.

Last line: JSON. `python -m bench.audit_scan --seed N --names FILE --out FILE [--registry npm] [--minutes M]`
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import re
import shutil
import signal
import tarfile
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.error import URLError

from bench.project_archives import (
    CACHE,
    MAX_ARCHIVE,
    TESTS,
    download,
    find_archive,
    has_tests,
    judged_names,
    read_pins,
    sources,
    unpack,
)
from bench.project_tests import TEST
from keystroke.analysis.audit import Auditor
from keystroke.analysis.audit.files import LANGUAGE_OF
from keystroke.analysis.audit.project import ProjectFacts
from keystroke.errors import KeystrokeError

SECONDS = 60  # for one package
_SECRET = rb"(?i:passw|secret|csrf|otp|nonce|token|salt|session|captcha|pin|sid|code|key)"
# Words that a text must all hold, and what stands in it where some rule has a safe fix; one row is enough.
_ROWS: dict[str, list[tuple[tuple[bytes, ...], bytes]]] = {
    "python": [
        ((b"yaml", b"load"), rb"\bload(?:_all)?\("),
        ((b"random.",), _SECRET + rb".*\brandom\.\w|\brandom\.\w.*" + _SECRET),
        ((b"random.",), rb"\bdef \w*" + _SECRET + rb"\w*\((?:.*\n){1,9}?.*\brandom\.\w"),
        (
            (b"assert ",),
            rb"assert .*(?:is_(?:admin|superuser|staff|auth)|has_perm|ermission|uthori|logged_in|role)",
        ),
        ((b"request.",), rb"\b_?(?:log\w*|LOG\w*|open|execute|Response|remove|join|return)\b"),
        ((b"argument(",), rb"\bget_(?:query_|body_)?argument\("),
        ((b"@",), rb"(?m)^\s*@[\w.]+\.(?:route|get|post|put|delete|patch)\("),
        *(
            ((b"'", word), rb"'(?:%s|%\(|\{|\"\s*[+%]|\"\"\"\s*[+%])")
            for word in (
                b"execute",
                b"fetch",
                b"system(",
                b"open(",
                b"shell",
                b"getoutput",
                b".raw(",
                b"read_sql",
            )
        ),
        ((b"xpath",), rb"."),
        ((b"XPath",), rb"."),
        ((b"tarfile", b"extract"), rb"."),
        ((b"mktemp",), rb"."),
    ],
    "javascript": [
        ((b"Buffer",), rb"\bBuffer(?:\.allocUnsafe\w*)?\(|\bSlowBuffer\b"),
        (
            (b".",),
            rb"\b(?:req|request|ctx)\.(?:query|params|body|cookies|header|get|url|path|originalUrl|hostname)",
        ),
        ((b".",), rb"location\.(?:search|hash|href|pathname)|earchParams|document\.(?:referrer|URL|cookie)"),
        ((b"(",), rb"\w(?:Raw|query|execute)\(|createWriteStream"),
    ],
    "c": [
        ((b"alloc",), rb"alloc\s*\([^;]*(?:\*|strlen)"),
        ((b"str",), rb"\bstr(?:cpy|cat)\s*\("),
        ((b"printf",), rb"\bv?sprintf\s*\(|\bprintf\s*\(\s*\w"),
        ((b"scanf",), rb"%s"),
        ((b"gets(",), rb"\bgets\("),
    ],
}
_ROWS |= {"typescript": _ROWS["javascript"], "tsx": _ROWS["javascript"], "cpp": _ROWS["c"]}
_COMPILED = {
    language: [(words, re.compile(pattern)) for words, pattern in rows] for language, rows in _ROWS.items()
}


def may_have_fix(language: str, text: bytes) -> bool:
    """Whether a text of a language holds the words that some safe fix needs."""
    return any(
        all(word in text for word in words) and pattern.search(text)
        for words, pattern in _COMPILED.get(language, ())
    )


def scan(registry: str, name: str) -> dict[str, Any]:
    """What is known of a package: `tests`, and `rules`, that of its first safe fix, where it has tests."""
    seen: dict[str, Any] = {"name": name, "version": "", "tests": False, "rules": []}
    with contextlib.suppress(
        URLError, OSError, ValueError, KeyError, TimeoutError, tarfile.TarError, EOFError
    ):
        found = find_archive(registry, name)
        if found is None:
            return seen
        seen["version"] = found[0]
        data = download(found[1], limit=MAX_ARCHIVE)
        seen["tests"], wanted = _read(data)
        if not seen["tests"] or not wanted:
            return seen
        folder = CACHE / registry / f"{name.replace('/', '+')}-{found[0]}"
        if not folder.is_dir():
            unpack(data, folder)
        inside = [path for path in folder.iterdir() if path.is_dir()]
        root = inside[0] if len(inside) == 1 else folder
        with contextlib.suppress(KeystrokeError):
            seen["tests"] = has_tests(root)
            if seen["tests"]:
                seen["rules"] = list(islice(_safe_fixes(root, wanted), 1))
        if not seen["rules"]:
            shutil.rmtree(folder, ignore_errors=True)
    return seen


def _read(data: bytes) -> tuple[bool, set[str]]:
    """Whether an archive has tests, and the names of its files that may have a safe fix, without the first
    folder."""
    tests = False
    wanted: set[str] = set()
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            path = member.name.removeprefix("./").partition("/")[2] or member.name
            language = LANGUAGE_OF.get(Path(path).suffix.lower(), "")
            if not member.isfile() or language not in _COMPILED or member.size > 1_000_000:
                continue
            is_test = TESTS.search(path) is not None
            if (is_test and tests) or (file := archive.extractfile(member)) is None:
                continue
            text = file.read()
            if is_test:
                # Folders of tests may hold nothing but data.
                tests = language != "python" or TEST.search(text.decode("utf-8", "replace")) is not None
            elif may_have_fix(language, text):
                wanted.add(path)
    return tests, wanted


def _safe_fixes(root: Path, wanted: set[str]) -> Iterator[str]:
    facts = ProjectFacts(root)
    # Python first: compiled code is slower to read and to prove.
    for source in sorted(sources(root), key=lambda source: source.language != "python"):
        if source.path.relative_to(root).as_posix() not in wanted:
            continue
        with contextlib.suppress(KeystrokeError):
            for item in Auditor(source.language, project=facts).audit(source.text):
                if item.fixes:
                    yield item.rule


def _scan_in_time(registry: str, name: str) -> dict[str, Any]:
    def end(_signal: int, _frame: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, end)
    signal.alarm(SECONDS)
    try:
        return scan(registry, name)
    except TimeoutError:
        return {"name": name, "version": "", "tests": False, "rules": []}
    finally:
        signal.alarm(0)


def scan_names(
    seed: int, registry: str, names: list[str], minutes: float, workers: int, out: Path
) -> dict[str, Any]:
    state = CACHE.parent / f"scan-{registry}-{seed}.jsonl"
    state.parent.mkdir(parents=True, exist_ok=True)
    seen = [json.loads(line) for line in state.read_text().splitlines()] if state.is_file() else []
    known = {pin.name for pin in read_pins()} | {name for _, name in judged_names()}
    known |= {entry["name"] for entry in seen}
    names = sorted(set(names))
    random.Random(seed).shuffle(names)
    left = iter([name for name in names if name not in known])
    until = time.monotonic() + minutes * 60
    running: set[Future[dict[str, Any]]] = set()
    with ProcessPoolExecutor(workers) as pool, state.open("a", encoding="utf-8") as lines:
        while True:
            while len(running) < 2 * workers and time.monotonic() < until and (name := next(left, "")):
                running.add(pool.submit(_scan_in_time, registry, name))
            if not running:
                break
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                seen.append(future.result())
                lines.write(json.dumps(seen[-1]) + "\n")
                lines.flush()
                if seen[-1]["rules"]:
                    write_finds(out, registry, seen)
    return {
        "seed": seed,
        "looked_at": len(seen),
        "with_tests": sum(entry["tests"] for entry in seen),
        "with_safe_fixes": sum(bool(entry["rules"]) for entry in seen),
    }


def write_finds(out: Path, registry: str, seen: list[dict[str, Any]]) -> None:
    before = "" if registry == "pypi" else f"{registry}:"
    finds = [f"{before}{entry['name']}=={entry['version']}" for entry in seen if entry["rules"]]
    out.write_text("\n".join(finds) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--names", type=Path, required=True, help="names of packages, one a line")
    parser.add_argument("--out", type=Path, required=True, help="write the packages with safe fixes here")
    parser.add_argument("--registry", choices=("pypi", "npm"), default="pypi")
    parser.add_argument("--minutes", type=float, default=40)
    parser.add_argument("--workers", type=int, default=8)
    given = parser.parse_args(arguments)
    names = given.names.read_text(encoding="utf-8").split()
    print(json.dumps(scan_names(given.seed, given.registry, names, given.minutes, given.workers, given.out)))


if __name__ == "__main__":
    main()
