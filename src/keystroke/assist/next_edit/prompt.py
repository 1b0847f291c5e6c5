"""The prompt for the next edit: recent changes, and one place that may have to change too.

One builder for training and for live use, over lines and an encoder alone; it knows no buffers and no
engine. History comes first, so that every place asked about shares its tokens; newest last, oldest left out.

    <|edit|>PATH\\n<|edit_before|>OLD<|edit_after|>NEW                 each change, oldest first
    <|file_sep|>PATH\\nABOVE<|edit_before|>REGION<|fim_suffix|>BELOW<|edit_after|>
    the answer: <|reserved_0|> (leave it), or FROM TO NEW (lines FROM to TO become NEW); then <|endoftext|>

Every text is whole lines, each with its newline. In the region each line has its number before it, a token
of its own, and so has the region's end: <|reserved_1|>LINE<|reserved_2|>LINE...<|reserved_3|>. FROM and TO
are two of these numbers, so the model chooses the place once, among all lines. If it wrote the whole region,
it would have to depart from the old text at some token, and repeating the old text is likelier at each one.
`<|cursor|>` stands before the cursor's line if that is in the region. Places are ranked by the probability
that the first answer token is not `keep`. The region's own tokens (`EditPrompt.draft`) are a draft of the new
text.

    format = detect(model.tokenizer, model_path)                  # None: the model has not learned edits
    changes = changes_between(old_text, new_text, path)           # after each burst of typing
    prompt = format.build(changes, path, lines, format.region(lines, line), cursor_line)
    ... first = tokens of one step at prompt.tokens; P(first = prompt.keep) ...
    new_lines = format.parse(prompt, answer_tokens)               # None: no usable answer
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

from keystroke.engine.checkpoint.gguf_header import read_metadata
from keystroke.engine.tokenizer import Tokenizer
from keystroke.engine.tokenizer.huggingface import read_json
from keystroke.text.compare import common_ends

VERSION = 2  # of the format; a model states which one it was trained on
REGION = 12  # lines that may be rewritten at once
ABOVE, BELOW = 4, 4  # lines around it that are only read
HISTORY_TOKENS, CHANGE_TOKENS, CHANGES = 320, 72, 8
REGION_TOKENS, AROUND_TOKENS = 240, 56
# Path and marks add at most 64: a prompt stays under 700 tokens.
_PATH_CHARACTERS = 80

Encode = Callable[[str], Sequence[int]]
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class RecentChange:
    """Lines `before` of a file became `after`; both are whole lines."""

    path: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class LineRange:
    """Lines [first, last) of a file."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class EditPrompt:
    """`shared`: how many of the tokens are history, the same for every place asked about. `lines`: the
    region as it stands. `room`: the most tokens of an answer."""

    tokens: tuple[int, ...]
    shared: int
    region: LineRange
    lines: tuple[str, ...]
    draft: tuple[int, ...]
    keep: int
    end: int

    @property
    def room(self) -> int:
        return len(self.draft) + 96


@dataclass(frozen=True, slots=True)
class EditMarks:
    """The ids of the tokens between the parts; `numbers` of a region's lines and of its end."""

    edit: int
    before: int
    after: int
    file: int
    below: int
    cursor: int
    keep: int
    end: int
    numbers: tuple[int, ...]


