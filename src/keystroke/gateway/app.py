"""The ASGI application and the server around it: composition, start and stop.

WebSockets go straight to their connection, HTTP goes through Starlette. Starting starts the engines; stopping
lets running answers end, cancels those that do not, and commits what is to be stored.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import cast

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.types import Receive, Scope, Send

from keystroke.config import ServerSettings, Settings
from keystroke.errors import ConfigError, KeystrokeError, NotFound, ProtocolError, RateLimited, Unavailable
from keystroke.gateway.access.keys import LOCAL, Caller, Key
from keystroke.gateway.access.limits import RATE_HEADERS, month_start
from keystroke.gateway.access.security import (
    SUBPROTOCOL,
    Access,
    AccessControl,
    build_key_ring,
    is_loopback,
    readable_files,
)
from keystroke.gateway.api.endpoints import Endpoints
from keystroke.gateway.api.models import models_etag
from keystroke.gateway.api.response_request import TURN_STATE, turn_state
from keystroke.gateway.api.responses_socket import ResponsesConnection
from keystroke.gateway.live.connection import LiveConnection
from keystroke.gateway.record.outcome_store import OutcomeStore, open_outcome_store
from keystroke.gateway.record.shared_limits import SharedLimits
from keystroke.gateway.record.store import Store
from keystroke.gateway.routes import starlette_routes
from keystroke.gateway.tasks.manager import TaskManager
from keystroke.gateway.transport.frames import EXTENSION, AbortableHttp, FrameProtocol, WireLimits
from keystroke.gateway.transport.http import error_response
from keystroke.gateway.transport.socket import Socket, SocketConnection, SocketLimits, deny
from keystroke.gateway.work.registry import ModelRegistry
from keystroke.gateway.work.service import Service
from keystroke.gateway.work.ticket import SHUTTING_DOWN

log = logging.getLogger("keystroke.app")

_UNSENT = 128 << 10  # unsent bytes that the system accepts for a connection; megabytes by default

MakeConnection = Callable[[Scope, Caller, Socket], SocketConnection]
SocketHandler = Callable[[Scope, Receive, Send], Awaitable[None]]


class Gateway:
    """An ASGI application. `sockets` maps a path to its WebSocket handler; `request_context` makes a context
    manager around every request and socket, to count or trace them."""

    def __init__(
        self,
        registry: ModelRegistry,
        settings: Settings | None = None,
        *,
        store: Store | None = None,
        shared: SharedLimits | None = None,
        socket_limits: SocketLimits | None = None,
    ) -> None:
        self.settings = settings or Settings()
        server = self.settings.server
        self.store = store
        self.service = Service(
            registry,
            store,
            generation=self.settings.generation,
            speculation=self.settings.speculation.enabled,
            tool_declarations=self.settings.assist.tool_declarations,
            shared=shared,
        )
        self.keys = build_key_ring(server)
        if store is not None:
            self.keys.set_stored_keys(store.keys())
        self.access = AccessControl(self.keys, server)
        loopback = is_loopback(server.host)
        self.tasks = TaskManager(
            self.service, self.settings, lambda caller: self.keys.owner(caller, loopback=loopback)
        )
        self.endpoints = Endpoints(self.service, self.tasks, self.settings.assist)
        self.sockets: dict[str, SocketHandler] = {
            "/v1/responses": partial(self._serve, self._make_responses_connection),
            "/v1/live": partial(self._serve, self._make_live_connection),
        }
        self.outcome_store = self._open_outcomes() if self.settings.learn.enabled else None
        self.request_context: Callable[[Scope], AbstractContextManager[None]] = lambda _scope: nullcontext()
        self._socket_limits = socket_limits or SocketLimits(max_frame_bytes=server.max_frame_bytes)
        self.hurried = False  # answers are not waited for any longer
        self._connections: dict[Socket, Caller] = {}
        self._readers: dict[Socket, SocketConnection] = {}
        self._http = Starlette(
            routes=starlette_routes(self.endpoints, self.access, server.max_frame_bytes),
            exception_handlers={
                KeystrokeError: self._handle_refusal,
                HTTPException: _handle_http_error,
                Exception: _handle_crash,
            },
            lifespan=self._lifespan,
            middleware=_cross_origin(server.origins),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.request_context(scope):
            if scope["type"] != "websocket":
                await self._http(scope, receive, send)
                return
            handler = self.sockets.get(scope["path"])
            await receive()  # websocket.connect
            if handler is None:
                await deny(send, NotFound(f"There is no socket at {scope['path']:.100}."), scope)
                return
            await handler(scope, receive, send)

    def _open_outcomes(self) -> OutcomeStore | None:
        """The store of suggestion outcomes; None beyond loopback, where the outcomes are other people's."""
        if not is_loopback(self.settings.server.host):
            log.warning(
                "learn.enabled works on loopback only: nothing is stored on %s", self.settings.server.host
            )
            return None
        try:
            return open_outcome_store(self.settings)
        except ConfigError as error:
            log.warning("%s", error)
            return None

    # Sockets

    def _make_responses_connection(self, scope: Scope, caller: Caller, socket: Socket) -> ResponsesConnection:
        headers = Headers(scope=scope)
        timing = headers.get("x-responsesapi-include-timing-metrics", "").lower() in ("true", "1")
        return ResponsesConnection(
            self.endpoints.responses, caller, socket, turn_state=turn_state(headers), timing=timing
        )

    def _make_live_connection(self, scope: Scope, caller: Caller, socket: Socket) -> LiveConnection:
        files = readable_files(self.settings.server, Headers(scope=scope).get("origin"))
        store, assist = self.outcome_store, self.settings.assist
        return LiveConnection(self.service, assist, caller, socket, files=files, outcome_store=store)

    async def _serve(self, make: MakeConnection, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            offered = scope.get("subprotocols", ())
            caller = self.access.check(Access.KEY, Headers(scope=scope), offered)
            if len(self._connections) >= self.settings.server.max_connections:
                raise Unavailable(f"{len(self._connections)} connections are open; try again shortly.")
            self._check_connection_limit(caller)
        except KeystrokeError as error:
            await deny(send, error, scope)
            return
        fast_path = scope.get("extensions", {}).get(EXTENSION)
        chosen = SUBPROTOCOL if SUBPROTOCOL in offered else None
        headers = {"x-models-etag": models_etag(self.service.registry)}
        if (state := turn_state(Headers(scope=scope))) is not None:
            headers[TURN_STATE] = state
        socket = Socket(receive, send, self._socket_limits, fast_path, subprotocol=chosen, headers=headers)
        self._connections[socket] = caller
        self.service.metrics.connections.set(len(self._connections))
        try:
            reader = self._readers[socket] = make(scope, caller, socket)
            await reader.serve()
        finally:
            self._readers.pop(socket, None)
            del self._connections[socket]
            self.service.metrics.connections.set(len(self._connections))

    def _check_connection_limit(self, caller: Caller) -> None:
        """Limit the sockets of one key. Callers without a key are local and not limited."""
        most = self.settings.server.max_connections_per_key
        if caller == LOCAL or not most:
            return
        own = sum(other.id == caller.id for other in self._connections.values())
        if own >= most:
            raise RateLimited(
                f"This key has {own} connections open already; close one, or use one for several streams.",
                retry_after=1.0,
            )

    # HTTP

    async def _handle_refusal(self, request: Request, error: Exception) -> HttpResponse:
        assert isinstance(error, KeystrokeError)
        self.service.metrics.rejected.labels(error.code).inc()
        return error_response(error, request.url.path)

    @asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        if self.store is not None:
            lost = await asyncio.to_thread(self.store.recover)
            if lost:
                log.warning("%d responses were cut off when the server last ended", lost)
        self.service.registry.start()
        refresh = asyncio.create_task(self._refresh_keys())
        try:
            yield
        finally:
            refresh.cancel()
            await self.tasks.stop()
            await self.service.registry.stop()
            if self.service.shared is not None:
                await asyncio.to_thread(self.service.shared.close)
            if self.outcome_store is not None:
                await asyncio.to_thread(self.outcome_store.close)
            if self.store is not None:
                await asyncio.to_thread(self.store.close)

    async def hand_over(self) -> None:
        """Let clients move to another gateway: close each socket with the restart code once its connection is
        idle. Turns that began here end here. Takes up to `drain_s`; then `drain` ends what is left."""
        for _ in range(round(self.settings.server.drain_s / 0.05)):
            for reader in tuple(self._readers.values()):
                reader.close_when_idle()
            if not self._readers and not self.service.active_work:
                return
            await asyncio.sleep(0.05)

    async def drain(self) -> None:
        """Refuse new work, let running answers end, then cancel the rest; each gets its final event. Once
        `hurried` is set, answers are cancelled at once."""
        self.service.draining = True
        await self.tasks.stop()
        await self._wait_until_quiet(self.settings.server.drain_s, lambda: self.hurried)
        for work in tuple(self.service.active_work):
            work.cancel(Unavailable(SHUTTING_DOWN))
        await self._wait_until_quiet(2.0)
        await asyncio.sleep(0.05)  # the last events are written

    async def abandon(self, reason: KeystrokeError) -> None:
        """Refuse new work and end every answer at once with `reason`, then close the sockets: this process
        cannot go on."""
        self.service.draining = True
        for work in tuple(self.service.active_work):
            work.cancel(reason)
        await self._wait_until_quiet(2.0)
        for _ in range(100):  # final events wait until their response is stored
            if not self.endpoints.responses.runs:
                break
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.05)  # the last events are written
        for connection in tuple(self._connections):
            await connection.close("the server restarts; reconnect", 1012)

    async def _wait_until_quiet(self, seconds: float, ends: Callable[[], bool] = lambda: False) -> None:
        for _ in range(round(seconds / 0.02)):
            if not self.service.active_work or ends():
                return
            await asyncio.sleep(0.02)

    async def _refresh_keys(self) -> None:
        """Reload the stored keys every two seconds; close sockets whose key was revoked."""
        while self.store is not None:
            await asyncio.sleep(2.0)
            if self.service.shared is not None:
                await asyncio.to_thread(self.service.shared.renew)
            try:
                keys = await self.store.run_in_thread(self.store.keys)
                self.keys.set_stored_keys(keys)
                await self._refresh_budgets(keys)
                for socket, caller in tuple(self._connections.items()):
                    if not self.keys.still_accepts(caller):
                        await socket.close("this key is no longer accepted", 1008)
            except Exception:
                log.exception("keys could not be read")

    async def _refresh_budgets(self, keys: Sequence[Key]) -> None:
        """Read what keys with a monthly budget have spent, in all gateways."""
        assert self.store is not None
        limited = [key.id for key in keys if key.monthly_tokens or key.monthly_cost]
        since = month_start(time.time())
        spent = await self.store.run_in_thread(self.store.spent, since, limited)
        self.service.budgets.update(keys, spent)


