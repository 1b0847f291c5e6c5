"""Source files to fixed windows of tokens.

The same files, tokenizer and seed give the same windows. A fill-in-the-middle sequence is never cut by the
edge of a window: plain files, which may be cut anywhere, fill the rest. Files of one project follow each
other, so a window holds several of them and the model learns to use a repository. Questions about one text
are kept apart.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keystroke_lab.corpus.trajectories import FileEdit
from keystroke_lab.pretraining.cursor import cursor_sequences
from keystroke_lab.pretraining.edit_sequences import edit_sequences, steps
from keystroke_lab.pretraining.fim import Order, Parts, TokenParts, choose, cut, join
from keystroke_lab.pretraining.synthetic_edits import synthetic_edits
from keystroke_lab.tokenizer import special


@dataclass(frozen=True, slots=True)
class SourceText:
    """One file to learn from."""

    project: str
    path: str
    text: str


@dataclass(frozen=True, slots=True)
class Mix:
    """What a document becomes."""

    fim: float = 0.6  # share of files cut into excerpts with a part taken out
    cursor: float = 0.0  # share of files asked about at cursors, as the editor does it
    made: float = 0.0  # share of files that edits are made up from
    edits: float = 0.0  # share of windows that are made of real edits, where there are any
    spm: float = 0.8  # of the excerpts, in the live order
    path: float = 0.5  # share of plain files and excerpts that begins with the file's path
    dated: float = 1.0  # share of the files without annotations or f-strings that is used
    seam: int = 0  # characters between two places at which plain text is encoded in two parts; 0: none
    longest: int = 3200  # characters of an excerpt: many answers, each with what is near it
    shortest: int = 400


PLAIN = Mix(fim=0.0, path=0.0)


_TODAY = re.compile(r"\) -> |\bf[\"']|@dataclass|: (?:str|int|bool|float|list|dict|Path|Optional)\b")


def is_of_today(text: str) -> bool:
    """Whether the file is written as most Python is written now: something annotated or an f-string in every
    forty lines. One in three files of old packages is, four in five of new ones."""
    return len(_TODAY.findall(text)) * 40 >= text.count("\n") + 1


@dataclass(frozen=True, slots=True)
class TokenDocument:
    tokens: list[int]
    whole: bool  # must not be cut by a window's edge
    question: bool = False  # one of several about the same text: each shows what another asks for


def excerpts(text: str, mix: Mix, rng: random.Random) -> Iterator[str]:
    """`text` in runs of whole lines of random length."""
    start = 0
    while start < len(text):
        limit = rng.randint(mix.shortest, mix.longest)
        end = text.rfind("\n", start, start + limit) + 1 if len(text) - start > limit else len(text)
        if end <= start:
            end = min(len(text), start + limit)
        yield text[start:end]
        start = end


def documents(
    sources: Iterable[SourceText],
    tokenizer: Any,
    mix: Mix,
    rng: random.Random,
    library: Mapping[str, Mapping[str, str]] | None = None,
) -> Iterator[TokenDocument]:
    """Documents of the sources, in their order. `tokenizer` must know no special tokens. `library`: the texts
    of each project by path, for what a cursor may know of other files."""
    for source in sources:
        old = mix.dated < 1 and source.path.endswith(".py") and not is_of_today(source.text)
        if old and rng.random() >= mix.dated:
            continue
        drawn = rng.random()
        if drawn < mix.cursor:
            known = (library or {}).get(source.project, {})
            for tokens in cursor_sequences(source.path, source.text, known.get, tokenizer, rng):
                yield TokenDocument(tokens, True, question=True)
            continue
        if drawn < mix.cursor + mix.made:
            made = ([edit] for edit in synthetic_edits(source.project, source.path, source.text, rng))
            for tokens in edit_sequences(made, tokenizer, rng):
                yield TokenDocument(tokens, True, question=True)
            continue
        if drawn >= mix.cursor + mix.made + mix.fim:
            head = _head(source, tokenizer, mix, rng)
            yield TokenDocument([*head, *seamed(source.text, tokenizer, mix.seam, rng), special.END], False)
            continue
        for piece in excerpts(source.text, mix, rng):
            head = _head(source, tokenizer, mix, rng)
            parts = cut(piece, choose(rng), rng)
            if parts is None:
                yield TokenDocument(
                    [*head, *tokenizer.encode(piece, add_special_tokens=False).ids, special.END], False
                )
                continue
            order = Order.SPM if rng.random() < mix.spm else Order.PSM
            yield TokenDocument([*head, *join(tokenised(parts, tokenizer), order)], True)


def spread(stream: Iterable[TokenDocument], rng: random.Random) -> list[TokenDocument]:
    """The documents in their order, but questions change places with each other. Attention reaches over a
    whole window: where two questions about one file stand in it, the second finds its answer in the first,
    and learns to look there."""
    found = list(stream)
    places = [i for i, document in enumerate(found) if document.question]
    moved = [found[i] for i in places]
    rng.shuffle(moved)
    for place, document in zip(places, moved, strict=True):
        found[place] = document
    return found


def seamed(text: str, tokenizer: Any, seam: int, rng: random.Random) -> list[int]:
    """The tokens of `text`, encoded in two parts wherever a random seam falls: a cursor stands anywhere,
    mid-word too, and the model must continue from there as well as from where its tokens would end."""
    if not seam:
        found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return found
    parts, start = [], 0
    while start < len(text):
        end = start + 1 + int(rng.expovariate(1 / seam))
        parts.append(text[start:end])
        start = end
    return [t for e in tokenizer.encode_batch(parts, add_special_tokens=False) for t in e.ids]


def tokenised(parts: Parts, tokenizer: Any) -> TokenParts:
    """Each part on its own: that is how an editor's text arrives, cut in mid-word or not."""
    prefix, middle, suffix = tokenizer.encode_batch(
        [parts.prefix, parts.middle, parts.suffix], add_special_tokens=False
    )
    return TokenParts(tuple(prefix.ids), tuple(middle.ids), tuple(suffix.ids))


