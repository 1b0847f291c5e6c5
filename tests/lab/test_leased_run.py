"""A run in stretches: stopped or not it learns the same, and what it leaves behind is small and checked."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from keystroke.errors import InputError, ModelDamaged, NotFound
from keystroke_lab.corpus.shards import write_shard
from keystroke_lab.export.weights import read_trained
from keystroke_lab.pretraining.documents import Mix, SourceText
from keystroke_lab.pretraining.leased_run import LeasedRecipe, LeasedRun, LeaseProgress, to_weights
from keystroke_lab.pretraining.mixture import MixturePlan, PlannedPiece, make_plan
from keystroke_lab.pretraining.planned_windows import DataPosition, PlannedWindows
from keystroke_lab.pretraining.step import Phase
from keystroke_lab.tokenizer import code_tokenizer
from keystroke_lab.training import packed_state
from keystroke_lab.training.transformer import Shape

SHAPE = Shape(vocab=320, hidden=64, layers=2, heads=2, kv_heads=1, head_dim=32, intermediate=128, context=128)
FILES = sorted(Path(__file__).parents[2].glob("lab/keystroke_lab/pretraining/*.py"))
PLAIN = Phase(Mix(fim=0.4, cursor=0.2, seam=200, longest=400, shortest=80), answer=2.0)
RECIPE = LeasedRecipe(
    batch=256, micro_batch=256, window=64, final_window=128, warmup=3, stretch=4, report_every=1, main=PLAIN,
    final=PLAIN,
)  # fmt: skip


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four pieces of two languages, and a tokenizer."""
    folder = tmp_path_factory.mktemp("desk")
    sources = [SourceText("keystroke", f.name, f.read_text(encoding="utf-8")[:6000]) for f in FILES]
    code_tokenizer.save(code_tokenizer.train([s.text for s in sources], SHAPE.vocab), folder / "tok")
    (folder / "train").mkdir()
    for i, name in enumerate(("python-0000", "python-0001", "go-0000", "go-0001")):
        write_shard(folder / "train" / f"{name}.jsonl.bz2", sources[i * 3 : i * 3 + 3])
    return folder


def run_of(desk: Path, where: Path, workers: int = 0) -> LeasedRun:
    plan = make_plan(desk / "train", None, {"python": 0.7, "go": 0.3, "rust": 0.5})
    return LeasedRun(
        where,
        SHAPE,
        RECIPE,
        plan,
        (desk / "train",),
        desk / "tok",
        device="cpu",
        workers=workers,
        round_pieces=2,
    )


