"""Ghost text over the live channel, as the playground gets it: python examples/live_ghost_text.py [URL]

Needs a server: `keystroke serve`. Prints what is suggested after each key, and what the key cost.
"""

from __future__ import annotations

import asyncio
import sys

from keystroke import Edit, LiveClient, Suggestion

TEXT = "def add(first, second):\n    return first +"


async def main(url: str = "http://127.0.0.1:8012") -> None:
    async with LiveClient(url) as client:
        client.open("add.py", TEXT, path="add.py", language="python")
        typed = TEXT
        for version, key in enumerate(" sec", start=1):
            edit = Edit(len(typed), len(typed), key)
            typed += key
            client.change("add.py", version, [edit], cursor=len(typed))
            answer = await client.complete("add.py", len(typed))
            told = repr(answer.text) if isinstance(answer, Suggestion) else f"nothing ({answer.reason})"
            paid = answer.receipt
            sys.stdout.write(f"{key!r}: {told}, {paid.total_ms:.1f} ms, {paid.reused_tokens} tokens reused\n")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:2]))
