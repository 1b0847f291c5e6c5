"""A model behind a server as a task talks with it.

The server has no sessions of ours, so a line said in mid-answer ends the answer and asks again with what
was written, and attempts are made one after the other until one passes. Tool calls are the server's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keystroke.agent.attempts import Attempt, End, Go, Outcome, Policy, choose, samplings
from keystroke.agent.chat.chat import Asked, Chat, Message, Reply, Steered, Steering
from keystroke.agent.chat.receipt import Price, Receipt
from keystroke.agent.tools import Call
from keystroke.engine.base import Interrupt
from keystroke.engine.generation import Chunk, Finish, GenerationParams
from keystroke.engine.remote import BlockingModel
from keystroke.engine.remote.wire import ToolCallDelta, Usage
from keystroke.errors import Interrupted


class RemoteChat(Chat):
    """Takes over `model`; `close` closes it."""

    def __init__(self, model: BlockingModel, *, price: Price | None = None, small: bool = False) -> None:
        self._model = model
        self.name = model.model.name
        self.price, self.small = price or Price(), small

    def close(self) -> None:
        self._model.close()

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
        tokens = prompt = cached = 0
        while True:
            part, calls, finish, usage, line = self._once(
                [*messages, *said], tools, max_tokens, interrupt, steering, on_text
            )
            tokens += usage.completion_tokens
            prompt += usage.prompt_tokens
            cached += usage.cached_tokens
            if line is None:
                break
            said += [{"role": "assistant", "content": part}, {"role": "user", "content": line}]
        made = tuple(Call(name, arguments) for _, name, arguments in calls)
        answer: dict[str, Any] = {"role": "assistant", "content": part}
        if calls:
            answer["tool_calls"] = [
                {"id": key, "type": "function", "function": {"name": name, "arguments": arguments}}
                for key, name, arguments in calls
            ]
        said.append(answer)
        cost = self.price.of(prompt, cached, tokens)
        receipt = Receipt("answer", self.name, prompt, cached, tokens, time.perf_counter() - began, cost)
        return Reply(part, made, finish, tuple(said), receipt)

    def _once(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        max_tokens: int,
        interrupt: Interrupt | None,
        steering: Steering | None,
        on_text: Callable[[str], None] | None,
    ) -> tuple[str, list[tuple[str, str, str]], Finish, Usage, str | None]:
        part, finish, usage, line = "", Finish.STOP, Usage(0, 0, 0), None
        calls: dict[int, list[str]] = {}
        stream = self._model.stream_chat(messages, GenerationParams(max_tokens), tools, interrupt)
        for item in stream:
            if isinstance(item, Chunk):
                part += item.text
                if item.text and on_text is not None:
                    on_text(item.text)
                finish = item.finish or finish
                if item.finish is Finish.INTERRUPTED:
                    raise Interrupted("stopped on request")
                if steering is not None and item.finish is None and (line := steering.take()) is not None:
                    stream.close()  # type: ignore[attr-defined]  # it is a generator
                    break
            elif isinstance(item, ToolCallDelta):
                call = calls.setdefault(item.index, [item.id or f"call_{item.index}", "", ""])
                call[1] += item.name or ""
                call[2] += item.arguments
            elif isinstance(item, Usage):
                usage = item
        return part, [(c[0], c[1], c[2] or "{}") for c in calls.values()], finish, usage, line

    def attempts(
        self, asked: Asked, *, interrupt: Interrupt | None = None, steering: Steering | None = None
    ) -> tuple[Outcome, Receipt, Steered]:
        return attempts_in_turn(self, asked, interrupt, steering)


def attempts_in_turn(
    chat: Chat, asked: Asked, interrupt: Interrupt | None, steering: Steering | None
) -> tuple[Outcome, Receipt, Steered]:
    """Attempts one after the other until one passes, by a model whose sessions are not ours to fork."""
    began = time.perf_counter()
    heard, made, total = Steered(), [], Receipt("attempts", chat.name)
    shown: Sequence[Message] = asked.messages
    winner: Attempt | None = None
    for number, sampling in enumerate(samplings(asked.attempts, temperature=asked.temperature)):
        attempt = Attempt(number, sampling)
        reply = chat.reply(shown, max_tokens=asked.max_tokens, interrupt=interrupt, steering=steering)
        heard.lines += [m["content"] for m in reply.said[:-1] if m["role"] == "user"]
        attempt.text = reply.text.removeprefix(asked.opening) if asked.opening else reply.text
        attempt.tokens = [0] * reply.receipt.tokens
        sign = asked.judge.watch()(attempt.text)
        attempt.end, attempt.reason = End.FINISHED, sign.reason
        if sign.go is Go.HOPELESS:
            attempt.end = End.HOPELESS
        elif reply.finish is Finish.LENGTH:
            attempt.end, attempt.reason = End.LENGTH, "it was cut off"
        else:
            attempt.verdict = asked.judge.check(attempt.text, interrupt or Interrupt())
        attempt.seconds = time.perf_counter() - began
        made.append(attempt)
        total = total + reply.receipt
        if asked.on_attempt is not None:
            asked.on_attempt(attempt)
        if attempt.verdict is not None and attempt.verdict.passed and asked.policy is Policy.FIRST:
            winner = attempt
            break
        again = asked.retry(attempt) if asked.retry is not None else None
        shown = again if again is not None and number % 2 == 0 else asked.messages
    why = "it was the first to pass the check"
    if winner is None:
        winner, why = choose(made, asked.judge.key)
    seconds = time.perf_counter() - began
    outcome = Outcome(tuple(made), winner, why, seconds, total.prompt_tokens, 0.0, total.reused_tokens)
    return outcome, total, heard
