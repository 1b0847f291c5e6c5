"""The live channel over a real socket: mirrored buffers, suggestions, and clients that break every rule."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gateway_support import FIM, RunningServer, scripted_model, serving
from websockets.asyncio.client import ClientConnection, connect

from keystroke.assist.completion.window import half_word
from keystroke.config import ServerSettings
from keystroke.engine.echo import END_OF_TURN, EOS
from keystroke.engine.model import Model
from keystroke.engine.templates import FimTemplate

SPM = FimTemplate(
    "<fim_prefix>", "<fim_suffix>", "<fim_middle>", order="spm", stops=frozenset({EOS, END_OF_TURN})
)


def spm_model(script: Callable[[str], str] | None = None, **costs: Any) -> Model:
    assert set(FIM) == {SPM.prefix, SPM.suffix, SPM.middle}
    return replace(scripted_model(script, **costs), fim=SPM)


def after(mapping: dict[str, str]) -> Callable[[str], str]:
    """Answers by the last characters before the cursor. A half word there is not in the prompt: the model
    says it again."""
    halves = {end: half_word(end) for end in mapping}
    said = {end[: len(end) - len(halves[end])]: halves[end] + answer for end, answer in mapping.items()}

    def script(prompt: str) -> str:
        return next((answer for end, answer in said.items() if prompt.endswith(end)), "")

    return script


class Wire:
    """A raw client: sends what it is told, keeps what it hears."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.heard: list[dict[str, Any]] = []

    async def send(self, **event: Any) -> None:
        event["type"] = event.pop("kind")
        await self.socket.send(json.dumps(event))

    async def until(self, kind: str, **fields: Any) -> dict[str, Any]:
        """The next event of this kind (with these fields); others are kept."""
        while True:
            event: dict[str, Any] = json.loads(await asyncio.wait_for(self.socket.recv(), 60))
            self.heard.append(event)
            if event["type"] == kind and all(event.get(k) == v for k, v in fields.items()):
                return event

    async def open(self, text: str, buffer: str = "a.py", **more: Any) -> dict[str, Any]:
        await self.send(kind="buffer.open", buffer=buffer, text=text, path=buffer, **more)
        return await self.until("ready", buffer=buffer)

    async def type(self, text: str, at: int, version: int, buffer: str = "a.py") -> None:
        await self.send(
            kind="buffer.change",
            buffer=buffer,
            base=version - 1,
            version=version,
            edits=[{"start": at, "end": at, "text": text}],
        )

    async def complete(self, cursor: int, version: int, name: str = "1", **more: Any) -> dict[str, Any]:
        await self.send(kind="complete", id=name, buffer="a.py", version=version, cursor=cursor, **more)
        while True:
            event: dict[str, Any] = json.loads(await asyncio.wait_for(self.socket.recv(), 60))
            self.heard.append(event)
            if event.get("id") == name and event.get("done", True):
                return event


@asynccontextmanager
async def wired(server: RunningServer) -> AsyncIterator[Wire]:
    async with connect(f"ws://127.0.0.1:{server.port}/v1/live", max_size=None) as socket:
        yield Wire(socket)


def test_a_suggestion_continues_the_line() -> None:
    async def run(server: RunningServer) -> None:
        async with wired(server) as wire:
            text = "def add(a, b):\n    return a"
            await wire.open(text)
            event = await wire.complete(len(text), 0)
            assert (event["type"], event["text"], event["start"]) == ("suggestion", " + b", len(text))
            assert event["receipt"]["reused_tokens"] > 0
            assert event["confidence"] > 0.9

    with serving(spm_model(after({"return a": " + b\n"}))) as server:
        asyncio.run(run(server))
        assert server.settled()


def test_typing_through_a_suggestion_computes_nothing() -> None:
    async def run(server: RunningServer) -> None:
        async with wired(server) as wire:
            text = "value = "
            await wire.open(text)
            first = await wire.complete(len(text), 0, "first")
            assert first["text"] == "compute()"
            await asyncio.sleep(0.2)  # the line after it is prepared
            steps = server.engines["echo"].steps
            for version, sign in enumerate("comp", 1):
                await wire.type(sign, len(text), version)
                text += sign
                event = await wire.complete(len(text), version, f"v{version}")
                assert (event["text"], event["receipt"]["source"]) == (
                    "compute()"[version:],
                    "typed_through",
                )
            assert server.settled()
            assert server.engines["echo"].steps == steps

    with serving(spm_model(after({"value = ": "compute()\n"}))) as server:
        asyncio.run(run(server))


