"""What is free is the least that the machine and the container leave."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from keystroke.engine import memory


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "meminfo").write_text("MemTotal:       8000 kB\nMemAvailable:   4000 kB\n")
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    return tmp_path


def limit(system: Path, most: str, used: int, cached: int) -> None:
    (system / "memory.max").write_text(f"{most}\n")
    (system / "memory.current").write_text(f"{used}\n")
    (system / "memory.stat").write_text(f"anon 1\ninactive_file {cached}\n")


def test_without_a_container_the_machine_decides(system: Path) -> None:
    assert memory.available_bytes() == 4000 * 1024
    limit(system, "max", 5, 0)
    assert memory.available_bytes() == 4000 * 1024


def test_a_containers_limit_counts_and_its_file_cache_does_not(system: Path) -> None:
    limit(system, "1000", 700, 200)
    assert memory.available_bytes() == 500
    limit(system, "1000", 1700, 200)
    assert memory.available_bytes() == 0
    limit(system, str(1 << 40), 0, 0)
    assert memory.available_bytes() == 4000 * 1024


def test_a_system_that_says_nothing_readable_is_not_guessed_at(
    system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (system / "meminfo").write_text("MemAvailable: much\n")
    (system / "memory.max").write_text("many\n")
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert memory.available_bytes() == whole

    def unknown(name: str) -> int:
        raise ValueError(name)

    monkeypatch.setattr(os, "sysconf", unknown)
    assert memory.available_bytes() is None


def test_a_mac_counts_pages_that_it_may_drop() -> None:
    shown = (
        "Mach Virtual Memory Statistics: (page size of 16384 bytes)\n"
        "Pages free:                               10.\n"
        "Pages active:                            500.\n"
        "Pages inactive:                           20.\n"
        "Pages speculative:                         3.\n"
        "Pages wired down:                        400.\n"
        "Pages purgeable:                           2.\n"
    )
    assert memory.droppable_bytes(shown) == 35 * 16384
    assert memory.droppable_bytes("Pages free: 10.\n") is None
    assert memory.droppable_bytes("") is None
