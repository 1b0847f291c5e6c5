"""What a task changes, before it lands: in memory over the workspace, and on disk as a copy for commands."""

from keystroke.agent.workspace.listing import listed
from keystroke.agent.workspace.overlay import Overlay
from keystroke.agent.workspace.replica import Replica, Replicas

__all__ = ["Overlay", "Replica", "Replicas", "listed"]