def _cross_origin(origins: Sequence[str]) -> list[Middleware]:
    """CORS for the configured origins."""
    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(origins),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["retry-after", "retry-after-ms", *RATE_HEADERS],
        max_age=600,
    )
    return [cors] if origins else []


async def _handle_http_error(request: Request, error: Exception) -> HttpResponse:
    assert isinstance(error, HTTPException)
    kind = NotFound if error.status_code == 404 else ProtocolError
    wrapped = kind(
        "There is nothing at this address; see /openapi.json." if kind is NotFound else error.detail
    )
    response = error_response(wrapped, request.url.path)
    response.status_code = error.status_code
    response.headers.update(error.headers or {})
    return response


async def _handle_crash(request: Request, error: Exception) -> HttpResponse:
    log.error("a request failed", exc_info=error)
    failure = KeystrokeError("The server failed on this request; its log says how.")
    return error_response(failure, request.url.path)


def check_exposure(server: ServerSettings, stored: Iterable[Key]) -> None:
    """Raises ConfigError for a server beyond loopback without a key."""
    keys = build_key_ring(server)
    keys.set_stored_keys(stored)
    if not is_loopback(server.host) and keys.is_empty:
        raise ConfigError(
            f"{server.host} can be reached from other machines, so a key is needed; "
            "make one with `keystroke keys create NAME`, or listen on 127.0.0.1"
        )


