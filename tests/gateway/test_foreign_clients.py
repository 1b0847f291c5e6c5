"""Editors that speak to Zeta 2 or Sweep's models, against this server: what they send, what they read."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_support import RunningServer, scripted_model, serving
from test_live import after, spm_model

from keystroke.config import Settings
from keystroke.engine.load import load_model
from keystroke.errors import KeystrokeError

sys.path.insert(0, str(Path(__file__).parents[1] / "assist" / "next_edit"))
import test_foreign as forms

TYPED = "def add(a, b):\n    return a"
HEAD, TAIL = "import os\n\n\n", "\n\n\ndef last():\n    pass\n"
STOPS = ["<|file_sep|>", "<|endoftext|>"]


def sweep(typed: str = TYPED, model: str = "sweep-next-edit", **more: Any) -> dict[str, Any]:
    """A request as cursortab.nvim sends it."""
    begun = typed[: typed.rfind("\n") + 1]
    prompt = (
        f"<|file_sep|>a.py\n{HEAD}{typed}{TAIL}\n<|file_sep|>original/a.py:4:5\n{typed}\n"
        f"<|file_sep|>current/a.py:4:5\n{typed}<|cursor|>\n<|file_sep|>updated/a.py:4:5\n{begun}"
    )
    return {
        "model": model,
        "prompt": prompt,
        "temperature": 0.0,
        "max_tokens": 512,
        "top_k": 50,
        "stop": STOPS,
        "n": 1,
        "echo": False,
        **more,
    }


def zeta(typed: str = TYPED, **more: Any) -> dict[str, Any]:
    """A request as Zed sends it to a server of one's own."""
    prompt = (
        f"<|file_sep|>edit history\n<|file_sep|>a.py\n<|fim_prefix|>{HEAD}<<<<<<< CURRENT\n"
        f"{typed}<|user_cursor|>\n=======\n<|fim_suffix|>{TAIL}<|fim_middle|>"
    )
    return {"model": "zeta2", "prompt": prompt, "max_tokens": 256, "temperature": None, "stop": [],
            "environment": None, **more}  # fmt: skip


def post(server: RunningServer, body: dict[str, Any]) -> Any:
    answer = httpx.post(f"http://127.0.0.1:{server.port}/v1/completions", json=body, timeout=60)
    answer.raise_for_status()
    return answer.json()


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving(spm_model(after({"return a": " + b\n"}))) as running:
        yield running


def test_the_text_at_the_cursor_comes_back_in_the_clients_words(server: RunningServer) -> None:
    assert post(server, sweep())["choices"][0]["text"] == "    return a + b"
    assert post(server, zeta())["choices"][0]["text"] == f"{TYPED} + b\n"
    assert server.settled()


def test_a_stream_is_one_event_and_its_end(server: RunningServer) -> None:
    url = f"http://127.0.0.1:{server.port}/v1/completions"
    body = httpx.post(url, json=sweep(stream=True), timeout=60)
    assert body.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in body.text.split("\n") if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(e)["choices"][0]["text"] for e in events[:-1]) == "    return a + b"
    assert json.loads(events[0])["choices"][0]["finish_reason"] == "stop"


def test_where_nothing_is_to_be_done_the_window_comes_back_unchanged(server: RunningServer) -> None:
    typed = "value = 1"
    assert post(server, sweep(typed))["choices"][0]["text"] == typed
    assert post(server, zeta(typed))["choices"][0]["text"] == f"{typed}\n"
    asked = post(server, {"prompt": forms.blocks(), "model": "", "max_tokens": 64})
    assert forms.applied(asked["choices"][0]["text"]) == forms.WINDOW


def test_files_that_may_hold_secrets_are_not_asked_about(server: RunningServer) -> None:
    body = sweep()
    body["prompt"] = body["prompt"].replace("a.py", ".env")
    assert post(server, body)["choices"][0]["text"] == "    return a"


def test_a_model_made_for_such_prompts_gets_them_as_they_are() -> None:
    seen: list[str] = []

    def script(prompt: str) -> str:
        seen.append(prompt)
        return "said by itself"

    model = scripted_model(script, "sweep-next-edit-1.5b")
    with serving(model) as server:
        assert post(server, sweep(model=model.name))["choices"][0]["text"] == "said by itself"
        assert seen[-1].endswith("updated/a.py:4:5\ndef add(a, b):\n")


def test_what_is_not_recognised_and_what_is_meant_literally_goes_to_the_model(server: RunningServer) -> None:
    for body in (
        sweep(model="", literal=True),
        {"prompt": sweep()["prompt"].replace("<|file_sep|>current/", "<|file_sep|>now/"), "max_tokens": 4},
    ):
        assert post(server, body)["choices"][0]["text"] != "    return a + b"


def test_an_unknown_model_is_refused_for_any_other_prompt(server: RunningServer) -> None:
    url = f"http://127.0.0.1:{server.port}/v1/completions"
    answer = httpx.post(url, json={"prompt": "x", "model": "sweep-next-edit"}, timeout=60)
    assert answer.status_code in (400, 404)


def test_a_client_that_hangs_up_stops_the_work() -> None:
    with serving(spm_model(after({"return a": " + b" * 400}), step_cost=0.02)) as server:
        url = f"http://127.0.0.1:{server.port}/v1/completions"
        with pytest.raises(httpx.TimeoutException):
            httpx.post(url, json=sweep(), timeout=0.15)
        assert server.settled(10)


@pytest.mark.model
def test_the_embedded_model_answers_both() -> None:
    try:
        model = load_model("embedded", Settings())
    except KeystrokeError as error:
        pytest.skip(error.message)
    typed = "def add(first, second):\n    return first"
    with serving(model, concurrent=0) as server:
        assert post(server, sweep(typed))["choices"][0]["text"] == "    return first + second"
        assert post(server, zeta(typed))["choices"][0]["text"] == f"{typed} + second\n"
        renamed = (
            "def total(prices, rate):\n    sum_all = 0\n    for price in prices:\n"
            "        sum += price\n    return sum * rate\n"
        )
        body = zeta("", prompt=(
            "<|file_sep|>edit history\n--- a/a.py\n+++ b/a.py\n@@ -1,3 +1,3 @@\n def total(prices, rate):\n"
            "-    sum = 0\n+    sum_all = 0\n     for price in prices:\n<|file_sep|>a.py\n<|fim_prefix|>"
            "<<<<<<< CURRENT\n" + renamed.replace("sum_all = 0", "sum_all<|user_cursor|> = 0")
            + "=======\n<|fim_suffix|>\n<|fim_middle|>"
        ))  # fmt: skip
        text = post(server, body)["choices"][0]["text"]
        assert text == renamed.replace("sum ", "sum_all ")
