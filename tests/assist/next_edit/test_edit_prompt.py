"""The edit format: what the model reads and what its answer means."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from keystroke.assist.next_edit.prompt import (
    AROUND_TOKENS,
    CHANGE_TOKENS,
    HISTORY_TOKENS,
    REGION,
    REGION_TOKENS,
    VERSION,
    EditFormat,
    EditMarks,
    LineRange,
    RecentChange,
    changes_between,
    detect_edit_format,
    find_marks,
    region_at,
)
from keystroke.engine.tokenizer import load_tokenizer

MODEL = Path(__file__).parents[3] / "models" / "keystroke-80m"
TOKENIZER = load_tokenizer(MODEL)
FOUND = find_marks(TOKENIZER)
assert FOUND is not None
MARKS: EditMarks = FOUND
FORMAT = EditFormat(TOKENIZER.encode, TOKENIZER.decode, MARKS)
LINES = [f"    value_{i} = compute({i})" for i in range(60)]
RENAME = RecentChange("a.py", "value = old(1)\n", "value = new(1)\n")

texts = st.lists(st.text(alphabet="ab(): =\t", max_size=12), max_size=12)


def test_history_is_the_shared_front_of_every_place_asked_about() -> None:
    first = FORMAT.build([RENAME], "a.py", LINES, region_at(LINES, 5))
    second = FORMAT.build([RENAME], "a.py", LINES, region_at(LINES, 40), cursor=41)
    assert first.shared == second.shared > 0
    assert first.tokens[: first.shared] == second.tokens[: second.shared]
    assert first.tokens[0] == MARKS.edit
    assert first.tokens[-1] == MARKS.after


def test_the_oldest_changes_go_first_when_room_is_short() -> None:
    many = [RecentChange(f"f{i}.py", "x = 1\n" * 20, f"y_{i} = 1\n" * 20) for i in range(12)]
    prompt = FORMAT.build(many, "a.py", LINES, region_at(LINES, 5))
    front = TOKENIZER.decode(prompt.tokens[: prompt.shared])
    assert prompt.shared <= HISTORY_TOKENS
    assert "f11.py" in front
    assert "f0.py" not in front


def test_a_prompt_stays_short_whatever_the_text() -> None:
    wide = ["name = " + "'é漢字' + " * 60 + "''"] * 40
    history = [RecentChange("p/" * 200 + "x.py", "\n".join(wide), "\n".join(wide))] * 9
    region = FORMAT.region(wide, 20)
    assert region.first <= 20 < region.last
    prompt = FORMAT.build(history, "q/" * 200 + "y.py", wide, region, cursor=20)
    assert prompt.shared <= HISTORY_TOKENS + 2 * CHANGE_TOKENS
    lines = FORMAT.region(LINES, 20)
    assert len(FORMAT.build([RENAME] * 9, "y.py", LINES, lines).tokens) < 700
    assert lines.last - lines.first == REGION
    assert len(prompt.draft) <= max(REGION_TOKENS, len(TOKENIZER.encode(wide[0] + "\n")))


@given(texts, texts, st.integers(0, 10), st.integers(0, 10))
def test_an_answer_is_read_back_as_the_lines_that_were_meant(
    lines: list[str], answer: list[str], first: int, size: int
) -> None:
    region = LineRange(min(first, len(lines)), min(first + size, len(lines)))
    prompt = FORMAT.build([RENAME], "a.py", lines, region)
    old = lines[region.first : region.last]
    assert FORMAT.parse(prompt, FORMAT.encode_answer(old, answer)) == answer
    assert FORMAT.parse(prompt, FORMAT.encode_answer(old, None)) == old
    assert (FORMAT.encode_answer(old, answer) == FORMAT.encode_answer(old, None)) == (answer == old)


def test_an_answer_says_only_what_differs() -> None:
    old = LINES[:6]
    said = FORMAT.encode_answer(old, [*old[:2], "x = 1", *old[4:]])
    assert said[:2] == [MARKS.numbers[2], MARKS.numbers[4]]
    assert TOKENIZER.decode(said[2:-1]) == "x = 1\n"
    assert FORMAT.encode_answer(old, [*old, "more"])[:2] == [MARKS.numbers[6]] * 2
    assert FORMAT.encode_answer(old, old[1:]) == [MARKS.numbers[0], MARKS.numbers[1], MARKS.end]


def test_every_line_of_a_place_has_its_number() -> None:
    prompt = FORMAT.build([RENAME], "a.py", LINES, LineRange(10, 20), cursor=12)
    tokens = list(prompt.tokens)
    for number in range(10):
        first, last = (tokens.index(MARKS.numbers[number + i]) for i in (0, 1))
        line = [t for t in tokens[first + 1 : last] if t != MARKS.cursor]
        assert TOKENIZER.decode(line) == LINES[10 + number] + "\n"
    assert tokens[tokens.index(MARKS.numbers[10]) + 1] == MARKS.below


def test_an_answer_without_an_end_a_place_or_with_a_mark_in_it_is_none() -> None:
    prompt = FORMAT.build([], "a.py", LINES, LineRange(0, 3))
    good: Sequence[int] = FORMAT.encode_answer(LINES[:3], ["x = 1"])
    first, last, *text = good
    assert FORMAT.parse(prompt, good) == ["x = 1"]
    assert FORMAT.parse(prompt, good[:-1]) is None
    assert FORMAT.parse(prompt, []) is None
    assert FORMAT.parse(prompt, [MARKS.end]) is None
    assert FORMAT.parse(prompt, text) is None
    assert FORMAT.parse(prompt, [last, first, *text]) is None
    assert FORMAT.parse(prompt, [first, MARKS.numbers[4], *text]) is None
    assert FORMAT.parse(prompt, [*good[:-1], MARKS.cursor, *good]) is None
    assert FORMAT.parse(prompt, [*good[:-1], MARKS.numbers[1], MARKS.end]) is None


def test_the_cursor_stands_before_its_line_and_nowhere_else() -> None:
    inside = FORMAT.build([], "a.py", LINES, LineRange(10, 20), cursor=12)
    outside = FORMAT.build([], "a.py", LINES, LineRange(10, 20), cursor=30)
    assert MARKS.cursor not in outside.tokens
    at = inside.tokens.index(MARKS.cursor)
    assert TOKENIZER.decode(inside.tokens[at:]).startswith(LINES[12])
    assert inside.draft == outside.draft
    assert len(FORMAT.build([], "a.py", LINES, LineRange(10, 20)).tokens) <= 2 * AROUND_TOKENS + 240


@given(texts, texts)
def test_changes_hold_all_that_differs(old: list[str], new: list[str]) -> None:
    before, after = "\n".join(old), "\n".join(new)
    found = changes_between(before, after, "a.py")
    assert bool(found) == (before != after)
    assert all(c.before != c.after for c in found)


def test_an_insertion_says_after_which_line_it_came() -> None:
    assert changes_between("a\nb\n", "a\nx\nb\n", "p") == [RecentChange("p", "a\n", "a\nx\n")]


def test_a_model_that_does_not_say_so_has_not_learned_edits(tmp_path: Path) -> None:
    (tmp_path / "keystroke.json").write_text(json.dumps({"fim_order": "spm"}))
    assert detect_edit_format(TOKENIZER, tmp_path) is None
    (tmp_path / "keystroke.json").write_text(json.dumps({"next_edit": VERSION}))
    assert detect_edit_format(TOKENIZER, tmp_path) is not None
    (tmp_path / "keystroke.json").write_text(json.dumps({"next_edit": VERSION + 1}))
    assert detect_edit_format(TOKENIZER, tmp_path) is None
