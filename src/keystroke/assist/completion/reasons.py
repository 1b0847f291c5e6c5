"""Why a suggestion is not shown. The values are wire names."""

from __future__ import annotations

from enum import StrEnum


class WithheldReason(StrEnum):
    # Nothing was computed
    DISABLED = "disabled"  # completion is switched off in the settings
    EXCLUDED = "excluded_file"  # a file that may hold secrets never enters a prompt
    TOO_LARGE = "file_too_large"
    UNTRAINED_LANGUAGE = "language_not_learned"  # the model's card does not list this language
    NOTHING_WRITTEN = "nothing_written"  # no text before or after the cursor to continue
    MID_WORD = "mid_word"  # letters follow the cursor: the user edits a word
    # Something was computed and withheld
    EMPTY = "empty"  # the model had nothing to add here
    LOOPS = "repeats_itself"
    LOW_CONFIDENCE = "low_confidence"
    TYPING_FAST = "typing_fast"  # confident enough for a pause, not for a burst of keys
    WOULD_INDENT = "would_indent"  # Tab would indent here; shown once a character is typed
    BREAKS_SYNTAX = "breaks_syntax"
    LINE_TOO_LONG = "line_too_long"  # over the project's own limit
    DISMISSED = "dismissed_before"  # the user dismissed the same text at the same place
    # The request ended without an answer
    SUPERSEDED = "superseded"  # by a newer request of the buffer
    CANCELLED = "cancelled"
    STALE = "stale_version"  # the request names a version that is no longer current
    FAILED = "failed"
