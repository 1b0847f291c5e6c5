"""An answer held to a grammar is of its language, or says that it is not whole; drafts change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from grammar_languages import Language, described, described_languages, languages
from grammar_models import PROMPT, RandomDrafter, answered, bpe_tokenizer, noise, params
from hypothesis import example, given, settings
from hypothesis import strategies as st

from keystroke.assist.tool_calls.forms import HERMES
from keystroke.assist.tool_calls.grammar import calls_constraint
from keystroke.assist.tool_calls.tools import OfferedTool, whole_toolset
from keystroke.engine.base import Interrupt, Sampling
from keystroke.engine.generation import Finish, Generation, GenerationParams
from keystroke.engine.grammar import matcher
from keystroke.engine.grammar.constraint import choice, json_schema, lark, regex
from keystroke.engine.speculative import Drafter

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 3.0]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.9]),
    min_p=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 2**64 - 1),
    logit_bias=st.sampled_from([{}, {70: 4.0, 71: -50.0}]),
)


@settings(max_examples=120)
@given(languages, samplings, st.integers(0, 10**6))
def test_an_answer_that_ends_is_of_the_language(language: Language, sampling: Sampling, seed: int) -> None:
    generation, _ = answered(noise(seed), params(language.constraint, sampling=sampling))
    if generation.finish is Finish.STOP:
        assert language.has(generation.text)
    else:
        assert generation.finish is Finish.LENGTH
        assert len(generation.tokens) == 60


CALLS = calls_constraint(
    whole_toolset([OfferedTool("name", parameters={"properties": {"count": {"type": "integer"}}})]),
    HERMES,
    bpe_tokenizer(),
)


@pytest.mark.slow
@settings(max_examples=120)
@given(samplings, st.integers(0, 10**6), st.booleans())
def test_free_text_that_is_asked_for_without_masks_is_the_text_with_them(
    sampling: Sampling, seed: int, drafts: bool
) -> None:
    masked, _ = answered(noise(seed), params(replace(CALLS, free=None), 60, sampling))
    drafter = RandomDrafter([*masked.tokens, 1, 2], seed, bpe_tokenizer().vocab_size) if drafts else None
    trusting, _ = answered(noise(seed, ahead=True), params(CALLS, 60, sampling), drafter)
    assert trusting.tokens == masked.tokens
    assert (trusting.text, trusting.finish) == (masked.text, masked.finish)


@settings(max_examples=150)
@given(languages, samplings, st.integers(0, 10**6), st.booleans(), st.sampled_from([0, 1, 3]))
def test_a_step_that_is_proved_afterwards_gives_what_one_with_a_mask_gives(
    language: Language, sampling: Sampling, seed: int, drafts: bool, long: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matcher, "_LONG", long)  # 0: every step with a choice is asked for without a mask
        masked, _ = answered(noise(seed), params(language.constraint, 60, sampling))
        drafter = RandomDrafter([*masked.tokens, 1, 2], seed, bpe_tokenizer().vocab_size) if drafts else None
        proved, _ = answered(noise(seed, ahead=True), params(language.constraint, 60, sampling), drafter)
    assert proved.tokens == masked.tokens
    assert (proved.text, proved.finish) == (masked.text, masked.finish)


def test_a_token_that_free_text_may_not_hold_is_taken_back() -> None:
    forbidden = bpe_tokenizer().special("<call>")
    assert forbidden is not None
    liked = Sampling(logit_bias={forbidden: 3.0})  # noise of one: liked best at some places, not at all
    masked, _ = answered(noise(1), params(replace(CALLS, free=None), 60, liked))
    trusting, _ = answered(noise(1, ahead=True), params(CALLS, 60, liked))
    assert trusting.tokens == masked.tokens
    assert forbidden not in trusting.tokens
    assert trusting.stats.steps > masked.stats.steps  # some were made again, with a mask


def test_a_model_that_insists_on_what_is_not_allowed_costs_few_steps_more() -> None:
    forbidden = bpe_tokenizer().special("<call>")
    assert forbidden is not None
    always = Sampling(logit_bias={forbidden: 50.0})
    masked, _ = answered(noise(1), params(CALLS, 60, always))
    trusting, _ = answered(noise(1, ahead=True), params(CALLS, 60, always))
    assert trusting.tokens == masked.tokens
    assert trusting.stats.steps <= masked.stats.steps + 8  # after 1, 2, 4, 8, 16, 16, ... steps with a mask


class Counted(Drafter):
    """What is offered, and when."""

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner
        self.offered: list[tuple[int, ...]] = []

    def begin(self, prompt: Sequence[int]) -> None:
        self._inner.begin(prompt)

    def propose(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
        self.offered.append(tuple(self._inner.propose(tokens, limit)))
        return self.offered[-1]

    def observe(self, tokens: Sequence[int]) -> None:
        self._inner.observe(tokens)

    def record_result(self, drafted: int, accepted: int, seconds: float) -> None:
        self._inner.record_result(drafted, accepted, seconds)


@pytest.mark.parametrize("ahead", [False, True], ids=["host", "runs ahead"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_free_text_with_tools_on_offer_takes_the_steps_and_drafts_of_text_without_and_no_mask(
    ahead: bool, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is measured: masks, steps and drafts are counted."""
    masks: list[int] = []
    row = matcher.Matcher.row

    def counted(self: matcher.Matcher, index: int) -> object:
        masks.append(index)
        return row(self, index)

    monkeypatch.setattr(matcher.Matcher, "row", counted)
    pieces = bpe_tokenizer()
    text = {
        t for t in range(pieces.vocab_size) if not pieces.is_special(t) and pieces.token_bytes(t).isascii()
    }
    unwanted = set(range(noise().engine.info.vocab_size)) - text  # the rest is text that nobody would refuse
    sampling = Sampling(temperature, logit_bias=dict.fromkeys(unwanted, -99.0))
    for seed in range(4):
        rows = []
        for constraint in (None, CALLS):
            truth, _ = answered(noise(seed), GenerationParams(50, sampling))
            drafter = Counted(RandomDrafter(truth.tokens, seed, bpe_tokenizer().vocab_size))
            wanted = GenerationParams(50, sampling, constraint=constraint)
            made, _ = answered(noise(seed, ahead=ahead), wanted, drafter)
            stats = made.stats
            rows.append((made.tokens, stats.steps, stats.accepted, stats.forced, drafter.offered))
        assert rows[0] == rows[1]
    assert not masks


