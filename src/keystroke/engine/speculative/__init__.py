"""Drafters: they propose tokens, which the engine verifies in one step."""

from __future__ import annotations

from keystroke.engine.speculative.adaptive import AdaptiveDrafter, drafter_for, engine_drafter
from keystroke.engine.speculative.base import MAX_DRAFT, Drafter
from keystroke.engine.speculative.combined import CombinedDrafter
from keystroke.engine.speculative.cost import cost_table, measure_verify_cost, verify_cost
from keystroke.engine.speculative.draft_model import ModelDrafter
from keystroke.engine.speculative.file_draft import FileDrafter
from keystroke.engine.speculative.suffix_automaton import SuffixDrafter

__all__ = [
    "MAX_DRAFT",
    "AdaptiveDrafter",
    "CombinedDrafter",
    "Drafter",
    "FileDrafter",
    "ModelDrafter",
    "SuffixDrafter",
    "cost_table",
    "drafter_for",
    "engine_drafter",
    "measure_verify_cost",
    "verify_cost",
]
