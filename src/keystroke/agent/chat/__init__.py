"""Models as a task talks with them: on this machine or behind a server, one interface."""

from keystroke.agent.chat.chat import Asked, Chat, HandOver, Message, Reply, Steered, Steering
from keystroke.agent.chat.local import LocalChat
from keystroke.agent.chat.receipt import Account, Price, Receipt
from keystroke.agent.chat.remote import RemoteChat
from keystroke.agent.chat.wording import Wording

__all__ = [
    "Account",
    "Asked",
    "Chat",
    "HandOver",
    "LocalChat",
    "Message",
    "Price",
    "Receipt",
    "RemoteChat",
    "Reply",
    "Steered",
    "Steering",
    "Wording",
]
