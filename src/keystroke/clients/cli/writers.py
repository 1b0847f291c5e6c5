"""Opens the model that writes changes: the one named, or the one configured for instructions.

Warns if the model is small, and refuses one that does not follow instructions with advice on how to configure
another. It never chooses a server by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from keystroke.clients.cli.open_model import generation_params, open_model
from keystroke.engine.backends import choose_backend
from keystroke.engine.builtin import BUILT_IN, BuiltInModel, stated_parameters
from keystroke.engine.library import ModelLibrary
from keystroke.engine.machine import expected_speed, look_up_machine, recommend_deep
from keystroke.engine.roles import Role, chat_model_advice, instruction_models, require_model
from keystroke.errors import ConfigError, Interrupted, KeystrokeError

if TYPE_CHECKING:
    from keystroke.agent.chat.model import CompletionModel
    from keystroke.assist.edit import RewriteQuestion, Writer
    from keystroke.assist.edit.writer import Messages
    from keystroke.clients.cli.options import Invocation
    from keystroke.engine.base import Interrupt
    from keystroke.engine.generation import GenerationParams

SMALL = 3_000_000_000  # parameters; below this, search/replace blocks are seldom correct
SLOW_TOKENS = 20.0  # tokens a second below which the user is told what to expect


@contextmanager
def open_writer(
    name: str | None, run: Invocation, interrupt: Interrupt, *, faster: Sequence[str] = ()
) -> Iterator[Writer]:
    """The writer for the named model or the one for instructions. `faster`: what the user can do if the model
    is slow. Raises NotFound and ConfigError."""
    with open_model(name or require_model(Role.DEEP, run.settings), run) as model:
        facts, advice = model.facts, chat_model_advice(run.settings)
        if not facts.chat:
            raise ConfigError(f"{model.name} completes code but does not follow instructions; {advice}")
        notes: list[str] = []
        if facts.parameters is not None and facts.parameters < SMALL:
            hint = "" if model.name in instruction_models(run.settings) else f". For a larger one, {advice}"
            size = f"{stated_parameters(model.name, facts.parameters) / 1e9:.1f} billion parameters"
            notes.append(f"{model.name} is a small model ({size}): check its edits closely{hint}")
        if (slow := slow_model_note(model.name, run, faster)) is not None:
            notes.append(slow)

        def before_first() -> None:
            for note in notes:
                run.console.note(note)
            notes.clear()

        yield ChatModelWriter(model, generation_params(run.settings), interrupt, before_first)


def slow_model_note(name: str, run: Invocation, faster: Sequence[str]) -> str | None:
    """One sentence if the model is slow on this machine, with what is `faster`; None if it is not slow, or
    that is not known. `keystroke setup` is named only if it recommends a faster model."""
    settings = run.settings
    library = ModelLibrary(settings.paths.models)
    try:
        entry = library.get(name)
        if entry.traits is None or choose_backend(settings.engine.kind).name != "onnx":
            return None
    except KeystrokeError:
        return None  # remote, or a path
    parameters = entry.traits.parameters
    model = BUILT_IN.get(name) or BuiltInModel(
        name, "", "", entry.size, "", active=parameters / 1e9, read_bytes=entry.size
    )
    machine = look_up_machine(settings.paths.models, measure=parameters > 3e8)
    speed = expected_speed(model, machine, "onnx")
    if speed is None or speed >= SLOW_TOKENS:
        return None
    best = recommend_deep(BUILT_IN.values(), machine, library.names())
    if best is not None and best.model.name != name and (best.speed or 0.0) > speed:
        faster = (*faster, f"`keystroke setup`, which recommends {best.model.name}")
    advice = f"; faster: {', or '.join(faster)}" if faster else ""
    return f"{name} writes about {speed:.0f} tokens a second here, so this may take a while{advice}"


class ChatModelWriter:
    """Streams the answers of a chat model. `before_first` is called before the model is asked: many edits
    are computed without it."""

    def __init__(
        self,
        model: CompletionModel,
        params: GenerationParams,
        interrupt: Interrupt,
        before_first: Callable[[], None] = lambda: None,
    ) -> None:
        self._before_first = before_first
        self.facts = model.facts
        self.name = self.facts.id
        self._model, self._params, self._interrupt = model, params, interrupt
        # A larger model, or one whose answers are paid for, is asked once.
        small = self.facts.parameters is not None and self.facts.parameters < SMALL
        self.parallel = model.joint_attempts if small else 0
        self.candidates = model.parallel_attempts if small else 0

    def sample(self, messages: Messages, temperature: float, seed: int) -> Iterator[str]:
        from keystroke.assist.edit.writer import sampled_params

        yield from self._write(messages, sampled_params(self._params, temperature, seed), "")

    def write_all(self, questions: Sequence[RewriteQuestion]) -> list[str]:
        """The answers to several questions: in one batch of a model in this process, otherwise by requests at
        the same time."""
        from keystroke.agent.chat.local import LocalChatModel
        from keystroke.assist.edit.writer import answer_together, sampled_params

        self._before_first()
        if isinstance(self._model, LocalChatModel):
            return answer_together(self._model.model, questions, self._params, self._interrupt)

        def answer(question: RewriteQuestion) -> str:
            params = sampled_params(self._params, question.temperature, question.seed)
            ended, text = question.end_detector(), ""
            for piece in self._write(question.messages, params, question.prediction):
                text += piece
                if ended(piece):
                    break
            return text

        with ThreadPoolExecutor(len(questions), "candidate") as pool:
            return list(pool.map(answer, questions))

    def write(self, messages: Messages, prediction: str | None) -> Iterator[str]:
        yield from self._write(messages, self._params, prediction or "")

    def _write(self, messages: Messages, params: GenerationParams, prediction: str) -> Iterator[str]:
        from keystroke.agent.chat.model import AnswerOptions

        self._before_first()
        options = AnswerOptions(params, prediction=prediction, yields=True, interrupt=self._interrupt)
        with self._model.answer(messages, options) as answer:
            yield from answer
        if self._interrupt.is_set:
            raise Interrupted("stopped on request; nothing was changed")


def supports_blocks(writer: Writer, run: Invocation) -> bool:
    """Whether a writer's model writes search/replace blocks: as its card says (`"edits": "blocks"` or
    "regions"), no if it is small, otherwise as a probe finds the first time."""
    from keystroke.assist.edit.probe import writes_blocks
    from keystroke.engine.card import card_value

    assert isinstance(writer, ChatModelWriter)
    facts = writer.facts
    stated = card_value(Path(facts.path), "edits") if facts.path is not None else None
    if stated in ("blocks", "regions"):
        return stated == "blocks"
    if facts.parameters is not None and facts.parameters < SMALL:
        return False
    return writes_blocks(writer, writer.name, run.settings.paths.cache)
