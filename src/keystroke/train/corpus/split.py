"""Which part of the corpus a project belongs to.

Decided by the project alone, never by the file, and never by what else is in the corpus: a project
stays where it is when the corpus grows. What was first released late is never trained on, by us or by any
model older than it.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from enum import StrEnum

LATE = datetime(2025, 7, 1, tzinfo=UTC)
HELD_OUT_PER_MILLE = 10


class Part(StrEnum):
    TRAIN = "train"
    HELD_OUT = "heldout"
    LATE = "late"


def part_of(name: str, first_released: datetime) -> Part:
    if first_released >= LATE:
        return Part.LATE
    bucket = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") % 1000
    return Part.HELD_OUT if bucket < HELD_OUT_PER_MILLE else Part.TRAIN