SPELLING = (
    "<|edit|>", "<|edit_before|>", "<|edit_after|>", "<|file_sep|>", "<|fim_suffix|>", "<|cursor|>",
    "<|reserved_0|>", "<|endoftext|>", *(f"<|reserved_{1 + i}|>" for i in range(REGION + 1)),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class EditFormat:
    """Builds prompts about one region and parses the answers. `encode` must not turn text into special
    tokens."""

    encode: Encode
    decode: Decode
    marks: EditMarks

    def build(
        self,
        history: Sequence[RecentChange],
        path: str,
        lines: Sequence[str],
        region: LineRange,
        cursor: int | None = None,
    ) -> EditPrompt:
        """The question whether `region` of `lines` has to change after `history` (oldest first). `cursor`:
        the line it stands in."""
        marks = self.marks
        front = self._encode_history(history)
        above = self._encode_fitting([*lines[max(0, region.first - ABOVE) : region.first]], last=True)
        below = self._encode_fitting([*lines[region.last : region.last + BELOW]], last=False)
        inside = tuple(lines[region.first : region.last])
        body: list[int] = []
        for number, line in enumerate(inside):
            at_cursor = [marks.cursor] if cursor == region.first + number else []
            body += [marks.numbers[number], *at_cursor, *self.encode(f"{line}\n")]
        tokens = (
            *front, marks.file, *self.encode(short_path(path)), *above,
            marks.before, *body, marks.numbers[len(inside)], marks.below, *below, marks.after,
        )  # fmt: skip
        draft = tuple(self.encode(join_lines(inside)))
        return EditPrompt(tokens, len(front), region, inside, draft, marks.keep, marks.end)

    def region(self, lines: Sequence[str], line: int) -> LineRange:
        """The lines to ask about when `line` may have to change: fewer where they are long."""
        return fitting_region(lines, line, REGION, lambda part: len(self.encode(join_lines(part))))

    def encode_answer(self, old: Sequence[str], new: Sequence[str] | None) -> list[int]:
        """The answer with which the region's lines `old` become `new`; None: they stay."""
        if new is None or list(new) == list(old):
            return [self.marks.keep, self.marks.end]
        first, same = common_ends(old, new)
        numbers = self.marks.numbers
        text = join_lines(new[first : len(new) - same])
        return [numbers[first], numbers[len(old) - same], *self.encode(text), self.marks.end]

    def parse(self, prompt: EditPrompt, tokens: Sequence[int]) -> list[str] | None:
        """The region's lines after the answer, unchanged where it keeps them; None where the answer cannot be
        used (no end, no place, or a mark inside the text)."""
        if prompt.end not in tokens:
            return None
        ids = list(tokens[: list(tokens).index(prompt.end)])
        if ids == [prompt.keep]:
            return list(prompt.lines)
        numbers = self.marks.numbers[: len(prompt.lines) + 1]
        if len(ids) < 2 or ids[0] not in numbers or ids[1] not in numbers:
            return None
        first, last = numbers.index(ids[0]), numbers.index(ids[1])
        marks = self.marks
        others = (marks.keep, marks.edit, marks.before, marks.after, marks.file, marks.cursor, *marks.numbers)
        if last < first or any(token in others for token in ids[2:]):
            return None
        text = self.decode(ids[2:])
        new = text.removesuffix("\n").split("\n") if text else []
        return [*prompt.lines[:first], *new, *prompt.lines[last:]]

    def _encode_history(self, history: Sequence[RecentChange]) -> list[int]:
        marks, parts = self.marks, []
        for change in reversed(history[-CHANGES:]):
            old, new = (list(self.encode(side))[:CHANGE_TOKENS] for side in (change.before, change.after))
            path = self.encode(short_path(change.path))
            parts.append([marks.edit, *path, marks.before, *old, marks.after, *new])
        return join_newest(parts, HISTORY_TOKENS)

    def _encode_fitting(self, lines: list[str], *, last: bool) -> list[int]:
        """The encoding of as many lines as fit; those farthest from the region are dropped first."""
        while lines:
            tokens = list(self.encode(join_lines(lines)))
            if len(tokens) <= AROUND_TOKENS:
                return tokens
            lines = lines[1:] if last else lines[:-1]
        return []


def join_lines(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def changes_between(old: str, new: str, path: str) -> list[RecentChange]:
    """The changes of whole lines from `old` to `new`, in the order of the file. A change that only adds or
    only removes includes the line above it, which shows its place."""
    a, b = old.split("\n"), new.split("\n")
    found = []
    for tag, i1, i2, j1, j2 in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag != "equal":
            found.append(change_between(a, (i1, i2), b, (j1, j2), path))
    return found


def change_between(
    old: Sequence[str], was: tuple[int, int], new: Sequence[str], became: tuple[int, int], path: str
) -> RecentChange:
    """Lines `was` of `old` became lines `became` of `new`."""
    (i1, i2), (j1, j2) = was, became
    if (i1 == i2 or j1 == j2) and i1 and j1:
        i1, j1 = i1 - 1, j1 - 1
    return RecentChange(path, join_lines(old[i1:i2]), join_lines(new[j1:j2]))


def region_at(lines: Sequence[str], line: int, size: int = REGION) -> LineRange:
    """The region of `size` lines to ask about when `line` may have to change: a third of it above."""
    first = max(0, min(line - size // 3, len(lines) - size))
    return LineRange(first, min(len(lines), first + size))


def fitting_region(
    lines: Sequence[str], line: int, size: int, cost: Callable[[Sequence[str]], int]
) -> LineRange:
    """`region_at`, with fewer lines where they cost more than `REGION_TOKENS`."""
    region = region_at(lines, line, size)
    while size > 1 and cost(lines[region.first : region.last]) > REGION_TOKENS:
        size //= 2
        region = region_at(lines, line, size)
    return region


def join_newest(newest_first: Iterable[Sequence[int]], room: int, least: int = 0) -> list[int]:
    """The tokens of the changes that fit, oldest first; at least `least` of them."""
    kept: list[Sequence[int]] = []
    for tokens in newest_first:
        room -= len(tokens)
        if room < 0 and len(kept) >= least:
            break
        kept.append(tokens)
    return [token for tokens in reversed(kept) for token in tokens]


def short_path(path: str) -> str:
    """The line that names a file: the end of a long path."""
    return f"{path[-_PATH_CHARACTERS:]}\n"


def find_marks(tokenizer: Tokenizer) -> EditMarks | None:
    ids = [tokenizer.special(name) for name in SPELLING]
    known = [i for i in ids if i is not None]
    if len(known) < len(ids):
        return None
    edit, before, after, file, below, cursor, keep, end, *numbers = known
    return EditMarks(edit, before, after, file, below, cursor, keep, end, tuple(numbers))


def detect_edit_format(tokenizer: Tokenizer, path: Path) -> EditFormat | None:
    """The model's edit format if it was trained on this version; None otherwise."""
    marks = find_marks(tokenizer)
    if learned_version(path) != VERSION or marks is None:
        return None
    return EditFormat(tokenizer.encode, tokenizer.decode, marks)


def learned_version(path: Path) -> object:
    """The version of the format that a model was trained on (the GGUF key `keystroke.next_edit`, or
    `next_edit` in keystroke.json beside the weights); None where it does not state one."""
    folder = path if path.is_dir() else path.parent
    ids: object = read_json(folder / "keystroke.json").get("next_edit")
    if path.is_file():
        ids = read_metadata(path, lambda key: key == "keystroke.next_edit").get("keystroke.next_edit", ids)
    return ids
