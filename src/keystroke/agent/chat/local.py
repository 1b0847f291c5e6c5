"""A model on this machine as a task talks with it: one session that keeps its KV from turn to turn.

Turns conversations into tokens with the model's own template and drives the engine on the calling
thread. A steered answer keeps every token computed: the user's line is spliced in behind what was written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keystroke.agent.attempts import EngineDecoder, Outcome
from keystroke.agent.chat.calls import call_grammar, read_calls
from keystroke.agent.chat.chat import SMALL, Asked, Chat, Message, Reply, Steered, Steering
from keystroke.agent.chat.receipt import Price, Receipt
from keystroke.agent.chat.several import race_for, receipt_of
from keystroke.agent.chat.wording import Wording
from keystroke.engine.base import Interrupt
from keystroke.engine.generation import Finish, Generation, GenerationParams
from keystroke.engine.model import Model
from keystroke.engine.speculative import drafter_for
from keystroke.errors import Interrupted


class LocalChat(Chat):
    """`held`: an answer with tools is held to the grammar of calls, so it cannot be malformed."""

    def __init__(
        self, model: Model, *, price: Price | None = None, small: bool | None = None, held: bool = True
    ) -> None:
        self.model, self.wording = model, Wording(model)
        self.name = model.name
        self.price = price or Price()
        self.small = model.engine.info.parameters < SMALL if small is None else small
        self._held = held
        self._session = model.engine.session()

    def close(self) -> None:
        self._session.close()

    # ── one answer ────────────────────────────────────────────────────────────────────────────

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
        prompt = self.wording.prompt(messages, tools)
        drafter = drafter_for(self.model.engine, draft=self.model.draft)
        params = GenerationParams(
            max_tokens, constraint=call_grammar(tools) if tools and self._held else None
        )
        generation = Generation(self.model, self._session, prompt, params, drafter, interrupt)
        said: list[Message] = []
        part = ""
        for chunk in generation:
            part += chunk.text
            if on_text is not None and chunk.text:
                on_text(chunk.text)
            if chunk.finish is Finish.INTERRUPTED:
                raise Interrupted("stopped on request")
            line = steering.take() if steering is not None and chunk.finish is None else None
            if line is not None:
                said += [{"role": "assistant", "content": part}, {"role": "user", "content": line}]
                generation.redirect(self.wording.splice(line))
                part = ""
        stats = generation.stats
        receipt = Receipt(
            "answer",
            self.name,
            stats.prompt_tokens,
            stats.reused,
            stats.tokens,
            time.perf_counter() - began,
            self.price.of(stats.prompt_tokens, stats.reused, stats.tokens),
        )
        read = read_calls(part) if tools else None
        said.append({"role": "assistant", "content": part})
        calls = read.calls if read is not None else ()
        return Reply(part, calls, generation.finish or Finish.STOP, tuple(said), receipt)

    # ── several attempts ──────────────────────────────────────────────────────────────────────

    def attempts(
        self, asked: Asked, *, interrupt: Interrupt | None = None, steering: Steering | None = None
    ) -> tuple[Outcome, Receipt, Steered]:
        began = time.perf_counter()
        model = self.model
        prediction = model.tokenizer.encode(asked.prediction) if asked.prediction else None
        decoder = EngineDecoder(
            model,
            GenerationParams(asked.max_tokens, stop=asked.stop),
            draft=lambda: drafter_for(model.engine, prediction, draft=model.draft),
        )
        race, heard = race_for(asked, decoder, self.wording, interrupt, steering)
        outcome = race.run()
        return outcome, receipt_of(outcome, self.name, self.price, time.perf_counter() - began), heard
