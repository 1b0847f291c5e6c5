"""A process and a thread per API key, for work on untrusted texts.

A hostile text, or many requests at once, delay only their own key. Both end with the key's last connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, Self, TypeVar
from weakref import WeakValueDictionary, finalize

from keystroke.errors import InputError
from keystroke.isolation import IsolatedFunction, LimitExceeded

T = TypeVar("T")


class KeyProcess:
    """Create one with `for_key`. A subclass names its function (`target`) and the limits of a call."""

    target: ClassVar[str]
    seconds: ClassVar[float]
    memory: ClassVar[int]
    known: ClassVar[WeakValueDictionary[tuple[type, str], KeyProcess]] = WeakValueDictionary()

    def __init__(self, function: IsolatedFunction | None = None) -> None:
        function = function or IsolatedFunction(self.target, seconds=self.seconds, memory=self.memory)
        self._function = function
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=type(self).__name__.lower())
        finalize(self, function.close)

    @classmethod
    def for_key(cls, key: str) -> Self:
        """The process of this key. It ends when nobody holds a reference to it."""
        found = cls.known.get((cls, key))
        if not isinstance(found, cls):
            found = cls.known[cls, key] = cls()
        return found

    async def _run(self, work: Callable[[IsolatedFunction], T]) -> T:
        """Run `work` in this key's thread. It must not hold a reference to this object."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, work, self._function)


def call_limited(
    function: IsolatedFunction, timeout_message: str, *arguments: Any, param: str | None = None
) -> Any:
    """The function's result. Raises InputError where it refuses, or exceeds a limit (then with
    `timeout_message`)."""
    try:
        kind, result = function.call(*arguments)
    except LimitExceeded:
        raise InputError(timeout_message, param=param) from None
    if kind == "refused":
        raise InputError(result, param=param)
    return result
