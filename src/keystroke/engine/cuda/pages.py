"""The pages of the KV cache: reference counts, lookup by content, eviction. Works on page numbers only.

A page is free, held by one or more sequences, or idle: held by none, but its content is recorded for reuse
until the page is needed. A full page is recorded by all tokens up to its end, compared exactly, not by hash.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from keystroke.engine.cuda.plan import PAGE
from keystroke.errors import NotEnoughMemory


@dataclass(eq=False, slots=True)
class PageRecord:
    """A full page whose content is recorded. `parent` is the page before it; None for the first."""

    page: int
    parent: PageRecord | None
    content: bytes


class PagePool:
    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._free = list(range(pages - 1, -1, -1))
        self._references = [0] * pages
        self._known: list[PageRecord | None] = [None] * pages
        self._index: dict[tuple[PageRecord | None, bytes], PageRecord] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def free(self) -> int:
        """Pages that `allocate` can still return, idle ones included."""
        return len(self._free) + len(self._idle)

    @property
    def held(self) -> int:
        return self.pages - self.free

    @property
    def idle(self) -> int:
        return len(self._idle)

    def allocate(self) -> int:
        """A page for new content, held once. Evicts the oldest idle page if none is free."""
        if self._free:
            page = self._free.pop()
        elif self._idle:
            page, _ = self._idle.popitem(last=False)
            self._forget(page)
        else:
            raise NotEnoughMemory(
                f"all {self.pages * PAGE:,} tokens of KV memory are in use; close a session"
            )
        self._references[page] = 1
        return page

    def hold(self, page: int) -> None:
        if self._references[page] == 0:
            del self._idle[page]
        self._references[page] += 1

    def release(self, page: int) -> None:
        self._references[page] -= 1
        if self._references[page] == 0:
            if self._known[page] is None:
                self._free.append(page)
            else:
                self._idle[page] = None

    def writable(self, page: int) -> bool:
        """Whether only one sequence holds the page and its content is not recorded."""
        return self._references[page] == 1 and self._known[page] is None

    def record(
        self, page: int, parent: PageRecord | None, tokens: Sequence[int], scope: str = ""
    ) -> PageRecord:
        """Record a full page. If its content is recorded already, returns that record, and this page stays
        unrecorded."""
        content = _content(tokens) if parent is not None else _first_content(tokens, scope)
        found = self._index.get((parent, content))
        if found is None:
            found = PageRecord(page, parent, content)
            self._index[parent, content] = found
            self._known[page] = found
        return found

    def find(
        self, tokens: Sequence[int], start: Sequence[PageRecord] = (), scope: str = ""
    ) -> list[PageRecord]:
        """The longest run of recorded full pages in `scope` that `tokens` begins with. `start`: records of
        its beginning, which are ignored if one was evicted."""
        run = list(start) if all(self._known[known.page] is known for known in start) else []
        parent = run[-1] if run else None
        for at in range(len(run) * PAGE, len(tokens) - PAGE + 1, PAGE):
            page = tokens[at : at + PAGE]
            content = _content(page) if parent is not None else _first_content(page, scope)
            parent = self._index.get((parent, content))
            if parent is None:
                break
            run.append(parent)
        return run

    def _forget(self, page: int) -> None:
        known = self._known[page]
        if known is not None:
            del self._index[known.parent, known.content]
            self._known[page] = None


def _content(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


def _first_content(tokens: Sequence[int], scope: str) -> bytes:
    """Content of a first page, scope included: later pages refer to it by `parent`."""
    return _content(tokens) + scope.encode()


class PageTable:
    """The pages of one sequence."""

    def __init__(self, pool: PagePool, scope: str = "") -> None:
        self._pool = pool
        self.scope = scope
        self.pages: list[int] = []
        self._known: list[PageRecord] = []  # of the leading pages

    def reserve(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """Make positions start ... end - 1 writable. Returns (index, old page, new page) for each page whose
        first part must be copied before writing. Raises NotEnoughMemory, and then has changed nothing."""
        first, last = start // PAGE, -(-end // PAGE)
        shared = [
            i for i in range(first, min(last, len(self.pages))) if not self._pool.writable(self.pages[i])
        ]
        wanted = len(shared) + max(0, last - len(self.pages))
        fresh: list[int] = []
        try:
            while len(fresh) < wanted:
                fresh.append(self._pool.allocate())
        except NotEnoughMemory:
            for page in fresh:
                self._pool.release(page)
            raise
        del self._known[first:]
        copies = []
        for i in shared:
            old, new = self.pages[i], fresh.pop()
            if i * PAGE < start:
                copies.append((i, old, new))
            self.pages[i] = new
            self._pool.release(old)
        self.pages += reversed(fresh)
        return copies

    def record(self, tokens: Sequence[int]) -> None:
        """Record every full page of `tokens`, whose KV is computed."""
        while (len(self._known) + 1) * PAGE <= len(tokens):
            at = len(self._known)
            parent = self._known[-1] if self._known else None
            # If the content is recorded elsewhere this page stays unrecorded: replacing it by the other would
            # make a sequence's numbers depend on other sequences.
            page = tokens[at * PAGE : (at + 1) * PAGE]
            self._known.append(self._pool.record(self.pages[at], parent, page, self.scope))

    def records(self, length: int) -> Sequence[PageRecord]:
        """The records of the first `length` tokens' full pages, as far as `record` was called for them."""
        return self._known[: length // PAGE]

    def adopt(self, run: Sequence[PageRecord]) -> None:
        """Replace the pages of this table by these."""
        for known in run:
            self._pool.hold(known.page)
        self.clear()
        self.pages = [known.page for known in run]
        self._known = list(run)

    def truncate(self, length: int) -> None:
        """Release the pages past `length` tokens."""
        keep = -(-length // PAGE)
        for page in reversed(self.pages[keep:]):
            self._pool.release(page)
        del self.pages[keep:]
        del self._known[length // PAGE :]

    def fork(self) -> PageTable:
        other = PageTable(self._pool, self.scope)
        for page in self.pages:
            self._pool.hold(page)
        other.pages = list(self.pages)
        other._known = list(self._known)
        return other

    def clear(self) -> None:
        self.truncate(0)
