"""An HTTP proxy through which commands with `--network` reach other machines, and not this one.

The command has a network of its own, or may connect to this proxy alone, so programs on this machine that
trust loopback (a gateway without a key, a database) stay out of reach. The proxy looks names up itself,
connects to what it looked up, and refuses loopback, link-local and this machine's own addresses. A proxy
that the user's environment names is used for what lies outside.
"""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import os
import secrets
import select
import socket
import threading
from urllib.parse import unquote, urlsplit

_HEAD_BYTES = 64 << 10
_CONNECT_SECONDS = 30.0
_IDLE_SECONDS = 300.0
_CONNECTIONS = 128


class Refused(Exception):
    """The request is answered with an error; the text says why."""

    def __init__(self, status: str, why: str) -> None:
        super().__init__(why)
        self.status = status


class NetworkProxy:
    """Serves connections to a listening socket until `close`. Where others on this machine could connect to
    it, `token` is the password that requests must carry."""

    def __init__(self, listener: socket.socket, token: str = "") -> None:
        self._listener = listener
        self._token = token
        self._env = dict(os.environ)
        self._slots = threading.Semaphore(_CONNECTIONS)
        self._open: set[socket.socket] = set()
        self._lock, self._closed = threading.Lock(), False
        self._waker, self._wake = socket.socketpair()

    @classmethod
    def on_loopback(cls) -> NetworkProxy:
        """A proxy that listens on a free port of loopback and requires a password."""
        return cls(socket.create_server(("127.0.0.1", 0)), secrets.token_urlsafe(16))

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def url(self) -> str:
        user = f"keystroke:{self._token}@" if self._token else ""
        return f"http://{user}127.0.0.1:{self.port}"

    def start(self) -> None:
        threading.Thread(target=self._accept, name="sandbox-proxy", daemon=True).start()

    def close(self) -> None:
        """Stop accepting and end every connection. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            mine = list(self._open)
        self._wake.close()
        for each in mine:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        ready = select.poll()
        with self._listener, self._waker:
            for each in (self._listener, self._waker):
                ready.register(each, select.POLLIN)
            while True:
                if any(number == self._waker.fileno() for number, _ in ready.poll()):
                    return
                try:
                    client, _ = self._listener.accept()
                except OSError:
                    return
                self._slots.acquire()
                threading.Thread(target=self._serve, args=(client,), name="proxied", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            with client:
                self._track(client)
                client.settimeout(_IDLE_SECONDS)
                try:
                    head, rest = _read_head(client)
                    server, sent, body = self._forward(head)
                except Refused as refusal:
                    text = f"{refusal}\n".encode()
                    client.sendall(
                        f"HTTP/1.1 {refusal.status}\r\nContent-Type: text/plain\r\nConnection: close\r\n"
                        f"Content-Length: {len(text)}\r\n\r\n".encode()
                        + text
                    )
                    return
                with server:
                    self._track(server)
                    if not sent:
                        client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                    server.sendall(sent + (rest if body is None else rest[:body]))
                    _relay(client, server, None if body is None else max(0, body - len(rest)))
                    self._untrack(server)
        except OSError:
            pass
        finally:
            self._untrack(client)
            self._slots.release()

    def _forward(self, head: bytes) -> tuple[socket.socket, bytes, int | None]:
        """The connection for a request, the bytes to send first (none after a CONNECT) and how many follow
        (None: any number)."""
        lines = head.decode("latin-1").split("\r\n")
        try:
            method, target, version = lines[0].split(" ")
        except ValueError:
            raise Refused("400 Bad Request", "this is not a request to a proxy") from None
        headers = [line for line in lines[1:] if line]
        self._authorize(headers)
        if method == "CONNECT":
            host, port = _split_host_port(f"//{target}", 443)
            scheme = "https"
        else:
            host, port = _split_host_port(target, 80)
            scheme = "http"
            if not target.startswith("http://"):
                raise Refused("400 Bad Request", "the proxy takes http:// addresses and CONNECT")
        upstream = self._upstream(scheme, host)
        if upstream is not None:
            server, secret = _connect_upstream(upstream)
            # A proxy on this machine would look the name up again, so it must be known here.
            here = server.getpeername()[0] == server.getsockname()[0]
            try:
                _check_host(host, port, needed=here)
            except Refused:
                server.close()
                raise
            forwarded = [line for line in headers if not line.lower().startswith("proxy-")]
            if secret:
                forwarded.append(f"Proxy-Authorization: Basic {secret}")
            # A second request on the connection could name this machine.
            body = None if method == "CONNECT" else _body_length(headers)
            sent = "\r\n".join([f"{method} {target} {version}", *forwarded, "", ""])
            return server, sent.encode("latin-1"), body
        server = _connect(host, port)
        if method == "CONNECT":
            return server, b"", None
        parts = urlsplit(target)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        dropped = ("proxy-", "connection:", "keep-alive:")
        forwarded = [line for line in headers if not line.lower().startswith(dropped)]
        sent = "\r\n".join([f"{method} {path} {version}", *forwarded, "Connection: close", "", ""])
        return server, sent.encode("latin-1"), None

    def _authorize(self, headers: list[str]) -> None:
        if not self._token:
            return
        expected = b"Basic " + base64.b64encode(f"keystroke:{self._token}".encode())
        sent = [line.partition(":")[2] for line in headers if line.lower().startswith("proxy-authorization:")]
        if not any(secrets.compare_digest(value.strip().encode(), expected) for value in sent):
            raise Refused(
                "407 Proxy Authentication Required", "the proxy of a task takes its own command only"
            )

    def _upstream(self, scheme: str, host: str) -> str | None:
        named = {
            name.lower().removesuffix("_proxy"): value
            for name, value in self._env.items()
            if name.lower().endswith("_proxy") and value
        }
        for suffix in (part.strip().lstrip(".") for part in named.get("no", "").split(",")):
            if suffix == "*" or (suffix and (host == suffix or host.endswith(f".{suffix}"))):
                return None
        return named.get(scheme) or named.get("all")

    def _track(self, each: socket.socket) -> None:
        with self._lock:
            if self._closed:
                raise OSError("closed")
            self._open.add(each)

    def _untrack(self, each: socket.socket) -> None:
        with self._lock:
            self._open.discard(each)


def proxy_variables(url: str) -> list[str]:
    """The variables that make programs use a proxy, as `NAME=VALUE`."""
    names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
    return [*(f"{name}={url}" for name in names), "NO_PROXY=localhost,127.0.0.1,::1", "NODE_USE_ENV_PROXY=1"]


def _read_head(client: socket.socket) -> tuple[bytes, bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        part = client.recv(8192)
        if not part or len(data) > _HEAD_BYTES:
            raise Refused("400 Bad Request", "the request has no end or is too long")
        data += part
    head, _, rest = data.partition(b"\r\n\r\n")
    return head, rest


def _split_host_port(target: str, default_port: int) -> tuple[str, int]:
    try:
        parts = urlsplit(target)
        host, port = parts.hostname, parts.port or default_port
    except ValueError:
        host = None
    if not host:
        raise Refused("400 Bad Request", "the request names no server")
    return host, port


def _check_host(host: str, port: int, *, needed: bool) -> list[tuple[int, str]]:
    """The addresses of a server, as (family, address). Refused where one is this machine or unknown."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        if needed:
            raise Refused("502 Bad Gateway", f"{host} is not known") from None
        return []  # the other proxy may know it
    addresses = [(int(family), str(address[0])) for family, _, _, _, address in found]
    for _, address in addresses:
        if not _is_elsewhere(address):
            raise Refused(
                "403 Forbidden", f"{host} is this machine, which commands with --network do not reach"
            )
    return addresses


