"""Passes the output of an MCP server on. Ends the server when a message is too long or its reader is gone,
also where the reader was killed and the server is silent.

Runs as a program of its own (`python -I -S mcp_relay.py BYTES COMMAND...`), so it imports only the standard
library. The server's input is the relay's own.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys


def main() -> None:
    most, command = int(sys.argv[1]), sys.argv[2:]
    try:
        server = subprocess.Popen(command, stdout=subprocess.PIPE)
    except OSError as error:
        sys.exit(f"keystroke: the MCP server {command[0]} cannot be run: {error.strerror}")
    signal.signal(signal.SIGTERM, lambda *_: server.kill())
    assert server.stdout is not None
    length = 0  # of the message so far
    watched = select.poll()
    watched.register(server.stdout, select.POLLIN)
    watched.register(1, 0)  # reports only that its reader is gone
    while 1 not in dict(watched.poll()) and (data := os.read(server.stdout.fileno(), 1 << 16)):
        newline = data.rfind(b"\n")
        length = len(data) - newline - 1 if newline >= 0 else length + len(data)
        if length > most:
            server.kill()
            sys.exit(
                f"keystroke: the MCP server {command[0]} was ended: a message of more than {most:,} bytes"
            )
        try:
            while data:
                data = data[os.write(1, data) :]
        except BrokenPipeError:
            break
    if 1 in dict(watched.poll(0)):
        server.kill()
    sys.exit(server.wait())


if __name__ == "__main__":
    main()
