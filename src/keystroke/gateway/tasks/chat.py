"""A model of this server as a task talks with it: every answer is work in the model's queue.

The same interface as a model that a task has to itself. A line said in mid-answer is spliced into the
running session; where the answer ended first, or the model is elsewhere, it is asked again with what was
written. The engine is never touched from here.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keystroke.agent.attempts import Outcome
from keystroke.agent.chat import (
    Asked,
    Chat,
    Message,
    Price,
    Receipt,
    Reply,
    Steered,
    Steering,
    Wording,
)
from keystroke.agent.chat.calls import call_grammar, read_calls
from keystroke.agent.chat.chat import SMALL
from keystroke.agent.chat.remote import attempts_in_turn
from keystroke.agent.chat.several import race_for, receipt_of
from keystroke.agent.tools import Call
from keystroke.engine.base import Interrupt
from keystroke.engine.generation import Chunk, Finish, GenerationParams
from keystroke.engine.remote.wire import ToolCallDelta
from keystroke.gateway.tasks.bridge import Bridge, Handle
from keystroke.gateway.tasks.decoder import ServedDecoder
from keystroke.gateway.work.registry import ServedModel
from keystroke.gateway.work.remote import RemoteJob
from keystroke.gateway.work.scheduler import Job
from keystroke.gateway.work.ticket import Ended, Item, Moved
from keystroke.gateway.work.ticket import Steered as Turned

_LOOK = 0.02  # seconds between two looks at what the user said while the model is silent


class ServedChat(Chat):
    """`on_position` hears where an answer stands in the queue; 0: no longer waiting."""

    def __init__(
        self, bridge: Bridge, entry: ServedModel, on_position: Callable[[int], None] | None = None
    ) -> None:
        self._bridge, self._entry = bridge, entry
        self.name = entry.name
        self.small = entry.model is not None and entry.parameters < SMALL
        self.price = Price(entry.price.input, entry.price.cached, entry.price.output)
        self._wording = Wording(entry.model) if entry.model is not None else None
        self._position = on_position or (lambda position: None)

    def reply(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        max_tokens: int = 2048,
        interrupt: Interrupt | None = None,
        steering: Steering | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> Reply:
        began = time.perf_counter()
        said: list[Message] = []
        prompt = reused = tokens = 0
        while True:
            spoken = _Speaking(self, on_text)
            handle = self._asked([*messages, *said], tools, max_tokens, spoken, interrupt or Interrupt())
            line = spoken.listen(handle, steering, interrupt or Interrupt(), self._wording)
            stats = handle.work.ticket.stats
            prompt, reused, tokens = (
                prompt + stats.prompt_tokens,
                reused + stats.reused,
                tokens + stats.tokens,
            )
            said += spoken.said
            if line is None:
                break
            said.append({"role": "user", "content": line})
        seconds = time.perf_counter() - began
        cost = self.price.of(prompt, reused, tokens)
        receipt = Receipt("answer", self.name, prompt, reused, tokens, seconds, cost)
        answer, calls = said[-1], spoken.made()
        if spoken.calls:
            answer = said[-1] = {**answer, "tool_calls": spoken.tool_calls()}
        elif tools:
            calls = read_calls(spoken.part).calls
        return Reply(spoken.part, calls, spoken.finish, tuple(said), receipt)

    def _asked(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        max_tokens: int,
        spoken: _Speaking,
        interrupt: Interrupt,
    ) -> Handle:
        if self._wording is None:
            job = RemoteJob(GenerationParams(max_tokens), messages, tools or None)
            return self._bridge.submit(self.name, lambda entry: job, spoken.heard, interrupt)
        prompt = self._wording.prompt(messages, tools)
        params = GenerationParams(max_tokens, constraint=call_grammar(tools) if tools else None)

        def make(entry: ServedModel) -> Job:
            assert entry.model is not None
            return Job(prompt, params, self._bridge.service.draft(entry.model, None, len(prompt)))

        return self._bridge.submit(self.name, make, spoken.heard, interrupt)

    def attempts(
        self, asked: Asked, *, interrupt: Interrupt | None = None, steering: Steering | None = None
    ) -> tuple[Outcome, Receipt, Steered]:
        if self._wording is None:
            return attempts_in_turn(self, asked, interrupt, steering)
        began = time.perf_counter()
        decoder = ServedDecoder(self._bridge, self._entry, asked, self._position)
        race, heard = race_for(asked, decoder, self._wording, interrupt, steering)
        outcome = race.run()
        return outcome, receipt_of(outcome, self.name, self.price, time.perf_counter() - began), heard

    def moved(self, position: int) -> None:
        self._position(position)


class _Speaking:
    """One answer as it comes: `said` are its messages, the last one the answer itself; `part` is the text
    since the user last said something."""

    def __init__(self, chat: ServedChat, on_text: Callable[[str], None] | None) -> None:
        self._chat, self._on_text = chat, on_text
        self._items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self.said: list[Message] = []
        self.part = ""
        self.finish = Finish.STOP
        self.calls: dict[int, list[str]] = {}

    def heard(self, item: Item) -> None:
        """Called on the loop."""
        self._items.put(item)

    def listen(
        self, handle: Handle, steering: Steering | None, interrupt: Interrupt, wording: Wording | None
    ) -> str | None:
        """Read to the end. Returns a line that could not be spliced in: it is to be said, and the model asked
        again. Raises what the work failed with, Interrupted, HandOver."""
        turning: list[str] = []  # said, and not yet part of the session
        wake = handle.cancel
        interrupt.add_callback(wake)
        try:
            while True:
                item = self._next(steering is not None)
                if item is None:
                    pass
                elif isinstance(item, Chunk):
                    self._chunk(item, quiet=bool(turning))
                elif isinstance(item, Turned) and turning:
                    self._turned(turning.pop(0))
                elif isinstance(item, Moved):
                    self._chat.moved(item.position)
                elif isinstance(item, ToolCallDelta):
                    call = self.calls.setdefault(item.index, [item.id or f"call_{item.index}", "", ""])
                    call[1] += item.name or ""
                    call[2] += item.arguments
                elif isinstance(item, Ended):
                    return self._ended(item, turning, interrupt)
                line = steering.take() if steering is not None and not turning else None
                if line is not None:
                    turning.append(line)
                    if wording is None:
                        handle.enough()
                    else:
                        handle.redirect(wording.splice(line))
        except BaseException:
            handle.cancel()
            raise
        finally:
            interrupt.remove_callback(wake)

    def _next(self, impatient: bool) -> Item | None:
        try:
            return self._items.get(timeout=_LOOK if impatient else None)
        except queue.Empty:
            return None

    def _chunk(self, chunk: Chunk, *, quiet: bool) -> None:
        self.part += chunk.text
        self.finish = chunk.finish or self.finish
        if chunk.text and self._on_text is not None and not quiet:
            self._on_text(chunk.text)

    def _turned(self, line: str) -> None:
        self.said += [{"role": "assistant", "content": self.part}, {"role": "user", "content": line}]
        self.part = ""

    def _ended(self, item: Ended, turning: list[str], interrupt: Interrupt) -> str | None:
        interrupt.check()
        if item.error is not None and not turning:
            raise item.error
        self.said.append({"role": "assistant", "content": self.part})
        return turning[0] if turning else None

    def made(self) -> tuple[Call, ...]:
        return tuple(Call(name, arguments or "{}") for _, name, arguments in self.calls.values())

    def tool_calls(self) -> list[dict[str, Any]]:
        return [
            {"id": key, "type": "function", "function": {"name": name, "arguments": arguments or "{}"}}
            for key, name, arguments in self.calls.values()
        ]
