"""Corpora of eight languages: what Debian and npm hold, under which licence, and nothing evaluated."""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import httpx
import pytest

from keystroke.errors import InputError, Unavailable
from keystroke.text.cases import CompletionCase, write_cases
from keystroke_lab.corpus import npm
from keystroke_lab.corpus.build import build
from keystroke_lab.corpus.copyright import parse, permissive
from keystroke_lab.corpus.debian import Mirror, contents_of, copyright_of
from keystroke_lab.corpus.filters import Refusal, clean, is_test
from keystroke_lab.corpus.harvest import read_project, read_record
from keystroke_lab.corpus.languages import LANGUAGES, language_of
from keystroke_lab.corpus.overlap import contaminated
from keystroke_lab.corpus.shards import read_shard, shard_paths, write_shard
from keystroke_lab.corpus.sources import PackageQueue, WantedPackage, harvest_sources, in_order, stored_path
from keystroke_lab.pretraining.documents import SourceText

COPYRIGHT = """Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/

Files: *
Copyright: somebody
License: Expat

Files: lib/gnu/*
License: GPL-3+

Files: debian/*
License: GPL-2
"""


def code(name: str, lines: int = 30) -> str:
    body = "".join(
        f"\tvalue{i} := compute_{name}(input, {i})\n\tif value{i} != nil {{\n\t}}\n" for i in range(lines)
    )
    return f"package {name}\n\nfunc {name}() error {{\n{body}\treturn nil\n}}\n"


def script(name: str) -> str:
    return "".join(
        f"export function {name}{i}(a, b) {{\n  return a.{name} + b.other{i};\n}}\n" for i in range(20)
    )


def tar(files: dict[str, str], mode: Literal["w:gz", "w:xz"] = "w:gz", mtime: int = 1_600_000_000) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=mode) as archive:
        for path, text in files.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mtime = len(text.encode()), mtime
            archive.addfile(entry, io.BytesIO(text.encode()))
    return stream.getvalue()


def deb(files: dict[str, str]) -> bytes:
    """A binary package: an ar archive of three members."""
    data = tar(files, "w:xz")
    out = b"!<arch>\n"
    for name, content in (("debian-binary", b"2.0\n"), ("control.tar.xz", b"odd"), ("data.tar.xz", data)):
        out += f"{name:<16}{0:<12}{0:<6}{0:<6}{644:<8}{len(content):<10}`\n".encode() + content
        out += b"\n" * (len(content) % 2)
    return out


