"""Budgets in a shared store: several gateways together let through exactly what one would."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from keystroke.errors import RateLimited
from keystroke.gateway.access.limits import RateBudget
from keystroke.gateway.record.shared_limits import BUDGETS, LEASES, SharedLimits
from keystroke.gateway.record.store import Store, default_url
from postgres_server import postgres_server


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    with postgres_server() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgres"])
def gateways(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[SharedLimits]]:
    """Three gateways, each with a connection pool of its own."""
    url = default_url(tmp_path) if request.param == "sqlite" else request.getfixturevalue("postgres")
    stores = [Store(url) for _ in range(3)]
    made = [SharedLimits(store.engine) for store in stores]
    yield made
    for limits in made:
        limits.close()
    with stores[0].engine.begin() as connection:
        for table in (BUDGETS, LEASES):
            connection.execute(sa.delete(table))
    for store in stores:
        store.close()


async def _asked(limits: SharedLimits, budget: RateBudget, tokens: int = 0) -> bool:
    try:
        await limits.admit("key", "m", budget, tokens)
    except RateLimited:
        return False
    return True


async def test_three_gateways_admit_exactly_the_requests_of_one_budget(gateways: list[SharedLimits]) -> None:
    budget = RateBudget(requests_per_minute=30)
    asked = [_asked(gateways[i % 3], budget) for i in range(90)]
    admitted = sum(await asyncio.gather(*asked))
    # The bucket refills while they ask: half a request a second, and this takes a few at most.
    assert 30 <= admitted <= 33


async def test_three_gateways_admit_exactly_the_places_of_one_key(gateways: list[SharedLimits]) -> None:
    budget = RateBudget(concurrent=5)
    permits = await asyncio.gather(
        *(gateways[i % 3].admit("key", "m", budget, 1) for i in range(20)), return_exceptions=True
    )
    held = [p for p in permits if not isinstance(p, BaseException)]
    assert len(held) == 5
    assert all(isinstance(p, RateLimited) for p in permits if isinstance(p, BaseException))
    held[0].settle(1)
    held[0].settle(1)  # a second time does nothing
    for limits in gateways:
        limits.close()  # waits for what is being settled
    fresh = SharedLimits(gateways[0]._engine)
    assert await _asked(fresh, budget)
    assert not await _asked(fresh, budget)
    fresh.close()


async def test_tokens_are_settled_for_all(gateways: list[SharedLimits]) -> None:
    budget = RateBudget(tokens_per_minute=1000)
    permit = await gateways[0].admit("key", "m", budget, 100)
    permit.settle(5000)  # a long answer is paid by the next request
    gateways[0].close()
    with pytest.raises(RateLimited):
        await gateways[1].admit("key", "m", budget, 10)
    assert int(gateways[1].headers("key", "m")["x-ratelimit-remaining-tokens"]) == 0


async def test_places_of_a_gateway_that_is_gone_come_back(
    gateways: list[SharedLimits], monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = RateBudget(concurrent=1)
    await gateways[0].admit("key", "m", budget, 1)
    assert not await _asked(gateways[1], budget)
    with gateways[1]._engine.begin() as connection:
        connection.execute(sa.update(LEASES).values(until=1.0))  # its gateway has not been heard of since
    assert await _asked(gateways[1], budget)


async def test_an_admission_nobody_waits_for_any_more_is_given_back(gateways: list[SharedLimits]) -> None:
    budget = RateBudget(concurrent=1)
    asked = asyncio.create_task(gateways[0].admit("key", "m", budget, 1))
    await asyncio.sleep(0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    for _ in range(200):
        if await _asked(gateways[1], budget):
            return
        await asyncio.sleep(0.02)
    pytest.fail("the place never came back")


async def test_keys_and_models_do_not_share(gateways: list[SharedLimits]) -> None:
    budget = RateBudget(requests_per_minute=1)
    await gateways[0].admit("one", "m", budget, 0)
    await gateways[1].admit("two", "m", budget, 0)
    await gateways[2].admit("one", "n", budget, 0)
    with pytest.raises(RateLimited):
        await gateways[1].admit("one", "m", budget, 0)