def _is_elsewhere(address: str) -> bool:
    number = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(number, ipaddress.IPv6Address):
        inner = number.ipv4_mapped or number.sixtofour or (number.teredo or (None, None))[1]
        if inner is not None and not _is_elsewhere(str(inner)):
            return False
    return not (
        number.is_loopback or number.is_unspecified or number.is_link_local or number.is_multicast
        or number.is_reserved
    )  # fmt: skip


def _connect(host: str, port: int) -> socket.socket:
    last = ""
    for family, address in _check_host(host, port, needed=True):
        server = socket.socket(family, socket.SOCK_STREAM)
        try:
            server.settimeout(_CONNECT_SECONDS)
            server.connect((address, port))
            if server.getpeername()[0] == server.getsockname()[0]:
                raise Refused(
                    "403 Forbidden", f"{host} is this machine, which commands with --network do not reach"
                )
        except OSError as error:
            server.close()
            last = error.strerror or str(error)
            continue
        except Refused:
            server.close()
            raise
        server.settimeout(_IDLE_SECONDS)
        return server
    raise Refused("502 Bad Gateway", f"{host} cannot be reached: {last}")


def _connect_upstream(url: str) -> tuple[socket.socket, str]:
    """A connection to the user's own proxy, and its credentials as it takes them."""
    parts = urlsplit(url if "//" in url else f"http://{url}")
    secret = ""
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        secret = base64.b64encode(pair.encode()).decode()
    if parts.scheme != "http" or not parts.hostname:
        raise Refused("502 Bad Gateway", "commands can use an http:// proxy of your environment only")
    try:
        server = socket.create_connection((parts.hostname, parts.port or 80), _CONNECT_SECONDS)
    except OSError as error:
        raise Refused("502 Bad Gateway", f"your proxy cannot be reached: {error.strerror}") from None
    server.settimeout(_IDLE_SECONDS)
    return server, secret


def _body_length(headers: list[str]) -> int:
    fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in headers)}
    if "transfer-encoding" in fields or not fields.get("content-length", "0").isdecimal():
        raise Refused("411 Length Required", "through your proxy a request needs a Content-Length")
    return int(fields.get("content-length", "0"))


def _relay(client: socket.socket, server: socket.socket, most: int | None) -> None:
    """Pass bytes in both directions until both ends have finished; at most `most` to the server."""
    ways = {client.fileno(): (client, server), server.fileno(): (server, client)}
    ready = select.poll()
    for number in ways:
        ready.register(number, select.POLLIN)
    while ways:
        found = ready.poll(_IDLE_SECONDS * 1000)
        if not found:
            return
        for number, _ in found:
            source, target = ways[number]
            data = source.recv(1 << 16)
            if source is client and most is not None:
                data, most = data[:most], max(0, most - len(data))
            if data:
                target.sendall(data)
            else:
                ready.unregister(number)
                del ways[number]
                if source is server or most is None:  # a proxy may treat the end of a request as a disconnect
                    with contextlib.suppress(OSError):
                        target.shutdown(socket.SHUT_WR)
