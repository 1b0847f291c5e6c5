"""An adapter learns what its lessons say, changes nothing before it has, and is what is written to disk."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from keystroke.engine.adapter import read_adapter
from keystroke.errors import InputError, ModelDamaged
from keystroke_lab.adapters.__main__ import scale
from keystroke_lab.adapters.evaluation import choices, predict_edits, score_cases
from keystroke_lab.adapters.lora import AdaptedModel, Adapter, merge, with_strength
from keystroke_lab.adapters.training import AdapterRecipe, AdapterRun, batch_of, export, shape_for
from keystroke_lab.draft_heads.target import TargetModel
from keystroke_lab.draft_heads.texts import TokenText

sys.path.insert(0, str(Path(__file__).parents[1] / "draft_heads"))
from tiny_target import tiny_target

NUMBERS = (10, 11, 12, 13)  # silence, and three places
END = 1


def lessons(count: int, seed: int) -> list[TokenText]:
    """The answer begins with the number that the prompt's last token asks for."""
    dice = random.Random(seed)
    made = []
    for _ in range(count):
        which = dice.randrange(len(NUMBERS))
        prompt = [dice.randrange(20, 200) for _ in range(dice.randrange(4, 24))] + [220 + which]
        answer = [NUMBERS[which], *([] if which == 0 else [30, 31]), END]
        kind = "quiet" if which == 0 else "next"
        made.append(TokenText(np.array([*prompt, *answer], np.int32), len(prompt), kind))
    return made


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[TargetModel, Adapter, AdapterRun]:
    target = tiny_target()
    adapter = Adapter(shape_for(target, 8))
    recipe = AdapterRecipe(passes=20.0, rate=0.02, batch=1024, together=1, report_every=5)
    trainer = AdapterRun(tmp_path_factory.mktemp("run"), target, adapter, recipe)
    trainer.train(lessons(200, 0))
    return target, adapter, trainer


def test_a_new_adapter_changes_nothing() -> None:
    target = tiny_target()
    adapted = AdaptedModel(target, Adapter(shape_for(target, 4)))
    tokens = torch.randint(2, 256, (3 * 64,))
    plain, _ = target.run_sequences(tokens.view(3, 64), (1,))
    assert torch.allclose(adapted.last_states(tokens, 3, 64), plain.flatten(0, 1), atol=1e-5)


def test_filling_behind_a_rectangle_changes_no_row_of_it() -> None:
    target = tiny_target()
    adapted = AdaptedModel(target, Adapter(shape_for(target, 4)))
    tokens = torch.randint(2, 256, (2 * 64,))
    longer = torch.cat((tokens, torch.zeros(40, dtype=torch.int64)))
    assert torch.allclose(
        adapted.last_states(longer, 2, 64)[:128], adapted.last_states(tokens, 2, 64), atol=1e-5
    )


def test_only_answers_count_and_the_choice_of_a_place_most() -> None:
    text = TokenText(np.array([5, 6, 7, 11, 30, 31, 40, END], np.int32), 3, "next")
    batch = batch_of([text], AdapterRecipe(batch=64, choice=4.0, lines=2.0), torch.device("cpu"))
    assert batch.weights[:8].tolist() == [0, 0, 4, 2, 2, 1, 1, 0]
    assert not batch.weights[8:].any()


def test_a_long_answer_counts_hardly_more_than_a_short_one_and_an_invented_one_hardly_at_all() -> None:
    recipe = AdapterRecipe(batch=128, answer=10.0, weights={"next": 1.0, "new": 0.1}, lines=0.0, choice=0.0)
    sums = []
    for kind, words in (("next", 10), ("next", 40), ("new", 40)):
        text = TokenText(np.array([5, 11, 30, 31, *range(40, 40 + words)], np.int32), 1, kind)
        sums.append(float(batch_of([text], recipe, torch.device("cpu")).weights.sum()))
    assert sums == pytest.approx([10.0, 10.0, 1.0])


def kept_texts(count: int) -> list[TokenText]:
    dice = random.Random(7)
    return [
        TokenText(np.array([dice.randrange(2, 256) for _ in range(40)], np.int32), 1, "keep")
        for _ in range(count)
    ]


def test_what_is_to_be_kept_is_kept_and_costs_little_of_what_is_learned(tmp_path: Path) -> None:
    target, held = tiny_target(), kept_texts(24)
    drifts, rights = [], []
    for keep in (0.0, 4.0):
        adapter = Adapter(shape_for(target, 8))
        recipe = AdapterRecipe(passes=5.0, rate=0.02, batch=512, together=1, keep=keep)
        trainer = AdapterRun(tmp_path / f"{keep}", target, adapter, recipe)
        trainer.train([*lessons(64, 0), *held])
        batch = batch_of(held, recipe, torch.device("cpu"))
        with torch.no_grad():
            total, _ = trainer.model.drift(batch.tokens, batch.weights, batch.rows, batch.length)
        drifts.append(float(total / batch.weights.sum()))
        cases = lessons(60, 1)
        merge(target, adapter)
        found = predict_edits(target, cases, NUMBERS, longest=6, ends=frozenset({END}))
        merge(target, adapter, -1.0)
        rights.append(score_cases(cases, found, NUMBERS, 0.5)["place"])
    assert drifts[1] < 0.5 * drifts[0]
    assert rights[1] > 0.8


def test_an_adapter_that_is_nothing_yet_drifts_nowhere() -> None:
    target = tiny_target()
    batch = batch_of(kept_texts(6), AdapterRecipe(batch=64), torch.device("cpu"))
    total, same = AdaptedModel(target, Adapter(shape_for(target, 4))).drift(
        batch.tokens, batch.weights, batch.rows, batch.length
    )
    assert batch.kept
    assert abs(float(total.detach())) < 1e-3
    assert bool(same.all())


