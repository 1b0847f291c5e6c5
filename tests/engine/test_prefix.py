from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keystroke.engine.prefix import PrefixCache, common_prefix

TOKENS = st.lists(st.integers(0, 2), max_size=300)


@given(TOKENS, TOKENS, TOKENS)
def test_common_prefix_is_what_a_loop_would_count(shared: list[int], a: list[int], b: list[int]) -> None:
    left, right = shared + a, shared + b
    expected = 0
    while expected < min(len(left), len(right)) and left[expected] == right[expected]:
        expected += 1
    assert common_prefix(left, right) == expected


def test_the_longest_match_is_found_whatever_came_first() -> None:
    cache: PrefixCache[str] = PrefixCache(100)
    cache.put([1, 2, 3, 4], "long", 4)
    cache.put([1, 2, 9], "short", 3)
    entry, length = cache.find([1, 2, 3, 7])
    assert entry is not None
    assert (entry.payload, length) == ("long", 3)


def test_the_budget_holds_and_the_least_used_goes_first() -> None:
    dropped: list[str] = []
    cache: PrefixCache[str] = PrefixCache(10, dropped.append)
    cache.put([1] * 4, "a", 4)
    cache.put([2] * 4, "b", 4)
    cache.find([1, 1])  # "a" is now the more recently used
    cache.put([3] * 4, "c", 4)
    assert dropped == ["b"]
    assert cache.nbytes == 8


def test_a_sequence_that_another_covers_is_let_go() -> None:
    dropped: list[str] = []
    cache: PrefixCache[str] = PrefixCache(100, dropped.append)
    cache.put([1, 2], "short", 2)
    cache.put([1, 2, 3], "whole", 3)
    assert dropped == ["short"]
    assert cache.tokens == 3


def test_one_scope_never_finds_what_another_left() -> None:
    cache: PrefixCache[str] = PrefixCache(100)
    cache.put([1, 2, 3], "mine", 1, "a")
    cache.put([1, 2, 3, 4], "theirs", 1, "b")
    found, length = cache.find([1, 2, 3, 4, 5], "a")
    assert (found.payload if found else None, length) == ("mine", 3)
    assert cache.find([1, 2, 3, 4, 5]) == (None, 0)


def test_a_taken_entry_is_the_callers_and_is_not_dropped() -> None:
    dropped: list[str] = []
    cache: PrefixCache[str] = PrefixCache(100, dropped.append)
    cache.put([1, 2], "a", 2)
    entry, _ = cache.find([1, 2])
    assert entry is not None
    assert cache.remove(entry) == "a"
    cache.clear()
    assert dropped == []
