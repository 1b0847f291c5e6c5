"""A served model together with the caller on whose budget it is used."""

from __future__ import annotations

from dataclasses import dataclass

from keystroke.gateway.access.keys import Caller
from keystroke.gateway.work.registry import ServedModel
from keystroke.gateway.work.service import Service


@dataclass(frozen=True, slots=True)
class ModelAccess:
    service: Service
    entry: ServedModel
    caller: Caller
