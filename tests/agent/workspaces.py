"""A small project to work on, and what a task needs around it."""

from __future__ import annotations

from pathlib import Path

from keystroke.agent.sandbox import Sandbox
from keystroke.agent.tools import CommandRequest, Runner
from keystroke.agent.workspace import Overlay, Replica, WorkspaceReplicas
from keystroke.assist.edit import Journal, Workspace

EXCLUDE = (".env", "*.pem")


class Project:
    """A workspace with a journal outside of it."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "project"
        self.root.mkdir()
        self.folder = folder
        self.write("calc.py", "def add(a, b):\n    return a - b\n")
        self.write("test_calc.py", "from calc import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n")
        self.write("notes/plan.txt", "first\nsecond\n")
        self.write(".env", "TOKEN=hush\n")
        self.workspace = Workspace(self.root, exclude=EXCLUDE)
        self.journal = Journal(folder / "state", self.workspace)
        self.asked: list[CommandRequest] = []

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def overlay(self) -> Overlay:
        return Overlay(self.workspace)

    def replica(self, sandbox: Sandbox, name: str = "copy") -> Replica:
        return Replica(self.root, self.folder / name, sandbox, exclude=EXCLUDE)

    def runner(self, sandbox: Sandbox, overlay: Overlay, *, says: bool = True) -> Runner:
        def approve(command: CommandRequest) -> bool:
            self.asked.append(command)
            return says

        copies = WorkspaceReplicas(self.root, self.folder / "copies", sandbox, exclude=EXCLUDE)
        return Runner(sandbox, overlay, copies, approve)

    def tree(self) -> dict[str, str]:
        """Every file of the workspace."""
        return {
            path.relative_to(self.root).as_posix(): path.read_text()
            for path in sorted(self.root.rglob("*"))
            if path.is_file() and ".git" not in path.parts
        }
