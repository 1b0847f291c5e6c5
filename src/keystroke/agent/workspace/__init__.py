"""A task's changes before they are applied: an overlay in memory, and copies on disk for commands."""

from keystroke.agent.workspace.overlay import Overlay
from keystroke.agent.workspace.replica import Replica
from keystroke.agent.workspace.replicas import WorkspaceReplicas

__all__ = ["Overlay", "Replica", "WorkspaceReplicas"]
