from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_strategies import edited, texts

from installed import program
from keystroke.text import Edit, apply_edits, minimal_diff, unified_diff
from keystroke.text.compare import Budget, compare
from keystroke.text.diff import _is_one_character, common_prefix, common_suffix


@given(texts, texts)
def test_the_diff_of_any_two_texts_turns_one_into_the_other(old: str, new: str) -> None:
    assert apply_edits(old, minimal_diff(old, new)) == new


@given(edited())
def test_the_diff_of_an_edited_text_keeps_at_least_the_common_ends(
    case: tuple[str, tuple[Edit, ...]],
) -> None:
    old, edits = case
    new = apply_edits(old, edits)
    found = minimal_diff(old, new)
    assert apply_edits(old, found) == new
    replaced = sum(edit.end - edit.start for edit in found)
    assert replaced <= len(old)
    assert (found == ()) == (old == new)


@given(texts, texts)
def test_no_edit_cuts_what_reads_as_one_character(old: str, new: str) -> None:
    moved = 0
    for edit in minimal_diff(old, new):
        at = edit.start + moved
        for text, place in ((old, edit.start), (old, edit.end), (new, at), (new, at + len(edit.text))):
            assert not _is_one_character(text, place)
        moved += edit.delta


@given(texts, texts)
def test_common_ends_are_as_long_as_they_can_be(a: str, b: str) -> None:
    head, tail = common_prefix(a, b), common_suffix(a, b)
    assert a[:head] == b[:head]
    assert a[head : head + 1] != b[head : head + 1] or head == min(len(a), len(b))
    assert a[len(a) - tail :] == b[len(b) - tail :]
    assert tail == min(len(a), len(b)) or a[len(a) - tail - 1] != b[len(b) - tail - 1]


def test_common_ends_of_long_texts_are_found_across_blocks() -> None:
    for length in (65535, 65536, 65537, 200_000):
        a, b = "x" * length + "a" + "y" * length, "x" * length + "bb" + "y" * length
        assert common_prefix(a, b) == length
        assert common_suffix(a, b) == length
        assert common_prefix(a, a) == common_suffix(a, a) == len(a)


@pytest.mark.parametrize(
    ("old", "new", "edits"),
    [
        ("a\nb\nc\n", "a\nB\nc\n", (Edit(2, 3, "B"),)),
        ("def f(x):\n    return x\n", "def f(y):\n    return y\n", (Edit(6, 7, "y"), Edit(21, 22, "y"))),
        ("one\ntwo\n", "one\nand\ntwo\n", (Edit(4, 4, "and\n"),)),
        ("foo()\n", "foobar()\n", (Edit(3, 3, "bar"),)),
        ("a\nb\n", "a\r\nb\n", (Edit(1, 2, "\r\n"),)),
        ("x", "", (Edit(0, 1, ""),)),
        ("", "x", (Edit(0, 0, "x"),)),
        ("e\u0301", "e\u0300", (Edit(0, 2, "e\u0300"),)),
    ],
)
def test_only_what_differs_is_touched(old: str, new: str, edits: tuple[Edit, ...]) -> None:
    assert minimal_diff(old, new) == edits


def test_scattered_changes_in_a_large_file_stay_small() -> None:
    lines = [f"line {i} holds value {i * 7}\n" for i in range(60_000)]
    changed = list(lines)
    for i in range(100, 60_000, 6_000):
        changed[i] = changed[i].replace("holds", "keeps")
    edits = minimal_diff("".join(lines), "".join(changed))
    assert apply_edits("".join(lines), edits) == "".join(changed)
    assert [edit.text for edit in edits] == ["keep"] * 10


def test_a_hopeless_comparison_still_gives_a_correct_diff() -> None:
    chance = random.Random(5)
    old = "".join(chance.choice("ab\n") for _ in range(60_000))
    new = "".join(chance.choice("ab\n") for _ in range(60_000))
    assert apply_edits(old, minimal_diff(old, new)) == new


def test_shuffled_unique_lines_beyond_the_budget_are_anchored() -> None:
    lines = [f"{i}\n" for i in range(5_000)]
    moved = lines[2500:] + lines[:2500]
    edits = minimal_diff("".join(lines), "".join(moved))
    assert apply_edits("".join(lines), edits) == "".join(moved)
    assert sum(len(edit.text) for edit in edits) <= len("".join(lines[:2500]))


@pytest.mark.skipif(program("patch") is None, reason="needs the patch program")
@pytest.mark.parametrize("seed", range(12))
def test_the_patch_program_accepts_our_unified_diff(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    old = "".join(f"{chance.randrange(9)}\n" for _ in range(chance.randrange(40)))
    new = "".join(f"{chance.randrange(9)}\n" for _ in range(chance.randrange(40))) + chance.choice(
        ["", "end"]
    )
    target = tmp_path / "file"
    target.write_text(old)
    diff = unified_diff(old, new, "file", "file")
    done = subprocess.run(
        ["patch", "-s", str(target)], input=diff, text=True, cwd=tmp_path, capture_output=True
    )
    assert done.returncode == 0, done.stdout
    assert (target.read_text() if target.exists() else "") == new


def test_the_unified_diff_reads_as_diff_writes_it() -> None:
    assert unified_diff("a\nb\nc", "a\nB\nc", "x", "y", context=1) == (
        "--- x\n+++ y\n@@ -1,3 +1,3 @@\n a\n-b\n+B\n c\n\\ No newline at end of file\n"
    )
    assert unified_diff("same", "same") == ""


@given(st.lists(st.sampled_from("abc"), max_size=12), st.lists(st.sampled_from("abc"), max_size=12))
def test_line_hunks_are_the_shortest_script(old: list[str], new: list[str]) -> None:
    diff = unified_diff("".join(f"{x}\n" for x in old), "".join(f"{x}\n" for x in new), context=0)
    changed = [line for line in diff.splitlines()[2:] if line[0] in "+-"]
    assert len(changed) == len(old) + len(new) - 2 * longest_common(old, new)


def longest_common(a: list[str], b: list[str]) -> int:
    row = [0] * (len(b) + 1)
    for x in a:
        previous = row
        row = [0]
        for j, y in enumerate(b):
            row.append(previous[j] + 1 if x == y else max(row[j], previous[j + 1]))
    return row[-1]


def test_texts_without_a_common_line_are_not_searched() -> None:
    budget = Budget(1_000_000)
    assert compare(["old"] * 5000, ["new"] * 5000, budget) == [(0, 5000, 0, 5000)]
    assert budget.left == 1_000_000
