"""A model at an address drafts for one that runs here."""

from __future__ import annotations

from typing import Any

import pytest
from openai_server import running, text
from starlette.requests import Request
from starlette.responses import Response

from keystroke.engine.echo import BOS, EOS, SPECIAL, VOCAB, EchoEngine
from keystroke.engine.generation import Generation, GenerationParams
from keystroke.engine.model import Model
from keystroke.engine.speculative import AdaptiveDrafter, cost_table
from keystroke.engine.speculative.draft_worker import DraftWorker
from keystroke.engine.speculative.worker_draft import WorkerDrafter
from keystroke.engine.speculative.worker_messages import Address, Load
from keystroke.engine.tokenizer import ByteTokenizer
from keystroke.errors import ConfigError

TOKENIZER = ByteTokenizer(SPECIAL, bos=BOS, eos=EOS, vocab_size=VOCAB)
FLAT = cost_table({1: 1.0, 32: 1.3})
PROMPT, ANSWER = "# arithmetic\n", "def add(a, b):\n    return a + b\n"
MOST = 20


async def goes_on(request: Request, body: dict[str, Any]) -> Response:
    """From wherever the prompt ends."""
    rest = ANSWER[len(body["prompt"]) - len(PROMPT) :]
    return await text(*(rest[at : at + 6] for at in range(0, len(rest), 6)))(request, body)


def said(worker: DraftWorker, step: float) -> Generation:
    engine = EchoEngine(lambda _: ANSWER, step_cost=step)
    drafter = AdaptiveDrafter((), FLAT, None, WorkerDrafter(worker))
    prompt, params = TOKENIZER.encode(PROMPT), GenerationParams(MOST)
    with engine.session() as session:
        answer = Generation(Model("echo", engine, TOKENIZER), session, prompt, params, drafter)
        for _ in answer:
            pass
    return answer


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "turns"])
def test_a_server_drafts_and_may_vanish(ahead: bool) -> None:
    with running() as server:
        server.on("/completions", goes_on)
        worker = DraftWorker(Load("there", {}, Address(server.url, "test-model")), TOKENIZER, ahead=ahead)
        worker.start("x", VOCAB)
        drafted = said(worker, step=0.4)
        assert drafted.text == ANSWER[:MOST]
        assert drafted.stats.accepted > 0
        asked = [body["prompt"] for body in server.bodies if "prompt" in body]
        assert asked[0].startswith(PROMPT)
    assert said(worker, step=0.01).text == ANSWER[:MOST]
    worker.close()


def test_an_address_where_nobody_answers_is_said_when_the_model_is_loaded() -> None:
    load = Load("there", {}, Address("http://127.0.0.1:9", "m"))
    with pytest.raises(ConfigError, match="cannot be run"):
        DraftWorker(load, TOKENIZER).start("x", VOCAB)
