"""The model's own next edit for one live buffer: its questions, put through the model's queue.

Law: asks only a model that has learned the format, below ghost text in priority, one short job after
another; cancelling the awaiting task cancels the job under way. It decides nothing: what an answer is worth
is judged where the question was made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import PurePath

from keystroke.analysis.check import check
from keystroke.analysis.rules import ProjectRules
from keystroke.assist.next_edit import Found, Intent, Question, Said, Unfit
from keystroke.assist.next_edit.candidates import MOST
from keystroke.config import AssistSettings
from keystroke.engine.base import TokenLogprob
from keystroke.engine.generation import Chunk, GenerationParams
from keystroke.engine.speculative import Drafter
from keystroke.errors import KeystrokeError
from keystroke.gateway.access.keys import Caller
from keystroke.gateway.work.priority import Priority
from keystroke.gateway.work.registry import ServedModel
from keystroke.gateway.work.scheduler import Job
from keystroke.gateway.work.service import Service

SECONDS = 1.5  # that all questions about one change may take
_QUESTION = 300  # tokens that one place costs, the history apart
_LARGEST_CHECK = 60_000  # characters; checking more takes longer than a pause


class NextEditModel:
    def __init__(
        self,
        service: Service,
        entry: ServedModel,
        caller: Caller,
        settings: AssistSettings,
        *,
        path: str,
        language: str | None,
        rules: Callable[[], ProjectRules],
    ) -> None:
        self._service, self._entry, self._caller = service, entry, caller
        self._settings, self._rules = settings, rules
        self._path, self._language = path, language

    async def ask(self, intent: Intent, cursor: int) -> Found | Unfit:
        """Raises KeystrokeError where the queue or the engine refuses."""
        form = self._entry.edits
        assert form is not None
        question = Question(
            form,
            self._path,
            self._language,
            intent.change,
            intent.history,
            cursor,
            await asyncio.to_thread(self._problems, intent.change.after),
            intent.dismissed,
            self._rules().max_line,
            self._settings.eagerness,
            self._places(),
        )
        return await question.answered(self._run)

    def _places(self) -> int:
        """As many places as this machine looks at in the time allowed."""
        rate = self._entry.scheduler.prefill_rate
        return MOST if rate is None else max(2, min(MOST, int(rate * SECONDS / _QUESTION)))

    def _problems(self, text: str) -> tuple[int, ...]:
        if self._language != "python" or len(text) > _LARGEST_CHECK:
            return ()
        try:
            return tuple(item.start for item in check(text, PurePath(self._path).name, fixes=False))
        except KeystrokeError:
            return ()

    async def _run(self, tokens: Sequence[int], params: GenerationParams, drafter: Drafter | None) -> Said:
        entry, service = self._entry, self._service
        job = Job(tokens, params, drafter if service.speculation else None, affinity=f"live/{self._path}")
        permit = await service.admitted(entry, job, self._caller)
        work = service.submit(entry, job, self._caller, priority=Priority.NEXT_EDIT, live=True, permit=permit)
        said: list[int] = []
        chances: list[TokenLogprob] = []
        async with aclosing(work.items()) as items:
            async for item in items:
                if isinstance(item, Chunk):
                    said += item.tokens
                    chances += item.logprobs
        return Said(tuple(said), tuple(chances))
