"""Answers to prompts made for Zeta 2 and Sweep's models, by our own questions to our own models.

The prompt is read and the answer worded in `assist/next_edit/foreign.py`; here models are asked. Where
the cursor stands at the end of its line the text there comes first, as ghost text does; else, or where that
is not sure enough, the edit that the last change asks for. Where neither is, the window goes back unchanged,
which clients show as nothing. A model that was made for such prompts gets them as they are.
"""

from __future__ import annotations

import asyncio
import time

from keystroke.analysis.syntax import LANGUAGES, language_of
from keystroke.assist.completion import LiveCompletion, Offer, context_budget
from keystroke.assist.completion.extent import line_at, only_closers
from keystroke.assist.next_edit import Found, PlacesQuestion, Question
from keystroke.assist.next_edit.foreign import Asked
from keystroke.assist.next_edit.places import PlacesFormat
from keystroke.assist.next_edit.tracker import Inquiry
from keystroke.config import AssistSettings
from keystroke.engine.generation import Chunk
from keystroke.gateway.access.keys import Caller
from keystroke.gateway.work.asker import Asker
from keystroke.gateway.work.registry import ServedModel
from keystroke.gateway.work.service import Service, new_id
from keystroke.protocol import chat
from keystroke.protocol.requests import CompletionRequest
from keystroke.protocol.response import Routing
from keystroke.text import Edit, apply_edits

_OWN = ("sweep", "zeta")  # in the names of models that were made for such prompts
_OWN_TOKENS = ("<[fim-suffix]>", "<|user_cursor|>")


def speaks_it(entry: ServedModel) -> bool:
    """Whether the model has to be given such a prompt as it is: it was made for it, or lies elsewhere."""
    model = entry.model
    if model is None or any(name in entry.name.lower() for name in _OWN):
        return True
    return any(model.tokenizer.special(token) is not None for token in _OWN_TOKENS)


class ForeignEdits:
    def __init__(self, service: Service, settings: AssistSettings) -> None:
        self._service, self._settings = service, settings

    async def answer(
        self, asked: Asked, request: CompletionRequest, entry: ServedModel, routing: Routing, caller: Caller
    ) -> chat.TextCompletion:
        """The whole answer. Raises KeystrokeError where the queue or the engine refuses."""
        ask = Asker(self._service, entry, caller, f"edit/{asked.path}")
        window = await self._rewritten(asked, entry, ask)
        text = asked.answer(window)
        if request.echo:
            text = (request.prompt if isinstance(request.prompt, str) else "".join(request.prompt)) + text
        usage = chat.ChatUsage(ask.read, ask.written, ask.read + ask.written)
        return chat.TextCompletion(
            new_id("cmpl"),
            int(time.time()),
            entry.name,
            [chat.TextChoice(text, "stop")],
            usage=usage,
            routing=routing,
        )

    async def _rewritten(self, asked: Asked, entry: ServedModel, ask: Asker) -> str:
        """The window as it should become."""
        language = language_of(asked.path, None)
        completion = LiveCompletion(
            entry.model,
            self._settings,
            path=asked.path,
            language=language,
            budget=context_budget(self._settings, entry.scheduler.prefill_rate),
        )
        if completion.refusal(asked.text) is not None:
            return asked.window
        if _at_line_end(asked) and (edit := await self._continued(asked, completion, ask)) is not None:
            return _within(asked, [edit]) or asked.window
        found = await self._next(asked, entry, language, ask)
        return _within(asked, found) or asked.window

    async def _continued(self, asked: Asked, completion: LiveCompletion, ask: Asker) -> Edit | None:
        """What would be shown as ghost text at the cursor."""
        text, place = asked.text, asked.place
        if completion.look(text, place) is not None:  # nothing is computed here, and nothing is cached yet
            return None
        stream = completion.begin(text, place)

        def enough(chunk: Chunk) -> bool:
            stream.feed(chunk)
            return stream.done

        await ask.read_out(stream.prompt.tokens, stream.params(), None, enough)
        offer = completion.answer(stream, text, place) if stream.done else None
        return Edit(place, place, offer.text) if isinstance(offer, Offer) else None

    async def _next(self, asked: Asked, entry: ServedModel, language: str | None, ask: Asker) -> list[Edit]:
        """The edits that the last change asks for: by the rules, else by a model that has learned them."""
        last = asked.change()
        if last is None:
            return []
        rules = Inquiry(language if language in LANGUAGES else None, last[0].before, ())
        known = await asyncio.to_thread(rules.propose, asked.text, asked.place, {})
        if known is not None:
            places = (place.edit for place in known.places)
            return [edit for edit in places if _within(asked, [edit]) is not None]
        if entry.edits is None:
            return []
        about = (asked.path, language, last[0], last[1], asked.place)
        eagerness = self._settings.eagerness
        if isinstance(entry.edits, PlacesFormat):
            found = await PlacesQuestion(entry.edits, *about, eagerness=eagerness).answered(ask)
        else:
            found = await Question(entry.edits, *about, eagerness=eagerness).answered(ask)
        return list(found.edits) if isinstance(found, Found) else []


def _at_line_end(asked: Asked) -> bool:
    right = asked.text[asked.place : line_at(asked.text, asked.place)[1]]
    return not right.strip() or only_closers(right)


def _within(asked: Asked, edits: list[Edit]) -> str | None:
    """The window after the edits; None where one of them reaches beyond it, or touches what the client has
    begun the answer with."""
    start, end = len(asked.above), len(asked.above) + len(asked.window)
    if not edits or any(e.start < start + len(asked.begun) or e.end > end for e in edits):
        return None
    return apply_edits(asked.window, [Edit(e.start - start, e.end - start, e.text) for e in edits])
