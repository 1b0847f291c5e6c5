"""A completion: what the model sees, where its answer ends, and what is kept of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keystroke.assist.completion import Ending, build_prompt, complete, trim_text
from keystroke.engine.base import Interrupt
from keystroke.engine.echo import EOS, SPECIAL, EchoEngine
from keystroke.engine.fim import FimTemplate
from keystroke.engine.generation import Finish
from keystroke.engine.model import Model
from keystroke.engine.tokenizer.byte_tokens import ByteTokenizer
from keystroke.errors import ContextOverflow, InputError

FIM = {"<fim_prefix>": 259, "<fim_suffix>": 260, "<fim_middle>": 261}


def model(
    script: Callable[[str], str] | None = None, *, fim: FimTemplate | None = None, context_length: int = 4096
) -> Model:
    tokenizer = ByteTokenizer({**SPECIAL, **FIM}, eos=EOS, vocab_size=320)
    return Model("echo", EchoEngine(script, context_length=context_length), tokenizer, fim=fim)


PSM = FimTemplate("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
SPM = FimTemplate("<fim_prefix>", "<fim_suffix>", "<fim_middle>", order="spm")


def shown(chosen: Model, tokens: tuple[int, ...]) -> str:
    return b"".join(chosen.tokenizer.token_bytes(t) for t in tokens).decode()


class TestEnding:
    @pytest.mark.parametrize(
        ("prefix", "suffix", "lines", "answer", "kept"),
        [
            ("x = ", "", 1, "1\ny = 2\n", "1"),
            ("x = ", "", 2, "1\ny = 2\nz = 3", "1\ny = 2"),
            # a block: everything deeper than the line that opened it, and its closing bracket
            ("def f(a):\n", "", 0, "    b = a\n    return b\n\nprint(1)\n", "    b = a\n    return b"),
            ("def f(a", "", 0, "):\n    return a\nprint(1)\n", "):\n    return a"),
            ("def f():\n    if x", "", 0, ":\n        y()\n    z()\n", ":\n        y()"),
            ("if (x) ", "", 0, "{\n  y();\n}\nz();\n", "{\n  y();\n}"),
            ("f(", "", 0, "\n    1,\n)\ng()\n", "\n    1,\n)"),
            ("call(() => ", "", 0, "{\n  y();\n});\nz();\n", "{\n  y();\n});"),
            # statements: to the first blank line or the first line further left
            ("    a = 1", "", 0, "\n    b = 2\n\n    c = 3\n", "\n    b = 2"),
            ("    a = 1", "", 0, "\n    b = 2\nreturn\n", "\n    b = 2"),
            ("\tif x:\n", "", 0, "\t\ty()\n\tz()\n", "\t\ty()"),
            # inside a line only that line is completed, and what stands to the right is not said again
            ("print(", ")", 0, "x)\ny", "x"),
            ("foo(a, ", ", c)", 0, "b, c)\n", "b"),
            ("foo(", ")", 0, "1, 2\n", "1, 2"),
            # what follows below is not said again
            ("a = 1\n", "\nb = 2\n", 0, "b = 2\n", ""),
            ("def f():\n    ", "\n    return x\n", 0, "x = 1\n    return x\n", "x = 1"),
            ("if (x) {\n  ", "\n}\n", 0, "y();\n}\nz();\n", "y();"),
            ("x", "", 0, "   \n\n", ""),
            # a fence is not code
            ("def f():\n", "", 0, "    return 1\n```\nThis returns 1", "    return 1"),
        ],
    )
    def test_what_is_kept_of_an_answer(
        self, prefix: str, suffix: str, lines: int, answer: str, kept: str
    ) -> None:
        assert Ending.at(prefix, suffix, lines).cut(answer, final=True).text == kept

    @given(
        st.text("ab \n:{}()\t", max_size=40),
        st.text("ab \n)}", max_size=20),
        st.integers(0, 3),
        st.text("ab \n:{}()\t", max_size=60),
        st.integers(0, 60),
    )
    def test_a_decided_ending_does_not_change_with_more_text(
        self, prefix: str, suffix: str, lines: int, answer: str, at: int
    ) -> None:
        ending = Ending.at(prefix, suffix, lines)
        early = ending.cut(answer[:at])
        if early.done:
            assert ending.cut(answer) == early
            assert ending.cut(answer, final=True) == early

    @given(st.text("ab \n:{}", max_size=60), st.integers(1, 4))
    def test_never_more_lines_than_asked_for(self, answer: str, lines: int) -> None:
        assert Ending.at("x = ", "", lines).cut(answer, final=True).text.count("\n") < lines

    def test_a_model_that_never_ends_a_block_is_ended(self) -> None:
        assert Ending.at("def f():\n", "").cut("    x\n" * 500).done


class TestPrompt:
    def test_both_sides_go_between_the_models_own_marks_in_its_order(self) -> None:
        for fim, text in (
            (PSM, "<fim_prefix>A\nB<fim_suffix>C\n<fim_middle>"),
            (SPM, "<fim_suffix>C\n<fim_prefix>A\nB<fim_middle>"),
        ):
            chosen = model(fim=fim)
            prompt = build_prompt(chosen, "A\nB", "C\n", budget=100, max_tokens=10)
            assert shown(chosen, prompt.tokens) == text

    def test_text_that_looks_like_a_mark_stays_text(self) -> None:
        prompt = build_prompt(model(fim=PSM), "<fim_middle>", "x", budget=100, max_tokens=10)
        assert prompt.tokens.count(261) == 1

    def test_without_marks_only_the_text_before_counts_and_its_last_spaces_are_held_back(self) -> None:
        chosen = model()
        prompt = build_prompt(chosen, "def f():\n    ", "after", budget=100, max_tokens=10)
        assert (shown(chosen, prompt.tokens), prompt.repeated) == ("def f():\n", "    ")

    def test_what_is_farthest_from_the_cursor_goes_first_and_lines_stay_whole(self) -> None:
        chosen = model(fim=PSM)
        before = "".join(f"line {n:03}\n" for n in range(100))
        after = "".join(f"next {n:03}\n" for n in range(100))
        prompt = build_prompt(chosen, before, after, budget=108, max_tokens=10)
        text = shown(chosen, prompt.tokens)
        assert text == ("<fim_prefix>" + before[-81:] + "<fim_suffix>" + after[:18] + "<fim_middle>")
        assert prompt.trimmed

    def test_room_that_one_side_leaves_goes_to_the_other(self) -> None:
        chosen = model(fim=PSM)
        after = "".join(f"next {n:03}\n" for n in range(100))
        prompt = build_prompt(chosen, "x", after, budget=100, max_tokens=10)
        assert shown(chosen, prompt.tokens).count("next") == 10

    def test_a_line_longer_than_the_room_is_cut_from_its_far_end(self) -> None:
        chosen = model()
        prompt = build_prompt(chosen, "a" * 500 + "end", "", budget=28, max_tokens=10)
        assert shown(chosen, prompt.tokens) == "a" * 17 + "end"

    @given(st.text("ab\n é", max_size=300), st.text("cd\n ü", max_size=300), st.integers(16, 120))
    def test_a_prompt_never_exceeds_its_budget(self, before: str, after: str, budget: int) -> None:
        for fim in (None, PSM):
            try:
                prompt = build_prompt(model(fim=fim), before, after, budget=budget, max_tokens=10)
            except InputError:
                assert not before.strip()
                continue
            assert 0 < len(prompt.tokens) <= budget

    def test_an_answer_that_fills_the_context_leaves_no_room(self) -> None:
        with pytest.raises(ContextOverflow, match="ask for fewer tokens"):
            build_prompt(model(context_length=128), "x", "", budget=100, max_tokens=128)

    def test_nothing_to_go_on_from_is_refused(self) -> None:
        for chosen, after in ((model(), "text"), (model(fim=PSM), " \n")):
            with pytest.raises(InputError, match="no text before the cursor"):
                build_prompt(chosen, "  ", after, budget=100, max_tokens=10)

    @given(st.text("ab\n", max_size=300), st.text("cd\n", max_size=300), st.integers(4, 40))
    def test_text_cut_without_a_tokenizer_touches_the_cursor_on_both_sides(
        self, before: str, after: str, budget: int
    ) -> None:
        left, right = trim_text(before, after, budget=budget)
        assert before.endswith(left)
        assert after.startswith(right)
        assert len(left) + len(right) <= budget * 3


class TestComplete:
    def test_the_answer_ends_as_soon_as_its_ending_is_decided(self) -> None:
        chosen = model(lambda _prompt: "1\n" + "y" * 1000)
        with chosen.engine.session() as session:
            done = complete(chosen, session, "x =", lines=1)
        assert (done.text, done.finish) == ("1", Finish.STOP)
        assert done.stats is not None
        assert done.stats.tokens == 2

    def test_spaces_held_back_are_not_said_twice(self) -> None:
        chosen = model(lambda _prompt: "    return 1\n\n")
        with chosen.engine.session() as session:
            assert complete(chosen, session, "def f():\n    ").text == "return 1"
            assert complete(chosen, session, "def f():\n  ").text == "  return 1"

    def test_a_model_that_omits_held_spaces_is_taken_as_it_is(self) -> None:
        chosen = model(lambda _prompt: "5\n")
        with chosen.engine.session() as session:
            assert complete(chosen, session, "x =  ", lines=1).text == "5"

    def test_a_mark_that_ends_the_middle_ends_the_completion(self) -> None:
        fim = FimTemplate("<fim_prefix>", "<fim_suffix>", "<fim_middle>", stops=frozenset({ord("$")}))
        chosen = model(lambda _prompt: "ab$cd", fim=fim)
        with chosen.engine.session() as session:
            assert complete(chosen, session, "x(", "y\nz").text.startswith("ab")
            assert "cd" not in complete(chosen, session, "x(", "y\nz").text

    @pytest.mark.parametrize(("fim", "again"), [(None, "    "), (PSM, " ")])
    def test_a_half_word_is_said_again_and_not_inserted_twice(
        self, fim: FimTemplate | None, again: str
    ) -> None:
        chosen = model(lambda prompt: "" if "retu" in prompt else f"{again}return x\n", fim=fim)
        with chosen.engine.session() as session:
            assert complete(chosen, session, "def f(x):\n    retu", "", lines=1).text == "rn x"
            assert complete(chosen, session, "retu", "", lines=1).text == ""  # nothing else to go on from

    def test_an_interrupt_ends_it_with_what_it_has(self) -> None:
        interrupt = Interrupt()
        interrupt.set()
        chosen = model(lambda _prompt: "abc")
        with chosen.engine.session() as session:
            done = complete(chosen, session, "x", interrupt=interrupt)
        assert (done.text, done.finish) == ("", Finish.INTERRUPTED)

    def test_the_longest_answer_is_the_one_asked_for(self) -> None:
        chosen = model(lambda _prompt: "a" * 500)
        with chosen.engine.session() as session:
            done = complete(chosen, session, "x", max_tokens=7)
        assert (done.text, done.finish) == ("a" * 7, Finish.LENGTH)
