"""The worker's own side: a process that drafts for a model elsewhere.

Guesses on from what the target has said, as far as it was given room, and takes back where the target
said otherwise. The sequence told of last goes first. Input is read in a thread, so that news reaches it in
the middle of a prompt, and it ends when that input does: its parent is gone then, however it went.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from keystroke.config import load_settings
from keystroke.engine.base import Interrupt
from keystroke.engine.load import PROBE, load_model
from keystroke.engine.model import Model
from keystroke.engine.remote.blocking import BlockingModel
from keystroke.engine.remote.remote_model import RemoteModel
from keystroke.engine.remote.transport import Endpoint
from keystroke.engine.speculative.worker_guess import AddressGuess, Guessing, TextGuess, TokenGuess
from keystroke.engine.speculative.worker_messages import (
    Address,
    Begin,
    Failed,
    Forget,
    Frames,
    FromWorker,
    Load,
    Ready,
    Told,
    ToWorker,
    framed,
    to_worker,
    write_all,
)
from keystroke.errors import Interrupted, KeystrokeError

KEPT = 4  # sequences at a time: answers that a server writes side by side


class Inbox:
    """Messages as they arrive, read by a thread of their own. `interrupt` is thrown by each that changes what
    is to be read; whoever works takes a new one before it looks at what came."""

    def __init__(self, descriptor: int) -> None:
        self.interrupt = Interrupt()
        self._messages: queue.SimpleQueue[ToWorker] = queue.SimpleQueue()
        self._descriptor = descriptor
        threading.Thread(target=self._read, name="inbox", daemon=True).start()

    def take(self, *, wait: bool) -> list[ToWorker]:
        self.interrupt = Interrupt()
        found = [self._messages.get()] if wait else []
        with suppress(queue.Empty):
            while True:
                found.append(self._messages.get_nowait())
        return found

    def _read(self) -> None:
        frames = Frames()
        try:
            while data := os.read(self._descriptor, 1 << 16):
                for payload in frames.feed(data):
                    message = to_worker.decode(payload)
                    self._messages.put(message)
                    if isinstance(message, Begin | Forget):
                        self.interrupt.set()
        finally:
            os._exit(0)  # nobody is left to draft for; a run under way is not worth its end


class Desk:
    """Sequences under way, the one told of last at the end."""

    def __init__(self, make: Callable[[Begin], Guessing]) -> None:
        self._make = make
        self.sequences: dict[int, Guessing] = {}

    def take(self, message: ToWorker) -> None:
        if isinstance(message, Begin):
            self.sequences[message.sequence] = self._make(message)
            while len(self.sequences) > KEPT:
                self._drop(next(iter(self.sequences)))
        elif isinstance(message, Told) and (guess := self.sequences.pop(message.sequence, None)) is not None:
            guess.room = message.room
            guess.told(message)
            self.sequences[message.sequence] = guess
        elif isinstance(message, Forget):
            self._drop(message.sequence)

    @property
    def waiting(self) -> tuple[int, Guessing] | None:
        """The latest sequence with room for a piece more."""
        for number, guess in reversed(self.sequences.items()):
            if not guess.ended and guess.ahead < guess.room:
                return number, guess
        return None

    def _drop(self, sequence: int) -> None:
        guess = self.sequences.pop(sequence, None)
        if guess is not None:
            guess.close()


def work(desk: Desk, inbox: Inbox, say: Callable[[FromWorker], None]) -> None:
    """Draft until the parent is gone."""
    while True:
        for message in inbox.take(wait=desk.waiting is None):
            desk.take(message)
        if (found := desk.waiting) is None:
            continue
        number, guess = found
        try:
            say(guess.piece(number, inbox.interrupt))
        except Interrupted:
            continue
        except KeystrokeError:  # no room, no memory, no server: the target goes on without it
            guess.ended = True


def guesses(model: Model) -> Callable[[Begin], Guessing]:
    def make(begin: Begin) -> Guessing:
        if begin.tokens is not None:
            return TokenGuess(model, begin.tokens, begin.sampling, begin.room)
        return TextGuess(model, begin.before, begin.after, begin.room)

    return make


def asks(address: Address) -> tuple[Callable[[Begin], Guessing], Ready]:
    """Guesses of the model at an address. Raises ConfigError where it is none, Unavailable where nobody
    answers."""
    endpoint = Endpoint(address.base_url, address.api_key_env, first_token_timeout=10.0, retries=0)
    remote = BlockingModel(RemoteModel(endpoint, address.model))
    remote.models()
    ready = Ready(address.model, 0, None)
    return lambda begin: AddressGuess(remote, begin.before, begin.after, begin.room), ready


def main() -> None:
    incoming, outgoing = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # what a library prints is no message
    inbox = Inbox(incoming)

    def say(message: FromWorker) -> None:
        write_all(outgoing, framed(message))

    load, *more = inbox.take(wait=True)  # of a worker started anew, sequences are told of at once
    assert isinstance(load, Load)
    try:
        if load.address is not None:
            make, ready = asks(load.address)
        else:
            model = load_model(Path(load.model), load_settings(load.flags, Path(os.sep)))
            info = model.engine.info
            make, ready = guesses(model), Ready(info.name, info.vocab_size, model.tokenizer.encode(PROBE))
    except KeystrokeError as error:
        say(Failed(str(error)))
        sys.exit(1)
    say(ready)
    desk = Desk(make)
    for message in more:
        desk.take(message)
    work(desk, inbox, say)


if __name__ == "__main__":
    main()
