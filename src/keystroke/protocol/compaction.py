"""Compaction items: a summary in place of the older items of a conversation.

The opaque text of a compaction item holds everything that a later request needs, so that a server without
memory of the conversation can continue it: the system messages, the summary, and the newest items as they
were. It is compressed, not encrypted: it contains only what its client has sent.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from keystroke.protocol.items import Item

COMPACTIONS = frozenset({"compaction", "compaction_summary"})  # the second is Codex's name
_MARK = "keystroke1."
_LARGEST = 32 << 20  # bytes of JSON that a compaction item may hold


class CompactedWindow(Struct, frozen=True, omit_defaults=True):
    head: list[Item] = []  # system messages and tools
    summary: str = ""
    tail: list[Item] = []  # the newest items, unchanged


def pack_window(window: CompactedWindow) -> str:
    packed = zlib.compress(msgspec.json.encode(window), 6)
    return _MARK + base64.urlsafe_b64encode(packed).decode()


def unpack_window(text: str) -> CompactedWindow | None:
    """What `pack_window` packed; None for the text of another server, or a damaged one."""
    if not text.startswith(_MARK):
        return None
    try:
        packed = base64.urlsafe_b64decode(text[len(_MARK) :])
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(packed, _LARGEST)
        if not unpacker.eof:
            return None
        return msgspec.json.decode(data, type=CompactedWindow)
    except (binascii.Error, zlib.error, ValueError, RecursionError):
        return None


def is_head(item: Item) -> bool:
    """Whether an item is never summarised: system text and tools."""
    return item.type == "additional_tools" or (
        item.type == "message" and item.role in ("system", "developer")
    )


def summary_item(summary: str) -> Item:
    """A summary as the item that prompts contain."""
    return Item(type="compaction", content=summary)


def expand_compaction(items: Sequence[Item]) -> list[Item]:
    """The items with the last compaction item replaced by what it holds. Of what precedes it only system
    messages and tools remain: they are newer than those it holds. Compaction items of other servers, which
    cannot be read here, are left out."""
    at = len(items) - 1
    window = None
    while at >= 0:
        item = items[at]
        if item.type in COMPACTIONS and item.encrypted_content is not None:
            window = unpack_window(item.encrypted_content)
            if window is not None:
                break
        at -= 1
    rest = [i for i in items[at + 1 :] if i.type not in COMPACTIONS or i.encrypted_content is None]
    if window is None:
        return rest
    head = [i for i in items[:at] if is_head(i) and i not in window.tail] or window.head
    return [*head, summary_item(window.summary), *window.tail, *rest]
