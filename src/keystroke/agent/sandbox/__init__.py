"""Runs commands in a sandbox."""

from keystroke.agent.sandbox.environment import credential_paths, secret_files
from keystroke.agent.sandbox.policy import CommandLimits, CompletedCommand, ExitReason, SandboxPolicy
from keystroke.agent.sandbox.sandbox import Sandbox, SandboxKind, find_sandbox, is_effective

__all__ = [
    "CommandLimits",
    "CompletedCommand",
    "ExitReason",
    "Sandbox",
    "SandboxKind",
    "SandboxPolicy",
    "credential_paths",
    "find_sandbox",
    "is_effective",
    "secret_files",
]
