"""Where a gateway listens, as a value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GatewayAddress:
    """Where a gateway listens, and the key it wants."""

    url: str
    token: str | None = None
