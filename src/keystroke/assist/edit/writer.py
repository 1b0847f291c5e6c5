"""Writers turn messages into streamed text: a local model, or a remote chat model.

`prediction` is text that the answer probably repeats; it can make the answer faster and never changes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from keystroke.assist.edit.blocks import chat
from keystroke.errors import Interrupted, UsageError

if TYPE_CHECKING:  # imported late: a patch or an undo needs no engine
    from keystroke.assist.edit.task import RewriteQuestion
    from keystroke.engine.base import Interrupt
    from keystroke.engine.generation import Generation, GenerationParams
    from keystroke.engine.model import Model
    from keystroke.engine.speculative import Drafter

Messages = Sequence[Mapping[str, str]]


class Writer(Protocol):
    def write(self, messages: Messages, prediction: str | None) -> Iterator[str]: ...


@runtime_checkable
class SamplingWriter(Protocol):
    """A writer that can also sample an answer."""

    def sample(self, messages: Messages, temperature: float, seed: int) -> Iterator[str]: ...


@runtime_checkable
class BatchWriter(Protocol):
    """A writer that answers `parallel` questions at once; `candidates` of them cost about as much as one."""

    parallel: int
    candidates: int

    def write_all(self, questions: Sequence[RewriteQuestion]) -> list[str]: ...


def read_answer(writer: Writer, system: str, user: str, enough: Callable[[str], bool]) -> str:
    """The answer to one question, up to the piece with which it is `enough`."""
    answer = ""
    for piece in writer.write(chat(system, user), None):
        answer += piece
        if enough(answer):
            break
    return answer


class ModelWriter:
    """A loaded model with a chat template. Call it on the engine's thread."""

    def __init__(
        self, model: Model, params: GenerationParams | None = None, interrupt: Interrupt | None = None
    ) -> None:
        if model.chat is None:
            raise UsageError(
                f"{model.name} has no chat template, so it cannot follow instructions; choose another model"
            )
        self.model, self._chat = model, model.chat
        self.name = f"{model.path or model.name}:{model.engine.info.weight_bytes}"
        self._params = params
        self._interrupt = interrupt
        self.parallel, self.candidates = model.engine.max_batch, model.engine.free_batch
        self.last: Generation | None = None

    def sample(self, messages: Messages, temperature: float, seed: int) -> Iterator[str]:
        return self._generate(messages, None, sampled_params(self._params_or_default(), temperature, seed))

    def write_all(self, questions: Sequence[RewriteQuestion]) -> list[str]:
        return answer_together(self.model, questions, self._params_or_default(), self._interrupt)

    def write(self, messages: Messages, prediction: str | None) -> Iterator[str]:
        return self._generate(messages, prediction, self._params_or_default())

    def _params_or_default(self) -> GenerationParams:
        from keystroke.engine.generation import GenerationParams

        return self._params or GenerationParams()

    def _generate(
        self, messages: Messages, prediction: str | None, params: GenerationParams
    ) -> Iterator[str]:
        from keystroke.engine.generation import Finish, Generation
        from keystroke.engine.speculative import AdaptiveDrafter, FileDrafter, SuffixDrafter, verify_cost

        tokenizer = self.model.tokenizer
        prompt = self._chat.direct_tokens(tokenizer, messages)
        drafters: list[Drafter] = [SuffixDrafter()]
        if prediction:
            drafters.insert(0, FileDrafter(tokenizer.encode(prediction)))
        engine = self.model.engine
        # Drafts are used only as long as they save more than verifying them costs.
        drafter = AdaptiveDrafter(drafters, verify_cost(engine))
        with engine.session() as session:
            self.last = Generation(
                self.model, session, prompt, params, drafter=drafter, interrupt=self._interrupt
            )
            for chunk in self.last:
                yield chunk.text
                if chunk.finish is Finish.INTERRUPTED:
                    raise Interrupted("stopped on request; nothing was changed")


def sampled_params(params: GenerationParams, temperature: float, seed: int) -> GenerationParams:
    """The parameters with this temperature; 0 is greedy."""
    from keystroke.engine.base import GREEDY, Sampling

    sampling = Sampling(temperature, top_p=0.95, seed=seed + 1) if temperature else GREEDY
    return replace(params, sampling=sampling)


def answer_together(
    model: Model,
    questions: Sequence[RewriteQuestion],
    params: GenerationParams,
    interrupt: Interrupt | None = None,
) -> list[str]:
    """The answers to several questions, generated in one batch. Call it on the engine's thread. Raises
    Interrupted."""
    from keystroke.engine.generation import Finish, Generation

    assert model.chat is not None
    answers = ["" for _ in questions]
    with ExitStack() as sessions:
        running: dict[int, tuple[Generation, Callable[[str], bool]]] = {}
        for number, question in enumerate(questions):
            prompt = model.chat.direct_tokens(model.tokenizer, question.messages)
            session = sessions.enter_context(model.engine.session())
            chosen = sampled_params(params, question.temperature, question.seed)
            generation = Generation(model, session, prompt, chosen, interrupt=interrupt)
            generation.prefill()  # the common beginning is read once
            running[number] = generation, question.end_detector()
        while running:
            if interrupt is not None:
                interrupt.check()
            steps = {number: generation.next_step() for number, (generation, _) in running.items()}
            requests = {number: step for number, step in steps.items() if step is not None}
            for number in steps.keys() - requests.keys():
                del running[number]  # its longest length is reached
            began = time.perf_counter()
            results = model.engine.step_many(list(requests.values()))
            spent = time.perf_counter() - began
            for (number, request), step in zip(requests.items(), results, strict=True):
                generation, ended = running[number]
                chunk = generation.apply_step(step, spent, len(request.draft))
                answers[number] += chunk.text
                if chunk.finish is Finish.INTERRUPTED:
                    raise Interrupted("stopped on request; nothing was changed")
                if chunk.finish is not None or ended(chunk.text):
                    del running[number]
    return answers


class ChatStream(Protocol):
    """A remote chat model, such as `keystroke.engine.remote.BlockingModel`."""

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: GenerationParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        interrupt: Interrupt | None = None,
    ) -> Iterable[object]: ...


class RemoteWriter:
    """A remote chat model. Not every server accepts a prediction, so none is sent."""

    def __init__(
        self,
        model: ChatStream,
        params: GenerationParams | None = None,
        interrupt: Interrupt | None = None,
        name: str = "",
    ) -> None:
        self.name = name
        self._model, self._params, self._interrupt = model, params, interrupt

    def write(self, messages: Messages, prediction: str | None) -> Iterator[str]:
        from keystroke.engine.generation import Chunk, Finish

        for item in self._model.stream_chat(messages, self._params, None, self._interrupt):
            if isinstance(item, Chunk):
                yield item.text
                if item.finish is Finish.INTERRUPTED:
                    raise Interrupted("stopped on request; nothing was changed")
