"""Edits made up from ordinary files: real edits of real texts, whose places follow from each other."""

from __future__ import annotations

import random
import re
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from ordinary_code import modules

from keystroke_lab.pretraining.documents import Mix, SourceText, token_windows
from keystroke_lab.pretraining.edit_sequences import edit_format, make_situation
from keystroke_lab.pretraining.synthetic_edits import PLACES, synthetic_edit, synthetic_edits
from keystroke_lab.tokenizer import code_tokenizer, special

ROOT = Path(__file__).parents[2]
FILES = modules()
TEXTS = list(FILES.values())
PLAIN = code_tokenizer.plain(code_tokenizer.load(ROOT / "models" / "keystroke-80m"))
FORM = edit_format(PLAIN)
WORD = re.compile(r"\w+")


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6))
def test_an_edit_leads_from_one_text_to_another_in_a_few_places(seed: int) -> None:
    rng = random.Random(seed)
    text = rng.choice(TEXTS)
    edit = synthetic_edit("p", "a.py", text, rng)
    if edit is None:
        return
    assert PLACES[0] <= len(edit.hunks) <= PLACES[1]
    before, after = edit.before, edit.after()
    assert before != after
    assert before in text or after in text
    lines = before.split("\n")
    ends = [0]
    for hunk in edit.hunks:
        assert lines[hunk.start_line : hunk.start_line + len(hunk.old)] == hunk.old
        assert hunk.start_line > ends[-1] or ends == [0]  # hunks do not touch each other
        ends.append(hunk.start_line + len(hunk.old))


def test_what_was_done_once_is_done_again() -> None:
    rng = random.Random(5)
    found = [e for _ in range(60) for e in synthetic_edits("p", "a.py", rng.choice(TEXTS), rng)]
    assert len(found) > 95
    alike = 0
    for edit in found:
        words = [
            set(WORD.findall("\n".join(h.old))) ^ set(WORD.findall("\n".join(h.new))) for h in edit.hunks
        ]
        alike += bool(set.intersection(*words))
    assert alike > 0.8 * len(found)


def test_the_same_seed_makes_the_same_edits() -> None:
    first, second = (
        [e.hunks for e in synthetic_edits("p", "a", TEXTS[0], random.Random(3))] for _ in range(2)
    )
    assert first == second


def test_they_are_asked_about_like_real_ones() -> None:
    rng = random.Random(2)
    edits = [e for text in TEXTS for e in synthetic_edits("p", "a.py", text, rng)]
    asked = [q for e in edits for _ in range(4) if (q := make_situation([e], FORM, rng)) is not None]
    assert any(q.answer is None for q in asked)
    changed = [q for q in asked if q.answer is not None]
    assert changed
    for question in changed:
        prompt = question.prompt(FORM)
        said = FORM.encode_answer(prompt.lines, question.answer)
        assert FORM.parse(prompt, said) == list(question.answer or ())


def test_a_mix_may_hold_some() -> None:
    sources = [SourceText("p", name, text) for name, text in FILES.items()]
    made = token_windows(sources, PLAIN, Mix(fim=0.0, made=0.5), 1025, seed=0)
    assert (made == special.EDIT_AFTER).any()
    assert (made == special.NUMBERS[0]).any()
    assert not (token_windows(sources, PLAIN, Mix(fim=0.0), 1025, seed=0) == special.EDIT_AFTER).any()
