"""Models that tasks are given to, opened by name: on this machine or behind a server.

What the user named comes first, then what the settings give the role to; a server is never chosen by
itself. Whoever opens one closes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from keystroke.agent.chat import Chat, LocalChat, Price, RemoteChat
from keystroke.errors import UsageError

if TYPE_CHECKING:
    from keystroke.clients.cli.invocation import Invocation


def open_chat(name: str, run: Invocation) -> Chat:
    """The model called `name`. NotFound, ConfigError or UnsupportedModel say what to do."""
    from keystroke.clients.cli.local_speaker import LocalSpeaker
    from keystroke.clients.cli.remote_speaker import RemoteSpeaker
    from keystroke.clients.cli.speaker import open_speaker

    speaker = open_speaker(name, run, local=True)  # attempts fork sessions, which no gateway lends
    price = _price(name, run)
    if isinstance(speaker, RemoteSpeaker):
        return RemoteChat(speaker.model, price=price)
    if not isinstance(speaker, LocalSpeaker):
        raise UsageError(f"{speaker.name} cannot do tasks; choose another model")
    try:
        return _Owned(speaker.model, price, speaker.close)
    except BaseException:
        speaker.close()
        raise


class _Owned(LocalChat):
    """A model that is closed with the chat."""

    def __init__(self, model: object, price: Price, close: Callable[[], None]) -> None:
        super().__init__(model, price=price)  # type: ignore[arg-type]
        self._close = close

    def close(self) -> None:
        super().close()
        self._close()


def _price(name: str, run: Invocation) -> Price:
    table = run.settings.models.get(name)
    if table is None:
        return Price()
    return Price(table.cost_per_million_input, table.cost_per_million_cached, table.cost_per_million_output)
