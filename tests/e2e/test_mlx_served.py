"""Server and language server with the embedded model on MLX, on its CPU build."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from lsp_support import editing

from keystroke.config import load_settings
from keystroke.engine.locate import shipped_model
from keystroke.gateway.work.registry import registry_from_settings

sys.path.insert(0, str(Path(__file__).parents[1] / "gateway"))
from gateway_support import serving

if TYPE_CHECKING:
    from gateway_support import RunningServer

pytest.importorskip("mlx.core", reason="MLX is not installed")
pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    if shipped_model() is None:
        pytest.skip("the embedded model is not here")
    alone = {"paths.models": str(tmp_path_factory.mktemp("models")), "engine.kind": "mlx"}
    with serving(registry=registry_from_settings(load_settings(alone, environ={}))) as running:
        yield running


def test_answers_come_from_mlx_and_a_repeated_prompt_is_not_read_again(server: RunningServer) -> None:
    body = {"model": "auto", "prompt": "def add(a, b):\n    return a +", "max_tokens": 4, "temperature": 0}
    first = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300).json()
    assert first["choices"][0]["text"].lstrip().startswith("b")
    entry = next(iter(server.gateway.service.registry.entries.values()))
    assert entry.model is not None
    assert type(entry.model.engine).__module__ == "keystroke.engine.mlx.engine"
    again = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300).json()
    assert again["choices"][0]["text"] == first["choices"][0]["text"]


def test_an_urgent_request_goes_before_an_answer_of_the_same_model(server: RunningServer) -> None:
    long = {"model": "auto", "prompt": "1, 2, 3, 4, 5,", "max_tokens": 2000, "stream": True}
    long |= {"temperature": 0, "priority": "chat"}
    urgent = {"model": "auto", "prompt": "def add(a, b):\n    return a +", "max_tokens": 4, "temperature": 0}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=long, timeout=300) as writing:
        lines = writing.iter_lines()
        assert next(lines).startswith("data: ")
        body = {**urgent, "priority": "ghost"}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300).json()
        assert answer["choices"][0]["text"].lstrip().startswith("b")
        more = [next(lines) for _ in range(8)]
        assert "data: [DONE]" not in more, "the answer goes on after it"


def test_a_model_on_the_cpu_engine_answers_while_one_on_mlx_writes(tmp_path: Path) -> None:
    shipped = shipped_model()
    if shipped is None:
        pytest.skip("the embedded model is not here")
    settings = load_settings(
        {
            "paths.models": str(tmp_path),
            "models.quick.path": str(shipped),
            "models.quick.engine": "onnx",
            "models.large.path": str(shipped),
            "models.large.engine": "mlx",
        },
        environ={},
    )
    with serving(registry=registry_from_settings(settings)) as server:
        long = {"model": "large", "prompt": "1, 2, 3, 4, 5,", "max_tokens": 2000, "stream": True}
        long |= {"temperature": 0}
        short = {"model": "quick", "prompt": "for index in range(len(items)):\n    print(items["}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=long, timeout=300) as writing:
            lines = writing.iter_lines()
            assert next(lines).startswith("data: ")
            body = {**short, "max_tokens": 3, "temperature": 0}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300).json()
            assert answer["choices"][0]["text"]
            more = [next(lines) for _ in range(8)]
            assert "data: [DONE]" not in more, "the large model is still writing"
        used = {
            name: type(entry.model.engine).__module__.split(".")[2]
            for name, entry in server.gateway.service.registry.entries.items()
            if entry.model is not None
        }
        assert used == {"quick": "onnx", "large": "mlx"}


async def test_ghost_text_comes_from_mlx(tmp_path: Path) -> None:
    if shipped_model() is None:
        pytest.skip("the embedded model is not here")
    async with editing(tmp_path, "--linger", "0", environment={"KEYSTROKE_ENGINE_KIND": "mlx"}) as editor:
        uri = editor.open("work.py", "for index in range(len(items)):\n    print(items[")
        assert (await editor.until_ghost(uri)).startswith("index")
