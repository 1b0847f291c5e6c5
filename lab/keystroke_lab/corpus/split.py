"""Which part of the corpus a project belongs to: training, held-out or late.

The project alone decides, never a file or what else is in the corpus, so a project keeps its part when the
corpus grows. Projects first released late are never trained on.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from enum import StrEnum

LATE = datetime(2025, 7, 1, tzinfo=UTC)
HELD_OUT_PER_MILLE = 10


class CorpusPart(StrEnum):
    TRAIN = "train"
    HELD_OUT = "heldout"
    LATE = "late"


def part_of(name: str, first_released: datetime) -> CorpusPart:
    if first_released >= LATE:
        return CorpusPart.LATE
    bucket = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") % 1000
    return CorpusPart.HELD_OUT if bucket < HELD_OUT_PER_MILLE else CorpusPart.TRAIN
