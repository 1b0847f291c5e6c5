"""Training examples of an adapter as token sequences: next edits, no edit, instructed rewriting, fill-in.

Every prompt is the one the product sends (`assist.next_edit.places`, `assist.edit.rewrite`, the model's
fill-in tokens with the suffix first). An example is a text whose first tokens are given. A next edit whose
text cannot be predicted from the prompt is marked `NEW`: its place is learned, its words hardly count. The
same random generator gives the same examples.
"""

from __future__ import annotations

import ast
import random
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from keystroke.assist.edit.rewrite import Region as Rewritten
from keystroke.assist.edit.rewrite import rewrite_messages
from keystroke.assist.next_edit.places import REGION, VERSION, PlacesAnswer, PlacesFormat
from keystroke.assist.next_edit.prompt import LineRange
from keystroke.engine.fim import FimTemplate
from keystroke.engine.tokenizer import Tokenizer
from keystroke_lab.corpus.hunks import EditHunk
from keystroke_lab.corpus.trajectories import FileEdit
from keystroke_lab.draft_heads.texts import TokenText
from keystroke_lab.evaluation.edit_cases import EditCase, edit_case
from keystroke_lab.pretraining.edit_sequences import State
from keystroke_lab.pretraining.fim import LIVE_MIX, choose, cut
from keystroke_lab.pretraining.synthetic_edits import synthetic_edits

NEXT, NEW, QUIET = "next", "new", "quiet"
REWRITE, FILL, KEEP, OWN = "rewrite", "fill", "keep", "own"
LEARNED = {"next_edit": str(VERSION), "fim_order": "spm"}  # facts of an adapter trained on these
POSITIVE = 0.7  # share of next-edit examples with a change left to make
FEWER = 0.3  # share of them that show fewer places than there are
NARROW = 0.5  # share of them whose places have fewer lines: more moments for as many tokens
UNPREDICTABLE = 0.6  # share kept of those whose text cannot be predicted
LONGEST = 2048  # tokens of an example
_LARGEST_FILE = 40_000  # characters
_MOST = 8  # questions about one release step
_TRIES = 4
_NARROW = (5, 10)  # lines of a place that is shown narrower
_AROUND = (200, 3200)  # characters kept before and after what is filled in
_PARTS = re.compile(r"\w+|[^\w\s]")

Chat = Callable[[Sequence[Mapping[str, str]]], Sequence[int]]  # a conversation up to the assistant's turn


@dataclass(frozen=True, slots=True)
class PromptForms:
    """How one model is asked: its tokenizer, the place format, fill-in tokens and chat template."""

    tokenizer: Tokenizer
    places: PlacesFormat
    fim: FimTemplate
    chat: Chat
    end: int  # of an assistant's turn


