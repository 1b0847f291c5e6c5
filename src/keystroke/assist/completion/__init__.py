"""Completion at a cursor: the prompt around it, and where the answer ends."""

from keystroke.assist.completion.ending import Cut, Ending
from keystroke.assist.completion.prompt import CompletionPrompt, build_prompt, trim_text
from keystroke.assist.completion.run import Completion, complete

__all__ = ["Completion", "CompletionPrompt", "Cut", "Ending", "build_prompt", "complete", "trim_text"]
