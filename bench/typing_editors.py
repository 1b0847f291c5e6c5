"""Ways to type into the program as an editor does: over the language server, or over the live channel.

A key is one change and one request that go out together; the answer comes back as plain values. The
gateway runs in a process of its own, as it does for editors.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from keystroke.clients.live_connection import LiveClient
from keystroke.protocol import live_messages as live
from keystroke.text import Document, Edit

PROGRAM = str(Path(sys.executable).with_name("keystroke"))
SETTLED = 0.3  # seconds for which the gateway must compute nothing to count as warm
PATIENCE = 10.0  # seconds after which a file is typed into all the same


@dataclass(slots=True)
class EditorAnswer:
    """What came back for one key. `source` as in the receipt."""

    text: str = ""
    source: str = ""
    reason: str = ""
    prompt: int = 0
    reused: int = 0
    server_ms: float = 0.0  # of it, from the request's arrival at the gateway to its answer


class EditorTransport(Protocol):
    async def open(self, name: str, text: str, cursor: int) -> None: ...

    async def key(self, name: str, version: int, edit: Edit, cursor: int) -> EditorAnswer: ...

    async def report_answer(self, name: str, answer: EditorAnswer) -> EditorAnswer:
        """The answer with what it cost, asked for after the clock has stopped."""
        ...

    async def close(self, name: str) -> None: ...


class LiveTransport:
    def __init__(self, url: str) -> None:
        self._ready: dict[str, asyncio.Event] = {}
        self._client = LiveClient(url, on_event=self._heard)

    async def start(self) -> None:
        await self._client.start()

    async def stop(self) -> None:
        await self._client.stop()

    async def open(self, name: str, text: str, cursor: int) -> None:
        self._ready[name] = asyncio.Event()
        self._client.open(name, text, path=name, language="python", cursor=cursor)
        await self._ready[name].wait()

    async def key(self, name: str, version: int, edit: Edit, cursor: int) -> EditorAnswer:
        self._client.change(name, version, [edit], cursor)
        answer = await self._client.complete(name, cursor)
        paid = answer.receipt
        if isinstance(answer, live.Suggestion):
            return EditorAnswer(answer.text, paid.source, "", paid.prompt_tokens, paid.reused_tokens)
        return EditorAnswer("", paid.source, answer.reason, paid.prompt_tokens, paid.reused_tokens)

    async def report_answer(self, name: str, answer: EditorAnswer) -> EditorAnswer:
        return answer

    async def close(self, name: str) -> None:
        self._client.close(name)

    def _heard(self, event: live.LiveEvent) -> None:
        if isinstance(event, live.Ready) and event.buffer in self._ready:
            self._ready[event.buffer].set()


class LspTransport:
    """An editor: the language server as a child, JSON-RPC over its pipes."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url, self._folder = url, folder
        self._documents: dict[str, Document] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._count = 0
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            PROGRAM, "lsp", "--gateway", self._url, stdin=pipe, stdout=pipe
        )
        self._reading = asyncio.create_task(self._read())
        capabilities: dict[str, Any] = {"textDocument": {"inlineCompletion": {}}}
        await self._ask(
            "initialize",
            {"processId": os.getpid(), "rootUri": self._folder.as_uri(), "capabilities": capabilities},
        )
        self._tell("initialized", {})

    async def stop(self) -> None:
        assert self._process is not None
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._ask("shutdown", None), 5)
            self._tell("exit", None)
            await asyncio.wait_for(self._process.wait(), 5)
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        if self._reading is not None:
            self._reading.cancel()

    async def open(self, name: str, text: str, cursor: int) -> None:
        before = await token_counts(self._url)
        self._documents[name] = Document(text)
        item = {"uri": self._uri(name), "languageId": "python", "version": 0, "text": text}
        self._tell("textDocument/didOpen", {"textDocument": item})
        # Editors ask what can be done wherever the cursor goes, which is how the server knows.
        place = _place(self._documents[name], cursor)
        asked = {"textDocument": {"uri": self._uri(name)}, "range": {"start": place, "end": place}}
        await self._ask("textDocument/codeAction", {**asked, "context": {"diagnostics": []}})
        await settled(self._url, before)  # an editor is not told when the context is warm

    async def key(self, name: str, version: int, edit: Edit, cursor: int) -> EditorAnswer:
        before = self._documents[name]
        after = self._documents[name] = before.apply([edit])
        span = {"start": _place(before, edit.start), "end": _place(before, edit.end)}
        document = {"uri": self._uri(name), "version": version}
        change = {"textDocument": document, "contentChanges": [{"range": span, "text": edit.text}]}
        self._tell("textDocument/didChange", change)
        asked = {
            "textDocument": {"uri": self._uri(name)},
            "position": _place(after, cursor),
            "context": {"triggerKind": 2},
        }
        found = await self._ask("textDocument/inlineCompletion", asked)
        items = found.get("items", []) if isinstance(found, dict) else found or []
        return EditorAnswer(items[0]["insertText"] if items else "")

    async def report_answer(self, name: str, answer: EditorAnswer) -> EditorAnswer:
        paid = await self._ask("keystroke/receipt", {"uri": self._uri(name)})
        if not paid:
            return answer
        prompt, reused = paid["prompt_tokens"], paid["reused_tokens"]
        return EditorAnswer(answer.text, paid["source"], paid["reason"], prompt, reused, paid["total_ms"])

    async def close(self, name: str) -> None:
        self._tell("textDocument/didClose", {"textDocument": {"uri": self._uri(name)}})

    def _uri(self, name: str) -> str:
        return (self._folder / name).as_uri()

    def _tell(self, method: str, params: Any) -> None:
        self._write({"jsonrpc": "2.0", "method": method, "params": params})

    async def _ask(self, method: str, params: Any) -> Any:
        self._count += 1
        answer = self._asked[self._count] = asyncio.get_running_loop().create_future()
        self._write({"jsonrpc": "2.0", "id": self._count, "method": method, "params": params})
        return await answer

    def _write(self, message: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        body = json.dumps(message).encode()
        self._process.stdin.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))

    async def _read(self) -> None:
        assert self._process is not None
        stream = self._process.stdout
        assert stream is not None
        while True:
            length = 0
            while (line := await stream.readline()).strip():
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            if not line:
                return
            message = json.loads(await stream.readexactly(length))
            if "method" in message:
                if "id" in message:  # the server asks something of the editor: it has nothing to say
                    self._write({"jsonrpc": "2.0", "id": message["id"], "result": None})
                continue
            answer = self._asked.pop(message.get("id"), None)
            if answer is not None and not answer.done():
                answer.set_result(message.get("result"))


