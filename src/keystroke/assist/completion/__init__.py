"""Completion at a cursor: builds the prompt, decides where the answer ends and whether it is shown."""

from keystroke.assist.completion.ending import Ending
from keystroke.assist.completion.extent import Extent
from keystroke.assist.completion.live_completion import (
    LiveCompletion,
    ShownCompletion,
    WithheldCompletion,
    context_budget,
)
from keystroke.assist.completion.prompt import build_prompt, trim_text
from keystroke.assist.completion.reasons import WithheldReason
from keystroke.assist.completion.run import Completion, complete
from keystroke.assist.completion.stream import SuggestionStream

__all__ = [
    "Completion",
    "Ending",
    "Extent",
    "LiveCompletion",
    "ShownCompletion",
    "SuggestionStream",
    "WithheldCompletion",
    "WithheldReason",
    "build_prompt",
    "complete",
    "context_budget",
    "trim_text",
]