def test_a_key_only_computes_what_it_added() -> None:
    async def run(server: RunningServer) -> None:
        async with wired(server) as wire:
            above = "".join(f"line_{n} = {n}\n" for n in range(30))
            below = "\n" + "".join(f"below_{n} = {n}\n" for n in range(20))
            text, cursor = above + below, len(above)
            await wire.open(text)
            await wire.complete(cursor, 0, "warm", invoked=True)
            for version, sign in enumerate("value", 1):
                await wire.type(sign, cursor, version)
                cursor += 1
                event = await wire.complete(cursor, version, f"v{version}")
                paid = event["receipt"]
                if paid["prompt_tokens"]:
                    assert paid["computed_tokens"] <= 4
                    assert paid["reused_tokens"] > 0.95 * paid["prompt_tokens"]

    with serving(spm_model()) as server:
        asyncio.run(run(server))


def test_a_running_stream_is_kept_while_typing_agrees_with_it() -> None:
    async def run(server: RunningServer) -> None:
        async with wired(server) as wire:
            text = "result = "
            await wire.open(text)
            await wire.send(kind="complete", id="first", buffer="a.py", version=0, cursor=len(text))
            await asyncio.sleep(0.1)
            await wire.type("m", len(text), 1)
            event = await wire.complete(len(text) + 1, 1, "second")
            assert event["text"] == "easure(everything)"
            assert {"not_shown", "suggestion"} >= {
                e["type"] for e in wire.heard if e.get("id") in ("first", "second")
            }
            assert server.engines["echo"].steps < 2 * len("measure(everything)\n")

    with serving(spm_model(after({"result = ": "measure(everything)\n"}), step_cost=0.02)) as server:
        asyncio.run(run(server))


def test_every_request_ends_in_exactly_one_answer() -> None:
    async def run(server: RunningServer) -> None:
        async with wired(server) as wire:
            text = "x = "
            await wire.open(text)
            for number in range(20):
                await wire.send(
                    kind="complete", id=f"r{number}", buffer="a.py", version=0, cursor=len(text) - number % 3
                )
            await wire.send(kind="cancel", id="r19")
            await wire.send(kind="cancel", id="never")
            await wire.complete(len(text), 0, "last")
            ends = [e["id"] for e in wire.heard if e.get("id") and e.get("done", True)]
            assert sorted(ends) == sorted([f"r{n}" for n in range(20)] + ["last"])

    with serving(spm_model(step_cost=0.002)) as server:
        asyncio.run(run(server))
        assert server.settled()


@pytest.mark.parametrize(
    ("text", "answer", "reason"),
    [
        ("def f():\n    x = 1\n    ", "return x\n", "would_indent"),
        ("value = ", "\n", "empty"),
        ("value = (", "1))) + ((\n", "breaks_syntax"),
        ("\n\n", "x\n", "nothing_written"),
    ],
)
def test_what_is_not_shown_has_a_named_reason(text: str, answer: str, reason: str) -> None:
    async def run(server: RunningServer) -> None:
        async with wired(server) as wire:
            await wire.open(text)
            event = await wire.complete(len(text), 0)
            assert (event["type"], event["reason"]) == ("not_shown", reason)

    with serving(spm_model(lambda _prompt: answer)) as server:
        asyncio.run(run(server))


def test_what_waits_behind_indentation_is_ready_after_one_character() -> None:
    async def run(server: RunningServer) -> None:
        async with wired(server) as wire:
            text = "def f():\n    x = 1\n    "
            await wire.open(text)
            assert (await wire.complete(len(text), 0))["reason"] == "would_indent"
            await wire.type("r", len(text), 1)
            event = await wire.complete(len(text) + 1, 1, "2")
            assert (event["text"], event["receipt"]["source"]) == ("eturn x", "typed_through")

    with serving(spm_model(after({"\n    ": "return x\n"}))) as server:
        asyncio.run(run(server))


