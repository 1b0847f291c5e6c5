"""The model's own next edit for one live buffer: its questions, put through the model's queue.

Asks only a model that has learned a format, below ghost text in priority, one short job after
another; cancelling the awaiting task cancels the job under way. It decides nothing: what an answer is worth
is judged where the question was made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import PurePath

from keystroke.analysis.check import check
from keystroke.analysis.rules import ProjectRules
from keystroke.assist.next_edit import Found, Intent, PlacesQuestion, Question, Unfit
from keystroke.assist.next_edit.candidates import MOST
from keystroke.assist.next_edit.places import PlacesFormat
from keystroke.config import AssistSettings
from keystroke.errors import KeystrokeError
from keystroke.gateway.access.keys import Caller
from keystroke.gateway.work.asker import Asker
from keystroke.gateway.work.registry import Registry, ServedModel
from keystroke.gateway.work.service import Service

SECONDS = 1.5  # that all questions about one change may take
QUICK = 400  # tokens a second that a model must read to be asked about all places at once
_QUESTION = 300  # tokens that one place costs, the history apart
_LARGEST_CHECK = 60_000  # characters; checking more takes longer than a pause


def editor(registry: Registry, own: ServedModel) -> ServedModel:
    """Who is asked for the next edits of a buffer that `own` completes: a loaded model whose adapter has
    learned them, as long as it is quick enough here, else `own` itself."""
    for entry in registry.entries.values():
        if isinstance(entry.edits, PlacesFormat):
            rate = entry.scheduler.prefill_rate
            if rate is None or rate >= QUICK:
                return entry
    return own


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
        entry = editor(self._service.registry, self._entry)
        form = entry.edits
        if form is None:
            return Unfit.NOWHERE  # the model that knew has gone
        asked = (
            self._path,
            self._language,
            intent.change,
            intent.history,
            cursor,
            await asyncio.to_thread(self._problems, intent.change.after),
            intent.dismissed,
            self._rules().max_line,
            self._settings.eagerness,
            self._places(entry),
        )
        ask = Asker(self._service, entry, self._caller, f"live/{self._path}")
        if isinstance(form, PlacesFormat):
            return await PlacesQuestion(form, *asked).answered(ask)
        return await Question(form, *asked).answered(ask)

    def _places(self, entry: ServedModel) -> int:
        """As many places as this machine looks at in the time allowed."""
        rate = entry.scheduler.prefill_rate
        return MOST if rate is None else max(2, min(MOST, int(rate * SECONDS / _QUESTION)))

    def _problems(self, text: str) -> tuple[int, ...]:
        if self._language != "python" or len(text) > _LARGEST_CHECK:
            return ()
        try:
            return tuple(item.start for item in check(text, PurePath(self._path).name, fixes=False))
        except KeystrokeError:
            return ()
