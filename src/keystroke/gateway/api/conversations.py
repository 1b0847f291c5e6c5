"""Finished turns by response id, so that a conversation continues from its exact tokens.

Found in memory with their tokens, else rebuilt from the store as items. A turn is visible to its own caller
only.
"""

from __future__ import annotations

from collections import OrderedDict

from keystroke.gateway.access.keys import Caller
from keystroke.gateway.api.prompts import ConversationTurn, text_length
from keystroke.gateway.record.store import Store
from keystroke.protocol.items import as_input

_TURNS = 256  # turns kept in memory
_TOKENS = 2_000_000  # tokens of them, at most
_CHARACTERS = 64 << 20  # characters of them, at most


class Conversations:
    def __init__(self, store: Store | None) -> None:
        self._store = store
        self._turns: OrderedDict[str, tuple[str, ConversationTurn]] = OrderedDict()
        self._tokens = 0  # of those turns
        self._characters = 0

    def remember(self, caller: Caller, turn: ConversationTurn) -> None:
        self.forget(turn.response_id)
        self._turns[turn.response_id] = (caller.id, turn)
        self._tokens += len(turn.tokens or ())
        self._characters += text_length(turn.items)
        while len(self._turns) > 1 and self._is_full():
            self.forget(next(iter(self._turns)))

    def forget(self, response_id: str) -> None:
        found = self._turns.pop(response_id, None)
        if found is not None:
            self._tokens -= len(found[1].tokens or ())
            self._characters -= text_length(found[1].items)

    def _is_full(self) -> bool:
        return len(self._turns) > _TURNS or self._tokens > _TOKENS or self._characters > _CHARACTERS

    async def recall(self, caller: Caller, response_id: str) -> ConversationTurn | None:
        """A finished turn of this caller, or None. Raises PreviousResponseNotFound where an earlier turn is
        missing: a conversation is never shortened silently."""
        found = self._turns.get(response_id)
        if found is not None:
            self._turns.move_to_end(response_id)
            return found[1] if found[0] == caller.id else None
        if self._store is None:
            return None
        chain = await self._store.chain(response_id)
        if not chain or chain[-1].key_id != caller.id:
            return None
        items = [item for stored in chain for item in (*stored.items, *map(as_input, stored.response.output))]
        last = chain[-1].response
        return ConversationTurn(last.id, last.model, items, last.instructions, last.tools or None)
