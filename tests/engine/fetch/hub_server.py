"""A model hub on loopback: the addresses that `huggingface_hub` asks, with resumable downloads and faults."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from local_http import Handler, listening

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_RESOLVE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/[^/]+/(?P<file>.+)")


class Hub:
    """`models` maps owner/name to its files; `ranges` are the places asked for. A file in `cut` breaks off in
    its middle as often as its number says (`broken`: from where); places in `refused` answer 503, those in
    `held` wait; `gated` repositories answer 403."""

    def __init__(self) -> None:
        self.url = ""
        self.models: dict[str, dict[str, bytes]] = {}
        self.cut: dict[str, int] = {}
        self.ranges: list[int] = []
        self.asked: list[str] = []
        self.gated: set[str] = set()
        self.broken: list[int] = []
        self.refused: set[int] = set()
        self.held: set[int] = set()
        self.waiting = threading.Event()
        self.release = threading.Event()
        self.lies: dict[str, bytes] = {}  # what is sent instead of a file

    def described(self, repo: str) -> bytes:
        siblings = []
        for name, data in self.models[repo].items():
            about: dict[str, object] = {"rfilename": name, "size": len(data), "blobId": "b"}
            if name.endswith((".gguf", ".safetensors")):
                digest = hashlib.sha256(data).hexdigest()
                about["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 134}
            siblings.append(about)
        body = {
            "id": repo,
            "modelId": repo,
            "sha": COMMIT,
            "siblings": siblings,
            "tags": [],
            "private": False,
        }
        return json.dumps(body | {"downloads": 0, "likes": 0, "gated": False}).encode()


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()

    class HubHandler(Handler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            repo = path.removeprefix("/api/models/").partition("/revision/")[0]
            match = _RESOLVE.fullmatch(path)
            wanted = match["repo"] if match else repo
            if wanted in hub.gated:
                self.reply(403, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"})
            elif wanted not in hub.models:
                self.reply(404, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "no such model"})
            elif match is None:
                self.reply(200, hub.described(repo), {"Content-Type": "application/json"})
            else:
                self._file(match["repo"], match["file"])

        def _file(self, repo: str, name: str) -> None:
            data = hub.models[repo].get(name)
            if data is None:
                self.reply(404, b"", {"X-Error-Code": "EntryNotFound"})
                return
            digest = hashlib.sha256(data).hexdigest()
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{digest}"', "Accept-Ranges": "bytes"}
            headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data))}
            data = hub.lies.get(name, data)
            if self.command == "HEAD":
                self.reply(200, data, headers)
                return
            hub.asked.append(name)
            start, end = 0, len(data)
            if found := re.match(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
                start, end = int(found[1]), int(found[2]) + 1
                hub.ranges.append(start)
                headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
            status, body = 206 if found else 200, data[start:end]
            if start in hub.refused:
                self.reply(503, b"", {})
            elif hub.cut.get(name, 0) > 0:
                hub.cut[name] -= 1
                hub.broken.append(start)
                self.reply(status, body, headers, only=len(body) // 2)
                self.close_connection = True
            elif start in hub.held:
                hub.waiting.set()
                hub.release.wait(60)
                self.close_connection = True
            else:
                self.reply(status, body, headers)

    with listening(HubHandler) as hub.url:
        try:
            yield hub
        finally:
            hub.release.set()
