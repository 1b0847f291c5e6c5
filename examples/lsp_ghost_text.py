"""An editor in forty lines, over the language server: python examples/lsp_ghost_text.py [URL]

Starts `keystroke lsp`, which finds or starts a gateway (or uses the one at URL), opens a file, types into it
and prints the ghost text an editor would show after each key.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TEXT = "def add(first, second):\n    return first +"
URI = "file:///tmp/add.py"
PROGRAM = str(Path(sys.executable).with_name("keystroke"))


class Server:
    def __init__(self, *options: str) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([PROGRAM, "lsp", *options], stdin=pipe, stdout=pipe)
        self._asked = 0

    def tell(self, method: str, **message: Any) -> None:
        body = json.dumps({"jsonrpc": "2.0", "method": method, **message}).encode()
        assert self._process.stdin is not None
        self._process.stdin.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        self._process.stdin.flush()

    def ask(self, method: str, params: Any = None) -> Any:
        self._asked += 1
        self.tell(method, id=self._asked, params=params)
        while (answer := self._read()).get("id") != self._asked or "method" in answer:
            pass  # what the server says of its own accord: findings, messages
        return answer.get("result")

    def _read(self) -> dict[str, Any]:
        out = self._process.stdout
        assert out is not None
        length = 0
        while (line := out.readline()).strip():
            if line.lower().startswith(b"content-length"):
                length = int(line.split(b":")[1])
        return json.loads(out.read(length)) if line else sys.exit("the server is gone; it says why above")


def main(*url: str) -> None:
    server = Server(*(["--gateway", *url] if url else []))
    server.ask("initialize", {"processId": None, "rootUri": None, "capabilities": {"textDocument": {}}})
    server.tell("initialized", params={})
    while not server.ask("workspace/executeCommand", {"command": "keystroke.status"})["connected"]:
        time.sleep(0.1)
    document = {"uri": URI, "languageId": "python", "version": 0, "text": TEXT}
    server.tell("textDocument/didOpen", params={"textDocument": document})
    column = len(TEXT) - TEXT.rindex("\n") - 1
    for version, key in enumerate(" sec", start=1):
        place = {"line": 1, "character": column}
        change = {"range": {"start": place, "end": place}, "text": key}
        target = {"uri": URI, "version": version}
        server.tell("textDocument/didChange", params={"textDocument": target, "contentChanges": [change]})
        column += 1
        asked = {"textDocument": {"uri": URI}, "position": {"line": 1, "character": column}}
        began = time.perf_counter()
        found = server.ask("textDocument/inlineCompletion", {**asked, "context": {"triggerKind": 2}})
        shown = found["items"][0]["insertText"] if found else None
        sys.stdout.write(f"{key!r}: {shown!r}, {(time.perf_counter() - began) * 1e3:.1f} ms\n")
    server.ask("shutdown")
    server.tell("exit")


if __name__ == "__main__":
    main(*sys.argv[1:2])
