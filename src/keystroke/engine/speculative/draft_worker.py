"""A worker: a model in a process of its own that drafts for another, seen from the other's side.

Nothing here blocks but a wait with a deadline, and nothing raises once the worker has said that it is
ready: one that is killed, hangs or lags is a drafter without a guess. It ends with this process, whose end of
the pipe is the only one. Belongs to the thread of the engine it drafts for.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import msgspec

from keystroke.engine.speculative.worker_messages import (
    Failed,
    Forget,
    Frames,
    Load,
    Piece,
    Ready,
    ToWorker,
    framed,
    from_worker,
)
from keystroke.errors import ConfigError

if TYPE_CHECKING:
    from keystroke.engine.fim import FimTemplate
    from keystroke.engine.tokenizer import Tokenizer

log = logging.getLogger("keystroke.engine")

START = 120.0  # seconds for a model to be loaded, converted the first time
LIVES = 4  # processes that are started before a worker that keeps dying is left alone
UNREAD = 8 << 20  # bytes that wait for a worker before it is taken for dead
_MODULE = "keystroke.engine.speculative.worker_process"


class Hears(Protocol):
    def hear(self, piece: Piece) -> None: ...


class DraftWorker:
    """`ahead`: it drafts while the target verifies, which needs hardware of its own; otherwise only while the
    target waits for it."""

    def __init__(
        self,
        load: Load,
        tokenizer: Tokenizer,
        fim: FimTemplate | None = None,
        *,
        ahead: bool = True,
    ) -> None:
        """`tokenizer` and `fim` are the target's."""
        self.tokenizer, self.fim, self.ahead = tokenizer, fim, ahead
        self.name = load.model
        self.tokens = False  # whether both share a vocabulary, so that tokens are drafted and not text
        self.quiet = False  # it was waited for in vain, and has said nothing since
        self.record = Record()
        self._load = load
        self._process: subprocess.Popen[bytes] | None = None
        self._lives = LIVES
        self._closed = False
        self._frames = Frames()
        self._outgoing = bytearray()
        self._forgotten: deque[int] = deque()  # told by whoever collects the garbage, in any thread
        self._sequences: weakref.WeakValueDictionary[int, Hears] = weakref.WeakValueDictionary()
        self._numbers = 0

    def start(self, probe: str, vocabulary: int) -> None:
        """Start the process and wait until its model is loaded. `vocabulary`: the target's size. Raises
        ConfigError."""
        self._spawn()
        found: Ready | Failed | None = None
        deadline = time.monotonic() + START
        while found is None and self.alive and self._poll(deadline):
            for message in self._read():
                if isinstance(message, Ready | Failed):
                    found = message
        if not isinstance(found, Ready):
            self.close()
            reason = found.reason if found is not None else "its process did not start"
            raise ConfigError(
                f"the draft model {self.name} cannot be run: {reason}; "
                "correct speculation.draft_model or set speculation.draft_worker to off"
            )
        self.name = found.name
        self.tokens = found.vocabulary == vocabulary and found.probe == self.tokenizer.encode(probe)

    @property
    def alive(self) -> bool:
        return self._process is not None and not self._closed

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def enter(self, who: Hears) -> int:
        """A number for a sequence that `who` is to hear about; forgotten with it. Starts a worker anew that
        has died."""
        if self._process is None and not self._closed and self._lives > 0:
            self._spawn()
        self._numbers += 1
        number = self._numbers
        self._sequences[number] = who
        weakref.finalize(who, self._forgotten.append, number).atexit = False
        return number

    def leave(self, number: int) -> None:
        if self._sequences.pop(number, None) is not None:
            self._forgotten.append(number)

    def send(self, message: ToWorker) -> None:
        """Never blocks: what the pipe does not take now goes with the next."""
        if not self.alive:
            return
        while self._forgotten:
            self._outgoing += framed(Forget(self._forgotten.popleft()))
        self._outgoing += framed(message)
        self._flush()

    def listen(self) -> None:
        """Give out what has arrived."""
        self._flush()
        for message in self._read():
            if isinstance(message, Piece):
                self.quiet = False
                if (who := self._sequences.get(message.sequence)) is not None:
                    who.hear(message)
            elif isinstance(message, Failed):
                self._end(message.reason)

    def wait(self, deadline: float) -> bool:
        """Until something arrives, which is then given out; False: it did not by then."""
        if not self.alive or not self._poll(deadline):
            return False
        self.listen()
        return self.alive

    def close(self) -> None:
        """End the process. Idempotent."""
        self._closed = True
        self._end("closed")

    def _spawn(self) -> None:
        self._lives -= 1
        self._frames, self._outgoing = Frames(), bytearray()
        self.quiet = False
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # Ctrl-C at a terminal is its parent's to act upon
        )
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        self._process = process
        weakref.finalize(self, _kill, process)  # also when the interpreter ends
        self.send(self._load)

    def _end(self, why: str) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        _kill(process)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        if not self._closed:
            log.warning("the worker that drafts with %s has ended (%s); going on without it", self.name, why)

    def _flush(self) -> None:
        process = self._process
        if process is None or process.stdin is None or not self._outgoing:
            return
        try:
            while self._outgoing:
                del self._outgoing[: os.write(process.stdin.fileno(), self._outgoing[: 1 << 16])]
        except BlockingIOError:
            if len(self._outgoing) > UNREAD:
                self._end("it no longer reads")
        except (OSError, ValueError):
            self._end("its pipe is closed")

    def _read(self) -> Sequence[Ready | Failed | Piece]:
        process = self._process
        found: list[Ready | Failed | Piece] = []
        if process is None or process.stdout is None:
            return found
        try:
            while data := os.read(process.stdout.fileno(), 1 << 16):
                found += [from_worker.decode(payload) for payload in self._frames.feed(data)]
            self._end("it was killed" if process.poll() in (-signal.SIGKILL, None) else "it failed")
        except BlockingIOError:
            pass
        except (OSError, ValueError, msgspec.DecodeError):
            self._end("it speaks in riddles")
        return found

    def _poll(self, deadline: float) -> bool:
        process = self._process
        left = deadline - time.monotonic()
        if process is None or process.stdout is None or left <= 0:
            return False
        ready = select.poll()  # select() knows no descriptor above 1023, and a server has many
        ready.register(process.stdout.fileno(), select.POLLIN)
        if self._outgoing and process.stdin is not None:
            ready.register(process.stdin.fileno(), select.POLLOUT)
        while left > 0:
            events = dict(ready.poll(max(left * 1e3, 0.05)))
            if process.stdout.fileno() in events:
                return True
            self._flush()
            if process.stdin is not None and self._process is process and not self._outgoing:
                with suppress(KeyError):
                    ready.unregister(process.stdin.fileno())
            if self._process is not process:
                return False
            left = deadline - time.monotonic()
        return False


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(OSError):
        process.kill()


