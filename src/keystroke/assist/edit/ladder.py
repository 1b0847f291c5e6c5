"""From an instruction to a change, question by question: the rungs that a small model climbs.

Law: sans-I/O. `edit_steps` yields questions and is sent answers; whoever drives it owns the model. Rungs:
blocks where the model can write them, else a region that the program chose, the same with the fault named,
a larger region, the whole file. All regions of a task come out, or none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field

from keystroke.analysis.syntax import language_of
from keystroke.assist.edit.blocks import Message, block_messages, fenced, has_blocks, retry_messages
from keystroke.assist.edit.choice import choose, enclosing, spans
from keystroke.assist.edit.drift import without_drift
from keystroke.assist.edit.excerpt import excerpt
from keystroke.assist.edit.operations import Addition, Failure, Operation, Reason
from keystroke.assist.edit.patch import is_envelope
from keystroke.assist.edit.pointing import parse_pointing, parts_of, point_messages
from keystroke.assist.edit.resolve import Resolution, parse_answer, resolve
from keystroke.assist.edit.rewrite import FenceWatch, Region, parse_rewrite, rewrite_messages
from keystroke.assist.edit.task import EditTask, Proposal
from keystroke.assist.edit.verdict import judged

LARGEST = 250  # lines that a model is asked to rewrite at once
_ROOM = 6_000  # characters an answer may have beyond three times the text it rewrites
_LOOP = 12  # times the same line may follow itself

Exists = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Question:
    """One thing to ask a model. `prediction` is text that the answer will mostly repeat; `inside` the text
    that it rewrites, None where the answer is no rewrite."""

    messages: Sequence[Message]
    prediction: str = ""
    inside: str | None = None
    most: int | None = None  # characters of an answer that is short by nature

    def watch(self) -> Callable[[str], bool]:
        """Called with each piece of a streamed answer: True once nothing of use can follow."""
        if self.inside is None:
            limit = self.most
            count = 0

            def enough(piece: str) -> bool:
                nonlocal count
                count += len(piece)
                return limit is not None and count > limit

            return enough
        fence, loop = FenceWatch(self.inside), _LoopWatch(3 * len(self.inside) + _ROOM)
        return lambda piece: fence.ended(piece) | loop.ended(piece)


class _LoopWatch:
    """Tells that an answer goes round in circles, or is longer than any rewrite."""

    def __init__(self, limit: int) -> None:
        self._left, self._line, self._last, self._times = limit, "", "", 0

    def ended(self, piece: str) -> bool:
        self._left -= len(piece)
        *complete, self._line = (self._line + piece).split("\n")
        for line in complete:
            same = bool(line.strip()) and line == self._last
            self._times = self._times + 1 if same else 0
            self._last = line
        return self._left < 0 or self._times > _LOOP


Steps = Generator[Question, str, Proposal]
Rewriting = Generator[Question, str, "str | Resolution | Failure"]  # a file, files, or what is wrong


@dataclass(slots=True)
class _Told:
    """The answers so far, for whoever wants to see them."""

    answers: list[str] = field(default_factory=list)


def edit_steps(
    task: EditTask, *, blocks: bool = False, retries: int = 1, exists: Exists = lambda path: False
) -> Steps:
    """Ask until the task is done or the ladder ends. `blocks`: the model is known to write search/replace
    blocks well. `retries`: how often one question is asked again with its fault named."""
    told = _Told()
    if task.region is not None:
        return (yield from _one_region(task, task.region, told, retries))
    if blocks:
        proposal = yield from _by_blocks(task, told, retries, exists)
        if not proposal.failures:
            return proposal
    return (yield from _by_regions(task, told, retries, exists))


def _one_region(task: EditTask, region: Region, told: _Told, retries: int) -> Steps:
    """The lines the user chose, and no others."""
    result = yield from _rewritten(task, task.files, region, told, retries, lambda path: False)
    if isinstance(result, str):
        return _done(task, told, {region.path: result})
    assert isinstance(result, Failure)  # blocks are not read where a region was given
    return _refused(task, told, result)


def _by_blocks(task: EditTask, told: _Told, retries: int, exists: Exists) -> Steps:
    messages: list[Message] = block_messages(task.files, task.instruction, task.rules)
    prediction = "\n".join(task.files.values())
    for attempt in range(retries + 1):
        answer = yield Question(messages, prediction)
        told.answers.append(answer)
        found = read_operations(task, answer, exists)
        if not found.failures or attempt == retries:
            break
        messages = [*messages, *retry_messages(answer, found.failures)]
    return Proposal(task.files, answer, found.texts, found.moves, found.failures, tuple(told.answers))


def _by_regions(task: EditTask, told: _Told, retries: int, exists: Exists) -> Steps:
    """One region at a time, each over what the ones before it made; all of them or none."""
    choice = choose(task.files, task.instruction, near=task.near)
    regions = list(choice.regions)
    if not regions or not choice.sure:
        regions = (yield from _pointed(task, told)) or regions
    if not regions:
        regions = [Region(path) for path, text in task.files.items() if text.count("\n") < LARGEST][:1]
    if not regions:
        problem = Failure(
            Reason.NO_PLACE, "", "nothing in the files answers to the instruction; name a function or --lines"
        )
        return _refused(task, told, problem)
    texts = dict(task.files)
    changed: dict[str, str] = {}
    unchanged: Failure | None = None
    # From the end of each file, so that the lines of regions before stay where they are.
    for region in sorted(regions, key=lambda r: (list(task.files).index(r.path), -r.start)):
        last = region is regions[-1] and not changed
        tries = retries if len(regions) == 1 or last else 0
        result = yield from _climbed(task, texts, region, told, tries, exists)
        if isinstance(result, Resolution):  # the model answered in blocks after all
            return Proposal(
                task.files, told.answers[-1], result.texts, result.moves, result.failures, tuple(told.answers)
            )
        if isinstance(result, Failure):
            if result.reason is not Reason.UNCHANGED:
                return _refused(task, told, result)
            unchanged = result
            continue
        texts[region.path] = changed[region.path] = result
    if not changed:
        assert unchanged is not None
        return _refused(task, told, unchanged)
    return _done(task, told, changed)


def _climbed(
    task: EditTask, texts: Mapping[str, str], region: Region, told: _Told, retries: int, exists: Exists
) -> Rewriting:
    """A region, then the next larger one, then the file."""
    text = texts[region.path]
    while True:
        result = yield from _rewritten(task, texts, region, told, retries, exists)
        if not isinstance(result, Failure):
            return result
        larger = enclosing(region, text)
        size = (larger.end if larger.end is not None else text.count("\n") + 1) - larger.start
        if retries == 0 or region == Region(region.path) or size > LARGEST:
            return result
        region = larger


def _rewritten(
    task: EditTask, texts: Mapping[str, str], region: Region, told: _Told, retries: int, exists: Exists
) -> Rewriting:
    """One region, asked again with the fault named. The whole file with it, or the last fault."""
    text = texts[region.path]
    inside = region.parts(text)[1]
    shown = {
        path: excerpt(content, path, region, task.instruction)
        for path, content in sorted(texts.items(), key=lambda item: item[0] == region.path)
    }
    messages = rewrite_messages(region, text, task.instruction, task.rules, shown)
    first = messages
    prediction = fenced(inside, language_of(region.path) or "")
    for attempt in range(retries + 1):
        answer = yield Question(messages, prediction, inside)
        told.answers.append(answer)
        result: str | Resolution | Failure
        if task.region is None and (has_blocks(answer) or is_envelope(answer)) and not has_blocks(inside):
            found = read_operations(task, answer, exists)  # nobody asked for blocks; they do as well
            result = found.failures[0] if found.failures else found
        else:
            result = read_rewrite(answer, region, text, task.instruction)
        if not isinstance(result, Failure) or attempt == retries:
            return result
        messages = [*first, *_again(answer, result, task.instruction)]
    raise AssertionError("the loop ends by returning")


def _again(answer: str, failure: Failure, instruction: str) -> list[Message]:
    """What is said to a model whose rewrite does not hold."""
    if failure.reason is Reason.UNCHANGED:
        said = f"You wrote the same code again. Make the change: {instruction.strip()}"
    else:
        said = f"That cannot be used: {failure.message}. Write it again, corrected and complete."
    return [{"role": "assistant", "content": answer}, {"role": "user", "content": said}]


def read_rewrite(answer: str, region: Region, text: str, instruction: str) -> str | Failure:
    """The whole file as an answer leaves it: mended at its edges, judged, and without needless changes."""
    new = parse_rewrite(answer, region, text)
    if isinstance(new, Failure):
        return new
    if new == text:
        return Failure(Reason.UNCHANGED, region.path, "the answer changes nothing")
    new = judged(text, new, region.path, instruction)
    return new if isinstance(new, Failure) else without_drift(text, new, region.path, instruction)


def _pointed(task: EditTask, told: _Told) -> Generator[Question, str, list[Region]]:
    """The regions that the model points at."""
    parts = parts_of(task.files)
    if len(parts) < 2:
        return []
    answer = yield Question(point_messages(task.files, parts, task.instruction), most=40)
    told.answers.append(answer)
    chosen = parse_pointing(answer, parts)
    return [
        region
        for path, text in task.files.items()
        for region in spans(path, [part.unit for part in chosen if part.path == path], text)
    ]


# ── answers in blocks ─────────────────────────────────────────────────────────────────────────


def read_operations(task: EditTask, answer: str, exists: Exists) -> Resolution:
    """What an answer in blocks, an envelope or a diff makes of the files."""
    operations = parse_answer(answer, tuple(task.files))
    if isinstance(operations, Failure):
        return Resolution(failures=(operations,))
    operations = [_meant(task, operation, exists) for operation in operations]
    for operation in operations:
        if operation.path not in task.files and exists(operation.path):
            unseen = Failure(Reason.UNKNOWN_FILE, operation.path, "this file is not part of the task")
            return Resolution(failures=(unseen,))
    return resolve(operations, task.files.get)


def _meant(task: EditTask, operation: Operation, exists: Exists) -> Operation:
    """Models shorten paths: `app.py` means `src/app.py` where that is the only file it can mean."""
    path = operation.path
    if isinstance(operation, Addition) or path in task.files or exists(path):
        return operation
    longer = [name for name in task.files if name.endswith(f"/{path}")]
    return dataclasses.replace(operation, path=longer[0]) if len(longer) == 1 else operation


def _done(task: EditTask, told: _Told, texts: Mapping[str, str]) -> Proposal:
    return Proposal(task.files, told.answers[-1], dict(texts), answers=tuple(told.answers))


def _refused(task: EditTask, told: _Told, failure: Failure) -> Proposal:
    answer = told.answers[-1] if told.answers else ""
    return Proposal(task.files, answer, failures=(failure,), answers=tuple(told.answers))
