"""The target as training sees it is the target as the engines see it."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_target import END, tiny_asks, tiny_spec, tiny_target, tiny_tensors, tiny_texts

from keystroke.engine import noise
from keystroke.engine.base import Sampling
from keystroke.engine.checkpoint.spec import Architecture
from keystroke.engine.cuda.reference import forward
from keystroke.engine.sampler import choose
from keystroke.errors import InputError
from keystroke_lab.draft_heads.batches import padded, rectangles
from keystroke_lab.draft_heads.coupling import coupled_bits, coupled_gumbel
from keystroke_lab.draft_heads.generation import BatchGenerator
from keystroke_lab.draft_heads.texts import TokenText, read_texts, write_texts


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_many_sequences_at_once_give_what_each_gives_alone(family: Architecture) -> None:
    spec, target = tiny_spec(family), tiny_target(family)
    tokens = torch.randint(2, 256, (3, 30), generator=torch.Generator().manual_seed(2))
    last, features = target.run_sequences(tokens, (1, 3))
    assert features.shape == (3, 30, 2, spec.hidden)
    for row in range(3):
        plain = forward(spec, tiny_tensors(spec).__getitem__, tokens[row].tolist())
        torch.testing.assert_close(target.logits(last[row]), plain, rtol=1e-4, atol=1e-4)


def test_noise_is_the_engines_bit_for_bit() -> None:
    seeds, positions, tokens = torch.tensor([5, (1 << 61) + 7]), torch.tensor([3, 70_000]), torch.arange(77)
    bits, gumbel = coupled_bits(seeds, positions, tokens), coupled_gumbel(seeds, positions, tokens)
    for row in range(2):
        seed, position = int(seeds[row]), int(positions[row])
        assert (bits[row].numpy() == noise.noise_bits(seed, position, np.arange(77))).all()
        expected = -np.log(-np.log1p(-noise.uniform(noise.noise_bits(seed, position, np.arange(77)))))
        np.testing.assert_allclose(gumbel[row].numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("heat", [0.0, 0.8])
def test_every_answer_is_the_samplers_choice_token_by_token(heat: float) -> None:
    target = tiny_target()
    texts = tiny_texts(target, 11, heat)  # more than there are slots
    assert sorted(text.seed for text in texts) == list(range(11))
    for text in texts:
        logits = target.logits(
            target.run_sequences(torch.from_numpy(text.tokens[None].astype(np.int64)), (1,))[0]
        )[0]
        sampling = Sampling(temperature=heat, seed=text.seed)
        wanted = [choose(logits[i - 1].numpy(), sampling, i) for i in range(text.given, len(text.tokens))]
        assert text.tokens[text.given :].tolist() == wanted
        assert text.written == 24 or text.tokens[-1] == END
        assert END not in text.tokens[text.given : -1]


def test_a_writer_stops_at_its_deadline_and_can_be_used_again() -> None:
    writer = BatchGenerator(
        tiny_target(), slots=2, longest_prompt=20, longest_answer=200, ends=frozenset({END})
    )
    assert len(list(writer.generate(tiny_asks(9), deadline=time.monotonic()))) < 9
    assert len(list(writer.generate(tiny_asks(3)))) == 3


def test_texts_come_back_from_disk_as_they_were(tmp_path: Path) -> None:
    texts = [
        TokenText(np.array([151_900, 0, 65_536], np.int32), 2, "fim", 0.8, 1 << 47),
        TokenText(np.array([7], np.int32), 0, "code"),
    ]
    write_texts(tmp_path / "a.npz", texts)
    for text, back in zip(texts, read_texts(tmp_path / "a.npz"), strict=True):
        assert (back.tokens == text.tokens).all()
        assert (back.given, back.kind, back.seed) == (text.given, text.kind, text.seed)
        assert back.temperature == pytest.approx(text.temperature)
    (tmp_path / "b.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:200])
    for name in ("b.npz", "none.npz"):
        with pytest.raises(InputError, match=name):
            read_texts(tmp_path / name)


def test_batches_hold_every_text_once_and_not_much_else() -> None:
    texts = [TokenText(np.zeros(n, np.int32), 1, str(n)) for n in range(2, 90)]
    batches = rectangles(texts, 512)
    assert sorted(text.kind for batch in batches for text in batch) == sorted(text.kind for text in texts)
    for batch in batches:
        tokens, weights = padded(batch)
        assert tokens.numel() <= 512
        assert int((weights > 0).sum()) == sum(len(text.tokens) - 1 for text in batch)