def uvicorn_config(gateway: Gateway) -> uvicorn.Config:
    """There may be twice as many connections as sockets, which leaves room for plain requests."""
    server = gateway.settings.server
    limits = WireLimits(connections=2 * server.max_connections)
    return uvicorn.Config(
        gateway,
        host=server.host,
        port=server.port,
        loop="auto",  # uvloop where there is one
        http=cast("type[asyncio.Protocol]", partial(AbortableHttp, limits=limits)),
        ws=FrameProtocol,
        ws_max_size=2 * server.max_frame_bytes,  # a frame slightly over the limit gets a typed error
        ws_per_message_deflate=False,  # costs more time per token than it saves on any network
        ws_ping_interval=20.0,
        ws_ping_timeout=20.0,
        timeout_graceful_shutdown=2,  # answers were drained before; only the last bytes remain
        log_config=None,
        access_log=False,  # paths may contain secrets
        server_header=False,
        ssl_certfile=server.tls_certificate,
        ssl_keyfile=server.tls_key,
    )


def run_server(
    gateway: Gateway,
    *,
    on_ready: Callable[[int], None] | None = None,
    on_drain: Callable[[int], None] | None = None,
) -> None:
    """Serve until interrupted. `on_ready` is called with the port once the server listens, `on_drain` with
    the number of running answers that it lets end."""
    tune_interpreter()
    listening = listen_all(gateway.settings.server)
    server = GatewayServer(uvicorn_config(gateway))
    server.gateway, server.on_ready, server.on_drain = gateway, on_ready, on_drain
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(server.serve(sockets=listening))


