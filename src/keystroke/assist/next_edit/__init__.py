"""Next edit: predicts where a change just made requires another one, and offers it as a jump."""

from __future__ import annotations

from keystroke.assist.next_edit.burst import Burst, burst_between
from keystroke.assist.next_edit.places_question import PlacesQuestion
from keystroke.assist.next_edit.question import (
    EngineAnswer,
    NoEditReason,
    PredictedEdits,
    SinglePlaceQuestion,
)
from keystroke.assist.next_edit.tracker import (
    Cause,
    Intent,
    NextEditProposal,
    NextEditTracker,
    proposal_from_model,
)

__all__ = [
    "Burst",
    "Cause",
    "EngineAnswer",
    "Intent",
    "NextEditProposal",
    "NextEditTracker",
    "NoEditReason",
    "PlacesQuestion",
    "PredictedEdits",
    "SinglePlaceQuestion",
    "burst_between",
    "proposal_from_model",
]
