"""Models whose every opinion is noise, over a tokenizer with real merges: what a grammar must withstand."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Sequence

import numpy as np
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from keystroke.engine.base import Engine, EngineStats, Interrupt, ModelInfo, Sampling, Session
from keystroke.engine.generation import Chunk, Generation, GenerationParams
from keystroke.engine.grammar.constraint import Constraint
from keystroke.engine.grammar.matcher import Matcher
from keystroke.engine.host import HostSession
from keystroke.engine.model import Model
from keystroke.engine.speculative import Drafter
from keystroke.engine.tokenizer import Tokenizer
from keystroke.engine.tokenizer.huggingface import from_spec

_SAMPLE = """
{"name": "value", "values": [1, 2, 3], "items": [{"name": "a", "count": 10}], "text": "some words here"}
{"count": 12, "enabled": true, "nothing": null, "disabled": false, "name": "ab", "abc": ["abc", "bca", "cab"]}
def name(value): return value + 1\n    for item in items:\n        print(item, value)\n
aaa bbb ccc abc bca aabbcc ab ab ba ba (a+b)*c = "ab" ; x -> y ; value: 3.25, -17
"""


@functools.cache
def bpe_tokenizer() -> Tokenizer:
    """Bytes and 200 merges; ends answers with `<end>`."""
    machine = tokenizers.Tokenizer(models.BPE())
    machine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=456, initial_alphabet=sorted(alphabet), show_progress=False)
    machine.train_from_iterator([_SAMPLE] * 4, trainer)
    machine.add_special_tokens(["<end>", "<call>"])
    return from_spec(json.loads(machine.to_str()), {"eos_token": "<end>"})


class NoiseEngine(Engine):
    """Logits are noise seeded by the last tokens; `flat` makes all tokens about equally likely. `ahead`: is
    asked for steps as an engine that runs ahead is."""

    def __init__(
        self, seed: int = 0, *, context_length: int = 4096, flat: float = 1.0, ahead: bool = False
    ) -> None:
        tokenizer = bpe_tokenizer()
        self.seed, self.flat, self.runs_ahead = seed, flat, ahead
        end = tokenizer.special("<end>")
        assert end is not None
        self.info = ModelInfo(
            name="noise",
            architecture="noise",
            context_length=context_length,
            vocab_size=tokenizer.vocab_size + 5,  # padded, as real embeddings are
            layers=0,
            parameters=0,
            weight_bytes=0,
            kv_bytes_per_token=1,
            precision="fp32",
            eos=frozenset({end}),
        )
        self.steps = 0

    def session(self, scope: str = "") -> NoiseSession:
        return NoiseSession(self)

    def stats(self) -> EngineStats:
        return EngineStats(0, 0, 0, 0)

    def close(self) -> None:
        pass


class NoiseSession(HostSession):
    def __init__(self, engine: NoiseEngine) -> None:
        super().__init__(engine.info.context_length, chunk=8, tail=4)
        self._engine = engine

    def fork(self) -> Session:
        other = NoiseSession(self._engine)
        self._copy_state_to(other)
        return other

    def _forward(
        self, tokens: Sequence[int], start: int, rows: int, interrupt: Interrupt | None
    ) -> np.ndarray:
        engine = self._engine
        engine.steps += bool(rows)
        whole = [*self._held[:start], *tokens]
        logits = np.empty((rows, engine.info.vocab_size), dtype=np.float32)
        for row in range(rows):
            seen = whole[: len(whole) - rows + row + 1]
            dice = np.random.default_rng([engine.seed, len(seen), *seen[-3:]])
            logits[row] = dice.normal(size=engine.info.vocab_size) * engine.flat
        return logits


def noise(seed: int = 0, *, context_length: int = 4096, flat: float = 1.0, ahead: bool = False) -> Model:
    engine = NoiseEngine(seed, context_length=context_length, flat=flat, ahead=ahead)
    return Model("noise", engine, bpe_tokenizer())


class RandomDrafter(Drafter):
    """Right for a while, then wrong: `truth` is what will be generated."""

    def __init__(self, truth: Sequence[int], seed: int, vocab: int) -> None:
        self._truth = list(truth)
        self._random = random.Random(seed)
        self._vocab = vocab
        self._start = 0

    def begin(self, prompt: Sequence[int]) -> None:
        self._start = len(prompt)

    def propose(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
        at = len(tokens) - self._start
        right = self._truth[at : at + self._random.randint(0, limit)]
        return [*right, *(self._random.randrange(self._vocab) for _ in range(3))][:limit]


PROMPT = bpe_tokenizer().encode("def name(value):\n")


def answered(
    model: Model, params: GenerationParams, drafter: Drafter | None = None
) -> tuple[Generation, list[Chunk]]:
    """An answer made to its end, with the promises that every answer keeps."""
    session = model.engine.session()
    generation = Generation(model, session, PROMPT, params, drafter=drafter)
    chunks = list(generation)
    emitted = [t for c in chunks for t in c.tokens]
    assert list(session.tokens) == PROMPT + emitted
    assert generation.tokens == emitted
    assert generation.text == "".join(c.text for c in chunks)
    assert generation.stats.tokens == len(emitted)
    return generation, chunks


def matcher(constraint: Constraint) -> Matcher:
    from keystroke.engine.grammar.compiler import matcher_for

    model = noise()
    return matcher_for(constraint, model.tokenizer, model.engine.info)


def params(
    constraint: Constraint, limit: int = 60, sampling: Sampling | None = None, **more: object
) -> GenerationParams:
    return GenerationParams(max_tokens=limit, sampling=sampling or Sampling(), constraint=constraint, **more)  # type: ignore[arg-type]
