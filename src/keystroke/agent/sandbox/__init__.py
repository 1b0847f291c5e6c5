"""Runs commands in a sandbox."""

from keystroke.agent.sandbox.environment import credential_paths, secret_files
from keystroke.agent.sandbox.policy import CommandLimits, CompletedCommand, ExitReason, Layers, SandboxPolicy
from keystroke.agent.sandbox.probe import find_escapes, find_sandbox, is_effective
from keystroke.agent.sandbox.sandbox import Sandbox, SandboxKind
from keystroke.agent.sandbox.standby import StandbyCommand

__all__ = [
    "CommandLimits",
    "CompletedCommand",
    "ExitReason",
    "Layers",
    "Sandbox",
    "SandboxKind",
    "SandboxPolicy",
    "StandbyCommand",
    "credential_paths",
    "find_escapes",
    "find_sandbox",
    "is_effective",
    "secret_files",
]
