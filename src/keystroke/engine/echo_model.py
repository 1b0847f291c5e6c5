"""A model without weights that repeats the user's last message at a steady pace, for trying clients.

It uses the echo engine with a real chat template and tokenizer.
"""

from __future__ import annotations

from keystroke.engine.echo import EOS, SPECIAL, EchoEngine
from keystroke.engine.model import Model
from keystroke.engine.templates import ChatTemplate, FimTemplate
from keystroke.engine.tokenizer.byte_tokens import ByteTokenizer

_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]\n{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
_FIM = {"<fim_prefix>": 259, "<fim_suffix>": 260, "<fim_middle>": 261}


def echo_model(
    step_cost: float = 0.005, *, prefill_cost: float = 0.0, max_batch: int = 1, cache_bytes: int = 1 << 24
) -> Model:
    engine = EchoEngine(
        _repeat, step_cost=step_cost, prefill_cost=prefill_cost, max_batch=max_batch, cache_bytes=cache_bytes
    )
    return Model(
        name="echo",
        engine=engine,
        tokenizer=ByteTokenizer({**SPECIAL, **_FIM}, eos=EOS, vocab_size=320),
        chat=ChatTemplate(_TEMPLATE),
        fim=FimTemplate("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    )


def _repeat(prompt: str) -> str:
    _, found, rest = prompt.rpartition("[user]\n")
    if not found:
        return "pass"
    message, _, start = rest.partition(chr(10) + "[assistant]\n")
    answer = f"You said: {message.strip()}"
    # A resumed answer continues where it stopped.
    return answer.removeprefix(start) if start and answer.startswith(start) else answer