def test_a_cursor_inside_a_word_gets_nothing_unless_asked_by_hand() -> None:
    async def run(server: RunningServer) -> None:
        async with wired(server) as wire:
            await wire.open("name = other\n")
            assert (await wire.complete(9, 0, "a"))["reason"] == "mid_word"
            assert (await wire.complete(9, 0, "b", invoked=True)).get("reason") != "mid_word"

    with serving(spm_model()) as server:
        asyncio.run(run(server))


def test_a_dismissed_suggestion_is_not_offered_again() -> None:
    async def run(server: RunningServer) -> None:
        async with wired(server) as wire:
            text = "value = "
            await wire.open(text)
            assert (await wire.complete(len(text), 0, "a"))["text"] == "one"
            await wire.send(kind="feedback", id="a", buffer="a.py", outcome="dismissed")
            assert (await wire.complete(len(text), 0, "b"))["reason"] == "dismissed_before"
            assert (await wire.complete(len(text), 0, "c", invoked=True))["text"] == "one"

    with serving(spm_model(after({"value = ": "one\n"}))) as server:
        asyncio.run(run(server))


def test_the_next_line_is_prepared_as_if_the_suggestion_were_accepted() -> None:
    async def run(server: RunningServer) -> None:
        async with wired(server) as wire:
            text = "first = "
            await wire.open(text)
            assert (await wire.complete(len(text), 0, "a"))["text"] == "one"
            await asyncio.sleep(0.3)
            await wire.type("one\ns", len(text), 1)
            event = await wire.complete(len(text) + 5, 1, "b")
            assert (event["text"], event["receipt"]["source"]) == ("econd = two", "typed_through")

    with serving(spm_model(after({"first = ": "one\n", "one\n": "second = two\n"}))) as server:
        asyncio.run(run(server))


def test_findings_come_without_asking_and_follow_the_text() -> None:
    async def run(server: RunningServer) -> None:
        async with wired(server) as wire:
            bad = "import subprocess, sys\nsubprocess.run(sys.argv[1], shell=True)\n"
            await wire.open(bad)
            seen = next((e for e in wire.heard if e["type"] == "diagnostics"), None)
            seen = seen or await wire.until("diagnostics", version=0)
            assert [f["cwe"] for f in seen["findings"]] == [78]
            start = bad.index("shell=True")
            await wire.send(
                kind="buffer.change",
                buffer="a.py",
                base=0,
                version=1,
                edits=[{"start": start, "end": start + len("shell=True"), "text": "shell=False"}],
            )
            assert (await wire.until("diagnostics", version=1))["findings"] == []

    with serving(spm_model()) as server:
        asyncio.run(run(server))


