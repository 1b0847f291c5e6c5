"""HTTP requests to a server, with retries, time limits and immediate cancellation.

A request is only retried before the first byte of a response, and only if the server has not started it: no
connection, or status 429, 502, 503, 504. The API key is read from the environment for each request and never
appears in a message.
"""

from __future__ import annotations

import asyncio
import email.utils
import os
import random
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import msgspec

from keystroke.engine.base import Interrupt
from keystroke.engine.remote import wire
from keystroke.errors import (
    ConfigError,
    ContextOverflow,
    EngineError,
    Forbidden,
    KeystrokeError,
    NotFound,
    RateLimited,
    Unauthorized,
    Unavailable,
    UsageError,
)

RETRIED = frozenset({429, 502, 503, 504})
MAX_IDLE = 8  # connections kept open between answers
MAX_BODY_BYTES = 16 * 1024 * 1024
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a server and the time limits for it."""

    base_url: str
    api_key_env: str | None = None  # the variable's name; its value is read for each request
    connect_timeout: float = 5.0  # a server on the same network answers in milliseconds
    first_token_timeout: float = 120.0  # a long prompt on a busy server
    read_timeout: float = 30.0  # silence in the middle of an answer
    retries: int = 3
    max_retry_wait: float = 30.0  # a longer Retry-After is reported as an error

    @property
    def url(self) -> httpx.URL:
        """The base address of requests. Raises ConfigError if it is invalid."""
        try:
            url = httpx.URL(self.base_url.strip())
        except httpx.InvalidURL as error:
            raise ConfigError(f"{self.base_url!r:.100} is not a URL: {error}", param="base_url") from None
        if url.scheme not in ("http", "https") or not url.host:
            raise ConfigError(
                f"{self.base_url!r:.100} is not the address of a server; write it like http://localhost:8000/v1",
                param="base_url",
            )
        if url.userinfo:
            raise ConfigError(
                f"the address of {url.host} holds a password; put the key in an environment variable instead",
                param="base_url",
            )
        path = url.path.rstrip("/") or "/v1"
        return url.copy_with(path=path, query=None, fragment=None)

    def key(self) -> str | None:
        return os.environ.get(self.api_key_env, "").strip() or None if self.api_key_env else None


class InterruptibleWait:
    """Waits for one awaitable at a time, with a time limit and an interrupt from any thread."""

    def __init__(self, interrupt: Interrupt) -> None:
        self.interrupt = interrupt
        self._loop = asyncio.get_running_loop()
        self._scope: asyncio.Timeout | None = None

    def __enter__(self) -> InterruptibleWait:
        self.interrupt.add_callback(self._on_interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        self.interrupt.remove_callback(self._on_interrupt)

    async def wait(self, work: Awaitable[_T], seconds: float, late: str) -> _T:
        """The result of `work`. Raises Interrupted, or Unavailable with the message `late` after
        `seconds`."""
        if self.interrupt.is_set and asyncio.iscoroutine(work):
            work.close()  # not started, so that no request is sent
        self.interrupt.check()
        try:
            async with asyncio.timeout(max(seconds, 0)) as self._scope:
                return await work
        except TimeoutError:
            self.interrupt.check()
            raise Unavailable(late) from None
        finally:
            self._scope = None

    def _on_interrupt(self) -> None:
        with suppress(RuntimeError):  # the loop may be closing
            self._loop.call_soon_threadsafe(self._expire)

    def _expire(self) -> None:
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(self._loop.time())


class Transport:
    """Connections to one server, each used by one request at a time. Ending an answer early closes its
    connection, which every server notices; abandoning an HTTP/2 stream on a shared connection would leave
    the server generating."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.url = endpoint.url
        self.name = f"{self.url.host}:{self.url.port}" if self.url.port else self.url.host
        self._idle: list[httpx.AsyncClient] = []
        self._verify: ssl.SSLContext | bool = False
        self._closed = False
        if self.url.scheme == "https":
            self._verify = httpx.create_ssl_context()

    @asynccontextmanager
    async def open(
        self, method: str, path: str, body: Mapping[str, Any] | None, watch: InterruptibleWait
    ) -> AsyncIterator[httpx.Response]:
        """A successful response with its body still to be read. Leaving early closes the connection."""
        client, response = await self._send(method, path, body, watch)
        finished = False
        try:
            yield response
            finished = response.is_stream_consumed
        finally:
            await self._release(client, response, finished)

    async def get_json(self, path: str, watch: InterruptibleWait, seconds: float) -> dict[str, Any]:
        """The JSON object of a GET request."""
        async with self.open("GET", path, None, watch) as response:
            late = f"{self.name} did not answer within {seconds:g} s"
            return wire.decode_object(await watch.wait(self.read_body(response), seconds, late))

    async def read_body(self, response: httpx.Response) -> bytes:
        parts = bytearray()
        async for part in self.stream_body(response):
            parts += part
            if len(parts) > MAX_BODY_BYTES:
                raise EngineError(f"{self.name} answered with more than {MAX_BODY_BYTES >> 20} MiB")
        return bytes(parts)

    async def stream_body(self, response: httpx.Response) -> AsyncGenerator[bytes, None]:
        try:
            async for part in response.aiter_bytes():
                if part:
                    yield part
        except httpx.DecodingError as error:
            raise EngineError(f"{self.name} sent a body that cannot be decompressed") from error
        except httpx.TransportError as error:
            raise Unavailable(f"{self.name} broke off in the middle of the answer; ask again") from error

    async def aclose(self) -> None:
        self._closed = True
        while self._idle:
            await self._idle.pop().aclose()

    async def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, watch: InterruptibleWait
    ) -> tuple[httpx.AsyncClient, httpx.Response]:
        content = msgspec.json.encode(body) if body is not None else None
        for attempt in range(self.endpoint.retries + 1):
            client = self._client()
            response: httpx.Response | None = None
            good = False
            try:
                request = client.build_request(
                    method, f"{self.url}{path}", content=content, headers=self._headers()
                )
                response = await watch.wait(
                    client.send(request, stream=True),
                    self.endpoint.first_token_timeout + self.endpoint.connect_timeout,
                    f"{self.name} did not begin to answer within {self.endpoint.first_token_timeout:g} s",
                )
                good = response.is_success
                if good:
                    return client, response
                problem = await self._refusal_error(response, watch)
                retried = response.status_code in RETRIED
                requested = _retry_after(response.headers.get("retry-after"))
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                problem, retried, requested = self._unreachable_error(error), True, None
            except (httpx.TransportError, httpx.InvalidURL, httpx.StreamError) as error:
                problem, retried, requested = (
                    Unavailable(f"{self.name} closed the connection: {_describe(error)}"),
                    False,
                    None,
                )
            finally:
                if not good:
                    await self._release(client, response, finished=False)
            pause = requested if requested is not None else _backoff(attempt)
            if not retried or attempt == self.endpoint.retries or pause > self.endpoint.max_retry_wait:
                raise problem
            await watch.wait(asyncio.sleep(pause), pause + 1, "")
        raise AssertionError("the last attempt returns or raises")

    def _client(self) -> httpx.AsyncClient:
        if self._closed:
            raise Unavailable(f"the connection to {self.name} was closed")
        if self._idle:
            return self._idle.pop()
        return httpx.AsyncClient(
            http2=self.url.scheme == "https",
            verify=self._verify,
            # No proxy from the environment for this machine.
            trust_env=self.url.host not in _LOOPBACK,
            timeout=httpx.Timeout(None, connect=self.endpoint.connect_timeout),
            limits=httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=60),
        )

    async def _release(
        self, client: httpx.AsyncClient, response: httpx.Response | None, finished: bool
    ) -> None:
        """Keep the connection if its response was read to the end; otherwise close it, also if the caller
        is being cancelled."""
        if finished and not self._closed and len(self._idle) < MAX_IDLE:
            self._idle.append(client)
            return
        closing = asyncio.ensure_future(_close(client, response))
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await closing
            raise

    def _headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json", "accept": "text/event-stream, application/json"}
        name, key = self.endpoint.api_key_env, self.endpoint.key()
        if key is not None:
            if not key.isascii() or not key.isprintable():
                raise ConfigError(
                    f"the key in {name} holds characters that a header cannot carry; set it again"
                )
            headers["authorization"] = f"Bearer {key}"
        return headers

    def _unreachable_error(self, error: httpx.TransportError) -> Unavailable:
        if isinstance(error, httpx.ConnectTimeout):
            why = f"no connection within {self.endpoint.connect_timeout:g} s"
        else:
            why = _describe(error)
        return Unavailable(f"{self.url} cannot be reached ({why}); is the server running there?")

    async def _refusal_error(self, response: httpx.Response, watch: InterruptibleWait) -> KeystrokeError:
        status = response.status_code
        try:
            raw = await watch.wait(self.read_body(response), self.endpoint.read_timeout, "")
        except EngineError:
            watch.interrupt.check()
            raw = b""
        message, code = self._redact_key(*_parse_problem(raw, status))
        return self._error(status, message, code, response)

    def _error(self, status: int, message: str, code: object, response: httpx.Response) -> KeystrokeError:
        name = self.endpoint.api_key_env
        if status == 401:
            hint = (
                f"check the key in {name}" if self.endpoint.key() else f"put a key in {name or 'api_key_env'}"
            )
            return Unauthorized(f"{self.name} wants a valid key ({message}); {hint}")
        if status == 403:
            return Forbidden(f"{self.name} does not allow this: {message}")
        if status == 404:
            return NotFound(f"{self.name} does not know {response.request.url.path} or this model: {message}")
        if status == 429:
            wait = _retry_after(response.headers.get("retry-after")) or 1.0
            return RateLimited(
                f"{self.name} is over its limit ({message}); try again in {wait:g} s", retry_after=wait
            )
        if status in RETRIED:
            return Unavailable(f"{self.name} is not ready (status {status}: {message}); try again soon")
        if 300 <= status < 400:
            target = wire.excerpt(response.headers.get("location", "elsewhere").encode())
            return ConfigError(f"{self.name} moved to {target}; use that address as base_url")
        error = wire.request_error(message, code)
        if isinstance(error, ContextOverflow):
            return error
        if 400 <= status < 500:
            return UsageError(f"{self.name} refused the request (status {status}): {message}")
        return EngineError(f"{self.name} failed (status {status}): {message}")

    def _redact_key(self, message: str, code: object) -> tuple[str, object]:
        key = self.endpoint.key()
        return (message.replace(key, "***") if key else message), code


async def _close(client: httpx.AsyncClient, response: httpx.Response | None) -> None:
    # A broken connection may fail to close; the client is discarded in any case.
    if response is not None:
        with suppress(httpx.HTTPError, OSError):
            await response.aclose()
    with suppress(httpx.HTTPError, OSError):
        await client.aclose()


def _parse_problem(raw: bytes, status: int) -> tuple[str, object]:
    """The message and code of an error body, which may have any shape or be empty."""
    try:
        body = wire.decode_object(raw)
    except EngineError:
        return (wire.excerpt(raw) or "no reason given"), None
    inner = body.get("error")
    return wire.error_message(body), inner.get("code") if isinstance(inner, dict) else None


def _describe(error: Exception) -> str:
    return wire.excerpt(str(error).encode()) or type(error).__name__


def _backoff(attempt: int) -> float:
    """Exponential, from a quarter second, with random jitter."""
    return min(0.25 * 2.0**attempt, 8.0) * random.uniform(0.5, 1.0)


def _retry_after(value: str | None) -> float | None:
    """Seconds from a Retry-After header, which holds a number or a date."""
    if not value:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError):
        return None


__all__ = ["Endpoint", "InterruptibleWait", "Transport"]
