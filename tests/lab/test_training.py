"""Tokenizer, fill-in-the-middle, windows, schedule and the loop itself, at a size a CPU trains in seconds."""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from fim_parts import take_apart
from hypothesis import given, settings
from hypothesis import strategies as st

from keystroke.engine.tokenizer import load_tokenizer
from keystroke.engine.tokenizer.huggingface import QWEN2_PATTERN
from keystroke.errors import InputError, ModelDamaged
from keystroke_lab.corpus.shards import write_shard
from keystroke_lab.pretraining.deadline_run import DeadlineClock, DeadlineRecipe, DeadlineRun
from keystroke_lab.pretraining.documents import PLAIN, Mix, SourceText, TokenDocument, token_windows, windows
from keystroke_lab.pretraining.fim import FimCut, Order, TokenParts, block_end, cut, join
from keystroke_lab.pretraining.step import read_state
from keystroke_lab.pretraining.window_feed import WindowFeed
from keystroke_lab.tokenizer import code_tokenizer, special
from keystroke_lab.training.optimizer import Optimizer, orthogonalise
from keystroke_lab.training.schedule import Schedule
from keystroke_lab.training.transformer import CodeModel, Shape

SHAPE = Shape(vocab=320, hidden=64, layers=2, heads=2, kv_heads=1, head_dim=32, intermediate=128, context=64)
FILES = sorted(Path(__file__).parents[2].glob("lab/keystroke_lab/pretraining/*.py"))
SOURCES = [SourceText("keystroke", f.name, f.read_text(encoding="utf-8")) for f in FILES]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    code_tokenizer.save(code_tokenizer.train([s.text for s in SOURCES], SHAPE.vocab), folder)
    return folder


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=200))
def test_every_byte_string_round_trips(tokenizer: Path, data: bytes) -> None:
    ours = load_tokenizer(tokenizer)
    text = data.decode("utf-8", errors="replace")
    assert b"".join(map(ours.token_bytes, ours.encode(text))) == text.encode()
    # Bytes that are no text have tokens too: the vocabulary holds all 256.
    single = {ours.token_bytes(t): t for t in range(special.RESERVED, special.RESERVED + 256)}
    assert b"".join(ours.token_bytes(single[bytes([b])]) for b in data) == data


def test_special_tokens_keep_their_ids_and_never_come_from_text(tokenizer: Path) -> None:
    ours = load_tokenizer(tokenizer)
    assert [ours.special(text) for text in special.NAMED] == list(range(len(special.NAMED)))
    assert min(ours.encode("x = '<|endoftext|>'")) >= special.RESERVED
    plain = code_tokenizer.plain(code_tokenizer.load(tokenizer))
    assert plain.encode("a<|fim_middle|>b").ids == ours.encode("a<|fim_middle|>b")


def test_the_cut_before_merging_is_one_the_engine_knows() -> None:
    assert code_tokenizer.PATTERN == QWEN2_PATTERN


def test_a_foreign_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelDamaged, match="not a tokenizer"):
        code_tokenizer.load(tmp_path)
    with pytest.raises(InputError, match="every byte"):
        code_tokenizer.train(["x"], 100)


@given(st.integers(0, 10**6), st.sampled_from(list(FimCut)))
@settings(deadline=None)
def test_a_cut_loses_nothing(seed: int, kind: FimCut) -> None:
    text = SOURCES[seed % len(SOURCES)].text
    parts = cut(text, kind, random.Random(seed))
    if parts is not None:
        assert parts.text == text
        assert parts.middle.strip()
        if kind in (FimCut.REST_OF_LINE, FimCut.LINE):
            assert "\n" not in parts.middle
            assert parts.suffix[:1] in ("\n", "")
        if kind is FimCut.LINE:
            assert not parts.prefix[parts.prefix.rfind("\n") + 1 :].strip()


tokens = st.lists(st.integers(special.RESERVED, 300)).map(tuple)


@given(tokens, tokens, tokens, st.sampled_from(list(Order)))
def test_the_fill_in_the_middle_form_can_be_taken_apart(
    prefix: tuple[int, ...], middle: tuple[int, ...], suffix: tuple[int, ...], order: Order
) -> None:
    parts = TokenParts(prefix, middle, suffix)
    assert take_apart(join(parts, order)) == (parts, order)


def test_typing_only_appends_to_a_suffix_first_prompt() -> None:
    before = join(TokenParts((40, 41), (50,), (60, 61)), Order.SPM)
    after = join(TokenParts((40, 41, 42), (50,), (60, 61)), Order.SPM)
    shared = next(i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b)
    assert before[:shared] == [special.FIM_SUFFIX, 60, 61, special.FIM_PREFIX, 40, 41]


def test_a_block_ends_where_the_indentation_does() -> None:
    text = "def f():\n    a = 1\n    if a:\n        b = 2\n\n    return b\n\n\ndef g():\n    pass\n"
    assert text[text.index("a = 1") : block_end(text, text.index("a = 1"))].endswith("return b")
    assert text[text.index("b = 2") : block_end(text, text.index("b = 2"))] == "b = 2"
    assert text[: block_end(text, 0)].endswith("return b")


