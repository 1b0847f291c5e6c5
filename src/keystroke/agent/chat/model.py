"""The interface of a model that answers, shared by the command line, tasks and evaluation.

`ChatModel.answer` streams one answer; `reply` and `sample` are built on it. One thread iterates a stream;
interrupts and steering may come from any thread. A line that the user adds during an answer takes effect at
the next token, and the text written before it stays in the conversation.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Self

from keystroke.agent.chat.receipt import Price, StepReceipt
from keystroke.agent.chat.steering import Message, Steering
from keystroke.engine.base import Interrupt
from keystroke.engine.generation import Finish, GenerationParams
from keystroke.errors import Interrupted, UnsupportedModel

if TYPE_CHECKING:
    from keystroke.agent.chat.sampling import SamplingRequest, SamplingResult
    from keystroke.agent.tools import ToolInvocation
    from keystroke.engine.remote.wire import ToolCallDelta

SMALL_MODEL = 3_000_000_000  # parameters; below, a model gets a region to rewrite instead of tools to call

WaitState = tuple[str, int, int]  # what a stream waits for, how much of it is done, of how much (0: unknown)
ShowWait = Callable[[Callable[[], WaitState | None]], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """`prediction` is text that the answer probably repeats; it affects speed, never the text. `yields`: in a
    gateway, questions in a conversation go first."""

    params: GenerationParams = field(default_factory=GenerationParams)
    tools: Sequence[Mapping[str, Any]] = ()
    prediction: str = ""
    yields: bool = False
    interrupt: Interrupt = field(default_factory=Interrupt)


@dataclass(frozen=True, slots=True)
class AnswerReport:
    """The cost of an answer. Token counts are 0 where a server does not report them. `confidence`: see
    `assist.completion.Completion`."""

    model: str
    finish: str
    prompt_tokens: int = 0
    reused_tokens: int = 0
    tokens: int = 0
    first_text_seconds: float = 0.0
    seconds: float = 0.0
    tokens_per_second: float = 0.0
    drafted: int = 0
    accepted: int = 0
    confidence: float | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete answer. `messages` are those it adds to the conversation: its own text and, between its
    parts, the lines that the user added."""

    text: str
    calls: tuple[ToolInvocation, ...]
    finish: Finish
    messages: tuple[Message, ...]
    receipt: StepReceipt


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """`id` distinguishes a model's weights from other weights of the same name."""

    id: str
    parameters: int | None = None
    path: str | None = None
    chat: bool = True
    languages: frozenset[str] | None = None  # those it was trained on, where its card names them


