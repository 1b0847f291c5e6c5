"""Calls with which a client's agent changes files: checked, and made with the machinery of `keystroke edit`.

A small model writes poor calls: it copies the conversation into the file, or loses half of it. So it only
names the file: if the client has shown that file, its new text is made by separate questions, as in
`keystroke edit`, and the client sees an ordinary call. Where that fails, the text that the model wrote itself
is sent if it does no damage, and otherwise a message that says why it was not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import cache

from keystroke.agent.evaluation.docstring_checks import DocstringChecks
from keystroke.agent.sandbox import find_sandbox
from keystroke.assist.edit import EditFailure, EditFailureReason, EditTask, edit_steps
from keystroke.assist.edit.steps import Answer, next_question
from keystroke.assist.edit.task import EditProposal, RewriteQuestion
from keystroke.assist.edit.writer import sampled_params
from keystroke.assist.tool_calls.file_edits import (
    ClientFileEdit,
    check_edit,
    check_segment,
    edit_calls,
    edits_files,
    read_edit,
    refusal,
    same_file,
)
from keystroke.assist.tool_calls.segments import Segment, ToolCallSegment
from keystroke.assist.tool_calls.user_request import named_files, strip_lead
from keystroke.engine.generation import GenerationParams
from keystroke.engine.speculative import FileDrafter
from keystroke.errors import KeystrokeError
from keystroke.gateway.access.keys import LOCAL, Caller
from keystroke.gateway.work.priority import Priority, Tier
from keystroke.gateway.work.registry import ServedModel
from keystroke.gateway.work.scheduler import Job
from keystroke.gateway.work.service import Service

log = logging.getLogger("keystroke.client_edits")

_CHECKS = DocstringChecks(cache(find_sandbox))
LONGEST_REQUEST = 2000  # characters; longer ones describe more than a change of a file
_CANDIDATES = 8  # asked for at once where they cost about as much as one
_ANSWER_ROOM = 1024  # tokens beyond those of the text that is rewritten


def makes_edits(request: str) -> bool:
    """Whether a small model's calls that change files are made here."""
    return 0 < len(request.strip()) <= LONGEST_REQUEST


class ClientEdits:
    """`files`: texts that were read in the conversation, by path. `request`: what the user asked for.
    `makes`: the model is small, so its changes of these files are made here."""

    def __init__(
        self,
        service: Service,
        entry: ServedModel,
        caller: Caller,
        files: Mapping[str, str],
        request: str,
        *,
        makes: bool,
    ) -> None:
        self._service, self._entry, self._caller = service, entry, caller
        self._files, self._request = dict(files), request.strip()
        self._makes = makes and makes_edits(request)
        self._edited_paths: set[str] = set()

    def check(self, segment: Segment) -> Segment:
        """The segment with its call checked."""
        if not isinstance(segment, ToolCallSegment) or not edits_files(segment.tool):
            return segment
        return check_segment(segment, self._files, self._request)

    async def make(self, segment: Segment) -> list[Segment]:
        """The segment with its call made or checked: several calls where several files change. Does not raise
        for what a model or a queue refuses."""
        if not isinstance(segment, ToolCallSegment) or not edits_files(segment.tool):
            return [segment]
        edit = read_edit(segment.tool, segment.payload, self._files)
        if edit is None or edit.old is None or not self._makes:
            return [await asyncio.to_thread(self.check, segment)]
        # The first call does all that was asked for.
        if any(same_file(edit.path, path) for path in self._edited_paths):
            return []
        files = self._files_to_edit(edit.path, edit.old)
        self._edited_paths |= set(files)
        try:
            proposal = await self._propose(EditTask(files, strip_lead(self._request)))
        except KeystrokeError as error:
            log.info("a client's edit is not made here: %s", error)
            proposal = None
        new: dict[str, str] = {}
        if proposal is not None and not proposal.failures and not proposal.moves:
            new = {path: text for path, text in proposal.texts.items() if text is not None}
            new = new if new.keys() == proposal.texts.keys() <= files.keys() else {}
        if not new and not edit.written:
            found = proposal.failures if proposal is not None else ()
            nothing = EditFailure(EditFailureReason.NO_HUNKS, edit.path, "no change was made")
            return [refusal(edit.path, next(iter(found), nothing))]
        if not new:
            checked = await asyncio.to_thread(check_edit, edit, self._request)
            if isinstance(checked, EditFailure):
                return [refusal(edit.path, checked)]
            if checked is None:
                return [segment]
            new = {edit.path: checked}
        self._files |= new
        edits = {ClientFileEdit(path, files[path], None, ""): text for path, text in new.items()}
        payloads = edit_calls(segment.tool, segment.payload, edits)
        return [segment] if payloads is None else [ToolCallSegment(segment.tool, call) for call in payloads]

    def _files_to_edit(self, path: str, text: str) -> dict[str, str]:
        """The file, by its name in the call, and the others that the request names, as far as they were
        read."""
        named = named_files(self._request)
        others = {
            known: other
            for known, other in self._files.items()
            if not same_file(known, path) and any(same_file(known, name) for name in named)
        }
        if not any(same_file(path, name) for name in named):
            others = {}
        return {path: text, **others}

    async def _propose(self, task: EditTask) -> EditProposal:
        """Ask one question after another; reading an answer parses and compares texts, so it runs in a
        thread."""
        model = self._entry.model
        width = min(_CANDIDATES, model.engine.free_batch) if model is not None else 1
        # Examples are code from the request: only this machine's own user may have it run here.
        checks = _CHECKS if self._caller == LOCAL else None
        steps = edit_steps(task, candidates=width, checks=checks)
        question: RewriteQuestion | EditProposal = await asyncio.to_thread(next_question, steps, None)
        while isinstance(question, RewriteQuestion):
            if question.also and model is not None and model.engine.max_batch > 1:
                candidates = (question, *question.also)
                answers: Answer = list(await asyncio.gather(*map(self._ask_candidate, candidates)))
            else:
                answers = await self._ask(question)
            question = await asyncio.to_thread(next_question, steps, answers)
        return question

    async def _ask_candidate(self, question: RewriteQuestion) -> str:
        """The answer, empty where it is refused: a full queue leaves fewer candidates."""
        try:
            return await self._ask(question)
        except KeystrokeError as error:
            log.info("a candidate is left out: %s", error)
            return ""

    async def _ask(self, question: RewriteQuestion) -> str:
        model = self._entry.model
        assert model is not None
        assert model.chat is not None
        prompt = await asyncio.to_thread(model.chat.direct_tokens, model.tokenizer, question.messages)
        predicted = model.tokenizer.encode(question.prediction)
        longest = GenerationParams(max_tokens=question.most or len(predicted) + _ANSWER_ROOM)
        params = sampled_params(longest, question.temperature, question.seed)
        job = Job(prompt, params, FileDrafter(predicted) if self._service.speculation else None)
        work = await self._service.enqueue(
            self._entry, job, self._caller, priority=Priority.CHAT, tier=Tier.FLEX
        )
        return await work.read_text(question.end_detector())
