"""A model on this machine: one session keeps its KV cache from turn to turn.

Drives the engine on the calling thread. A redirected answer keeps every token computed: the user's line is
inserted after the text written so far.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from keystroke.agent.chat.encoder import ConversationEncoder
from keystroke.agent.chat.model import (
    SMALL_MODEL,
    AnswerOptions,
    AnswerReport,
    CompletionModel,
    ModelAnswer,
    ModelFacts,
    ShowWait,
    WaitState,
)
from keystroke.agent.chat.receipt import Price
from keystroke.agent.chat.steering import Message
from keystroke.engine.generation import Finish, Generation, GenerationParams, GenerationStats
from keystroke.engine.model import Model
from keystroke.engine.speculative import drafter_for
from keystroke.errors import InputError

if TYPE_CHECKING:
    from keystroke.agent.chat.sampling import SamplingRequest, SamplingResult


class LocalChatModel(CompletionModel):
    """`constrain_calls`: the grammar of tool calls is enforced on answers with tools, so none is malformed.
    `owns_model`: `close` closes the engine too."""

    def __init__(
        self,
        model: Model,
        *,
        price: Price | None = None,
        small: bool | None = None,
        constrain_calls: bool = True,
        speculate: bool = True,
        owns_model: bool = False,
        show_wait: ShowWait | None = None,
    ) -> None:
        self.model, self.name = model, model.name
        self.price, self.show_wait = price or Price(), show_wait
        self.is_small = model.engine.info.parameters < SMALL_MODEL if small is None else small
        self.constrain_calls, self._owns_model = constrain_calls, owns_model
        self.parallel_attempts = model.engine.free_batch
        self.joint_attempts = model.engine.max_batch
        self.probe_tools = small is None
        self.session = model.engine.session()
        # One for all answers: it learns from each.
        self.drafter = drafter_for(model.engine, draft=model.draft) if speculate else None

    @cached_property
    def encoder(self) -> ConversationEncoder:
        return ConversationEncoder(self.model)

    def answer(self, messages: Sequence[Message], options: AnswerOptions | None = None) -> ModelAnswer:
        options = options or AnswerOptions()
        if options.tools and self.constrain_calls:
            from keystroke.agent.chat.calls import call_grammar  # here: grammars take time to load

            options = replace(options, params=replace(options.params, constraint=call_grammar(options.tools)))
        return _LocalStream(self, messages, options, self.encoder.encode(messages, options.tools))

    def generate(self, prompt: str, options: AnswerOptions) -> ModelAnswer:
        tokens = self.model.prompt(prompt)
        if not tokens:
            raise InputError("the prompt is empty; write something to continue")
        return _LocalStream(self, (), options, tokens)

    def complete(
        self, prefix: str, suffix: str, options: AnswerOptions, *, lines: int, budget: int
    ) -> tuple[str, AnswerReport]:
        from keystroke.assist.completion import complete

        with self.show_wait(self.wait_state) if self.show_wait is not None else nullcontext():
            done = complete(
                self.model,
                self.session,
                prefix,
                suffix,
                lines=lines,
                budget=budget,
                max_tokens=options.params.max_tokens or 128,
                sampling=options.params.sampling,
                drafter=self.drafter,
                interrupt=options.interrupt,
            )
        stats = done.stats
        assert stats is not None
        seconds = stats.prefill_seconds + stats.decode_seconds
        report = _report(self.name, done.finish, stats, stats.prefill_seconds, seconds)
        return done.text, replace(report, confidence=done.confidence)

    def sample(self, request: SamplingRequest) -> SamplingResult:
        from keystroke.agent.attempts import EngineDecoder
        from keystroke.agent.chat.sampling import run_race

        model = self.model
        prediction = model.tokenizer.encode(request.prediction) if request.prediction else None
        decoder = EngineDecoder(
            model,
            GenerationParams(request.max_tokens, stop=request.stop),
            draft=lambda: drafter_for(model.engine, prediction, draft=model.draft),
        )
        return run_race(request, decoder, self.encoder, self.name, self.price)

    @property
    def facts(self) -> ModelFacts:
        model, info = self.model, self.model.engine.info
        path = str(model.path) if model.path is not None else None
        key = f"{path or self.name}:{info.weight_bytes}"
        return ModelFacts(key, info.parameters, path, model.chat is not None, model.languages)

    def wait_state(self) -> WaitState:
        """How much of the prompt has been read. Called from another thread."""
        return "reading the prompt", self.session.resident, self.session.length

    def close(self) -> None:
        self.session.close()
        if self._owns_model:
            self.model.close()


class _LocalStream(ModelAnswer):
    model: LocalChatModel

    def __init__(
        self,
        model: LocalChatModel,
        messages: Sequence[Message],
        options: AnswerOptions,
        prompt: Sequence[int],
    ) -> None:
        super().__init__(model, messages, options)
        own, drafter = model.model, model.drafter
        if options.prediction and drafter is not None:
            drafter = drafter_for(own.engine, own.tokenizer.encode(options.prediction), draft=own.draft)
        self._generation = Generation(
            own, model.session, prompt, options.params, drafter=drafter, interrupt=options.interrupt
        )

    def wait_state(self) -> WaitState:
        return self.model.wait_state()

    def _pieces(self) -> Generator[str]:
        for chunk in self._generation:
            self.finish = chunk.finish
            yield chunk.text

    def _interject(self, line: str) -> None:
        self._generation.redirect(self.model.encoder.encode_interjection(line))

    def report(self) -> AnswerReport:
        stats, finish = self._generation.stats, self._generation.finish
        return _report(self.model.name, finish, stats, self.first_text_seconds, self.seconds)


def _report(
    name: str, finish: Finish | None, stats: GenerationStats, first: float, seconds: float
) -> AnswerReport:
    return AnswerReport(
        name,
        str(finish or ""),
        stats.prompt_tokens,
        stats.reused,
        stats.tokens,
        first,
        seconds,
        stats.tokens_per_second,
        stats.drafted,
        stats.accepted,
    )