class ModelAnswer(ABC):
    """One answer as it is generated. `text` is the answer since the last redirection; `messages` is the
    conversation before it. Iterate for the pieces of text; the other attributes are final afterwards."""

    def __init__(self, model: ChatModel, messages: Sequence[Message], options: AnswerOptions) -> None:
        self.model, self.options = model, options
        self.messages: list[Message] = list(messages)
        self.text = ""
        self.finish: Finish | None = None
        self.prompt_tokens = self.reused_tokens = self.tokens = self.drafted = self.accepted = 0
        self._calls: dict[int, list[str]] = {}  # id, name and arguments of the server's own tool calls
        self._started = self._ended = time.perf_counter()
        self._first: float | None = None
        self.pieces = self._timed_pieces()  # empty ones too: they mark a moment at which to redirect

    def __iter__(self) -> Iterator[str]:
        return (piece for piece in self.pieces if piece)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop generating. Idempotent; called by the thread that iterates."""
        self.pieces.close()

    def redirect(self, line: str) -> None:
        """Continue with `line` as the user's next message; what was written stays in the conversation. Called
        by the thread that iterates, before the answer has finished."""
        self._interject(line)
        self.messages += [{"role": "assistant", "content": self.text}, {"role": "user", "content": line}]
        self.text, self.finish = "", None
        self._calls.clear()

    @property
    def final_message(self) -> Message:
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self._calls:
            message["tool_calls"] = [
                {"id": key, "type": "function", "function": {"name": name, "arguments": arguments or "{}"}}
                for key, name, arguments in self._calls.values()
            ]
        return message

    @property
    def calls(self) -> tuple[ToolInvocation, ...]:
        """The tool calls of the answer: the server's own, or those written in its text."""
        if not self.options.tools:
            return ()
        from keystroke.agent.chat.calls import parse_calls
        from keystroke.agent.tools import ToolInvocation

        if not self._calls:
            return parse_calls(self.text).calls
        return tuple(ToolInvocation(name, arguments or "{}") for _, name, arguments in self._calls.values())

    @property
    def complete_calls(self) -> tuple[ToolInvocation, ...]:
        """Those of `calls` whose arguments are complete while the answer is still being written."""
        from keystroke.agent.chat.calls import complete_calls
        from keystroke.agent.tools import ToolInvocation

        if not self._calls:
            return complete_calls(self.text)
        complete = takewhile(lambda call: _is_json(call[2]), self._calls.values())
        return tuple(ToolInvocation(name, arguments) for _, name, arguments in complete)

    @property
    def seconds(self) -> float:
        return self._ended - self._started

    @property
    def first_text_seconds(self) -> float:
        return (self._first or self._ended) - self._started

    def report(self) -> AnswerReport:
        decode = self.seconds - self.first_text_seconds
        return AnswerReport(
            self.model.name,
            str(self.finish or Finish.STOP),
            self.prompt_tokens,
            self.reused_tokens,
            self.tokens,
            self.first_text_seconds,
            self.seconds,
            self.tokens / decode if self.tokens and decode > 0 else 0.0,
            self.drafted,
            self.accepted,
        )

    def wait_state(self) -> WaitState | None:
        """What the first piece waits for. Called from another thread."""
        return None

    @abstractmethod
    def _pieces(self) -> Generator[str]:
        """Generate the answer; sets `finish` with its last piece."""

    @abstractmethod
    def _interject(self, line: str) -> None:
        """Make `_pieces` continue after `line`. Text that was written before it takes effect is added to
        `text`."""

    def _add_call_delta(self, delta: ToolCallDelta) -> None:
        call = self._calls.setdefault(delta.index, [delta.id or f"call_{delta.index}", "", ""])
        call[1] += delta.name or ""
        call[2] += delta.arguments

    def _timed_pieces(self) -> Generator[str]:
        with closing(self._pieces()) as pieces:
            show = self.model.show_wait
            with show(self.wait_state) if show is not None else nullcontext():
                piece = next(pieces, None)
            while piece is not None:
                self._ended = time.perf_counter()
                if piece and self._first is None:
                    self._first = self._ended
                self.text += piece
                yield piece
                piece = next(pieces, None)


class RequestStream(ModelAnswer):
    """An answer of a server without sessions: a redirection ends the request and sends the longer
    conversation."""

    _redirected = False

    @abstractmethod
    def _request(self) -> Generator[str]:
        """Send `messages` and yield the text of the response."""

    def _interject(self, line: str) -> None:
        self._redirected = True

    def _pieces(self) -> Generator[str]:
        while True:
            self._redirected = False
            with closing(self._request()) as pieces:
                for piece in pieces:
                    yield piece
                    if self._redirected:
                        break
            if not self._redirected:
                return


