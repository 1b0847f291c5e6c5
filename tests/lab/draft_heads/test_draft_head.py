"""The head: fast paths against plain ones, drafting against training, and what it may never do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny_target import tiny_spec, tiny_target, tiny_texts

from keystroke.engine.base import GREEDY, Sampling
from keystroke.engine.sampler import choose, verify
from keystroke.engine.speculative.base import Drafter
from keystroke.engine.speculative.head_file import open_head
from keystroke.errors import InputError, ModelDamaged, NotFound, UsageError
from keystroke_lab.draft_heads.attention import merged, plain
from keystroke_lab.draft_heads.batches import HeadBatches, vocabulary_of
from keystroke_lab.draft_heads.evaluation import chain_of, tree_of, trials, yield_of
from keystroke_lab.draft_heads.export import export_head
from keystroke_lab.draft_heads.loss import distillation_loss
from keystroke_lab.draft_heads.model import DraftHeadModule
from keystroke_lab.draft_heads.reference import ReferenceHead
from keystroke_lab.draft_heads.shape import HeadShape
from keystroke_lab.draft_heads.target import TargetModel
from keystroke_lab.draft_heads.training import DraftHeadRecipe, DraftHeadRun, head_of, new_head, read_head


@pytest.mark.parametrize("passes", [0, 1, 3])
def test_merged_attention_is_the_plain_one_both_ways(passes: int) -> None:
    generator = torch.Generator().manual_seed(passes)
    made = [torch.randn(2, 3, 11, 16, generator=generator, requires_grad=True) for _ in range(3 + 2 * passes)]
    q, k, v = made[:3]
    own = list(zip(made[3::2], made[4::2], strict=True))
    slow, fast = plain(q, k, v, own), merged(q, k, v, own)
    torch.testing.assert_close(fast, slow)
    push = torch.randn(slow.shape, generator=generator)
    for mine, truth in zip(
        torch.autograd.grad(fast, made, push), torch.autograd.grad(slow, made, push), strict=True
    ):
        torch.testing.assert_close(mine, truth)


def test_the_loss_is_cross_entropy_against_the_targets_distribution() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 8, generator=generator, requires_grad=True)
    out = torch.randn(32, 8, generator=generator, requires_grad=True)
    places = torch.stack([torch.randperm(32, generator=generator)[:4] for _ in range(20)])
    chances = torch.rand(20, 4, generator=generator) / 5
    weights = torch.rand(20, generator=generator)
    loss, right = distillation_loss(x, out, places, chances, weights)
    scores = x @ out.T
    truth = -(scores.log_softmax(-1).gather(1, places) * chances * weights[:, None]).sum()
    torch.testing.assert_close(loss, truth)
    assert right.tolist() == (scores.argmax(-1) == places[:, 0]).tolist()
    for mine, wanted in zip(
        torch.autograd.grad(loss, (x, out)), torch.autograd.grad(truth, (x, out)), strict=True
    ):
        torch.testing.assert_close(mine, wanted)


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target()


def a_trainer(run: Path, target: TargetModel, steps: int) -> tuple[DraftHeadRun, HeadBatches]:
    texts = tiny_texts(target, 24)
    vocabulary, covered = vocabulary_of(texts, 128, 256)
    assert covered > 0.9
    shape = HeadShape.of(target.spec, vocabulary=128, intermediate=64)
    lessons = HeadBatches(target, texts, vocabulary, shape.layers, size=512, room=1 << 24)
    recipe = DraftHeadRecipe(passes=steps / len(lessons), steps_ahead=3, report_every=1)
    return DraftHeadRun(run, target, new_head(shape, target, vocabulary), vocabulary, recipe), lessons


@pytest.fixture(scope="module")
def run(target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    trainer, lessons = a_trainer(folder, target, 60)
    trainer.train(lessons)
    export_head(folder / "final.pt", target.spec, folder / "head")
    return folder


def test_training_lowers_the_loss_at_every_depth(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    first, last = rows[:6], rows[-6:]
    assert sum(row["loss"] for row in last) < 0.8 * sum(row["loss"] for row in first)
    for depth in range(3):
        assert sum(row["right"][depth] for row in last) > sum(row["right"][depth] for row in first)


def test_a_stopped_run_goes_on_and_refuses_another_heads_checkpoint(
    target: TargetModel, tmp_path: Path
) -> None:
    trainer, lessons = a_trainer(tmp_path, target, 3)
    trainer.train(lessons)
    trainer.checkpoint()
    again, lessons = a_trainer(tmp_path, target, 5)
    assert again.step == 3
    for mine, saved in zip(again.head.parameters(), trainer.head.parameters(), strict=True):
        assert torch.equal(mine, saved)
    again.train(lessons)
    assert again.step == 5
    shape = HeadShape.of(target.spec, vocabulary=64)
    with pytest.raises(ModelDamaged, match="another shape"):
        DraftHeadRun(tmp_path, target, DraftHeadModule(shape), torch.arange(64), DraftHeadRecipe())


def test_kept_lessons_are_those_computed_anew(target: TargetModel) -> None:
    texts = tiny_texts(target, 6)
    vocabulary, _ = vocabulary_of(texts, 64, 256)
    keeps = HeadBatches(target, texts, vocabulary, (1, 2), size=512, room=1 << 24)
    forgets = HeadBatches(target, texts, vocabulary, (1, 2), size=512, room=0)
    assert keeps.batch(0) is keeps.batch(0)
    assert forgets.batch(0) is not forgets.batch(0)
    assert torch.equal(keeps.batch(0).features, forgets.batch(0).features)
    assert torch.equal(keeps.batch(0).places, forgets.batch(0).places)


def quantised(run: Path) -> tuple[DraftHeadModule, torch.Tensor]:
    """The torch module with exactly the values that were shipped."""
    state, shipped = read_head(run / "final.pt"), open_head(run / "head")
    for name in shipped.matrices:
        state["weights"][f"{name}.weight"] = torch.from_numpy(shipped.matrix(name))
    return head_of(state), state["vocabulary"].long()


def reference(run: Path, target: TargetModel) -> ReferenceHead:
    return ReferenceHead(open_head(run / "head"), target.spec, target.embedding.numpy())


def test_reference_drafting_is_the_module_unrolled_on_its_own_guesses(run: Path, target: TargetModel) -> None:
    head, vocabulary = quantised(run)
    text = tiny_texts(target, 1)[0]
    tokens = text.tokens.tolist()
    _, features = target.run_sequences(torch.tensor([tokens]), head.shape.layers)
    seen: list[NDArray[np.float32]] = []

    def best(logits: NDArray[np.float32], place: int) -> int:
        seen.append(logits)
        return int(logits.argmax())

    plain_head = reference(run, target)
    plain_head.observe(features[0, :-1].numpy(), tokens[1:])
    drafted = plain_head.draft(4, best)
    assert plain_head.length == len(tokens) - 1
    # The module sees the same start in a batch of all starts; from it on, its own guesses are the tokens.
    following = torch.tensor([[*tokens[1:], *drafted, 0]])
    start = len(tokens) - 2
    results = head.unroll(
        features[:, : start + 1],
        target.embedding[following],
        (target.cosines[:256], target.sines[:256]),
        4,
    )
    for result, logits, token in zip(results, seen, drafted, strict=True):
        scores = (result[0, start] @ head.out.weight.T).detach().numpy()
        np.testing.assert_allclose(logits, scores, rtol=1e-3, atol=1e-3)
        assert vocabulary[int(scores.argmax())] == token


class Recomputed:
    """Features of a sequence by reading it whole."""

    def __init__(self, target: TargetModel, layers: tuple[int, ...]) -> None:
        self.target, self.layers, self.tokens = target, layers, list[int]()

    def features(self, start: int, stop: int) -> NDArray[np.float32]:
        _, found = self.target.run_sequences(torch.tensor([self.tokens[:stop]]), self.layers)
        return found[0, start:].numpy()


class HeadDrafter(Drafter):
    """Drafts with a head for one sequence of its target."""

    def __init__(self, head: ReferenceHead, source: Recomputed) -> None:
        self._head, self._source = head, source
        self._seen: list[int] = []
        self._sampling = GREEDY

    def set_sampling(self, sampling: Sampling) -> None:
        self._sampling = sampling

    def propose(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
        """The last of `tokens` may still be pending: its feature is not asked for."""
        count = len(tokens)
        if limit < 1 or count < 2:
            return ()
        same = next(
            (i for i, pair in enumerate(zip(self._seen, tokens, strict=False)) if pair[0] != pair[1]),
            min(len(self._seen), count),
        )
        # The newest entry is read again where nothing is new: it is what drafting goes on from.
        kept = max(0, min(same - 1, count - 2))
        self._head.forget(kept)
        self._head.observe(self._source.features(kept, count - 1), tokens[kept + 1 :])
        self._seen = list(tokens)
        full = np.full(self._head.config.target_vocabulary, -np.inf, np.float32)

        def choose_row(logits: NDArray[np.float32], place: int) -> int:
            full[self._head.vocabulary] = logits
            token = choose(full, self._sampling, count + place)
            return int(np.searchsorted(self._head.vocabulary, token))

        return self._head.draft(limit, choose_row)


@pytest.mark.parametrize("heat", [0.0, 0.8])
@pytest.mark.parametrize("depth", [1, 4])
def test_drafting_never_changes_the_text_and_saves_the_steps_that_evaluation_says(
    run: Path, target: TargetModel, heat: float, depth: int
) -> None:
    head, vocabulary = quantised(run)
    texts = tiny_texts(target, 3, heat)
    promised = yield_of(trials(head, target, texts, vocabulary, depth), chain_of(depth))
    steps = 0
    for text in texts:
        sampling = Sampling(temperature=heat, seed=text.seed)
        source = Recomputed(target, head.shape.layers)
        drafter = HeadDrafter(reference(run, target), source)
        drafter.set_sampling(sampling)
        source.tokens = text.tokens[: text.given].tolist()
        logits = target.logits(target.run_sequences(torch.tensor([source.tokens]), (1,))[0])[0]
        source.tokens.append(choose(logits[-1].numpy(), sampling, text.given))
        while len(source.tokens) < len(text.tokens):
            draft = list(drafter.propose(source.tokens, depth))
            whole = torch.tensor([[*source.tokens, *draft]])
            rows = target.logits(target.run_sequences(whole, (1,))[0])[0, -len(draft) - 1 :].numpy()
            source.tokens += verify(rows, draft, sampling, len(source.tokens)).tokens
            steps += 1
        assert source.tokens[: len(text.tokens)] == text.tokens.tolist()
    assert steps == promised.steps
    assert promised.tokens == sum(text.written - 1 for text in texts)


def test_a_drafter_follows_a_sequence_that_was_taken_back(run: Path, target: TargetModel) -> None:
    source = Recomputed(target, open_head(run / "head").config.layers)
    drafter = HeadDrafter(reference(run, target), source)
    long, other = list(range(10, 30)), [*range(10, 20), 99, 98, 97]
    expected = []
    for tokens in (long, other, long[:8]):
        source.tokens = tokens
        expected.append(list(HeadDrafter(reference(run, target), source).propose(tokens, 3)))
    for tokens, wanted in zip((long, other, long[:8]), expected, strict=True):
        source.tokens = tokens
        assert list(drafter.propose(tokens, 3)) == wanted
        assert list(drafter.propose(tokens, 3)) == wanted
    assert drafter.propose([5], 3) == ()
    assert drafter.propose(long, 0) == ()


def test_a_tree_holds_its_branches_and_beats_the_chain_it_contains(run: Path, target: TargetModel) -> None:
    head, vocabulary = quantised(run)
    found = trials(head, target, tiny_texts(target, 6), vocabulary, 4)
    tree = tree_of(found, 12)
    assert len(tree) <= 12
    assert all(branch[:-1] in tree for branch in tree if len(branch) > 1)
    deepest = max(n for n in range(5) if chain_of(n) <= tree)
    assert yield_of(found, tree).per_step >= yield_of(found, chain_of(deepest)).per_step


def test_what_is_exported_is_within_half_a_step_of_what_was_trained(run: Path) -> None:
    state, shipped = read_head(run / "final.pt"), open_head(run / "head")
    for name, (_, scales) in shipped.matrices.items():
        error = np.abs(shipped.matrix(name) - state["weights"][f"{name}.weight"].float().numpy())
        assert (error <= 0.51 * scales[:, None]).all()
    assert (shipped.vocabulary == state["vocabulary"].numpy()).all()


def test_a_head_for_another_target_or_a_damaged_one_is_refused(
    run: Path, target: TargetModel, tmp_path: Path
) -> None:
    shipped = open_head(run / "head")
    with pytest.raises(UsageError, match="cannot draft for"):
        shipped.config.check_target(replace(tiny_spec(), vocab_size=512))
    with pytest.raises(NotFound, match="no draft head"):
        open_head(tmp_path)
    config = (run / "head" / "config.json").read_text()
    weights = (run / "head" / "head.safetensors").read_bytes()
    damages = {
        "not JSON": ("{", weights),
        "another version": (config.replace('"version": 1', '"version": 2'), weights),
        "something else": ("{}", weights),
        "no layers": (config.replace('"layers": [', '"layers": ["'), weights),
        "another size": (config.replace('"hidden": 48', '"hidden": 64'), weights),
        "cut short": (config, weights[:-40]),
    }
    for name, (said, held) in damages.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(said)
        (folder / "head.safetensors").write_bytes(held)
        with pytest.raises(ModelDamaged):
            open_head(folder)
    with pytest.raises(InputError, match="does not exist"):
        read_head(tmp_path / "none.pt")
    (tmp_path / "bad.pt").write_bytes(b"no checkpoint")
    with pytest.raises(ModelDamaged):
        read_head(tmp_path / "bad.pt")