class Record:
    """How often guesses came true, by what the drafting model thought of them; kept over many answers."""

    EDGES = (0.3, 0.6, 0.8, 0.9, 0.97)
    _PRIOR = (0.15, 0.4, 0.6, 0.75, 0.85, 0.92)
    _WEIGHT, _DECAY, _FORGET = 4.0, 0.985, 0.995

    def __init__(self) -> None:
        self._right = [0.0] * len(self._PRIOR)
        self._seen = [0.0] * len(self._PRIOR)
        self._mean = 0.6
        self.pace = 0.0  # seconds a piece takes the worker
        self.pieces = 1.0  # that a token of the target's takes

    @classmethod
    def kind(cls, chance: float) -> int:
        return sum(chance >= edge for edge in cls.EDGES)

    @property
    def mean(self) -> float:
        """How likely a token that is still to be guessed will be right."""
        return self._mean

    def likelihood(self, kind: int) -> float:
        """How likely a token that was guessed so is right, given that those before it were."""
        hits = self._right[kind] + self._WEIGHT * self._PRIOR[kind]
        return hits / (self._seen[kind] + self._WEIGHT)

    def saw(self, kind: int, right: bool) -> None:
        self._right[kind] = self._right[kind] * self._DECAY + right
        self._seen[kind] = self._seen[kind] * self._DECAY + 1.0
        self._mean += 0.03 * (right - self._mean)

    def held_back(self) -> None:
        """A guess was not worth it: slowly forget why, so that it is tried again."""
        self._right = [value * self._FORGET for value in self._right]
        self._seen = [value * self._FORGET for value in self._seen]
        self._mean += 0.01 * (0.6 - self._mean)

    def took(self, seconds: float) -> None:
        self.pace += 0.1 * (min(seconds, 3.0 * self.pace) - self.pace) if self.pace else seconds

    def cut(self, pieces: int, tokens: int) -> None:
        self.pieces += 0.1 * (pieces / tokens - self.pieces)
