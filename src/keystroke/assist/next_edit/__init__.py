"""The next edit: what a change just made asks for elsewhere, offered as a jump."""

from __future__ import annotations

from keystroke.assist.next_edit.burst import Burst, burst_between
from keystroke.assist.next_edit.places_question import PlacesQuestion
from keystroke.assist.next_edit.question import Found, Question, Said, Unfit
from keystroke.assist.next_edit.tracker import Cause, Intent, NextEdits, Other, Placed, Proposal, foreseen

__all__ = [
    "Burst",
    "Cause",
    "Found",
    "Intent",
    "NextEdits",
    "Other",
    "Placed",
    "PlacesQuestion",
    "Proposal",
    "Question",
    "Said",
    "Unfit",
    "burst_between",
    "foreseen",
]
