"""Serves prompts in the format of Zeta 2 and Sweep's models with Keystroke's own models and prompts.

`assist/next_edit/foreign.py` parses the prompt and formats the answer. With the cursor at the end of its
line a completion is tried first; else, or where it is not confident, the edit that follows from the last
change. Without either, the window is returned unchanged, which clients show as nothing. A model trained for
such a prompt gets it as it is.
"""

from __future__ import annotations

import asyncio
import time

from keystroke.analysis.syntax import LANGUAGES, language_of
from keystroke.assist.completion import LiveCompletion, ShownCompletion, context_budget
from keystroke.assist.completion.extent import line_at, only_closers
from keystroke.assist.next_edit import PlacesQuestion, PredictedEdits, SinglePlaceQuestion
from keystroke.assist.next_edit.foreign import EditorPrompt
from keystroke.assist.next_edit.places import PlacesFormat
from keystroke.assist.next_edit.tracker import RuleSearch
from keystroke.config import AssistSettings
from keystroke.engine.generation import Chunk
from keystroke.gateway.access.keys import Caller
from keystroke.gateway.work.model_client import ModelClient
from keystroke.gateway.work.registry import ServedModel
from keystroke.gateway.work.service import Service, new_id
from keystroke.protocol import chat
from keystroke.protocol.requests import CompletionRequest
from keystroke.protocol.response import Routing
from keystroke.text import Edit, apply_edits

_OWN = ("sweep", "zeta")  # in the names of models trained for such prompts
_OWN_TOKENS = ("<[fim-suffix]>", "<|user_cursor|>")


def handles_natively(entry: ServedModel) -> bool:
    """Whether the model gets such a prompt as it is: it was trained for it, or is remote."""
    model = entry.model
    if model is None or any(name in entry.name.lower() for name in _OWN):
        return True
    return any(model.tokenizer.special(token) is not None for token in _OWN_TOKENS)


class ForeignEdits:
    def __init__(self, service: Service, settings: AssistSettings) -> None:
        self._service, self._settings = service, settings

    async def answer(
        self,
        prompt: EditorPrompt,
        request: CompletionRequest,
        entry: ServedModel,
        routing: Routing,
        caller: Caller,
    ) -> chat.TextCompletion:
        """The completion. Raises KeystrokeError where the queue or the engine refuses."""
        client = ModelClient(self._service, entry, caller, f"edit/{prompt.path}")
        window = await self._rewrite_window(prompt, entry, client)
        text = (request.text if request.echo else "") + prompt.format_answer(window)
        usage = chat.ChatUsage(
            client.input_tokens, client.output_tokens, client.input_tokens + client.output_tokens
        )
        return chat.TextCompletion(
            new_id("cmpl"),
            int(time.time()),
            entry.name,
            [chat.TextChoice(text, "stop")],
            usage=usage,
            routing=routing,
        )

    async def _rewrite_window(self, prompt: EditorPrompt, entry: ServedModel, client: ModelClient) -> str:
        """The new text of the window."""
        language = language_of(prompt.path, None)
        completion = LiveCompletion(
            entry.model,
            self._settings,
            path=prompt.path,
            language=language,
            budget=context_budget(self._settings, entry.scheduler.prefill_rate),
        )
        if completion.refusal(prompt.text) is not None:
            return prompt.window
        edit = await self._complete_at_cursor(prompt, completion, client) if _at_line_end(prompt) else None
        edits = [edit] if edit is not None else await self._find_next_edits(prompt, entry, language, client)
        return _apply_in_window(prompt, edits) or prompt.window

    async def _complete_at_cursor(
        self, prompt: EditorPrompt, completion: LiveCompletion, client: ModelClient
    ) -> Edit | None:
        """The insertion that would be shown as ghost text at the cursor."""
        text, place = prompt.text, prompt.offset
        if completion.answer(text, place) is not None:  # nothing is cached yet, so a decision is a refusal
            return None
        stream = completion.begin(text, place)

        def feed(chunk: Chunk) -> bool:
            stream.feed(chunk)
            return stream.done

        await client.stream(stream.prompt.tokens, stream.params(), None, feed)
        offer = completion.answer(text, place, stream) if stream.done else None
        return Edit(place, place, offer.text) if isinstance(offer, ShownCompletion) else None

    async def _find_next_edits(
        self, prompt: EditorPrompt, entry: ServedModel, language: str | None, client: ModelClient
    ) -> list[Edit]:
        """The edits that follow from the last change: by rules, else by a model trained for next edits."""
        last = prompt.last_change()
        if last is None:
            return []
        rules = RuleSearch(language if language in LANGUAGES else None, last[0].before, ())
        known = await asyncio.to_thread(rules.propose, prompt.text, prompt.offset, {})
        if known is not None:
            places = (place.edit for place in known.edits)
            return [edit for edit in places if _apply_in_window(prompt, [edit]) is not None]
        if entry.edits is None:
            return []
        about = (prompt.path, language, last[0], last[1], prompt.offset)
        eagerness = self._settings.eagerness
        if isinstance(entry.edits, PlacesFormat):
            found = await PlacesQuestion(entry.edits, *about, eagerness=eagerness).resolve(client)
        else:
            found = await SinglePlaceQuestion(entry.edits, *about, eagerness=eagerness).resolve(client)
        return list(found.edits) if isinstance(found, PredictedEdits) else []


def _at_line_end(prompt: EditorPrompt) -> bool:
    right = prompt.text[prompt.offset : line_at(prompt.text, prompt.offset)[1]]
    return not right.strip() or only_closers(right)


def _apply_in_window(prompt: EditorPrompt, edits: list[Edit]) -> str | None:
    """The window after the edits; None where one reaches beyond it, or changes text with which the client
    already begins the answer."""
    start, end = len(prompt.above), len(prompt.above) + len(prompt.window)
    if not edits or any(e.start < start + len(prompt.answer_start) or e.end > end for e in edits):
        return None
    return apply_edits(prompt.window, [Edit(e.start - start, e.end - start, e.text) for e in edits])
