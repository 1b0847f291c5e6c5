"""A small HTTP server on loopback, in a thread that ends as soon as it is told to."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """Answers HEAD as GET without the body, and logs nothing."""

    def do_GET(self) -> None:
        raise NotImplementedError

    def do_HEAD(self) -> None:
        self.do_GET()

    def reply(self, status: int, body: bytes, headers: Mapping[str, str], only: int | None = None) -> None:
        """Send an answer; `only`: it breaks off after so many bytes."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:only])

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""


@contextmanager
def listening(handler: type[Handler]) -> Iterator[str]:
    """The address of a server that answers by `handler`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
