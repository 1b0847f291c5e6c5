"""The order of work: the priority (what it is for) decides first, then the tier (what was paid for)."""

from __future__ import annotations

from enum import IntEnum


class Priority(IntEnum):
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


_TIERS = len(Tier)


def priority_named(name: str | None, default: Priority) -> Priority:
    return default if name is None else Priority[name.upper()]


def tier_named(name: str | None) -> Tier:
    return Tier.DEFAULT if name in (None, "auto") else Tier[str(name).upper()]


def rank(priority: Priority, tier: Tier) -> int:
    """Lower goes first."""
    return priority * _TIERS + tier
