"""The served CUDA engine, from the command line to a client's socket, with random weights."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench.cuda_rows import cuda_serve
from gpu_models import DEVICE, DRAFTING, WIDE, needs_hopper

from keystroke import Client

pytestmark = needs_hopper


@pytest.fixture(scope="module")
def serve() -> Any:
    return cuda_serve


@pytest.fixture(scope="module")
def models(serve: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    large = serve.write_model(replace(WIDE, name="large"), folder / "large", str(DEVICE))
    return large, serve.write_model(DRAFTING, folder / "small", str(DEVICE), seed=1)


async def answers(serve: Any, url: str) -> tuple[str, list[str]]:
    """One answer, after others were stopped; and four at a time."""
    async with Client(url) as client:
        stopped = await serve.ask(client, "stop me", tokens=8192, stop_after=10)
        assert stopped.status == "cancelled"
        assert 10 <= stopped.tokens < 4000
        alone = await serve.ask(client, "0hello", tokens=200)
        assert (alone.status, alone.tokens) == ("incomplete", 200)
        several = await serve.together(client, "hello")
        assert all(answer.tokens == serve.TOKENS for answer in several)
        return alone.text, [answer.text for answer in several]


def test_a_client_gets_its_text_alone_stopped_and_in_company_with_and_without_drafts(
    serve: Any, models: tuple[Path, Path]
) -> None:
    large, small = models
    with serve.served(large, "--engine", "cuda") as url:
        alone, several = asyncio.run(answers(serve, url))
    assert several[0].startswith(alone[:200])
    with serve.served(large, "--engine", "cuda", "--draft-model", str(small)) as url:
        assert asyncio.run(answers(serve, url)) == (alone, several)
