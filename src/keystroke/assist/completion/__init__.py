"""Completion at a cursor: the prompt around it, where the answer ends, and whether it is shown."""

from keystroke.assist.completion.ending import Cut, Ending
from keystroke.assist.completion.extent import Extent
from keystroke.assist.completion.live_completion import LiveCompletion, Offer, Withheld, context_budget
from keystroke.assist.completion.prompt import CompletionPrompt, build_prompt, trim_text
from keystroke.assist.completion.reasons import Hidden
from keystroke.assist.completion.run import Completion, complete
from keystroke.assist.completion.stream import Stream

__all__ = [
    "Completion",
    "CompletionPrompt",
    "Cut",
    "Ending",
    "Extent",
    "Hidden",
    "LiveCompletion",
    "Offer",
    "Stream",
    "Withheld",
    "build_prompt",
    "complete",
    "context_budget",
    "trim_text",
]
