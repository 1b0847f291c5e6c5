"""Connects a sandboxed command with this process while it runs: a proxy, a broker for metadata, and a
lifeline that ends the command with this process.

The launcher prepares their descriptors inside the sandbox (a socket that listens in the command's own
network, the listener of its seccomp filter) and sends them here over a socket pair.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

from keystroke.agent.sandbox.metadata import MetadataBroker
from keystroke.agent.sandbox.proxy import NetworkProxy

_END_SECONDS = 2.0  # for the processes of a sandbox to end by themselves


class Lifeline:
    """A socket pair whose far end the sandbox's own processes hold, and the command does not. When this end
    is closed, or this process is killed, the kernel kills the launcher, and its sandbox ends. As a context
    manager it waits until the far end is closed, so that nothing of the sandbox is left."""

    def __init__(self) -> None:
        self._near_end, self._far_end = socket.socketpair()

    @property
    def descriptor(self) -> int:
        return self._far_end.fileno()

    def __enter__(self) -> Lifeline:
        return self

    def __exit__(self, *_: object) -> None:
        self._far_end.close()
        with contextlib.suppress(OSError):
            self._near_end.shutdown(socket.SHUT_WR)
            self._near_end.settimeout(_END_SECONDS)
            self._near_end.recv(1)
        self._near_end.close()


class HostChannel:
    """One command's channel. `descriptor` is inherited by the launcher; `folders` are those whose metadata it
    may change. As a context manager it ends what it started."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._near_end, self._far_end = socket.socketpair()
        self._proxies: list[NetworkProxy] = []
        self._thread = threading.Thread(target=self._receive, name="sandbox-channel", daemon=True)

    @property
    def descriptor(self) -> int:
        return self._far_end.fileno()

    def __enter__(self) -> HostChannel:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._near_end.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for proxy in self._proxies:
            proxy.close()
        self._near_end.close()
        self._far_end.close()

    def start_proxy(self) -> NetworkProxy:
        """A proxy on loopback, for a sandbox that shares this machine's network."""
        proxy = NetworkProxy.on_loopback()
        self._proxies.append(proxy)
        proxy.start()
        return proxy

    def _receive(self) -> None:
        """Serve what the launcher sends: `p` with a listening socket, `m` with a filter's listener."""
        while True:
            try:
                message, descriptors, _, _ = socket.recv_fds(self._near_end, 1, 1)
            except OSError:
                return
            if not message:
                return
            for descriptor in descriptors:
                if message == b"p":
                    proxy = NetworkProxy(socket.socket(fileno=descriptor))
                    self._proxies.append(proxy)
                    proxy.start()
                else:
                    threading.Thread(
                        target=self._serve_metadata, args=(descriptor,), name="metadata", daemon=True
                    ).start()

    def _serve_metadata(self, listener: int) -> None:
        try:
            MetadataBroker(listener, self._folders).serve()
        finally:
            os.close(listener)