def tune_interpreter() -> None:
    """Tune thread switching, garbage collection and logging for a gateway or an engine process."""
    # Engine threads pass tokens to the loop many times a second; the default switch interval of five
    # milliseconds would delay each.
    sys.setswitchinterval(0.0005)
    tune_collector()
    logging.getLogger("uvicorn.error").addFilter(_ClientErrorFilter())


def tune_collector() -> None:
    """Collect full generations rarely: conversations are long lists of tokens, and a full collection blocks
    the loop for a tenth of a second."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


class _ClientErrorFilter(logging.Filter):
    """Drops messages that any client can cause as often as it likes."""

    _DROPPED = ("ASGI callable returned without completing handshake", "Invalid HTTP request received")

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(self._DROPPED)


def listen(server: ServerSettings, *, shared: bool = False) -> socket.socket:
    """The listening socket; `shared`: other processes of this user listen at the same address, and the system
    distributes connections. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # connections inherit it
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)
    if shared:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listening.bind((server.host, server.port))
    except (OSError, UnicodeError) as error:
        listening.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"cannot listen on {server.host}:{server.port} ({reason}); choose another with --host or --port"
        ) from None
    return listening


def listen_all(server: ServerSettings) -> list[socket.socket]:
    """The listening sockets: the server's own, and the one for Ollama's clients if it is set. Raises
    ConfigError."""
    listening = [listen(server)]
    if server.ollama_port:
        try:
            listening.append(listen(replace(server, port=server.ollama_port)))
        except ConfigError as error:
            listening[0].close()
            reason = error.message.partition(";")[0]
            raise ConfigError(f"{reason}; stop Ollama, or leave out --ollama (server.ollama_port)") from None
    return listening


class GatewayServer(uvicorn.Server):
    """A uvicorn server that drains before it closes. `replaced`: other gateways listen at the same address,
    so clients are handed over to them first."""

    gateway: Gateway
    on_ready: Callable[[int], None] | None = None
    on_drain: Callable[[int], None] | None = None
    replaced: bool = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal lets running answers end, the second cancels them, the third ends at once."""
        if self.should_exit and not self.gateway.hurried:
            self.gateway.hurried = True
        else:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.replaced:
            for _ in range(3):  # accept connections that the system already assigned to this process
                await asyncio.sleep(0)
        for listener in self.servers:
            listener.close()
        if self.replaced:
            for connection in tuple(self.server_state.connections):
                if isinstance(connection, AbortableHttp):
                    connection.shutdown()  # after the running answer, at once without one
            await self.gateway.hand_over()
        if self.on_drain is not None and self.gateway.service.active_work:
            self.on_drain(len(self.gateway.service.active_work))
        await self.gateway.drain()
        await super().shutdown(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self.on_ready is not None:
            self.on_ready(self.servers[0].sockets[0].getsockname()[1])
