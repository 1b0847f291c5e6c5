"""The findings about one live buffer, kept up to date in a thread.

One audit runs at a time; keys that come meanwhile are audited together by the next. A text that cannot be
audited is left alone from then on. Large texts are audited in another process.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from msgspec import convert

from keystroke.analysis.audit import LANGUAGES, Finding, LiveAudit
from keystroke.analysis.audit.worker import MAX_INCREMENTAL_EDITS, decode_findings
from keystroke.errors import Interrupted, KeystrokeError
from keystroke.gateway.live.key_process import KeyProcess, call_limited
from keystroke.gateway.live.mirror import BufferMirror
from keystroke.isolation import IsolatedFunction
from keystroke.protocol import live_messages as live
from keystroke.text import Edit

log = logging.getLogger("keystroke.live")

PAUSE = 0.02  # seconds: keys within it are audited together
MOST = 2000  # findings sent for one buffer; more would block the event loop
LARGE = 50_000  # characters: parsed in about 30 ms

_numbers = itertools.count()
_threads = ThreadPoolExecutor(2, thread_name_prefix="audit")


class AuditProcess(KeyProcess):
    """For large texts: parsing them in a thread would block the event loop."""

    target = "keystroke.analysis.audit.worker:audit_plain"
    seconds = 30.0  # four million characters, the most that is audited, take five
    memory = 3 << 30

    async def audit(
        self, buffer: str, language: str, text: str, edits: Sequence[Edit]
    ) -> tuple[Finding, ...]:
        """The findings of `text`, which `edits` led to. `buffer` names it for this key. Raises InputError."""
        timeout_message = f"The text could not be audited in {self.seconds:g} s and was left alone."

        def audit_isolated(function: IsolatedFunction) -> tuple[Finding, ...]:
            plain = [(edit.start, edit.end, edit.text) for edit in edits]
            return decode_findings(call_limited(function, timeout_message, buffer, language, text, plain))

        return await self._run(audit_isolated)


class BufferAudit:
    """`key`: of the caller whose buffer it is."""

    def __init__(
        self, mirror: BufferMirror, send: Callable[[live.LiveEvent], None], key: str = "local"
    ) -> None:
        self._buffer, self._language, self._send, self._key = mirror.name, mirror.language, send, key
        self._name = f"{next(_numbers)}"
        self._auditor: AuditProcess | None = None  # where the text is large
        self._audited = False
        self._active = mirror.language in LANGUAGES
        self._text, self._version = "", 0
        self._edits: list[Edit] = []
        self._audit: LiveAudit | None = None
        self._task: asyncio.Task[None] | None = None

    def apply_edits(self, text: str, version: int, edits: Sequence[Edit]) -> None:
        """The buffer was edited and is `text` now."""
        if not self._active:
            return
        self._text, self._version = text, version
        self._edits += edits
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    def close(self) -> None:
        self._active = False
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while self._active and (not self._audited or self._edits):
            await asyncio.sleep(PAUSE)
            edits, self._edits = self._edits, []
            text, version = self._text, self._version
            began = time.perf_counter()
            try:
                findings = await self._findings(text, edits)
                self._audited = True
            except Interrupted:
                return
            except KeystrokeError as error:
                log.debug("no audit of a buffer: %s", error)
                self._active = False
                return
            except Exception:
                log.exception("an audit failed")
                self._active = False
                return
            spent = round((time.perf_counter() - began) * 1e3, 3)
            event = live.Diagnostics(
                buffer=self._buffer,
                version=version,
                findings=convert(findings[:MOST], list[live.LiveFinding], from_attributes=True),
                elapsed_ms=spent,
            )
            self._send(event)

    async def _findings(self, text: str, edits: Sequence[Edit]) -> tuple[Finding, ...]:
        assert self._language is not None
        if len(text) < LARGE:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(_threads, self._audit_text, text, edits)
        self._audit = None
        self._auditor = self._auditor or AuditProcess.for_key(self._key)
        return await self._auditor.audit(self._name, self._language, text, edits)

    def _audit_text(self, text: str, edits: Sequence[Edit]) -> tuple[Finding, ...]:
        if self._audit is None:
            assert self._language is not None
            self._audit = LiveAudit(self._language, text, abandoned=lambda: not self._active)
            return self._audit.findings
        for edit in edits if len(edits) < MAX_INCREMENTAL_EDITS else ():
            self._audit.edit(edit.start, edit.end, edit.text)
        if self._audit.text != text:
            self._audit.replace(text)
        return self._audit.findings
