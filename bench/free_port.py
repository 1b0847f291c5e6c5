"""A port for a server that a benchmark or a test starts as a process of its own."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """A port of 127.0.0.1 on which nothing listens and that the system gives to nobody who asks for any port.

    Linux gives those out of 32768 and above: a port from there can belong to a connection of another process
    by the time the server listens. Ray's workers use 10000 to 19999."""
    while True:
        port = random.randrange(20_000, 32_768)
        with socket.socket() as held:
            try:
                held.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
