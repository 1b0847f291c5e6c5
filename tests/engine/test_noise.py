"""The noise is Philox4x32-10, exactly, and its Gumbel values have the right shape."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from keystroke.engine.noise import all_noise_bits, noise_bits, uniform


def reference(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 as its paper writes it, one counter at a time."""
    a, b, c, d = counter
    k, m = key
    for _ in range(10):
        high, low = divmod(a * 0xD2511F53, 1 << 32)
        up, down = divmod(c * 0xCD9E8D57, 1 << 32)
        a, b, c, d = up ^ b ^ k, down, high ^ d ^ m, low
        k, m = (k + 0x9E3779B9) % (1 << 32), (m + 0xBB67AE85) % (1 << 32)
    return a, b, c, d


def test_the_reference_gives_the_published_answers() -> None:
    full = 0xFFFFFFFF
    assert reference((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert reference((full,) * 4, (full,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert reference(pi, (0xA4093822, 0x299F31D0)) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


@given(
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(0, 2**20), min_size=1, max_size=9),
)
def test_bits_of_a_token_are_its_word_of_its_counter(seed: int, position: int, tokens: list[int]) -> None:
    key = (seed & 0xFFFFFFFF, seed >> 32)
    expected = [reference((t // 4, position, 0, 0), key)[t % 4] for t in tokens]
    assert noise_bits(seed, position, np.array(tokens)).tolist() == expected


@given(st.integers(0, 2**64 - 1), st.integers(0, 10_000), st.integers(1, 70))
def test_asking_for_all_tokens_gives_what_asking_for_each_gives(seed: int, position: int, vocab: int) -> None:
    assert (all_noise_bits(seed, position, vocab) == noise_bits(seed, position, np.arange(vocab))).all()


def test_uniform_values_stay_strictly_inside_the_unit_interval() -> None:
    ends = uniform(np.array([0, 2**32 - 1], dtype=np.uint32))
    assert 0.0 < ends[0] < ends[1] < 1.0


def test_gumbel_values_have_the_mean_and_variance_of_the_distribution() -> None:
    values = -np.log(-np.log1p(-uniform(noise_bits(7, 3, np.arange(200_000)))))
    assert abs(values.mean() - np.euler_gamma) < 0.02
    assert abs(values.var() - np.pi**2 / 6) < 0.03