class TestPlaces:
    """Where the user is, and what the editor's own list has selected."""

    TEXT = "".join(f"line_{n} = {n}\n" for n in range(40))

    def test_the_first_key_finds_the_context_warm_where_the_cursor_is(self) -> None:
        cursor = self.TEXT.index("line_20 =")

        async def run(server: RunningServer) -> None:
            async with wired(server) as wire:
                await wire.open(self.TEXT, cursor=cursor)
                event = await wire.complete(cursor, 0, invoked=True)
                assert event["receipt"]["computed_tokens"] <= 2

        with serving(spm_model()) as server:
            asyncio.run(run(server))

    def test_a_cursor_that_went_elsewhere_is_followed(self) -> None:
        cursor = self.TEXT.index("line_20 =")

        async def run(server: RunningServer) -> None:
            async with wired(server) as wire:
                await wire.open(self.TEXT, cursor=0)
                engine = server.engines["echo"]
                before = engine.prefilled
                await wire.send(kind="buffer.cursor", buffer="a.py", version=0, cursor=cursor)
                async with asyncio.timeout(60):
                    while engine.prefilled == before or not server.settled():  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                event = await wire.complete(cursor, 0, invoked=True)
                assert event["receipt"]["computed_tokens"] <= 2

        with serving(spm_model()) as server:
            asyncio.run(run(server))

    @pytest.mark.parametrize(("cursor", "version"), [(10_000, 0), (5, 7)])
    def test_a_cursor_that_cannot_be_is_ignored(self, cursor: int, version: int) -> None:
        async def run(server: RunningServer) -> None:
            async with wired(server) as wire:
                await wire.open("value = ", cursor=cursor)
                await wire.send(kind="buffer.cursor", buffer="a.py", version=version, cursor=cursor)
                assert (await wire.complete(8, 0))["text"] == "one"
                assert not [e for e in wire.heard if e["type"] in ("error", "resync")]

        with serving(spm_model(after({"value = ": "one\n"}))) as server:
            asyncio.run(run(server))

    def test_a_suggestion_goes_on_from_what_the_editors_list_has_selected(self) -> None:
        async def run(server: RunningServer) -> None:
            async with wired(server) as wire:
                await wire.open("return a")
                plain = await wire.complete(8, 0, "plain")
                assert (plain["text"], plain["start"]) == (" + b", 8)
                picked = {"start": 7, "end": 8, "text": "add2"}
                event = await wire.complete(8, 0, "list", selected=picked)
                assert (event["start"], event["end"], event["text"]) == (7, 8, "add2(a, b)")

        with serving(spm_model(after({"return a": " + b\n", "return add2": "(a, b)\n"}))) as server:
            asyncio.run(run(server))

    def test_a_selection_outside_the_text_is_refused_and_nothing_hangs(self) -> None:
        async def run(server: RunningServer) -> None:
            async with wired(server) as wire:
                await wire.open("return a")
                bad = await wire.complete(8, 0, "bad", selected={"start": 7, "end": 99, "text": "add"})
                assert (bad["type"], bad["status"]) == ("error", 400)
                assert (await wire.complete(8, 0, "good"))["text"] == " + b"

        with serving(spm_model(after({"return a": " + b\n"}))) as server:
            asyncio.run(run(server))


