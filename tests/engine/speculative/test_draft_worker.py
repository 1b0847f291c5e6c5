"""A worker drafts beside the target: it changes no text, and whatever becomes of it, answers go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from keystroke.config import load_settings
from keystroke.engine.base import GREEDY, Interrupt, Sampling
from keystroke.engine.echo import BOS, EOS, SPECIAL, VOCAB, EchoEngine
from keystroke.engine.fim import FimTemplate
from keystroke.engine.generation import Finish, Generation, GenerationParams
from keystroke.engine.load import load_model
from keystroke.engine.locate import shipped
from keystroke.engine.model import Model
from keystroke.engine.speculative import AdaptiveDrafter, Drafter, cost_table, drafter_for
from keystroke.engine.speculative.cost import remember_cost
from keystroke.engine.speculative.draft_worker import LIVES, DraftWorker, Record
from keystroke.engine.speculative.worker_draft import Price, WorkerDrafter
from keystroke.engine.speculative.worker_guess import Guessing, TextGuess, TokenGuess
from keystroke.engine.speculative.worker_messages import (
    Begin,
    Frames,
    Load,
    Piece,
    Told,
    ToWorker,
    framed,
    to_worker,
)
from keystroke.engine.speculative.worker_process import Desk
from keystroke.engine.tokenizer import ByteTokenizer
from keystroke.errors import ConfigError

TOKENIZER = ByteTokenizer(SPECIAL, bos=BOS, eos=EOS, vocab_size=VOCAB)
FLAT = cost_table({1: 1.0, 32: 1.3})
ANSWER = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n"
MOST = 32
SAMPLED = Sampling(temperature=0.8, seed=11)


def ended(process: int) -> bool:
    """Whether a process is gone, or only its name is left."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def until(true: Callable[[], bool]) -> None:
    """Patience for a loaded machine; what never comes fails."""
    deadline = time.monotonic() + 60.0
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def target(step: float = 0.0) -> Model:
    engine = EchoEngine(lambda _: ANSWER, step_cost=step, row_cost=step / 50)
    remember_cost(engine, FLAT)
    return Model("echo", engine, TOKENIZER)


def said(model: Model, drafter: Drafter | None, sampling: Sampling = GREEDY) -> Generation:
    with model.engine.session() as session:
        answer = Generation(
            model,
            session,
            TOKENIZER.encode("# arithmetic\n"),
            GenerationParams(max_tokens=MOST, sampling=sampling),
            drafter,
        )
        for _ in answer:
            pass
    return answer


@pytest.fixture(scope="module")
def load() -> Load:
    path = shipped()
    if path is None:
        pytest.skip("this checkout brings no weights")
    flags = {"engine.kind": "onnx", "engine.threads": 1, "engine.exact": False, "engine.context": 512}
    return Load(str(path), flags)


@pytest.fixture(params=["ahead", "turns"])
def worker(request: pytest.FixtureRequest, load: Load) -> Iterator[DraftWorker]:
    made = DraftWorker(load, TOKENIZER, ahead=request.param == "ahead")
    made.start("x", VOCAB)
    yield made
    made.close()


# With a real model in a real process


def test_text_from_a_worker_is_drafted_and_the_answer_is_the_same(worker: DraftWorker) -> None:
    model = target()
    plain, hot = said(model, None), said(model, None, SAMPLED)
    drafted = said(target(step=0.2), AdaptiveDrafter((), FLAT, None, WorkerDrafter(worker)))
    assert drafted.tokens == plain.tokens
    assert drafted.stats.accepted > 0
    assert drafted.stats.steps < plain.stats.steps
    assert said(model, drafter_for(model.engine, draft=worker), SAMPLED).tokens == hot.tokens


