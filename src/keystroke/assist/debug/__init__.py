"""Errors answered as they surface: in text that is being typed, and in the output of programs that fail."""

from keystroke.assist.debug.check import check, concerns, fixes_for
from keystroke.assist.debug.diagnostic import Diagnostic, Fix, Level
from keystroke.assist.debug.modules import Project

__all__ = ["Diagnostic", "Fix", "Level", "Project", "check", "concerns", "fixes_for"]
