"""Test runners that are loaded before there is something to test: pytest waits in the sandbox of a copy.

Starting Python, pytest and its plugins takes longer than most small tests. So a copy whose last check was a
plain pytest command gets the next runner at once, while the model writes. Each runs once, in its own sandbox,
and prints the same output as the command itself.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path

from keystroke.agent.sandbox import CommandLimits, CompletedCommand, Sandbox, SandboxPolicy, StandbyCommand
from keystroke.agent.sandbox.environment import command_environment
from keystroke.agent.sandbox.supervise import OnOutput
from keystroke.engine.base import Interrupt

_SHELL = frozenset("|&;<>()$`\\*?~#{}!\n")  # a line without these means the same with and without a shell
_PYTHON = re.compile(r"python(?:\d+(?:\.\d+)?)?")
_SHEBANG = re.compile(rb"#!(/\S*/python[\d.]*)\n")


@dataclass(frozen=True, slots=True)
class PytestCommand:
    """`script`: the program pytest, empty for `PYTHON -m pytest`."""

    python: str
    script: str
    arguments: tuple[str, ...]

    @classmethod
    def parse(cls, line: str, root: Path) -> PytestCommand | None:
        """A command that runs pytest with its arguments and nothing else; None for others."""
        if _SHELL & set(line):
            return None
        try:
            words = shlex.split(line) or [""]
        except ValueError:
            return None
        if words[1:3] == ["-m", "pytest"] and _PYTHON.fullmatch(os.path.basename(words[0])):
            return cls(words[0], "", tuple(words[3:]))
        if os.path.basename(words[0]) != "pytest":
            return None
        path = command_environment(root).get("PATH", "")
        script = str(root / words[0]) if "/" in words[0] else shutil.which("pytest", path=path)
        try:
            with open(script or "", "rb") as file:
                found = _SHEBANG.match(file.read(1000))
        except OSError:
            return None
        return cls(found[1].decode(), script or "", tuple(words[1:])) if found else None


class WarmTests:
    """The waiting test runners of one task, one for each copy of the workspace."""

    def __init__(self, sandbox: Sandbox, limits: CommandLimits) -> None:
        self._sandbox, self._limits = sandbox, limits
        self._waiting: dict[Path, tuple[str, SandboxPolicy, StandbyCommand]] = {}
        self._lock = threading.Lock()
        self._closed = False

    def prepare(self, command: PytestCommand, policy: SandboxPolicy) -> None:
        """Start a runner for the next command in this copy. Not over layers: what is changed below them
        after they were mounted is not seen reliably."""
        if policy.layers is not None:
            return
        code = Path(__file__).with_name("pytest_start.py").read_text(encoding="utf-8")
        with self._lock:
            if self._closed or policy.root in self._waiting:
                return
            waiting = StandbyCommand(self._sandbox, [command.python, "-c", code], policy, self._limits)
            self._waiting[policy.root] = command.python, policy, waiting

    def run(
        self,
        command: PytestCommand,
        policy: SandboxPolicy,
        interrupt: Interrupt | None,
        on_output: OnOutput | None,
    ) -> CompletedCommand | None:
        """Run the command in the runner that waits in this copy; None where none does."""
        with self._lock:
            python, known, waiting = self._waiting.pop(policy.root, ("", policy, None))
        if waiting is None:
            return None
        if python != command.python or known != policy:
            waiting.close()
            return None
        return waiting.resume(json.dumps([command.script, *command.arguments]), interrupt, on_output)

    def close(self) -> None:
        """End all runners and wait for their end. Idempotent."""
        with self._lock:
            self._closed = True
            waiting = [entry[2] for entry in self._waiting.values()]
            self._waiting.clear()
        for one in waiting:
            one.stop.set()
        for one in waiting:
            one.close()
