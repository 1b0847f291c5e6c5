"""Edits of JavaScript packages: what people wrote, under permissive licences, and nothing a build wrote."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import httpx
import pytest

from keystroke_lab.corpus.collecting import version_edits
from keystroke_lab.corpus.npm_edits import (
    LARGEST_PACKAGE,
    NpmRegistry,
    collect_packages,
    script_files,
)
from keystroke_lab.corpus.trajectories import read_edits

OLD = "\n".join(f"const v{i} = one({i});" for i in range(40)) + "\n"
NEW = OLD.replace("v5 = one", "v5 = two").replace("v30 = one", "v30 = two")


def packed(files: dict[str, str]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for path, text in files.items():
            entry = tarfile.TarInfo(f"package/{path}")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    return stream.getvalue()


def registry(licence: object, first: bytes | None = None) -> NpmRegistry:
    first = packed({"lib/a.js": OLD}) if first is None else first
    archives = {"1.0.0": first, "1.1.0": packed({"lib/a.js": NEW}), "2.0.0-rc1": b""}

    def answer(request: httpx.Request) -> httpx.Response:
        name = request.url.path.rsplit("/", 1)[1]
        if name == "left":
            versions = {v: {"dist": {"tarball": f"https://registry.test/{v}"}} for v in archives}
            return httpx.Response(200, json={"license": licence, "versions": versions})
        return httpx.Response(200, content=archives[name]) if name in archives else httpx.Response(404)

    return NpmRegistry("https://registry.test", transport=httpx.MockTransport(answer))


@pytest.mark.parametrize("licence", ["MIT", {"type": "ISC"}])
def test_the_edits_between_versions_are_collected_once(tmp_path: Path, licence: object) -> None:
    for outcome in ("collected", "there"):
        assert collect_packages(registry(licence), ["left"], tmp_path) == {outcome: 1}
    (edit,) = read_edits(tmp_path / "npm+left.jsonl.gz")
    assert (edit.project, edit.release_to, len(edit.hunks)) == ("npm:left", "1.1.0", 2)
    assert edit.after() == NEW


@pytest.mark.parametrize("licence", ["GPL-3.0", "UNLICENSED", None])
def test_a_package_that_is_not_permissive_or_not_there_is_left_out(tmp_path: Path, licence: object) -> None:
    found = collect_packages(registry(licence), ["left", "nowhere"], tmp_path)
    assert found == {"left out": 2}
    assert not list(tmp_path.iterdir())


def test_a_package_that_turns_out_to_be_large_is_left_out(tmp_path: Path) -> None:
    found = collect_packages(registry("MIT", bytes(LARGEST_PACKAGE + 1)), ["left"], tmp_path)
    assert found == {"left out": 1}


def test_what_a_build_wrote_is_left_out() -> None:
    files = {
        "src/a.ts": OLD,
        "dist/a.js": OLD,
        "a.min.js": OLD,
        "types/a.d.ts": OLD,
        "b.js": "x" * 400 + "\n",
        "c.js": OLD + "Object.defineProperty(exports, '__esModule', {});\n",
        "readme.md": OLD,
    }
    assert list(script_files(packed(files))) == ["src/a.ts"]


def test_a_damaged_archive_gives_what_could_be_read() -> None:
    whole = packed({"src/a.ts": OLD, "src/b.ts": OLD * 3})
    assert set(script_files(whole[: len(whole) // 3])) <= {"src/a.ts"}
    assert (
        list(
            version_edits(
                "npm:x", "MIT", [("1.0.0", script_files(b"no archive")), ("1.0.1", script_files(whole))]
            )
        )
        == []
    )