class TestBadInput:
    def test_a_version_gap_asks_for_the_whole_text(self) -> None:
        async def run(server: RunningServer) -> None:
            async with wired(server) as wire:
                await wire.open("x = 1\n")
                await wire.type("y", 0, 5)
                event = await wire.until("resync")
                assert (event["reason"], event["have"]) == ("version_gap", 0)
                await wire.send(kind="buffer.open", buffer="a.py", text="y = 2", version=5, path="a.py")
                assert (await wire.until("ready"))["version"] == 5

        with serving(spm_model()) as server:
            asyncio.run(run(server))

    @pytest.mark.parametrize(
        "edits",
        [
            [{"start": 900, "end": 901, "text": "x"}],
            [{"start": 3, "end": 1, "text": "x"}],
            [{"start": 0, "end": 1, "text": ""}, {"start": 6, "end": 6, "text": "far"}],
        ],
    )
    def test_a_bad_edit_changes_nothing_and_asks_for_the_whole_text(self, edits: list[Any]) -> None:
        async def run(server: RunningServer) -> None:
            async with wired(server) as wire:
                await wire.open("x = 1\n")
                await wire.send(kind="buffer.change", buffer="a.py", base=0, version=1, edits=edits)
                assert (await wire.until("error"))["error"]["code"] == "invalid_input"
                assert (await wire.until("resync"))["have"] == 0
                assert (await wire.complete(5, 0, invoked=True))["version"] == 0

        with serving(spm_model()) as server:
            asyncio.run(run(server))

    def test_an_unknown_buffer_asks_for_its_text(self) -> None:
        async def run(server: RunningServer) -> None:
            async with wired(server) as wire:
                await wire.send(kind="complete", id="1", buffer="a.py", version=0, cursor=0)
                assert (await wire.until("resync"))["reason"] == "unknown_buffer"
                assert (await wire.until("not_shown"))["reason"] == "stale_version"

        with serving(spm_model()) as server:
            asyncio.run(run(server))

    def test_an_older_version_and_a_cursor_outside_are_refused(self) -> None:
        async def run(server: RunningServer) -> None:
            async with wired(server) as wire:
                await wire.open("x = 1")
                await wire.type("2", 5, 1)
                assert (await wire.complete(5, 0, "old"))["reason"] == "stale_version"
                outside = await wire.complete(99, 1, "outside")
                assert (outside["type"], outside["status"]) == ("error", 400)
                assert "99" in outside["error"]["message"]

        with serving(spm_model()) as server:
            asyncio.run(run(server))

    @pytest.mark.parametrize(
        "frame",
        [
            "{",
            "[]",
            "null",
            '"x"',
            '{"type":"nonsense"}',
            '{"buffer":"a"}',
            '{"type":"buffer.open"}',
            '{"type":"complete","id":"","buffer":"a","version":0,"cursor":0}',
            '{"type":"buffer.change","buffer":"a","base":-1,"version":0,"edits":[]}',
            '{"type":"complete","id":"1","buffer":"a","version":0,"cursor":1e99}',
            "[" * 5000,
            '{"type":"buffer.open","buffer":"a","text":"\\ud800"}',
            b"\xff\xfe binary",
        ],
    )
    def test_a_hostile_frame_costs_an_error_and_not_the_connection(self, frame: str | bytes) -> None:
        async def run(server: RunningServer) -> None:
            async with wired(server) as wire:
                await wire.socket.send(frame)
                event = await wire.until("error")
                assert event["status"] == 400
                assert event["error"]["message"].endswith(".")
                await wire.open("x = 1")

        with serving(spm_model()) as server:
            asyncio.run(run(server))

    def test_more_buffers_than_a_connection_may_have_are_refused(self) -> None:
        async def run(server: RunningServer) -> None:
            async with wired(server) as wire:
                for number in range(257):
                    await wire.send(kind="buffer.open", buffer=f"b{number}.txt", text="x")
                event = await wire.until("error")
                assert event["buffer"] == "b256.txt"
                # The others are open, warmed or not: more than the queue holds may have come at once.
                ready = {e["buffer"] for e in wire.heard if e["type"] == "ready"}
                while len(ready) < 256:
                    ready.add((await wire.until("ready"))["buffer"])
                assert ready == {f"b{number}.txt" for number in range(256)}
                await wire.send(kind="buffer.close", buffer="b0.txt")
                await wire.open("x = 1", "b256.txt")
                assert sum(e["type"] == "error" for e in wire.heard) == 1

        with serving(spm_model()) as server:
            asyncio.run(run(server))
            assert server.settled()

    def test_a_buffer_that_a_busy_server_cannot_warm_is_open_all_the_same(self) -> None:
        async def run(server: RunningServer) -> None:
            async with wired(server) as wire:
                for number in range(8):
                    text = f"{number} = " if number else "x" * 500  # which keeps the engine for half a second
                    await wire.send(kind="buffer.open", buffer=f"b{number}.txt", text=text)
                opened = [await wire.until("ready") for _ in range(8)]
                assert {e["buffer"] for e in opened} == {f"b{number}.txt" for number in range(8)}
                notes = {e["buffer"]: e["note"] for e in opened if not e["warm"]}
                assert set(notes.values()) == {"queue_full"}
                assert not [e for e in wire.heard if e["type"] == "error"]
                cold = max(notes)
                await wire.send(kind="complete", id="1", buffer=cold, version=0, cursor=4, invoked=True)
                assert (await wire.until("suggestion"))["text"] == "1"

        model = spm_model(lambda prompt: "1", prefill_cost=0.001)
        with serving(model, server=ServerSettings(max_queue=1), concurrent=1) as server:
            asyncio.run(run(server))

    def test_binary_text_is_mirrored_but_not_audited(self) -> None:
        async def run(server: RunningServer) -> None:
            async with wired(server) as wire:
                await wire.open("x = '\0\0'\n")
                event = await wire.complete(3, 0, invoked=True)
                assert event["type"] in ("suggestion", "not_shown")
                assert not [e for e in wire.heard if e["type"] == "diagnostics"]

        with serving(spm_model()) as server:
            asyncio.run(run(server))

    def test_a_file_that_may_hold_secrets_never_enters_a_prompt(self) -> None:
        async def run(server: RunningServer) -> None:
            async with wired(server) as wire:
                ready = await wire.open("TOKEN=abc\n", ".env")
                assert (ready["warm"], ready["note"]) == (False, "excluded_file")
                await wire.type("x", 0, 1, ".env")
                await wire.send(kind="complete", id="1", buffer=".env", version=1, cursor=1)
                assert (await wire.until("not_shown"))["reason"] == "excluded_file"

        with serving(spm_model()) as server:
            asyncio.run(run(server))
            assert server.engines["echo"].prefilled == server.engines["echo"].steps == 0

    def test_imports_are_read_inside_the_workspace_and_nowhere_else(self, tmp_path: Path) -> None:
        prompts: list[str] = []

        def script(prompt: str) -> str:
            prompts.append(prompt)
            return ""

        root, outside = tmp_path / "work", tmp_path / "outside.py"
        root.mkdir()
        outside.write_text("def secret():\n    return 'stolen'\n")
        (root / "link.py").symlink_to(outside)
        (root / "near.py").write_text("def near():\n    return 'kept'\n")
        (root / "huge.py").write_text("def huge():\n    return 'big'\n" + "#" * 300_000)
        (root / "noise.py").write_bytes(b"def noise():\n    return '\xff\xfe'\n")
        text = (
            "from link import secret\nfrom ..outside import secret\nfrom huge import huge\n"
            "from noise import noise\nfrom near import near\nx = "
        )

        async def run(server: RunningServer) -> None:
            async with wired(server) as wire:
                opened = {"path": str(root / "a.py"), "root": str(root), "language": "python"}
                await wire.send(kind="buffer.open", buffer="a.py", text=text, **opened)
                await wire.until("ready")
                await wire.complete(len(text), 0, invoked=True)

        fim = replace(SPM, file_sep="<bos>")
        with serving(replace(spm_model(script), fim=fim)) as server:
            asyncio.run(run(server))
        assert any("return 'kept'" in prompt for prompt in prompts)
        assert not [p for p in prompts if "stolen" in p or "'big'" in p or "def noise" in p]

    def test_asking_about_an_older_text_is_refused(self) -> None:
        async def run(server: RunningServer) -> None:
            async with wired(server) as wire:
                await wire.open("x = 1\n")
                await wire.type("y", 0, 1)
                await wire.send(kind="next_edit.ask", id="n", buffer="a.py", version=0, cursor=0)
                assert (await wire.until("next_edit.dropped", id="n"))["reason"] == "stale_version"

        with serving(spm_model()) as server:
            asyncio.run(run(server))

    def test_a_client_that_vanishes_leaves_nothing_running(self) -> None:
        async def run(server: RunningServer) -> None:
            async with wired(server) as wire:
                await wire.open("x = ")
                await wire.send(kind="complete", id="1", buffer="a.py", version=0, cursor=4)
                await asyncio.sleep(0.05)
                wire.socket.transport.abort()

        with serving(spm_model(lambda _p: "long " * 100, step_cost=0.01)) as server:
            asyncio.run(run(server))
            assert server.settled()


