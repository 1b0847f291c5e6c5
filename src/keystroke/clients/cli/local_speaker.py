"""A model on this machine, answering through one session that keeps its KV cache from turn to turn.

Turns conversations into tokens with the model's own template and drives generations. One thread at
a time, as the engine demands.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from keystroke.assist.completion import complete
from keystroke.clients.cli.answering import Answer, Facts, Message, Report, Speaker
from keystroke.config import Settings
from keystroke.engine.base import Interrupt
from keystroke.engine.generation import Finish, Generation, GenerationParams, GenerationStats
from keystroke.engine.library import Progress
from keystroke.engine.model import Model
from keystroke.engine.speculative import Drafter, drafter_for
from keystroke.engine.templates import ChatTemplate
from keystroke.errors import InputError, UnsupportedModel

if TYPE_CHECKING:
    from keystroke.clients.cli.console import Console
    from keystroke.clients.cli.invocation import Invocation

# Two marks that no conversation holds: they show where a template puts the texts around a redirection.
_SAID, _LINE = "\ue3f0\ue3f1", "\ue3f2\ue3f3"


class LocalSpeaker(Speaker):
    def __init__(self, model: Model, settings: Settings, console: Console | None = None) -> None:
        self.model = model
        self.console = console
        self.name = model.name
        self.session = model.engine.session()
        # One for all answers: it learns from each.
        enabled = settings.speculation.enabled
        self.drafter: Drafter | None = drafter_for(model.engine, draft=model.draft) if enabled else None

    @classmethod
    def load(cls, name: str, run: Invocation, progress: Progress) -> LocalSpeaker:
        from keystroke.engine.load import load_model

        return cls(load_model(name, run.settings, progress), run.settings, run.console)

    def chat(
        self,
        messages: Sequence[Message],
        params: GenerationParams,
        interrupt: Interrupt,
        prediction: str | None = None,
    ) -> Answer:
        prompt = self._template().tokens(self.model.tokenizer, messages)
        return LocalAnswer(self, prompt, params, interrupt, prediction)

    def generate(self, prompt: str, params: GenerationParams, interrupt: Interrupt) -> Answer:
        tokens = self.model.prompt(prompt)
        if not tokens:
            raise InputError("the prompt is empty; write something to go on from")
        return LocalAnswer(self, tokens, params, interrupt)

    def complete(
        self,
        prefix: str,
        suffix: str,
        lines: int,
        budget: int,
        params: GenerationParams,
        interrupt: Interrupt,
    ) -> tuple[str, Report]:
        with self._reading():
            return self._completed(prefix, suffix, lines, budget, params, interrupt)

    def _completed(
        self,
        prefix: str,
        suffix: str,
        lines: int,
        budget: int,
        params: GenerationParams,
        interrupt: Interrupt,
    ) -> tuple[str, Report]:
        done = complete(
            self.model,
            self.session,
            prefix,
            suffix,
            lines=lines,
            budget=budget,
            max_tokens=params.max_tokens or 128,
            sampling=params.sampling,
            drafter=self.drafter,
            interrupt=interrupt,
        )
        assert done.stats is not None
        seconds = done.stats.prefill_seconds + done.stats.decode_seconds
        return done.text, self.report(done.stats, done.finish, done.stats.prefill_seconds, seconds)

    def check_chat(self) -> None:
        self._template()

    @property
    def facts(self) -> Facts:
        model, info = self.model, self.model.engine.info
        path = str(model.path) if model.path is not None else None
        return Facts(
            f"{path or self.name}:{info.weight_bytes}",
            info.parameters,
            path,
            model.chat is not None,
            model.languages,
        )

    def waiting(self) -> tuple[str, int, int]:
        """How much of what the session holds has been read. Asked by a thread of its own."""
        return "reading the prompt", self.session.resident, self.session.length

    def _reading(self) -> AbstractContextManager[None]:
        return nullcontext() if self.console is None else self.console.waiting(self.waiting)

    def close(self) -> None:
        self.session.close()
        self.model.engine.close()
        if self.model.draft is not None:
            self.model.draft.close()

    def splice(self, messages: Sequence[Message], line: str) -> list[int]:
        """The tokens that end the answer under way, say `line`, and open the next answer."""
        shown = [*messages[:-1], {**messages[-1], "content": _SAID}, {"role": "user", "content": _LINE}]
        _, _, after = self._template().render(shown).rpartition(_SAID)
        before, found, behind = after.partition(_LINE)
        if not found:
            raise UnsupportedModel(
                f"the chat template of {self.name} cannot take a line in mid-answer; stop it first"
            )
        encode = self.model.tokenizer.encode
        return [*encode(before, special=True), *encode(line), *encode(behind, special=True)]

    def report(self, stats: GenerationStats, finish: Finish | None, first: float, seconds: float) -> Report:
        return Report(
            model=self.name,
            finish=str(finish or ""),
            prompt_tokens=stats.prompt_tokens,
            reused_tokens=stats.reused,
            tokens=stats.tokens,
            first_text_seconds=first,
            seconds=seconds,
            tokens_per_second=stats.tokens_per_second,
            drafted=stats.drafted,
            accepted=stats.accepted,
        )

    def _template(self) -> ChatTemplate:
        if self.model.chat is None:
            raise UnsupportedModel(
                f"{self.name} has no chat template; use `keystroke generate` or another model"
            )
        return self.model.chat


class LocalAnswer(Answer):
    def __init__(
        self,
        speaker: LocalSpeaker,
        prompt: Sequence[int],
        params: GenerationParams,
        interrupt: Interrupt,
        prediction: str | None = None,
    ) -> None:
        super().__init__(speaker.console)
        self._speaker = speaker
        drafter = speaker.drafter
        if prediction and drafter is not None:
            drafter = drafter_for(
                speaker.model.engine, speaker.model.tokenizer.encode(prediction), draft=speaker.model.draft
            )
        self._generation = Generation(speaker.model, speaker.session, prompt, params, drafter, interrupt)

    def waiting(self) -> tuple[str, int, int]:
        return self._speaker.waiting()

    def _pieces(self) -> Iterator[str]:
        for chunk in self._generation:
            self.finish = chunk.finish
            yield chunk.text

    def redirect(self, messages: Sequence[Message], line: str) -> None:
        self._generation.redirect(self._speaker.splice(messages, line))

    def report(self) -> Report:
        stats = self._generation.stats
        return self._speaker.report(stats, self._generation.finish, self.first_text_seconds, self.seconds)
