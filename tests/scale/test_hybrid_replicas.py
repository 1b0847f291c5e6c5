"""Replicas of a hybrid model: a conversation finds its recurrent state on the replica it is routed to."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scale_support import HANG

pytest.importorskip("torch", reason="hybrid models with random weights are made with PyTorch")
pytest.importorskip("transformers", reason="hybrid models with random weights are made with transformers")

sys.path.insert(0, str(Path(__file__).parents[1] / "engine" / "families"))
from family_models import engine_on, reference
from test_replica_queue import TOKENIZER, queue_over, read

from keystroke.config import NamedModel
from keystroke.engine.base import Sampling
from keystroke.engine.generation import GenerationParams
from keystroke.engine.model import Model
from keystroke.gateway.work.registry import ServedModel, local_entry
from keystroke.gateway.work.scheduler import Job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(HANG)]

DICE = np.random.default_rng(5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("hybrid")
    reference("qwen3_5", max_position_embeddings=8192).save_pretrained(place / "model")
    return place


def tokens(count: int) -> list[int]:
    return [int(t) for t in DICE.integers(8, 96, count)]


async def test_a_turn_reads_what_is_new_and_all_of_it_only_where_its_replica_was_lost(folder: Path) -> None:
    def entry() -> ServedModel:
        engine = engine_on(folder / "model", "int8", folder / "cache")
        return local_entry("hybrid", Model("hybrid", engine, TOKENIZER), named=NamedModel())

    params = GenerationParams(6, Sampling())

    async def turns(queue: Any, pool: Any, *, loses: bool) -> list[tuple[int, int]]:
        """(tokens of the prompt, tokens reused) of each turn."""
        seen, history = [], {who: tokens(300) for who in "abc"}
        for turn in range(3):
            for who, held in history.items():
                prompt = [*held, *tokens(40)]
                pool.breaks = [0] if loses and turn == 2 else []
                ticket = queue.submit(Job(prompt, params, affinity=who))
                _, items = await read(ticket)
                seen.append((len(prompt), ticket.stats.reused))
                history[who] = list(items[-1].tokens)
        return seen

    async with queue_over(entry) as (queue, pool):
        stays = await turns(queue, pool, loses=False)
    assert all(reused == 0 for _, reused in stays[:3])
    assert all(prompt - reused <= 60 for prompt, reused in stays[3:])
    assert len({call.affinity for call in pool.calls}) == 3
    async with queue_over(entry) as (queue, pool):
        lost = await turns(queue, pool, loses=True)
    assert all(prompt - reused <= 60 for prompt, reused in lost[3:6])
    assert all(reused == 0 for _, reused in lost[6:])