@given(st.lists(st.tuples(st.integers(1, 90), st.booleans()), min_size=1, max_size=60))
@settings(deadline=None)
def test_windows_keep_what_must_stay_whole(sizes: list[tuple[int, bool]]) -> None:
    length = 50
    documents = [TokenDocument([100 + i] * size, whole) for i, (size, whole) in enumerate(sizes)]
    found = list(windows(documents, length))
    assert all(len(w) == length for w in found)
    plain_left = sum(size for size, whole in sizes if not whole or size > length)
    if plain_left >= length * len(sizes):  # enough to fill every gap: then nothing whole is cut
        for i, (size, whole) in enumerate(sizes):
            if whole and size <= length:
                assert {w.count(100 + i) for w in found} <= {0, size}


def test_windows_depend_on_the_seed_alone(tokenizer: Path) -> None:
    plain = code_tokenizer.plain(code_tokenizer.load(tokenizer))
    first = token_windows(SOURCES, plain, Mix(), 65, seed=1)
    np.testing.assert_array_equal(first, token_windows(list(reversed(SOURCES)), plain, Mix(), 65, seed=1))
    assert not np.array_equal(first, token_windows(SOURCES, plain, Mix(), 65, seed=2))


def test_at_least_half_of_the_documents_are_filled_in_the_middle(tokenizer: Path) -> None:
    plain = code_tokenizer.plain(code_tokenizer.load(tokenizer))
    found = token_windows(SOURCES * 4, plain, Mix(), 2049, seed=0)
    ends = np.count_nonzero(found == special.END)
    assert np.count_nonzero(found == special.FIM_MIDDLE) >= 0.5 * ends
    assert not np.any(token_windows(SOURCES, plain, PLAIN, 65, seed=0) == special.FIM_MIDDLE)


def test_the_rate_warms_up_stays_and_decays_to_zero() -> None:
    schedule = Schedule(warmup=0.1, decay=0.4)
    values = [schedule.factor(i / 1000) for i in range(1001)]
    assert values[:100] == sorted(values[:100])
    assert set(values[100:600]) == {1.0}
    assert values[600:] == sorted(values[600:], reverse=True)
    assert values[-1] == 0.0
    with pytest.raises(InputError):
        Schedule(warmup=0.7, decay=0.7)


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    torch.manual_seed(0)
    for shape in ((3, 48, 96), (2, 96, 48)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape), steps=8))
        assert values.min() > 0.6
        assert values.max() < 1.3


def test_a_shape_counts_its_parameters() -> None:
    assert SHAPE.parameters == sum(p.numel() for p in CodeModel(SHAPE).parameters())
    with pytest.raises(InputError, match="multiples of 32"):
        Shape(hidden=100)
    with pytest.raises(InputError, match="divisor"):
        Shape(heads=12, kv_heads=5)


def test_a_tiny_model_overfits_a_batch() -> None:
    torch.manual_seed(0)
    model = CodeModel(SHAPE)
    optimiser = Optimizer(model, matrix_rate=0.02, other_rate=0.01)
    batch = torch.randint(special.RESERVED, SHAPE.vocab, (4, 33))
    first = model.loss(batch[:, :-1], batch[:, 1:]).item()
    for _ in range(60):
        loss = model.loss(batch[:, :-1], batch[:, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step(1.0)
        model.zero_grad(set_to_none=True)
    assert first > 5.5
    assert loss.item() < 0.5


@pytest.fixture
def feed(tokenizer: Path, tmp_path: Path) -> WindowFeed:
    (tmp_path / "pieces").mkdir()
    write_shard(tmp_path / "pieces" / "0.jsonl.bz2", SOURCES)
    return WindowFeed(tmp_path / "pieces", tokenizer, length=SHAPE.context + 1, workers=1, backlog=64)


def test_a_run_logs_decays_and_goes_on_from_its_checkpoint(feed: WindowFeed, tmp_path: Path) -> None:
    recipe = DeadlineRecipe(batch=4, micro_batch=2, steps=6, report_every=1, heldout_every=3)
    run = tmp_path / "run"
    try:
        trainer = DeadlineRun(run, SHAPE, recipe, feed, device="cpu", compile_model=False)
        trainer.train(np.ones((4, SHAPE.context + 1), dtype=np.uint16))
        trainer.checkpoint()
        longer = DeadlineRecipe(batch=4, micro_batch=2, steps=8, report_every=1)
        resumed = DeadlineRun(run, SHAPE, longer, feed, device="cpu", compile_model=False)
        assert resumed.step == 6
        for name, value in resumed.model.state_dict().items():
            assert torch.equal(value, trainer.model.state_dict()[name])
        resumed.train()
    finally:
        feed.close()
    assert resumed.step == 8
    assert read_state(run / "final.pt", SHAPE)["step"] == 8
    assert len((run / "log.jsonl").read_text().splitlines()) >= 8
    other = Shape(
        vocab=320, hidden=32, layers=2, heads=2, kv_heads=1, head_dim=32, intermediate=128, context=64
    )
    with pytest.raises(ModelDamaged, match="another shape"):
        DeadlineRun(run, other, recipe, feed, device="cpu", compile_model=False)


def test_a_deadline_can_be_moved_while_training(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="when to end"):
        DeadlineClock(tmp_path, DeadlineRecipe())
    (tmp_path / "deadline").write_text(str(time.time() + 1000))
    clock = DeadlineClock(tmp_path, DeadlineRecipe())
    assert clock.share_done(5) < 0.5
    (tmp_path / "deadline").write_text(str(time.time() - 1))
    assert clock.share_done(5) == 1.0


def test_a_truncated_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "final.pt"
    torch.save({"shape": SHAPE.to_json(), "weights": {}}, path)
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(ModelDamaged, match="cut short"):
        read_state(path)
    with pytest.raises(InputError, match="does not exist"):
        read_state(tmp_path / "none.pt")
