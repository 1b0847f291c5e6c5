"""What becomes of suggestions, seen over a real socket: taken, typed, turned down; off by default."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import pytest
from gateway_support import RunningServer, serving
from test_live import Wire, after, spm_model, wired

from keystroke.assist.completion import (
    Extent,
    LiveCompletion,
    ShownCompletion,
    WithheldCompletion,
    WithheldReason,
)
from keystroke.config import AssistSettings, LearnSettings, ServerSettings
from keystroke.gateway.live.mirror import BufferMirror
from keystroke.gateway.live.outcomes import BufferOutcomes
from keystroke.gateway.record.outcome_store import OutcomeStore, SuggestionOutcome
from keystroke.protocol import live_messages as live
from keystroke.text import Edit

TEXT = "def add(a, b):\n    return a"
ON = LearnSettings(enabled=True)
Scene = Callable[[Wire], Awaitable[None]]


def played(folder: Path, scene: Scene, learn: LearnSettings = ON) -> list[SuggestionOutcome]:
    """What is kept after a scene in one buffer."""

    async def run(running: RunningServer) -> None:
        async with wired(running) as wire:
            await wire.open(TEXT, root="/home/me/secret-project")
            await scene(wire)
            await wire.send(kind="buffer.close", buffer="a.py")
            await wire.open("x", buffer="b.py")  # all before it has been seen

    with serving(spm_model(after({"return a": " + b\n"})), folder=folder, learn=learn) as running:
        asyncio.run(run(running))
    file = folder / "learned.db"
    if not file.exists():
        return []
    with closing(OutcomeStore(file)) as learned:
        return learned.outcomes()


async def take(wire: Wire) -> None:
    event = await wire.complete(len(TEXT), 0)
    await wire.type(event["text"], len(TEXT), 1)
    await wire.send(kind="feedback", id="1", buffer="a.py", outcome="accepted")


def test_what_is_taken_is_kept_with_the_code_around_it(tmp_path: Path) -> None:
    [row] = played(tmp_path, take)
    assert (row.became, row.shown, row.taken, row.worth) == ("accepted", 4, 4, 1.0)
    assert (row.prefix, row.suggestion, row.written, row.suffix) == (TEXT, " + b", " + b", "")
    assert (row.language, row.path) == ("python", "a.py")
    assert row.confidence > 0.9
    assert row.at <= time.time()
    assert "secret-project" not in row.project


def test_off_by_default_nothing_is_kept(tmp_path: Path) -> None:
    assert played(tmp_path, take, LearnSettings()) == []
    assert not list(tmp_path.glob("learned*"))


def test_what_is_typed_by_hand_was_right_and_saved_nothing(tmp_path: Path) -> None:
    async def scene(wire: Wire) -> None:
        await wire.complete(len(TEXT), 0)
        for number, sign in enumerate(" + b"):
            await wire.type(sign, len(TEXT) + number, number + 1)
            await wire.complete(len(TEXT) + number + 1, number + 1, f"more {number}")

    [row] = played(tmp_path, scene)
    assert (row.became, row.taken, row.worth, row.written) == ("typed", 0, 1.0, " + b")


def test_what_is_typed_instead_is_what_should_have_been_said(tmp_path: Path) -> None:
    async def scene(wire: Wire) -> None:
        await wire.complete(len(TEXT), 0)
        for number, sign in enumerate(" - b"):
            await wire.type(sign, len(TEXT) + number, number + 1)

    [row] = played(tmp_path, scene)
    assert (row.became, row.worth, row.suggestion, row.written) == ("rejected", 0.0, " + b", " - b")


def test_what_is_taken_and_then_rewritten_was_half_right(tmp_path: Path) -> None:
    async def scene(wire: Wire) -> None:
        await take(wire)
        at = len(TEXT) + 3
        await wire.send(
            kind="buffer.change",
            buffer="a.py",
            base=1,
            version=2,
            edits=[{"start": at, "end": at + 1, "text": "c * 2"}],
        )

    [row] = played(tmp_path, scene)
    assert (row.became, row.written) == ("accepted", " + c * 2")
    assert row.worth == pytest.approx(0.75)


def test_what_is_dismissed_or_taken_in_part_is_told_by_the_editor(tmp_path: Path) -> None:
    async def dismissed(wire: Wire) -> None:
        await wire.complete(len(TEXT), 0)
        await wire.send(kind="feedback", id="1", buffer="a.py", outcome="shown")
        await wire.send(kind="feedback", id="1", buffer="a.py", outcome="dismissed")
        await wire.send(kind="feedback", id="nobody", buffer="a.py", outcome="accepted")

    [row] = played(tmp_path / "a", dismissed)
    assert (row.became, row.worth) == ("dismissed", 0.0)

    async def part(wire: Wire) -> None:
        await wire.complete(len(TEXT), 0)
        await wire.type(" +", len(TEXT), 1)
        await wire.send(kind="feedback", id="1", buffer="a.py", outcome="partial", length=2)

    [row] = played(tmp_path / "b", part)
    assert (row.became, row.taken, row.worth) == ("partial", 2, 0.5)


def test_a_server_for_others_keeps_nothing(tmp_path: Path) -> None:
    from keystroke.config import PathSettings, Settings
    from keystroke.gateway.app import Gateway
    from keystroke.gateway.work.registry import ModelRegistry, local_entry

    entry = local_entry("m", spm_model())
    for host, keeps in (("127.0.0.1", True), ("0.0.0.0", False)):
        settings = Settings(
            learn=ON, server=ServerSettings(host=host), paths=PathSettings(state=tmp_path / host)
        )
        gateway = Gateway(ModelRegistry([entry]), settings)
        assert (gateway.outcome_store is not None) is keeps
        if gateway.outcome_store is not None:
            gateway.outcome_store.close()


def test_a_file_that_cannot_be_opened_costs_no_suggestion(tmp_path: Path) -> None:
    (tmp_path / "learned.db").mkdir(parents=True)

    async def run(server: RunningServer) -> None:
        async with wired(server) as wire:
            await wire.open(TEXT)
            assert (await wire.complete(len(TEXT), 0))["text"] == " + b"

    with serving(spm_model(after({"return a": " + b\n"})), folder=tmp_path, learn=ON) as server:
        asyncio.run(run(server))


def mirror(path: str | None) -> BufferMirror:
    return BufferMirror("a.go", "", 0, language="go", path=path, root="/w")


class TestWatching:
    """The watcher alone, for what a scripted model does not bring about."""

    def watched(self, folder: Path, scene: Callable[[BufferOutcomes], None]) -> list[SuggestionOutcome]:
        async def run() -> None:
            completion = LiveCompletion(None, AssistSettings(), language="go")
            outcomes = BufferOutcomes(learned, completion, mirror("a.go"), model="m")
            scene(outcomes)
            outcomes.close()

        with closing(OutcomeStore(folder / "learned.db")) as learned:
            asyncio.run(run())
        with closing(OutcomeStore(folder / "learned.db")) as learned:
            return learned.outcomes()

    @pytest.mark.parametrize(("typed", "became"), [("foo(x)", "unseen_right"), ("bar", "unseen_wrong")])
    def test_what_was_held_back_and_then_typed_would_have_been_right(
        self, tmp_path: Path, typed: str, became: str
    ) -> None:
        def scene(outcomes: BufferOutcomes) -> None:
            outcomes.record_answer(
                "1", "y = ", 4, WithheldCompletion(WithheldReason.LOW_CONFIDENCE, "foo(x)", 0.7)
            )
            text = "y = "
            for sign in typed:
                text += sign
                outcomes.apply_edits([Edit(len(text) - 1, len(text) - 1, sign)], text)

        [row] = self.watched(tmp_path, scene)
        assert (row.became, row.confidence, row.shown, row.prefix) == (became, 0.7, 0, "")

    def test_brackets_that_the_editor_closes_are_no_contradiction(self, tmp_path: Path) -> None:
        def scene(outcomes: BufferOutcomes) -> None:
            outcomes.record_answer("1", "y = ", 4, ShownCompletion("f(x)", Extent.REST, 0.9))
            outcomes.apply_edits([Edit(4, 4, "f")], "y = f")
            outcomes.apply_edits([Edit(5, 5, "()")], "y = f()")
            outcomes.apply_edits([Edit(6, 6, "x")], "y = f(x)")

        assert self.watched(tmp_path, scene)[0].became == "typed"

    def test_changes_elsewhere_move_it_and_a_change_under_it_ends_it(self, tmp_path: Path) -> None:
        def scene(outcomes: BufferOutcomes) -> None:
            outcomes.record_answer("1", "a\ny = \nb", 6, ShownCompletion("1", Extent.REST, 0.9))
            outcomes.apply_edits([Edit(0, 0, "##")], "##a\ny = \nb")
            outcomes.apply_edits([Edit(9, 10, "cc")], "##a\ny = \ncc")
            outcomes.apply_edits([Edit(8, 8, "2")], "##a\ny = 2\ncc")
            outcomes.record_answer("2", "##a\ny = 2\ncc", 12, ShownCompletion("d", Extent.REST, 0.9))
            outcomes.apply_edits([Edit(12, 12, "d")], "##a\ny = 2\nccd")
            outcomes.apply_edits([Edit(0, 13, "")], "")

        rows = self.watched(tmp_path, scene)
        assert sorted((row.became, row.written) for row in rows) == [("rejected", ""), ("typed", "")]

    def test_never_more_than_a_few_are_watched(self, tmp_path: Path) -> None:
        def scene(outcomes: BufferOutcomes) -> None:
            text = "x"
            for number in range(200):
                outcomes.record_answer(
                    str(number), text, len(text), ShownCompletion("a" * (number + 2), Extent.REST, 0.9)
                )
                text += "b"
                outcomes.apply_edits([Edit(len(text) - 1, len(text) - 1, "b")], text)
            assert len(outcomes._watched) <= 32
            assert len(outcomes._ids) <= 128

        assert len(self.watched(tmp_path, scene)) == 200

    def test_next_edits_are_counted_without_their_text(self, tmp_path: Path) -> None:
        def scene(outcomes: BufferOutcomes) -> None:
            change = live.NextEditChange(buffer="a", start=0, end=1, text="four")
            for name in "12":
                outcomes.record_next_edit(
                    live.NextEdit(id=name, buffer="a", version=1, cause="rename", title="t", change=change)
                )
            outcomes.record_feedback(live.Feedback(id="1", buffer="a", outcome="accepted"))
            outcomes.record_feedback(live.Feedback(id="2", buffer="a", outcome="dismissed"))
            outcomes.record_feedback(live.Feedback(id="2", buffer="a", outcome="accepted"))

        rows = self.watched(tmp_path, scene)
        assert [(r.kind, r.became, r.taken, r.extent, r.prefix) for r in rows] == [
            ("next_edit", "dismissed", 0, "rename", ""),
            ("next_edit", "accepted", 4, "rename", ""),
        ]

    def test_what_was_learned_shifts_the_threshold_of_the_buffer(self, tmp_path: Path) -> None:
        async def run() -> float:
            completion = LiveCompletion(None, AssistSettings(), language="go")
            outcomes = BufferOutcomes(learned, completion, mirror(None), model="m")
            text = "x"
            for number in range(80):
                outcomes.record_answer(
                    str(number), text, len(text), ShownCompletion(f"a{number}", Extent.REST, 0.85)
                )
                text += "b"
                outcomes.apply_edits([Edit(len(text) - 1, len(text) - 1, "b")], text)
            assert completion.shift == 0.0
            outcomes.tune()
            async with asyncio.timeout(60):
                while completion.shift == 0.0:
                    await asyncio.sleep(0.01)
                    outcomes.tune()
            outcomes.close()
            return completion.shift

        with closing(OutcomeStore(tmp_path / "learned.db")) as learned:
            assert 0.0 < asyncio.run(run()) < 1.0
