"""The model's own next edit over the live channel: who is asked, what is offered, and why not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gateway_support import FIM, RunningServer, scripted_model, serving
from test_live import SPM, Wire, wired

from keystroke.assist.next_edit.prompt import ABOVE, SPELLING, VERSION, EditFormat, find_marks
from keystroke.engine.echo import END_OF_TURN, EOS, SPECIAL
from keystroke.engine.model import Model
from keystroke.engine.tokenizer.byte_tokens import ByteTokenizer

MARKS = {name: 290 + number for number, name in enumerate(SPELLING)} | {"<|endoftext|>": END_OF_TURN}
TOKENIZER = ByteTokenizer({**SPECIAL, **FIM, **MARKS}, eos=EOS, vocab_size=320)
FOUND = find_marks(TOKENIZER)
assert FOUND is not None
FORMAT = EditFormat(TOKENIZER.encode, TOKENIZER.decode, FOUND)
FILLER = "".join(f"v{n} = {n}\n" for n in range(60))
TEXT = f"area = 1\n{FILLER}print(area)\n"
CALL = TEXT.index("print")


class Editing:
    """A scripted model that has learned edits: it replaces `old` by `new` where the place asked about has it,
    and leaves everything else. It completes nothing. Every prompt it was given is kept."""

    def __init__(self, old: str = "print(area)", new: str = "print(area, 2)") -> None:
        self.old, self.new = old, new
        self.prompts: list[str] = []

    def __call__(self, prompt: str) -> str | Sequence[int]:
        if "a.py\n" not in prompt:
            return ""
        self.prompts.append(prompt)
        lines = prompt.rpartition("a.py\n")[2].split("\n")[ABOVE:-1]  # the lines above are only read
        return FORMAT.encode_answer(lines, [line.replace(self.old, self.new) for line in lines])

    def model(self, folder: Path, version: int = VERSION, **costs: Any) -> Model:
        (folder / "keystroke.json").write_text(json.dumps({"next_edit": version}))
        return replace(scripted_model(self, **costs), tokenizer=TOKENIZER, fim=SPM, path=folder)


async def change(wire: Wire, version: int, edit: tuple[int, int, str], buffer: str = "a.py") -> None:
    start, end, text = edit
    edits = [{"start": start, "end": end, "text": text}]
    await wire.send(kind="buffer.change", buffer=buffer, base=version - 1, version=version, edits=edits)


async def refusal(wire: Wire, version: int) -> str:
    """Why nothing is shown, asked for after a change."""
    await wire.send(kind="next_edit.ask", id="why", buffer="a.py", version=version, cursor=0)
    event = await wire.until("next_edit.dropped", id="why")
    assert not [e for e in wire.heard if e["type"] == "next_edit"]
    return str(event["reason"])


async def begun(model: Editing) -> None:
    """Until the model is being asked for an edit."""
    async with asyncio.timeout(60):
        while not model.prompts:  # noqa: ASYNC110 the engine's thread fills it
            await asyncio.sleep(0.01)


def live(server: RunningServer, script: Callable[[Wire], Any]) -> None:
    async def run() -> None:
        async with wired(server) as wire:
            await wire.open(TEXT)
            await script(wire)

    asyncio.run(run())
    assert server.settled()


def test_where_no_rule_knows_the_model_is_asked_and_its_edit_is_a_jump(tmp_path: Path) -> None:
    async def script(wire: Wire) -> None:
        await change(wire, 1, (7, 8, "5"))
        event = await wire.until("next_edit")
        at = CALL + len("print(area")
        assert (event["cause"], event["version"], event["others"]) == ("model", 1, [])
        assert event["change"] == {"buffer": "a.py", "start": at, "end": at, "text": ", 2"}

    with serving(Editing().model(tmp_path)) as server:
        live(server, script)


def test_it_moves_with_the_typing_and_ends_when_it_is_taken(tmp_path: Path) -> None:
    async def script(wire: Wire) -> None:
        await change(wire, 1, (7, 8, "5"))
        first = await wire.until("next_edit")
        await change(wire, 2, (0, 0, "# note\n"))
        moved = await wire.until("next_edit", version=2)
        start = first["change"]["start"] + len("# note\n")
        assert (moved["id"], moved["change"]["start"]) == (first["id"], start)
        await change(wire, 3, (start, start, ", 2"))
        assert (await wire.until("next_edit.dropped"))["reason"] == "fulfilled"

    with serving(Editing().model(tmp_path)) as server:
        live(server, script)


def test_after_one_of_its_edits_was_taken_the_model_is_asked_for_the_next(tmp_path: Path) -> None:
    model = Editing()

    async def script(wire: Wire) -> None:
        await change(wire, 1, (7, 8, "5"))
        event = await wire.until("next_edit")
        model.old, model.new = "v30 = 30", "v30 = 31"
        edit = event["change"]
        model.prompts.clear()
        await change(wire, 2, (edit["start"], edit["end"], edit["text"]))
        await wire.send(kind="next_edit.ask", id="n", buffer="a.py", version=2, cursor=0)
        await wire.until("next_edit.dropped", id="n")
        # The place changed at first is among those asked about, and both changes are told.
        assert all(
            "area = 1\narea = 5\n" in p and "print(area)\nprint(area, 2)\n" in p for p in model.prompts
        )
        assert model.prompts

    with serving(model.model(tmp_path)) as server:
        live(server, script)


@pytest.mark.parametrize(
    ("new", "reason"),
    [
        ("print(area", "breaks_syntax"),
        ("print(area)", "model_leaves_it"),
    ],
)
def test_an_edit_that_does_not_hold_up_has_a_named_reason(tmp_path: Path, new: str, reason: str) -> None:
    async def script(wire: Wire) -> None:
        await change(wire, 1, (7, 8, "5"))
        assert await refusal(wire, 1) == reason

    with serving(Editing(new=new).model(tmp_path)) as server:
        live(server, script)


def test_a_model_that_would_leave_everything_says_so(tmp_path: Path) -> None:
    async def script(wire: Wire) -> None:
        await change(wire, 1, (7, 8, "5"))
        assert await refusal(wire, 1) == "model_leaves_it"

    with serving(Editing(old="nowhere").model(tmp_path)) as server:
        live(server, script)


def test_a_model_that_has_not_learned_edits_is_never_asked(tmp_path: Path) -> None:
    model = Editing()

    async def script(wire: Wire) -> None:
        await change(wire, 1, (7, 8, "5"))
        assert await refusal(wire, 1) == "nothing_to_change"

    with serving(model.model(tmp_path, version=VERSION + 1)) as server:
        live(server, script)
    with serving(replace(model.model(tmp_path), path=None)) as server:
        live(server, script)
    assert not model.prompts


def test_a_rule_that_knows_comes_before_the_model(tmp_path: Path) -> None:
    model = Editing(old="print(area)", new="print(area, 2)")

    async def script(wire: Wire) -> None:
        await change(wire, 1, (0, 4, "size"))
        event = await wire.until("next_edit")
        assert event["cause"] == "rename"

    with serving(model.model(tmp_path)) as server:
        live(server, script)
    assert not model.prompts


def test_a_key_stops_the_asking_and_whoever_waits_is_told(tmp_path: Path) -> None:
    model = Editing()

    async def script(wire: Wire) -> None:
        await change(wire, 1, (7, 8, "5"))
        await wire.send(kind="next_edit.ask", id="first", buffer="a.py", version=1, cursor=0)
        await begun(model)
        await change(wire, 2, (8, 8, "0"))
        assert (await wire.until("next_edit.dropped", id="first"))["reason"] == "superseded"

    with serving(model.model(tmp_path, step_cost=0.2)) as server:
        live(server, script)


def test_ghost_text_goes_first(tmp_path: Path) -> None:
    model = Editing()

    async def script(wire: Wire) -> None:
        await change(wire, 1, (7, 8, "5"))
        await begun(model)
        event = await wire.complete(8, 1, invoked=True)
        assert event["type"] in ("suggestion", "not_shown")
        assert not [e for e in wire.heard if e["type"].startswith("next_edit")]
        assert (await wire.until("next_edit"))["cause"] == "model"

    with serving(model.model(tmp_path, step_cost=0.05)) as server:
        live(server, script)


def test_what_was_dismissed_is_not_offered_again(tmp_path: Path) -> None:
    async def script(wire: Wire) -> None:
        await change(wire, 1, (7, 8, "5"))
        event = await wire.until("next_edit")
        await wire.send(kind="feedback", id=event["id"], buffer="a.py", outcome="dismissed")
        wire.heard.clear()
        await change(wire, 2, (7, 8, "6"))
        assert await refusal(wire, 2) == "dismissed_before"

    with serving(Editing().model(tmp_path)) as server:
        live(server, script)


def test_what_is_changed_in_a_file_with_secrets_reaches_no_prompt(tmp_path: Path) -> None:
    model = Editing()

    async def script(wire: Wire) -> None:
        await wire.open("TOKEN=abc\nNAME=x\n", ".env")
        await change(wire, 1, (6, 9, "s3cret"), ".env")
        await change(wire, 2, (len("TOKEN=s3cret\nNAME="), len("TOKEN=s3cret\nNAME=x"), "yy"), ".env")
        await change(wire, 1, (7, 8, "5"))
        assert (await wire.until("next_edit"))["cause"] == "model"

    with serving(model.model(tmp_path)) as server:
        live(server, script)
    assert model.prompts
    assert not [p for p in model.prompts if "s3cret" in p or "TOKEN" in p]


def test_changes_of_other_files_are_told(tmp_path: Path) -> None:
    model = Editing()

    async def script(wire: Wire) -> None:
        await wire.open("one = 1\n\n\n\n\n\ntwo = 2\n", "b.py")
        await change(wire, 1, (6, 7, "11"), "b.py")
        await change(
            wire, 2, (len("one = 11\n\n\n\n\n\ntwo = "), len("one = 11\n\n\n\n\n\ntwo = 2"), "22"), "b.py"
        )
        await change(wire, 1, (7, 8, "5"))
        await wire.until("next_edit", buffer="a.py")

    with serving(model.model(tmp_path)) as server:
        live(server, script)
    assert [p for p in model.prompts if "b.py\none = 1\none = 11\n" in p]
