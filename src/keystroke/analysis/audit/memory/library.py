"""What the functions of C's library do to memory and files, read from `flow/knowledge/c_memory.toml`."""

from __future__ import annotations

import msgspec

from keystroke.analysis.audit.flow.knowledge import load_table


class MemoryLibrary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file describes each key."""

    allocators: dict[str, int]
    duplicators: frozenset[str]
    openers: frozenset[str]
    releases: dict[str, str]
    counted: dict[str, tuple[int, int, int]]
    string_copies: dict[str, int]
    scans: dict[str, int]
    formats: dict[str, int]
    printers: dict[str, int]
    readers: frozenset[str]
    streams: dict[str, int]
    path_checks: frozenset[str]
    path_uses: frozenset[str]
    finders: frozenset[str]
    counted_reads: dict[str, int]
    lengths: frozenset[str]
    signal_unsafe: frozenset[str]
    signed_types: frozenset[str]
    narrow_types: frozenset[str]
    limits: dict[str, int]


LIBRARY = load_table("c_memory", MemoryLibrary)