def _head(source: SourceText, tokenizer: Any, mix: Mix, rng: random.Random) -> list[int]:
    if rng.random() >= mix.path:
        return []
    return [special.FILE_SEP, *tokenizer.encode(source.path + "\n", add_special_tokens=False).ids]


def windows(stream: Iterable[TokenDocument], length: int) -> Iterator[list[int]]:
    """Windows of exactly `length` tokens; the last partial one is left out."""
    packer = _Packer(length)
    for document in stream:
        packer.add(document)
        while packer.held >= 4 * length:  # enough at hand to find pieces that fit
            if packer.fill():
                yield packer.take()
    while packer.held >= length:
        if packer.fill():
            yield packer.take()


class _Packer:
    """First fit for what must stay whole; plain tokens fill the gaps."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.held = 0
        self._window: list[int] = []
        self._plain: deque[int] = deque()
        self._whole: deque[list[int]] = deque()

    def add(self, document: TokenDocument) -> None:
        self.held += len(document.tokens)
        if document.whole and len(document.tokens) <= self.length:
            self._whole.append(document.tokens)
        else:
            self._plain.extend(document.tokens)

    def fill(self) -> bool:
        """Put one more thing into the window; whether it is full now."""
        room = self.length - len(self._window)
        fitting = next((i for i, tokens in enumerate(self._whole) if len(tokens) <= room), None)
        if fitting is not None:
            self._window.extend(self._whole[fitting])
            del self._whole[fitting]
        elif self._plain:
            self._window.extend(self._plain.popleft() for _ in range(min(room, len(self._plain))))
        else:  # nothing plain is left: the one case in which the window's edge cuts a whole document
            tokens = self._whole.popleft()
            self._window.extend(tokens[:room])
            self.held -= len(tokens) - room
        return len(self._window) == self.length

    def take(self) -> list[int]:
        window, self._window = self._window, []
        self.held -= self.length
        return window


def token_windows(
    sources: Sequence[SourceText], tokenizer: Any, mix: Mix, length: int, seed: int
) -> NDArray[np.uint16]:
    """Every window of `sources`, [n, length]. Projects are visited in an order the seed decides."""
    rng = random.Random(seed)
    projects: dict[str, list[SourceText]] = {}
    for source in sources:
        projects.setdefault(source.project, []).append(source)
    names = sorted(projects)
    rng.shuffle(names)
    ordered: list[SourceText] = []
    for name in names:
        files = sorted(projects[name], key=lambda s: s.path)
        rng.shuffle(files)
        ordered.extend(files)
    library = {name: {s.path: s.text for s in files} for name, files in projects.items()}
    found = list(windows(spread(documents(ordered, tokenizer, mix, rng, library), rng), length))
    return np.asarray(found, dtype=np.uint16).reshape(len(found), length)


def edit_windows(edits: Sequence[FileEdit], tokenizer: Any, length: int, seed: int) -> NDArray[np.uint16]:
    """Every window of next-edit sequences, [n, length], in an order the seed decides."""
    rng = random.Random(seed)
    asked = (
        TokenDocument(tokens, True, question=True) for tokens in edit_sequences(steps(edits), tokenizer, rng)
    )
    found = list(windows(spread(asked, rng), length))
    return np.asarray(found, dtype=np.uint16).reshape(len(found), length)
