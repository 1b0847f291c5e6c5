"""What the end of training is made of: cursors as the editor has them, edits as people made them."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fim_parts import take_apart
from hypothesis import given, settings
from hypothesis import strategies as st

from keystroke.assist.completion.window import PromptWindow
from keystroke.assist.next_edit.prompt import changes_between
from keystroke.engine.fim import detect_fim
from keystroke.engine.tokenizer import load_tokenizer
from keystroke.errors import InputError
from keystroke_lab.corpus.hunks import EditHunk
from keystroke_lab.corpus.shards import write_shard
from keystroke_lab.corpus.trajectories import FileEdit, write_edits
from keystroke_lab.pretraining.cursor import (
    LONGEST_ANSWER,
    as_editors_see_it,
    cursor_prompt,
    cursor_sequences,
    said_again,
)
from keystroke_lab.pretraining.deadline_run import DeadlineClock, DeadlineRecipe
from keystroke_lab.pretraining.documents import (
    Mix,
    SourceText,
    TokenDocument,
    documents,
    edit_windows,
    is_of_today,
    seamed,
    spread,
)
from keystroke_lab.pretraining.edit_sequences import edit_format, edit_sequences, make_situation, steps
from keystroke_lab.pretraining.fim import FimCut, Parts, cut
from keystroke_lab.pretraining.step import Phase, token_weights
from keystroke_lab.pretraining.window_feed import WindowFeed
from keystroke_lab.tokenizer import code_tokenizer, special

MODEL = Path(__file__).parents[2] / "models" / "keystroke-80m"
OURS = load_tokenizer(MODEL)
PLAIN = code_tokenizer.plain(code_tokenizer.load(MODEL))
FILES = sorted(Path(__file__).parents[2].glob("lab/keystroke_lab/pretraining/*.py"))
TEXTS = {f"keystroke_lab/pretraining/{f.name}": f.read_text(encoding="utf-8") for f in FILES}
SAMPLE = "keystroke_lab/pretraining/documents.py"
TEXT = TEXTS["keystroke_lab/pretraining/fim.py"]

BEFORE = "\n".join(f"line_{i} = old_name({i})" if i % 9 == 0 else f"line_{i} = {i}" for i in range(60))
EDIT = FileEdit(
    "project", "MIT", "1.0", "1.1", "pkg/module.py", BEFORE,
    [EditHunk(i, [f"line_{i} = old_name({i})"], [f"line_{i} = new_name({i})"]) for i in range(0, 60, 9)],
)  # fmt: skip
FORM = edit_format(PLAIN)


def window(path: str | None) -> PromptWindow:
    engine = SimpleNamespace(info=SimpleNamespace(context_length=2048))
    model: Any = SimpleNamespace(engine=engine, tokenizer=OURS, fim=detect_fim(OURS, MODEL))
    return PromptWindow(model, 768, path)


@pytest.mark.parametrize("kind", [FimCut.REST_OF_LINE, FimCut.LINE, FimCut.BODY, FimCut.INSIDE])
def test_a_cursor_is_asked_about_just_as_the_editor_asks(kind: FimCut) -> None:
    rng = random.Random(3)
    for _ in range(12):
        found = cut(TEXT[:1500], kind, rng)
        if found is None:
            continue
        parts = as_editors_see_it(found)
        text = parts.prefix + parts.suffix
        header = [special.FILE_SEP, *OURS.encode("pkg/fim.py\n")]
        asked = window("pkg/fim.py").prompt(text, len(parts.prefix))
        # A half word that the model is made to say again is part of the answer.
        before, parts = parts, said_again(parts)
        assert parts.text == before.text
        assert parts.middle == asked.repeated + before.middle
        assert cursor_prompt(parts, header, PLAIN, 768) == asked.tokens


def test_a_long_file_is_trimmed_to_the_budget_as_the_editor_trims_it() -> None:
    text = TEXT * 3
    middle = len(text) // 2
    start = text.index("\n", middle) + 1
    parts = Parts(text[:start], "", text[start:])
    asked = window(None).prompt(text, start).tokens
    made = cursor_prompt(parts, [], PLAIN, 768)
    assert len(made) <= 768
    (_, _, suffix), _ = _parts(asked)
    (prefix, _, below), _ = _parts(made)
    assert below == suffix
    assert OURS.decode(prefix) in text
    assert text[: text.index(OURS.decode(prefix))].endswith("\n")


def _parts(tokens: list[int]) -> tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], Any]:
    parts, order = take_apart([*tokens, special.END])
    return (parts.prefix, parts.middle, parts.suffix), order


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_every_cursor_sequence_is_a_prompt_and_its_answer(seed: int) -> None:
    rng = random.Random(seed)
    path = rng.choice(list(TEXTS))
    for tokens in cursor_sequences(path, TEXTS[path], TEXTS.get, PLAIN, rng):
        first = tokens.index(special.FIM_SUFFIX)
        parts, order = take_apart(tokens[first:])
        assert order == "spm"
        assert 0 < len(parts.middle) <= LONGEST_ANSWER
        assert len(tokens) <= 768 + LONGEST_ANSWER + 1
        body = OURS.decode(parts.prefix) + OURS.decode(parts.middle)
        assert body in TEXTS[path]


def test_definitions_of_other_files_come_before_the_path() -> None:
    rng = random.Random(0)
    found = [
        OURS.decode(tokens[: tokens.index(special.FIM_SUFFIX)])
        for _ in range(40)
        for tokens in cursor_sequences(SAMPLE, TEXTS[SAMPLE], TEXTS.get, PLAIN, rng)
    ]
    assert any(head.startswith("keystroke_lab/pretraining/") and "def " in head for head in found)
    assert any(not head for head in found)


@given(st.text(max_size=300), st.integers(0, 50))
def test_seams_lose_nothing(text: str, seed: int) -> None:
    tokens = seamed(text, PLAIN, 20, random.Random(seed))
    assert b"".join(map(OURS.token_bytes, tokens)) == text.encode("utf-8", "surrogatepass")
    assert seamed(text, PLAIN, 0, random.Random(0)) == PLAIN.encode(text).ids


@given(st.lists(st.booleans(), max_size=30), st.integers(0, 50))
def test_only_questions_change_places(kinds: list[bool], seed: int) -> None:
    stream = [TokenDocument([i], True, question) for i, question in enumerate(kinds)]
    found = spread(stream, random.Random(seed))
    assert sorted(d.tokens for d in found) == [d.tokens for d in stream]
    assert [d.question for d in found] == kinds
    assert all(a is b for a, b in zip(stream, found, strict=True) if not a.question)


def test_questions_about_one_file_stand_in_different_windows() -> None:
    texts = [TEXT.replace("def ", f"def f{i}_") for i in range(40)]
    sources = [SourceText(f"p{i}", f"{i}.py", text) for i, text in enumerate(texts)]
    found = spread(documents(sources, PLAIN, Mix(cursor=1.0, path=1.0), random.Random(0)), random.Random(0))
    names = [OURS.decode(d.tokens)[:200] for d in found]
    neighbours = sum(
        a.partition("\n")[0] == b.partition("\n")[0] and a.partition("\n")[0].endswith(".py")
        for a, b in pairwise(names)
    )
    assert len(found) > 150
    assert neighbours < len(found) / 10


def test_files_of_yesterday_are_used_less() -> None:
    old = SourceText("p", "old.py", "def f(a):\n    return 'x' % a\n" * 30)
    new = SourceText("p", "new.py", "def f(a: str) -> str:\n    return f'{a}'\n" * 30)
    assert is_of_today(new.text)
    assert not is_of_today(old.text)
    rng = random.Random(0)
    kept = list(documents([old, new] * 40, PLAIN, Mix(fim=0.0, path=0.0, dated=0.25), rng))
    assert 42 < len(kept) < 65


# Edits


def test_an_edit_left_to_make_is_asked_for_and_one_made_is_left_alone() -> None:
    rng = random.Random(1)
    found = [q for _ in range(300) if (q := make_situation([EDIT], FORM, rng)) is not None]
    changed = [q for q in found if q.answer is not None]
    kept = [q for q in found if q.answer is None]
    assert len(changed) > 60
    assert len(kept) > 60
    for question in found:
        lines = list(question.lines)
        inside = lines[question.region.first : question.region.last]
        assert all("new_name" in change.after for change in question.history)
        if question.answer is None:
            assert not any("old_name" in line for line in inside[1:-1])
        else:
            assert not any("old_name" in line for line in question.answer)
            assert [a.replace("new_name", "old_name") for a in question.answer] == [
                line.replace("new_name", "old_name") for line in inside
            ]


def test_the_history_reads_as_the_editor_would_tell_it() -> None:
    rng = random.Random(2)
    after = EDIT.after()
    told = changes_between(BEFORE, after, EDIT.path)
    for _ in range(50):
        question = make_situation([EDIT], FORM, rng)
        if question is not None:
            assert set(question.history) <= set(told)


def test_a_place_that_reaches_over_the_edge_makes_no_question() -> None:
    whole = FileEdit(
        "p", "MIT", "1", "2", "a.py", "\n".join(f"a{i}" for i in range(30)),
        [EditHunk(0, ["a0"], ["b0"]), EditHunk(5, [f"a{i}" for i in range(5, 25)], ["b"])],
    )  # fmt: skip
    rng = random.Random(0)
    asked = [q for _ in range(100) if (q := make_situation([whole], FORM, rng)) is not None]
    assert all(q.answer is None or "b" not in q.answer or "b" in q.lines for q in asked)


def test_files_of_one_release_are_one_step() -> None:
    other = FileEdit("project", "MIT", "1.1", "1.2", "x.py", "a\n", [EditHunk(0, ["a"], ["b"])])
    assert [len(step) for step in steps([EDIT, other, EDIT])] == [2, 1]


def test_edit_windows_hold_whole_questions() -> None:
    found = edit_windows([EDIT] * 3, PLAIN, 512, seed=4)
    assert len(found)
    np.testing.assert_array_equal(found, edit_windows([EDIT] * 3, PLAIN, 512, seed=4))
    assert np.count_nonzero(found == special.KEEP) > 0
    assert np.count_nonzero(found == special.EDIT) > 0


def test_answers_weigh_more_and_a_decision_most() -> None:
    sequences = list(edit_sequences([[EDIT]], PLAIN, random.Random(0)))
    keep = next(s for s in sequences if special.KEEP in s)
    fim = [special.FIM_SUFFIX, 40, special.FIM_PREFIX, 41, special.FIM_MIDDLE, 42, 43, special.END]
    plain = [50, 51, 52]
    tokens = torch.tensor([[*plain, *keep, *fim, *plain]])
    weights = token_weights(tokens, answer=2.0, decision=9.0)[0]
    targets = tokens[0, 1:]
    assert weights.shape == targets.shape
    assert weights[targets == special.KEEP].tolist() == [9.0]
    after_keep = int((targets == special.KEEP).nonzero()[0]) + 1
    assert weights[after_keep] == 2.0  # the end belongs to the answer
    answer = [float(weights[i]) for i, t in enumerate(targets.tolist()) if t in (42, 43)]
    assert answer == [2.0, 2.0]
    assert weights[: len(plain) + len(keep) - 3].max() == 1.0
    assert weights[-3:].tolist() == [1.0, 1.0, 1.0]


@pytest.fixture
def feed(tmp_path: Path) -> Iterator[WindowFeed]:
    (tmp_path / "code").mkdir()
    (tmp_path / "edits").mkdir()
    write_shard(tmp_path / "code" / "0.jsonl.bz2", [SourceText("p", n, t) for n, t in TEXTS.items()])
    found = WindowFeed(
        tmp_path / "code", MODEL, length=257, workers=1, backlog=32,
        edits=tmp_path / "edits", mix=Mix(path=1.0, edits=0.5),
    )  # fmt: skip
    yield found
    found.close()


def test_edits_are_mixed_in_as_soon_as_they_arrive(feed: WindowFeed, tmp_path: Path) -> None:
    assert not np.any(feed.batch(16) == special.EDIT)
    write_edits(tmp_path / "edits" / "0.jsonl.bz2", [EDIT] * 20)
    for _ in range(400):
        batch = feed.batch(8)
        if np.any(batch == special.EDIT):
            break
        time.sleep(0.02)
    assert np.any(batch == special.EDIT)
    assert batch.shape == (8, 257)


def test_another_mix_takes_over(feed: WindowFeed) -> None:
    assert np.any(feed.batch(24) == special.FILE_SEP)
    feed.mix = Mix(path=0.0)
    for _ in range(400):
        if not np.any(feed.batch(24) == special.FILE_SEP):
            return
        time.sleep(0.02)
    pytest.fail("windows of the old mix kept coming")


def test_a_run_that_goes_on_keeps_its_beginning(tmp_path: Path) -> None:
    now = time.time()
    (tmp_path / "started").write_text(str(now - 500))
    (tmp_path / "deadline").write_text(str(now + 500))
    clock = DeadlineClock(tmp_path, DeadlineRecipe())
    assert 0.49 < clock.share_done(0) < 0.52
    (tmp_path / "deadline").write_text("")  # being rewritten
    assert 0.49 < clock.share_done(0) < 0.52


def test_a_recipe_is_what_differs_from_the_default() -> None:
    text = '{"matrix_rate": 0.01, "schedule": {"decay": 0.3}, "final": {"mix": {"cursor": 0.2}, "answer": 4}}'
    recipe = DeadlineRecipe.from_json(text, batch=32)
    assert (recipe.matrix_rate, recipe.schedule.decay, recipe.batch) == (0.01, 0.3, 32)
    assert recipe.final == Phase(Mix(cursor=0.2), answer=4)
    assert DeadlineRecipe.from_json("{}") == DeadlineRecipe()
    for wrong in ("[]", "{", '{"speed": 1}', '{"schedule": {"x": 1}}'):
        with pytest.raises(InputError, match="no recipe"):
            DeadlineRecipe.from_json(wrong)
