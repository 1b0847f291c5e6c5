"""Stream from any OpenAI-compatible server: python examples/remote_chat.py URL MODEL [QUESTION]

A key, where the server wants one, is read from OPENAI_API_KEY.
"""

from __future__ import annotations

import asyncio
import sys

from keystroke import Chunk, Endpoint, GenerationParams, KeystrokeError, RemoteModel, Usage


async def main(url: str, name: str, question: str = "What is a linked list?") -> None:
    async with RemoteModel(Endpoint(url, "OPENAI_API_KEY"), name) as model:
        health = await model.probe()
        sys.stderr.write(f"{url} answered in {health.seconds * 1000:.0f} ms. {health.detail}\n")
        messages = [{"role": "user", "content": question}]
        async for item in model.stream_chat(messages, GenerationParams(max_tokens=128)):
            if isinstance(item, Chunk):
                sys.stdout.write(item.text)
                sys.stdout.flush()
            elif isinstance(item, Usage):
                sys.stderr.write(f"\n{item.prompt_tokens} tokens in, {item.completion_tokens} out\n")
    sys.stdout.write("\n")


if __name__ == "__main__":
    try:
        asyncio.run(main(*sys.argv[1:]))
    except KeystrokeError as error:
        sys.exit(str(error))
