"""An answer's text depends on the model and the sampling alone: not on drafts, steps or interruptions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keystroke.engine.base import GREEDY, Interrupt, Sampling, Session
from keystroke.engine.echo import BOS, EOS, SPECIAL, VOCAB, EchoEngine, Script
from keystroke.engine.generation import Chunk, Finish, Generation, GenerationParams, StopStrings
from keystroke.engine.host import HostSession
from keystroke.engine.model import Model
from keystroke.engine.speculative import Drafter
from keystroke.engine.tokenizer import ByteTokenizer
from keystroke.errors import ContextOverflow, Interrupted, KeystrokeError, NotEnoughMemory, UsageError

TOKENIZER = ByteTokenizer(SPECIAL, bos=BOS, eos=EOS, vocab_size=VOCAB)
PROMPT = TOKENIZER.encode("def f(x):\n")


def echo(script: Script | None = None, context_length: int = 4096) -> Model:
    return Model("echo", EchoEngine(script, context_length=context_length), TOKENIZER)


def answers(text: str) -> Model:
    return echo(lambda _: text)


class RandomDrafter(Drafter):
    """Right for a while, then wrong: `truth` is what will be generated."""

    def __init__(self, truth: Sequence[int], seed: int) -> None:
        self._truth = list(truth)
        self._random = random.Random(seed)
        self._start = 0

    def begin(self, prompt: Sequence[int]) -> None:
        self._start = len(prompt)

    def propose(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
        at = len(tokens) - self._start
        right = self._truth[at : at + self._random.randint(0, limit)]
        return [*right, *(self._random.randrange(VOCAB) for _ in range(3))][:limit]


def run(
    model: Model, params: GenerationParams, drafter: Drafter | None = None
) -> tuple[list[Chunk], Session]:
    session = model.engine.session()
    generation = Generation(model, session, PROMPT, params, drafter=drafter)
    chunks = list(generation)
    assert list(session.tokens) == PROMPT + [t for c in chunks for t in c.tokens]
    assert generation.text == "".join(c.text for c in chunks)
    assert generation.stats.tokens == len(generation.tokens)
    assert [c.finish for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    return chunks, session


def text(chunks: Sequence[Chunk]) -> str:
    return "".join(c.text for c in chunks)


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1.0, 3.0]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.9]),
    seed=st.integers(0, 2**64 - 1),
    logprobs=st.sampled_from([None, 2]),
)


@settings(max_examples=100, deadline=None)
@given(
    samplings,
    st.integers(0, 10**6),
    st.integers(0, 90),
    st.lists(st.text("abc( =\n", min_size=1, max_size=3), max_size=3),
)
def test_text_with_speculation_is_text_without(
    sampling: Sampling, seed: int, limit: int, stop: list[str]
) -> None:
    params = GenerationParams(max_tokens=limit, sampling=sampling, stop=tuple(stop))
    plain, _ = run(echo(), params)
    truth = [t for c in plain for t in c.tokens] + [1, 2, 3]
    drafted, _ = run(echo(), params, RandomDrafter(truth, seed))
    assert text(drafted) == text(plain)
    assert [t for c in drafted for t in c.tokens] == [t for c in plain for t in c.tokens]
    assert [p for c in drafted for p in c.logprobs] == [p for c in plain for p in c.logprobs]
    assert drafted[-1].finish == plain[-1].finish


def test_a_right_draft_takes_fewer_steps() -> None:
    truth = TOKENIZER.encode("0123456789" * 6)
    model = answers("0123456789" * 6)

    class Knows(Drafter):
        def propose(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
            at = len(tokens) - len(PROMPT)
            return truth[at : at + min(limit, 7)]

    generation = Generation(model, model.engine.session(), PROMPT, drafter=Knows())
    chunks = list(generation)
    assert text(chunks) == "0123456789" * 6
    assert generation.stats.steps == 8
    assert generation.stats.accepted == generation.stats.drafted == 53


def test_an_answer_ends_with_the_models_own_end_which_is_no_text() -> None:
    chunks, session = run(answers("hello"), GenerationParams())
    assert text(chunks) == "hello"
    assert chunks[-1].finish is Finish.STOP
    assert session.tokens[-1] in SPECIAL.values()


def test_ignoring_the_end_goes_on_to_the_limit() -> None:
    chunks, _ = run(answers("hi"), GenerationParams(max_tokens=6, ignore_eos=True))
    assert text(chunks) == "hi"
    assert sum(len(c.tokens) for c in chunks) == 6
    assert chunks[-1].finish is Finish.LENGTH


def test_a_stop_token_ends_the_answer_like_its_end() -> None:
    chunks, _ = run(answers("ab;cd"), GenerationParams(stop_tokens=frozenset(b";")))
    assert text(chunks) == "ab"
    assert chunks[-1].finish is Finish.STOP


def test_a_character_is_never_given_out_by_halves() -> None:
    chunks, _ = run(answers("aé日🙂z"), GenerationParams())
    assert [c.text for c in chunks if c.text] == ["a", "é", "日", "🙂", "z"]


def test_half_a_character_at_the_limit_is_one_replacement_character() -> None:
    chunks, _ = run(answers("日本"), GenerationParams(max_tokens=5))
    assert text(chunks) == "日\ufffd"


def test_no_part_of_a_stop_string_is_ever_shown() -> None:
    chunks, _ = run(answers("one </s>two"), GenerationParams(stop=("</s>", "zzz")))
    assert text(chunks) == "one "
    assert chunks[-1].finish is Finish.STOP_STRING


def test_text_held_for_a_stop_string_that_does_not_come_is_given_out() -> None:
    chunks, _ = run(answers("a </b> </"), GenerationParams(stop=("</s>",)))
    assert text(chunks) == "a </b> </"
    assert chunks[-1].finish is Finish.STOP


def test_of_two_stop_strings_the_one_that_begins_first_cuts() -> None:
    stops = StopStrings(("world", "o w"))
    assert stops.feed("hello world") == ("hell", True)


@settings(max_examples=200)
@given(st.text("ab", max_size=40), st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
def test_stop_strings_cut_where_a_search_of_the_whole_text_would(whole: str, stop: list[str]) -> None:
    stops = StopStrings(stop)
    shown = ""
    for index, char in enumerate(whole):
        piece, stopped = stops.feed(char)
        shown += piece
        if stopped:
            # The first stop string to be complete ends the text, from its beginning.
            complete = whole[: index + 1]
            assert not any(s in complete[:-1] for s in stop)
            assert shown == complete[: min(len(complete) - len(s) for s in stop if complete.endswith(s))]
            return
    assert shown + stops.flush() == whole
    assert not any(s in whole for s in stop)


def test_max_tokens_zero_gives_an_empty_answer_without_a_step() -> None:
    model = echo()
    generation = Generation(model, model.engine.session(), PROMPT, GenerationParams(max_tokens=0))
    assert list(generation) == [Chunk("", finish=Finish.LENGTH)]
    assert generation.stats.steps == 0


def test_the_end_of_the_context_ends_the_answer_and_is_no_error() -> None:
    model = echo(context_length=len(PROMPT) + 5)
    for drafter in (None, RandomDrafter([1] * 99, 1)):
        chunks, session = run(model, GenerationParams(), drafter)
        assert session.length == len(PROMPT) + 5
        assert chunks[-1].finish is Finish.LENGTH


def test_a_prompt_that_fills_the_context_ends_at_once() -> None:
    model = echo(context_length=len(PROMPT))
    generation = Generation(model, model.engine.session(), PROMPT)
    generation.prefill()
    assert generation.advance() == Chunk("", finish=Finish.LENGTH)


def test_a_prompt_beyond_the_context_is_refused() -> None:
    model = echo(context_length=3)
    with pytest.raises(ContextOverflow):
        list(Generation(model, model.engine.session(), PROMPT))


def test_an_interrupt_ends_the_answer_with_all_it_has_and_leaves_the_session_usable() -> None:
    model = answers("abc </ def")
    interrupt = Interrupt()
    session = model.engine.session()
    generation = Generation(model, session, PROMPT, GenerationParams(stop=("</s>",)), interrupt=interrupt)
    generation.prefill()
    for _ in range(6):
        generation.advance()
    assert generation.text == "abc "
    interrupt.set()
    assert generation.advance() == Chunk("</", finish=Finish.INTERRUPTED)
    assert list(session.tokens) == PROMPT + generation.tokens
    session.step()


def test_an_interrupted_prefill_ends_the_answer_when_iterated_and_can_go_on_when_pulled() -> None:
    model = answers("ok")
    thrown = Interrupt()
    thrown.set()
    assert list(Generation(model, model.engine.session(), PROMPT * 9, interrupt=thrown)) == [
        Chunk("", finish=Finish.INTERRUPTED)
    ]
    generation = Generation(model, model.engine.session(), PROMPT * 9, interrupt=thrown)
    with pytest.raises(Interrupted):
        generation.prefill()
    generation.interrupt = None
    assert text(list(generation)) == "ok"


def test_a_redirect_keeps_what_was_generated_and_goes_on_after_the_splice() -> None:
    def script(prompt: str) -> str:
        return "bcd" if prompt.endswith("new\n") else "abcdef"

    model = echo(script)
    session = model.engine.session()
    generation = Generation(model, session, PROMPT, GenerationParams(stop=("bx",)))
    generation.prefill()
    first = [generation.advance() for _ in range(2)]
    assert text(first) == "a"  # "b" waits: it may become "bx"
    splice = TOKENIZER.encode("new\n")
    generation.redirect(splice)
    assert list(session.tokens) == [*PROMPT, *b"ab", *splice]
    rest = []
    while generation.finish is None:
        rest.append(generation.advance())
    assert text([*first, *rest]) == "abbcd"


@pytest.mark.parametrize("steps", [0, 1, 7])
@pytest.mark.parametrize("cached", [True, False])
def test_an_answer_that_goes_on_in_another_session_is_the_same(steps: int, cached: bool) -> None:
    engine = EchoEngine()
    model = Model("echo", engine, TOKENIZER)
    params = GenerationParams(40, Sampling(1.0, seed=3))
    undisturbed, _ = run(model, params)
    engine.cache.clear()
    generation = Generation(model, engine.session(), PROMPT, params)
    generation.prefill()
    first = [generation.advance() for _ in range(steps)]
    generation.release_session()
    assert generation.session not in engine.live
    if not cached:
        engine.cache.clear()
    generation.session = engine.session()
    generation.prefill()
    rest = []
    while generation.finish is None:
        rest.append(generation.advance())
    assert text([*first, *rest]) == text(undisturbed)
    assert list(generation.session.tokens) == PROMPT + generation.tokens
    assert generation.stats.reused == 0


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("error", [Interrupted, NotEnoughMemory])
def test_a_redirect_that_fails_half_way_changes_nothing(
    error: type[KeystrokeError], steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model("echo", EchoEngine(chunk=8), TOKENIZER)
    session = model.engine.session()
    generation = Generation(model, session, PROMPT)
    generation.prefill()
    for _ in range(steps):
        generation.advance()
    before = list(session.tokens)
    assert isinstance(session, HostSession)
    compute, runs = session._forward, iter(range(9))

    def failing(*arguments: Any) -> Any:
        if next(runs) == 1:
            raise error("no further")
        return compute(*arguments)

    for place in (0, 1):
        runs = iter(range(place, 9))
        with monkeypatch.context() as patch:
            patch.setattr(session, "_forward", failing)
            with pytest.raises(error):
                generation.redirect([7] * 40)
        assert list(session.tokens) == before
    with model.engine.session() as alone:
        alone.extend(before)
        assert generation.advance().tokens == alone.step().tokens


def test_a_redirect_that_is_interrupted_or_too_long_changes_nothing() -> None:
    model = echo(context_length=64)
    session = model.engine.session()
    generation = Generation(model, session, PROMPT, interrupt=Interrupt())
    generation.prefill()
    generation.advance()
    before = list(session.tokens)
    with pytest.raises(ContextOverflow):
        generation.redirect([1] * 64)
    assert list(session.tokens) == before
    generation.interrupt = Interrupt()
    generation.interrupt.set()
    with pytest.raises(Interrupted):
        generation.redirect([1] * 40)
    assert list(session.tokens) == before
    generation.interrupt = None
    assert generation.advance().tokens


def test_a_finished_answer_refuses_to_go_on() -> None:
    model = answers("")
    generation = Generation(model, model.engine.session(), PROMPT)
    list(generation)
    for call in (generation.advance, generation.stop, lambda: generation.redirect([1])):
        with pytest.raises(UsageError, match="ended"):
            call()


def test_two_answers_advanced_in_turn_do_not_touch_each_other() -> None:
    model = echo()
    params = GenerationParams(max_tokens=30)
    alone, _ = run(model, params)
    pair = [Generation(model, model.engine.session(), PROMPT, params) for _ in range(2)]
    for generation in pair:
        generation.prefill()
    while any(g.finish is None for g in pair):
        for generation in pair:
            if generation.finish is None:
                generation.advance()
    assert [g.text for g in pair] == [text(alone)] * 2


def test_steps_taken_together_give_what_advance_gives() -> None:
    model = echo()
    params = GenerationParams(max_tokens=20)
    alone, _ = run(model, params)
    pair = [Generation(model, model.engine.session(), PROMPT, params) for _ in range(2)]
    for generation in pair:
        generation.prefill()
    while pair[0].finish is None:
        requests = [g.next_step() for g in pair]
        steps = model.engine.step_many([r for r in requests if r is not None])
        for generation, step in zip(pair, steps, strict=True):
            generation.apply_step(step, 0.0)
    assert [g.text for g in pair] == [text(alone)] * 2


def test_the_receipt_counts_what_was_reused_and_computed() -> None:
    model = echo()
    session = model.engine.session()
    first = Generation(model, session, PROMPT * 20, GenerationParams(max_tokens=4))
    list(first)
    second = Generation(model, session, PROMPT * 20 + [7], GenerationParams(max_tokens=4))
    list(second)
    assert (first.stats.reused, first.stats.computed) == (0, 200)
    assert second.stats.reused + second.stats.computed == 201
    assert second.stats.reused >= 199
    assert len(second.stats.step_seconds) == second.stats.steps == 4


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [({"max_tokens": -1}, "max_tokens must be"), ({"stop": ("",)}, "must not be empty")],
)
def test_parameters_that_cannot_be_say_so(kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        GenerationParams(**kwargs)  # type: ignore[arg-type]


def test_an_empty_prompt_is_refused() -> None:
    model = echo()
    with pytest.raises(UsageError, match="prompt is empty"):
        Generation(model, model.engine.session(), [], GenerationParams(sampling=GREEDY))
