"""Drafters guess well where text repeats, find back after edits, and cost little where it does not."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keystroke.engine.base import Interrupt, Sampling
from keystroke.engine.checkpoint.spec import ExpertsSpec
from keystroke.engine.echo import BOS, EOS, SPECIAL, VOCAB, EchoEngine, EchoSession
from keystroke.engine.generation import Generation, GenerationParams
from keystroke.engine.model import Model
from keystroke.engine.speculative import (
    MAX_DRAFT,
    AdaptiveDrafter,
    CombinedDrafter,
    Drafter,
    FileDrafter,
    ModelDrafter,
    SuffixDrafter,
    cost_table,
    drafter_for,
    measure_verify_cost,
    verify_cost,
)
from keystroke.engine.speculative.cost import CAUTIOUS, CHEAP, expert_cost, remember_expert_cost
from keystroke.engine.speculative.suffix_automaton import SuffixAutomaton
from keystroke.engine.tokenizer import ByteTokenizer
from keystroke.errors import UsageError

TOKENIZER = ByteTokenizer(SPECIAL, bos=BOS, eos=EOS, vocab_size=VOCAB)
# Steps that verifying so many rows takes: as measured on two laptop cores, and on a GPU, nearly nothing.
LAPTOP = cost_table({1: 1.0, 2: 2.1, 4: 2.3, 8: 3.7, 16: 6.0, 32: 11.2})
FLAT = cost_table({1: 1.0, 32: 1.3})


class Clock:
    """The time as an engine's settings have it, whatever this machine is busy with."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()

    def spend(session: EchoSession, seconds: float, interrupt: Interrupt | None) -> None:
        clock.now += seconds

    monkeypatch.setattr(EchoSession, "_spend", spend)
    return clock


class Replay:
    """Runs a drafter against a fixed output, as a greedy model that writes exactly that would."""

    def __init__(
        self, drafter: Drafter, prompt: Sequence[int], output: Sequence[int], cost: Sequence[float] = FLAT
    ) -> None:
        self.steps, self.drafted, self.accepted, self.spent = 0, 0, 0, 0.0
        drafter.begin(prompt)
        sequence, at = list(prompt), 0
        while at < len(output):
            limit = min(MAX_DRAFT, len(output) - at - 1)
            draft = drafter.propose(sequence, limit) if limit > 0 else ()
            assert len(draft) <= limit
            right = next((i for i, t in enumerate(draft) if t != output[at + i]), len(draft))
            new = output[at : at + right + 1]
            at += right + 1
            sequence.extend(new)
            drafter.record_result(len(draft), right, 0.0)
            drafter.observe(new)
            self.steps += 1
            self.drafted += len(draft)
            self.accepted += right
            self.spent += cost[len(draft) + 1]
        self.tokens_per_step = len(output) / self.steps
        self.speed = len(output) / self.spent


def words(count: int, seed: int = 0, variety: int = 5000) -> list[int]:
    shuffle = random.Random(seed)
    return [shuffle.randrange(variety) for _ in range(count)]


# The original file as the draft

SOURCE = words(2000, seed=1)


def test_an_unchanged_file_is_drafted_whole() -> None:
    replay = Replay(FileDrafter(SOURCE), [9], SOURCE)
    assert replay.accepted == replay.drafted
    assert replay.tokens_per_step > 32


@pytest.mark.parametrize(
    "edited",
    [
        pytest.param(SOURCE[:500] + [7777] * 40 + SOURCE[500:], id="insertion"),
        pytest.param(SOURCE[:500] + SOURCE[560:], id="deletion"),
        pytest.param([*SOURCE[:500], 7000, 7001, 7002, *SOURCE[510:]], id="replacement"),
        pytest.param(SOURCE[:500] + SOURCE[1000:1100] + SOURCE[600:], id="move"),
    ],
)
def test_after_an_edit_the_cursor_finds_its_place_within_a_few_tokens(edited: list[int]) -> None:
    changed = len([t for t in edited if t >= 7000])
    replay = Replay(FileDrafter(SOURCE), [9], edited)
    # Every token of the file is drafted but for a few at each seam.
    assert replay.accepted >= (len(edited) - changed) * 32 / 33 - 12


def test_many_renamed_tokens_each_cost_about_one_step() -> None:
    edited = list(SOURCE)
    for at in range(20, 2000, 40):
        edited[at] = 7000 + at
    replay = Replay(FileDrafter(SOURCE), [9], edited)
    assert replay.steps <= 50 * 2.2 + len(edited) / 33


def test_after_a_repeated_line_the_nearest_place_is_taken() -> None:
    line = [1, 2, 3]
    source = [x for i in range(60) for x in (*line, 100 + i)]
    edited = [*source[:80], 7000, 7001, *source[80:]]
    assert Replay(FileDrafter(source), [9], edited).steps <= 18


