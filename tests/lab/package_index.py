"""A package index with a few projects: called in-process, or served over HTTP on loopback."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from local_http import Handler, listening


def module(name: str, lines: int = 30) -> str:
    body = "".join(f"    {name}_{i} = compute_{name}(value, {i}) + offset\n" for i in range(lines))
    return f"import math\n\n\ndef {name}(value, offset):\n{body}    return {name}_0\n"


def sdist(name: str, version: str, files: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for path, text in files.items():
            entry = tarfile.TarInfo(f"{name}-{version}/{path}")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    return buffer.getvalue()


class Server:
    """A package index with a few projects."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.files: dict[str, bytes] = {}
        self.projects: dict[str, dict[str, object]] = {}

    def add(
        self, name: str, versions: dict[str, dict[str, str]], *, licence: str = "MIT", year: int = 2015
    ) -> None:
        releases: dict[str, list[dict[str, object]]] = {}
        for month, (version, files) in enumerate(versions.items(), start=1):
            data = sdist(name, version, files)
            filename = f"{name}-{version}.tar.gz"
            self.files[f"/files/{filename}"] = data
            digest = hashlib.sha256(data).hexdigest()
            releases[version] = [
                {
                    "packagetype": "sdist",
                    "filename": filename,
                    "url": f"../../files/{filename}",
                    "size": len(data),
                    "digests": {"sha256": digest},
                    "upload_time_iso_8601": f"{year}-{month:02d}-01T00:00:00Z",
                }
            ]
        info = {"license_expression": licence, "requires_dist": ["dep (>=1)"]}
        self.projects[name] = {"info": info, "releases": releases}

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.asked.append(path)
        if path in self.files:
            return httpx.Response(200, content=self.files[path])
        if path == "/simple/":
            return httpx.Response(200, text='<a href="one/">one</a>\n<a href="two/">two</a>')
        name = path.removeprefix("/pypi/").removesuffix("/json")
        if name in self.projects:
            return httpx.Response(200, json=self.projects[name])
        return httpx.Response(404)


@contextmanager
def served(server: Server) -> Iterator[str]:
    """The index over HTTP; its address as pip is told it."""

    class IndexHandler(Handler):
        def do_GET(self) -> None:
            answer = server(httpx.Request("GET", f"http://index.test{self.path}"))
            self.reply(answer.status_code, answer.content, {})

    with listening(IndexHandler) as url:
        yield f"{url}/simple"
