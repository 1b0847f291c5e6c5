from __future__ import annotations

from pathlib import Path

import pytest

from keystroke.engine.checkpoint.digest import _sampled_spans, quick_digest

MEGABYTE = 1 << 20


@pytest.mark.parametrize(
    "size", [0, 1, 6 * MEGABYTE - 1, 6 * MEGABYTE, 6 * MEGABYTE + 1, 10 * MEGABYTE, 80 << 30]
)
def test_samples_lie_inside_the_file_and_cost_a_few_megabytes(size: int) -> None:
    ranges = list(_sampled_spans(size))
    assert all(start >= 0 and start + length <= size for start, length in ranges)
    assert sum(length for _, length in ranges) <= 6 * MEGABYTE


@pytest.mark.parametrize("size", [1000, 9 * MEGABYTE])
@pytest.mark.parametrize("place", ["first", "last", "shorter"])
def test_a_change_at_either_end_or_in_size_changes_the_quick_digest(
    tmp_path: Path, size: int, place: str
) -> None:
    path = tmp_path / "weights"
    content = bytearray(size)
    path.write_bytes(content)
    before = quick_digest([path])
    if place == "shorter":
        content.pop()
    else:
        content[0 if place == "first" else -1] = 1
    path.write_bytes(content)
    assert quick_digest([path]) != before
