"""What a live client asks for by name: problems, refactorings, edits by instruction.

Each ask is one task and ends in exactly one answer: what was asked for, an error, or `not_shown` when it
was cancelled. It reads the mirrored texts and changes nothing: changes are the client's to make. Checks and
refactorings run in processes of the key's own, a model's thinking behind its queue; none holds up a key.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Protocol, cast

from keystroke.analysis.check import Diagnostic
from keystroke.analysis.rules import project_rules
from keystroke.assist.edit import EditTask, Proposal, Question, Region, edit_steps
from keystroke.engine.generation import Chunk, GenerationParams
from keystroke.engine.speculative.file_draft import FileDrafter
from keystroke.errors import Forbidden, InputError, KeystrokeError, UsageError
from keystroke.gateway.access.keys import Caller
from keystroke.gateway.live.checker import Checker
from keystroke.gateway.live.refactorer import Refactorer, deltas
from keystroke.gateway.work.priority import Priority
from keystroke.gateway.work.registry import AUTO, ServedModel
from keystroke.gateway.work.remote import RemoteJob
from keystroke.gateway.work.routing import Task
from keystroke.gateway.work.scheduler import Job
from keystroke.gateway.work.service import Service
from keystroke.protocol import live_messages as live
from keystroke.protocol.faults import detail
from keystroke.text import Edit

if TYPE_CHECKING:
    from keystroke.assist.edit.ladder import Steps

log = logging.getLogger("keystroke.live")

IN_FLIGHT = 16  # asks of one connection at a time
_ANSWER_ROOM = 512  # tokens an edit may add beyond the text it rewrites

Asked = live.ProblemsAsk | live.RefactorAsk | live.EditAsk


class Mirrored(Protocol):
    """An open buffer as the connection mirrors it."""

    name: str
    text: str
    version: int
    language: str | None


class Around(Protocol):
    """What is asked of the connection."""

    def mirrors(self) -> Iterator[Mirrored]: ...
    def say(self, event: live.LiveEvent) -> None: ...


@dataclass(frozen=True, slots=True)
class Where:
    """Where a buffer's file lies, as its client said; None where it has no file or none is to be read."""

    path: Path | None
    root: Path | None