class Archive:
    """A Debian archive and an npm registry, called in-process."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.sources: list[str] = []
        self.binaries: list[str] = []

    def add(self, name: str, upstream: bytes, stated: str) -> None:
        binary = deb({f"./usr/share/doc/{name}/copyright": stated})
        file = f"{name}_1.orig.tar.gz"
        self.files |= {f"/pool/{name}/{file}": upstream, f"/pool/{name}/{name}.deb": binary}
        digest = hashlib.sha256(upstream).hexdigest()
        self.sources.append(
            f"Package: {name}\nVersion: 1-2\nDirectory: pool/{name}\n"
            f"Checksums-Sha256:\n {'0' * 64} 10 {name}_1-2.debian.tar.xz\n {digest} {len(upstream)} {file}"
        )
        carried = hashlib.sha256(binary).hexdigest()
        self.binaries.append(
            f"Package: {name}-bin\nSource: {name} (1-2)\nFilename: pool/{name}/{name}.deb\n"
            f"Size: {len(binary)}\nSHA256: {carried}"
        )

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path.endswith(("Sources.xz", "Packages.xz")):
            rows = self.sources if path.endswith("Sources.xz") else self.binaries
            return httpx.Response(200, content=lzma.compress("\n\n".join(rows).encode()))
        return httpx.Response(200, content=self.files[path]) if path in self.files else httpx.Response(404)


@pytest.fixture
def archive() -> Archive:
    found = Archive()
    go = {"x-1/a.go": code("one"), "x-1/lib/gnu/b.go": code("two"), "x-1/vendor/c.go": code("three")}
    found.add("golang-x", tar(go), COPYRIGHT)
    found.add("gnuish", tar({"g-1/a.c": "int main() {}\n" * 40}), COPYRIGHT.replace("Expat", "GPL-2+"))
    manifest = json.dumps({"dependencies": {"left": "1"}, "devDependencies": {"right": "2"}})
    found.add("node-y", tar({"y-1/lib/y.js": script("y"), "y-1/package.json": manifest}), COPYRIGHT)
    found.files |= {
        "/left": json.dumps(
            {
                "dist-tags": {"latest": "2.0.0"},
                "time": {"1.0.0": "2026-01-01T00:00:00+00:00"},
                "versions": {
                    "2.0.0": {
                        "license": "MIT",
                        "dist": {"tarball": "https://npm.test/left.tgz"},
                        "dependencies": {"young": "1"},
                    }
                },
            }
        ).encode(),
        "/left.tgz": tar(
            {
                "package/src/left.ts": script("left"),
                "package/lib/left.js": script("left"),
                "package/dist/l.js": script("l"),
            }
        ),
        "/young": json.dumps(
            {
                "dist-tags": {"latest": "1.0.0"},
                "time": {"1.0.0": "2026-01-01T00:00:00+00:00"},
                "versions": {"1.0.0": {"license": "MIT", "dist": {"tarball": "https://npm.test/young.tgz"}}},
            }
        ).encode(),
    }
    return found


def harvested(archive: Callable[[httpx.Request], httpx.Response], folder: Path) -> dict[str, int]:
    transport = httpx.MockTransport(archive)
    mirror = Mirror("https://debian.test", transport=transport)
    queue = PackageQueue(dict.fromkeys(LANGUAGES, 10**9))
    for wanted in in_order(mirror.packages()):
        queue.add(wanted)
    registry = npm.NpmIndex("https://npm.test", transport=transport)
    return dict(harvest_sources(mirror, registry, queue, folder, workers=1))


def test_packages_are_harvested_with_the_licence_of_every_file(archive: Archive, tmp_path: Path) -> None:
    assert harvested(archive, tmp_path) == {"kept": 3, "licence": 1, "absent": 1, "too_young": 1}
    record, files = read_project(stored_path(tmp_path, "debian:golang-x"))
    assert [(file.path, file.licence) for file in files] == [("a.go", "MIT")]
    assert record.refused == {"licence": 1, "vendored": 1}
    assert (record.version, record.licence) == ("1-2", "MIT")
    assert set(record.languages) == {"go"}
    assert read_record(stored_path(tmp_path, "debian:gnuish")).outcome == "licence"


def test_npm_gives_what_was_written_and_nothing_younger_than_the_frozen_release(
    archive: Archive, tmp_path: Path
) -> None:
    harvested(archive, tmp_path)
    record, files = read_project(stored_path(tmp_path, "npm:left"))
    assert [file.path for file in files] == ["src/left.ts"]
    assert record.first_released < "2025-07"  # its registry does not say so, but a frozen package needs it
    assert read_record(stored_path(tmp_path, "npm:young")).outcome == "too_young"
    assert read_record(stored_path(tmp_path, "npm:right")).outcome == "absent"


def test_no_more_of_a_large_package_is_fetched_than_it_takes_to_know(
    archive: Archive, tmp_path: Path
) -> None:
    sent: list[int] = []

    def endless() -> Iterator[bytes]:
        while True:
            sent.append(1 << 20)
            yield bytes(1 << 20)

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=endless()) if request.url.path == "/left.tgz" else archive(request)

    harvested(answer, tmp_path)
    assert read_record(stored_path(tmp_path, "npm:left")).outcome == "too_large"
    assert sum(sent) < npm.LARGEST + (2 << 20)


def test_a_harvest_goes_on_where_it_stopped(archive: Archive, tmp_path: Path) -> None:
    first = harvested(archive, tmp_path)
    archive.files.clear()
    assert harvested(archive, tmp_path) == first


def test_a_crate_is_read_from_its_binary_package_and_an_update_is_too_young(tmp_path: Path) -> None:
    archive = Archive()
    archive.add("golang-late", tar({"x-1/a.go": code("late")}, mtime=1_760_000_000), COPYRIGHT)
    archive.add("rust-z", b"not there", COPYRIGHT)
    crate = deb(
        {
            "./usr/share/doc/rust-z/copyright": COPYRIGHT,
            "./usr/share/cargo/registry/z-1.0/src/lib.rs": script("z").replace("export function", "pub fn"),
        }
    )
    archive.files["/pool/rust-z/rust-z.deb"] = crate
    digest = hashlib.sha256(crate).hexdigest()
    archive.binaries[-1] = (
        f"Package: librust-z-dev\nSource: rust-z\nFilename: pool/rust-z/rust-z.deb\n"
        f"Size: {len(crate)}\nSHA256: {digest}"
    )
    assert harvested(archive, tmp_path) == {"kept": 1, "too_young": 1}
    _, files = read_project(stored_path(tmp_path, "debian:rust-z"))
    assert [file.path for file in files] == ["src/lib.rs"]


def test_a_damaged_archive_and_a_missing_index_are_said(archive: Archive) -> None:
    archive.files["/pool/golang-x/golang-x_1.orig.tar.gz"] = b"changed"
    transport = httpx.MockTransport(archive)
    mirror = Mirror("https://debian.test", transport=transport)
    package = next(p for p in mirror.packages() if p.name == "golang-x")
    with pytest.raises(InputError, match="does not have the hash"):
        mirror.fetch(package.upstream)
    empty = Mirror("https://debian.test", transport=httpx.MockTransport(lambda _: httpx.Response(404)))
    with pytest.raises(Unavailable, match="has no trixie"):
        empty.packages()
    assert contents_of(b"no archive") == b""
    assert copyright_of(b"!<arch>\n" + b"x" * 70) == ""


def test_what_is_furthest_from_its_goal_comes_next() -> None:
    queue = PackageQueue({"go": 100, "rust": 100, "java": 0})
    for i in range(3):
        for kind in ("go", "rust", "java", "python"):
            queue.add(WantedPackage(f"debian:{kind}{i}", kind))
    queue.characters.update(go=50)
    order = iter(queue)
    assert [next(order).key for _ in range(2)] == ["debian:rust0", "debian:rust1"]
    queue.characters.update(rust=80)
    assert next(order).key == "debian:go0"
    queue.characters.update(rust=50, go=50)
    assert list(order) == []


@pytest.mark.parametrize(
    ("stated", "found"),
    [
        ("Expat", "MIT"), ("Expat or GPL-2+", "MIT"), ("GPL-2+ or Artistic", None), ("Expat and GPL-2", None),
        ("Apache-2.0 with LLVM exception", "Apache-2.0"), ("BSD-3-clause and Expat", "BSD-3-Clause AND MIT"),
        ("BSD-4-clause", None), ("Expat, BSD-2-clause or GPL-2", None), ("LGPL-2.1+", None), ("", None),
        ("MIT or Apache-2.0", "MIT OR Apache-2.0"), ("custom", None), ("BSD", None),
    ],
)  # fmt: skip
def test_only_licences_that_are_clearly_permissive_count(stated: str, found: str | None) -> None:
    assert permissive(stated) == found


def test_the_last_pattern_that_matches_decides() -> None:
    stated = parse(COPYRIGHT)
    assert stated.licence("src/a/b.c") == "MIT"
    assert stated.licence("lib/gnu/x/y.c") is None
    assert parse("This package was debianized by somebody.\n").rules == ()
    assert parse("Files: a.c\nLicense: Expat\n").licence("b.c") is None


@pytest.mark.parametrize(
    ("path", "text", "found"),
    [
        ("a.go", "// Code generated by tool. DO NOT EDIT.\n" + code("x"), Refusal.GENERATED),
        ("x.pb.go", code("x"), Refusal.GENERATED), ("dist/a.js", script("x"), Refusal.GENERATED),
        ("a.js", script("x") + "//# sourceMappingURL=a.js.map\n", Refusal.GENERATED),
        ("a.d.ts", script("x"), Refusal.GENERATED), ("third-party/a.c", script("x"), Refusal.VENDORED),
        ("a.c", "/* under the GNU General Public License */\n" + script("x"), Refusal.COPYLEFT),
        ("t.c", "int t[] = {\n" + "  0x12, 0x34, 0x56, 0x78,\n" * 60 + "};\n", Refusal.DATA),
        ("a.rs", "just some words about nothing at all\n" * 12, Refusal.PROSE),
    ],
)  # fmt: skip
def test_what_nobody_wrote_by_hand_is_refused_in_every_language(path: str, text: str, found: Refusal) -> None:
    assert clean(path, text.encode()) == found


def test_braces_are_no_data_and_a_licence_notice_is_taken_off() -> None:
    text = code("x", 60)
    assert clean("a.go", f"// Copyright 2020 somebody\n// MIT licence\n\n{text}".encode()) == text
    assert clean("a.java", f"/* Copyright 2020 */\n{text}".encode()) == text
    assert clean("a.go", f"// What it does.\n{text}".encode()) == f"// What it does.\n{text}"
    assert [is_test(p) for p in ("a_test.go", "src/test/java/A.java", "a.spec.ts", "contest.go")] == [
        True
    ] * 3 + [False]
    assert language_of("a.h", "namespace x {\n") == "cpp"
    assert language_of("a.h", "struct x;\n") == "c"


def test_pieces_are_of_one_language_and_hold_nothing_that_is_evaluated(
    archive: Archive, tmp_path: Path
) -> None:
    case = CompletionCase(
        "line", "npm:left", "1", "MIT", "z.go", code("copied")[:400], "x", code("copied")[400:]
    )
    write_cases(tmp_path / "cases.jsonl.xz", [case])
    archive.add("golang-copy", tar({"c-1/a.go": code("copied"), "c-1/b.go": code("own")}), COPYRIGHT)
    harvested(archive, tmp_path / "sources")
    manifest = build([tmp_path / "sources"], tmp_path / "corpus", without=[tmp_path / "cases.jsonl.xz"])
    assert manifest["files"]["train evaluated"] == 1
    pieces = list(shard_paths(tmp_path / "corpus" / "train"))
    assert [p.name.partition("-")[0] for p in pieces] == ["go", "javascript", "typescript"]
    assert {s.path for s in read_shard(pieces[0])} == {"a.go", "b.go"}
    # A project of a case is found by its name, a copy by its lines.
    assert contaminated(pieces, [tmp_path / "cases.jsonl.xz"]) == ["npm:left src/left.ts"]
    write_shard(tmp_path / "more.jsonl.bz2", [SourceText("debian:golang-copy", "a.go", code("copied"))])
    found = contaminated([pieces[0], tmp_path / "more.jsonl.bz2"], [tmp_path / "cases.jsonl.xz"])
    assert found == ["debian:golang-copy a.go"]