def losses(where: Path) -> list[float]:
    rows = map(json.loads, (where / "log.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "factor" in row]


def test_a_run_that_stopped_learns_what_one_without_a_stop_learns(desk: Path, tmp_path: Path) -> None:
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    whole = run_of(desk, straight, workers=1)
    whole.train(steps=8, finish=8)
    whole.close()
    for steps, finish in ((4, 0), (4, 0), (0, 8)):
        part = run_of(desk, stopped)
        part.train(steps=steps, finish=finish)
        part.close()
    assert len(losses(straight)) == 16
    assert losses(stopped) == losses(straight)
    _, facts, ours = packed_state.read(stopped / "finished")
    _, _, theirs = packed_state.read(straight / "finished")
    assert facts["languages"] == ["go", "python"]
    assert all(torch.equal(ours[key][name], theirs[key][name]) for key in ours for name in ours[key])
    to_weights(stopped / "finished", tmp_path / "final.pt")
    shape, weights, skills = read_trained(tmp_path / "final.pt")
    assert (shape, skills["languages"]) == (SHAPE, ["go", "python"])
    assert torch.isfinite(weights["model.embed_tokens.weight"].float()).all()


def test_a_run_goes_on_at_its_constant_rate_after_it_was_finished(desk: Path, tmp_path: Path) -> None:
    straight, finished = tmp_path / "straight", tmp_path / "finished"
    first = run_of(desk, straight)
    first.train(steps=8)
    first.close()
    second = run_of(desk, finished)
    second.train(steps=4, finish=4)
    second.close()
    again = run_of(desk, finished)
    assert (again.progress.step, again.progress.decay_from) == (4, -1)
    again.train(steps=4)
    again.close()
    assert losses(finished)[8:] == losses(straight)[4:]


def test_a_decay_that_was_cut_short_goes_on(desk: Path, tmp_path: Path) -> None:
    cut = run_of(desk, tmp_path)
    cut.train(steps=4, finish=8, checkpoint_seconds=0.0)
    whole = losses(tmp_path)
    cut.close()
    again = run_of(desk, tmp_path / "again")
    again.train(steps=4)
    again._decay(8)
    again.train(steps=4)  # stopped in the middle of it
    again.close()
    third = run_of(desk, tmp_path / "again")
    assert third.progress.decay_from == 4
    third.train()
    third.close()
    assert losses(tmp_path / "again") == whole
    assert not (tmp_path / "again" / "decaying").exists()


def test_a_damaged_or_missing_piece_of_a_checkpoint_is_named(
    desk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_state, "PIECE", 50_000)
    first = run_of(desk, tmp_path)
    first.train(steps=4)
    first.close()
    pieces = sorted((tmp_path / "checkpoint").glob("state-*.bin"))
    assert len(pieces) > 2
    assert max(p.stat().st_size for p in pieces) <= 50_000
    data = bytearray(pieces[1].read_bytes())
    data[100] ^= 1
    pieces[1].write_bytes(data)
    with pytest.raises(ModelDamaged, match=r"state-001\.bin is damaged"):
        run_of(desk, tmp_path)
    pieces[1].unlink()
    with pytest.raises(ModelDamaged, match=r"state-001\.bin is missing"):
        packed_state.read(tmp_path / "checkpoint")
    with pytest.raises(InputError, match="no checkpoint"):
        packed_state.read(tmp_path / "elsewhere")


def test_packing_is_finer_than_what_is_shipped_and_keeps_zeros() -> None:
    values = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    values[0] = 0
    back = packed_state.unpack16(packed_state.pack16(values), values)
    assert (back - values).abs().max() < 1e-4
    assert (values.bfloat16().float() - values).abs().max() > 1e-3
    rough = packed_state.unpack4(packed_state.pack4(values), values)
    assert (rough - values).abs().max() <= values.abs().max() / 14 + 1e-6
    squares = values**2 * 1e-12
    kept = packed_state.unpack_squares(packed_state.pack_squares(squares), squares)
    some = squares > 0
    assert torch.equal(kept == 0, ~some)
    assert ((kept[some] / squares[some]).log2().abs() < 0.1).all()


def test_the_third_weights_shape_fits_the_way_back() -> None:
    """Bytes a parameter: 16 bits and a scale; 4 and a scale for momentum; 8 for an embedding's squares."""
    shape = Shape()
    table = shape.vocab * shape.hidden
    matrices = shape.parameters - table
    weights = (2 + 4 / 64) * shape.parameters
    state = (0.5 + 4 / 64) * shape.parameters + table
    assert matrices > table
    assert weights + state < 256e6


def test_streams_have_their_shares_and_come_in_one_order() -> None:
    pieces = tuple(
        PlannedPiece(s, f"{s}-{i}", 600, "") for s, n in (("python", 9), ("go", 2)) for i in range(n)
    )
    plan = MixturePlan({"python": 0.75, "go": 0.25}, pieces)
    drawn = list(islice(plan.shard_order(), 40))
    assert sum(p.stream == "go" for p in drawn) == 10
    assert drawn == list(islice(MixturePlan(plan.shares, pieces[::-1]).shard_order(), 40))
    assert len({p.name for p in drawn[:12] if p.stream == "python"}) == 9
    lots = list(plan.lots(300))
    assert sorted(p.name for lot in lots for p in lot) == sorted(p.name for p in pieces)
    assert [p.name for p in lots[0]] == [p.name for p in drawn[:3]]
    with pytest.raises(NotFound, match="rust"):
        MixturePlan({"rust": 1.0}, pieces)


def test_a_plan_is_read_as_it_was_written(desk: Path, tmp_path: Path) -> None:
    plan = make_plan(desk / "train", None, {"python": 0.7, "go": 0.3}, seed=3)
    (tmp_path / "plan.json").write_text(plan.to_json())
    assert MixturePlan.read(tmp_path / "plan.json") == plan
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(InputError, match="no plan"):
        MixturePlan.read(tmp_path / "plan.json")


def test_a_place_in_the_data_is_found_again_and_a_foreign_piece_is_refused(
    desk: Path, tmp_path: Path
) -> None:
    plan = make_plan(desk / "train", None, {"python": 0.7, "go": 0.3})

    def rounds(place: DataPosition | None = None, folder: Path = desk / "train") -> PlannedWindows:
        feed = PlannedWindows(plan, (folder,), desk / "tok", workers=0, pieces=2, position=place)
        feed.set_kind(PLAIN.mix, 65)
        return feed

    feed = rounds()
    seen, places = [], []
    for _ in range(60):
        seen.append(feed.batch(32))
        places.append(feed.position)
    feed.close()
    assert len({p.pieces for p in places}) > 1
    again = rounds(places[5])
    for batch in seen[6:9]:
        assert np.array_equal(again.batch(32), batch)
    again.close()
    for piece in plan.pieces:
        write_shard(tmp_path / piece.name, [SourceText("p", "a.py", "x = 1\n" * 50)])
    other = rounds(folder=tmp_path)
    with pytest.raises(InputError, match="not the piece that the plan names"):
        other.batch(1)
    other.close()


def test_the_rate_is_constant_until_it_is_told_to_decay() -> None:
    progress = LeaseProgress()
    assert [LeaseProgress(step=n).factor(4) for n in (0, 1, 3, 4, 10**6)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    progress = LeaseProgress(step=100, decay_from=100, decay_steps=10)
    assert progress.factor(4) == 1.0
    assert not progress.finished
    assert LeaseProgress(step=110, decay_from=100, decay_steps=10).finished
    assert LeaseProgress(step=105, decay_from=100, decay_steps=10).factor(4) == 0.5
    with pytest.raises(InputError, match="choose multiples"):
        LeasedRecipe(batch=100)
