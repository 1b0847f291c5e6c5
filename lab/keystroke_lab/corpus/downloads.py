"""Downloads from a public server: few connections, retries with increasing delays, hashes checked.

A download that fails after all retries raises one error, which names the server.
"""

from __future__ import annotations

import hashlib
from typing import Any

import httpx

from keystroke.agent.evaluation.source_archives import with_retries
from keystroke.errors import InputError

_AGENT = "keystroke-corpus (research crawl of source releases; sequential per project)"


class DownloadTooLarge(InputError):
    """A file is larger than the limit; the rest was not downloaded."""


class Fetcher:
    """A client of one server. Thread-safe as httpx's client is. `what` names the server in error messages."""

    def __init__(
        self, what: str, *, connections: int = 8, transport: httpx.BaseTransport | None = None
    ) -> None:
        self._what = what
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        self._client = httpx.Client(
            headers={"User-Agent": _AGENT},
            timeout=60,
            follow_redirects=True,
            limits=limits,
            transport=transport,
        )

    def get(self, url: str, **kwargs: Any) -> httpx.Response:
        """The answer, whatever it says, unless the server is in trouble. Raises Unavailable then."""
        return with_retries(lambda: self._client.get(url, **kwargs), self._what)

    def download(self, url: str, most: int) -> bytes:
        """A file's bytes. Raises DownloadTooLarge as soon as there are more than `most`: a server need not
        say how many will come."""
        found = bytearray()

        def asked() -> httpx.Response:
            found.clear()
            with self._client.stream("GET", url) as response:
                for part in response.iter_bytes():
                    found.extend(part)
                    if len(found) > most:
                        raise DownloadTooLarge(f"{url} has more than {most:,} bytes; it is left out")
                return response

        with_retries(asked, self._what).raise_for_status()
        return bytes(found)

    def fetch(self, url: str, sha256: str, name: str) -> bytes:
        """A file's bytes. Raises InputError where they are not the ones stated."""
        response = self.get(url)
        response.raise_for_status()
        if hashlib.sha256(response.content).hexdigest() != sha256:
            raise InputError(f"{name} does not have the hash {self._what} states; it is left out")
        return response.content

    def close(self) -> None:
        self._client.close()
