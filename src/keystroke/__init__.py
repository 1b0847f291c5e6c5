"""Keystroke: a real-time coding system anyone can run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keystroke.clients.connection import Client

__all__ = ["Client"]


def __getattr__(name: str) -> Any:
    """`from keystroke import Client` without making every import of the package pay for it."""
    if name == "Client":
        from keystroke.clients.connection import Client

        return Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
