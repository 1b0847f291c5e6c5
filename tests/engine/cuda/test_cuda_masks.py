"""Choices under a mask, made by the kernel: those of engine/sampler.py, whoever is beside them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from cuda_emulator import EmulatedLauncher
from cuda_models import tiny_engine, tiny_spec, tiny_weights

from keystroke.engine.base import Mask, Sampling, StepRequest
from keystroke.engine.cuda.engine import CudaEngine
from keystroke.engine.cuda.plan import Bucket, StepShape
from keystroke.engine.cuda.step import Parameters
from keystroke.engine.echo import BOS, EOS, SPECIAL
from keystroke.engine.generation import Finish, Generation, GenerationParams
from keystroke.engine.grammar.constraint import json_schema, regex
from keystroke.engine.model import Model
from keystroke.engine.speculative import Drafter
from keystroke.engine.tokenizer import ByteTokenizer

VOCAB = 203
PROMPT = [5, 17, 99, 3, 44, 120, 7, 8, 9, 11]


class Rows:
    """A mask for each row: few tokens, some, or nearly all."""

    def __init__(self, seed: int, share: float, late: float = 0.0) -> None:
        self._seed, self._share, self._late = seed, share, late
        self.asked: list[int] = []

    def row(self, index: int) -> Mask:
        time.sleep(self._late)
        self.asked.append(index)
        dice = np.random.default_rng([self._seed, index])
        bits = dice.random(VOCAB) < self._share
        bits[dice.integers(VOCAB)] = True
        packed = np.zeros(28, dtype=np.uint8)
        packed[:26] = np.packbits(bits, bitorder="little")
        return packed.view(np.uint32)

    def permits(self, index: int, token: int) -> bool:
        return False  # not known: the row decides


@pytest.fixture(scope="module")
def engine() -> CudaEngine:
    return tiny_engine(tiny_spec())


SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0, seed=3),
    Sampling(temperature=0.7, top_k=4, seed=4),
    Sampling(temperature=1.5, top_p=0.6, min_p=0.01, seed=5),
]


@pytest.mark.parametrize(
    ("sampling", "share"), list(zip(SAMPLINGS, (0.05, 0.97, 0.2, 0.97), strict=True)), ids=str
)
def test_the_kernel_chooses_what_the_sampler_chooses(
    engine: CudaEngine, sampling: Sampling, share: float
) -> None:
    with engine.session() as session:
        for seed in range(2):
            drafted: list[int] = []
            for size in (0, 2):
                rows = Rows(seed, share)
                session.extend(PROMPT)
                host = session.step(drafted[:size], replace(sampling, logprobs=0), allowed=rows)
                session.extend(PROMPT)
                device = session.step(drafted[:size], sampling, allowed=rows)
                assert (device.tokens, device.accepted) == (host.tokens, host.accepted)
                drafted = [*host.tokens, 1, 2]


def test_masked_and_free_sequences_step_together_as_they_do_alone(engine: CudaEngine) -> None:
    alone: list[tuple[int, ...]] = []
    drafts: list[Sequence[int]] = [(), (3, 4), ()]
    masks = [Rows(1, 0.05), Rows(2, 0.3), None]
    samplings = [Sampling(), Sampling(temperature=1.0, seed=9), Sampling(temperature=1.0, top_k=5, seed=1)]
    for draft, mask, sampling in zip(drafts, masks, samplings, strict=True):
        with engine.session() as session:
            session.extend(PROMPT)
            alone.append(session.step(draft, sampling, allowed=mask).tokens)
    sessions = [engine.session() for _ in drafts]
    for session in sessions:
        session.extend(PROMPT)
    requests = [
        StepRequest(session, draft, sampling, mask)
        for session, draft, sampling, mask in zip(sessions, drafts, samplings, masks, strict=True)
    ]
    assert [step.tokens for step in engine.step_many(requests)] == alone
    for session in sessions:
        session.close()


class ThreadedLauncher(EmulatedLauncher):
    """Launches return at once, as a GPU's do."""

    asynchronous = True

    def launch(self, parameters: Parameters, bucket: Bucket, sparse: bool, shape: StepShape) -> None:
        copied = Parameters.from_buffer_copy(parameters)  # a launch takes its parameters with it
        self._running = threading.Thread(target=super().launch, args=(copied, bucket, sparse, shape))
        self._running.start()

    def check(self) -> None:
        self._running.join()


