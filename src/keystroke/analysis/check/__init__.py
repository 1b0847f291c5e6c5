"""Errors in text that is being typed, with checked fixes."""

from keystroke.analysis.check.check import can_check, check, fixes_for
from keystroke.analysis.check.diagnostic import Diagnostic, Fix, Level
from keystroke.analysis.check.modules import Project

__all__ = ["Diagnostic", "Fix", "Level", "Project", "can_check", "check", "fixes_for"]
