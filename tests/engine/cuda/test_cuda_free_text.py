"""Free text with tools on offer goes the way of text without: no mask, the same steps ahead, the same drafts.

Nothing is measured: what the engine is asked for is counted, the kernel's own source running on the emulator.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from cuda_emulator import EmulatedLauncher
from cuda_models import tiny_spec, tiny_weights
from test_cuda_draft import SPEC, tiny_head

from keystroke.assist.tool_calls.forms import HERMES
from keystroke.assist.tool_calls.grammar import calls_constraint
from keystroke.assist.tool_calls.tools import OfferedTool, whole_toolset
from keystroke.engine.base import Mask, Sampling
from keystroke.engine.cuda.engine import CudaEngine
from keystroke.engine.generation import Generation, GenerationParams
from keystroke.engine.grammar import matcher
from keystroke.engine.grammar.constraint import Constraint, regex
from keystroke.engine.grammar.matcher import Matcher
from keystroke.engine.model import Model
from keystroke.engine.speculative.engine_draft import EngineDrafter
from keystroke.engine.tokenizer import Tokenizer

PROMPT = [(11 * i * i + 3 * i) % 202 for i in range(40)]
END = 202


class Letters(Tokenizer):
    """203 tokens, as the tiny models have: every letter of ASCII, pairs of them, and an end."""

    vocab_size = 203
    eos = END

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return list(text.encode("ascii"))

    def token_bytes(self, token: int) -> bytes:
        if token == END:
            return b"<end>"
        return bytes([token]) if token < 128 else bytes([97 + token % 26, 97 + token // 26])

    def special(self, text: str) -> int | None:
        return END if text == "<end>" else None

    def is_special(self, token: int) -> bool:
        return token == END


LETTERS = Letters()
TOOLS = calls_constraint(whole_toolset([OfferedTool("f")]), HERMES, LETTERS)


class Counts(Counter[str]):
    """What an engine does, by name."""

    def __init__(self, engine: CudaEngine, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._patch = patch
        self._count(engine._stepper, "start")
        self._count(engine._stepper, "launch_next")
        self._count(engine, "_claim_ahead", lambda launch: launch is not None)
        self._count(engine, "cancel_ahead", lambda _: False)
        self._count(Matcher, "row")
        if engine.head is not None:
            self._count(engine.head, "start", name="drafted by the head")

    def _count(self, owner: object, method: str, counts: object = None, name: str = "") -> None:
        real = getattr(owner, method)

        def counted(*given: object, **named: object) -> object:
            result = real(*given, **named)
            self[name or method] += 1 if counts is None else counts(result)  # type: ignore[operator]
            return result

        self._patch.setattr(owner, method, counted)


def written(
    engine: CudaEngine, sampling: Sampling, constraint: Constraint | None, *, drafts: bool, count: int = 12
) -> tuple[list[int], int, int, int]:
    model = Model("tiny", engine, LETTERS)
    drafter = EngineDrafter(engine) if drafts else None
    with engine.session() as session:
        wanted = GenerationParams(count, sampling, constraint=constraint)
        generation = Generation(model, session, PROMPT, wanted, drafter=drafter)
        for _ in generation:
            pass
    stats = generation.stats
    return generation.tokens, stats.steps, stats.drafted, stats.accepted


@pytest.fixture(scope="module")
def plain() -> CudaEngine:
    weights = tiny_weights(replace(tiny_spec(), eos=frozenset({END})))
    return CudaEngine(weights, EmulatedLauncher(weights.plan), 4096)


@pytest.fixture(scope="module")
def drafting() -> CudaEngine:
    weights = tiny_weights(replace(SPEC, eos=frozenset({END})))
    return CudaEngine(weights, EmulatedLauncher(weights.plan), 4096, draft_head=tiny_head())


@pytest.mark.parametrize(
    ("drafts", "temperature"), [(False, 0.9), (True, 0.0)], ids=["steps ahead", "guesses ahead"]
)
def test_free_text_with_tools_on_offer_is_asked_for_as_text_without_tools(
    plain: CudaEngine, drafting: CudaEngine, drafts: bool, temperature: float
) -> None:
    engine, sampling = drafting if drafts else plain, Sampling(temperature, seed=5)
    rows = []
    for constraint in (None, TOOLS):
        with pytest.MonkeyPatch.context() as patch:
            counts = Counts(engine, patch)
            rows.append((written(engine, sampling, constraint, drafts=drafts), dict(counts)))
    assert rows[0] == rows[1]
    assert "row" not in rows[1][1]
    assert rows[1][1]["_claim_ahead"] > 0  # steps that were under way before they were asked for


def test_nothing_runs_ahead_of_a_step_whose_grammar_decides(drafting: CudaEngine) -> None:
    """What the head guesses is verified under masks; a step behind that would be let go for nothing."""

    class Everything:
        def row(self, index: int) -> Mask:
            return np.full(7, 0xFFFFFFFF, dtype=np.uint32)

        def permits(self, index: int, token: int) -> bool:
            return True

    ran_ahead = []
    for allowed in (None, Everything()):
        with drafting.session() as session, pytest.MonkeyPatch.context() as patch:
            counts = Counts(drafting, patch)
            session.extend(PROMPT)
            for _ in range(5):
                guess = drafting.guess(session.tokens)
                session.step(() if guess is None else guess.tokens, allowed=allowed)
            ran_ahead.append(counts["launch_next"])
            assert counts["drafted by the head"] == 5
    assert ran_ahead[0] > 0
    assert ran_ahead[1] == 0


@pytest.mark.parametrize("drafts", [False, True], ids=["steps ahead", "guesses ahead"])
def test_what_ran_ahead_and_is_refused_is_taken_back_without_a_trace(
    plain: CudaEngine, drafting: CudaEngine, drafts: bool
) -> None:
    engine = drafting if drafts else plain
    printable = regex("[ -~]+")  # one token in six is another
    answers = []
    for ahead in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "runs_ahead", ahead)
            patch.setattr(matcher, "_LONG", 0)  # every step is asked for without its mask
            counts = Counts(engine, patch)
            answers.append(written(engine, Sampling(), printable, drafts=drafts, count=14))
            assert (counts["_claim_ahead"] > 0) is ahead
    assert answers[0][0] == answers[1][0]
    assert answers[1][1] > answers[0][1] or drafts  # steps that were made again