def next_edit_examples(
    step: Sequence[FileEdit], forms: PromptForms, rng: random.Random
) -> Iterator[TokenText]:
    """Lessons about one release step: some of its changes made, which place is next?"""
    hunks = sum(len(edit.hunks) for edit in step)
    for _ in range(min(_MOST, 1 + hunks // 2)):
        positive = rng.random() < POSITIVE
        frame = _Narrow(forms.places, rng.randint(*_NARROW) if rng.random() < NARROW else REGION)
        case = None
        for _ in range(_TRIES if positive else 1):  # a change often reaches across the edge of its place
            case = case or edit_case(step, frame, rng, positive=positive, largest=_LARGEST_FILE)
        if case is not None:
            text = next_edit_example(_fewer(case, rng) if rng.random() < FEWER else case, forms.places)
            if len(text.tokens) <= LONGEST and (text.kind != NEW or rng.random() < UNPREDICTABLE):
                yield text


@dataclass(frozen=True, slots=True)
class _Narrow:
    """The format's frame with places of at most `size` lines."""

    form: PlacesFormat
    size: int

    def region(self, lines: Sequence[str], line: int) -> LineRange:
        return self.form.region(lines, line, self.size)


def next_edit_example(case: EditCase, form: PlacesFormat) -> TokenText:
    prompt = form.build(case.history, case.path, case.lines, case.places, case.cursor)
    said = None
    if case.right is not None and case.answer is not None:
        said = PlacesAnswer(prompt.places.index(case.places[case.right]), tuple(case.answer))
    answer = form.encode_answer(prompt, said)
    return _text(prompt.tokens, answer, QUIET if said is None else NEXT if is_predictable(case) else NEW)


def is_predictable(case: EditCase) -> bool:
    """Whether every word and sign of the new text stands somewhere in what is shown: then it can be known, if
    not always is. Half of what people change next cannot."""
    assert case.answer is not None
    shown = {part for change in case.history for part in _PARTS.findall(change.before + "\n" + change.after)}
    for place in case.places:
        for line in case.lines[place.first : place.last]:
            shown.update(_PARTS.findall(line))
    return all(part in shown for line in case.answer for part in _PARTS.findall(line))


def _fewer(case: EditCase, rng: random.Random) -> EditCase:
    """The same moment with only some of the places shown, the right one among them."""
    shown = sorted(rng.sample(range(len(case.places)), rng.randint(1, len(case.places))))
    if case.right is not None and case.right not in shown:
        shown[rng.randrange(len(shown))] = case.right
    right = None if case.right is None else shown.index(case.right)
    return replace(case, places=tuple(case.places[i] for i in shown), right=right)


def synthetic_examples(edit: FileEdit, forms: PromptForms, rng: random.Random) -> Iterator[TokenText]:
    """Next edits of a change carried through the text of a file."""
    for made in synthetic_edits(edit.project, edit.path, edit.after(), rng):
        yield from next_edit_examples([made], forms, rng)
        break


def fill_example(text: str, forms: PromptForms, rng: random.Random) -> TokenText | None:
    """A gap in a file, the text after it first; None where the cut drawn makes no example."""
    parts = cut(text, choose(rng, LIVE_MIX), rng)
    if parts is None or len(parts.middle) > 800:
        return None
    before = parts.prefix[-rng.randint(*_AROUND) :]
    if len(before) < len(parts.prefix):
        before = before.partition("\n")[2]
    after = parts.suffix[: rng.randint(0, _AROUND[1] // 3)].rpartition("\n")[0]
    encode = forms.tokenizer.encode
    given = replace(forms.fim, order="spm").assemble(forms.tokenizer, encode(before), encode(after))
    end = forms.tokenizer.special("<|endoftext|>")
    assert end is not None
    return _text(given, [*encode(parts.middle), end], FILL)


def rewrite_example(edit: FileEdit, forms: PromptForms, rng: random.Random) -> TokenText | None:
    """A region to rewrite by an instruction in ordinary words; None where the change drawn cannot
    be told in a sentence."""
    index = rng.randrange(len(edit.hunks))
    hunk = edit.hunks[index]
    told = instruction(hunk, rng)
    if told is None:
        return None
    state = State.after_hunks(edit, range(index))
    lines, at = state.lines, state.at[index]
    first = max(0, at - rng.randint(2, 14))
    last = min(len(lines), at + len(hunk.old) + rng.randint(2, 14))
    shown_first, shown_last = max(0, first - 20), min(len(lines), last + 20)
    shown = "\n".join(lines[shown_first:shown_last]) + "\n"
    region = Rewritten(edit.path, first - shown_first, last - shown_first)
    messages = rewrite_messages(region, shown, told)
    new = [*lines[first:at], *hunk.new, *lines[at + len(hunk.old) : last]]
    tag = re.search(r"leave the rest of the file out:\n(```\w*)", messages[1]["content"])
    if tag is None or any("```" in line for line in new):
        return None
    answer = f"{tag[1]}\n" + "".join(f"{line}\n" for line in new) + "```"
    text = _text(forms.chat(messages), [*forms.tokenizer.encode(answer), forms.end], REWRITE)
    return text if len(text.tokens) <= LONGEST else None


def instruction(hunk: EditHunk, rng: random.Random) -> str | None:
    """What to do, said as a task; None where the change is too large to be told."""
    old, new = [line.strip() for line in hunk.old], [line.strip() for line in hunk.new]
    if len(old) == 1 and len(new) == 1:
        gone, came = _words(old[0]), _words(new[0])
        if len(gone - came) == 1 and len(came - gone) == 1:
            a, b = (gone - came).pop(), (came - gone).pop()
            if re.sub(rf"\b{re.escape(a)}\b", b, old[0]) == new[0]:
                return rng.choice(
                    (f"Rename {a} to {b}.", f"Use `{b}` instead of `{a}`.", f"rename `{a}` to `{b}`")
                )
        return rng.choice((f"Change `{old[0]}` to `{new[0]}`.", f"Replace `{old[0]}` with `{new[0]}`."))
    if not old and 1 <= len(new) <= 3 and all(new):
        return f"Add {' and then '.join(f'`{line}`' for line in new)}."
    if not new and 1 <= len(old) <= 3 and all(old):
        return f"Remove {' and '.join(f'`{line}`' for line in old)}."
    if len(old) == 1 and 2 <= len(new) <= 4 and old[0] in new:
        added = [line for line in new if line != old[0]]
        side = "after" if new[0] == old[0] else "before" if new[-1] == old[0] else None
        if side is not None and all(added):
            return f"{side.capitalize()} `{old[0]}` add {' and then '.join(f'`{x}`' for x in added)}."
    return None


def keep_example(text: str, forms: PromptForms, rng: random.Random) -> TokenText | None:
    """A text on which the base's own guesses are to be kept: a documented function of a Python file, asked
    for in chat and answered as it stands, or a part of any file; None where it is too short for either."""
    asked = _asked_for(text, rng) if rng.random() < _CHATS else None
    if asked is not None:
        question, answer = asked
        messages = [{"role": "system", "content": _HELPER}, {"role": "user", "content": question}]
        made = _text(forms.chat(messages), [*forms.tokenizer.encode(answer), forms.end], KEEP)
        return made if len(made.tokens) <= _LONGEST_KEPT else None
    lines = text.split("\n")
    part = "\n".join(lines[rng.randrange(len(lines)) :])[:_PART]
    tokens = forms.tokenizer.encode(part)
    return _text(tokens[:1], tokens[1:], KEEP) if len(tokens) >= _SHORTEST_KEPT else None


_CHATS = 0.75  # share of such texts that are chats: what the base is used for most
_LONGEST_KEPT, _SHORTEST_KEPT, _PART = 640, 64, 1600
_HELPER = "You are a helpful assistant."
_ASKS = (
    "Write a Python function `{head}`.\n\n{says}",
    'Implement this function in Python:\n\n```python\n{head}:\n    """{says}"""\n```',
    '"""\n{says}\n"""\nWrite the Python function {name} that does this.',
    "{says}\n\nWrite a Python function named {name} for it. Answer with code only.",
)


def _asked_for(text: str, rng: random.Random) -> tuple[str, str] | None:
    """A question that a function of `text` answers, and the answer."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of strangers' escapes
            body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    named = [node for node in body if isinstance(node, ast.FunctionDef) and ast.get_docstring(node)]
    if not named:
        return None
    chosen = rng.choice(named)
    lines = text.split("\n")[chosen.lineno - 1 : chosen.end_lineno]
    says = (ast.get_docstring(chosen) or "").split("\n\n")[0]
    head = "\n".join(text.split("\n")[chosen.lineno - 1 : chosen.body[0].lineno - 1]).rstrip().rstrip(":")
    question = rng.choice(_ASKS).format(head=head, says=says, name=chosen.name)
    return question, "```python\n" + "\n".join(lines) + "\n```"


def _words(line: str) -> set[str]:
    return set(re.findall(r"\w+", line))


def _text(given: Sequence[int], answer: Sequence[int], kind: str) -> TokenText:
    return TokenText(np.array([*given, *answer], np.int32), len(given), kind)
