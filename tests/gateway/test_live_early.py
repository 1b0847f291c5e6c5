"""A confident beginning on the live channel: it is there before its line has been said to the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from gateway_support import RunningServer, serving
from test_live import after, spm_model, wired

from keystroke.engine.base import Interrupt
from keystroke.engine.echo import EchoEngine, EchoSession, Script

SURE = "compute_it"
LINE = f"{SURE}(now, and=then, with_more=that)"


class Hesitant(EchoEngine):
    """Sure of the beginning of each answer; then of nothing, and three tokens later it stops until it may go
    on."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.go_on = threading.Event()

    def session(self, scope: str = "") -> EchoSession:
        return HesitantSession(self, scope)


class HesitantSession(EchoSession):
    def _forward(
        self, tokens: Sequence[int], start: int, rows: int, interrupt: Interrupt | None
    ) -> np.ndarray:
        logits = super()._forward(tokens, start, rows, interrupt)
        engine = self._engine
        assert isinstance(engine, Hesitant)
        for row in range(rows):
            said = start + len(tokens) - rows + row + 1 - self._prompt
            if said >= len(SURE):
                others = logits[row] == 0.0
                logits[row, others] = 9.0
            if said >= len(SURE) + 3:
                assert engine.go_on.wait(60)
        return logits


@pytest.fixture
def server() -> Iterator[RunningServer]:
    model = spm_model()
    with serving(replace(model, engine=Hesitant(after({"value = ": f"{LINE}\n"})))) as running:
        try:
            yield running
        finally:
            hesitant(running).go_on.set()


def hesitant(server: RunningServer) -> Hesitant:
    engine = server.engines["echo"]
    assert isinstance(engine, Hesitant)
    return engine


def test_it_is_shown_and_typed_through_while_the_rest_is_still_being_said(server: RunningServer) -> None:
    async def run() -> None:
        async with wired(server) as wire:
            text = "value = "
            await wire.open(text)
            event = await wire.complete(len(text), 0, "first")
            assert (event["type"], event["text"]) == ("suggestion", SURE)
            assert event["receipt"]["source"] == "computed"
            for version, sign in enumerate(SURE[:4], 1):
                await wire.type(sign, len(text), version)
                text += sign
                event = await wire.complete(len(text), version, f"v{version}")
                assert (event["text"], event["receipt"]["source"]) == (SURE[version:], "typed_through")
            assert not hesitant(server).go_on.is_set()  # all of that came before the line was at its end
            hesitant(server).go_on.set()
            assert await asyncio.to_thread(server.settled)
            await wire.type(SURE[4], len(text), 5)
            event = await wire.complete(len(text) + 1, 5, "v5")
            assert (event["text"], event["receipt"]["source"]) == (SURE[5:], "typed_through")
            assert not event["receipt"].get("computed_tokens")

    asyncio.run(run())
    assert server.settled()


def test_for_what_the_editors_list_has_selected_the_line_is_said_to_its_end(server: RunningServer) -> None:
    async def run() -> None:
        async with wired(server) as wire:
            await wire.open("V")
            chosen = {"start": 0, "end": 1, "text": "value = "}
            event = await wire.complete(1, 0, "list", selected=chosen)
            assert event["text"] == f"value = {SURE}"
            hesitant(server).go_on.set()
            assert await asyncio.to_thread(server.settled)
            await wire.send(
                kind="buffer.change", buffer="a.py", base=0, version=1, edits=[chosen], cursor=len("value = ")
            )
            event = await wire.complete(len("value = "), 1, "taken")
            assert (event["text"], event["receipt"]["source"]) == (SURE, "cached")
            assert not event["receipt"].get("computed_tokens")

    asyncio.run(run())


def test_what_contradicts_it_stops_the_rest(server: RunningServer) -> None:
    async def run() -> None:
        async with wired(server) as wire:
            text = "value = "
            await wire.open(text)
            assert (await wire.complete(len(text), 0, "first"))["text"] == SURE
            await wire.type("x", len(text), 1)
            hesitant(server).go_on.set()
            assert (await wire.complete(len(text) + 1, 1, "second"))["type"] == "not_shown"

    asyncio.run(run())
    assert server.settled()
