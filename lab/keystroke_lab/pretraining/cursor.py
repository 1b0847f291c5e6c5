"""Completion prompts at a cursor as the editor sends them, with their answers, for the end of training.

The layout and shares are those of `assist.completion.window` (a test compares the two): parts of other files,
the file's path, the text below, the text above from the start of a line, then the missing text. The same
random generator gives the same sequences.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from keystroke.assist.completion.context import gather_context
from keystroke.assist.completion.extent import line_at, only_closers
from keystroke.assist.completion.prompt import CONTROL_TOKENS, LONGEST_TOKEN
from keystroke.assist.completion.window import LONGEST_WORD, SUFFIX_SHARE, half_word
from keystroke_lab.pretraining.fim import LIVE_MIX, Order, Parts, choose, cut, prompt_tokens
from keystroke_lab.tokenizer import special

BUDGETS = (256, 768)  # tokens around the cursor: from a slow laptop to the editor's own
# Most are shorter: the answer is what is learned, and it is ten tokens after however many.
SHORT, SHORT_BUDGETS = 0.6, (96, 256)
SUFFIX_SHARES = (2, SUFFIX_SHARE, SUFFIX_SHARE)  # now and then more of the text below than the editor sends
HELD = 0.5  # share of half words that the model says again, as the editor asks; others are cut in mid-word
LONGEST_ANSWER = 160  # tokens
PATH, CONTEXT, UNWRITTEN = 0.7, 0.3, 0.12  # shares: path known, other files known, nothing below yet
_CONTEXT_SHARE = 4
_APART = 900  # characters of a file for each place asked about
_MOST = 48
_DENSITY = 4.0  # characters of a token, a guess that is corrected where it is wrong

Read = Callable[[str], str | None]


def cursor_sequences(
    path: str, text: str, read: Read, tokenizer: Any, rng: random.Random
) -> Iterator[list[int]]:
    """Whole training sequences of one file, as many as its length is worth."""
    if not text.strip():
        return
    for _ in range(min(_MOST, 1 + len(text) // _APART)):
        found = cut(text, choose(rng, LIVE_MIX), rng)
        if found is None:
            continue
        parts = as_editors_see_it(found)
        if rng.random() < UNWRITTEN:
            parts = Parts(parts.prefix, parts.middle, "")
        if rng.random() < HELD:
            parts = said_again(parts)
        answer = tokenizer.encode(parts.middle, add_special_tokens=False).ids
        if len(answer) > LONGEST_ANSWER:
            continue
        budget = rng.randint(*(SHORT_BUDGETS if rng.random() < SHORT else BUDGETS))
        header = _header(path, parts.prefix, read, tokenizer, budget, rng)
        prompt = cursor_prompt(
            parts, header, tokenizer, budget, rng.uniform(0.3, 1.0), rng.choice(SUFFIX_SHARES)
        )
        yield [*prompt, *answer, special.END]


def as_editors_see_it(parts: Parts) -> Parts:
    """Closing brackets at the end of the line are left out of the text below, and so belong to the answer."""
    _, end = line_at(parts.suffix, 0)
    if end and only_closers(parts.suffix[:end]):
        return Parts(parts.prefix, parts.middle + parts.suffix[:end], parts.suffix[end:])
    return parts


def said_again(parts: Parts) -> Parts:
    """The word the cursor stands in belongs to the answer: the model knows words by their own tokens."""
    held = len(half_word(parts.prefix[-LONGEST_WORD:]))
    at = len(parts.prefix) - held
    return Parts(parts.prefix[:at], parts.prefix[at:] + parts.middle, parts.suffix)


def cursor_prompt(
    parts: Parts,
    header: Sequence[int],
    tokenizer: Any,
    budget: int,
    fill: float = 1.0,
    share: int = SUFFIX_SHARE,
) -> list[int]:
    """The prompt of at most `budget` tokens, one in `share` at most for the text below, the text above taking
    `fill` of its room at most."""
    room = budget - CONTROL_TOKENS
    suffix = _suffix(parts.suffix, tokenizer, room // share)
    prefix = _prefix(parts.prefix, tokenizer, max(16, int((room - len(suffix) - len(header)) * fill)))
    return [*header, *prompt_tokens(prefix, suffix, Order.SPM)]


def _header(path: str, prefix: str, read: Read, tokenizer: Any, budget: int, rng: random.Random) -> list[int]:
    if rng.random() >= PATH:
        return []
    header: list[int] = []
    if rng.random() < CONTEXT:
        left = (budget - CONTROL_TOKENS) // _CONTEXT_SHARE
        for file in gather_context(prefix, path, read):
            text = f"{file.path}\n{file.text.rstrip()}\n"
            piece = [special.FILE_SEP, *tokenizer.encode(text, add_special_tokens=False).ids]
            if len(piece) <= left:
                header += piece
                left -= len(piece)
    return [*header, special.FILE_SEP, *tokenizer.encode(f"{path}\n", add_special_tokens=False).ids]


def _suffix(text: str, tokenizer: Any, room: int) -> list[int]:
    wanted = text[: room * LONGEST_TOKEN // 2]
    encoded = tokenizer.encode(wanted, add_special_tokens=False)
    if len(encoded.ids) <= room:
        return list(encoded.ids)
    whole = wanted[: encoded.offsets[room - 1][1]].rpartition("\n")[0]
    if not whole.strip():
        return list(encoded.ids[:room])
    return list(tokenizer.encode(whole, add_special_tokens=False).ids[:room])


def _prefix(text: str, tokenizer: Any, room: int) -> list[int]:
    start = max(0, len(text) - int(room * _DENSITY))
    if start:
        start = text.find("\n", start) + 1 or start
    while True:
        tokens = list(tokenizer.encode(text[start:], add_special_tokens=False).ids)
        if len(tokens) <= room:
            return tokens
        half = (start + len(text)) // 2
        start = text.find("\n", half) + 1 or max(half, len(text) - room)
