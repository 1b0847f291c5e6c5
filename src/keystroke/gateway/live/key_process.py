"""A process and a thread per API key, for work on untrusted texts.

A hostile text, or many requests at once, delay only their own key. Both end with the key's last connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, TypeVar
from weakref import WeakValueDictionary, finalize

from keystroke.errors import InputError
from keystroke.isolation import IsolatedFunction, LimitExceeded

T = TypeVar("T")
Own = TypeVar("Own", bound="KeyProcess")


class KeyProcess:
    """Create one with `for_key`."""

    _known: ClassVar[WeakValueDictionary[str, Any]]

    def __init_subclass__(cls) -> None:
        cls._known = WeakValueDictionary()

    def __init__(self, elsewhere: IsolatedFunction) -> None:
        self._elsewhere = elsewhere
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=type(self).__name__.lower())
        finalize(self, elsewhere.close)

    @classmethod
    def for_key(cls: Callable[[], Own], key: str) -> Own:
        """The process of this key. It ends when nobody holds a reference to it."""
        known: WeakValueDictionary[str, Own] = getattr(cls, "_known")  # noqa: B009 - a class that is called
        found = known.get(key)
        if found is None:
            found = known[key] = cls()
        return found

    @staticmethod
    def _call(elsewhere: IsolatedFunction, late: str, *arguments: Any, param: str | None = None) -> Any:
        """The function's result. Raises InputError where it refuses, or exceeds a limit (`late` says so)."""
        try:
            kind, said = elsewhere.call(*arguments)
        except LimitExceeded:
            raise InputError(late, param=param) from None
        if kind == "refused":
            raise InputError(said, param=param)
        return said

    async def _run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run `work(process, *arguments)` in this key's thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, work, self._elsewhere, *arguments)