def test_a_worker_that_is_killed_fails_no_answer_and_comes_back_for_the_next(worker: DraftWorker) -> None:
    model, first = target(step=0.02), worker.pid
    assert first is not None
    drafter = drafter_for(model.engine, draft=worker)
    with model.engine.session() as session:
        answer = Generation(model, session, TOKENIZER.encode("# a\n"), GenerationParams(40), drafter)
        answer.prefill()
        for _ in range(4):
            answer.advance()
        os.kill(first, signal.SIGKILL)
        while answer.finish is None:
            answer.advance()
    assert answer.text == ANSWER[:40]
    worker.listen()
    assert worker.pid != first
    again = said(model, drafter_for(model.engine, draft=worker))
    assert ANSWER.startswith(again.text)
    assert worker.pid not in (None, first)
    for _ in range(LIVES):  # one that keeps dying is left alone
        if worker.pid is not None:
            os.kill(worker.pid, signal.SIGKILL)
            until(lambda: not worker.wait(time.monotonic() + 0.1) and not worker.alive)
        said(model, drafter_for(model.engine, draft=worker))
    assert not worker.alive


def test_a_worker_that_hangs_is_waited_for_once_and_no_longer_than_a_step(worker: DraftWorker) -> None:
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)
    model = target()
    drafter = WorkerDrafter(worker)
    drafter.begin(TOKENIZER.encode("# arithmetic\n"))
    price = Price(lambda rows: FLAT[rows], 0.05)
    assert list(drafter.offer(8, 1.0, price)) == []
    assert drafter.waited > 0.0
    assert worker.quiet
    for _ in range(5):
        assert list(drafter.offer(8, 1.0, price)) == []
        assert drafter.waited == 0.0
    assert said(model, drafter_for(model.engine, draft=worker)).text == ANSWER[:MOST]
    process = worker.pid
    worker.close()  # also one that cannot hear
    until(lambda: ended(process))


def test_an_interrupt_ends_an_answer_that_a_worker_drafts_for(worker: DraftWorker) -> None:
    model, interrupt = target(step=0.01), Interrupt()
    drafter = drafter_for(model.engine, draft=worker)
    with model.engine.session() as session:
        answer = Generation(model, session, TOKENIZER.encode("# a\n"), GenerationParams(), drafter, interrupt)
        answer.prefill()
        answer.advance()
        interrupt.set()
        while answer.finish is None:
            answer.advance()
    assert answer.finish is Finish.INTERRUPTED
    assert said(model, drafter_for(model.engine, draft=worker)).finish is Finish.LENGTH


def test_models_of_one_vocabulary_share_tokens_and_their_noise(load: Load) -> None:
    flags = {
        "engine.kind": "onnx",
        "engine.threads": 1,
        "engine.context": 512,
        "speculation.draft_model": load.model,
        "speculation.draft_worker": "turns",
        "speculation.draft_threads": 1,
    }
    model = load_model(Path(load.model), load_settings(flags))
    assert isinstance(model.draft, DraftWorker)
    assert model.draft.tokens
    remember_cost(model.engine, FLAT)
    prompt = model.prompt("def fibonacci(n):\n")
    for sampling in (GREEDY, SAMPLED):
        texts = []
        for drafter in (None, _Patient(model.draft)):
            with model.engine.session() as session:
                params = GenerationParams(max_tokens=24, sampling=sampling, ignore_eos=True)
                answer = Generation(model, session, prompt, params, drafter)
                for _ in answer:
                    pass
            texts.append(answer.tokens)
        assert texts[0] == texts[1]
        # The same weights, but for a rounding of their sums: nearly every guess is right, also a sampled one.
        assert answer.stats.accepted >= 0.7 * answer.stats.drafted > 1
    model.draft.close()
    model.engine.close()


