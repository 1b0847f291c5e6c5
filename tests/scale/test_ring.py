"""Keys on a ring of replicas: where they go, what moves when a replica leaves, how load is bounded."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from keystroke.scale.ring import Ring, max_load, rank_replicas

NAMES = st.sets(st.text(min_size=1, max_size=8), min_size=1, max_size=8)


@given(NAMES, st.text())
def test_every_member_is_tried_once_and_in_the_same_order_everywhere(names: set[str], key: str) -> None:
    order = list(Ring(names).order(key))
    assert sorted(order) == sorted(names)
    assert list(Ring(sorted(names, reverse=True)).order(key)) == order


def test_a_member_that_leaves_moves_only_its_own_keys() -> None:
    names = [f"replica-{i}" for i in range(5)]
    keys = [f"key-{i}" for i in range(2000)]
    before, after = Ring(names), Ring(names[:-1])
    for key in keys:
        home = next(before.order(key))
        if home != names[-1]:
            assert next(after.order(key)) == home


def test_shares_are_about_equal() -> None:
    ring = Ring([f"replica-{i}" for i in range(4)])
    homes = Counter(next(ring.order(f"key-{i}")) for i in range(8000))
    assert min(homes.values()) > 0.6 * 2000
    assert max(homes.values()) < 1.4 * 2000


@given(NAMES, st.lists(st.text(max_size=3), max_size=60), st.floats(1.0, 3.0), st.integers(1, 4))
def test_no_member_takes_more_than_its_bound(
    names: set[str], keys: list[str], factor: float, slots: int
) -> None:
    ring = Ring(names)
    loads = dict.fromkeys(names, 0)
    for key in keys:
        most = max_load(loads, factor, slots)
        chosen = rank_replicas(ring, key, loads, factor, slots)[0]
        assert loads[chosen] < most
        loads[chosen] += 1


def test_a_hot_key_stays_at_home_until_home_is_full_and_then_spills_in_ring_order() -> None:
    ring = Ring(["a", "b", "c", "d"])
    order = list(ring.order("hot"))
    loads = dict.fromkeys(order, 0)
    went = []
    for _ in range(8):
        went.append(rank_replicas(ring, "hot", loads, 1.25, slots=2)[0])
        loads[went[-1]] += 1
    assert went == [*order[:1] * 4, *order[1:2] * 4]
