"""Ghost text and next edits in the forms that editors request them.

An answer for a text that has changed meanwhile is dropped. A suggestion's id travels in its command, and
feedback refers to it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from lsprotocol import types
from msgspec import to_builtins

from keystroke.clients.lsp.channel import Channel
from keystroke.clients.lsp.commands import ACCEPTED
from keystroke.clients.lsp.documents import Documents, OpenDocument
from keystroke.errors import KeystrokeError
from keystroke.protocol import live_messages as live

_MAX_TEXTS = 256  # suggestions whose text is kept for partial acceptance


class Suggestions:
    def __init__(self, documents: Documents, channel: Channel) -> None:
        self._documents, self._channel = documents, channel
        self._texts: OrderedDict[str, tuple[str, str]] = OrderedDict()  # id -> buffer, text
        self._last: dict[str, live.Suggestion | live.NotShown] = {}  # the last result, by URI

    async def inline(
        self,
        uri: str,
        position: types.Position,
        invoked: bool,
        selected: types.SelectedCompletionInfo | None = None,
    ) -> types.InlineCompletionList | None:
        """`selected`: the item selected in the editor's completion list; ghost text must continue it."""
        document = self._documents.get_usable(uri)
        if document is None:
            return None
        revision, offset = document.revision, document.offset(position)
        picked = document.to_edit(selected.range, selected.text) if selected is not None else None
        answer = await self._channel.complete(uri, offset, invoked=invoked, selected=picked)
        if self._is_outdated(document, revision):
            return None
        self._last[uri] = answer
        if not isinstance(answer, live.Suggestion):
            return None
        self._keep_text(answer.id, uri, answer.text)
        item = types.InlineCompletionItem(
            insert_text=answer.text,
            range=document.range(answer.start, answer.end),
            command=_accepted_command(answer.id, uri, answer.receipt.source),
        )
        return types.InlineCompletionList([item])

    def receipt(self, uri: str) -> dict[str, Any]:
        """The result of the last request for ghost text and its timings; empty if there was none."""
        answer = self._last.get(uri)
        if answer is None:
            return {}
        reason = answer.reason if isinstance(answer, live.NotShown) else ""
        return {"shown": not reason, "reason": reason, **to_builtins(answer.receipt)}

    # Next edits

    def forget(self, uri: str) -> None:
        self._last.pop(uri, None)

    async def next_edit(self, uri: str, version: int | None, position: types.Position) -> dict[str, Any]:
        """The next edit, in the format of `textDocument/copilotInlineEdit`."""
        document = self._documents.get_usable(uri)
        if document is None or (version is not None and version < document.version):
            return {"edits": []}
        revision = document.revision
        offer = await self._request_next_edit(document, document.offset(position))
        if offer is None or self._is_outdated(document, revision):
            return {"edits": []}
        edits = [self._edit(offer.id, uri, change) for change in (offer.change, *offer.others)]
        if any(edit is None for edit in edits):
            return {"edits": []}
        self._keep_text(offer.id, uri, offer.change.text)
        return {"edits": edits}

    async def _request_next_edit(self, document: OpenDocument, cursor: int) -> live.NextEdit | None:
        ask = live.NextEditAsk(
            id=self._channel.new_id(), buffer=document.uri, version=document.revision, cursor=cursor
        )
        try:
            reply = await self._channel.request(ask)
        except KeystrokeError:
            return None
        return reply if isinstance(reply, live.NextEdit) else None

    def _edit(self, suggestion: str, uri: str, change: live.NextEditChange) -> dict[str, Any] | None:
        document = self._documents.get_usable(change.buffer)
        if document is None or change.end > len(document.text):
            return None
        return {
            "text": change.text,
            "range": document.range(change.start, change.end),
            "textDocument": {"uri": change.buffer, "version": document.version},
            "command": _accepted_command(suggestion, uri),
        }

    # Feedback

    def feedback(self, command: Any, outcome: live.Outcome, units: int | None = None) -> None:
        """Report the outcome of the item with this command. `units`: UTF-16 units accepted of it."""
        arguments = field_of(command, "arguments")
        if not isinstance(arguments, (list, tuple)) or not arguments:
            return
        name = str(arguments[0])
        known = self._texts.get(name)
        if known is None:
            return
        uri, text = known
        self._channel.feedback(name, uri, outcome, _characters(text, units))

    def _keep_text(self, name: str, uri: str, text: str) -> None:
        self._texts[name] = (uri, text)
        while len(self._texts) > _MAX_TEXTS:
            self._texts.popitem(last=False)

    def _is_outdated(self, document: OpenDocument, revision: int) -> bool:
        return document.revision != revision or self._documents.get(document.uri) is not document


def _accepted_command(suggestion: str, uri: str, *source: str) -> types.Command:
    """`source`: how the suggestion was produced, for measurements."""
    return types.Command(title="accepted", command=ACCEPTED, arguments=[suggestion, uri, *source])


def _characters(text: str, units: int | None) -> int:
    """The number of characters in the first `units` UTF-16 units; all of them for None."""
    if units is None:
        return len(text)
    taken = text.encode("utf-16-le", "surrogatepass")[: 2 * max(0, units)]
    return len(taken.decode("utf-16-le", "ignore"))


def field_of(value: Any, name: str) -> Any:
    """A field of a message for which the protocol library has no type."""
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)
