"""`/v1/live` as a WebSocket: turns frames into calls of buffers, and buffers' events into frames.

It owns the open buffers of one socket. An invalid frame costs an error event, never the connection; a change
that does not follow the mirrored version costs a resync. When the client disconnects, everything it had
running stops within one step.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from keystroke.analysis.rules import project_rules
from keystroke.analysis.syntax import language_of
from keystroke.assist.completion import LiveCompletion, WithheldReason, context_budget
from keystroke.assist.completion.context import gather_context
from keystroke.assist.completion.window import ContextFile
from keystroke.assist.next_edit.prompt import CHANGES, RecentChange
from keystroke.config import AssistSettings
from keystroke.errors import InputError, KeystrokeError, UsageError
from keystroke.gateway.access.keys import Caller
from keystroke.gateway.live.actions import LiveActions
from keystroke.gateway.live.audit import BufferAudit
from keystroke.gateway.live.buffer import LiveBuffer
from keystroke.gateway.live.mirror import NOWHERE, BufferLocation, BufferMirror
from keystroke.gateway.live.next_edit import BufferNextEdit, NextEditModel, choose_edit_model
from keystroke.gateway.live.outcomes import BufferOutcomes
from keystroke.gateway.live.suggestions import SuggestionRunner
from keystroke.gateway.record.outcome_store import OutcomeStore
from keystroke.gateway.transport.socket import Socket, SocketConnection
from keystroke.gateway.work.model_client import ModelAccess
from keystroke.gateway.work.priority import Priority
from keystroke.gateway.work.registry import AUTO
from keystroke.gateway.work.routing import RoutingRequest
from keystroke.gateway.work.service import Service
from keystroke.protocol import live_messages as live
from keystroke.protocol.codec import decode_live_request
from keystroke.text import Edit

if TYPE_CHECKING:
    from keystroke.gateway.live.project_text import ProjectIndex

log = logging.getLogger("keystroke.live")

BUFFERS = 256  # open at a time on one connection
CHARACTERS = 64 << 20  # of all buffers of a connection together
_FULL = "The open buffers would hold more than {:,} characters; close one first."
COPIED = 64 << 20  # characters that the edits of one change may copy: about 20 ms of the event loop
RULES_SECONDS = 2.0  # that reading a project's rules may take
_LARGEST_IMPORT = 256 * 1024
PROJECTS = 4  # whose files are indexed at a time
_RECENT = 4


class LiveConnection(SocketConnection):
    """Suggestions are short and replace each other, so nothing is paused. What is running ends with
    `on_disconnect`."""

    def __init__(
        self,
        service: Service,
        settings: AssistSettings,
        caller: Caller,
        socket: Socket,
        *,
        files: Callable[[str], bool] = lambda _path: True,
        outcome_store: OutcomeStore | None = None,
    ) -> None:
        super().__init__(socket)
        self._service, self._settings, self._caller = service, settings, caller
        self._files = files  # which paths may be read for this client
        self._outcome_store = outcome_store  # None: outcomes of suggestions are not recorded
        self._scope = secrets.token_hex(4)
        self._buffers: dict[str, LiveBuffer] = {}
        self._recent: deque[ContextFile] = deque(maxlen=_RECENT)
        self._trail: deque[RecentChange] = deque(maxlen=CHANGES)
        self._projects: dict[str, ProjectIndex] = {}
        self._actions = LiveActions(service, caller, send=self.send, mirrors=self._mirrors)

    @property
    def busy(self) -> bool:
        return bool(self._tasks) or any(buffer.suggestions.busy for buffer in self._buffers.values())

    # Callbacks of the socket

    def reject_frame(self, error: KeystrokeError) -> None:
        self._fail(error)

    def on_disconnect(self) -> None:
        self._actions.close()
        for task in tuple(self._tasks):
            task.cancel()
        for buffer in self._buffers.values():
            buffer.close()
        self._buffers.clear()

    def handle_frame(self, frame: str) -> None:
        request: live.LiveRequest | None = None
        try:
            request = decode_live_request(frame)
            self._handle(request)
        except KeystrokeError as error:
            self._service.metrics.rejected.labels(error.code).inc()
            self._fail(error, request)
        except Exception:
            log.exception("a live request failed")
            self._fail(KeystrokeError("The server failed on this request; its log says how."), request)

    def _handle(self, request: live.LiveRequest) -> None:
        if isinstance(request, live.BufferChange):
            self._change(request)
        elif isinstance(request, live.Complete):
            buffer = self._find(request.buffer)
            if buffer is None:
                self.send(live.NotShown(**request.place, reason="stale_version"))
            else:
                if request.version > buffer.mirror.version:
                    self._resync(request.buffer, "version_gap", buffer.mirror.version)
                buffer.suggestions.complete(request)
        elif isinstance(request, live.BufferCursor):
            buffer = self._find(request.buffer)
            if buffer is not None:
                buffer.move_cursor(request)
        elif isinstance(request, live.BufferOpen):
            self._open(request)
        elif isinstance(request, live.BufferClose):
            self._close(request.buffer)
        elif isinstance(request, (live.ProblemsAsk, live.RefactorAsk, live.EditAsk)):
            self._actions.submit(request)
        elif isinstance(request, live.CancelRequest):
            if self._actions.cancel(request.id):
                return
            for buffer in self._buffers.values():
                if buffer.suggestions.cancel(request.id):
                    break
        elif isinstance(request, live.NextEditAsk):
            buffer = self._find(request.buffer)
            if buffer is not None:
                buffer.send_next_edit(request)
        elif isinstance(request, live.Feedback):
            buffer = self._buffers.get(request.buffer)
            if buffer is not None:
                buffer.apply_feedback(request)

    # Buffers

    def _open(self, request: live.BufferOpen) -> None:
        known = self._buffers.get(request.buffer)
        open_characters = sum(len(mirror.text) for mirror in self._mirrors() if mirror.name != request.buffer)
        if known is None and len(self._buffers) >= BUFFERS:
            raise UsageError(
                f"{BUFFERS} buffers are open on this connection; close one first.", param="buffer"
            )
        if open_characters + len(request.text) > CHARACTERS:
            raise UsageError(_FULL.format(CHARACTERS), param="text")
        if known is not None:
            known.close()
        cursor = request.cursor
        mirror = BufferMirror(
            request.buffer,
            request.text,
            request.version,
            cursor if cursor is not None and cursor <= len(request.text) else 0,
            language=language_of(request.path or request.buffer, request.language),
            path=_relative_path(request.path, request.root),
            root=request.root,
            location=self._location(request),
        )
        buffer = self._buffers[request.buffer] = self._build_buffer(mirror)
        if mirror.location.path is not None:
            self._spawn(self._open_with_rules(buffer))
            self._index_project(buffer, opened=True)
        else:
            buffer.open()

    def _build_buffer(self, mirror: BufferMirror) -> LiveBuffer:
        settings, model = self._settings, self._model()
        completion = LiveCompletion(
            model.entry.model,
            settings,
            path=mirror.path,
            language=mirror.language,
            budget=context_budget(settings, model.entry.scheduler.prefill_rate),
        )
        excluded = completion.refusal(mirror.text) is WithheldReason.EXCLUDED
        outcomes, send = None, self.send
        if self._outcome_store is not None and not excluded:
            outcomes = BufferOutcomes(self._outcome_store, completion, mirror, model=model.entry.name)
            send = partial(self._send_and_record, outcomes)
        audit = BufferAudit(mirror, send, self._caller.id) if settings.audit else None
        next_edit = None
        if settings.next_edit and len(mirror.text) <= settings.max_file_kb * 1024:
            # Changes in a file that may hold secrets are not shown to the model for other files either.
            next_edit = BufferNextEdit(
                mirror,
                send,
                trail=None if excluded else self._trail,
                model=_next_edit_model(mirror, completion, model),
            )
        suggestions = SuggestionRunner(
            mirror,
            completion,
            model,
            scope=self._scope,
            send=send,
            context=partial(self._context, mirror),
            outcomes=outcomes,
        )
        return LiveBuffer(
            mirror, completion, suggestions, send=send, audit=audit, next_edit=next_edit, outcomes=outcomes
        )

    def _location(self, request: live.BufferOpen) -> BufferLocation:
        """The file and the workspace of a buffer, if the files around it may be read."""
        path, root = request.path, request.root
        if not path or not PurePath(path).is_absolute() or not self._files(path):
            return NOWHERE
        if root and not self._files(root):
            return NOWHERE
        return BufferLocation(Path(path), Path(root) if root else None)

    def _change(self, request: live.BufferChange) -> None:
        buffer = self._find(request.buffer)
        if buffer is None:
            return
        mirror = buffer.mirror
        if request.base != mirror.version or request.version <= request.base:
            self._resync(request.buffer, "version_gap", mirror.version)
            return
        try:
            edits = [Edit(d.start, d.end, d.text) for d in request.edits]
            self._check_size(mirror, edits)
            buffer.change(edits, request.version, request.cursor, partial(self._other_texts, mirror))
        except InputError as error:
            self._fail(error, request)
            self._resync(request.buffer, "bad_edit", mirror.version)
            return
        if mirror.path and edits:
            self._record_recent(mirror, mirror.path, edits[-1])
            self._index_project(buffer)

    def _check_size(self, mirror: BufferMirror, edits: Sequence[Edit]) -> None:
        """Raise InputError for more text than may be opened, and for edits that would block the event loop:
        each one copies the text."""
        added = sum(len(edit.text) for edit in edits)
        if sum(len(other.text) for other in self._mirrors()) + added > CHARACTERS:
            raise InputError(_FULL.format(CHARACTERS), param="edits")
        if len(edits) > 1 and len(edits) * (len(mirror.text) + added) > COPIED:
            raise InputError(
                f"{len(edits):,} edits of {len(mirror.text):,} characters are too many at once; "
                "open the buffer again with its new text.",
                param="edits",
            )

    def _close(self, name: str) -> None:
        buffer = self._buffers.pop(name, None)
        if buffer is not None:
            buffer.close()

    def _find(self, name: str) -> LiveBuffer | None:
        buffer = self._buffers.get(name)
        if buffer is None:
            self._resync(name, "unknown_buffer", None)
        return buffer

    def _model(self) -> ModelAccess:
        """The model that completes while the user types: the fast one, or any whose engine is here."""
        routing = self._service.choose(AUTO, lambda: RoutingRequest(Priority.GHOST, here=True))
        return ModelAccess(self._service, self._service.registry.entries[routing.model], self._caller)

    async def _open_with_rules(self, buffer: LiveBuffer) -> None:
        """Read the project's rules in a thread, for a limited time, then announce the buffer. Keys that come
        meanwhile are handled without them."""
        mirror, (path, root) = buffer.mirror, buffer.mirror.location
        assert path is not None
        try:
            reading = asyncio.to_thread(project_rules, path, root, mirror.language)
            buffer.completion.rules = await asyncio.wait_for(reading, RULES_SECONDS)
        except (OSError, ValueError, TimeoutError) as error:
            log.info("the project's rules were not read: %s", type(error).__name__)
        if self._buffers.get(mirror.name) is buffer:
            buffer.open()

    def _index_project(self, buffer: LiveBuffer, *, opened: bool = False) -> None:
        """Give the buffer the index of its project, and update that where it is old."""
        root, path, language = buffer.mirror.root, buffer.mirror.path, buffer.mirror.language
        if not (root and path and language and self._settings.project_text and self._files(root)):
            return
        project = self._projects.get(root)
        if project is None:
            from keystroke.gateway.live.project_text import ProjectIndex  # here: it imports numpy

            while len(self._projects) >= PROJECTS:
                del self._projects[next(iter(self._projects))]
            project = self._projects[root] = ProjectIndex(root, self._settings.exclude)
        buffer.completion.project = project.latest(language)
        if project.needs_update(language, path if opened else None):
            self._spawn(self._update_index(project, root, path, language))

    async def _update_index(self, project: ProjectIndex, root: str, path: str, language: str) -> None:
        texts = {
            mirror.path: mirror.text for mirror in self._mirrors() if mirror.path and mirror.root == root
        }
        try:
            await project.update(path, language, texts)
        except (OSError, ValueError) as error:
            log.info("the project's files were not read: %s", type(error).__name__)
            return
        for buffer in self._buffers.values():
            if buffer.mirror.root == root and buffer.mirror.language is not None:
                buffer.completion.project = project.latest(buffer.mirror.language)

    # Other buffers

    def _mirrors(self) -> Iterator[BufferMirror]:
        return (buffer.mirror for buffer in self._buffers.values())

    def _context(self, mirror: BufferMirror) -> list[ContextFile]:
        """Definitions of what the buffer imports, and recent edits elsewhere: from open buffers and, where
        they may be read, from the project's files."""
        texts = {other.path: other.text for other in self._mirrors() if other.path and other is not mirror}
        folder = Path(mirror.root) if mirror.root and self._files(mirror.root) else None

        def read(path: str) -> str | None:
            if path in texts:
                return texts[path]
            return _read_inside(folder, path, self._settings.exclude) if folder is not None else None

        return gather_context(mirror.text, mirror.path, read, self._recent)

    def _other_texts(self, mirror: BufferMirror) -> dict[str, str]:
        """The texts of the other open buffers in the same language."""
        return {
            other.name: other.text
            for other in self._mirrors()
            if other is not mirror and other.language == mirror.language
        }

    def _record_recent(self, mirror: BufferMirror, path: str, edit: Edit) -> None:
        """Keep the lines around the last edit of each file, newest last."""
        text = mirror.text
        at = min(edit.start, len(text))
        start = text.rfind("\n", 0, max(text.rfind("\n", 0, at), 0)) + 1
        end = text.find("\n", text.find("\n", at) + 1)
        for recent in tuple(self._recent):
            if recent.path == path:
                self._recent.remove(recent)
        self._recent.append(ContextFile(path, text[start : end if end > 0 else len(text)][:400]))

    # Events

    def send(self, event: live.LiveEvent) -> None:
        self._socket.put([event])

    def _send_and_record(self, outcomes: BufferOutcomes, event: live.LiveEvent) -> None:
        if isinstance(event, live.NextEdit):
            outcomes.record_next_edit(event)
        self.send(event)

    def _resync(self, buffer: str, reason: str, have: int | None) -> None:
        self.send(live.Resync(buffer=buffer, reason=reason, have=have))  # type: ignore[arg-type]

    def _fail(self, error: KeystrokeError, request: live.LiveRequest | None = None) -> None:
        self.send(live.live_error(error, getattr(request, "id", None), getattr(request, "buffer", None)))


def _next_edit_model(
    mirror: BufferMirror, completion: LiveCompletion, model: ModelAccess
) -> NextEditModel | None:
    """None where no model was trained for next edits, or none may read the file."""
    known = choose_edit_model(model.service.registry, model.entry).edits
    if known is None or completion.refusal(mirror.text) is not None:
        return None
    return NextEditModel(mirror, completion, model)


def _relative_path(path: str | None, root: str | None) -> str | None:
    """The path relative to the project's root, for prompts."""
    if not path:
        return None
    pure = PurePath(path)
    if root and pure.is_relative_to(root):
        return pure.relative_to(root).as_posix()
    return pure.name if pure.is_absolute() else pure.as_posix()


def _read_inside(root: Path, path: str, exclude: Sequence[str]) -> str | None:
    """The text of a file inside `root`; None for one outside it or excluded because it may hold secrets."""
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
