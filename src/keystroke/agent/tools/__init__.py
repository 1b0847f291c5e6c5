"""The tools of the agent: read, search, edit, run."""

from keystroke.agent.tools.call import AgentTool, Toolbox, ToolInvocation, ToolResult
from keystroke.agent.tools.edit import EditTool
from keystroke.agent.tools.read import ReadTool
from keystroke.agent.tools.run import CommandRequest, Runner, RunTool
from keystroke.agent.tools.search import SearchTool

__all__ = [
    "AgentTool",
    "CommandRequest",
    "EditTool",
    "ReadTool",
    "RunTool",
    "Runner",
    "SearchTool",
    "ToolInvocation",
    "ToolResult",
    "Toolbox",
]
