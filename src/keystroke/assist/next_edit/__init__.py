"""The next edit: what a change just made asks for elsewhere, offered as a jump."""

from __future__ import annotations

from keystroke.assist.next_edit.burst import Burst, burst_between
from keystroke.assist.next_edit.tracker import Cause, NextEdits, Other, Placed, Proposal

__all__ = ["Burst", "Cause", "NextEdits", "Other", "Placed", "Proposal", "burst_between"]
