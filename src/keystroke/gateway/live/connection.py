"""`/v1/live` as a WebSocket: frames to buffers, buffers' events to frames.

Owns the open buffers of one socket. A frame that breaks a rule costs an error event, never the
connection; a change that does not follow the mirrored version costs a resync, never a guess. When the client
goes, everything it had running stops within one step.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from keystroke.analysis.rules import project_rules
from keystroke.analysis.syntax import language_of
from keystroke.assist.completion import Hidden, LiveCompletion, context_budget
from keystroke.assist.completion.context import RecentEdit, gather
from keystroke.assist.completion.window import ContextFile
from keystroke.assist.next_edit import Other
from keystroke.assist.next_edit.prompt import CHANGES, Change
from keystroke.config import AssistSettings
from keystroke.errors import InputError, KeystrokeError, UsageError
from keystroke.gateway.access.keys import Caller
from keystroke.gateway.live.actions import LiveActions
from keystroke.gateway.live.buffer import LiveBuffer
from keystroke.gateway.live.outcomes import BufferOutcomes
from keystroke.gateway.record.learned import Learned
from keystroke.gateway.transport.socket import Socket
from keystroke.gateway.work.priority import Priority
from keystroke.gateway.work.registry import AUTO, ServedModel
from keystroke.gateway.work.routing import Task
from keystroke.gateway.work.service import Service
from keystroke.protocol import live_messages as live
from keystroke.protocol.codec import decode_live_request
from keystroke.protocol.faults import SlowClient, detail
from keystroke.text import Edit

if TYPE_CHECKING:
    from keystroke.gateway.live.project_text import ProjectText

log = logging.getLogger("keystroke.live")

BUFFERS = 256  # open at a time on one connection
CHARACTERS = 64 << 20  # of all buffers of a connection together
COPIED = 64 << 20  # characters that the edits of one change may copy: some 20 ms of the event loop
RULES_SECONDS = 2.0  # that reading a project's rules may take
_LARGEST_IMPORT = 256 * 1024
PROJECTS = 4  # whose files a connection knows at a time
_RECENT = 4


class LiveConnection:
    def __init__(
        self,
        service: Service,
        settings: AssistSettings,
        caller: Caller,
        socket: Socket,
        *,
        files: Callable[[str], bool] = lambda _path: True,
        learned: Learned | None = None,
    ) -> None:
        self._service, self._settings, self._caller = service, settings, caller
        self._socket = socket
        self._files = files  # which paths may be read for this client; it knows its buffers without any
        self._learned = learned  # None: what becomes of suggestions is nobody's business
        self._scope = secrets.token_hex(4)
        self._buffers: dict[str, LiveBuffer] = {}
        self._roots: dict[str, str | None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._gone = False
        self._recent: deque[tuple[str, int, str]] = deque(maxlen=_RECENT)
        self.trail: deque[Change] = deque(maxlen=CHANGES)
        self._projects: dict[str, ProjectText] = {}
        self._actions = LiveActions(self, service, caller, readable=self._readable)

    async def serve(self) -> None:
        """Until the client goes."""
        await self._socket.serve(self)

    @property
    def busy(self) -> bool:
        """Whether somebody waits for an answer."""
        return bool(self._tasks) or any(buffer.busy for buffer in self._buffers.values())

    def leave(self) -> None:
        """Close as for a restart as soon as nobody waits for an answer; idempotent."""
        if not self.busy and not self._gone:
            self._gone = True
            self._reading(self._socket.close("this gateway restarts; connect again", 1012))

    # What the socket tells

    def refuse(self, error: KeystrokeError) -> None:
        self._fail(error)

    def stalled(self, reason: SlowClient) -> None:
        """What it has running ends when it has left."""

    def left(self) -> None:
        self._actions.close()
        for task in tuple(self._tasks):
            task.cancel()
        for buffer in self._buffers.values():
            buffer.close()
        self._buffers.clear()

    def pause(self) -> None:
        """Suggestions are short and replace each other: there is nothing to hold back."""

    def resume(self) -> None: ...

    def take(self, frame: str) -> None:
        request: live.LiveRequest | None = None
        try:
            request = decode_live_request(frame)
            self._act(request)
        except KeystrokeError as error:
            self._service.metrics.rejected.labels(error.code).inc()
            self._fail(error, request)
        except Exception:
            log.exception("a live request failed")
            self._fail(KeystrokeError("The server failed on this request; its log says how."), request)

    def _act(self, request: live.LiveRequest) -> None:
        if isinstance(request, live.BufferChange):
            self._change(request)
        elif isinstance(request, live.Complete):
            buffer = self._find(request.buffer)
            if buffer is None:
                self._stale(request.id, request.buffer, request.version)
            else:
                if request.version > buffer.version:
                    self._resync(request.buffer, "version_gap", buffer.version)
                buffer.complete(request)
        elif isinstance(request, live.BufferCursor):
            buffer = self._find(request.buffer)
            if buffer is not None:
                buffer.moved(request)
        elif isinstance(request, live.BufferOpen):
            self._open(request)
        elif isinstance(request, live.BufferClose):
            self._close(request.buffer)
        elif isinstance(request, (live.ProblemsAsk, live.RefactorAsk, live.EditAsk)):
            self._actions.ask(request)
        elif isinstance(request, live.Cancel):
            if self._actions.cancel(request.id):
                return
            for buffer in self._buffers.values():
                if buffer.cancel(request.id):
                    break
        elif isinstance(request, live.NextEditAsk):
            buffer = self._find(request.buffer)
            if buffer is not None:
                buffer.ask_next_edit(request)
        elif isinstance(request, live.Feedback):
            buffer = self._buffers.get(request.buffer)
            if buffer is not None:
                buffer.feedback(request)

    # Buffers

    def _open(self, request: live.BufferOpen) -> None:
        known = self._buffers.get(request.buffer)
        held = sum(len(b.text) for b in self._buffers.values() if b is not known)
        if known is None and len(self._buffers) >= BUFFERS:
            raise UsageError(
                f"{BUFFERS} buffers are open on this connection; close one first.", param="buffer"
            )
        if held + len(request.text) > CHARACTERS:
            raise UsageError(
                f"The open buffers would hold more than {CHARACTERS:,} characters; close one first.",
                param="text",
            )
        if known is not None:
            known.close()
        entry = self._entry()
        language = language_of(request.path or request.buffer, request.language)
        path = _relative(request.path, request.root)
        completion = LiveCompletion(
            entry.model,
            self._settings,
            path=path,
            language=language,
            budget=context_budget(self._settings, entry.scheduler.prefill_rate),
        )
        buffer = LiveBuffer(
            self,
            self._service,
            entry,
            self._caller,
            request,
            completion,
            language,
            path=path,
            audit=self._settings.audit,
            next_edit=self._settings.next_edit and len(request.text) <= self._settings.max_file_kb * 1024,
            scope=self._scope,
            outcomes=self._outcomes(request, completion, path, entry.name),
        )
        self._buffers[request.buffer] = buffer
        self._roots[request.buffer] = request.root
        self._actions.opened(request)
        if self._readable(request):
            self._reading(self._open_with_rules(buffer, request, language))
            self._remind(buffer, opened=True)
        else:
            buffer.opened()

    def _outcomes(
        self, request: live.BufferOpen, completion: LiveCompletion, path: str | None, model: str
    ) -> BufferOutcomes | None:
        """Who watches what becomes of suggestions; None where that is off, or the file gets none."""
        if self._learned is None or completion.refusal(request.text) is Hidden.EXCLUDED:
            return None
        return BufferOutcomes(
            self._learned, completion, root=request.root, path=path, language=completion.language, model=model
        )

    def _readable(self, request: live.BufferOpen) -> bool:
        """Whether the files around a buffer may be looked at."""
        path, root = request.path, request.root
        if not path or not PurePath(path).is_absolute() or not self._files(path):
            return False
        return not root or self._files(root)

    def _change(self, request: live.BufferChange) -> None:
        buffer = self._find(request.buffer)
        if buffer is None:
            return
        if request.base != buffer.version or request.version <= request.base:
            self._resync(request.buffer, "version_gap", buffer.version)
            return
        try:
            edits = [Edit(d.start, d.end, d.text) for d in request.edits]
            self._check_size(buffer, edits)
            buffer.change(edits, request.version, request.cursor)
        except InputError as error:
            self._fail(error, request)
            self._resync(request.buffer, "bad_edit", buffer.version)
            return
        if buffer.path and edits:
            self._remember(buffer, edits[-1])
            self._remind(buffer)

    def _check_size(self, buffer: LiveBuffer, edits: Sequence[Edit]) -> None:
        """Refuse, as InputError, what opening would have refused, and what would hold up everybody else:
        each edit copies the text once."""
        added = sum(len(edit.text) for edit in edits)
        if sum(len(b.text) for b in self._buffers.values()) + added > CHARACTERS:
            raise InputError(
                f"The open buffers would hold more than {CHARACTERS:,} characters; close one first.",
                param="edits",
            )
        if len(edits) > 1 and len(edits) * (len(buffer.text) + added) > COPIED:
            raise InputError(
                f"{len(edits):,} edits of {len(buffer.text):,} characters are too many at once; "
                "open the buffer again with its new text.",
                param="edits",
            )

    def _close(self, name: str) -> None:
        buffer = self._buffers.pop(name, None)
        self._roots.pop(name, None)
        self._actions.closed(name)
        if buffer is not None:
            buffer.close()

    def _find(self, name: str) -> LiveBuffer | None:
        buffer = self._buffers.get(name)
        if buffer is None:
            self._resync(name, "unknown_buffer", None)
        return buffer

    def _entry(self) -> ServedModel:
        """The model that follows keys: the fast one, or any whose engine is here."""
        routing = self._service.choose(AUTO, lambda: Task(Priority.GHOST, here=True))
        return self._service.registry.entries[routing.model]

    async def _open_with_rules(
        self, buffer: LiveBuffer, request: live.BufferOpen, language: str | None
    ) -> None:
        """The project's rules are read elsewhere, and for a while only: what a repository holds must not
        stop the server. Keys that come meanwhile are followed; the buffer is announced with its rules."""
        assert request.path is not None
        try:
            reading = asyncio.to_thread(project_rules, request.path, request.root, language)
            buffer.obey(await asyncio.wait_for(reading, RULES_SECONDS))
        except (OSError, ValueError, TimeoutError) as error:
            log.info("the project's rules were not read: %s", type(error).__name__)
        if self._buffers.get(request.buffer) is buffer:
            buffer.opened()

    def _remind(self, buffer: LiveBuffer, *, opened: bool = False) -> None:
        """Have the project's other files looked at, where they may be and that was not done lately."""
        root, path, language = self._roots.get(buffer.name), buffer.path, buffer.language
        if not (root and path and language and self._settings.project_text and self._files(root)):
            return
        project = self._projects.get(root)
        if project is None:
            from keystroke.gateway.live.project_text import ProjectText  # here: it works with numpy

            while len(self._projects) >= PROJECTS:
                del self._projects[next(iter(self._projects))]
            project = self._projects[root] = ProjectText(root, self._settings.exclude)
        buffer.completion.project = project.known(language)
        if project.stale(language, path if opened else None):
            self._reading(self._look_around(project, root, path, language))

    async def _look_around(self, project: ProjectText, root: str, path: str, language: str) -> None:
        inside = [b for b in self._buffers.values() if b.path and self._roots.get(b.name) == root]
        try:
            await project.look(path, language, {str(b.path): b.text for b in inside})
        except (OSError, ValueError) as error:
            log.info("the project's files were not read: %s", type(error).__name__)
            return
        for buffer in self._buffers.values():
            if self._roots.get(buffer.name) == root and buffer.language is not None:
                buffer.completion.project = project.known(buffer.language)

    def _reading(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # What buffers and actions ask of their connection

    def mirrors(self) -> Iterator[LiveBuffer]:
        return iter(self._buffers.values())

    def say(self, event: live.LiveEvent) -> None:
        self._socket.put([event])

    def context(self, buffer: LiveBuffer) -> list[ContextFile]:
        """Definitions that its imports name and what changed last elsewhere, from open buffers and, where
        this machine is the editor's, from the project's files."""
        texts = {b.path: b.text for b in self._buffers.values() if b.path and b is not buffer}
        root = self._roots.get(buffer.name)
        folder = Path(root) if root and self._files(root) else None

        def read(path: str) -> str | None:
            if path in texts:
                return texts[path]
            return _read_inside(folder, path, self._settings.exclude) if folder is not None else None

        recent = [RecentEdit(path, piece) for path, _, piece in self._recent if path != buffer.path]
        return gather(buffer.text, buffer.path, read, recent)

    def others(self, buffer: LiveBuffer) -> dict[str, Other]:
        """Open buffers of the same language."""
        return {
            b.name: Other(b.text)
            for b in self._buffers.values()
            if b is not buffer and b.language == buffer.language
        }

    def _remember(self, buffer: LiveBuffer, edit: Edit) -> None:
        """The lines around the last change of each file, newest last."""
        path, text = buffer.path or "", buffer.text
        at = min(edit.start, len(text))
        start = text.rfind("\n", 0, max(text.rfind("\n", 0, at), 0)) + 1
        end = text.find("\n", text.find("\n", at) + 1)
        piece = text[start : end if end > 0 else len(text)][:400]
        for held in tuple(self._recent):
            if held[0] == path:
                self._recent.remove(held)
        self._recent.append((path, start, piece))

    # Out

    def _resync(self, buffer: str, reason: str, have: int | None) -> None:
        self.say(live.Resync(buffer=buffer, reason=reason, have=have))  # type: ignore[arg-type]

    def _stale(self, request: str, buffer: str, version: int) -> None:
        self.say(live.NotShown(id=request, buffer=buffer, version=version, reason="stale_version"))

    def _fail(self, error: KeystrokeError, request: live.LiveRequest | None = None) -> None:
        self.say(
            live.LiveError(
                status=error.status,
                error=detail(error),
                id=getattr(request, "id", None),
                buffer=getattr(request, "buffer", None),
            )
        )


def _relative(path: str | None, root: str | None) -> str | None:
    """The path as the project calls it: what a prompt should hold."""
    if not path:
        return None
    pure = PurePath(path)
    if root and pure.is_relative_to(root):
        return pure.relative_to(root).as_posix()
    return pure.name if pure.is_absolute() else pure.as_posix()


def _read_inside(root: Path, path: str, exclude: Sequence[str]) -> str | None:
    """A file of the project, never one outside it, nor one that may hold secrets."""
    file = root / path
    try:
        resolved = file.resolve()
        if not resolved.is_relative_to(root.resolve()) or not resolved.is_file():
            return None
        if any(resolved.match(pattern) for pattern in exclude) or resolved.stat().st_size > _LARGEST_IMPORT:
            return None
        return resolved.read_text(encoding="utf-8", errors="strict")
    except (OSError, ValueError):
        return None
