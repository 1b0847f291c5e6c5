"""Several attempts from one prompt: which run, which end early, which is taken, and that nothing is left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from keystroke.agent.attempts import (
    Attempt,
    AttemptEnd,
    CheckResult,
    EngineDecoder,
    Race,
    StopPolicy,
    WatchResult,
    WatchState,
    attempt_samplings,
    normalise,
    select_attempt,
)
from keystroke.agent.attempts.checker import CONTINUE, AttemptWatch
from keystroke.engine.base import (
    GREEDY,
    AllowedTokens,
    Engine,
    Interrupt,
    Sampling,
    Session,
    Step,
    StepRequest,
)
from keystroke.engine.echo import EOS, SPECIAL, EchoEngine, EchoSession
from keystroke.engine.generation import GenerationParams
from keystroke.engine.model import Model
from keystroke.engine.tokenizer.byte_tokens import ByteTokenizer
from keystroke.errors import EngineError, Interrupted, UsageError

Script = Callable[[str], str]


class BatchSession(EchoSession):
    """A session that says what its engine has for its seed."""

    def step(
        self,
        draft: Sequence[int] = (),
        sampling: Sampling = GREEDY,
        interrupt: Interrupt | None = None,
        allowed: AllowedTokens | None = None,
    ) -> Step:
        assert isinstance(self._engine, Batching)
        if interrupt is not None:
            interrupt.check()
        return self._engine.next(self, sampling)

    def fork(self) -> BatchSession:
        other = BatchSession(self._engine)
        self._copy_state_to(other)
        return other


class Batching(EchoEngine):
    """The deterministic engine, stepping several together as a GPU does, with an answer a seed."""

    def __init__(self, answers: Sequence[str], pace: float = 0.0) -> None:
        super().__init__(lambda prompt: "", max_batch=4)
        self.answers, self.pace = answers, pace
        self.widths: list[int] = []
        self.prompts: list[str] = []

    def session(self, scope: str = "") -> BatchSession:
        return BatchSession(self)

    def step_many(self, requests: Sequence[StepRequest]) -> list[Step]:
        self.widths.append(len(requests))
        return [self.next(request.session, request.sampling) for request in requests]

    def next(self, session: Session, sampling: Sampling) -> Step:
        time.sleep(self.pace)
        text = bytes(t for t in session.tokens if t < 256).decode()
        prompt, _, said = text.rpartition("|")
        answer = self.answers[sampling.seed % len(self.answers)].encode()
        if not said:
            self.prompts.append(prompt)
        token = answer[len(said.encode())] if len(said.encode()) < len(answer) else EOS
        session.extend([*session.tokens, token])
        return Step((token,), 0)


def model(engine: Engine) -> Model:
    return Model("scripted", engine, ByteTokenizer(SPECIAL, eos=EOS, vocab_size=320))


class Judging:
    """Passes what is in `good`; ends an attempt that says BAD."""

    def __init__(self, good: Sequence[str] = (), *, checks: bool = True) -> None:
        self.good, self.checks = good, checks
        self.seen: list[str] = []
        self.threads: set[str] = set()

    def watch(self) -> AttemptWatch:
        said = ""

        def heard(piece: str) -> WatchResult:
            nonlocal said
            said += piece
            return WatchResult(WatchState.HOPELESS, "it is bad") if "BAD" in said else CONTINUE

        return heard

    def check(self, text: str, interrupt: Interrupt) -> CheckResult | None:
        self.seen.append(text)
        self.threads.add(threading.current_thread().name)
        if not self.checks:
            return None
        return CheckResult(1.0 if text in self.good else 0.5 if "near" in text else 0.0, f"{text} is wrong")

    def key(self, text: str) -> str:
        return text.strip().lower()


def decoder(engine: EchoEngine, width: int = 0, tokens: int = 1024) -> EngineDecoder:
    return EngineDecoder(model(engine), GenerationParams(tokens), width=width)


def race(
    answers: Sequence[str],
    checker: Judging,
    count: int,
    *,
    pace: float = 0.0,
    width: int = 0,
    tokens: int = 1024,
    **options: Any,
) -> tuple[Race, Batching]:
    engine = Batching(answers, pace)
    chosen = [Sampling(temperature=1.0, seed=number) for number in range(count)]
    prompt = b"question|"
    return Race(decoder(engine, width, tokens), list(prompt), chosen, checker, **options), engine


def test_the_prompt_is_read_once_for_all_attempts() -> None:
    running, engine = race(["yes"] * 4, Judging(["yes"]), 4)
    running.run()
    assert engine.prefilled <= len(b"question|")


def test_attempts_advance_together() -> None:
    running, engine = race(["aaaa", "bbbb", "cccc", "dddd"], Judging(), 4)
    outcome = running.run()
    assert engine.widths == [4] * 5
    assert [attempt.text for attempt in outcome.attempts] == ["aaaa", "bbbb", "cccc", "dddd"]


def test_the_first_that_passes_wins_and_ends_the_others() -> None:
    endless = "an answer that nobody waits for " * 1000
    running, _ = race(["no", "yes", endless], Judging(["yes"]), 3, pace=0.001)
    outcome = running.run()
    assert outcome.passed
    assert outcome.winner is not None
    assert outcome.winner.text == "yes"
    assert outcome.attempts[2].end is AttemptEnd.BEATEN
    assert "first to pass" in outcome.summary()


def test_a_hopeless_attempt_is_ended_early() -> None:
    running, _ = race(["BAD and a long rest that is never written", "fine"], Judging(["fine"]), 2)
    outcome = running.run()
    assert outcome.attempts[0].end is AttemptEnd.HOPELESS
    assert outcome.attempts[0].text == "BAD"
    assert outcome.winner is outcome.attempts[1]


def test_a_failure_is_shown_to_a_later_attempt() -> None:
    checker = Judging(["right"])
    engine = Batching(["wrong", "right"])
    shown: list[str] = []

    def retry(failed: Attempt) -> list[int]:
        shown.append(failed.check_result.message if failed.check_result else failed.reason)
        return list(f"question, {failed.text} was wrong|".encode())

    chosen = [Sampling(temperature=1.0, seed=number) for number in range(2)]
    running = Race(decoder(engine, 1), list(b"question|"), chosen, checker, retry=retry)
    outcome = running.run()
    assert shown == ["wrong is wrong"]
    assert engine.prompts == ["question", "question, wrong was wrong"]
    assert outcome.attempts[1].retry_of == 0
    assert outcome.passed


def test_an_engine_that_steps_one_at_a_time_makes_no_more_attempts_than_needed() -> None:
    running, engine = race(["yes"], Judging(["yes"]), 8, width=1)
    outcome = running.run()
    assert len(outcome.attempts) == 1
    assert len(engine.prompts) == 1


def test_where_company_slows_an_attempt_the_others_start_together_when_the_first_is_refused() -> None:
    for answers, started in ((["yes"], 1), (["no.", "yes", "yes", "yes"], 4)):
        engine = Batching(answers)
        engine.batch_slows = True
        chosen = [Sampling(temperature=1.0, seed=number) for number in range(4)]
        outcome = Race(decoder(engine), list(b"question|"), chosen, Judging(["yes"])).run()
        assert outcome.passed
        assert len(outcome.attempts) == started
        assert set(engine.widths) <= {3}


def test_answers_of_which_most_agree_start_together_at_once() -> None:
    engine = Batching(["abc"])
    engine.batch_slows = True
    chosen = [Sampling(temperature=1.0, seed=number) for number in range(3)]
    Race(decoder(engine), list(b"question|"), chosen, Judging(["abc"]), policy=StopPolicy.AGREE).run()
    assert max(engine.widths) == 3


def test_no_more_than_the_width_decode_at_a_time() -> None:
    running, engine = race(["abc"], Judging(), 6, width=2)
    outcome = running.run()
    assert max(engine.widths) == 2
    assert len(outcome.attempts) == 6


def test_the_best_score_wins_where_none_passes() -> None:
    running, _ = race(["far", "near it", "far"], Judging(), 3)
    outcome = running.run()
    assert outcome.winner is not None
    assert outcome.winner.text == "near it"
    assert not outcome.passed
    assert "50%" in outcome.reason


def test_without_a_check_agreement_decides() -> None:
    running, _ = race(["one", "TWO", "two"], Judging(checks=False), 3)
    outcome = running.run()
    assert outcome.winner is not None
    assert outcome.winner.text == "TWO"
    assert outcome.reason == "2 of 3 agree"


def test_policy_agree_waits_for_all_and_takes_what_most_that_pass_agree_on() -> None:
    checker = Judging(["a", "b"])
    running, _ = race(["a", "b", "b", "c"], checker, 4, policy=StopPolicy.AGREE)
    outcome = running.run()
    assert sorted(checker.seen) == ["a", "b", "c"]  # what was written twice is checked once
    assert all(attempt.check_result is not None for attempt in outcome.attempts)
    assert outcome.winner is not None
    assert outcome.winner.text == "b"
    assert outcome.reason == "it passed the check and 2 of 3 agree"


def test_an_answer_without_end_is_cut_and_not_taken() -> None:
    running, _ = race(["x" * 500, "short"], Judging(checks=False), 2, tokens=20)
    outcome = running.run()
    assert outcome.attempts[0].end is AttemptEnd.LENGTH
    assert outcome.winner is outcome.attempts[1]


def test_nothing_usable_is_said_so() -> None:
    running, _ = race(["BAD"], Judging(), 2)
    outcome = running.run()
    assert outcome.winner is None
    assert "no attempt came to an end" in outcome.summary()


@pytest.mark.parametrize("width", [1, 4])
def test_every_session_is_closed_however_the_race_ends(width: int) -> None:
    running, engine = race(["yes", "no", "a longer one"], Judging(["yes"]), 3, width=width)
    running.run()
    assert engine.stats().sessions == 0

    class Broken(Judging):
        def check(self, text: str, interrupt: Interrupt) -> CheckResult | None:
            raise EngineError("the check broke")

    running, engine = race(["yes", "no, and much longer than the other"], Broken(), 2, width=width)
    with pytest.raises(EngineError, match="the check broke"):
        running.run()
    assert engine.stats().sessions == 0


@pytest.mark.parametrize("width", [1, 4])
def test_an_interrupt_stops_it_between_two_steps(width: int) -> None:
    interrupt = Interrupt()
    checker = Judging()
    heard = checker.watch

    def watch() -> AttemptWatch:
        inner = heard()

        def stop(piece: str) -> WatchResult:
            interrupt.set()
            return inner(piece)

        return stop

    checker.watch = watch  # type: ignore[method-assign]
    running, engine = race(["x" * 10_000], checker, 4, width=width, interrupt=interrupt)
    with pytest.raises(Interrupted):
        running.run()
    assert len(engine.widths) <= 2
    assert engine.stats().sessions == 0


def test_checks_that_nobody_waits_for_are_told_to_end() -> None:
    ended = threading.Event()

    class Slow(Judging):
        def check(self, text: str, interrupt: Interrupt) -> CheckResult | None:
            if text == "yes":
                return CheckResult(1.0)
            assert interrupt.wait(60)
            ended.set()
            return None

    running, _ = race(["no", "yes"], Slow(), 2)
    assert running.run().passed
    assert ended.wait(60)


def test_checks_run_beside_the_engine() -> None:
    checker = Judging(["yes"])
    running, _ = race(["yes"], checker, 1)
    running.run()
    assert checker.threads
    assert threading.current_thread().name not in checker.threads


def test_a_race_needs_an_attempt() -> None:
    with pytest.raises(UsageError, match="at least one"):
        Race(decoder(Batching([""])), [1], [], Judging())


def test_the_first_attempt_is_the_likeliest_and_each_other_has_its_own_seed() -> None:
    chosen = attempt_samplings(16, seed=5)
    assert chosen[0].temperature == 0.0
    assert len({s.seed for s in chosen[1:]}) == 15
    assert chosen[1].temperature < chosen[-1].temperature
    assert len(attempt_samplings(1)) == 1


def test_likelihood_decides_where_nothing_else_does() -> None:
    """With the plain deterministic engine: two different answers, no check, no agreement."""
    engine = EchoEngine()
    chosen = [Sampling(temperature=0.0), Sampling(temperature=5.0, seed=3)]
    running = Race(
        EngineDecoder(model(engine), GenerationParams(24, ignore_eos=True)),
        list(b"def f("),
        chosen,
        Judging(checks=False),
    )

    def complete() -> AttemptWatch:
        count = 0

        def heard(piece: str) -> WatchResult:
            nonlocal count
            count += 1
            return WatchResult(WatchState.COMPLETE) if count == 20 else CONTINUE

        return heard

    running._checker.watch = complete  # type: ignore[method-assign]
    outcome = running.run()
    one, other = outcome.attempts
    assert one.text != other.text
    assert one.likelihood is not None
    assert other.likelihood is not None
    assert one.likelihood > other.likelihood
    assert outcome.winner is one
    assert outcome.reason == "it is the likeliest"


# ── choosing and comparing ────────────────────────────────────────────────────────────────────


def attempt(number: int, text: str, score: float | None = None) -> Attempt:
    verdict = None if score is None else CheckResult(score)
    return Attempt(number, text=text, end=AttemptEnd.FINISHED, check_result=verdict)


def test_a_check_outweighs_agreement() -> None:
    made = [attempt(0, "a", 0.2), attempt(1, "a", 0.2), attempt(2, "b", 0.9)]
    assert select_attempt(made, str)[0] is made[2]


def test_unfinished_attempts_are_never_taken() -> None:
    cut = Attempt(0, text="a", end=AttemptEnd.LENGTH)
    assert select_attempt([cut], str) == (None, "no attempt came to an end that could be used")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("def f(a):\n    return a + 1\n", 'def f(x):\n    """Adds."""\n    # one more\n    return x+1\n'),
        ("def f(a):\n    b = a\n    return b\n", "def f(n: int) -> int:\n    m = n\n    return m\n"),
        ("x: int = 1\n", "x = 1\n"),
    ],
)
def test_python_that_means_the_same_has_one_key(one: str, other: str) -> None:
    assert normalise(one, "python") == normalise(other, "python")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("def f(a, b):\n    return a - b\n", "def f(a, b):\n    return b - a\n"),
        ("def f(a):\n    return a\n", "def g(a):\n    return a\n"),
        ("f(x=1)\n", "f(y=1)\n"),
    ],
)
def test_python_that_means_something_else_has_another_key(one: str, other: str) -> None:
    assert normalise(one, "python") != normalise(other, "python")


def test_other_languages_are_compared_without_layout_and_comments() -> None:
    one = normalise("int f(int a) { return a; } // one", "c")
    assert one == normalise("int f(int a)\n{\n  return a;\n}\n", "c")
    assert one != normalise("int f(int a) { return -a; }", "c")


def test_what_does_not_parse_is_compared_as_text() -> None:
    assert normalise("def (  \n", "python") == normalise("def (\n\n", "python")
