"""Prompts made for Zeta 2 and Sweep: read as clients write them, answered as they read."""

from __future__ import annotations

import random
import re
from itertools import pairwise

import pytest

from keystroke.assist.next_edit.foreign import LARGEST, EditorPrompt, PromptFormat, parse_prompt
from keystroke.assist.next_edit.prompt import RecentChange

ABOVE = "import os\n\n\n"
WINDOW = "def area(width, height):\n    return width * height\n\n\nprint(area(2, 3))\n"
BELOW = "\n\ndef last():\n    pass\n"
CURSOR = WINDOW.index(" * height")
NEW = WINDOW.replace("width * height", "width * height * 2").replace("(2, 3)", "(2, 4)")
OLD = "def area(w, height):\n"


def marked(mark: str, window: str = WINDOW) -> str:
    return window[:CURSOR] + mark + window[CURSOR:]


def diff(path: str = "src/area.py") -> str:
    return (
        f"--- a/{path}\n+++ b/{path}\n@@ -4,2 +4,2 @@\n-{OLD}+def area(width, height):\n"
        "     return width * height\n"
    )


def seed(window: str = WINDOW, history: str = "", other: str = "") -> str:
    """Zeta 2 as Zed and cursortab write it: what comes below first."""
    section = f"<filename>edit_history\n{history}\n" if history else ""
    return (
        f"<[fim-suffix]>{BELOW}<[fim-prefix]>{other}{section}<filename>src/area.py\n{ABOVE}"
        f"<<<<<<< CURRENT\n{marked('<|user_cursor|>', window)}=======\n<[fim-middle]>"
    )


def merged(begun: str = "") -> str:
    """The same with the tokens of Qwen, the window before what comes below."""
    return (
        f"<|file_sep|>src/other.py\nx = 1\n<|file_sep|>edit history\n{diff()}<|file_sep|>src/area.py\n"
        f"<|fim_prefix|>{ABOVE}<<<<<<< CURRENT\n{marked('<|user_cursor|>')}=======\n"
        f"<|fim_suffix|>{BELOW}<|fim_middle|>{begun}"
    )


def middle_last() -> str:
    return (
        f"<|file_sep|>edit history\n{diff()}<|file_sep|>src/area.py\n<|fim_prefix|>{ABOVE}"
        f"<|fim_suffix|>{BELOW}<|fim_middle|><<<<<<< CURRENT\n{marked('<|user_cursor|>')}=======\n"
    )


def ordered() -> str:
    return (
        f"<|file_sep|>edit history\n{diff()}<|file_sep|>src/area.py\n<|fim_prefix|>\n{ABOVE}"
        f"<|fim_middle|>current\n{marked('<|user_cursor|>')}<|fim_suffix|>\n{BELOW}<|fim_middle|>updated\n"
    )


def blocks(*, relative: bool = False) -> str:
    """Zeta 2.1: the window in blocks."""
    at = WINDOW.index("print")
    first, second = marked("<|user_cursor|>", WINDOW[:at]), WINDOW[at:]
    one, two, three = (
        ("<|marker-0|>", "<|marker+1|>", "<|marker+2|>")
        if relative
        else ("<|marker_1|>", "<|marker_2|>", "<|marker_3|>")
    )
    return (
        f"<[fim-suffix]>{BELOW}<[fim-prefix]><filename>edit_history\n{diff()}\n<filename>src/area.py\n{ABOVE}"
        f"{one}{first}{two}{second}{three}<[fim-middle]>"
    )


def applied(answer: str, *, relative: bool = False) -> str:
    """What a client of Zeta 2.1 makes of an answer: first and last mark name the blocks it replaces."""
    tags = list(re.finditer(r"<\|marker[_+-]?(\d+)\|>", answer))
    offsets = [0, WINDOW.index("print"), len(WINDOW)]
    numbers = [int(tag[1]) - (0 if relative else 1) for tag in tags]
    assert len(tags) >= 2
    if numbers[0] == numbers[-1]:
        return WINDOW
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
    new = "".join(answer[a.end() : b.start()] for a, b in pairwise(tags))
    return WINDOW[: offsets[numbers[0]]] + new + WINDOW[offsets[numbers[-1]] :]


