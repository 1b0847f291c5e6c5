"""A model on this machine as a task talks with it: one session that keeps its KV from turn to turn.

Law: turns conversations into tokens with the model's own template and drives the engine on the calling
thread. A steered answer keeps every token computed: the user's line is spliced in behind what was written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keystroke.agent.attempts import Attempt, Outcome, Race, samplings
from keystroke.agent.chat.calls import call_grammar, read_calls
from keystroke.agent.chat.chat import SMALL, Asked, Chat, Message, Reply, Steered, Steering
from keystroke.agent.chat.receipt import Price, Receipt
from keystroke.engine.base import Interrupt
from keystroke.engine.generation import Finish, Generation, GenerationParams
from keystroke.engine.model import Model
from keystroke.engine.speculative import drafter_for
from keystroke.errors import Interrupted, UnsupportedModel

# Marks that no conversation holds: they show where a template puts the texts around a line.
_SAID, _LINE = "\ue3f0\ue3f1", "\ue3f2\ue3f3"


class LocalChat(Chat):
    """`held`: an answer with tools is held to the grammar of calls, so it cannot be malformed."""

    def __init__(
        self, model: Model, *, price: Price | None = None, small: bool | None = None, held: bool = True
    ) -> None:
        if model.chat is None:
            raise UnsupportedModel(
                f"{model.name} has no chat template, so it follows no instructions; choose another model"
            )
        self.model, self._template = model, model.chat
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
        tokenizer = self.model.tokenizer
        prompt = self._template.tokens(tokenizer, messages, tools=list(tools) or None)
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
                generation.redirect(self.splice(line))
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

    def splice(self, line: str, opening: str = "") -> list[int]:
        """The tokens that end the answer under way, say `line`, and open the next answer."""
        shown = [
            {"role": "user", "content": "."},
            {"role": "assistant", "content": _SAID},
            {"role": "user", "content": _LINE},
        ]
        _, _, after = self._template.render(shown).rpartition(_SAID)
        before, found, behind = after.partition(_LINE)
        if not found:
            raise UnsupportedModel(
                f"the chat template of {self.name} cannot take a line in mid-answer; stop it first"
            )
        encode = self.model.tokenizer.encode
        return [*encode(before, special=True), *encode(line), *encode(behind, special=True), *encode(opening)]

    # ── several attempts ──────────────────────────────────────────────────────────────────────

    def prompt(self, messages: Sequence[Message], opening: str = "") -> list[int]:
        tokens = self._template.tokens(self.model.tokenizer, messages)
        return [*tokens, *self.model.tokenizer.encode(opening)] if opening else tokens

    def attempts(
        self, asked: Asked, *, interrupt: Interrupt | None = None, steering: Steering | None = None
    ) -> tuple[Outcome, Receipt, Steered]:
        began = time.perf_counter()
        model, heard = self.model, Steered()
        prediction = model.tokenizer.encode(asked.prediction) if asked.prediction else None

        def retry(failed: Attempt) -> list[int] | None:
            shown = asked.retry(failed) if asked.retry is not None else None
            return None if shown is None else self.prompt(shown, asked.opening)

        def steer() -> list[int] | None:
            line = steering.take() if steering is not None else None
            if line is None:
                return None
            heard.lines.append(line)
            return self.splice(line, asked.opening)

        race = Race(
            model,
            self.prompt(asked.messages, asked.opening),
            samplings(asked.attempts, temperature=asked.temperature, seed=asked.seed),
            asked.judge,
            params=GenerationParams(asked.max_tokens, stop=asked.stop),
            workers=asked.workers,
            policy=asked.policy,
            interrupt=interrupt,
            retry=retry,
            draft=lambda: drafter_for(model.engine, prediction, draft=model.draft),
            steer=steer,
            on_attempt=asked.on_attempt,
        )
        outcome = race.run()
        receipt = Receipt(
            "attempts",
            self.name,
            outcome.prompt_tokens,
            outcome.reused_tokens,
            outcome.tokens,
            time.perf_counter() - began,
            self.price.of(outcome.prompt_tokens, outcome.reused_tokens, outcome.tokens),
            len(outcome.attempts),
        )
        return outcome, receipt, heard
