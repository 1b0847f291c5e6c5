"""The live channel with the embedded model: the fast path gives what the plain path gives."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from gateway_support import RunningServer, serving

from keystroke.assist.completion import Extent, LiveCompletion
from keystroke.clients.live_connection import LiveClient
from keystroke.config import AssistSettings, Settings
from keystroke.engine.generation import Generation
from keystroke.engine.load import load_model
from keystroke.engine.mixing import Mixing
from keystroke.engine.model import Model
from keystroke.engine.onnx.engine import OnnxEngine
from keystroke.errors import KeystrokeError
from keystroke.protocol import live_messages as live
from keystroke.text import Edit

pytestmark = pytest.mark.model

READER = "def read_{0}(path):\n    with open(path) as file:\n        return json.load(file)['{0}']\n\n\n"
ABOVE = "import json\n\n\n" + "".join(
    READER.format(name) for name in ("name", "size", "kind", "owner", "state")
)
TYPED = "def write(path, value):\n    with open(path, 'w') as file:\n        json."
BELOW = "\n\n\nif __name__ == '__main__':\n    print(read_name('a.json'))\n"


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[RunningServer, Model]]:
    try:
        model = load_model("embedded", Settings())
    except KeystrokeError as error:
        pytest.skip(error.message)
    with serving(model, concurrent=0) as running:
        yield running, model


def plain(model: Model, text: str, cursor: int) -> str:
    """The same suggestion without reuse, streams or caches."""
    completion = LiveCompletion(model, AssistSettings(), path="a.py", language="python")
    stream = completion.begin(text, cursor, Extent.REST)
    with model.engine.session() as session:
        prompt, params = stream.prompt.tokens, stream.params()
        for chunk in Generation(model, session, prompt, params, mixing=Mixing(stream.predictor)):
            stream.feed(chunk)
            if stream.done:
                break
    return stream.text


def test_typing_key_by_key_reuses_the_context_and_changes_nothing(
    server: tuple[RunningServer, Model],
) -> None:
    running, model = server

    async def run() -> tuple[list[live.LiveReceipt], str, str]:
        paid: list[live.LiveReceipt] = []
        ready = asyncio.Event()
        async with LiveClient(
            running.url, on_event=lambda e: ready.set() if isinstance(e, live.Ready) else None
        ) as client:
            client.open("a.py", ABOVE + BELOW, path="a.py", language="python")
            await asyncio.wait_for(ready.wait(), 120)
            cursor = len(ABOVE)
            await client.complete("a.py", cursor, invoked=True)
            for version, sign in enumerate(TYPED, 1):
                client.change("a.py", version, [Edit(cursor, cursor, sign)], cursor + 1)
                cursor += 1
                if version % 8 == 0 or version == len(TYPED):
                    answer = await client.complete("a.py", cursor, invoked=True, extent="line")
                    paid.append(answer.receipt)
            hidden = answer.text if isinstance(answer, live.Suggestion) else answer.hidden
            return paid, client.text("a.py"), hidden

    paid, text, said = asyncio.run(run())
    computed = [p for p in paid if p.prompt_tokens]
    assert computed
    assert sum(p.reused_tokens for p in computed) >= 0.95 * sum(p.prompt_tokens for p in computed)
    assert text == ABOVE + TYPED + BELOW
    assert running.settled(30)
    expected = plain(model, text, len(ABOVE + TYPED))
    assert said == expected or expected.startswith(said)


def test_the_embedded_model_knows_what_comes_next(server: tuple[RunningServer, Model]) -> None:
    running, _ = server

    async def run() -> str:
        async with LiveClient(running.url) as client:
            text = "one = 1\ntwo = 2\nthree = 3\nfour = 4\nfive ="
            client.open("b.py", text, path="b.py", language="python")
            answer = await client.complete("b.py", len(text), invoked=True)
            return answer.text if isinstance(answer, live.Suggestion) else answer.hidden

    assert asyncio.run(run()) == " 5"


def test_the_prompt_of_the_next_word_is_computed_before_its_first_letter(
    server: tuple[RunningServer, Model],
) -> None:
    running, model = server
    engine = model.engine
    assert isinstance(engine, OnnxEngine)
    if engine._plan is None:
        pytest.skip("logits are kept where the operators were compiled")
    above = "import json\n\n\nzq = vv"

    async def run() -> live.Suggestion | live.NotShown:
        async with LiveClient(running.url) as client:
            client.open("c.py", above, path="c.py", language="python")
            client.change("c.py", 1, [Edit(len(above), len(above), " - ")], len(above) + 3)
            answer = await client.complete("c.py", len(above) + 3)
            for _ in range(600):
                if computed():
                    break
                await asyncio.sleep(0.05)
            return answer

    completion = LiveCompletion(model, AssistSettings(), path="c.py", language="python")
    wanted = tuple(completion.begin(f"{above} - x", len(above) + 4).prompt.tokens)

    def computed() -> bool:
        return any(tokens == wanted for _, tokens in tuple(engine.known))

    answer = asyncio.run(run())
    assert isinstance(answer, live.NotShown)  # otherwise the next line is computed instead
    assert answer.receipt.source == "computed"
    assert computed()
