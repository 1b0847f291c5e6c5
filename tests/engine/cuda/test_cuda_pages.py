"""Page bookkeeping, by random operation sequences against a model that simply remembers every token."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keystroke.engine.cuda.pages import PagePool, PageTable
from keystroke.engine.cuda.plan import PAGE
from keystroke.engine.prefix import common_prefix
from keystroke.errors import NotEnoughMemory


class Memory:
    """What a device would hold: a token for each slot of each page; writes and copies happen at once."""

    def __init__(self, pages: int) -> None:
        self.pool = PagePool(pages)
        self.slots = [[-1] * PAGE for _ in range(pages)]

    def write(self, table: PageTable, held: list[int], start: int, tokens: list[int]) -> None:
        for _, old, new in table.reserve(start, start + len(tokens)):
            self.slots[new] = list(self.slots[old])
        for i, token in enumerate(tokens, start):
            self.slots[table.pages[i // PAGE]][i % PAGE] = token
        held[start:] = tokens

    def read(self, table: PageTable, length: int) -> list[int]:
        return [self.slots[table.pages[i // PAGE]][i % PAGE] for i in range(length)]


operations = st.lists(
    st.tuples(
        st.sampled_from(["write", "rollback", "fork", "adopt", "record", "close"]),
        st.integers(0, 7),
        st.integers(0, 5 * PAGE),
        st.integers(1, 2 * PAGE),
        st.integers(0, 1),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(operations, st.integers(4, 24))
def test_every_sequence_reads_back_its_own_tokens(
    steps: list[tuple[str, int, int, int, int]], pages: int
) -> None:
    memory = Memory(pages)
    sequences: list[tuple[PageTable, list[int]]] = [(PageTable(memory.pool), [])]
    for name, which, length, count, flavour in steps:
        if not sequences:
            sequences.append((PageTable(memory.pool), []))
        table, held = sequences[which % len(sequences)]
        if name == "write":
            start = min(length, len(held))
            # Few different texts, so that sequences share content.
            tokens = [(i * 7 + flavour) % 50 for i in range(start, start + count)]
            with contextlib.suppress(NotEnoughMemory):
                memory.write(table, held, start, tokens)
        elif name == "rollback":
            del held[min(length, len(held)) :]
            table.truncate(len(held))
        elif name == "fork":
            sequences.append((table.fork(), list(held)))
        elif name == "record":
            table.record(held)
        elif name == "adopt":
            wanted = [(i * 7 + flavour) % 50 for i in range(length)]
            run = memory.pool.find(wanted)
            assert memory.pool.find(wanted, table.records(common_prefix(held, wanted))) == run
            table.adopt(run)
            held[:] = wanted[: len(run) * PAGE]
        else:
            table.record(held)
            table.clear()
            sequences.remove((table, held))
        for each, tokens in sequences:
            assert memory.read(each, len(tokens)) == tokens
        assert memory.pool.held + memory.pool.free == pages
    for table, _ in sequences:
        table.clear()
    assert memory.pool.held == 0


def test_idle_pages_are_evicted_oldest_first_and_only_under_pressure() -> None:
    memory = Memory(4)
    first, second = PageTable(memory.pool), PageTable(memory.pool)
    texts = [[1] * PAGE, [2] * PAGE]
    for table, text in zip((first, second), texts, strict=True):
        memory.write(table, [], 0, text)
        table.record(text)
        table.clear()
    assert [len(memory.pool.find(text)) for text in texts] == [1, 1]
    big = PageTable(memory.pool)
    memory.write(big, [], 0, [3] * (3 * PAGE))
    assert [len(memory.pool.find(text)) for text in texts] == [0, 1]


def test_one_scope_never_finds_the_pages_of_another() -> None:
    memory = Memory(8)
    text = list(range(2 * PAGE))
    table = PageTable(memory.pool, "a")
    table.reserve(0, len(text))
    table.record(text)
    assert len(memory.pool.find(text, scope="a")) == 2
    assert memory.pool.find(text, scope="b") == []
    assert memory.pool.find(text) == []


def test_a_refused_reservation_changes_nothing() -> None:
    memory = Memory(3)
    table = PageTable(memory.pool)
    held: list[int] = []
    memory.write(table, held, 0, [1] * PAGE)
    before = list(table.pages), memory.pool.free
    with pytest.raises(NotEnoughMemory):
        memory.write(table, held, PAGE, [2] * (3 * PAGE))
    assert (table.pages, memory.pool.free) == before
    assert memory.read(table, PAGE) == [1] * PAGE