def test_in_a_long_string_steps_are_asked_for_without_a_grammar_and_in_a_short_one_with() -> None:
    quote = Sampling(logit_bias={bpe_tokenizer().encode('"')[0]: -9.0})
    model, held = noise(2, ahead=True), []
    with model.engine.session() as session:
        generation = Generation(model, session, PROMPT, params(regex(r'"[ -~]*";'), 60, quote))
        generation.prefill()
        while generation.finish is None:
            request = generation.next_step()
            assert request is not None
            held.append(request.allowed is not None)
            step = session.step(request.draft, request.sampling, None, request.allowed)
            generation.apply_step(step, 0.0, len(request.draft))
    assert len(generation.tokens) == 60
    assert all(held[:9])  # the quote, out of few, and eight tokens out of most
    assert not held[9]


@settings(max_examples=150)
@given(languages, samplings, st.integers(0, 10**6), st.integers(0, 60))
def test_drafts_never_change_a_constrained_answer(
    language: Language, sampling: Sampling, seed: int, limit: int
) -> None:
    wanted = params(language.constraint, limit, sampling)
    plain, _ = answered(noise(seed), wanted)
    vocab = bpe_tokenizer().vocab_size
    truth = [*plain.tokens, 1, 2, 3]
    drafted, _ = answered(noise(seed), wanted, RandomDrafter(truth, seed, vocab))
    assert drafted.tokens == plain.tokens
    assert (drafted.text, drafted.finish) == (plain.text, plain.finish)
    assert drafted.stats.forced <= plain.stats.forced


@settings(max_examples=60)
@given(languages, samplings, st.integers(0, 10**6))
def test_telling_chances_changes_no_token(language: Language, sampling: Sampling, seed: int) -> None:
    plain, _ = answered(noise(seed), params(language.constraint, sampling=sampling))
    told = Sampling(
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.seed,
        sampling.logit_bias,
        logprobs=1,
    )
    spoken, chunks = answered(noise(seed), params(language.constraint, sampling=told))
    assert (spoken.tokens, spoken.finish) == (plain.tokens, plain.finish)
    assert [p.token for c in chunks for p in c.logprobs] == spoken.tokens


