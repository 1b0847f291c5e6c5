"""Models behind OpenAI-compatible servers, streamed as text."""

from keystroke.engine.remote.blocking import BlockingModel
from keystroke.engine.remote.remote_model import RemoteModel
from keystroke.engine.remote.transport import Endpoint
from keystroke.engine.remote.wire import RemoteReasoning, StreamItem, ToolCallDelta, Usage

__all__ = [
    "BlockingModel",
    "Endpoint",
    "RemoteModel",
    "RemoteReasoning",
    "StreamItem",
    "ToolCallDelta",
    "Usage",
]
