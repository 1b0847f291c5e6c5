"""Asks a model for the next edit of one live buffer, through the model's queue.

Only models trained on an edit format are asked, below ghost text in priority, one short job after another.
Cancelling the awaiting task cancels the running job.
"""

from __future__ import annotations

import asyncio
from pathlib import PurePath

from keystroke.analysis.check import check
from keystroke.assist.completion import LiveCompletion
from keystroke.assist.next_edit import (
    Intent,
    NoEditReason,
    PlacesQuestion,
    PredictedEdits,
    SinglePlaceQuestion,
)
from keystroke.assist.next_edit.candidates import MOST
from keystroke.assist.next_edit.places import PlacesFormat
from keystroke.errors import KeystrokeError
from keystroke.gateway.live.mirror import BufferMirror
from keystroke.gateway.work.model_client import ModelAccess, ModelClient
from keystroke.gateway.work.registry import ModelRegistry, ServedModel

SECONDS = 1.5  # that all questions about one change may take
QUICK = 400  # tokens a second that a model must read to be asked about all places at once
_QUESTION = 300  # tokens that one place costs, without the history
_LARGEST_CHECK = 60_000  # characters; checking more takes longer than a pause


def choose_edit_model(registry: ModelRegistry, own: ServedModel) -> ServedModel:
    """The model that predicts next edits for a buffer that `own` completes: a loaded model whose adapter was
    trained for it and which is fast enough here, else `own` itself."""
    for entry in registry.entries.values():
        if isinstance(entry.edits, PlacesFormat):
            rate = entry.scheduler.prefill_rate
            if rate is None or rate >= QUICK:
                return entry
    return own


class NextEditModel:
    def __init__(self, mirror: BufferMirror, completion: LiveCompletion, model: ModelAccess) -> None:
        self._mirror, self._completion, self._model = mirror, completion, model
        self._path = mirror.path or mirror.name

    async def predict(self, intent: Intent, cursor: int) -> PredictedEdits | NoEditReason:
        """Raises KeystrokeError where the queue or the engine refuses."""
        service = self._model.service
        entry = choose_edit_model(service.registry, self._model.entry)
        form = entry.edits
        if form is None:
            return NoEditReason.NOWHERE  # the model that supported it is no longer loaded
        arguments = (
            self._path,
            self._mirror.language,
            intent.change,
            intent.history,
            cursor,
            await asyncio.to_thread(self._problems, intent.change.after),
            intent.dismissed,
            self._completion.rules.max_line,
            self._completion.settings.eagerness,
            _place_limit(entry),
        )
        client = ModelClient(service, entry, self._model.caller, f"live/{self._path}")
        if isinstance(form, PlacesFormat):
            return await PlacesQuestion(form, *arguments).resolve(client)
        return await SinglePlaceQuestion(form, *arguments).resolve(client)

    def _problems(self, text: str) -> tuple[int, ...]:
        if self._mirror.language != "python" or len(text) > _LARGEST_CHECK:
            return ()
        try:
            return tuple(item.start for item in check(text, PurePath(self._path).name, fixes=False))
        except KeystrokeError:
            return ()


def _place_limit(entry: ServedModel) -> int:
    """How many places this machine can examine in the time allowed."""
    rate = entry.scheduler.prefill_rate
    return MOST if rate is None else max(2, min(MOST, int(rate * SECONDS / _QUESTION)))
