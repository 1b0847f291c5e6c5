"""Stream two answers of one conversation: python examples/stream_chat.py [QUESTION [MODEL]]

The second turn reuses the KV cache of the first; what was reused is printed.
"""

from __future__ import annotations

import sys

from keystroke import Generation, GenerationParams, load_model

FOLLOW_UP = "Say it in one short sentence."


def main(question: str = "What is a linked list?", name: str = "smollm2") -> None:
    model = load_model(name)
    if model.chat is None:
        sys.exit(f"{name} has no chat template")
    messages: list[dict[str, str]] = []
    with model.engine, model.engine.session() as session:
        for text in (question, FOLLOW_UP):
            sys.stdout.write(f"> {text}\n")
            messages.append({"role": "user", "content": text})
            prompt = model.chat.tokens(model.tokenizer, messages)
            answer = Generation(model, session, prompt, GenerationParams(max_tokens=48))
            for chunk in answer:
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
            messages.append({"role": "assistant", "content": answer.text})
            stats = answer.stats
            sys.stdout.write(f"\n[{stats.prompt_tokens} prompt tokens, {stats.reused} of them reused]\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
