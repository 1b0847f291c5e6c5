"""Positions of editors, and the encodings in which their columns count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Encoding = Literal["utf-8", "utf-16", "utf-32"]
ENCODINGS: tuple[Encoding, ...] = ("utf-8", "utf-16", "utf-32")


@dataclass(frozen=True, slots=True)
class Position:
    """Line and column, both counted from 0, the column in the units of the encoding asked for."""

    line: int
    column: int
