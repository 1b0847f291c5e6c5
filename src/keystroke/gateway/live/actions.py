"""The live client's explicit requests: problems, refactorings, edits by instruction.

Each request is one task and ends in exactly one answer: the result, an error, or `not_shown` when it was
cancelled. It reads the mirrored texts and changes nothing; the client applies the changes. Checks and
refactorings run in processes that belong to the caller's key, model work goes through its queue; none of them
delays a key.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import PurePath

from msgspec import convert

from keystroke.analysis.check import Diagnostic
from keystroke.analysis.rules import project_rules
from keystroke.assist.edit import EditProposal, EditTask, Region, RewriteQuestion, edit_steps
from keystroke.assist.edit.steps import next_question
from keystroke.engine.generation import GenerationParams
from keystroke.engine.speculative.file_draft import FileDrafter
from keystroke.errors import Forbidden, InputError, KeystrokeError, UsageError
from keystroke.gateway.access.keys import Caller
from keystroke.gateway.live.key_process import CheckProcess, RefactorProcess, to_deltas
from keystroke.gateway.live.mirror import BufferMirror
from keystroke.gateway.work.priority import Priority
from keystroke.gateway.work.registry import AUTO
from keystroke.gateway.work.remote import RemoteJob
from keystroke.gateway.work.routing import RoutingRequest
from keystroke.gateway.work.scheduler import Job
from keystroke.gateway.work.service import Service
from keystroke.protocol import live_messages as live
from keystroke.text import Edit

log = logging.getLogger("keystroke.live")

IN_FLIGHT = 16  # requests of one connection at a time
_ANSWER_ROOM = 512  # tokens an edit may add beyond the text it rewrites

ActionRequest = live.ProblemsAsk | live.RefactorAsk | live.EditAsk


class LiveActions:
    """`mirrors` returns the open buffers."""

    def __init__(
        self,
        service: Service,
        caller: Caller,
        *,
        send: Callable[[live.LiveEvent], None],
        mirrors: Callable[[], Iterable[BufferMirror]],
    ) -> None:
        self._service, self._caller = service, caller
        self._send, self._mirrors = send, mirrors
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._checking: dict[str, str] = {}  # buffer -> the request for its problems
        self._checker, self._refactorer = CheckProcess.for_key(caller.id), RefactorProcess.for_key(caller.id)

    def submit(self, request: ActionRequest) -> None:
        """Start a task. Raises UsageError for a version that is not current, or too many requests."""
        buffer = self._mirror(request.buffer)
        if request.version != buffer.version:
            raise UsageError(
                f"The buffer is at version {buffer.version}, not {request.version}; ask again.",
                param="version",
            )
        if request.id in self._tasks or len(self._tasks) >= IN_FLIGHT:
            raise UsageError(
                f"At most {IN_FLIGHT} requests, each with its own id, run at a time.", param="id"
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

    async def _answer(self, request: ActionRequest) -> None:
        try:
            self._send(await self._result(request))
        except asyncio.CancelledError:
            self._send(live.NotShown(**request.place, reason="cancelled"))
        except KeystrokeError as error:
            self._send(live.live_error(error, request.id, request.buffer))
        except Exception:
            log.exception("a live request failed")
            failure = KeystrokeError("The server failed on this request; its log says how.")
            self._send(live.live_error(failure, request.id, request.buffer))

    async def _result(self, request: ActionRequest) -> live.LiveEvent:
        buffer = self._mirror(request.buffer)
        if isinstance(request, live.ProblemsAsk):
            return await self._problems(request, buffer)
        if max(request.start, request.end) > len(buffer.text) or request.start > request.end:
            raise InputError(
                f"[{request.start}, {request.end}) is not a span of a text of {len(buffer.text)} characters.",
                param="start",
            )
        if isinstance(request, live.RefactorAsk):
            return await self._refactor(request, buffer)
        return await self._edit(request, buffer)

    # Problems

    async def _problems(self, request: live.ProblemsAsk, buffer: BufferMirror) -> live.Problems:
        began = time.perf_counter()
        found: tuple[Diagnostic, ...] = ()
        if buffer.language == "python":
            found = await self._checker.check(buffer.text, *buffer.location)
        elapsed = round((time.perf_counter() - began) * 1e3, 3)
        return live.Problems(
            **request.place, problems=[_to_problem(item) for item in found], elapsed_ms=elapsed
        )

    # Edits

    async def _edit(self, request: live.EditAsk, buffer: BufferMirror) -> live.Changes:
        path = _prompt_name(buffer)
        region = None
        if request.end > request.start:
            first = buffer.text.count("\n", 0, request.start)
            last = buffer.text.count("\n", 0, request.end)
            if last > first and buffer.text[request.end - 1] == "\n":
                last -= 1  # a selection that ends at the start of a line does not include that line
            region = Region(path, first, last + 1)
        rules = await asyncio.to_thread(self._rules, buffer)
        near = (path, buffer.text.count("\n", 0, request.start))
        task = EditTask({path: buffer.text}, request.instruction, region, rules, near)
        proposal = await self._propose(task)
        edits = live.FileEdits(buffer=request.buffer, edits=to_deltas(_edits_of(proposal, path)))
        return live.Changes(**request.place, title=request.instruction[:80], files=[edits])

    def _rules(self, buffer: BufferMirror) -> str:
        """The project's style rules, where this machine has the project."""
        path, root = buffer.location
        if path is None:
            return ""
        try:
            return project_rules(path, root, buffer.language).prompt_header()
        except (OSError, ValueError):
            return ""

    async def _propose(self, task: EditTask) -> EditProposal:
        """Ask one question after another. Reading an answer parses and compares texts, so it runs in a
        thread."""
        steps = edit_steps(task)
        question: RewriteQuestion | EditProposal = await asyncio.to_thread(next_question, steps, None)
        while isinstance(question, RewriteQuestion):
            question = await asyncio.to_thread(next_question, steps, await self._ask_model(question))
        return question

    async def _ask_model(self, question: RewriteQuestion) -> str:
        """The answer of a model that follows instructions, the deep one where there is one, through its
        queue."""
        task = RoutingRequest(Priority.EDIT, converses=True, deep=True)
        entry, _ = await self._service.route(AUTO, lambda: task)
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
        work = await self._service.enqueue(entry, job, self._caller, priority=Priority.EDIT)
        return await work.read_text(question.end_detector())

    # Refactorings

    async def _refactor(self, request: live.RefactorAsk, buffer: BufferMirror) -> live.Changes:
        if buffer.language != "python":
            raise InputError(f"Refactorings are for Python; this is {buffer.language or 'plain text'}.")
        overlay = {
            mirror.location.path: (mirror.name, mirror.text)
            for mirror in self._mirrors()
            if mirror.location.path is not None and mirror.language == "python"
        }
        return await self._refactorer.plan(request, *buffer.location, buffer.text, overlay)

    # Buffers

    def _mirror(self, name: str) -> BufferMirror:
        found = next((m for m in self._mirrors() if m.name == name), None)
        if found is None:
            raise UsageError(f"The buffer {name:.200} is not open; open it first.", param="buffer")
        return found


def _prompt_name(buffer: BufferMirror) -> str:
    """The file's name in a prompt."""
    if buffer.location.path is not None and buffer.path:
        return buffer.path
    return PurePath(buffer.name).name or "untitled"


def _edits_of(proposal: EditProposal, path: str) -> tuple[Edit, ...]:
    """The edits of `path`, the only file that may change."""
    if proposal.failures:
        reasons = "; ".join(dict.fromkeys(failure.message for failure in proposal.failures))
        raise InputError(f"The model's answer does not fit the text, nothing was changed: {reasons}.")
    if proposal.moves or any(name != path for name in proposal.texts):
        raise Forbidden("The model wants to change other files; ask for a change of this one.")
    return proposal.edits(path)


def _to_problem(found: Diagnostic) -> live.Problem:
    return live.Problem(
        code=found.code,
        severity=found.level.value,
        message=found.message,
        start=found.start,
        end=found.end,
        fixes=convert(found.fixes, list[live.LiveFix], from_attributes=True),
    )