def test_a_file_drafter_starts_over_with_each_sequence() -> None:
    drafter = FileDrafter(SOURCE)
    assert Replay(drafter, [9], SOURCE[:300]).steps == Replay(drafter, [9], SOURCE[:300]).steps


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=60), st.lists(st.integers(0, 3), min_size=1, max_size=60))
def test_a_file_drafter_stays_inside_its_source_whatever_comes(source: list[int], output: list[int]) -> None:
    Replay(FileDrafter(source), [9], output)


# What was seen before


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=50))
def test_the_automaton_knows_the_longest_ending_seen_before(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for token in text:
        automaton.append(token)
    longest = 0
    for size in range(1, len(text)):
        ending = text[-size:]
        if any(text[i : i + size] == ending for i in range(len(text) - size)):
            longest = size
    assert automaton.matched == longest
    if longest:
        draft = automaton.continuation(4)
        grown = text[-longest:] + draft
        assert draft
        assert any(text[i : i + longest + 1] == grown[: longest + 1] for i in range(len(text)))


def test_the_most_frequent_continuation_is_drafted_and_among_equals_the_latest() -> None:
    drafter = SuffixDrafter()
    drafter.begin([1, 2, 50, 9, 1, 2, 60, 8, 1, 2, 50, 7, 1, 2])
    assert list(drafter.propose([], 1)) == [50]
    drafter = SuffixDrafter()
    drafter.begin([1, 2, 50, 9, 1, 2, 60, 8, 1, 2])
    assert list(drafter.propose([], 1)) == [60]


def test_history_is_drafted_from_and_no_draft_crosses_from_one_text_into_another() -> None:
    drafter = SuffixDrafter([[1, 2, 3, 4], [5, 6, 7, 8]])
    drafter.begin([2, 3])
    assert list(drafter.propose([2, 3], 9)) == [4]


def test_repeated_text_is_drafted_from_its_first_appearance() -> None:
    phrase = words(200, seed=3)
    replay = Replay(SuffixDrafter(), phrase + words(50, seed=4), phrase)
    assert replay.steps <= 14


def test_a_prompt_that_grew_by_a_keystroke_adds_only_what_is_new() -> None:
    drafter = SuffixDrafter()
    text = words(3000, seed=5)
    drafter.begin(text)
    while not len(drafter._text) > 3000:
        drafter.propose(text, 8)
    size = len(drafter._text)
    for extra in range(1, 20):
        drafter.begin([*text[:-1], 6000 + extra])
        drafter.propose([], 8)
    assert len(drafter._text) < size + 20 * 20
    drafter.begin(text[:100])
    assert list(drafter.propose([], 8)) == text[100:108]


def test_a_long_prompt_is_indexed_in_portions_and_then_drafted_from() -> None:
    drafter = SuffixDrafter()
    text = words(4000, seed=12)
    drafter.begin([*text, *text[100:110]])
    drafts = [list(drafter.propose([], 4)) for _ in range(12)]
    assert drafts[0] == []
    assert drafts[-1] == text[110:114]


def test_a_full_automaton_forgets_the_oldest_half_and_goes_on() -> None:
    drafter = SuffixDrafter(capacity=400)
    old, new = words(300, seed=6), words(300, seed=7)
    drafter.begin(old)
    drafter.propose([], 1)
    drafter.observe(new)
    drafter.observe(new[200:210])
    assert list(drafter.propose([], 4)) == new[210:214]
    assert len(drafter._text) <= 400


def test_a_run_of_one_token_stays_cheap() -> None:
    automaton = SuffixAutomaton()
    for _ in range(5000):
        automaton.append(1)
    assert automaton.matched == 4999
    assert len(automaton.length) == 5001


# A small model


def test_a_model_drafts_its_equal_without_a_miss_at_any_temperature() -> None:
    for sampling in (Sampling(), Sampling(temperature=2.0, seed=77)):
        engine = EchoEngine()
        model = Model("echo", engine, TOKENIZER)
        drafter = ModelDrafter(EchoEngine(), engine, sampling)
        params = GenerationParams(max_tokens=60, sampling=sampling)
        generation = Generation(model, engine.session(), [1, 2, 3], params, drafter=drafter)
        list(generation)
        assert generation.stats.accepted == generation.stats.drafted > 50
        drafter.close()


@pytest.mark.parametrize(("verify", "pays"), [(0.05, True), (0.00001, False)], ids=["dear", "cheap"])
def test_a_draft_model_is_asked_as_far_as_its_steps_pay(
    monkeypatch: pytest.MonkeyPatch, verify: float, pays: bool
) -> None:
    clock = itertools.count(0.0, 0.004)  # a proposal takes this long, whatever its length
    monkeypatch.setattr("keystroke.engine.speculative.draft_model.time.perf_counter", lambda: next(clock))
    drafter = ModelDrafter.shared(EchoEngine(), EchoEngine())
    lengths = []
    for _ in range(8):
        draft = drafter.propose([1, 2, 3], 16)
        lengths.append(len(draft))
        drafter.record_result(len(draft), len(draft), verify)
    assert lengths[0] == 4
    assert (lengths[-1] > 8) is pays
    assert (lengths[-1] == 0) is not pays


def test_with_a_draft_model_the_text_is_the_same() -> None:
    sampling = Sampling(temperature=1.0, seed=5)
    params = GenerationParams(max_tokens=80, sampling=sampling)
    engine, small = EchoEngine(), EchoEngine()
    model = Model("echo", engine, TOKENIZER, draft=small)
    texts = []
    for drafter in (None, drafter_for(engine, draft=small), drafter_for(engine, draft=small)):
        generation = Generation(model, engine.session(), [1, 2, 3], params, drafter=drafter)
        list(generation)
        texts.append(generation.tokens)
    assert texts[0] == texts[1] == texts[2]
    assert small.stats().sessions == 1  # shared by all answers


def test_a_model_with_another_vocabulary_cannot_draft() -> None:
    other = EchoEngine()
    other.info = type(other.info)(
        **{f: getattr(other.info, f) for f in other.info.__slots__} | {"vocab_size": 9}
    )
    with pytest.raises(UsageError, match="vocabularies differ"):
        ModelDrafter(other, EchoEngine())


def test_a_draft_model_with_a_short_context_falls_silent() -> None:
    drafter = ModelDrafter(EchoEngine(context_length=4), EchoEngine())
    assert len(drafter.propose([1, 2], 9)) == 2
    assert list(drafter.propose([1, 2, 3, 4, 5], 9)) == []


# Together, and by their worth


def test_the_first_drafter_with_a_guess_is_heard() -> None:
    combined = CombinedDrafter([FileDrafter([1, 2, 3]), SuffixDrafter([[8, 8, 5, 6]])])
    combined.begin([9])
    assert list(combined.propose([9], 2)) == [1, 2]
    combined.observe([40, 41, 42, 8, 8])
    assert list(combined.propose([], 2)) == [5, 6]
    assert combined.chosen_index == 1


@pytest.mark.parametrize("cost", [LAPTOP, FLAT], ids=["laptop", "flat"])
@pytest.mark.parametrize("variety", [4, 30, 300, 5000])
def test_text_that_nobody_can_predict_is_never_decoded_much_slower(
    cost: tuple[float, ...], variety: int
) -> None:
    prompt, output = words(1500, 8, variety), words(1500, 9, variety)
    drafters: list[Drafter] = [FileDrafter(words(1500, 10, variety)), SuffixDrafter(shortest=1)]
    assert Replay(AdaptiveDrafter(drafters, cost), prompt, output, cost).speed > 0.975


@pytest.mark.parametrize(("cost", "at_least"), [(LAPTOP, 2.3), (FLAT, 18.0)], ids=["laptop", "flat"])
def test_a_file_with_few_changes_is_written_near_the_best_speed(
    cost: tuple[float, ...], at_least: float
) -> None:
    edited = [*SOURCE[:400], 7000, 7001, *SOURCE[402:1500], *SOURCE[1520:]]
    assert Replay(AdaptiveDrafter([FileDrafter(SOURCE)], cost), [9], edited, cost).speed > at_least


def test_a_drafter_that_begins_to_be_right_is_tried_again() -> None:
    class Late(Drafter):
        """Wrong for the first thousand tokens, then always right."""

        def propose(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
            at = len(tokens) - 1
            return output[at : at + limit] if at > 1000 else [9999] * limit

    output = words(4000, seed=11)
    replay = Replay(AdaptiveDrafter([Late()], LAPTOP), [9], output, LAPTOP)
    assert replay.speed > 1.3


def test_a_table_that_flatters_the_machine_is_corrected_by_the_clock() -> None:
    """Rows cost ten times what the table says, and two of three tokens are right: drafting soon stops."""
    drafter = AdaptiveDrafter([SuffixDrafter([SOURCE])], FLAT)
    drafter.begin(SOURCE[:10])
    drafted = []
    for _ in range(300):
        draft = drafter.propose(SOURCE[:10], 16)
        drafter.record_result(len(draft), len(draft) * 2 // 3, 0.01 + 0.03 * len(draft))
        drafted.append(len(draft))
    assert max(drafted[:12]) > 0
    assert sum(drafted[-100:]) <= 16


def test_the_drafter_for_an_engine_uses_its_measured_costs(clock: Clock) -> None:
    engine = EchoEngine(step_cost=0.002)
    assert verify_cost(engine)[2] == pytest.approx(1.4)
    assert verify_cost(engine) == verify_cost(EchoEngine())

    def drafted() -> list[int]:
        drafter = drafter_for(engine, source=[1, 2, 3, 4])
        drafter.begin([9])
        return list(drafter.propose([9], 2))

    cheap = measure_verify_cost(engine, clock=clock)
    assert verify_cost(engine) == cheap
    assert drafted() == [1, 2]
    assert list(drafter_for(engine).propose([9], 2)) == []
    engine.row_cost = 0.02
    assert measure_verify_cost(engine, clock=clock) != cheap
    assert drafted() == []  # a row for the price of ten steps


def test_no_draft_is_longer_than_the_table_of_costs() -> None:
    drafter = AdaptiveDrafter([FileDrafter(SOURCE)], (0.0, 1.0, 1.0, 1.0))
    drafter.begin([9])
    assert len(drafter.propose([9], 32)) == 2


# Costs


def test_the_cost_table_runs_straight_between_measurements_and_never_falls() -> None:
    table = cost_table({1: 0.008, 2: 0.016, 4: 0.012, 8: 0.032})
    assert table[:3] == (0.0, 1.0, 2.0)
    assert all(a <= b for a, b in pairwise(table))
    assert table[8] == pytest.approx(4.0)
    assert len(table) == MAX_DRAFT + 2
    assert cost_table({1: 0.5}) == tuple(float(n) for n in range(MAX_DRAFT + 2))


def test_rows_of_a_mixture_cost_the_distinct_experts_they_choose() -> None:
    mixture = ExpertsSpec(count=128, top=8, width=64)
    table = expert_cost(mixture, 0.75)
    assert len(table) == len(CAUTIOUS)
    assert table[1] == pytest.approx(1.0)
    # Two rows share half an expert of eight on average: 15.5 are read instead of 8.
    assert table[2] == pytest.approx(0.25 + 0.75 * 15.5 / 8)
    assert all(before < after for before, after in pairwise(table))
    assert table[-1] < 0.25 + 0.75 * 128 / 8  # never more than all experts
    every = expert_cost(ExpertsSpec(count=8, top=8, width=64), 0.75)  # a row more reads nothing more
    assert every[1:] == pytest.approx((1.0,) * (len(every) - 1))


def test_a_mixture_begins_with_its_own_costs_unless_the_engine_drafts_itself() -> None:
    mixture = ExpertsSpec(count=128, top=8, width=64)
    with EchoEngine() as dense, EchoEngine() as experts, EchoEngine() as drafting:
        drafting.drafts = True
        remember_expert_cost(dense, None, 0.75)
        remember_expert_cost(experts, mixture, 0.75)
        remember_expert_cost(drafting, mixture, 0.75)
        assert verify_cost(dense) == CAUTIOUS
        assert verify_cost(experts) == expert_cost(mixture, 0.75)
        assert verify_cost(drafting) == CHEAP


def test_measuring_costs_leaves_no_session_behind_and_sees_what_rows_cost(clock: Clock) -> None:
    engine = EchoEngine(step_cost=0.002, row_cost=0.001)
    table = measure_verify_cost(engine, clock=clock)
    assert engine.stats().sessions == 0
    assert table == pytest.approx([0.0, *(1 + rows / 2 for rows in range(MAX_DRAFT + 1))])
    out_of_time = measure_verify_cost(engine, 0.0, clock)
    assert out_of_time == pytest.approx(table)  # by the slope of the first three
    tiny = measure_verify_cost(EchoEngine(context_length=8))
    assert len(tiny) == MAX_DRAFT + 2


# With the engine, whatever the drafter


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([0.0, 1.0, 2.5]),
    st.integers(0, 2**32),
    st.lists(st.sampled_from(b"abcdefghijklmnopqrstuvwxyz ()=.:_\n"), max_size=60),
    st.sampled_from(["file", "suffix", "combined", "adaptive"]),
)
def test_no_drafter_changes_the_text(temperature: float, seed: int, source: list[int], kind: str) -> None:
    drafters: dict[str, Drafter] = {
        "file": FileDrafter(source),
        "suffix": SuffixDrafter([source], shortest=1),
        "combined": CombinedDrafter([FileDrafter(source), SuffixDrafter([source])]),
        "adaptive": AdaptiveDrafter([FileDrafter(source), SuffixDrafter([source], shortest=1)], FLAT),
    }
    params = GenerationParams(max_tokens=120, sampling=Sampling(temperature=temperature, seed=seed, top_k=3))
    texts = []
    for drafter in (None, drafters[kind]):
        engine = EchoEngine()
        generation = Generation(
            Model("echo", engine, TOKENIZER), engine.session(), [*b"ab"], params, drafter=drafter
        )
        list(generation)
        texts.append((generation.text, generation.tokens, generation.finish))
    assert texts[0] == texts[1]
