"""Work on what strangers wrote, in a process and a thread of one key's own.

A hostile text or project, or a hundred asks at once, hold up nobody but their own key, nor fill the
threads that all share. Both go when nobody holds this any more, that is with the last connection of the key,
whatever they are at: what runs in the thread must not hold it either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, TypeVar
from weakref import WeakValueDictionary, finalize

from keystroke.isolation import Isolated

T = TypeVar("T")
Own = TypeVar("Own", bound="KeyProcess")


class KeyProcess:
    """Use `of`."""

    _known: ClassVar[WeakValueDictionary[str, Any]]

    def __init_subclass__(cls) -> None:
        cls._known = WeakValueDictionary()

    def __init__(self, elsewhere: Isolated) -> None:
        self._elsewhere = elsewhere
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=type(self).__name__.lower())
        finalize(self, elsewhere.close)

    @classmethod
    def of(cls: Callable[[], Own], key: str) -> Own:
        """The key's own; hold on to it for as long as it may be asked."""
        known: WeakValueDictionary[str, Own] = getattr(cls, "_known")  # noqa: B009 - a class that is called
        found = known.get(key)
        if found is None:
            found = known[key] = cls()
        return found

    async def _run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Wait for this key's turn, then for `work(process, *arguments)`."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, work, self._elsewhere, *arguments)
