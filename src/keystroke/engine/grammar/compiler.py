"""From a constraint to matchers: compiled once for a vocabulary, in bounded time and memory.

Compiling happens in one thread of its own, whose stack is deep enough for the longest chain of rules
that the size limits let through; whoever asks waits at most `PATIENCE`. What was compiled is kept, the least
recently used let go. What is wrong with a grammar is said here, in one sentence that names the place.
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
_BYTES = ByteTokenizer({"<end>": _END}, eos=_END)  # for texts that no model's tokens spell
_STACK = 256 << 20  # bytes of address space; pages are taken as they are used
_LIMITS = LLParserLimits(
    max_lexer_states=50_000,  # about 2 kB each, of every answer
    max_grammar_size=200_000,
    verbose_errors=False,  # a caller's schema is not for the log
)


def matcher_for(
    constraint: Constraint, tokenizer: Tokenizer, info: ModelInfo, *, may_end: bool = True
) -> Matcher:
    """A matcher at the beginning of `constraint`'s language. Compiles what is not kept, which takes
    milliseconds, and a second more for a tokenizer's first. Raises GrammarError or UnsupportedModel."""
    vocabulary = vocabulary_for(tokenizer, info.eos)
    return Matcher(_compiled(constraint, vocabulary), vocabulary, may_end=may_end, free=constraint.free)


def prepare(constraint: Constraint | None, tokenizer: Tokenizer, info: ModelInfo) -> None:
    """Have `constraint` compiled, or with None only the vocabulary read, so that a later `matcher_for` does
    not wait. Raises as `matcher_for` does. For a thread that may wait."""
    vocabulary = vocabulary_for(tokenizer, info.eos)
    if constraint is not None:
        _compiled(constraint, vocabulary)


def matches_grammar(constraint: Constraint, text: str, *, patience: float = COMPILE_TIMEOUT) -> bool:
    """Whether `text` is a whole text of `constraint`'s language, byte by byte. False, too, where the grammar
    is refused or takes longer than `patience` to compile."""
    try:
        vocabulary = vocabulary_for(_BYTES, frozenset({_END}))
        held = Matcher(_compiled(constraint, vocabulary, patience), vocabulary)
    except GrammarError:
        return False
    tokens = _BYTES.encode(text)
    try:
        return held.advance(tokens) == len(tokens) and held.is_accepting
    finally:
        held.close()


def _compiled(
    constraint: Constraint, vocabulary: Vocabulary, patience: float | None = None
) -> CompiledGrammar:
    promise = _queue.submit(constraint, vocabulary)
    patience = COMPILE_TIMEOUT if patience is None else patience
    try:
        return promise.result(patience)
    except TooLate:
        raise GrammarError(
            f"{constraint.origin} takes longer than {patience:g} s to compile; make it simpler.",
            param=constraint.origin,
        ) from None
    except _CompileError as refused:
        place = f" at {refused.place}" if refused.place else ""
        raise GrammarError(
            f"{constraint.origin} cannot be used{place}: {refused}.", param=constraint.origin
        ) from None


class _CompileError(Exception):
    """Why a grammar cannot be compiled, in the compiler's words, and where."""

    def __init__(self, why: str, place: str | None = None) -> None:
        super().__init__(why)
        self.place = place


def compile_grammar(constraint: Constraint, vocabulary: Vocabulary) -> CompiledGrammar:
    """Needs a deep stack. Raises _Refused."""
    matcher = _try_compile(constraint.grammar, vocabulary)
    if isinstance(matcher, str):
        place = failing_pointer(constraint.parts, lambda part: _failure(part, vocabulary))
        raise _CompileError(matcher, place)
    place = endless_pointer(constraint.parts)
    if place is not None:
        raise _CompileError("nothing can meet it: it contains itself without end", place)
    return CompiledGrammar(matcher)


def _failure(part: str, vocabulary: Vocabulary) -> str | None:
    tried = _try_compile(f'{{"grammars":[{part}]}}', vocabulary)
    return tried if isinstance(tried, str) else None


def _try_compile(grammar: str, vocabulary: Vocabulary) -> LLMatcher | str:
    """The compiled grammar, its first mask known to it; or why there is none."""
    matcher = LLMatcher(vocabulary.library, grammar, log_level=0, limits=_LIMITS)
    if matcher.is_error():
        return _summarise(matcher.get_error())
    if not matcher.is_stopped():  # an empty text may be all there is
        matcher.compute_bitmask()
        if matcher.is_error():
            return "nothing can meet it"
    return matcher


def _summarise(error: str) -> str:
    """The compiler's complaint on one line: its first, and the last of a complaint about a pattern."""
    lines = [line.strip() for line in error.strip().splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("<")]
    if not lines or lines[0].startswith("panic"):
        return "it is too large"
    reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), "")
    first = lines[0].rstrip(":")
    return f"{first[:300]}: {reason}" if reason and reason not in first else first[:300]


class _CompileQueue:
    """What was compiled, by vocabulary and text; what is being compiled, once for all who ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[int, Constraint], tuple[Vocabulary, Future[CompiledGrammar]]] = (
            OrderedDict()
        )
        self._asked: queue.SimpleQueue[tuple[Constraint, Vocabulary, Future[CompiledGrammar]]] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None

    def submit(self, constraint: Constraint, vocabulary: Vocabulary) -> Future[CompiledGrammar]:
        key = (id(vocabulary), constraint)  # the entry holds the vocabulary: its number stays its own
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found[1]
            promise: Future[CompiledGrammar] = Future()
            self._kept[key] = (vocabulary, promise)
            while len(self._kept) > MAX_COMPILED:
                self._kept.popitem(last=False)
            if self._thread is None:
                self._thread = _deep_thread(self._work)
        self._asked.put((constraint, vocabulary, promise))
        return promise

    def _work(self) -> None:
        while True:
            constraint, vocabulary, promise = self._asked.get()
            try:
                promise.set_result(compile_grammar(constraint, vocabulary))
            except BaseException as error:
                promise.set_exception(error)
            del constraint, vocabulary, promise


def _deep_thread(work: object) -> threading.Thread:
    before = threading.stack_size(_STACK)
    try:
        thread = threading.Thread(target=work, name="grammar-compiler", daemon=True)  # type: ignore[arg-type]
        thread.start()
    finally:
        threading.stack_size(before)
    return thread


_queue = _CompileQueue()