def sweep(begun: str = "", *, wide: bool = True, history: bool = True, original: str = WINDOW) -> str:
    """Sweep as cursortab writes it: texts without their last line end."""
    text, cursor = WINDOW.rstrip("\n"), marked("<|cursor|>").rstrip("\n")
    name = "src/area.py:4:8"
    parts = [f"<|file_sep|>src/area.py\n{ABOVE}{WINDOW}{BELOW}\n"] if wide else []
    if history:
        parts.append(f"<|file_sep|>src/area.py.diff\noriginal:\n{OLD}updated:\ndef area(width, height):\n")
    parts += [
        "<|file_sep|>context/diagnostics\nLine 5: [pyflakes] undefined\n",
        f"<|file_sep|>original/{name}\n{original.rstrip()}\n",
        f"<|file_sep|>current/{name}\n{cursor}\n",
        f"<|file_sep|>updated/{name}\n{begun}",
    ]
    assert begun == text[: len(begun)]
    return "".join(parts)


ZETA = {
    "seed": seed(history=diff(), other="<filename>a.py\ny = 2\n\n"),
    "merged": merged(),
    "middle last": middle_last(),
    "ordered": ordered(),
}


@pytest.mark.parametrize("name", ZETA)
def test_every_layout_of_zeta_2_says_the_same(name: str) -> None:
    asked = parse_prompt(ZETA[name])
    assert asked is not None
    assert (asked.format, asked.path) == (PromptFormat.ZETA, "src/area.py")
    assert (asked.window, asked.cursor) == (WINDOW, CURSOR)
    assert (asked.above.strip(), asked.below.strip()) == (ABOVE.strip(), BELOW.strip())
    [change] = asked.history
    assert change == RecentChange(
        "src/area.py",
        f"{OLD}    return width * height\n",
        "def area(width, height):\n    return width * height\n",
    )
    assert asked.text[asked.offset :].startswith(" * height")
    assert asked.format_answer(NEW) == NEW
    assert asked.format_answer(WINDOW) == WINDOW


@pytest.mark.parametrize("relative", [False, True])
def test_an_answer_in_blocks_leads_to_the_new_window(relative: bool) -> None:
    asked = parse_prompt(blocks(relative=relative))
    assert asked is not None
    assert (asked.format, asked.window, asked.cursor) == (PromptFormat.ZETA_BLOCKS, WINDOW, CURSOR)
    assert (asked.above, asked.below) == (ABOVE, BELOW)
    assert applied(asked.format_answer(WINDOW), relative=relative) == WINDOW
    first_only = WINDOW.replace("width * height", "height")
    second_only = WINDOW.replace("(2, 3)", "(5)")
    for new in (NEW, first_only, second_only, WINDOW + "more\n", "x\n" + WINDOW, ""):
        assert applied(asked.format_answer(new), relative=relative) == new


def test_what_sweep_asks_is_read_with_the_file_around_it() -> None:
    asked = parse_prompt(sweep())
    assert asked is not None
    assert (asked.format, asked.path, asked.cursor) == (PromptFormat.SWEEP, "src/area.py", CURSOR)
    assert (asked.above, asked.window) == (ABOVE, WINDOW.rstrip("\n"))
    assert asked.text.rstrip("\n") == (ABOVE + WINDOW + BELOW).rstrip("\n")
    assert asked.history == (RecentChange("src/area.py", OLD, "def area(width, height):\n"),)
    assert asked.format_answer(NEW.rstrip("\n")) == NEW.rstrip("\n")


