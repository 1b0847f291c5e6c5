"""Edits of Debian's source packages: two releases compared, permissive licences, nothing a tool wrote."""

from __future__ import annotations

import hashlib
import io
import lzma
import tarfile
from pathlib import Path

import httpx
import pytest

from keystroke_lab.corpus.debian_edits import (
    SourceArchive,
    collect_sources,
    in_both,
    source_files,
    stated_licence,
)
from keystroke_lab.corpus.trajectories import read_edits

OLD = "package a\n" + "\n".join(f"var v{i} = one({i})" for i in range(40)) + "\n"
NEW = OLD.replace("v5 = one", "v5 = two").replace("v30 = one", "v30 = two")
EXPAT = "Format: 1.0\n\nFiles: *\nCopyright: a\nLicense: Expat\n"


def packed(files: dict[str, str]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:xz") as archive:
        for path, text in files.items():
            entry = tarfile.TarInfo(path)
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    return stream.getvalue()


def archive_of(copyright_file: str, *, damaged: bool = False) -> SourceArchive:
    held: dict[str, bytes] = {}
    for suite, version, text in (("bookworm", "1.0", OLD), ("trixie", "1:1.1", NEW)):
        upstream = version.rpartition(":")[2]
        files = {
            f"left_{upstream}.orig.tar.xz": packed({"left/a.go": text}),
            f"left_{upstream}-1.debian.tar.xz": packed({"debian/copyright": copyright_file}),
        }
        rows = "".join(
            f"\n {hashlib.sha256(data).hexdigest()} {len(data)} {name}" for name, data in files.items()
        )
        said = f"Package: left\nVersion: {version}-1\nBuild-Depends: dh-golang,\n golang-any\n"
        said += f"Directory: pool/l\nChecksums-Sha256:{rows}\n"
        other = "Package: prose\nVersion: 1-1\nDirectory: pool/p\nChecksums-Sha256:\n"
        held[f"/dists/{suite}/main/source/Sources.xz"] = lzma.compress(f"{said}\n{other}".encode())
        for name, data in files.items():
            held[f"/pool/l/{name}"] = data + b"x" if damaged else data

    def answer(request: httpx.Request) -> httpx.Response:
        path = request.url.path
        return httpx.Response(200, content=held[path]) if path in held else httpx.Response(404)

    return SourceArchive("https://archive.test", transport=httpx.MockTransport(answer))


def test_the_edits_between_two_releases_are_collected_once(tmp_path: Path) -> None:
    archive = archive_of(EXPAT)
    releases = [archive.packages(suite) for suite in ("bookworm", "trixie")]
    assert in_both(releases) == ["left"]
    for outcome in ("collected", "there"):
        assert collect_sources(archive, releases, ["left"], tmp_path) == {outcome: 1}
    (edit,) = read_edits(tmp_path / "debian+left.jsonl.gz")
    assert (edit.project, edit.release_from, edit.release_to) == ("debian:left", "1.0", "1.1")
    assert (edit.licence, edit.path, edit.after()) == ("MIT", "a.go", NEW)


@pytest.mark.parametrize(
    ("copyright_file", "damaged", "outcome"),
    [
        (EXPAT.replace("Expat", "GPL-2+"), False, "licence"),
        ("Copyright: somebody, see the file", False, "licence"),
        (EXPAT, True, "failed: InputError"),
    ],
)
def test_what_is_not_permissive_or_has_another_hash_is_left_out(
    tmp_path: Path, copyright_file: str, damaged: bool, outcome: str
) -> None:
    archive = archive_of(copyright_file, damaged=damaged)
    releases = [archive.packages(suite) for suite in ("bookworm", "trixie")]
    assert collect_sources(archive, releases, ["left"], tmp_path) == {outcome: 1}


def test_what_a_tool_wrote_and_what_belongs_to_others_is_left_out() -> None:
    files = {
        "x/a.c": OLD,
        "x/vendor/b.c": OLD,
        "x/c.rs": f"// @generated\n{OLD}",
        "x/d.txt": OLD,
        "x/e.java": "y" * 400,
    }
    assert set(source_files(packed(files))) == {"a.c"}
    assert source_files(b"no archive") == {}
    assert stated_licence(b"no archive") is None
