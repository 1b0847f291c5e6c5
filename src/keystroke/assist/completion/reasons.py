"""Why a suggestion is not shown: each a named value, never a silence."""

from __future__ import annotations

from enum import StrEnum


class Hidden(StrEnum):
    # Nothing was made
    DISABLED = "disabled"  # completion is switched off in the settings
    EXCLUDED = "excluded_file"  # a file that may hold secrets never enters a prompt
    TOO_LARGE = "file_too_large"
    UNLEARNED = "language_not_learned"  # the model's card names its languages, and this is none of them
    NOTHING_WRITTEN = "nothing_written"  # no text before or after the cursor to go on from
    MID_WORD = "mid_word"  # letters follow the cursor: the user edits a word
    # Something was made and held back
    EMPTY = "empty"  # the model had nothing to add here
    LOOPS = "repeats_itself"  # the model says the same thing again and again
    LOW_CONFIDENCE = "low_confidence"
    TYPING_FAST = "typing_fast"  # sure enough for a pause, not for a burst of keys
    WOULD_INDENT = "would_indent"  # Tab would indent here; ready as soon as a character is typed
    BREAKS_SYNTAX = "breaks_syntax"
    LINE_TOO_LONG = "line_too_long"  # over the project's own limit
    DISMISSED = "dismissed_before"  # the same text at the same place was turned down
    # It came to nothing
    SUPERSEDED = "superseded"  # a newer request of the buffer took its place
    CANCELLED = "cancelled"
    STALE = "stale_version"  # asked about a version that is no longer there
    FAILED = "failed"