@settings(max_examples=60)
@given(
    languages,
    samplings,
    st.integers(0, 10**6),
    st.lists(st.text('ab"0 ', min_size=1, max_size=2), max_size=2),
)
def test_stop_strings_cut_a_constrained_answer_alike_with_and_without_drafts(
    language: Language, sampling: Sampling, seed: int, stop: list[str]
) -> None:
    wanted = params(language.constraint, sampling=sampling, stop=tuple(stop))
    whole, _ = answered(noise(seed), params(language.constraint, sampling=sampling))
    plain, _ = answered(noise(seed), wanted)
    drafted, _ = answered(
        noise(seed), wanted, RandomDrafter([*whole.tokens, 1, 2], seed, bpe_tokenizer().vocab_size)
    )
    assert (drafted.tokens, drafted.text, drafted.finish) == (plain.tokens, plain.text, plain.finish)
    assert whole.text.startswith(plain.text)
    assert not any(s in plain.text for s in stop)


ONE_CHARACTER = described(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 1}},
        "required": ["name"],
        "additionalProperties": False,
    }
)


@settings(max_examples=30)
@example(ONE_CHARACTER, 0, 2)  # stops inside a character
@given(languages, st.integers(0, 10**6), st.integers(0, 20))
def test_an_interrupt_at_any_step_leaves_a_usable_session(language: Language, seed: int, steps: int) -> None:
    model = noise(seed)
    whole, _ = answered(model, params(language.constraint))
    session, interrupt = model.engine.session(), Interrupt()
    generation = Generation(model, session, PROMPT, params(language.constraint), interrupt=interrupt)
    generation.prefill()
    while generation.finish is None and generation.stats.steps < steps:
        generation.advance()
    if generation.finish is None:
        interrupt.set()
        generation.advance()
        forced_to_the_end = generation.finish is whole.finish and generation.stats.steps == 0
        assert generation.finish is Finish.INTERRUPTED or forced_to_the_end
    assert list(session.tokens) == PROMPT + generation.tokens
    assert whole.text.startswith(generation.text)
    again = Generation(model, session, PROMPT, params(language.constraint))
    list(again)
    assert (again.tokens, again.finish) == (whole.tokens, whole.finish)


@settings(max_examples=40)
@given(described_languages, st.integers(0, 10**6), st.integers(0, 6))
def test_a_steered_answer_begins_its_grammar_anew(language: Language, seed: int, steps: int) -> None:
    model = noise(seed)
    said = model.tokenizer.encode(" no, rather: ")
    session = model.engine.session()
    generation = Generation(model, session, PROMPT, params(language.constraint, 300))
    generation.prefill()
    while generation.finish is None and generation.stats.steps < steps:
        generation.advance()
    if generation.finish:
        return
    before = len(generation.tokens)
    generation.redirect(said)
    while generation.finish is None:
        generation.advance()
    if generation.finish is Finish.STOP:
        assert language.has(model.tokenizer.decode(generation.tokens[before:]))


def test_text_without_a_choice_costs_no_step() -> None:
    constant = lark('start: "def name(value): return value"')
    generation, _ = answered(noise(), params(constant))
    assert generation.text == "def name(value): return value"
    assert generation.finish is Finish.STOP
    assert generation.stats.steps == 0
    assert generation.tokens == bpe_tokenizer().encode(generation.text)


def test_forced_text_takes_fewer_steps_than_tokens_and_is_cut_as_the_tokenizer_cuts_it() -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["value", "values"]}, "enabled": {"type": "boolean"}},
        "required": ["name", "enabled"],
        "additionalProperties": False,
    }
    generation, _ = answered(noise(3), params(json_schema(schema)))
    assert generation.finish is Finish.STOP
    assert generation.stats.forced > len(generation.tokens) / 2
    assert generation.stats.steps < len(generation.tokens) / 2


@pytest.mark.parametrize("given_text", ["{", '{"na', '{"name": ', "x = "])
def test_a_given_beginning_comes_before_the_grammar(given_text: str) -> None:
    constraint = choice(['"value"', '"ab"'])
    wanted = GenerationParams(40, Sampling(1.0), begin=given_text, constraint=constraint)
    generation, _ = answered(noise(1), wanted)
    assert generation.text in (given_text + '"value"', given_text + '"ab"')
    assert generation.finish is Finish.STOP


