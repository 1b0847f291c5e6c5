"""`"drafts": false` decodes without drafts: the same text, and the receipt says that none was made."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from gateway_support import scripted_model, serving

TEXT = "the same words again and again, the same words again and again, and then an end"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "hello"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/completions", {"prompt": "hello", "max_tokens": 60}),
    ],
    ids=["responses", "chat", "completions"],
)
def test_a_request_may_do_without_drafts_and_gets_the_same_text(path: str, body: dict[str, Any]) -> None:
    prediction = {"type": "content", "content": TEXT}
    with serving(scripted_model(lambda _prompt: TEXT), speculation=True) as server:

        def asked(**more: Any) -> dict[str, Any]:
            answer = httpx.post(f"{server.url}{path}", json={**body, "prediction": prediction, **more})
            assert answer.status_code == 200, answer.text
            return dict(answer.json())

        drafted, plain = asked(), asked(drafts=False)
    assert drafted["receipt"]["drafted_tokens"] > 0
    assert plain["receipt"]["drafted_tokens"] == 0
    assert _text(drafted) == _text(plain) != ""


def _text(answer: dict[str, Any]) -> str:
    if "output" in answer:
        return str(answer["output"][0]["content"][0]["text"])
    choice = answer["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])
