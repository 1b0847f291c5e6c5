"""Lessons are the prompts the program sends, with the answers it would read."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from keystroke.assist.next_edit.places import places_format
from keystroke.engine.fim import detect_fim
from keystroke.engine.tokenizer import ByteTokenizer
from keystroke_lab.adapters.dataset import chat_ml
from keystroke_lab.adapters.examples import (
    FILL,
    KEEP,
    NEW,
    NEXT,
    OWN,
    QUIET,
    REWRITE,
    PromptForms,
    fill_example,
    instruction,
    keep_example,
    next_edit_examples,
    rewrite_example,
)
from keystroke_lab.adapters.sampling import project_examples, sample_examples
from keystroke_lab.corpus.hunks import EditHunk
from keystroke_lab.corpus.trajectories import FileEdit
from keystroke_lab.draft_heads.texts import TokenText

NAMES = (
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|file_sep|>", "<|fim_pad|>",
    "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>",
)  # fmt: skip
TOKENIZER = ByteTokenizer({name: 256 + i for i, name in enumerate(NAMES)})


@pytest.fixture(scope="module")
def forms() -> PromptForms:
    places, fim = places_format(TOKENIZER), detect_fim(TOKENIZER)
    assert places is not None
    assert fim is not None
    return PromptForms(TOKENIZER, places, fim, chat_ml(TOKENIZER, places.marks.start), places.marks.end)


def an_edit(number: int = 0) -> FileEdit:
    """`old` becomes `new` in four places far from each other."""
    lines = [f"v{number}_{i} = {i}" for i in range(60)]
    hunks = []
    for at in (5, 20, 35, 50):
        lines[at] = f"w{at} = old{number}(1)"
        hunks.append(EditHunk(at, [lines[at]], [f"w{at} = new{number}(1)"]))
    return FileEdit(f"p{number}", "MIT", "1", "2", "a.py", "\n".join(lines), hunks)


def own() -> Iterator[TokenText]:
    return itertools.repeat(TokenText(np.arange(80, dtype=np.int32), 30, OWN))


def test_a_next_edit_is_answered_with_a_change_of_the_release_and_silence_with_nothing(
    forms: PromptForms,
) -> None:
    edit, rng = an_edit(), random.Random(1)
    texts = [text for _ in range(20) for text in next_edit_examples([edit], forms, rng)]
    assert {text.kind for text in texts} == {NEXT, QUIET}  # every word of the change was shown
    for text in texts:
        answer = TOKENIZER.decode(text.tokens[text.given :].tolist())
        if text.kind == QUIET:
            assert answer.startswith("0")
        else:
            assert answer[0] in "123456"
            assert any(f"w{at} = new0(1)\n" in answer for at in (5, 20, 35, 50))
            assert TOKENIZER.decode(text.tokens[: text.given].tolist()).count("+w") >= 1


def test_what_is_filled_in_comes_after_the_text_below_it(forms: PromptForms) -> None:
    source = an_edit().before
    for seed in range(20):
        text = fill_example(source, forms, random.Random(seed))
        if text is None:
            continue
        tokens = text.tokens.tolist()
        suffix, prefix, middle = (TOKENIZER.special(f"<|fim_{n}|>") for n in ("suffix", "prefix", "middle"))
        assert tokens.index(suffix) < tokens.index(prefix) < tokens.index(middle) == text.given - 1
        before = TOKENIZER.decode(tokens[tokens.index(prefix) + 1 : text.given - 1])
        assert before + TOKENIZER.decode(tokens[text.given : -1]) in source
        return
    raise AssertionError("no cut made a lesson")


def test_a_rewriting_is_asked_and_answered_as_the_editor_does(forms: PromptForms) -> None:
    found = [rewrite_example(an_edit(), forms, random.Random(seed)) for seed in range(5)]
    for text in filter(None, found):
        question = TOKENIZER.decode(text.tokens[: text.given].tolist())
        answer = TOKENIZER.decode(text.tokens[text.given :].tolist())
        assert "Rewrite only this part of a.py" in question
        assert answer.startswith("```python\n")
        assert answer.count("new0(1)") == 1
    assert any(found)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (["x = first(1)"], ["x = second(1)"], ("first", "second")),
        (["x = 1"], ["x = 1 + y"], ("`x = 1`", "`x = 1 + y`")),
        ([], ["import os"], ("Add", "import os")),
        (["import os"], [], ("Remove", "import os")),
        (["a = 1"], ["a = 1", "b = 2"], ("After `a = 1` add `b = 2`.",)),
    ],
)
def test_a_small_change_can_be_told(old: list[str], new: list[str], words: tuple[str, ...]) -> None:
    told = instruction(EditHunk(0, old, new), random.Random(0))
    assert told is not None
    assert all(word in told for word in words)


def test_an_answer_with_a_word_that_nothing_shows_is_marked_as_not_to_be_foreseen(forms: PromptForms) -> None:
    edit = an_edit()
    invented = replace(edit, hunks=[replace(h, new=[f"unheard_of_{i}()"]) for i, h in enumerate(edit.hunks)])
    for step, kind in ((edit, NEXT), (invented, NEW)):
        rng = random.Random(3)
        found = [text.kind for _ in range(20) for text in next_edit_examples([step], forms, rng)]
        assert {QUIET, kind} == set(found)


def test_what_is_to_be_kept_is_a_function_asked_for_in_chat_or_a_part_of_a_file(forms: PromptForms) -> None:
    body = '    """Whether a file is there."""\n    return os.path.exists(path)\n'
    source = f"import os\n\n\ndef there(path):\n{body}"
    found = [keep_example(source, forms, random.Random(seed)) for seed in range(60)]
    texts = [TOKENIZER.decode(text.tokens.tolist()) for text in found if text is not None]
    chats = [text for text in texts if "```python\ndef there(path):" in text]
    assert chats
    assert all("Whether a file is there." in text.split("assistant")[1] for text in chats)
    assert any(text in source for text in texts)
    assert all(text.kind == KEEP for text in found if text is not None)
    assert keep_example("x", forms, random.Random(0)) is None


def test_a_large_change_is_not_told() -> None:
    assert instruction(EditHunk(0, ["a"] * 5, ["b"] * 7), random.Random(0)) is None


def test_a_course_keeps_its_shares_and_is_the_same_again(forms: PromptForms) -> None:
    def made() -> list[TokenText]:
        projects = (project_examples([an_edit(i)], forms, f"2:{i}") for i in range(40))
        return list(sample_examples(projects, own(), 150_000))

    texts = made()
    sizes: Counter[str] = Counter()
    for text in texts:
        sizes[text.kind] += len(text.tokens)
    whole = sum(sizes.values())
    shares = {kind: sizes[kind] / whole for kind in sizes}
    assert 0.03 < shares[REWRITE] < 0.09
    assert 0.08 < shares[FILL] < 0.15
    assert 0.08 < shares[KEEP] < 0.15
    assert 0.02 < shares[OWN] < 0.07
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(texts, made(), strict=True))
