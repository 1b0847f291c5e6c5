"""The state of an answer in its grammar: which tokens may come next, and which must.

It depends on the consumed tokens alone, so that drafts, rollbacks and forks never change what is allowed. A
run of forced tokens is computed once, where it begins. Matching never raises: if the grammar fails (a limit,
a dead end), `failure` says why and only the end of the answer is allowed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher

from keystroke.engine.base import Mask
from keystroke.engine.grammar.constraint import FreeText
from keystroke.engine.grammar.vocabulary import MaskCache, Vocabulary

Run = tuple[int, ...]
_TAIL = 256  # tokens that determine the state in free text
_IDLE = 4  # automata kept for reuse
_LONG = 8  # unrestricted tokens in a row after which the next is expected to be unrestricted too


class CompiledGrammar:
    """A compiled grammar and a pool of automata, whose caches make the next answer faster."""

    def __init__(self, fresh: LLMatcher) -> None:
        self._fresh = fresh  # never consumes tokens
        self.masks = MaskCache(32)
        self._idle: list[LLMatcher] = []

    def automaton(self) -> LLMatcher:
        """An automaton in the start state."""
        try:
            return self._idle.pop()
        except IndexError:
            return self._fresh.deep_copy()

    def release(self, automaton: LLMatcher) -> None:
        if len(self._idle) < _IDLE and not automaton.is_error() and automaton.reset():
            self._idle.append(automaton)


class Matcher:
    """Serves as a step's `AllowedTokens` for the draft last passed to `filter_draft`. Without `may_end` the
    answer only ends where the grammar allows nothing else."""

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
        self._tokens: list[int] = []  # consumed, including those of the draft
        self._run: Run | None = None  # the current run of forced tokens; None: not computed yet
        self._reached = 0  # how many of them are consumed
        self._past: list[tuple[Run | None, int]] = []  # the two above before each consumed token
        self._draft: Sequence[int] = ()
        self._walked = 0  # drafted tokens consumed so far
        self._mask: Mask = np.zeros(vocabulary.words, dtype=np.uint32)
        self._free = free
        self._held_from: int | None = None  # tokens before the first state outside free text
        self._tight: set[int] = set()  # positions of this step whose mask excludes most of the vocabulary
        self._streak = 0  # tokens since the last such position or forced run
        self.may_end = may_end
        self.failure: str | None = None
        self._closed = False

    @property
    def is_finished(self) -> bool:
        """Whether only the end may follow."""
        return self._automaton.is_stopped()

    @property
    def has_failed(self) -> bool:
        """Whether the grammar failed; `failure` says why."""
        return self.failure is not None

    @property
    def is_accepting(self) -> bool:
        """Whether the answer may end here."""
        return self.failure is None and self._automaton.is_accepting()

    def forced_tokens(self) -> Run:
        """The tokens that must come next, as the tokenizer would encode their text; often none."""
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
        """Whether nearly every token may follow, so that one can be chosen first and checked afterwards
        (`takes`)."""
        return self._free is not None and self._open() and self._automaton.is_accepting()

    @property
    def in_long_string(self) -> bool:
        """Whether the last tokens were all nearly unrestricted, so that the next is likely to be."""
        return self._streak >= _LONG and self._open()

    def _open(self) -> bool:
        """Whether there is a choice here."""
        self._rewind(0)
        return not self.has_failed and not self.forced_tokens() and not self.is_finished

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """The number of leading `tokens` that may follow here."""
        self._rewind(0)
        taken = 0
        for token in tokens:
            if not self._may_follow(token):
                break
            taken += 1
            if token in self._vocabulary.ends:
                break
            self._consume(token)
            self._walked += 1
        self._rewind(0)
        return taken

    def filter_draft(self, draft: Sequence[int], limit: int) -> tuple[list[int], int]:
        """The draft to verify, at most `limit` tokens: `draft` as far as the grammar allows it, then forced
        tokens. Also returns how many are from `draft`. Starts a step: `row` refers to this draft."""
        self._rewind(0)
        admitted: list[int] = []
        for token in draft:
            if not self._may_follow(token):
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
        return self._compute_mask()

    def permits(self, index: int, token: int) -> bool:
        self._walk(index)
        return self._may_follow(token)

    def advance(self, tokens: Sequence[int]) -> int:
        """Consume chosen tokens. Returns how many of them belong to the answer: an end token that was the
        only choice does not."""
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
        """Undo the last `count` tokens."""
        self._rewind(0)
        self._draft = ()
        self._undo(count)
        self._streak = max(self._streak - count, 0)

    def fork(self) -> Matcher:
        """An independent matcher in the same state."""
        self._rewind(0)
        other = Matcher(self._grammar, self._vocabulary, may_end=self.may_end, free=self._free)
        other._held_from = self._held_from
        other._automaton = self._automaton.deep_copy()
        other._tokens, other._past = list(self._tokens), list(self._past)
        other._run, other._reached = self._run, self._reached
        other.failure, other._streak = self.failure, self._streak
        return other

    def close(self) -> None:
        """Release the automaton; the matcher must not be used again. Idempotent."""
        if not self._closed:
            self._closed = True
            self._grammar.release(self._automaton)

    # One token

    def _may_follow(self, token: int) -> bool:
        must = self.forced_tokens()
        return not self.is_finished and (token == must[0] if must else self._allows(token))

    def _allows(self, token: int) -> bool:
        if token in self._vocabulary.ends:
            return self.is_accepting and self.may_end
        return token < self._vocabulary.size and self._automaton.validate_tokens([token]) == 1

    def _consume(self, token: int) -> None:
        self.forced_tokens()  # computed here, so that it does not depend on when it is requested
        self._past.append((self._run, self._reached))
        self._tokens.append(token)
        assert self._run is not None
        self._reached += 1
        if self._reached >= len(self._run):
            self._run = None
        self._automaton.consume_token(token)
        self._note_failure()

    def _compute_mask(self) -> Mask:
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
        """Compute the mask. In free text it is cached by the end of the text for all answers, since computing
        it takes longer than a step for a large vocabulary."""
        place = self._state_key()
        # After `begun`, a token may extend into text that only this grammar allows.
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

    def _state_key(self) -> bytes | None:
        """The key of the state in free text; None elsewhere."""
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
        """Move to the state after the first `index` tokens of the draft."""
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
        # An automaton cannot roll back over an error or an end: replay the tokens.
        self.failure = None
        self._automaton = self._grammar.automaton()
        self._automaton.consume_tokens(self._tokens)
        self._note_failure()

    def _note_failure(self) -> None:
        if self._automaton.is_error():
            self.failure = self._automaton.get_error().strip().splitlines()[0]


def _set(mask: Mask, token: int) -> None:
    mask[token >> 5] |= np.uint32(1 << (token & 31))
