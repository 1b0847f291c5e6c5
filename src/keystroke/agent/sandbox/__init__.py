"""Commands run where they can do no harm."""

from keystroke.agent.sandbox.policy import Ended, Ending, Limits, Place
from keystroke.agent.sandbox.sandbox import Kind, Sandbox, find_sandbox, holds
from keystroke.agent.sandbox.surroundings import secret_files, secrets

__all__ = [
    "Ended",
    "Ending",
    "Kind",
    "Limits",
    "Place",
    "Sandbox",
    "find_sandbox",
    "holds",
    "secret_files",
    "secrets",
]
