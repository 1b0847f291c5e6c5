from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keystroke.assist.edit import (
    EditFailureReason,
    EditTask,
    Journal,
    ModelWriter,
    Region,
    RemoteWriter,
    Workspace,
    plan_edit,
    plan_patch,
    propose_edit,
)
from keystroke.assist.edit.steps import read_operations
from keystroke.assist.edit.writer import Messages
from keystroke.engine.base import Interrupt
from keystroke.engine.echo import SPECIAL, EchoEngine
from keystroke.engine.generation import Chunk, GenerationParams
from keystroke.engine.model import Model
from keystroke.engine.templates import ChatTemplate
from keystroke.engine.tokenizer.byte_tokens import ByteTokenizer
from keystroke.errors import Forbidden, InputError, Interrupted, NotFound, UsageError
from keystroke.text import Edit

CODE = "def main():\r\n\tprint('one')\r\n\tprint('two')"


def block(path: str, search: str, new: str) -> str:
    return f"{path}\n<<<<<<< SEARCH\n{search}\n=======\n{new}\n>>>>>>> REPLACE\n"


class Script:
    """A writer whose answers are known; it remembers what it was asked."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.asked: list[Messages] = []
        self.predictions: list[str | None] = []

    def write(self, messages: Messages, prediction: str | None) -> Iterator[str]:
        self.asked.append(messages)
        self.predictions.append(prediction)
        yield from self.answers.pop(0)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    root = tmp_path / "work"
    root.mkdir()
    (root / "a.py").write_bytes(CODE.encode("utf-8-sig"))
    (root / "b.py").write_bytes(b"x = 1\n")
    return Workspace(root)


@pytest.fixture
def journal(workspace: Workspace, tmp_path: Path) -> Journal:
    return Journal(tmp_path / "state", workspace)


def content(workspace: Workspace) -> dict[str, bytes]:
    root = workspace.root
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


TWO_TO_THREE = block("a.py", "    print('two')", "    print('three')")


def test_only_the_changed_characters_of_a_file_are_touched(workspace: Workspace) -> None:
    plan = plan_edit(workspace, ["a.py"], "say three", Script(TWO_TO_THREE))
    at = CODE.index("two")
    assert [change.edits for change in plan.changes] == [(Edit(at + 1, at + 3, "hree"),)]
    before = content(workspace)
    plan.apply()
    after = content(workspace)
    assert after["a.py"] == before["a.py"].replace(b"two", b"three")
    assert after["b.py"] == before["b.py"]


def test_planning_writes_nothing(workspace: Workspace) -> None:
    before = content(workspace)
    plan = plan_edit(workspace, ["a.py"], "say three", Script(TWO_TO_THREE))
    assert "-\tprint('two')" in plan.diff()
    assert content(workspace) == before


def test_a_failed_plan_says_why_and_applies_nothing(workspace: Workspace, journal: Journal) -> None:
    before = content(workspace)
    bad = block("b.py", "y = 7777", "y = 8")
    plan = plan_edit(workspace, ["b.py", "a.py"], "x = 1", Script(TWO_TO_THREE + bad), retries=0)
    assert [failure.reason for failure in plan.failures] == [EditFailureReason.NOT_FOUND]
    assert plan.explain().startswith("b.py: the lines to replace are not in the file")
    with pytest.raises(InputError, match=r"nothing was changed: b\.py"):
        plan.apply(journal)
    assert content(workspace) == before
    with pytest.raises(NotFound):
        journal.undo()


def test_a_model_whose_answer_does_not_fit_is_told_why_and_asked_again(workspace: Workspace) -> None:
    script = Script(block("b.py", "y = 7777", "y = 8"), block("b.py", "x = 1", "x = 2"))
    plan = plan_edit(workspace, ["b.py"], "two", script, blocks=True)
    assert plan.changes[0].after == "x = 2\n"
    assert "not in the file" in script.asked[1][-1]["content"]
    assert script.predictions[0] == "x = 1\n"


def test_files_that_were_not_shown_cannot_be_changed(workspace: Workspace) -> None:
    before = content(workspace)
    for answer in (block("b.py", "x = 1", "x = 2"), block("b.py", "", "all mine")):
        plan = plan_edit(workspace, ["a.py"], "x", Script(answer), retries=0)
        assert [failure.reason for failure in plan.failures] == [EditFailureReason.UNKNOWN_FILE]
    assert content(workspace) == before


@pytest.mark.parametrize("path", ["../evil.py", "/tmp/evil.py", ".git/hooks/pre-commit"])
def test_an_answer_that_leaves_the_workspace_is_forbidden(workspace: Workspace, path: str) -> None:
    with pytest.raises(Forbidden):
        plan_edit(workspace, ["a.py"], "x", Script(TWO_TO_THREE + block(path, "", "evil")), retries=0)
    with pytest.raises(Forbidden):
        plan_patch(workspace, f"*** Begin Patch\n*** Add File: {path}\n+evil\n*** End Patch")


def test_a_region_is_rewritten_with_its_own_text_as_prediction(workspace: Workspace) -> None:
    script = Script("```\n\tprint('ONE')\n```")
    plan = plan_edit(workspace, ["a.py"], "shout", script, region=Region("a.py", 1, 2))
    assert script.predictions == ["```python\n\tprint('one')\r\n```"]
    plan.apply()
    assert (workspace.root / "a.py").read_bytes() == CODE.replace("one", "ONE").encode("utf-8-sig")


def test_a_writer_is_stopped_once_its_rewrite_is_complete(workspace: Workspace) -> None:
    closed: list[bool] = []

    class Talker:
        def write(self, messages: Messages, prediction: str | None) -> Iterator[str]:
            try:
                yield "```\nx = 2\n```\n"
                while True:
                    yield "As you can see, "
            finally:
                closed.append(True)

    plan = plan_edit(workspace, ["b.py"], "x", Talker(), region=Region("b.py"))
    assert plan.changes[0].after == "x = 2\n"
    assert closed == [True]


def test_buffers_in_memory_are_edited_without_a_workspace() -> None:
    task = EditTask({"a": "x = 1\ny = 2\n"}, "x")
    answer = block("a", "y = 2", "y = 3")
    proposal = propose_edit(task, Script(answer), blocks=True)
    assert proposal.answers == (answer,)
    assert proposal.edits("a") == (Edit(10, 11, "3"),)


def test_a_shortened_path_means_the_only_file_it_can_mean() -> None:
    files = {"src/a.py": "x = 1\n", "src/b.py": "x = 1\n", "lib/b.py": "x = 1\n"}
    task = EditTask(files, "x")
    found = read_operations(task, block("a.py", "x = 1", "x = 2"), lambda path: False)
    assert found.texts == {"src/a.py": "x = 2\n"}
    ambiguous = read_operations(task, block("b.py", "x = 1", "x = 2"), lambda path: False)
    assert [failure.reason for failure in ambiguous.failures] == [EditFailureReason.UNKNOWN_FILE]


def test_an_endless_answer_is_cut_off(workspace: Workspace) -> None:
    class Endless:
        def write(self, messages: Messages, prediction: str | None) -> Iterator[str]:
            while True:
                yield "la " * 100_000

    with pytest.raises(InputError, match="ask for a smaller change"):
        plan_edit(workspace, ["a.py"], "sing", Endless(), blocks=True)
    plan = plan_edit(workspace, ["a.py"], "sing", Endless(), retries=0)
    assert [failure.reason for failure in plan.failures] == [EditFailureReason.SYNTAX]


def test_empty_requests_are_refused(workspace: Workspace) -> None:
    with pytest.raises(InputError, match="instruction is empty"):
        plan_edit(workspace, ["a.py"], "  ", Script())
    with pytest.raises(InputError, match="no file was given"):
        plan_edit(workspace, [], "x", Script())
    with pytest.raises(InputError, match="not among the files"):
        plan_edit(workspace, ["a.py"], "x", Script(), region=Region("b.py"))


# ── undo ──────────────────────────────────────────────────────────────────────────────────────

EVERYTHING = """*** Begin Patch
*** Add File: new/n.py
+n = 1
*** Delete File: b.py
*** Update File: a.py
*** Move to: moved.py
@@
-    print('one')
+    print('1')
*** End Patch"""


def test_undo_takes_back_every_kind_of_change(workspace: Workspace, journal: Journal) -> None:
    (workspace.root / "a.py").chmod(0o755)
    before = content(workspace)
    plan = plan_patch(workspace, EVERYTHING)
    assert plan.summary() == ("add new/n.py", "remove b.py", "move a.py to moved.py")
    plan.apply(journal)
    assert sorted(content(workspace)) == ["moved.py", "new/n.py"]
    assert os.access(workspace.root / "moved.py", os.X_OK)
    assert journal.undo().instruction == "apply a patch"
    assert content(workspace) == before
    assert os.access(workspace.root / "a.py", os.X_OK)
    with pytest.raises(NotFound, match="nothing to undo"):
        journal.undo()


def test_undo_walks_back_one_edit_at_a_time(workspace: Workspace, journal: Journal) -> None:
    states = [content(workspace)]
    for old, new in (("1", "2"), ("2", "3"), ("3", "4")):
        plan_edit(workspace, ["b.py"], f"to {new}", Script(block("b.py", f"x = {old}", f"x = {new}"))).apply(
            journal
        )
        states.append(content(workspace))
    assert [entry.instruction for entry in journal.entries()] == ["to 4", "to 3", "to 2"]
    for state in reversed(states[:-1]):
        journal.undo()
        assert content(workspace) == state


def test_undo_refuses_when_a_file_was_changed_since(workspace: Workspace, journal: Journal) -> None:
    answer = TWO_TO_THREE + block("b.py", "x = 1", "x = 2")
    plan_edit(workspace, ["a.py", "b.py"], "x", Script(answer)).apply(journal)
    (workspace.root / "b.py").write_bytes(b"mine now\n")
    before = content(workspace)
    with pytest.raises(InputError, match=r"b\.py was changed after the edit"):
        journal.undo()
    assert content(workspace) == before


def test_an_entry_whose_edit_never_happened_is_skipped(workspace: Workspace, journal: Journal) -> None:
    plan_edit(workspace, ["b.py"], "first", Script(block("b.py", "x = 1", "x = 2"))).apply(journal)
    after_first = content(workspace)
    second = plan_edit(workspace, ["b.py"], "second", Script(block("b.py", "x = 2", "x = 3")))
    with journal.recording("second", second._inverse_changes()):
        pass  # the files were never written
    assert content(workspace) == after_first
    assert journal.undo().instruction == "first"


def test_an_edit_cut_short_by_a_crash_can_be_taken_back(workspace: Workspace, journal: Journal) -> None:
    before = content(workspace)
    answer = TWO_TO_THREE + block("b.py", "x = 1", "x = 2")
    plan = plan_edit(workspace, ["a.py", "b.py"], "x", Script(answer))
    with journal.recording("x", plan._inverse_changes()):
        workspace.write(plan._writes[:1])  # only one of the two files
    assert content(workspace) != before
    journal.undo()
    assert content(workspace) == before


def test_a_failed_apply_leaves_no_entry(workspace: Workspace, journal: Journal) -> None:
    plan = plan_edit(workspace, ["b.py"], "x", Script(block("b.py", "x = 1", "x = 2")))
    (workspace.root / "b.py").write_bytes(b"meanwhile\n")
    with pytest.raises(InputError, match="changed on disk"):
        plan.apply(journal)
    assert list(journal.entries()) == []


def test_what_a_failing_disk_left_half_done_can_be_undone_later(
    workspace: Workspace, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content(workspace)
    plan = plan_edit(workspace, ["a.py", "b.py"], "x", Script(TWO_TO_THREE + block("b.py", "x = 1", "x = 2")))
    real = os.replace
    calls: list[object] = []

    def failing(source: Path, target: Path) -> None:
        calls.extend([target] if target.suffix == ".py" else [])  # the journal's own are not counted
        if len(calls) > 1:
            raise OSError(5, "Input/output error")
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", failing)
        with pytest.raises(
            InputError, match=r"b\.py cannot be written.*a\.py could not be restored, undo it later"
        ):
            plan.apply(journal)
    assert content(workspace) != before
    journal.undo()
    assert content(workspace) == before


def test_a_refused_apply_leaves_no_entry(workspace: Workspace, journal: Journal) -> None:
    plan = plan_edit(workspace, ["b.py"], "x", Script(block("b.py", "x = 1", "x = 2")))
    (workspace.root / "b.py").chmod(0o444)
    with pytest.raises(Forbidden, match="read-only"):
        plan.apply(journal)
    assert list(journal.entries()) == []


def test_the_journal_is_private_bounded_and_says_when_it_is_damaged(
    workspace: Workspace, journal: Journal, tmp_path: Path
) -> None:
    for _ in range(103):
        with journal.recording("x", []) as entry:
            pass
    files = sorted((tmp_path / "state").rglob("*.json"))
    assert len(files) == 100
    assert files[-1].stem == entry.id
    assert all(path.stat().st_mode & 0o077 == 0 for path in (files[0], files[0].parent))
    files[-1].write_text("{")
    with pytest.raises(InputError, match="delete it to go on"):
        journal.undo()


@settings(deadline=None, max_examples=40)
@given(
    st.text(st.sampled_from("ab\té😀\r\n"), max_size=30), st.text(st.sampled_from("ab\té😀\r\n"), max_size=30)
)
def test_apply_then_undo_is_identity_for_any_two_contents(
    tmp_path_factory: pytest.TempPathFactory, old: str, new: str
) -> None:
    root = tmp_path_factory.mktemp("any")
    (root / "work").mkdir()
    target = root / "work" / "f"
    target.write_bytes(old.encode())
    workspace = Workspace(root / "work")
    proposal_plan = plan_edit(
        workspace, ["f"], "x", Script(f"```\n{new}\n```"), region=Region("f"), retries=0
    )
    if proposal_plan.failures:
        return
    journal = Journal(root / "state", workspace)
    proposal_plan.apply(journal)
    assert target.read_bytes().decode() == proposal_plan.changes[0].after
    journal.undo()
    assert target.read_bytes() == old.encode()


def test_the_diff_of_a_plan_is_what_git_applies(workspace: Workspace, tmp_path: Path) -> None:
    plan = plan_patch(workspace, EVERYTHING)
    copy = tmp_path / "copy"
    copy.mkdir()
    for name, data in content(workspace).items():
        # Git sees the text without its byte order mark, as the plan does.
        (copy / name).write_bytes(data.removeprefix(b"\xef\xbb\xbf"))
    done = subprocess.run(
        ["git", "apply", "--unsafe-paths", "-"], cwd=copy, input=plan.diff().encode(), capture_output=True
    )
    assert done.returncode == 0, done.stderr
    plan.apply()
    wanted = {name: data.removeprefix(b"\xef\xbb\xbf") for name, data in content(workspace).items()}
    assert {p.relative_to(copy).as_posix(): p.read_bytes() for p in copy.rglob("*") if p.is_file()} == wanted


# ── writers ───────────────────────────────────────────────────────────────────────────────────

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}<end>{% endfor %}"


def scripted_model(script: Callable[[str], str], template: str | None = TEMPLATE) -> Model:
    chat = ChatTemplate(template) if template else None
    return Model("echo", EchoEngine(script), ByteTokenizer(SPECIAL), chat)


def test_a_model_writes_an_edit_and_its_file_is_the_draft(workspace: Workspace) -> None:
    text = CODE.replace("\r\n", "\n") + "\n"
    (workspace.root / "long.py").write_text(text * 20)
    answer = "```\n" + (text * 20).replace("two", "three", 1) + "```\n"
    writer = ModelWriter(scripted_model(lambda prompt: answer))
    plan = plan_edit(workspace, ["long.py"], "three", writer, region=Region("long.py"))
    assert plan.changes[0].after == (text * 20).replace("two", "three", 1)
    assert writer.last is not None
    stats = writer.last.stats
    assert stats.accepted > stats.tokens // 2


def test_a_model_without_a_chat_template_is_refused() -> None:
    with pytest.raises(UsageError, match="no chat template"):
        ModelWriter(scripted_model(str, None))


def test_an_interrupted_answer_changes_nothing(workspace: Workspace) -> None:
    interrupt = Interrupt()
    model = scripted_model(lambda prompt: TWO_TO_THREE)
    with pytest.raises(Interrupted):
        plan_edit(
            workspace,
            ["a.py"],
            "x",
            ModelWriter(model, interrupt=interrupt),
            on_text=lambda _: interrupt.set(),
        )
    assert model.engine.stats().sessions == 0


def test_a_remote_chat_model_writes_an_edit(workspace: Workspace) -> None:
    class Server:
        def stream_chat(
            self,
            messages: object,
            params: GenerationParams | None = None,
            tools: object = None,
            interrupt: Interrupt | None = None,
        ) -> Iterator[object]:
            yield "something that is not text"
            for character in TWO_TO_THREE:
                yield Chunk(character)

    plan = plan_edit(workspace, ["a.py"], "x", RemoteWriter(Server()))
    assert plan.changes[0].after == CODE.replace("two", "three")
