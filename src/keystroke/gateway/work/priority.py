"""Whose work goes first.

Law: an order and nothing else. Lanes are what the work is for, tiers are what was paid for; a lane always
beats a tier, so that ghost text under a cheap tier still beats a dear chat.
"""

from __future__ import annotations

from enum import IntEnum


class Lane(IntEnum):
    GHOST = 0
    NEXT_EDIT = 1
    EDIT = 2
    AUDIT = 3
    CHAT = 4
    BACKGROUND = 5

    @property
    def label(self) -> str:
        return self.name.lower()


class Tier(IntEnum):
    PRIORITY = 0
    DEFAULT = 1
    FLEX = 2

    @property
    def label(self) -> str:
        return self.name.lower()


def lane_named(name: str | None, default: Lane) -> Lane:
    return default if name is None else Lane[name.upper()]


def tier_named(name: str | None) -> Tier:
    return Tier.DEFAULT if name in (None, "auto") else Tier[str(name).upper()]


def rank(lane: Lane, tier: Tier) -> int:
    """Lower goes first."""
    return lane * len(Tier) + tier
