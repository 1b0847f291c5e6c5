"""HTTP/2, where a server offers it: the same stream, and a cut that the server notices.

The server is a real one: TLS on loopback with a certificate made for the test, speaking HTTP/2 only.
"""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import h2.config
import h2.connection
import h2.events
import pytest
from openai_server import DONE, delta

from installed import program
from keystroke.engine.base import Interrupt
from keystroke.engine.generation import Chunk, Finish
from keystroke.engine.remote import Endpoint, RemoteModel

HELLO = [{"role": "user", "content": "hi"}]


class Http2Server:
    """Answers every request with `parts`, `pause` seconds apart."""

    def __init__(self, parts: list[bytes], pause: float = 0.0) -> None:
        self.parts, self.pause = parts, pause
        self.requests = 0
        self.connections = 0
        self.dropped = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        state = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        state.initiate_connection()
        writer.write(state.data_to_send())
        answers: list[asyncio.Task[None]] = []
        try:
            while data := await reader.read(65536):
                asked = [e for e in state.receive_data(data) if isinstance(e, h2.events.StreamEnded)]
                answers += [asyncio.create_task(self._answer(state, writer, e.stream_id or 0)) for e in asked]
                writer.write(state.data_to_send())
        finally:
            if any(not answer.done() for answer in answers):
                self.dropped.set()
            for answer in answers:
                answer.cancel()
            writer.close()

    async def _answer(
        self, state: h2.connection.H2Connection, writer: asyncio.StreamWriter, stream: int
    ) -> None:
        self.requests += 1
        state.send_headers(stream, [(":status", "200"), ("content-type", "text/event-stream")])
        for part in self.parts:
            state.send_data(stream, part)
            writer.write(state.data_to_send())
            await asyncio.sleep(self.pause)
        state.end_stream(stream)
        writer.write(state.data_to_send())


@pytest.fixture
def certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tool = program("openssl", "version")
    if tool is None:
        pytest.skip("openssl makes the certificate and is not installed")
    file = tmp_path / "loopback.pem"
    made = f"req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout {file} -out {tmp_path}/crt"
    extra = ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    subprocess.run([tool, *made.split(), *extra], check=True, capture_output=True)
    file.write_text(file.read_text() + (tmp_path / "crt").read_text())
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "crt"))
    return file


@asynccontextmanager
async def running(server: Http2Server, certificate: Path) -> AsyncIterator[RemoteModel]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    context.set_alpn_protocols(["h2"])
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=context)
    port = listener.sockets[0].getsockname()[1]
    try:
        async with RemoteModel(Endpoint(f"https://127.0.0.1:{port}", retries=0), "test-model") as model:
            yield model
    finally:
        listener.close()


async def test_an_answer_streams_over_http2_and_its_connection_serves_the_next(certificate: Path) -> None:
    server = Http2Server([delta("Hello"), delta(" world"), delta(None, "stop"), DONE])
    async with running(server, certificate) as model:
        for _ in range(2):
            items = [item async for item in model.stream_chat(HELLO)]
            assert items == [Chunk("Hello"), Chunk(" world"), Chunk("", finish=Finish.STOP)]
    assert (server.requests, server.connections) == (2, 1)


async def test_an_interrupted_answer_is_dropped_at_the_server_and_others_go_on(certificate: Path) -> None:
    server = Http2Server([*[delta("a")] * 20, delta(None, "stop"), DONE], pause=0.05)
    interrupt = Interrupt()
    async with running(server, certificate) as model:

        async def whole() -> str:
            items = [item async for item in model.stream_chat(HELLO)]
            return "".join(item.text for item in items if isinstance(item, Chunk))

        other = asyncio.create_task(whole())
        async for item in model.stream_chat(HELLO, interrupt=interrupt):
            interrupt.set()
            last = item
        assert last == Chunk("", finish=Finish.INTERRUPTED)
        await asyncio.wait_for(server.dropped.wait(), 60)
        assert await other == "a" * 20


async def test_a_certificate_nobody_vouches_for_is_one_sentence(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from keystroke.errors import Unavailable

    monkeypatch.delenv("SSL_CERT_FILE")
    async with running(Http2Server([DONE]), certificate) as model:
        with pytest.raises(Unavailable, match="certificate verify failed"):
            [item async for item in model.stream_chat(HELLO)]
