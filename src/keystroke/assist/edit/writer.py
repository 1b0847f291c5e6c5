"""Writers turn messages into streamed text: a local model, or a remote chat model.

`prediction` is text that the answer probably repeats; it can make the answer faster and never changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from keystroke.assist.edit.blocks import chat
from keystroke.errors import Interrupted, UsageError

if TYPE_CHECKING:  # imported late: a patch or an undo needs no engine
    from keystroke.engine.base import Interrupt
    from keystroke.engine.generation import Generation, GenerationParams
    from keystroke.engine.model import Model
    from keystroke.engine.speculative import Drafter

Messages = Sequence[Mapping[str, str]]


class Writer(Protocol):
    def write(self, messages: Messages, prediction: str | None) -> Iterator[str]: ...


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
        self.last: Generation | None = None

    def write(self, messages: Messages, prediction: str | None) -> Iterator[str]:
        from keystroke.engine.generation import Finish, Generation, GenerationParams
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
            params = self._params or GenerationParams()
            self.last = Generation(
                self.model, session, prompt, params, drafter=drafter, interrupt=self._interrupt
            )
            for chunk in self.last:
                yield chunk.text
                if chunk.finish is Finish.INTERRUPTED:
                    raise Interrupted("stopped on request; nothing was changed")


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
