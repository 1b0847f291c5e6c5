"""Completion of a live buffer: the prompt that only grows, the gate, the cache, and what the tree decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keystroke.analysis.rules import ProjectRules
from keystroke.analysis.syntax import adds_errors, language_of, opens_block
from keystroke.assist.completion import (
    Extent,
    LiveCompletion,
    ShownCompletion,
    SuggestionStream,
    WithheldCompletion,
    WithheldReason,
    context_budget,
)
from keystroke.assist.completion.cache import CachedSuggestion, SuggestionCache
from keystroke.assist.completion.context import gather_context
from keystroke.assist.completion.extent import extent_at
from keystroke.assist.completion.gate import Candidate, DismissedSuggestions, TypingRhythm, find_reason
from keystroke.assist.completion.window import ContextFile, PromptWindow
from keystroke.config import AssistSettings
from keystroke.engine.echo import EOS, SPECIAL, EchoEngine
from keystroke.engine.generation import Generation
from keystroke.engine.model import Model
from keystroke.engine.prefix import common_prefix
from keystroke.engine.speculative import FileDrafter
from keystroke.engine.templates import FimTemplate
from keystroke.engine.tokenizer.byte_tokens import ByteTokenizer
from keystroke.text import Edit, apply_edits

FIM = {"<fim_prefix>": 259, "<fim_suffix>": 260, "<fim_middle>": 261, "<sep>": 262}
SPM = FimTemplate("<fim_prefix>", "<fim_suffix>", "<fim_middle>", order="spm", file_sep="<sep>")


def model(script: Callable[[str], str] | None = None, *, fim: FimTemplate | None = SPM) -> Model:
    tokenizer = ByteTokenizer({**SPECIAL, **FIM}, eos=EOS, vocab_size=320)
    return Model("echo", EchoEngine(script), tokenizer, fim=fim)


def shown(chosen: Model, tokens: list[int]) -> str:
    return b"".join(chosen.tokenizer.token_bytes(t) for t in tokens).decode()


def run(chosen: Model, stream: SuggestionStream, draft: str = "") -> None:
    drafter = FileDrafter(chosen.tokenizer.encode(draft)) if draft else None
    with chosen.engine.session() as session:
        for chunk in Generation(chosen, session, stream.prompt.tokens, stream.params(), drafter=drafter):
            stream.feed(chunk)
            if stream.done:
                return


@pytest.mark.parametrize("draft", ["compute(width)\n", "compute(height)\n", "compute(width) + 1"])
def test_what_is_kept_of_an_answer_does_not_depend_on_how_many_tokens_a_step_has(draft: str) -> None:
    chosen = model(lambda _: "compute(width)\n")
    completion = LiveCompletion(chosen, AssistSettings(), budget=200)
    plain, drafted = completion.begin("x = ", 4), completion.begin("x = ", 4)
    run(chosen, plain)
    run(chosen, drafted, draft)
    assert plain.to_cached(plain.text) == drafted.to_cached(drafted.text)
    assert len(set(drafted.to_cached(drafted.text).ends)) == len("compute(width)")


@pytest.mark.parametrize(
    ("told", "rate", "tokens"),
    [(0, None, 768), (0, 50.0, 512), (0, 1000.5, 1000), (0, 1e6, 2048), (300, 1e6, 300)],
)
def test_the_context_is_what_the_settings_say_or_the_machine_reads_in_a_second(
    told: int, rate: float | None, tokens: int
) -> None:
    assert context_budget(AssistSettings(context_tokens=told), rate) == tokens


def test_the_context_grows_where_the_machine_is_fast_and_never_shrinks() -> None:
    chosen = model()
    completion = LiveCompletion(chosen, AssistSettings(), budget=100)
    text = "".join(f"v{n} = {n}\n" for n in range(80))
    small = len(completion.warm_up_prompt(text, len(text)).tokens)
    assert not completion.grow(149)
    assert not completion.grow(50)
    assert completion.grow(400)
    completion.warm_up_prompt(text, 0)  # another place: the prompt is arranged anew
    assert len(completion.warm_up_prompt(text, len(text)).tokens) > 1.5 * small


class TestWindow:
    def test_the_suffix_stands_before_the_prefix(self) -> None:
        chosen = model()
        prompt = PromptWindow(chosen, 256).prompt("above = 1\nhere(\nbelow = 2\n", 15)
        assert shown(chosen, prompt.tokens) == (
            "<fim_suffix>\nbelow = 2\n<fim_prefix>above = 1\nhere(<fim_middle>"
        )

    @pytest.mark.parametrize("fim", [None, SPM])
    @pytest.mark.parametrize(
        ("before", "half"),
        [
            ("    retu", " retu"),
            ("self.hei", ".hei"),
            ("my_na", "_na"),
            ("x\nnam", "nam"),
            ("f(größ", "(größ"),
            ("x1", ""),
            ("one\n", ""),
            ("x = ", ""),
            ("", ""),
        ],
    )
    def test_a_half_word_is_left_to_the_model_to_say_again(
        self, before: str, half: str, fim: FimTemplate | None
    ) -> None:
        chosen = model(fim=fim)
        prompt = PromptWindow(chosen, 256).prompt(before, len(before))
        assert prompt.begin == half
        assert prompt.repeated.endswith(half)
        assert before.endswith(prompt.repeated)
        assert f"{half}<fim_middle>" not in shown(chosen, prompt.tokens) or not half

    def test_typing_on_in_a_word_leaves_the_prompt_as_it_is(self) -> None:
        window = PromptWindow(model(), 256)
        prompts = [
            window.prompt(f"x = 1\nreturn {word}\n", 13 + len(word)).tokens for word in ("v", "va", "val")
        ]
        assert prompts[0] == prompts[1] == prompts[2]

    def test_context_and_path_stand_in_front(self) -> None:
        chosen = model()
        window = PromptWindow(chosen, 1024, "pkg/a.py")
        assert window.set_context([ContextFile("pkg/b.py", "def b(): ...")])
        assert not window.set_context([ContextFile("pkg/b.py", "def b(): ...")])
        text = shown(chosen, window.prompt("x = ", 4).tokens)
        assert text.startswith("<sep>pkg/b.py\ndef b(): ...\n<sep>pkg/a.py\n<fim_suffix>")

    def test_brackets_that_the_editor_adds_do_not_move_the_suffix(self) -> None:
        chosen = model()
        window = PromptWindow(chosen, 256)
        before = window.prompt("f\nbelow\n", 1).tokens
        after = window.prompt("f()\nbelow\n", 2).tokens
        assert common_prefix(before, after) >= len(before) - 1

    def test_what_stands_right_of_the_cursor_is_part_of_the_suffix(self) -> None:
        chosen = model()
        text = shown(chosen, PromptWindow(chosen, 256).prompt("f(a) + g(b)\nbelow\n", 4).tokens)
        assert text.startswith("<fim_suffix> + g(b)\nbelow\n<fim_prefix>f(a)")

    def test_an_edit_far_below_waits_for_a_pause(self) -> None:
        chosen = model()
        window = PromptWindow(chosen, 4096)
        below = "".join(f"line {n}\n" for n in range(60))
        text = f"x = \n{below}"
        first = window.prompt(text, 4).tokens
        changed = text[:-8] + "CHANGED\n"
        assert window.prompt(changed, 4).tokens == first
        assert window.lagging
        assert "CHANGED" in shown(chosen, window.prompt(changed, 4, refresh=True).tokens)
        assert not window.lagging

    def test_the_anchor_moves_rarely(self) -> None:
        chosen = model()
        window = PromptWindow(chosen, 400)
        text, anchors = "", []
        for number in range(80):
            text += f"def f{number}():\n    return {number}\n\n"
            window.prompt(text, len(text))
            anchors.append(window.anchor)
        moves = len(set(anchors))
        assert 2 <= moves <= 20
        assert all(at == 0 or text[at - 1] == "\n" for at in anchors)

    @given(
        st.lists(
            st.tuples(st.integers(0, 400), st.integers(0, 12), st.text("ab\n (é", max_size=12)), max_size=25
        ),
        st.sampled_from([None, SPM]),
    )
    def test_after_any_edits_the_prefix_is_the_text_up_to_the_cursor(
        self, edits: list[tuple[int, int, str]], fim: FimTemplate | None
    ) -> None:
        chosen = model(fim=fim)
        window = PromptWindow(chosen, 160)
        text = "def one():\n    return 1\n\n" * 8
        for start, size, new in edits:
            at = min(start, len(text))
            edit = Edit(at, min(len(text), at + size), new)
            text = apply_edits(text, [edit])
            window.apply_edits([edit])
            cursor = at + len(new)
            prompt = window.prompt(text, cursor)
            said = shown(chosen, prompt.tokens).removeprefix("<bos>")
            if fim is not None:
                said = said.partition("<fim_prefix>")[2].removesuffix("<fim_middle>")
            said += prompt.repeated
            assert text[:cursor].endswith(said) or said == "\n" + prompt.repeated
            assert len(prompt.tokens) <= 170


class TestExtent:
    @pytest.mark.parametrize(
        ("text", "language", "extent"),
        [
            ("x = |", "python", Extent.REST),
            ("x = 1\n|", "python", Extent.LINE),
            ("def f():|", "python", Extent.BLOCK),
            ("def f():\n    |", "python", Extent.BLOCK),
            ("def f():\n    |\n    return 1\n", "python", Extent.LINE),
            ("x = {'a':|", "python", Extent.REST),
            ("x: |", "python", Extent.REST),
            ("s = 'if x:|", "python", Extent.REST),
            ("# note:|", "python", Extent.REST),
            ("f(|) + g(y)", "python", Extent.REST),
            ("if (x) {|", "javascript", Extent.BLOCK),
            ("const a = {|", "javascript", Extent.REST),
            ("int main() {\n  |\n}", "c", Extent.BLOCK),
            ("any line {|", None, Extent.BLOCK),
        ],
    )
    def test_a_block_is_offered_where_one_was_opened(
        self, text: str, language: str | None, extent: Extent
    ) -> None:
        cursor = text.index("|")
        assert extent_at(text.replace("|", ""), cursor, language) is extent

    def test_the_opener_is_found_in_long_files_too(self) -> None:
        text = "x = 1\n" * 5000 + "def f(a):"
        assert opens_block(text, len(text), "python")

    @pytest.mark.parametrize(
        ("text", "inserted", "broken"),
        [("x = (1", " + 2)", False), ("x = 1", ")", True), ("f(", "a, b)", False), ("x = ", "[1, 2", True)],
    )
    def test_a_suggestion_may_not_add_errors(self, text: str, inserted: str, broken: bool) -> None:
        assert adds_errors(text + "\ny = 2\n", len(text), inserted, "python") is broken

    def test_languages_have_many_names(self) -> None:
        assert language_of("a/b.tsx") == "tsx"
        assert language_of("a.unknown", "typescriptreact") == "tsx"
        assert language_of("Makefile") is None
        assert language_of(None) is None


class TestGate:
    def judged(self, line: str, inserted: str, sure: float, **more: bool) -> WithheldReason | None:
        return find_reason(
            Candidate(line, len(line), inserted, sure, **more), "balanced", DismissedSuggestions()
        )

    def test_reasons_have_their_order(self) -> None:
        assert self.judged("x = ", "1", 0.9) is None
        assert self.judged("x = ", "  ", 0.9) is WithheldReason.EMPTY
        assert self.judged("    ", "x = 1", 0.9) is WithheldReason.WOULD_INDENT
        assert self.judged("x = ", "1", 0.3) is WithheldReason.LOW_CONFIDENCE
        assert self.judged("x = ", "1", 0.82, fast=True) is WithheldReason.TYPING_FAST
        assert self.judged("x = ", "db/models/" * 4, 0.9) is WithheldReason.LOOPS
        assert self.judged("x = ", "-" * 60 + "1, 2, 3, 4, 5", 0.9) is None
        assert self.judged("    ", "x = 1", 0.1, invoked=True) is None

    def test_a_line_over_the_projects_limit_is_not_shown(self) -> None:
        assert find_reason(
            Candidate("x = ", 4, "some(long, enough, call)", 0.9, max_line=20),
            "eager",
            DismissedSuggestions(),
        ) is (WithheldReason.LINE_TOO_LONG)

    @pytest.mark.parametrize(("eagerness", "least"), [("calm", 0.92), ("balanced", 0.8), ("eager", 0.6)])
    def test_eagerness_is_a_threshold(self, eagerness: str, least: float) -> None:
        assert find_reason(Candidate("x = ", 4, "1", least), eagerness, DismissedSuggestions()) is None
        assert find_reason(Candidate("x = ", 4, "1", least - 0.01), eagerness, DismissedSuggestions()) is (
            WithheldReason.LOW_CONFIDENCE
        )

    def test_what_is_on_the_screen_does_not_vanish_while_it_is_typed(self) -> None:
        unsure = Candidate("x = s", 5, "elf.y", 0.1, fast=True)
        assert find_reason(unsure, "calm", DismissedSuggestions()) is WithheldReason.LOW_CONFIDENCE
        assert find_reason(replace(unsure, being_typed=True), "calm", DismissedSuggestions()) is None
        assert (
            find_reason(replace(unsure, being_typed=True, inserted=""), "calm", DismissedSuggestions())
            is WithheldReason.EMPTY
        )

    def test_a_burst_is_fast_and_a_pause_ends_it(self) -> None:
        rhythm = TypingRhythm()
        for now in (0.0, 0.05, 0.1, 0.15):
            rhythm.record_key(now)
        assert rhythm.is_fast()
        rhythm.record_key(3.0)
        assert not rhythm.is_fast()

    def test_what_was_turned_down_stays_so_while_its_line_grows(self) -> None:
        dismissed = DismissedSuggestions()
        dismissed.add("x = ", "compute(y)")
        assert ("x = ", "compute(y)") in dismissed
        assert ("x = comp", "ute(y)") in dismissed
        assert ("z = ", "compute(y)") not in dismissed


class TestSuggestionCache:
    @given(st.text("ab(\n ", max_size=400), st.text("ab(\n ", min_size=1, max_size=60), st.data())
    def test_typing_what_it_says_finds_what_is_left(
        self, before: str, text: str, data: st.DataObject
    ) -> None:
        cache = SuggestionCache()
        cache.put(before, "\nbelow", CachedSuggestion(text, "line"))
        typed = data.draw(st.integers(0, len(text)))
        found = cache.find(f"{before}{text[:typed]})\nbelow", len(before) + typed)
        assert found is not None
        kept, count = found
        assert kept.text[count:] == text[typed:] or typed != count

    def test_other_text_finds_nothing(self) -> None:
        cache = SuggestionCache()
        cache.put("x = ", "", CachedSuggestion("compute()", "rest", complete=False))
        assert cache.find("x = cz", 6) is None
        assert cache.find("y = c", 5) is None
        assert cache.find("x = c\nother below", 5) is None
        assert cache.find("x = compute()", 13) is None


class TestLive:
    def test_an_answer_is_kept_and_typed_through(self) -> None:
        chosen = model(lambda _p: "compute(y)\n")
        completion = LiveCompletion(chosen, AssistSettings(), language="python")
        stream = completion.begin("x = ", 4)
        run(chosen, stream)
        offer = completion.answer("x = ", 4, stream)
        assert isinstance(offer, ShownCompletion)
        assert (offer.text, offer.typed) == ("compute(y)", 0)
        through = completion.answer("x = comp", 8)
        assert isinstance(through, ShownCompletion)
        assert (through.text, through.typed) == ("ute(y)", 4)
        assert completion.answer("x = compute(y)", 14) == WithheldCompletion(WithheldReason.EMPTY)

    def test_a_stream_is_kept_exactly_while_typing_agrees(self) -> None:
        chosen = model(lambda _p: "compute(y)\n")
        completion = LiveCompletion(chosen, AssistSettings(), language="python")
        stream = completion.begin("x = ", 4)
        assert stream.typed_length("x = zz", 6) == 2  # nothing was said yet, so nothing disagrees
        run(chosen, stream)
        assert stream.typed_length("x = comp", 8) == 4
        assert stream.typed_length("x = zz", 6) is None
        assert stream.typed_length("x =", 3) == -1
        assert stream.typed_length("y = c", 5) is None

    def test_what_is_inserted_follows_the_projects_rules(self) -> None:
        chosen = model(lambda _p: "'text'\n")
        rules = ProjectRules(quotes="double")
        completion = LiveCompletion(chosen, AssistSettings(), language="python", rules=rules)
        stream = completion.begin("x = ", 4)
        run(chosen, stream)
        offer = completion.answer("x = ", 4, stream)
        assert isinstance(offer, ShownCompletion)
        assert offer.text == '"text"'

    def test_nothing_repeats_what_follows(self) -> None:
        chosen = model(lambda _p: "a, b)\nreturn x\n")
        completion = LiveCompletion(chosen, AssistSettings(), language="python")
        stream = completion.begin("f()\n", 2)
        run(chosen, stream)
        offer = completion.answer("f()\n", 2, stream)
        assert isinstance(offer, ShownCompletion)
        assert offer.text == "a, b"

    def test_the_line_after_an_accepted_one_is_indented_as_it_will_be(self) -> None:
        completion = LiveCompletion(model(), AssistSettings(), language="python")
        text = "    if x"
        ahead = completion.prefetch(text, len(text), ShownCompletion(":", Extent.REST, 1.0))
        assert ahead is not None
        assert ahead.before == "    if x:\n        "
        assert completion.prefetch("f()", 2, ShownCompletion("a", Extent.REST, 1.0)) is None

    @pytest.mark.parametrize(
        ("settings", "path", "text", "reason"),
        [
            (AssistSettings(completion=False), "a.py", "x", WithheldReason.DISABLED),
            (AssistSettings(), "config/.env.local", "x", WithheldReason.EXCLUDED),
            (AssistSettings(max_file_kb=1), "a.py", "x" * 2000, WithheldReason.TOO_LARGE),
        ],
    )
    def test_a_buffer_that_gets_nothing_is_told_why(
        self, settings: AssistSettings, path: str, text: str, reason: WithheldReason
    ) -> None:
        completion = LiveCompletion(model(), settings, path=path)
        assert completion.answer(text, len(text)) == WithheldCompletion(reason)


class TestContext:
    def test_definitions_that_imports_name_come_first(self) -> None:
        files = {
            "pkg/shapes.py": "class Square:\n    def area(self): ...\n\ndef other(): ...\n",
            "src/tools.py": "def hammer(nail):\n    return nail\n",
        }
        text = "from pkg.shapes import Square\nfrom tools import hammer\nimport os\n"
        recent = [ContextFile("pkg/log.py", "LEVEL = 3"), ContextFile("main.py", "x")]
        found = gather_context(text, "main.py", files.get, recent)
        assert found == [
            ContextFile("pkg/shapes.py", "class Square:\n    def area(self): ..."),
            ContextFile("src/tools.py", "def hammer(nail):\n    return nail"),
            ContextFile("pkg/log.py", "LEVEL = 3"),
        ]

    def test_relative_imports_are_found_beside_the_file(self) -> None:
        files = {"a/b/c.py": "def f(): ...\n", "web/x.ts": "export function g() {\n}\n"}
        assert gather_context("from .c import f\n", "a/b/d.py", files.get) == [
            ContextFile("a/b/c.py", "def f(): ...")
        ]
        assert gather_context("import { g } from './x'\n", "web/y.ts", files.get)[0].path == "web/x.ts"


@pytest.mark.parametrize("fim", [None, SPM])
@pytest.mark.parametrize("before", ["x = self.", "f(", "my_", "if a:\n    ", 'say("', "a, "])
def test_the_prompt_of_the_next_word_is_the_one_that_its_first_letter_asks_for(
    before: str, fim: FimTemplate | None
) -> None:
    completion = LiveCompletion(model(fim=fim), AssistSettings())
    for letter in "aZé":
        typed = completion.begin(f"{before}{letter}\nbelow()\n", len(before) + 1)
        assert completion.next_word_prompt(f"{before}\nbelow()\n", len(before)) == typed.prompt.tokens


@pytest.mark.parametrize("before", ["", "x = sel", "x1", "x = 1\n"])
def test_inside_of_a_word_or_on_a_new_line_a_letter_asks_for_the_same_prompt(before: str) -> None:
    completion = LiveCompletion(model(), AssistSettings())
    now = completion.begin(f"{before}\nbelow()\n", len(before)).prompt.tokens
    assert completion.begin(f"{before}a\nbelow()\n", len(before) + 1).prompt.tokens == now
    assert completion.next_word_prompt(f"{before}\nbelow()\n", len(before)) is None
