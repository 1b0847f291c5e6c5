"""Where an answer stands in its grammar: what may come next, and what must.

A function of the tokens consumed and nothing else, so drafts, rollbacks and forks never change what is
allowed. A run of forced tokens is found where it begins and kept to its end, however steps cut it. Never
raises on account of the grammar: where that gives up (a limit, a dead end) `failure` says why, and only the
end of the answer is left.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher

from keystroke.engine.base import Mask
from keystroke.engine.grammar.constraint import FreeText
from keystroke.engine.grammar.vocabulary import MaskCache, Vocabulary

Run = tuple[int, ...]
_TAIL = 256  # tokens that say where free text ends
_IDLE = 4  # automata kept for the answers to come
_LONG = 8  # tokens in a row, each chosen out of most of the vocabulary, after which the next is thought to be


class CompiledGrammar:
    """A compiled grammar, and automata that have walked it: what they learned makes the next walk quicker."""

    def __init__(self, fresh: LLMatcher) -> None:
        self._fresh = fresh  # never consumes
        self.masks = MaskCache(32)
        self._idle: list[LLMatcher] = []

    def automaton(self) -> LLMatcher:
        """One that stands at the beginning."""
        try:
            return self._idle.pop()
        except IndexError:
            return self._fresh.deep_copy()

    def release(self, automaton: LLMatcher) -> None:
        if len(self._idle) < _IDLE and not automaton.is_error() and automaton.reset():
            self._idle.append(automaton)


class Matcher:
    """Serves as a step's `Allowed` for the draft last given to `admit`. `may_end` off keeps the answer from
    ending as long as the grammar lets it go on."""

    __slots__ = (
        "_automaton",
        "_closed",
        "_draft",
        "_free",
        "_grammar",
        "_held_from",
        "_mask",
        "_past",
        "_reached",
        "_run",
        "_streak",
        "_tight",
        "_tokens",
        "_vocabulary",
        "_walked",
        "failure",
        "may_end",
    )

    def __init__(
        self,
        grammar: CompiledGrammar,
        vocabulary: Vocabulary,
        *,
        may_end: bool = True,
        free: FreeText | None = None,
    ) -> None:
        self._grammar = grammar
        self._automaton = grammar.automaton()
        self._vocabulary = vocabulary
        self._tokens: list[int] = []  # consumed, those of a draft being walked included
        self._run: Run | None = None  # forced tokens from where they were found; None: not asked yet
        self._reached = 0  # how many of them have come
        self._past: list[tuple[Run | None, int]] = []  # the two above, before each consumed token
        self._draft: Sequence[int] = ()
        self._walked = 0  # drafted tokens consumed so far
        self._mask: Mask = np.zeros(vocabulary.words, dtype=np.uint32)
        self._free = free
        self._held_from: int | None = None  # tokens before the first place that was not free text
        self._tight: set[int] = set()  # places of this step whose mask leaves out most of the vocabulary
        self._streak = 0  # tokens chosen since the last such place or forced run
        self.may_end = may_end
        self.failure: str | None = None
        self._closed = False

    @property
    def is_finished(self) -> bool:
        """Whether nothing but the end may follow."""
        return self._automaton.is_stopped()

    @property
    def has_failed(self) -> bool:
        """Whether the grammar gave up; `failure` says why."""
        return self.failure is not None

    @property
    def is_accepting(self) -> bool:
        """Whether what was consumed is whole: the answer may end here."""
        return self.failure is None and self._automaton.is_accepting()

    def forced_tokens(self) -> Run:
        """The tokens that must come next, cut the way the tokenizer cuts text; often none."""
        if self._run is None:
            self._run, self._reached = (), 0
            if not self.is_finished:
                self._run = tuple(self._automaton.compute_ff_tokens())
                self._note_failure()
                if self._run and self._held_from is None:
                    self._held_from = len(self._tokens)
        return () if self.has_failed else self._run[self._reached :]

    @property
    def in_free_text(self) -> bool:
        """Whether text is free here, so that nearly every token may follow: one may be chosen first and asked
        about afterwards (`takes`)."""
        return self._free is not None and self._open() and self._automaton.is_accepting()

    @property
    def in_long_string(self) -> bool:
        """Whether the last tokens were all chosen out of most of the vocabulary, so that the next is likely
        to be, too."""
        return self._streak >= _LONG and self._open()

    def _open(self) -> bool:
        """Whether there is a choice here."""
        self._rewind(0)
        return not self.has_failed and not self.forced_tokens() and not self.is_finished

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """How many of `tokens`, from the first on, may follow here."""
        self._rewind(0)
        taken = 0
        for token in tokens:
            must = self.forced_tokens()
            if self.is_finished or (must and token != must[0]) or not (must or self._allows(token)):
                break
            taken += 1
            if token in self._vocabulary.ends:
                break
            self._consume(token)
            self._walked += 1
        self._rewind(0)
        return taken

    def filter_draft(self, draft: Sequence[int], limit: int) -> tuple[list[int], int]:
        """At most `limit` tokens to verify: `draft` as far as the grammar allows it, forced tokens in their
        places. Also how many of them are the drafter's own. Begins a step: rows are about this draft."""
        self._rewind(0)
        admitted: list[int] = []
        for token in draft:
            must = self.forced_tokens()
            if self.is_finished or (must and token != must[0]) or not (must or self._allows(token)):
                break
            self._consume(token)
            self._walked += 1
            admitted.append(token)
        own = len(admitted)
        admitted += self.forced_tokens()
        self._draft = admitted[:limit]
        self._rewind(0)
        return list(self._draft), min(own, limit)

    def row(self, index: int) -> Mask:
        self._walk(index)
        return self._masked()

    def permits(self, index: int, token: int) -> bool:
        self._walk(index)
        must = self.forced_tokens()
        return not self.is_finished and (token == must[0] if must else self._allows(token))

    def advance(self, tokens: Sequence[int]) -> int:
        """These were chosen. Returns how many of them belong to the answer: where nothing but the end may
        follow, the end itself does not, since it was nobody's choice."""
        self._rewind(0)
        taken = 0
        for token in tokens:
            if self.is_finished:
                break
            tight = len(self._tokens) in self._tight or bool(self.forced_tokens())
            self._streak = 0 if tight else self._streak + 1
            self._consume(token)
            taken += 1
        self._tight.clear()
        self._draft = ()
        return taken

    def rollback(self, count: int) -> None:
        """Forget the last `count` tokens."""
        self._rewind(0)
        self._draft = ()
        self._undo(count)
        self._streak = max(self._streak - count, 0)

    def fork(self) -> Matcher:
        """One of its own that stands at the same place."""
        self._rewind(0)
        other = Matcher(self._grammar, self._vocabulary, may_end=self.may_end, free=self._free)
        other._held_from = self._held_from
        other._automaton = self._automaton.deep_copy()
        other._tokens, other._past = list(self._tokens), list(self._past)
        other._run, other._reached = self._run, self._reached
        other.failure, other._streak = self.failure, self._streak
        return other

    def close(self) -> None:
        """The answer has ended; the matcher is not used again. Idempotent."""
        if not self._closed:
            self._closed = True
            self._grammar.release(self._automaton)

    # One token

    def _allows(self, token: int) -> bool:
        if token in self._vocabulary.ends:
            return self.is_accepting and self.may_end
        return token < self._vocabulary.size and self._automaton.validate_tokens([token]) == 1

    def _consume(self, token: int) -> None:
        self.forced_tokens()  # found now or never: what is forced must not depend on who asks, and when
        self._past.append((self._run, self._reached))
        self._tokens.append(token)
        assert self._run is not None
        self._reached += 1
        if self._reached >= len(self._run):
            self._run = None
        self._automaton.consume_token(token)
        self._note_failure()

    def _masked(self) -> Mask:
        mask = self._mask
        must = self.forced_tokens()
        if must:
            mask[:] = 0
            _set(mask, must[0])
        elif self.is_finished:
            self._only_ends()
        else:
            self._compute()
            if self.failure is not None:
                self._only_ends()
            elif not self.may_end and self._automaton.is_accepting():
                self._keep_going()
            if 2 * int.from_bytes(mask.tobytes()).bit_count() < self._vocabulary.size:
                self._tight.add(len(self._tokens))
        return mask

    def _compute(self) -> None:
        """The mask of this place. A place in free text is known by the text's end: computed once for all
        answers, since it takes longer than a step where the vocabulary is large."""
        place = self._place()
        # What has begun may be followed by a token that reaches into what this grammar alone says.
        shared = place is not None and self._free is not None and self._free.begun not in place
        masks = self._vocabulary.masks if shared else self._grammar.masks
        key = (self._free.kind if shared and self._free is not None else (), place)
        known = None if place is None else masks.find(key)
        if known is not None:
            self._mask[:] = known
            return
        self._automaton.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        self._note_failure()
        if place is not None and self.failure is None:
            masks.store(key, self._mask)

    def _place(self) -> bytes | None:
        """Where free text stands; None elsewhere."""
        if self._free is None or self._held_from is not None:
            return None
        if not self._automaton.is_accepting():
            self._held_from = len(self._tokens)
            return None
        pieces = self._vocabulary.bytes
        return self._free.state_key(b"".join([pieces[token] for token in self._tokens[-_TAIL:]]))

    def _only_ends(self) -> None:
        self._mask[:] = 0
        for end in self._vocabulary.ends:
            _set(self._mask, end)

    def _keep_going(self) -> None:
        kept = self._mask.copy()
        for end in self._vocabulary.ends:
            kept[end >> 5] &= np.uint32(~(1 << (end & 31)) & 0xFFFFFFFF)
        if kept.any():
            self._mask[:] = kept

    # Back and forth

    def _walk(self, index: int) -> None:
        """To the place behind the first `index` drafted tokens."""
        self._rewind(index)
        while self._walked < index:
            self._consume(self._draft[self._walked])
            self._walked += 1

    def _rewind(self, walked: int) -> None:
        if self._walked > walked:
            self._undo(self._walked - walked)
            self._walked = walked

    def _undo(self, count: int) -> None:
        if count == 0:
            return
        kept = len(self._tokens) - count
        ended = sum(1 for t in self._tokens[kept:] if t in self._vocabulary.ends)
        self._run, self._reached = self._past[kept]
        if self._held_from is not None and kept < self._held_from:
            self._held_from = None
        del self._past[kept:], self._tokens[kept:]
        if self.failure is None and not ended and self._automaton.rollback(count):
            return
        # It does not come back from an error, nor over an end: go the way again.
        self.failure = None
        self._automaton = self._grammar.automaton()
        self._automaton.consume_tokens(self._tokens)
        self._note_failure()

    def _note_failure(self) -> None:
        if self._automaton.is_error():
            self.failure = self._automaton.get_error().strip().splitlines()[0]


def _set(mask: Mask, token: int) -> None:
    mask[token >> 5] |= np.uint32(1 << (token & 31))
