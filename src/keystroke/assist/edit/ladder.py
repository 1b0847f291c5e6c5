"""From an instruction to a change, question by question: the rungs that a small model climbs.

Sans-I/O. `edit_steps` yields questions and is sent answers; whoever drives it owns the model. Rungs: a
renaming needs no question; blocks where the model can write them; else the regions that the program chose,
the same with the fault named, the next larger one, the whole file. All regions of a task come out, or none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from keystroke.analysis.syntax import language_of
from keystroke.assist.edit.blocks import Message, block_messages, fenced, has_blocks, retry_messages
from keystroke.assist.edit.choice import choose, enclosing, spans
from keystroke.assist.edit.doubts import doubt
from keystroke.assist.edit.drift import without_drift
from keystroke.assist.edit.excerpt import excerpt
from keystroke.assist.edit.operations import Addition, Failure, Operation, Reason
from keystroke.assist.edit.patch import is_envelope
from keystroke.assist.edit.pointing import parse_pointing, parts_of, point_messages
from keystroke.assist.edit.question import Question
from keystroke.assist.edit.renaming import renamed
from keystroke.assist.edit.resolve import Resolution, parse_answer, resolve
from keystroke.assist.edit.rewrite import Region, parse_rewrite, rewrite_messages
from keystroke.assist.edit.task import EditTask, Proposal
from keystroke.assist.edit.verdict import judged

WHOLE = 120  # lines of a file that is written anew where nothing says which part is meant
LARGEST = 250  # lines that a model is asked to rewrite at once
# Faults that asking again for the same region can mend; the others need another region.
_MENDED = (Reason.SYNTAX, Reason.TRUNCATED, Reason.ELIDED, Reason.LOST, Reason.DOUBLED, Reason.NO_HUNKS)

Exists = Callable[[str], bool]
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
    blocks well. `retries`: how often one question is asked again with its fault named; 0 asks once and climbs
    no further."""
    told = _Told()
    if task.region is not None:
        return (yield from _one_region(task, task.region, told, retries))
    if (texts := renamed(task.files, task.instruction)) is not None:
        return Proposal(task.files, "", texts)
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
    """Rung by rung: on each a list of regions, one at a time over what the ones before it made."""
    choice = choose(task.files, task.instruction, near=task.near)
    regions = choice.regions
    if not choice.sure:
        whole = _whole(task.files, WHOLE)
        regions = whole or (yield from _pointed(task, told)) or regions
    failure = Failure(
        Reason.NO_PLACE, "", "nothing in the files answers to the instruction; name a function or lines"
    )
    # The parts that words speak for come last where they did not come first.
    last = [choice.regions] if choice.regions and choice.regions != regions else []
    for rung in (*_rungs(task.files, regions), *last):
        result = yield from _all_of(task, rung, told, retries, exists)
        if isinstance(result, Proposal):
            return result
        failure = result
        if not retries:
            break
    return _refused(task, told, failure)


def _rungs(files: Mapping[str, str], regions: Sequence[Region]) -> Iterator[tuple[Region, ...]]:
    """The regions, then the next larger ones, and so on up to whole files, as long as they are not too
    large."""
    rung = tuple(regions) or _whole(files, LARGEST)
    while rung:
        yield rung
        larger = tuple(dict.fromkeys(enclosing(region, files[region.path]) for region in rung))
        rung = larger if larger != rung and all(_size(r, files) <= LARGEST for r in larger) else ()


def _whole(files: Mapping[str, str], most: int) -> tuple[Region, ...]:
    """The one file there is, if it is short enough."""
    path, text = next(iter(files.items()))
    return (Region(path),) if len(files) == 1 and text.count("\n") <= most else ()


def _size(region: Region, files: Mapping[str, str]) -> int:
    return (files[region.path].count("\n") + 1 if region.end is None else region.end) - region.start


