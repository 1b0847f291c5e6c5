"""The fast model answers at once; the larger model gives a second opinion later."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from gateway_support import RunningServer, serving
from test_live import Wire, after, spm_model, wired

from keystroke.assist.completion import Extent, ShownCompletion, WithheldCompletion
from keystroke.assist.completion.reasons import WithheldReason
from keystroke.assist.completion.second_opinion import Opinion, Verdict, second_opinion
from keystroke.config import NamedModel
from keystroke.engine.echo import EchoEngine
from keystroke.engine.model import Model
from keystroke.gateway.live.second_opinion import LEAST, larger_model, reading_budget

TEXT = "def add(a, b):\n    return a"


def offer(text: str, confidence: float = 1.0) -> ShownCompletion:
    return ShownCompletion(text, Extent.LINE, confidence)


@pytest.mark.parametrize(
    ("shown", "answer", "verdict"),
    [
        (" + b", offer(" + b"), Verdict.CONFIRMED),
        (" + b", WithheldCompletion(WithheldReason.LOW_CONFIDENCE, " + b"), Verdict.CONFIRMED),
        (" +", offer(" + b"), Verdict.LENGTHENED),
        (" - b", offer(" + b", 0.85), Verdict.REPLACED),
        (" - b", offer(" + b", 0.84), None),
        (" - b", WithheldCompletion(WithheldReason.LOW_CONFIDENCE, " + b"), None),
        ("", offer(" + b", 0.85), Verdict.OFFERED),
        ("", WithheldCompletion(WithheldReason.LOW_CONFIDENCE, " + b"), None),
        ("", offer("  "), None),
    ],
)
def test_what_is_shown_changes_only_where_the_larger_one_goes_on_or_is_sure(
    shown: str, answer: ShownCompletion | WithheldCompletion, verdict: Verdict | None
) -> None:
    opinion = second_opinion(shown, answer)
    assert (opinion.verdict if opinion is not None else None) is verdict


def test_what_is_being_typed_is_lengthened_and_never_contradicted() -> None:
    assert second_opinion(" - b", offer(" + b"), typed=True) is None
    assert second_opinion(" +", offer(" + b"), typed=True) == Opinion(Verdict.LENGTHENED, " + b", 1.0)


def test_a_slow_machine_reads_little_and_a_fast_one_all() -> None:
    assert reading_budget(10.0) == LEAST
    assert reading_budget(100.0) == 400
    assert reading_budget(100_000.0) == 2048


# ── over the wire ─────────────────────────────────────────────────────────────────────────────


def two(small: dict[str, str], large: dict[str, str], **costs: Any) -> tuple[Model, Model]:
    return (
        replace(spm_model(after(small)), name="small"),
        replace(spm_model(after(large), **costs), name="large"),
    )


def over(models: tuple[Model, ...], talk: Callable[[Wire], Awaitable[None]], **how: Any) -> dict[str, int]:
    """Talk to a server with these models; how many steps each engine took."""

    async def run(server: RunningServer) -> None:
        async with wired(server) as wire:
            await talk(wire)

    with serving(*models, roles={"large": "deep"}, **how) as server:
        asyncio.run(run(server))
        assert server.settled()
        return {name: engine.steps for name, engine in server.engines.items()}


@pytest.mark.parametrize(
    ("small", "large", "verdict"),
    [
        (" + b\n", " + b\n", "confirmed"),
        (" + b\n", " + b + 0\n", "lengthened"),
        (" - b\n", " + b\n", "replaced"),
    ],
)
def test_the_small_one_answers_and_the_larger_one_has_an_opinion(
    small: str, large: str, verdict: str
) -> None:
    async def talk(wire: Wire) -> None:
        await wire.open(TEXT)
        first = await wire.complete(len(TEXT), 0)
        assert (first["type"], first["text"], first["receipt"]["model"]) == (
            "suggestion",
            small[:-1],
            "small",
        )
        second = await wire.until("suggestion.revised")
        assert (second["id"], second["verdict"], second["text"]) == ("1", verdict, large[:-1])
        assert (second["start"], second["end"], second["version"]) == (len(TEXT), len(TEXT), 0)
        assert second["receipt"]["model"] == "large"
        # Whoever asks again is told what stands now, and nothing is computed for it.
        again = await wire.complete(len(TEXT), 0, "2")
        assert (again["text"], again["receipt"]["source"]) == (large[:-1], "cached")

    over(two({"return a": small}, {"return a": large}), talk)


def test_nothing_shown_is_offered_by_the_larger_one() -> None:
    async def talk(wire: Wire) -> None:
        await wire.open(TEXT)
        assert (await wire.complete(len(TEXT), 0))["type"] == "not_shown"
        second = await wire.until("suggestion.revised")
        assert (second["verdict"], second["text"]) == ("offered", " + b")

    over(two({}, {"return a": " + b\n"}), talk)


def test_the_text_of_the_small_one_is_the_draft_of_the_larger_one() -> None:
    line = " + b + 1111 + 2222 + 3333 + 4444\n"

    async def talk(wire: Wire) -> None:
        await wire.open(TEXT)
        await wire.complete(len(TEXT), 0)
        assert (await wire.until("suggestion.revised"))["verdict"] == "confirmed"

    answers = {"return a": line}
    plain = over(two(answers, answers), talk)
    drafted = over(two(answers, answers), talk, speculation=True)
    assert drafted["large"] < plain["large"] / 2


def test_a_key_that_goes_another_way_ends_it_and_nothing_is_said() -> None:
    async def talk(wire: Wire) -> None:
        await wire.open(TEXT)
        await wire.complete(len(TEXT), 0)
        await asyncio.sleep(0.2)  # the larger one has begun
        await wire.type(" * ", len(TEXT), 1)
        text = f"{TEXT} * "
        answer = await wire.complete(len(text), 1, "2")
        assert answer["id"] == "2"
        second = await wire.until("suggestion.revised")
        assert (second["id"], second["version"]) == ("2", 1)
        assert [e for e in wire.heard if e["type"] == "suggestion.revised"] == [second]

    small = {"return a": " + b\n", "return a * ": "b\n"}
    over(two(small, small, step_cost=0.05), talk)


def test_typing_what_is_shown_is_not_disturbed_and_then_goes_on_with_the_larger_ones_text() -> None:
    async def talk(wire: Wire) -> None:
        await wire.open(TEXT)
        assert (await wire.complete(len(TEXT), 0))["text"] == " + b"
        await asyncio.sleep(0.2)
        await wire.type(" ", len(TEXT), 1)  # agrees with both
        await asyncio.sleep(1.0)
        text = f"{TEXT} "
        answer = await wire.complete(len(text), 1, "2")
        assert (answer["text"], answer["receipt"]["source"]) == ("+ b + c", "typed_through")
        assert not [e for e in wire.heard if e["type"] == "suggestion.revised" and e["version"] == 0]

    over(two({"return a": " + b\n"}, {"return a": " + b + c\n"}, step_cost=0.05), talk)


def test_a_buffer_that_is_closed_and_a_client_that_leaves_end_the_reading() -> None:
    async def closes(wire: Wire) -> None:
        await wire.open(TEXT)
        await wire.complete(len(TEXT), 0)
        await asyncio.sleep(0.2)
        await wire.send(kind="buffer.close", buffer="a.py")

    async def leaves(wire: Wire) -> None:
        await wire.open(TEXT)
        await wire.complete(len(TEXT), 0)
        await asyncio.sleep(0.2)

    for talk in (closes, leaves):
        steps = over(two({"return a": " + b\n"}, {"return a": " + b" * 40 + "\n"}, step_cost=0.05), talk)
        assert steps["large"] < 60


def test_one_mind_alone_says_nothing_more() -> None:
    async def talk(wire: Wire) -> None:
        await wire.open(TEXT)
        await wire.complete(len(TEXT), 0)
        await asyncio.sleep(0.3)
        await wire.send(kind="buffer.open", buffer="b.py", text="x", path="b.py")
        await wire.until("ready", buffer="b.py")
        assert "suggestion.revised" not in {event["type"] for event in wire.heard}

    over((replace(spm_model(after({"return a": " + b\n"})), name="small"),), talk)


def test_only_a_larger_model_that_fills_in_the_middle_has_an_opinion() -> None:
    small, large = two({}, {})
    with serving(small, large, roles={"large": "deep"}) as server:
        registry = server.gateway.service.registry
        first = registry.entries["small"]
        assert larger_model(registry, first) is registry.entries["large"]
        assert larger_model(registry, registry.entries["large"]) is None
    with serving(small, replace(large, fim=None), roles={"large": "deep"}) as server:
        registry = server.gateway.service.registry
        assert larger_model(registry, registry.entries["small"]) is None


@pytest.mark.parametrize("roles", [("deep", "deep"), ("deep", "chat"), ("chat", "deep")])
def test_of_two_equally_large_models_the_one_that_takes_the_suffix_first_is_asked(
    roles: tuple[str, str],
) -> None:
    small, large = two({}, {})
    assert large.fim is not None
    plain = replace(large, name="plain", fim=replace(large.fim, order="psm"))
    given = {"plain": roles[0], "large": roles[1]}
    for models in ((small, plain, large), (small, large, plain)):
        with serving(*models, roles=given) as server:
            registry = server.gateway.service.registry
            assert larger_model(registry, registry.entries["small"]) is registry.entries["large"]


def test_a_larger_model_is_asked_before_one_that_takes_the_suffix_first() -> None:
    small, large = two({}, {})
    assert large.fim is not None
    plain = replace(large, name="plain", fim=replace(large.fim, order="psm"), engine=EchoEngine())
    plain.engine.info = replace(plain.engine.info, parameters=7)
    with serving(small, plain, large, roles={"plain": "deep", "large": "deep"}) as server:
        registry = server.gateway.service.registry
        assert larger_model(registry, registry.entries["small"]) is registry.entries["plain"]


def test_a_model_whose_tokens_are_rationed_is_left_to_those_who_ask_for_it() -> None:
    tables = {"large": NamedModel(tokens_per_minute=1000)}
    with serving(*two({}, {}), roles={"large": "deep"}, tables=tables) as server:
        registry = server.gateway.service.registry
        assert larger_model(registry, registry.entries["small"]) is None