def test_masks_that_come_while_the_step_runs_are_waited_for() -> None:
    weights = tiny_weights(tiny_spec())
    with tiny_engine(tiny_spec()) as prompt_one, prompt_one.session() as session:
        session.extend(PROMPT)
        expected = session.step((7, 8), Sampling(), allowed=Rows(4, 0.1))
    late = CudaEngine(weights, ThreadedLauncher(weights.plan), 4096)
    with late, late.session() as session:
        session.extend(PROMPT)
        rows = Rows(4, 0.1, late=0.02)
        assert session.step((7, 8), Sampling(), allowed=rows) == expected
        assert rows.asked == [0, 1, 2]

        class Broken:
            def row(self, index: int) -> Mask:
                raise ValueError("no mask")

            def permits(self, index: int, token: int) -> bool:
                return False

        session.extend(PROMPT)
        with pytest.raises(ValueError, match="no mask"):
            session.step((), Sampling(), allowed=Broken())
        assert session.step((7, 8), Sampling(), allowed=Rows(4, 0.1)) == expected


class Guesses(Drafter):
    def __init__(self, truth: Sequence[int], seed: int) -> None:
        self._truth, self._dice, self._start = list(truth), random.Random(seed), 0

    def begin(self, prompt: Sequence[int]) -> None:
        self._start = len(prompt)

    def propose(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
        at = len(tokens) - self._start
        return [*self._truth[at : at + self._dice.randint(0, 6)], self._dice.randrange(256)][:limit]


@pytest.mark.parametrize("temperature", [1.2])
def test_an_answer_held_to_a_grammar_is_the_same_on_the_device_and_on_the_host_and_with_drafts(
    temperature: float,
) -> None:
    spec = replace(tiny_spec(layers=1), vocab_size=320, eos=frozenset({EOS}))
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "on": {"type": "boolean"}},
        "required": ["name", "on"],
        "additionalProperties": False,
    }
    tokenizer = ByteTokenizer(SPECIAL, bos=BOS, eos=EOS, vocab_size=320)
    with tiny_engine(spec) as engine:
        model = Model("tiny", engine, tokenizer)
        for constraint in (json_schema(schema), regex("[a-f]{3,6};")):
            answers = []
            truth: list[int] = []
            for logprobs, drafts in ((None, False), (0, False), (None, True)):
                sampling = Sampling(temperature, seed=11, logprobs=logprobs)
                with engine.session() as session:
                    drafter = Guesses([*truth, 1], 3) if drafts else None
                    params = GenerationParams(60, sampling, constraint=constraint)
                    generation = Generation(model, session, PROMPT, params, drafter=drafter)
                    text = "".join(chunk.text for chunk in generation)
                    truth = generation.tokens
                    answers.append((text, generation.finish, tuple(truth)))
            assert answers[0] == answers[1] == answers[2]
            assert answers[0][1] is Finish.STOP


def test_a_long_run_that_is_forced_is_read_like_a_prompt() -> None:
    spec = replace(tiny_spec(layers=1), vocab_size=320, eos=frozenset({EOS}))
    tokenizer = ByteTokenizer(SPECIAL, bos=BOS, eos=EOS, vocab_size=320)
    constant = "a constant text that is longer than any step takes along, "
    with tiny_engine(spec) as engine:
        model = Model("tiny", engine, tokenizer)
        with engine.session() as session:
            params = GenerationParams(200, constraint=regex(f"{constant}[ab]{{3}}"))
            generation = Generation(model, session, PROMPT, params)
            text = "".join(chunk.text for chunk in generation)
        assert text[:-3] == constant
        assert set(text[-3:]) <= {"a", "b"}
        with engine.session() as session:  # the KV is what a prompt's would be
            session.extend([*PROMPT, *constant.encode()])
            assert session.step(allowed=_only("ab")).tokens == (ord(text[-3]),)


def _only(letters: str) -> Rows:
    class Only(Rows):
        def row(self, index: int) -> Mask:
            mask = np.zeros(10, dtype=np.uint32)
            for letter in letters.encode():
                mask[letter >> 5] |= np.uint32(1 << (letter & 31))
            return mask

    return Only(0, 0.0)
