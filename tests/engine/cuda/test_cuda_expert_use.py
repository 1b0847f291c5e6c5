"""Which experts a GPU holds, by their use."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from keystroke.engine.cuda.expert_use import exchanges, hottest, read_profile, write_profile


def test_the_experts_used_most_are_held() -> None:
    uses = np.array([[5, 9, 0, 7], [0, 0, 0, 0]])
    assert hottest(uses, 2, 2) == [[1, 3], [0, 1]]
    assert hottest(None, 2, 3) == [[0, 1, 2], [0, 1, 2]]


def test_the_hottest_absent_expert_replaces_the_coldest_held_one() -> None:
    uses = np.array([[10, 50, 90, 20], [10, 11, 12, 13], [0, 0, 0, 300]])
    resident = [[0, 1], [0, 1], [0, 1]]
    assert exchanges(uses, resident, 8) == [(2, 0, 3), (0, 0, 2)]
    assert exchanges(uses, resident, 1) == [(2, 0, 3)]


def test_exchanges_end_when_the_hottest_are_held() -> None:
    dice = np.random.default_rng(1)
    uses = dice.integers(0, 1000, (3, 32))
    resident = [list(range(8)) for _ in range(3)]
    while found := exchanges(uses, resident, 4):
        for layer, position, expert in found:
            assert expert not in resident[layer]
            resident[layer][position] = expert
    for row, held in zip(uses, resident, strict=True):
        assert row[held].min() * 1.25 + 8 >= np.sort(row)[-8]


def test_a_profile_is_kept_and_fades(tmp_path: Path) -> None:
    uses, path = np.array([[4, 8], [6, 2]]), tmp_path / "folder" / "profile.npy"
    assert read_profile(path, 2, 2) is None
    write_profile(path, uses)
    found = read_profile(path, 2, 2)
    assert found is not None
    assert np.array_equal(found, uses // 2)
    assert read_profile(path, 2, 3) is None
    path.write_bytes(b"damaged")
    assert read_profile(path, 2, 2) is None
    assert [each.name for each in path.parent.iterdir()] == ["profile.npy"]