class LiveActions:
    """`readable`: whether the files around a buffer may be looked at."""

    def __init__(
        self,
        around: Around,
        service: Service,
        caller: Caller,
        *,
        readable: Callable[[live.BufferOpen], bool],
    ) -> None:
        self._around, self._service, self._caller = around, service, caller
        self._readable = readable
        self._places: dict[str, Where] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._checking: dict[str, str] = {}  # buffer -> the ask that looks for its problems
        self._checker, self._refactorer = Checker.of(caller.id), Refactorer.of(caller.id)

    # From the connection

    def opened(self, request: live.BufferOpen) -> None:
        path, root = request.path, request.root
        if not path or not self._readable(request):
            self._places[request.buffer] = Where(None, None)
            return
        self._places[request.buffer] = Where(Path(path), Path(root) if root else None)

    def closed(self, buffer: str) -> None:
        self._places.pop(buffer, None)

    def ask(self, request: Asked) -> None:
        """Begin. Raises UsageError for a version that is not the mirrored one, or too many asks."""
        buffer = self._mirror(request.buffer)
        if request.version != buffer.version:
            raise UsageError(
                f"The buffer is at version {buffer.version}, not {request.version}; ask again.",
                param="version",
            )
        if request.id in self._tasks or len(self._tasks) >= IN_FLIGHT:
            raise UsageError(
                f"At most {IN_FLIGHT} asks, each with an id of its own, run at a time.", param="id"
            )
        if isinstance(request, live.ProblemsAsk):
            self.cancel(self._checking.get(request.buffer, ""))
            self._checking[request.buffer] = request.id
        task = asyncio.get_running_loop().create_task(self._answer(request))
        self._tasks[request.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(request.id, None))

    def cancel(self, request: str) -> bool:
        task = self._tasks.get(request)
        return task.cancel() if task is not None else False

    def close(self) -> None:
        for task in tuple(self._tasks.values()):
            task.cancel()

    # Answering

    async def _answer(self, request: Asked) -> None:
        try:
            self._around.say(await self._made(request))
        except asyncio.CancelledError:
            self._around.say(
                live.NotShown(
                    id=request.id, buffer=request.buffer, version=request.version, reason="cancelled"
                )
            )
        except KeystrokeError as error:
            self._fail(request, error)
        except Exception:
            log.exception("an ask failed")
            self._fail(request, KeystrokeError("The server failed on this request; its log says how."))

    async def _made(self, request: Asked) -> live.LiveEvent:
        buffer = self._mirror(request.buffer)
        if isinstance(request, live.ProblemsAsk):
            return await self._problems(request, buffer)
        if max(request.start, request.end) > len(buffer.text) or request.start > request.end:
            raise InputError(
                f"[{request.start}, {request.end}) is not a span of a text of {len(buffer.text)} characters.",
                param="start",
            )
        if isinstance(request, live.RefactorAsk):
            return await self._refactored(request, buffer)
        return await self._edited(request, buffer)

    def _fail(self, request: Asked, error: KeystrokeError) -> None:
        self._around.say(
            live.LiveError(status=error.status, error=detail(error), id=request.id, buffer=request.buffer)
        )

    # Problems

    async def _problems(self, request: live.ProblemsAsk, buffer: Mirrored) -> live.Problems:
        began = time.perf_counter()
        found: tuple[Diagnostic, ...] = ()
        if buffer.language == "python":
            where = self._place(buffer)
            found = await self._checker.asked(buffer.text, where.path, where.root)
        return live.Problems(
            id=request.id,
            buffer=request.buffer,
            version=request.version,
            problems=[_problem(item) for item in found],
            elapsed_ms=round((time.perf_counter() - began) * 1e3, 3),
        )

    # Edits

    async def _edited(self, request: live.EditAsk, buffer: Mirrored) -> live.Changes:
        path = self._name(buffer)
        region = None
        if request.end > request.start:
            first = buffer.text.count("\n", 0, request.start)
            last = buffer.text.count("\n", 0, request.end)
            if last > first and buffer.text[request.end - 1] == "\n":
                last -= 1  # a selection that ends at a line's start does not mean that line
            region = Region(path, first, last + 1)
        rules = await asyncio.to_thread(self._rules, buffer)
        near = (path, buffer.text.count("\n", 0, request.start))
        task = EditTask({path: buffer.text}, request.instruction, region, rules, near)
        proposal = await self._proposed(task)
        return live.Changes(
            id=request.id,
            buffer=request.buffer,
            version=request.version,
            title=request.instruction[:80],
            files=[live.FileEdits(buffer=request.buffer, edits=deltas(_only(proposal, path)))],
        )

    def _rules(self, buffer: Mirrored) -> str:
        """What the project says about style, where this machine has the project."""
        where = self._place(buffer)
        if where.path is None:
            return ""
        try:
            return project_rules(where.path, where.root, buffer.language).header()
        except (OSError, ValueError):
            return ""

    async def _proposed(self, task: EditTask) -> Proposal:
        """Climb the ladder of questions. Reading an answer parses and compares texts, so it has a thread."""
        steps = edit_steps(task)
        question: Question | Proposal = await asyncio.to_thread(_next, steps, None)
        while isinstance(question, Question):
            question = await asyncio.to_thread(_next, steps, await self._written(question))
        return question

    async def _written(self, question: Question) -> str:
        """A model's answer, through its queue."""
        entry = await self._writer()
        messages = question.messages
        job: Job | RemoteJob
        if entry.model is not None and entry.model.chat is not None:
            model, chat = entry.model, entry.model.chat
            prompt = await asyncio.to_thread(chat.tokens, model.tokenizer, messages)
            predicted = model.tokenizer.encode(question.prediction)
            params = GenerationParams(max_tokens=len(predicted) + _ANSWER_ROOM)
            job = Job(prompt, params, FileDrafter(predicted) if self._service.speculation else None)
        else:
            job = RemoteJob(GenerationParams(), messages=messages)
        permit = await self._service.admitted(entry, job, self._caller)
        work = self._service.submit(entry, job, self._caller, priority=Priority.EDIT, permit=permit)
        pieces: list[str] = []
        ended = question.watch()
        async with aclosing(work.items()) as items:
            async for item in items:
                if isinstance(item, Chunk):
                    pieces.append(item.text)
                    if ended(item.text):
                        work.enough()
                        break
        return "".join(pieces)

    async def _writer(self) -> ServedModel:
        """A model that follows instructions: the deep one where there is one."""
        task = Task(Priority.EDIT, converses=True, deep=True)
        entry, _ = await self._service.route(AUTO, lambda: task)
        return entry

    # Refactorings

    async def _refactored(self, request: live.RefactorAsk, buffer: Mirrored) -> live.Changes:
        if buffer.language != "python":
            raise InputError(f"Refactorings are for Python; this is {buffer.language or 'plain text'}.")
        where = self._place(buffer)
        overlay = {
            place.path: (mirror.name, mirror.text)
            for mirror in self._around.mirrors()
            if (place := self._place(mirror)).path is not None and mirror.language == "python"
        }
        return await self._refactorer.asked(request, where.path, where.root, buffer.text, overlay)

    # Places

    def _mirror(self, name: str) -> Mirrored:
        found = next((m for m in self._around.mirrors() if m.name == name), None)
        if found is None:
            raise UsageError(f"The buffer {name:.200} is not open; open it first.", param="buffer")
        return found

    def _place(self, buffer: Mirrored) -> Where:
        return self._places.get(buffer.name, Where(None, None))

    def _name(self, buffer: Mirrored) -> str:
        """What the file is called in a prompt."""
        where = self._place(buffer)
        if where.path is None:
            return PurePath(buffer.name).name or "untitled"
        if where.root is not None and where.path.is_relative_to(where.root):
            return where.path.relative_to(where.root).as_posix()
        return where.path.name


def _next(steps: Steps, answer: str | None) -> Question | Proposal:
    """The next question, or what came of them all."""
    try:
        return next(steps) if answer is None else steps.send(answer)
    except StopIteration as stop:
        return cast("Proposal", stop.value)


def _only(proposal: Proposal, path: str) -> tuple[Edit, ...]:
    """The edits of the one file that may change."""
    if proposal.failures:
        reasons = "; ".join(dict.fromkeys(failure.message for failure in proposal.failures))
        raise InputError(f"The model's answer does not fit the text, nothing was changed: {reasons}.")
    if proposal.moves or any(name != path for name in proposal.texts):
        raise Forbidden("The model wants to change other files; ask for a change of this one.")
    return proposal.edits(path)


def _problem(found: Diagnostic) -> live.Problem:
    return live.Problem(
        code=found.code,
        severity=found.level.value,
        message=found.message,
        start=found.start,
        end=found.end,
        fixes=[live.LiveFix(title=fix.title, edits=deltas(fix.edits)) for fix in found.fixes],
    )
