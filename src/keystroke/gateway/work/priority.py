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
    ULTRAFAST = 0
    PRIORITY = 1
    DEFAULT = 2
    FLEX = 3

    @property
    def label(self) -> str:
        return self.name.lower()


_TIERS = len(Tier)
_TIER_NAMES = {tier.label: tier for tier in Tier} | {"fast": Tier.PRIORITY}


def parse_priority(name: str | None, default: Priority) -> Priority:
    return default if name is None else Priority[name.upper()]


def parse_tier(name: str | None) -> Tier:
    """`fast` is another name of `priority`; a tier of a newer client counts as the default."""
    return _TIER_NAMES.get(name or "auto", Tier.DEFAULT)


def shown_tier(requested: str | None, tier: Tier) -> str:
    """The tier that a reply names: the one that was used; a name that is not known here is repeated."""
    unknown = requested is not None and requested != "auto" and requested not in _TIER_NAMES
    return requested if unknown and requested is not None else tier.label


def rank(priority: Priority, tier: Tier) -> int:
    """Lower goes first."""
    return priority * _TIERS + tier