def _all_of(
    task: EditTask, regions: Sequence[Region], told: _Told, retries: int, exists: Exists
) -> Generator[Question, str, Proposal | Failure]:
    """One rung. A region that need not change is none, as long as another one does."""
    texts = dict(task.files)
    changed: dict[str, str] = {}
    failure: Failure | None = None
    order = list(task.files)
    # From the end of each file, so that the lines of regions before stay where they are.
    for region in sorted(regions, key=lambda r: (order.index(r.path), -r.start)):
        alone = len(regions) == 1
        result = yield from _rewritten(task, texts, region, told, retries, exists, alone=alone)
        if isinstance(result, Resolution):  # the model answered in blocks after all
            answer = told.answers[-1]
            return Proposal(
                task.files, answer, result.texts, result.moves, result.failures, tuple(told.answers)
            )
        if isinstance(result, Failure):
            if result.reason is not Reason.UNCHANGED:
                return result
            failure = result
            continue
        texts[region.path] = changed[region.path] = result
    if not changed:
        assert failure is not None  # a rung has regions
        return failure
    return _done(task, told, changed)


def _rewritten(
    task: EditTask,
    texts: Mapping[str, str],
    region: Region,
    told: _Told,
    retries: int,
    exists: Exists,
    *,
    alone: bool = True,
) -> Rewriting:
    """One region, asked again with the fault named. The whole file with it, or the last fault. `alone`: no
    other region may change in its stead."""
    text = texts[region.path]
    inside = region.parts(text)[1]
    shown = {
        path: excerpt(content, path, region, task.instruction)
        for path, content in sorted(texts.items(), key=lambda item: item[0] == region.path)
    }
    first = rewrite_messages(region, text, task.instruction, task.rules, shown)
    messages = first
    prediction = fenced(inside, language_of(region.path) or "")
    kept: str | None = None  # a file that holds together, though something speaks against it
    for attempt in range(retries + 1):
        answer = yield Question(messages, prediction, inside)
        told.answers.append(answer)
        result: str | Resolution | Failure
        if task.region is None and (has_blocks(answer) or is_envelope(answer)) and not has_blocks(inside):
            found = read_operations(task, answer, exists)  # nobody asked for blocks; they do as well
            result = found.failures[0] if found.failures else found
        else:
            result = read_rewrite(answer, region, text, task.instruction)
        if isinstance(result, Resolution) or attempt == retries:
            break
        if isinstance(result, Failure):
            mended = result.reason in _MENDED or (alone and result.reason is Reason.UNCHANGED)
            if kept is not None or not (mended or task.region is not None):
                break
            said = _fault(result, task.instruction)
        else:
            doubted = doubt(text, result, region.path, task.instruction) if len(task.files) == 1 else None
            if doubted is None or kept is not None:
                break
            kept, said = result, f"Look again: {doubted}. Write it again, corrected and complete."
        messages = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": said}]
    if kept is None or isinstance(result, Resolution):
        return result
    if isinstance(result, Failure) or doubt(text, result, region.path, task.instruction) is not None:
        return kept
    return result


def _fault(failure: Failure, instruction: str) -> str:
    """What is said to a model whose rewrite does not hold."""
    if failure.reason is Reason.UNCHANGED:
        return f"You wrote the same code again. Make the change: {instruction.strip()}"
    return f"That cannot be used: {failure.message}. Write it again, corrected and complete."


def read_rewrite(answer: str, region: Region, text: str, instruction: str) -> str | Failure:
    """The whole file as an answer leaves it: mended at its edges, judged, and without needless changes."""
    new = parse_rewrite(answer, region, text)
    if isinstance(new, Failure):
        return new
    if new == text:
        return Failure(Reason.UNCHANGED, region.path, "the answer changes nothing")
    new = judged(text, new, region.path, instruction)
    if isinstance(new, Failure):
        return new
    new = without_drift(text, new, region.path, instruction)
    if new == text:
        return Failure(Reason.UNCHANGED, region.path, "the answer changes nothing but blank lines or quotes")
    return new


def _pointed(task: EditTask, told: _Told) -> Generator[Question, str, tuple[Region, ...]]:
    """The regions that the model points at."""
    parts = parts_of(task.files)
    if len(parts) < 2:
        return ()
    answer = yield Question(point_messages(task.files, parts, task.instruction), most=40)
    told.answers.append(answer)
    chosen = parse_pointing(answer, parts)
    return tuple(
        region
        for path, text in task.files.items()
        for region in spans(path, [part.unit for part in chosen if part.path == path], text)
    )


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