def test_texts_to_be_kept_come_evenly_beside_the_lessons(tmp_path: Path) -> None:
    target = tiny_target()
    recipe = AdapterRecipe(batch=128, together=2)
    groups = AdapterRun(tmp_path, target, Adapter(shape_for(target, 2)), recipe)._groups(
        [*lessons(80, 0), *kept_texts(20)]
    )
    kinds = [[texts[0].kind == "keep" for texts in group] for group in groups]
    assert all(not any(some[:2]) for some in kinds)
    assert 0 < sum(map(sum, kinds)) <= len(groups) * 2
    assert {text.kind for group in groups for texts in group for text in texts} == {"next", "quiet", "keep"}


@pytest.mark.slow
def test_half_an_adapter_is_between_the_base_and_the_whole_and_leaves_no_trace(
    trained: tuple[TargetModel, Adapter, AdapterRun], tmp_path: Path
) -> None:
    target, adapter, _ = trained
    export(adapter, tmp_path / "a.safetensors", {"base": "tiny"})
    held = read_adapter(tmp_path / "a.safetensors")
    cases = lessons(60, 1)
    prompts = [text.tokens[: text.given].tolist() for text in cases]
    sure = []
    for strength in (0.0, 0.5, 1.0):
        with with_strength(target, held, strength):
            rows = choices(target, prompts, NUMBERS)
        first = [NUMBERS.index(int(text.tokens[text.given])) for text in cases]
        sure.append(float(np.mean([row[at] for row, at in zip(rows, first, strict=True)])))
    assert sure[0] < sure[1] < sure[2]
    assert np.array_equal(choices(target, prompts, NUMBERS), choices(tiny_target(), prompts, NUMBERS))


def test_training_teaches_places_and_silence_and_merging_keeps_what_was_learned(
    trained: tuple[TargetModel, Adapter, AdapterRun],
) -> None:
    target, adapter, _ = trained
    cases = lessons(60, 1)
    before = score_cases(
        cases, predict_edits(target, cases, NUMBERS, longest=6, ends=frozenset({END})), NUMBERS, 0.5
    )
    merge(target, adapter)
    try:
        found = predict_edits(target, cases, NUMBERS, longest=6, ends=frozenset({END}))
    finally:
        merge(target, adapter, -1.0)
    after = score_cases(cases, found, NUMBERS, 0.5)
    assert before["place"] < 0.7
    assert min(after["place"], after["text"], after["quiet"]) > 0.9


def test_what_is_exported_is_what_was_trained(
    trained: tuple[TargetModel, Adapter, AdapterRun], tmp_path: Path
) -> None:
    _, adapter, _ = trained
    size = export(adapter, tmp_path / "a.safetensors", {"base": "tiny"})
    held = read_adapter(tmp_path / "a.safetensors")
    assert size == (tmp_path / "a.safetensors").stat().st_size
    for layer, product, delta in adapter.deltas():
        assert np.allclose(held.delta(layer, product), delta.detach().numpy(), atol=2e-3)


def test_other_lessons_go_on_from_a_trained_adapter_at_its_full_strength(
    trained: tuple[TargetModel, Adapter, AdapterRun], tmp_path: Path
) -> None:
    target, adapter, _ = trained
    export(adapter, tmp_path / "whole.safetensors", {"base": "tiny"})
    scale(tmp_path / "whole.safetensors", 0.8, tmp_path / "most.safetensors")
    scale(tmp_path / "most.safetensors", 0.625, tmp_path / "half.safetensors")
    half = read_adapter(tmp_path / "half.safetensors")
    assert half.strength == 0.5
    again = Adapter(shape_for(target, 8), seed=9)
    again.continue_from(half)
    for (*_, found), (*_, wanted) in zip(again.deltas(), adapter.deltas(), strict=True):
        assert torch.allclose(found, wanted, atol=4e-3)
    with pytest.raises(InputError, match="train with its rank"):
        Adapter(shape_for(target, 4)).continue_from(read_adapter(tmp_path / "whole.safetensors"))
    for said in ("much", "0", "nan"):
        with pytest.raises(ModelDamaged, match="strength"):
            again.continue_from(replace(half, facts={"strength": said}))


def test_a_stopped_run_goes_on_and_refuses_another_shapes_checkpoint(tmp_path: Path) -> None:
    target = tiny_target()
    recipe = AdapterRecipe(passes=1.0, batch=1024, together=1)
    first = AdapterRun(tmp_path, target, Adapter(shape_for(target, 4)), recipe)
    first.train(lessons(40, 0))
    first.checkpoint()
    again = AdapterRun(tmp_path, target, Adapter(shape_for(target, 4), seed=9), recipe)
    assert again.step == first.step
    assert all(
        torch.equal(a, b) for a, b in zip(first.adapter.parameters(), again.adapter.parameters(), strict=True)
    )
    with pytest.raises(ModelDamaged, match="delete it"):
        AdapterRun(tmp_path, target, Adapter(shape_for(target, 2)), recipe)


def test_a_run_without_lessons_says_so(tmp_path: Path) -> None:
    target = tiny_target()
    with pytest.raises(InputError, match="no examples"):
        AdapterRun(tmp_path, target, Adapter(shape_for(target, 4)), AdapterRecipe()).train([])


def test_choices_do_not_depend_on_who_is_read_together() -> None:
    target = tiny_target()
    prompts = [text.tokens[: text.given].tolist() for text in lessons(12, 2)]
    alone = np.concatenate([choices(target, [prompt], NUMBERS) for prompt in prompts])
    assert np.allclose(choices(target, prompts, NUMBERS), alone, atol=1e-5)