class TestNextEdit:
    def test_a_rename_offers_its_other_places_one_by_one(self) -> None:
        async def run(server: RunningServer) -> None:
            async with wired(server) as wire:
                await wire.open("def load():\n    pass\n\nload()\nload()\n")
                await wire.send(
                    kind="buffer.change",
                    buffer="a.py",
                    base=0,
                    version=1,
                    edits=[{"start": 4, "end": 8, "text": "fetch"}],
                )
                first = await wire.until("next_edit")
                assert (first["cause"], first["version"], len(first["others"])) == ("rename", 1, 1)
                assert first["change"] == {"buffer": "a.py", "start": 23, "end": 27, "text": "fetch"}
                version = 1
                for event in (first, await self.take(wire, first["change"], 2)):
                    assert event["id"] == first["id"]
                    version += 1
                await wire.send(
                    kind="buffer.change",
                    buffer="a.py",
                    base=2,
                    version=3,
                    edits=[{"start": 31, "end": 35, "text": "fetch"}],
                )
                assert (await wire.until("next_edit.dropped"))["reason"] == "fulfilled"

        with serving(spm_model()) as server:
            asyncio.run(run(server))

    def test_what_is_left_of_it_stands_while_one_looks_at_the_place_taken(self) -> None:
        async def run(server: RunningServer) -> None:
            async with wired(server) as wire:
                await wire.open("def load():\n    pass\n\nload()\nload()\n")
                edits = [{"start": 4, "end": 8, "text": "fetch"}]
                await wire.send(kind="buffer.change", buffer="a.py", base=0, version=1, edits=edits)
                first = await wire.until("next_edit")
                second = await self.take(wire, first["change"], 2)
                await wire.send(kind="next_edit.ask", id="n", buffer="a.py", version=2, cursor=28)
                asked = await wire.until("next_edit", answers=["n"])
                assert (asked["id"], asked["change"]) == (first["id"], second["change"])
                assert not [e for e in wire.heard if e["type"] == "next_edit.dropped"]

        with serving(spm_model()) as server:
            asyncio.run(run(server))

    async def take(self, wire: Wire, change: dict[str, Any], version: int) -> dict[str, Any]:
        edit = {key: change[key] for key in ("start", "end", "text")}
        await wire.send(kind="buffer.change", buffer="a.py", base=version - 1, version=version, edits=[edit])
        return await wire.until("next_edit", version=version)

    def test_it_follows_into_other_open_buffers(self) -> None:
        async def run(server: RunningServer) -> None:
            async with wired(server) as wire:
                await wire.open("from a import load\nload(1)\n", "b.py")
                await wire.open("def load(x):\n    return x\n")
                edit = {"start": 4, "end": 8, "text": "fetch"}
                await wire.send(kind="buffer.change", buffer="a.py", base=0, version=1, edits=[edit])
                event = await wire.until("next_edit")
                assert [event["change"]["buffer"], *(c["buffer"] for c in event["others"])] == [
                    "b.py",
                    "b.py",
                ]

        with serving(spm_model()) as server:
            asyncio.run(run(server))

    def test_whoever_asks_in_mid_word_hears_of_the_whole_word(self) -> None:
        async def run(server: RunningServer) -> None:
            async with wired(server) as wire:
                await wire.open("def load():\n    pass\n\nload()\n")
                change = {"kind": "buffer.change", "buffer": "a.py"}
                edits = [{"start": 4, "end": 8, "text": "fetc"}]
                await wire.send(**change, base=0, version=1, edits=edits)
                assert (await wire.until("next_edit"))["change"]["text"] == "fetc"
                await wire.send(**change, base=1, version=2, edits=[{"start": 8, "end": 8, "text": "h"}])
                await wire.send(kind="next_edit.ask", id="n", buffer="a.py", version=2, cursor=9)
                event = await wire.until("next_edit", answers=["n"])
                assert event["change"]["text"] == "fetch"

        with serving(spm_model()) as server:
            asyncio.run(run(server))

    def test_asked_for_nothing_it_says_so(self) -> None:
        async def run(server: RunningServer) -> None:
            async with wired(server) as wire:
                await wire.open("x = 1\n")
                await wire.send(kind="next_edit.ask", id="n", buffer="a.py", version=0, cursor=0)
                assert (await wire.until("next_edit.dropped"))["reason"] == "nothing_to_change"

        with serving(spm_model()) as server:
            asyncio.run(run(server))


