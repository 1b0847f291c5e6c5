"""The address of a gateway."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GatewayAddress:
    """`url` is where the gateway listens; `token` is the key it requires, if any."""

    url: str
    token: str | None = None
