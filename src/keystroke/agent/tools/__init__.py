"""The few things a model can do: read, search, edit, run."""

from keystroke.agent.tools.call import Call, Result, Tool, Toolbox
from keystroke.agent.tools.edit import Edit
from keystroke.agent.tools.read import Read
from keystroke.agent.tools.run import Approve, Command, Run, Runner
from keystroke.agent.tools.search import Search

__all__ = [
    "Approve",
    "Call",
    "Command",
    "Edit",
    "Read",
    "Result",
    "Run",
    "Runner",
    "Search",
    "Tool",
    "Toolbox",
]