class _Patient(WorkerDrafter):
    """Waits for what it asks, however slow the machine."""

    def propose(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
        return self.offer(min(limit, 3), 1.0, Price(lambda rows: FLAT[rows], 30.0))


def test_a_worker_ends_with_its_parent_however_that_ends(load: Load) -> None:
    program = (
        "import sys, time\n"
        "from keystroke.engine.speculative.draft_worker import DraftWorker\n"
        "from keystroke.engine.speculative.worker_messages import Load\n"
        "from keystroke.engine.tokenizer import ByteTokenizer\n"
        f"worker = DraftWorker(Load({load.model!r}, {load.flags!r}), ByteTokenizer({{}}, vocab_size=256))\n"
        "worker.start('x', 1)\n"
        "print(worker.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-P", "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: ended(child))


def test_a_draft_model_that_cannot_be_run_is_said_when_the_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be run.*speculation\.draft_worker"):
        DraftWorker(Load(str(tmp_path / "no.gguf"), {}), TOKENIZER).start("x", VOCAB)


# What is known without a process


class Written:
    """A pipe that keeps what is sent; the other side says what the test wants."""

    def __init__(self, worker: DraftWorker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.messages: list[object] = []
        monkeypatch.setattr(worker, "send", self.messages.append)


def piece(drafter: WorkerDrafter, at: int, text: str, *, branch: int = 1, chance: float = 0.99) -> None:
    drafter.hear(Piece(drafter._number, branch, at, None, text.encode(), chance, 0.001, False))


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> DraftWorker:
    """A worker without a process."""
    monkeypatch.setattr(DraftWorker, "_spawn", lambda self: None)
    return DraftWorker(Load("nobody"), TOKENIZER)


def test_a_guess_is_a_draft_only_where_it_goes_on_from_what_was_said(still: DraftWorker) -> None:
    drafter = WorkerDrafter(still)
    drafter.begin(TOKENIZER.encode("x = "))
    piece(drafter, 0, "foo(")
    piece(drafter, 4, "bar, ")
    piece(drafter, 9, "ba")
    assert TOKENIZER.decode(list(drafter.propose([], 32))) == "foo(bar,"  # the last word may go on
    drafter.observe(TOKENIZER.encode("foo(b"))
    assert TOKENIZER.decode(list(drafter.propose([], 32))) == "ar,"
    drafter.observe(TOKENIZER.encode("i"))
    assert list(drafter.propose([], 32)) == []
    piece(drafter, 6, "g)", branch=2)
    piece(drafter, 8, "\n", branch=2)
    assert TOKENIZER.decode(list(drafter.propose([], 32))) == "g)"


def test_half_a_character_is_no_draft_and_breaks_nothing(still: DraftWorker) -> None:
    drafter = WorkerDrafter(still)
    drafter.begin(TOKENIZER.encode("x"))
    euro = "€ and more".encode()
    drafter.hear(Piece(drafter._number, 1, 0, None, euro[:2], 0.9, 0.001, False))
    assert list(drafter.propose([], 32)) == []
    drafter.hear(Piece(drafter._number, 1, 2, None, euro[2:], 0.9, 0.001, False))
    assert bytes(drafter.propose([], 32)) == "€ and".encode()
    drafter.observe(list(euro[:1]))  # the target is in the middle of it
    assert list(drafter.propose([], 32)) == []


def test_a_draft_is_as_long_as_its_chances_pay_for(
    still: DraftWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DraftWorker, "alive", True)
    still.quiet = True  # nothing more will come
    drafter = WorkerDrafter(still)
    drafter.begin(TOKENIZER.encode("x"))
    for at, (letter, chance) in enumerate(
        [("a", 0.99), ("b", 0.99), ("c", 0.2), ("d", 0.99), (" ", 0.9), (".", 0.9)]
    ):
        piece(drafter, at, letter, chance=chance)
    dear = Price(lambda rows: 1.0 + 0.4 * (rows - 1), 0.1)
    assert TOKENIZER.decode(list(drafter.offer(8, 1.0, dear))) == "ab"
    assert list(drafter.offer(8, 3.0, dear)) == []  # somebody else promises more
    hopeless = Price(float, 0.1)
    assert list(drafter.offer(8, 1.0, hopeless)) == []


def test_what_came_true_is_learned_by_how_sure_the_worker_was() -> None:
    record = Record()
    sure, unsure = record.kind(0.99), record.kind(0.1)
    assert record.likelihood(sure) > record.likelihood(unsure)
    for _ in range(100):
        record.saw(sure, False)
        record.saw(unsure, True)
    assert record.likelihood(sure) < 0.2 < 0.8 < record.likelihood(unsure)
    before = record.likelihood(sure)
    for _ in range(500):
        record.held_back()
    assert record.likelihood(sure) > before


def test_a_worker_whose_drafts_never_pay_is_given_no_room_for_a_while(
    still: DraftWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DraftWorker, "alive", True)
    pipe = Written(still, monkeypatch)
    drafter = WorkerDrafter(still)
    drafter.begin(TOKENIZER.encode("x"))
    rooms = []
    for _ in range(600):
        drafter.offer(8, 1.0, Price(float, 0.0))
        drafter.observe(TOKENIZER.encode("y"))
        told = pipe.messages[-1]
        assert isinstance(told, Told)
        rooms.append(told.room)
    assert rooms[0] > 0
    assert 0.5 < rooms.count(0) / len(rooms) < 0.9
    assert rooms[-1] > 0 or any(rooms[300:])  # and then tried again


def test_a_prompt_that_fills_a_gap_is_told_as_text_before_and_behind(
    still: DraftWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = {"<p>": 300, "<s>": 301, "<m>": 302}
    tokenizer = ByteTokenizer(SPECIAL | marks, bos=BOS, eos=EOS, vocab_size=VOCAB)
    for order in ("psm", "spm"):
        fim = FimTemplate("<p>", "<s>", "<m>", order=order)
        still.tokenizer, still.fim = tokenizer, fim
        pipe = Written(still, monkeypatch)
        WorkerDrafter(still).begin(fim.tokens(tokenizer, "before", "behind"))
        begun = pipe.messages[-1]
        assert isinstance(begun, Begin)
        assert (begun.before, begun.after) == ("before", "behind")


# The worker's own side


def guessed(guess: Guessing, pieces: int) -> list[Piece]:
    return [guess.piece(1, Interrupt()) for _ in range(pieces)]


def test_tokens_guessed_go_on_where_they_came_true_and_are_taken_back_where_not() -> None:
    model = Model("echo", EchoEngine(), TOKENIZER)
    guess = TokenGuess(model, [1, 2, 3], GREEDY, 8)
    first = guessed(guess, 4)
    assert [p.at for p in first] == [0, 1, 2, 3]
    said_so = [p.token for p in first if p.token is not None]
    guess.told(Told(1, 8, tokens=said_so[:3]))
    assert (guess.ahead, guess.branch) == (1, 0)
    guess.told(Told(1, 8, tokens=[300]))
    assert (guess.ahead, guess.branch) == (0, 1)
    (after,) = guessed(guess, 1)
    assert after.at == 4
    with model.engine.session() as session:
        session.extend([1, 2, 3, *said_so[:3], 300])
        assert session.step().tokens[0] == after.token


def test_text_guessed_follows_the_target_through_other_words_and_past_its_context() -> None:
    model = Model("echo", EchoEngine(context_length=48), TOKENIZER)
    guess = TextGuess(model, "before", None, 8)
    told = b""
    for round_ in range(30):
        pieces = guessed(guess, 3)
        assert pieces[0].at == len(told)
        new = b"".join(p.text for p in pieces)[: round_ % 3] + "é!"[round_ % 2].encode()
        for byte in new:  # a character comes in halves
            guess.told(Told(1, 8, text=bytes([byte])))
        told += new
        assert guess.ahead == 0


def test_the_sequence_told_of_last_goes_first_and_old_ones_are_let_go() -> None:
    engine = EchoEngine()
    model = Model("echo", engine, TOKENIZER)
    desk = Desk(lambda begin: TokenGuess(model, begin.tokens or [], begin.sampling, begin.room))
    for number in range(1, 8):
        desk.take(Begin(number, 2, GREEDY, [1, number]))
    assert list(desk.sequences) == [4, 5, 6, 7]
    assert engine.stats().sessions == 4
    desk.take(Told(5, 1, tokens=[9]))
    assert desk.waiting is not None
    number, guess = desk.waiting
    assert number == 5
    guessed(guess, 1)
    assert desk.waiting[0] == 7
    desk.take(Told(99, 1, tokens=[9]))  # nobody's
    assert 99 not in desk.sequences


def test_messages_arrive_whole_however_the_pipe_cuts_them() -> None:
    sent: list[ToWorker] = [
        Begin(1, 2, SAMPLED, None, "vor€", None),
        Told(1, 4, text=b"\xff\x00"),
        Told(2, 0, tokens=[1, 2]),
    ]
    data = b"".join(framed(message) for message in sent)
    for size in (1, 3, 7, len(data)):
        frames = Frames()
        found = [
            to_worker.decode(payload)
            for start in range(0, len(data), size)
            for payload in frames.feed(data[start : start + size])
        ]
        assert found == sent
    with pytest.raises(ValueError, match="beyond all use"):
        list(Frames().feed(b"\xff" * 8))