def test_an_answer_goes_on_from_what_the_prompt_began_it_with() -> None:
    begun = WINDOW.split("\n", 1)[0] + "\n"
    for prompt, end in ((sweep(begun), ""), (merged(begun), "\n")):
        asked = parse_prompt(prompt)
        assert asked is not None
        assert asked.answer_start == begun
        new = NEW.rstrip("\n") + end
        assert begun + asked.format_answer(new) == new
        # A window that would contradict the beginning stays as it was.
        assert begun + asked.format_answer("something else") == asked.window


def test_the_last_change_is_taken_back_to_know_what_was_before() -> None:
    for prompt in (sweep(), *ZETA.values(), blocks()):
        asked = parse_prompt(prompt)
        assert asked is not None
        last = asked.last_change()
        assert last is not None
        assert OLD in last[0].before
        assert last[0].after == asked.text
    without = parse_prompt(sweep(history=False))
    assert without is not None
    assert without.last_change() is None
    told = parse_prompt(sweep(history=False, original=WINDOW.replace("width, height", "w, height")))
    assert told is not None
    assert told.last_change() is not None


def test_a_window_without_the_file_around_it_is_enough() -> None:
    asked = parse_prompt(sweep(wide=False))
    assert asked is not None
    assert (asked.above, asked.below) == ("", "")


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        "def f():\n",
        "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>",  # plain fill-in
        "<|file_sep|>a.py\nx\n<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>",
        "<[fim-suffix]>b<[fim-prefix]>a<[fim-middle]>",
        "<|user_cursor|>",
        "<|file_sep|>updated/",
        "<|file_sep|>updated/a.py\n",
        "<|file_sep|>current/a.py\nx\n<|file_sep|>updated/b.py\n",
        "hello <|file_sep|>current/a.py\nx\n<|file_sep|>updated/a.py\n",
        "<|file_sep|>current/a.py\nx<|cursor|>y<|cursor|>\n<|file_sep|>updated/a.py\n",
        "<|file_sep|>current/a.py\nx\n<|file_sep|>updated/a.py\nz",
        seed().replace("=======\n", ""),
        seed().replace("<<<<<<< CURRENT\n", ""),
        seed().replace("<filename>src/area.py\n", ""),
        seed().replace("<|user_cursor|>", ""),
        seed().replace("<|user_cursor|>", "<|user_cursor|><|user_cursor|>"),
        merged("something else"),
        blocks().replace("<|marker_3|>", "").replace("<|marker_2|>", ""),
        blocks() + "more",
        blocks().replace("<|marker_1|>", "<<<<<<< CURRENT\n<|marker_1|>"),
        sweep() + " " * LARGEST,
    ],
)
def test_what_is_not_understood_whole_is_not_recognised(prompt: str) -> None:
    assert parse_prompt(prompt) is None


def test_torn_prompts_never_raise_and_never_lose_text() -> None:
    rng = random.Random(3)
    whole = [sweep(), blocks(), *ZETA.values()]
    pieces = re.findall(r"<[^>\n]{1,20}>|[^<\n]*\n|.", "".join(whole))
    for _ in range(3000):
        prompt = rng.choice(whole)
        kind = rng.random()
        if kind < 0.4:
            at = rng.randrange(len(prompt))
            prompt = prompt[:at] + prompt[at + rng.randrange(60) :]
        elif kind < 0.7:
            at = rng.randrange(len(prompt))
            prompt = prompt[:at] + rng.choice(pieces) + prompt[at:]
        else:
            prompt = "".join(rng.choices(pieces, k=rng.randrange(40)))
        asked = parse_prompt(prompt)
        if asked is None:
            continue
        asked.last_change()
        assert isinstance(asked, EditorPrompt)
        assert 0 <= asked.cursor <= len(asked.window)
        if asked.format is not PromptFormat.ZETA_BLOCKS:
            assert asked.answer_start + asked.format_answer(asked.window) == asked.window
        else:
            assert asked.format_answer(asked.window)
            asked.format_answer(asked.window + "x\n")