def test_an_answer_that_may_not_end_goes_on_as_long_as_the_grammar_does() -> None:
    generation, _ = answered(noise(), params(regex("a{0,30}"), ignore_eos=True))
    assert generation.text == "a" * 30
    assert generation.finish is Finish.STOP


def test_a_bias_against_all_that_is_allowed_is_overruled_by_the_grammar() -> None:
    tokens = bpe_tokenizer().encode("abc")
    bias = dict.fromkeys(tokens, -100.0)
    generation, _ = answered(noise(), params(choice(["abc"]), sampling=Sampling(1.0, logit_bias=bias)))
    assert generation.text == "abc"


def test_the_context_ends_a_constrained_answer_as_any_other() -> None:
    model = noise(context_length=len(PROMPT) + 5)
    generation, _ = answered(model, params(regex("[ab]{100}")))
    assert generation.finish is Finish.LENGTH
    constant, _ = answered(model, params(choice(["abc" * 50])))
    assert constant.finish is Finish.LENGTH
    assert len(constant.tokens) == 5


def test_two_answers_over_one_grammar_do_not_share_a_state() -> None:
    model, wanted = noise(5), params(regex("[abc ]{20,30}"), sampling=Sampling(1.0))
    alone = [answered(noise(seed), wanted)[0].tokens for seed in (5, 6)]
    first = Generation(model, model.engine.session(), PROMPT, wanted)
    other = noise(6)
    second = Generation(other, other.engine.session(), PROMPT, wanted)
    for generation in (first, second):
        generation.prefill()
    while first.finish is None or second.finish is None:
        for generation in (first, second):
            if generation.finish is None:
                generation.advance()
    assert [first.tokens, second.tokens] == alone


def test_a_grammar_that_gives_up_ends_the_answer_and_says_so() -> None:
    endless = lark('start: "a" start')
    wanted = params(endless, 3000)
    plain, _ = answered(noise(context_length=8000), wanted)
    assert plain.finish in (Finish.UNMET, Finish.LENGTH)
    assert set(plain.text) == {"a"}
    truth = [*plain.tokens, 1]
    drafted, _ = answered(noise(context_length=8000), wanted, RandomDrafter(truth, 0, 300))
    assert (drafted.tokens, drafted.finish) == (plain.tokens, plain.finish)


def test_a_dead_end_is_unmet_and_the_end_put_there_is_no_part_of_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A grammar whose limit is reached while a mask is made, as hostile ones bring about."""
    from keystroke.engine.grammar.matcher import Matcher

    masked = Matcher._compute_mask

    def gives_up(self: Matcher) -> object:
        if len(self._tokens) >= 3:
            self.failure = "too complex"
            self._only_ends()
            return self._mask
        return masked(self)

    monkeypatch.setattr(Matcher, "_compute_mask", gives_up)
    monkeypatch.setattr(
        Matcher, "is_finished", property(lambda self: self.has_failed or self._automaton.is_stopped())
    )
    generation, _ = answered(noise(), params(regex("[abc]{30}")))
    assert generation.finish is Finish.UNMET
    assert len(generation.tokens) == 3
    assert bpe_tokenizer().special("<end>") not in generation.tokens


def test_times_have_no_leap_seconds() -> None:
    when = json_schema(
        {
            "type": "object",
            "properties": {"at": {"format": "time", "type": "string"}, "x": {"const": {"format": "time"}}},
            "required": ["at", "x"],
        }
    )
    for seed in range(20):
        generation, _ = answered(noise(seed), params(when, sampling=Sampling(1.0, seed=seed)))
        assert ":60" not in generation.text
        assert '"format": "time"' in generation.text


def test_an_answer_over_a_grammar_walked_before_is_the_same() -> None:
    wanted = params(regex("([abc]{3} value ){2,4}"), sampling=Sampling(1.0, seed=1))
    first = [answered(noise(seed), wanted)[0].tokens for seed in range(6)]
    again = [answered(noise(seed), wanted)[0].tokens for seed in range(6)]
    assert first == again