async def test_a_change_that_would_hold_up_everybody_is_refused_and_the_buffer_opened_again() -> None:
    with serving(scripted_model()) as server:
        async with wired(server) as wire:
            text = "x = 1\n" * 200_000
            await wire.open(text, version=1)
            edits = [{"start": 0, "end": 0, "text": "y"}] * 1000
            await wire.send(kind="buffer.change", buffer="a.py", base=1, version=2, edits=edits)
            refused = await wire.until("error")
            assert refused["error"]["param"] == "edits"
            resync = await wire.until("resync")
            assert (resync["reason"], resync["have"]) == ("bad_edit", 1)
            await wire.type("y", 0, 2)  # one edit of it is taken all the same
            await wire.send(kind="complete", id="c", buffer="a.py", version=2, cursor=1)
            await wire.until("not_shown", id="c")


async def test_changes_do_not_grow_buffers_beyond_what_may_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keystroke.gateway.live.connection.CHARACTERS", 1000)
    with serving(scripted_model()) as server:
        async with wired(server) as wire:
            await wire.open("x = 1\n" * 100, version=1)
            more = [{"start": 0, "end": 0, "text": "y" * 500}]
            await wire.send(kind="buffer.change", buffer="a.py", base=1, version=2, edits=more)
            assert "more than 1,000 characters" in (await wire.until("error"))["error"]["message"]
            assert (await wire.until("resync"))["have"] == 1
