"""Models behind OpenAI-compatible servers, streamed as text."""

from keystroke.engine.remote.blocking import BlockingModel
from keystroke.engine.remote.fim import RemoteFim, fim_for
from keystroke.engine.remote.remote_model import Health, ListedModel, RemoteModel
from keystroke.engine.remote.transport import Endpoint
from keystroke.engine.remote.wire import RemoteReasoning, StreamItem, ToolCallDelta, Usage

__all__ = [
    "BlockingModel",
    "Endpoint",
    "Health",
    "ListedModel",
    "RemoteFim",
    "RemoteModel",
    "RemoteReasoning",
    "StreamItem",
    "ToolCallDelta",
    "Usage",
    "fim_for",
]