def _place(document: Document, offset: int) -> dict[str, int]:
    position = document.position(offset)
    return {"line": position.line, "character": position.column}


@contextlib.asynccontextmanager
async def gateway(model: str | None, larger: Path | None = None) -> AsyncIterator[str]:
    """A server of its own, on a free port; its address. `larger`: a second model, called `larger`."""
    with tempfile.TemporaryDirectory() as folder:
        options = []
        if larger is not None:
            table = f'[models.larger]\npath = {json.dumps(str(larger))}\nrole = "deep"\n'
            (Path(folder) / "two.toml").write_text(table)
            options = ["--config", str(Path(folder) / "two.toml")]
        command = [PROGRAM, "--json", *options, "serve", "--port", "0"]
        for name in (model or ("embedded" if larger is not None else None), larger and "larger"):
            command += ["--model", name] if name else []
        async with _running(command) as url:
            yield url


@contextlib.asynccontextmanager
async def _running(command: list[str]) -> AsyncIterator[str]:
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), 300)
        if not line:
            sys.exit("the gateway did not start; it says why above")
        yield json.loads(line)["url"]
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await asyncio.wait_for(process.wait(), 20)


async def token_counts(url: str) -> tuple[int, int]:
    """Prompt tokens computed and reused so far, as the gateway counts them."""

    def read() -> str:
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as page:
            return str(page.read().decode())

    page = await asyncio.to_thread(read)
    kinds = re.findall(r'keystroke_tokens_total\{kind="(\w+)"[^}]*\} ([\d.e+]+)', page)
    totals: Counter[str] = Counter()
    for kind, count in kinds:
        totals[kind] += int(float(count))
    return totals["input"], totals["reused"]


async def settled(url: str, first: tuple[int, int]) -> None:
    """Until the gateway has computed something since `first`, and then nothing for a while."""
    last = first
    quiet = waited = 0.0
    while waited < PATIENCE and (quiet < SETTLED or last == first):
        await asyncio.sleep(0.1)
        waited += 0.1
        now = await token_counts(url)
        quiet = quiet + 0.1 if now == last else 0.0
        last = now