class ChatModel(ABC):
    """`is_small`: the model rewrites regions instead of calling tools. `show_wait` displays what a stream
    waits for until its first piece."""

    name: str
    is_small: bool = False
    probe_tools: bool = False  # test whether it calls tools well before it gets them
    parallel_attempts: int = 1  # attempts that cost about as much as one
    joint_attempts: int = 1  # attempts that together take about as long as two, or less
    price: Price = Price()
    show_wait: ShowWait | None = None

    @abstractmethod
    def answer(self, messages: Sequence[Message], options: AnswerOptions | None = None) -> ModelAnswer:
        """The next turn of a conversation. Raises UnsupportedModel where the model has no chat template,
        ContextOverflow, and what an engine or a server raises."""

    def reply(
        self,
        messages: Sequence[Message],
        options: AnswerOptions | None = None,
        *,
        steering: Steering | None = None,
        on_text: Callable[[str], None] | None = None,
        on_call: Callable[[ToolInvocation], None] | None = None,
    ) -> Reply:
        """A complete answer. `on_call` gets each tool call as soon as its arguments are complete. Raises
        Interrupted and what `answer` raises."""
        called: set[ToolInvocation] = set()
        with self.answer(messages, options) as stream:
            for piece in stream.pieces:
                if piece and on_text is not None:
                    on_text(piece)
                if on_call is not None and (not piece or "}" in piece):
                    for call in stream.complete_calls:
                        if call not in called:
                            called.add(call)
                            on_call(call)
                if (
                    steering is not None
                    and stream.finish is None
                    and (line := steering.next_line()) is not None
                ):
                    stream.redirect(line)
        if stream.finish is Finish.INTERRUPTED:
            raise Interrupted("stopped on request")
        report = stream.report()
        usage = report.prompt_tokens, report.reused_tokens, report.tokens
        receipt = StepReceipt("answer", self.name, *usage, report.seconds, self.price.cost(*usage))
        added = (*stream.messages[len(messages) :], stream.final_message)
        return Reply(stream.text, stream.calls, stream.finish or Finish.STOP, added, receipt)

    def sample(self, request: SamplingRequest) -> SamplingResult:
        """Several checked attempts at one answer: here in sequence until one passes; models whose
        sessions can be forked make them at the same time."""
        from keystroke.agent.attempts import (
            Attempt,
            AttemptEnd,
            RaceResult,
            StopPolicy,
            WatchState,
            select_attempt,
        )
        from keystroke.agent.chat.sampling import SamplingResult

        started = time.perf_counter()
        lines: list[str] = []
        attempts: list[Attempt] = []
        total = StepReceipt("attempts", self.name)
        messages = request.messages
        winner: Attempt | None = None
        for number, sampling in enumerate(request.samplings()):
            attempt = Attempt(number, sampling)
            params = GenerationParams(request.max_tokens, sampling=sampling)
            options = AnswerOptions(params, interrupt=request.interrupt)
            with request.busy:
                reply = self.reply(messages, options, steering=request.steering)
            lines += [message["content"] for message in reply.messages[:-1] if message["role"] == "user"]
            attempt.text = reply.text.removeprefix(request.opening)
            attempt.tokens = [0] * reply.receipt.tokens
            watched = request.checker.watch()(attempt.text)
            attempt.end, attempt.reason = AttemptEnd.FINISHED, watched.reason
            if watched.state is WatchState.HOPELESS:
                attempt.end = AttemptEnd.HOPELESS
            elif reply.finish is Finish.LENGTH:
                attempt.end, attempt.reason = AttemptEnd.LENGTH, "it was cut off"
            else:
                attempt.check_result = request.checker.check(attempt.text, request.interrupt)
            attempt.seconds = time.perf_counter() - started
            attempts.append(attempt)
            total = total + reply.receipt
            if request.on_attempt is not None:
                request.on_attempt(attempt)
            if attempt.passed and request.policy is StopPolicy.FIRST:
                winner = attempt
                break
            retry = request.retry(attempt) if request.retry is not None else None
            messages = retry if retry is not None and number % 2 == 0 else request.messages
        reason = "it was the first to pass the check"
        if winner is None:
            winner, reason = select_attempt(attempts, request.checker.key)
        seconds = time.perf_counter() - started
        usage = total.prompt_tokens, 0.0, total.reused_tokens
        return SamplingResult(RaceResult(tuple(attempts), winner, reason, seconds, *usage), total, lines)

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Release what is held. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class NoModel(ChatModel):
    """Stands in for a model in a task that needs none; asking it raises UnsupportedModel."""

    name, is_small = "no model", True

    def answer(self, messages: Sequence[Message], options: AnswerOptions | None = None) -> ModelAnswer:
        raise UnsupportedModel("this task was begun without a model; name one with --model")


class CompletionModel(ChatModel):
    """A chat model that also continues text and completes code at a cursor."""

    @abstractmethod
    def generate(self, prompt: str, options: AnswerOptions) -> ModelAnswer:
        """Text that continues `prompt`."""

    @abstractmethod
    def complete(
        self, prefix: str, suffix: str, options: AnswerOptions, *, lines: int, budget: int
    ) -> tuple[str, AnswerReport]:
        """The text to insert between `prefix` and `suffix`, at most `lines` lines (0: as many as fit), with
        `budget` tokens of context."""

    @property
    @abstractmethod
    def facts(self) -> ModelFacts: ...

    def check_chat(self) -> None:
        """Raise UnsupportedModel where the model has no chat template."""
        if not self.facts.chat:
            raise UnsupportedModel(no_chat_template(self.name))

    def check_language(self, language: str | None) -> None:
        """Raise UnsupportedModel where the model's card lists languages and this one is not among them."""
        trained = self.facts.languages
        if trained is not None and language is not None and language not in trained:
            from keystroke.analysis.syntax import language_name  # here: grammars take time to load

            known = ", ".join(sorted({language_name(name) for name in trained}))
            raise UnsupportedModel(
                f"{self.name} was trained on {known}, not on {language}; use --model NAME, for example one "
                "that `keystroke models add coder` installs"
            )


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def no_chat_template(name: str) -> str:
    return f"{name} has no chat template; use another model, or `keystroke generate` to continue a text"
