"""Compiles constraints into matchers, once per vocabulary, in bounded time and memory.

One thread compiles, with a stack deep enough for the longest chain of rules within the size limits; callers
wait at most `COMPILE_TIMEOUT`. Compiled grammars are cached, least recently used first out. Errors name the
place in the grammar.
"""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate

from llguidance import LLMatcher, LLParserLimits

from keystroke.engine.base import ModelInfo
from keystroke.engine.grammar.constraint import Constraint
from keystroke.engine.grammar.matcher import CompiledGrammar, Matcher
from keystroke.engine.grammar.schema import endless_pointer, failing_pointer
from keystroke.engine.grammar.vocabulary import Vocabulary, vocabulary_for
from keystroke.engine.tokenizer import ByteTokenizer, Tokenizer
from keystroke.errors import GrammarError

COMPILE_TIMEOUT = 10.0  # seconds; real grammars take milliseconds
MAX_COMPILED = 128  # compiled grammars, a few hundred kilobytes each
_END = 256
_BYTES = ByteTokenizer({"<end>": _END}, eos=_END)  # for texts outside any model
_STACK = 256 << 20  # bytes of address space
_LIMITS = LLParserLimits(
    max_lexer_states=50_000,  # about 2 kB each, per answer
    max_grammar_size=200_000,
    verbose_errors=False,  # keep callers' schemas out of the log
)


def matcher_for(
    constraint: Constraint, tokenizer: Tokenizer, info: ModelInfo, *, may_end: bool = True
) -> Matcher:
    """A matcher at the start of `constraint`. Compiles it if it is not cached, which takes milliseconds, or a
    second for the first grammar of a tokenizer. Raises GrammarError or UnsupportedModel."""
    vocabulary = vocabulary_for(tokenizer, info.eos)
    return Matcher(_compile(constraint, vocabulary), vocabulary, may_end=may_end, free=constraint.free)


def prepare(constraint: Constraint | None, tokenizer: Tokenizer, info: ModelInfo) -> None:
    """Compile `constraint`, or with None only load the vocabulary, so that a later `matcher_for` does not
    block. Blocks; raises as `matcher_for` does."""
    vocabulary = vocabulary_for(tokenizer, info.eos)
    if constraint is not None:
        _compile(constraint, vocabulary)


def matches_grammar(constraint: Constraint, text: str, *, timeout: float = COMPILE_TIMEOUT) -> bool:
    """Whether `text` matches `constraint` completely. Also False if the grammar is invalid or takes longer
    than `timeout` seconds to compile."""
    try:
        vocabulary = vocabulary_for(_BYTES, frozenset({_END}))
        held = Matcher(_compile(constraint, vocabulary, timeout), vocabulary)
    except GrammarError:
        return False
    tokens = _BYTES.encode(text)
    try:
        return held.advance(tokens) == len(tokens) and held.is_accepting
    finally:
        held.close()


def _compile(constraint: Constraint, vocabulary: Vocabulary, timeout: float | None = None) -> CompiledGrammar:
    future = _queue.submit(constraint, vocabulary)
    timeout = COMPILE_TIMEOUT if timeout is None else timeout
    try:
        return future.result(timeout)
    except TooLate:
        raise GrammarError.of(
            constraint.origin, f"takes longer than {timeout:g} s to compile; make it simpler."
        ) from None
    except _CompileError as refused:
        place = f" at {refused.place}" if refused.place else ""
        raise GrammarError.of(constraint.origin, f"cannot be used{place}: {refused}.") from None


class _CompileError(Exception):
    """The compiler's message, and the place in the grammar."""

    def __init__(self, why: str, place: str | None = None) -> None:
        super().__init__(why)
        self.place = place


def compile_grammar(constraint: Constraint, vocabulary: Vocabulary) -> CompiledGrammar:
    """Needs a deep stack. Raises _CompileError."""
    matcher = _try_compile(constraint.grammar, vocabulary)
    if isinstance(matcher, str):
        place = failing_pointer(constraint.parts, lambda part: _compile_failure(part, vocabulary))
        raise _CompileError(matcher, place)
    place = endless_pointer(constraint.parts)
    if place is not None:
        raise _CompileError("nothing can meet it: it contains itself without end", place)
    return CompiledGrammar(matcher)


def _compile_failure(part: str, vocabulary: Vocabulary) -> str | None:
    tried = _try_compile(f'{{"grammars":[{part}]}}', vocabulary)
    return tried if isinstance(tried, str) else None


def _try_compile(grammar: str, vocabulary: Vocabulary) -> LLMatcher | str:
    """The compiled grammar with its first mask computed, or the error."""
    matcher = LLMatcher(vocabulary.library, grammar, log_level=0, limits=_LIMITS)
    if matcher.is_error():
        return _summarise(matcher.get_error())
    if not matcher.is_stopped():  # the grammar may only match the empty text
        matcher.compute_bitmask()
        if matcher.is_error():
            return "nothing can meet it"
    return matcher


def _summarise(error: str) -> str:
    """The compiler's message on one line."""
    lines = [line.strip() for line in error.strip().splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("<")]
    if not lines or lines[0].startswith("panic"):
        return "it is too large"
    reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), "")
    first = lines[0].rstrip(":")
    return f"{first[:300]}: {reason}" if reason and reason not in first else first[:300]


class _CompileQueue:
    """Cache of compiled grammars by vocabulary and constraint, and the thread that compiles them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compiled: OrderedDict[tuple[int, Constraint], tuple[Vocabulary, Future[CompiledGrammar]]] = (
            OrderedDict()
        )
        self._waiting: queue.SimpleQueue[tuple[Constraint, Vocabulary, Future[CompiledGrammar]]] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None

    def submit(self, constraint: Constraint, vocabulary: Vocabulary) -> Future[CompiledGrammar]:
        key = (id(vocabulary), constraint)  # the entry keeps the vocabulary alive: its id stays unique
        with self._lock:
            found = self._compiled.get(key)
            if found is not None:
                self._compiled.move_to_end(key)
                return found[1]
            future: Future[CompiledGrammar] = Future()
            self._compiled[key] = (vocabulary, future)
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
            if self._thread is None:
                self._thread = _deep_thread(self._work)
        self._waiting.put((constraint, vocabulary, future))
        return future

    def _work(self) -> None:
        while True:
            constraint, vocabulary, future = self._waiting.get()
            try:
                future.set_result(compile_grammar(constraint, vocabulary))
            except BaseException as error:
                future.set_exception(error)
            del constraint, vocabulary, future


def _deep_thread(work: object) -> threading.Thread:
    before = threading.stack_size(_STACK)
    try:
        thread = threading.Thread(target=work, name="grammar-compiler", daemon=True)  # type: ignore[arg-type]
        thread.start()
    finally:
        threading.stack_size(before)
    return thread


_queue = _CompileQueue()
