"""Drafts from a worker: a model beside the target that guesses on while the target verifies.

Tells the worker what the target said, and turns its guesses into the target's tokens; where the two cut
text differently, text crosses between them. It never waits longer than the tokens it hopes for are worth, by
what the worker's pieces, the target's rows and their chances were measured to be, and never longer than one
plain step. Where drafts do not pay it gives the worker no room, and asks again later.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from keystroke.engine.base import GREEDY, Sampling
from keystroke.engine.speculative.base import Drafter
from keystroke.engine.speculative.draft_worker import DraftWorker, Record
from keystroke.engine.speculative.worker_messages import Begin, Piece, Told

AHEAD = 24  # pieces a worker may be ahead: more than is verified at once, few enough to throw away
_LONGEST = 16  # tokens of a draft: what a worker can be ahead by
_RESTS_AFTER = 48  # steps without a draft worth verifying, before the worker rests
_RESTS = 192  # steps
# The last word, sign or gap of an unfinished text: what follows may still change how it is cut.
_UNSETTLED = re.compile(r"\s*(?:\w+|[^\w\s]+)\Z|\s+\Z")


@dataclass(frozen=True, slots=True)
class Price:
    """What the target's steps cost: `cost(rows)` in steps over one row, which takes `unit` seconds (0: not
    known yet)."""

    cost: Callable[[int], float]
    unit: float


class WorkerDrafter(Drafter):
    """For one answer at a time. `propose` takes what is there; `offer` knows what it costs, and may wait."""

    def __init__(self, worker: DraftWorker) -> None:
        self._worker = worker
        self._sampling = GREEDY
        self._number = 0
        self._tokens: list[int] = []  # of the answer
        self._text = b""  # of the answer, where text is drafted
        self._untold = 0  # tokens, or bytes, of the answer that the worker was not told
        self._room = -1  # pieces it was given beyond what it was told
        self._branch = -1
        self._from = 0  # where the guess begins, in units of the answer
        self._guess: list[Piece] = []
        self._kinds: list[int] = []  # of the tokens last offered
        self._idle = 0
        self.waited = 0.0  # seconds, for the last offer

    def choose_by(self, sampling: Sampling) -> None:
        self._sampling = replace(sampling, logprobs=None)

    def begin(self, prompt: Sequence[int]) -> None:
        worker = self._worker
        worker.leave(self._number)
        self._number = worker.enter(self)
        self._tokens, self._text, self._guess = [], b"", []
        self._untold, self._branch, self._from, self._idle = 0, -1, 0, 0
        self._room = AHEAD if worker.ahead else 0
        if worker.tokens:
            worker.send(Begin(self._number, self._room, self._sampling, list(prompt)))
        else:
            before, after = self._around(prompt)
            worker.send(Begin(self._number, self._room, self._sampling, None, before, after))

    def observe(self, tokens: Sequence[int]) -> None:
        if not self._number:
            return
        if self._worker.tokens:
            self._tokens += tokens
            self._untold += len(tokens)
        else:
            text = self._worker.tokenizer.text_bytes(tokens)
            self._text += text
            self._untold += len(text)
        if self._worker.ahead:
            self._give(AHEAD if self._idle <= _RESTS_AFTER else 0)

    def propose(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
        self._worker.listen()
        ready = self._ready()[:limit]
        self._kinds = [kind for _, kind in ready]
        return [token for token, _ in ready]

    def offer(self, limit: int, rate: float, price: Price) -> Sequence[int]:
        """At most `limit` tokens, as many as promise the most; none where that is not more than `rate` tokens
        in the time of a plain step."""
        worker, record = self._worker, self._worker.record
        self.waited, self._kinds = 0.0, []
        self._idle = self._idle + 1 if self._idle < _RESTS_AFTER + _RESTS else 0
        worker.listen()
        limit = min(limit, _LONGEST)
        if not worker.alive or limit < 1 or self._idle > _RESTS_AFTER:
            return ()
        ready = self._ready()
        wanted, _ = self._best(record, ready, limit, rate, price)
        if wanted > len(ready):
            ready = self._awaited(ready, wanted, price)
        known = ready[:limit]
        length, _ = self._best(record, known, len(known), rate, price)
        if not length:
            record.held_back()
            return ()
        self._idle = 0
        self._kinds = [kind for _, kind in known[:length]]
        return [token for token, _ in known[:length]]

    def verified(self, drafted: int, accepted: int, seconds: float) -> None:
        for index, kind in enumerate(self._kinds[: min(accepted + 1, drafted)]):
            self._worker.record.saw(kind, index < accepted)

    def hear(self, piece: Piece) -> None:
        """One more piece has come."""
        if piece.sequence != self._number:
            return
        if piece.branch != self._branch:
            self._branch, self._from, self._guess = piece.branch, piece.at, []
        self._guess.append(piece)
        self._worker.record.took(piece.seconds)

    # What there is

    def _ready(self) -> list[tuple[int, int]]:
        """The guess in the target's tokens, each with its kind, as far as it agrees with what was said."""
        if not self._agrees():
            return []
        self._trim()
        return self._ready_tokens() if self._worker.tokens else self._ready_text()

    def _agrees(self) -> bool:
        """Whether the guess goes on from what was said."""
        if self._worker.tokens:
            said = self._tokens[self._from :]
            guessed = [piece.token for piece in self._guess[: len(said)]]
            return self._from <= len(self._tokens) and guessed == said
        text = b"".join([piece.text for piece in self._guess])
        return self._from <= len(self._text) and text.startswith(self._text[self._from :])

    def _trim(self) -> None:
        """Let go of pieces that have come true: a long answer must not be compared anew at every step."""
        said, sizes = self._said, [self._size(piece) for piece in self._guess]
        done = 0
        while done < len(sizes) and self._from + sizes[done] <= said:
            self._from += sizes[done]
            done += 1
        del self._guess[:done]

    @property
    def _said(self) -> int:
        """The length of the answer, in units."""
        return len(self._tokens) if self._worker.tokens else len(self._text)

    def _size(self, piece: Piece) -> int:
        return 1 if self._worker.tokens else len(piece.text)

    def _ready_tokens(self) -> list[tuple[int, int]]:
        beyond = self._guess[len(self._tokens) - self._from :]
        return [(piece.token, Record.kind(piece.chance)) for piece in beyond if piece.token is not None]

    def _ready_text(self) -> list[tuple[int, int]]:
        text = b"".join([piece.text for piece in self._guess])
        said = self._text[self._from :]
        rest = text[len(said) :].decode("utf-8", "replace").rstrip("\ufffd")
        if "\ufffd" in rest:
            return []
        if not self._guess or not self._guess[-1].last:
            rest = _UNSETTLED.sub("", rest)
        if not rest:
            return []
        tokens = self._worker.tokenizer.encode(rest)
        kinds, pieces = self._kinds_of(tokens, len(said))
        self._worker.record.cut(max(pieces, 1), len(tokens))
        return list(zip(tokens, kinds, strict=True))

    def _kinds_of(self, tokens: Sequence[int], said: int) -> tuple[list[int], int]:
        """A token is as likely as all pieces that begin in it are together."""
        kinds, at, index, end, pieces = [], 0, 0, said, 0
        size = self._worker.tokenizer.token_bytes
        for token in tokens:
            end += len(size(token))
            chance = 1.0
            while index < len(self._guess) and at < end:
                if at >= said:
                    chance *= self._guess[index].chance
                    pieces += 1
                at += len(self._guess[index].text)
                index += 1
            kinds.append(Record.kind(chance))
        return kinds, pieces

    # What it is worth

    def _best(
        self, record: Record, ready: Sequence[tuple[int, int]], limit: int, rate: float, price: Price
    ) -> tuple[int, float]:
        """The length that promises the most tokens in the time of a plain step, waiting for those beyond
        `ready` included, and how many that is; 0 where none promises more than `rate`."""
        best, best_rate = 0, rate
        expected = power = 1.0
        waits = self._waits(price)
        for length in range(1, limit + 1):
            known = length <= len(ready)
            if not known and not waits:
                break
            power *= record.likelihood(ready[length - 1][1]) if known else record.mean
            expected += power
            waiting = 0.0 if known else self._seconds(length - len(ready)) / price.unit
            promised = expected / (price.cost(length + 1) + waiting)
            if promised > best_rate:
                best, best_rate = length, promised
        return best, best_rate

    def _waits(self, price: Price) -> bool:
        """Whether waiting can be reckoned with: how long a piece takes is asked once, blindly."""
        return price.unit > 0.0 and not self._worker.quiet

    def _seconds(self, tokens: int) -> float:
        """What the worker will take for so many more: in text, with the word behind them."""
        record = self._worker.record
        return record.pace * record.pieces * (tokens + (not self._worker.tokens))

    def _awaited(self, ready: list[tuple[int, int]], wanted: int, price: Price) -> list[tuple[int, int]]:
        worker = self._worker
        started = time.monotonic()
        likely = 2.0 * self._seconds(wanted - len(ready)) if worker.record.pace else price.unit
        deadline = started + min(likely, price.unit)
        if not worker.ahead:
            self._give(round(worker.record.pieces * (wanted + 1) + 0.5))
        heard = len(self._guess), self._branch
        while len(ready) < wanted and not self._exhausted() and worker.wait(deadline):
            ready = self._ready()
        self.waited = time.monotonic() - started
        # Until it says something: nobody is waited for twice.
        worker.quiet = (len(self._guess), self._branch) == heard and not self._exhausted()
        return ready

    def _exhausted(self) -> bool:
        """Whether the worker has guessed on from what was said as far as it will."""
        at, beyond = self._from, 0
        for piece in self._guess:
            at += self._size(piece)
            beyond += at > self._said
        return bool(self._guess) and self._agrees() and (self._guess[-1].last or beyond >= self._room)

    # What is told

    def _give(self, room: int) -> None:
        """Tell the worker what it does not know yet."""
        if not self._untold and room == self._room:
            return
        if self._worker.tokens:
            new = self._tokens[len(self._tokens) - self._untold :]
            self._worker.send(Told(self._number, room, tokens=new))
        else:
            text = self._text[len(self._text) - self._untold :]
            self._worker.send(Told(self._number, room, text=text))
        self._untold, self._room = 0, room

    def _around(self, prompt: Sequence[int]) -> tuple[str, str | None]:
        """The text before the answer and, in a prompt that fills a gap, behind it."""
        tokenizer, fim = self._worker.tokenizer, self._worker.fim
        if fim is not None and fim.middle:
            marks = [tokenizer.special(mark) for mark in (fim.prefix, fim.suffix, fim.middle)]
            places = [_last(prompt, mark) for mark in marks]
            if min(places) >= 0 and places[2] == max(places):
                starts = sorted(places)

                def part(place: int) -> str:
                    return tokenizer.decode(prompt[place + 1 : starts[starts.index(place) + 1]])

                return part(places[0]), part(places[1])
        return tokenizer.decode(prompt), None


def _last(tokens: Sequence[int], wanted: int | None) -> int:
    for index in range(len(tokens) - 1, -1, -1):
        if tokens[index] == wanted:
            return index
    return -1
