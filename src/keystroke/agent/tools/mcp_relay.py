"""Passes the output of an MCP server on, and ends the server when a message is too long.

Runs as a program of its own (`python -I -S mcp_relay.py BYTES COMMAND...`), so it imports only the standard
library. The server's input is the relay's own.
"""

from __future__ import annotations

import os
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
    while data := os.read(server.stdout.fileno(), 1 << 16):
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
            server.kill()
            break
    sys.exit(server.wait())


if __name__ == "__main__":
    main()
