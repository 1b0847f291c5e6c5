"""Debian's source packages: which exist, and the files of one with the licence of each.

The mirror is the one apt is configured for. Hashes are checked and nothing from an archive is executed. Only
packages with a machine-readable debian/copyright count, and of those the permissively licensed files. That
text is read from the smallest binary package, since many mirrors are complete for binaries only.
"""

from __future__ import annotations

import lzma
import re
import shutil
import subprocess
from dataclasses import dataclass

import httpx

from keystroke.errors import InputError, NotFound, Unavailable
from keystroke_lab.corpus.archives import source_files
from keystroke_lab.corpus.downloads import Fetcher

RELEASE = "trixie"  # frozen before the late part begins, and named so that it stays the same
LARGEST = (
    8 << 20
)  # bytes of an archive: a project's share of the corpus is capped far below what more would give
_FILE = re.compile(r"^ ([0-9a-f]{64}) (\d+) (\S+)$", re.M)
_LINE = re.compile(r"^(\S+): (.*)$", re.M)
_ARCHIVE = re.compile(r"\.(orig\.)?tar\.(gz|xz|bz2)$")
_ASIDE = re.compile(r"\.debian\.tar\.|\.orig-")  # the packaging, and what comes beside the main archive
_BUILDERS = (
    ("go", r"golang-any|golang-go|dh-golang|dh-sequence-golang"),
    ("rust", r"dh-cargo|dh-sequence-cargo|\bcargo\b|\brustc\b"),
    ("java", r"javahelper|maven-debian-helper|default-jdk|gradle-debian-helper"),
    ("javascript", r"\bnodejs\b|dh-nodejs|dh-sequence-nodejs|node-typescript"),
    ("python", r"dh-python|dh-sequence-python3|pybuild|python3-setuptools"),
)


def configured_mirror() -> str:
    """The address of apt's archive. Raises NotFound without apt."""
    apt = shutil.which("apt-get")
    if apt is None:
        raise NotFound("apt-get is not here; Debian's source packages are found through it")
    asked = subprocess.run(
        [apt, "indextargets", "--format", "$(REPO_URI) $(RELEASE)"],
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.search(r"^(https?://\S+?)/? (?!\S*(?:security|updates|backports))", asked.stdout, re.M)
    if found is None:
        raise InputError("apt knows no archive on the web; set one up and run `apt-get update`")
    return found[1]


@dataclass(frozen=True, slots=True)
class ArchivedFile:
    """One file of the archive."""

    address: str
    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class DebianPackage:
    name: str
    version: str
    ecosystem: str  # what builds it; "native" where nothing of a language's own does
    upstream: ArchivedFile  # a crate's is the binary package that holds its source
    stating: tuple[ArchivedFile, ...]  # binary packages that hold its debian/copyright, smallest first


class Mirror:
    """A client of the archive. Thread-safe as httpx's client is."""

    def __init__(
        self, base: str | None = None, *, connections: int = 8, transport: httpx.BaseTransport | None = None
    ) -> None:
        self.base = (base or configured_mirror()).rstrip("/")
        self._server = Fetcher("the Debian archive", connections=connections, transport=transport)

    def packages(self, release: str = RELEASE) -> list[DebianPackage]:
        """Every source package of a release that may be used, by name."""
        binaries: dict[str, list[ArchivedFile]] = {}
        for paragraph in self._index(f"{release}/main/binary-amd64/Packages.xz"):
            fields: dict[str, str] = dict(_LINE.findall(paragraph))
            if {"Package", "Filename", "Size", "SHA256"} <= fields.keys():
                source = (fields.get("Source") or fields["Package"]).partition(" ")[0]
                file, size = fields["Filename"], int(fields["Size"])
                archived = ArchivedFile(
                    f"{self.base}/{file}", file.rpartition("/")[2], size, fields["SHA256"]
                )
                binaries.setdefault(source, []).append(archived)
        found = {}
        for paragraph in self._index(f"{release}/main/source/Sources.xz"):
            package = _package(paragraph, self.base, binaries)
            if package is not None:
                found[package.name] = package
        return [found[name] for name in sorted(found)]

    def _index(self, path: str) -> list[str]:
        answer = self._server.get(f"{self.base}/dists/{path}")
        if answer.status_code != 200:
            raise Unavailable(f"the Debian archive has no {path} (status {answer.status_code})")
        try:
            return lzma.decompress(answer.content).decode().split("\n\n")
        except (lzma.LZMAError, UnicodeDecodeError) as error:
            raise InputError(f"{path} of the Debian archive cannot be read ({error}); try again") from error

    def fetch(self, file: ArchivedFile) -> bytes:
        return self._server.fetch(file.address, file.sha256, file.name)

    def close(self) -> None:
        self._server.close()


def _field(paragraph: str, name: str) -> str:
    found = re.search(rf"^{name}:[ \t]*(.*(?:\n[ \t].*)*)", paragraph, re.M)
    return found[1] if found else ""


def _package(paragraph: str, base: str, binaries: dict[str, list[ArchivedFile]]) -> DebianPackage | None:
    name, version, folder = (_field(paragraph, f) for f in ("Package", "Version", "Directory"))
    made = sorted(binaries.get(name, ()), key=lambda file: (file.size, file.name))
    if not folder or not made:
        return None
    ecosystem = _ecosystem(name, paragraph)
    files = [
        ArchivedFile(f"{base}/{folder}/{file}", file, int(size), sha256)
        for sha256, size, file in _FILE.findall(_field(paragraph, "Checksums-Sha256"))
        if _ARCHIVE.search(file) and not _ASIDE.search(file)
    ]
    if name.startswith("rust-"):
        files = [made[-1]]
    if not files or files[0].size > LARGEST:
        return None
    return DebianPackage(name, version, ecosystem, files[0], tuple(made[:2]))


def _ecosystem(name: str, paragraph: str) -> str:
    for prefix, kind in (
        ("golang-", "go"),
        ("rust-", "rust"),
        ("node-", "javascript"),
        ("python-", "python"),
    ):
        if name.startswith(prefix):
            return kind
    built = " ".join(
        _field(paragraph, f) for f in ("Build-Depends", "Build-Depends-Indep", "Build-Depends-Arch")
    )
    return next((kind for kind, words in _BUILDERS if re.search(words, built)), "native")


def copyright_of(binary: bytes) -> str:
    """The text of debian/copyright that a binary package carries; "" where it has none of its own."""
    for path, content, _ in source_files(contents_of(binary), "data.tar", frozenset(), ("/copyright",)):
        if path.startswith("usr/share/doc/"):
            return content.decode("utf-8", "replace")
    return ""


def contents_of(binary: bytes) -> bytes:
    """The packed files of a binary package: the member data.tar.* of an ar archive; b"" without one."""
    at = 8
    while binary.startswith(b"!<arch>\n") and at + 60 <= len(binary):
        name, size = binary[at : at + 16].strip(), binary[at + 48 : at + 58].strip()
        if not size.isdigit():
            break
        if name.startswith(b"data.tar"):
            return binary[at + 60 : at + 60 + int(size)]
        at += 60 + int(size) + int(size) % 2
    return b""
