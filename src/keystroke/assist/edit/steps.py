"""The steps from an instruction to a change: `edit_steps` yields questions and is sent answers.

A renaming needs no question. A model that writes search/replace blocks well is asked for those. Otherwise it
rewrites the regions that the program chose; after a failure it is asked again with the fault named, then for
the next larger region, up to the whole file. All regions of a task are changed, or none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from keystroke.analysis.syntax import language_of
from keystroke.assist.edit.blocks import Message, block_messages, fenced, has_blocks, retry_messages
from keystroke.assist.edit.choice import choose_regions, enclosing_region, regions_for
from keystroke.assist.edit.completeness import find_doubt
from keystroke.assist.edit.drift import remove_drift
from keystroke.assist.edit.excerpt import excerpt
from keystroke.assist.edit.operations import Addition, EditFailure, EditFailureReason, Operation
from keystroke.assist.edit.patch import is_envelope
from keystroke.assist.edit.pointing import list_parts, parse_pointing, point_messages
from keystroke.assist.edit.question import RewriteQuestion
from keystroke.assist.edit.renaming import apply_renaming
from keystroke.assist.edit.resolve import Resolution, parse_answer, resolve
from keystroke.assist.edit.rewrite import Region, parse_rewrite, rewrite_messages
from keystroke.assist.edit.task import EditProposal, EditTask
from keystroke.assist.edit.validation import validate_change

WHOLE = 120  # lines of a file that is rewritten whole where no part can be chosen
LARGEST = 250  # lines that a model is asked to rewrite at once
# Faults that asking again for the same region can correct; the others need another region.
_MENDED = (
    EditFailureReason.SYNTAX,
    EditFailureReason.TRUNCATED,
    EditFailureReason.ELIDED,
    EditFailureReason.LOST,
    EditFailureReason.DOUBLED,
    EditFailureReason.NO_HUNKS,
)

Exists = Callable[[str], bool]
Steps = Generator[RewriteQuestion, str, EditProposal]
Rewriting = Generator[
    RewriteQuestion, str, "str | Resolution | EditFailure"
]  # a file, files, or what is wrong


@dataclass(slots=True)
class _Transcript:
    """The answers so far."""

    answers: list[str] = field(default_factory=list)


def edit_steps(
    task: EditTask, *, blocks: bool = False, retries: int = 1, exists: Exists = lambda path: False
) -> Steps:
    """Ask until the task is done or no larger region is left. `blocks`: the model writes search/replace
    blocks well. `retries`: how often one question is repeated with its fault named; 0 asks once and tries no
    larger region."""
    transcript = _Transcript()
    if task.region is not None:
        return (yield from _one_region(task, task.region, transcript, retries))
    if (texts := apply_renaming(task.files, task.instruction)) is not None:
        return EditProposal(task.files, "", texts)
    if blocks:
        proposal = yield from _by_blocks(task, transcript, retries, exists)
        if not proposal.failures:
            return proposal
    return (yield from _by_regions(task, transcript, retries, exists))


def _one_region(task: EditTask, region: Region, transcript: _Transcript, retries: int) -> Steps:
    """The lines the user chose, and no others."""
    result = yield from _rewrite_region(task, task.files, region, transcript, retries, lambda path: False)
    if isinstance(result, str):
        return _done(task, transcript, {region.path: result})
    assert isinstance(result, EditFailure)  # blocks are not read where a region was given
    return _failed(task, transcript, result)


def _by_blocks(task: EditTask, transcript: _Transcript, retries: int, exists: Exists) -> Steps:
    messages: list[Message] = block_messages(task.files, task.instruction, task.rules)
    prediction = "\n".join(task.files.values())
    for attempt in range(retries + 1):
        answer = yield RewriteQuestion(messages, prediction)
        transcript.answers.append(answer)
        found = read_operations(task, answer, exists)
        if not found.failures or attempt == retries:
            break
        messages = [*messages, *retry_messages(answer, found.failures)]
    return EditProposal(
        task.files, answer, found.texts, found.moves, found.failures, tuple(transcript.answers)
    )


def _by_regions(task: EditTask, transcript: _Transcript, retries: int, exists: Exists) -> Steps:
    """Try the chosen regions, then larger ones."""
    choice = choose_regions(task.files, task.instruction, near=task.near)
    regions = choice.regions
    if not choice.certain:
        whole = _whole(task.files, WHOLE)
        regions = whole or (yield from _ask_for_regions(task, transcript)) or regions
    failure = EditFailure(
        EditFailureReason.NO_PLACE,
        "",
        "nothing in the files answers to the instruction; name a function or lines",
    )
    # The regions chosen by words are tried last if they were not tried first.
    last = [choice.regions] if choice.regions and choice.regions != regions else []
    for level in (*_region_levels(task.files, regions), *last):
        result = yield from _rewrite_all(task, level, transcript, retries, exists)
        if isinstance(result, EditProposal):
            return result
        failure = result
        if not retries:
            break
    return _failed(task, transcript, failure)


def _region_levels(files: Mapping[str, str], regions: Sequence[Region]) -> Iterator[tuple[Region, ...]]:
    """The regions, then the next larger ones, up to whole files that are not too large."""
    level = tuple(regions) or _whole(files, LARGEST)
    while level:
        yield level
        larger = tuple(dict.fromkeys(enclosing_region(region, files[region.path]) for region in level))
        level = larger if larger != level and all(_size(r, files) <= LARGEST for r in larger) else ()


def _whole(files: Mapping[str, str], most: int) -> tuple[Region, ...]:
    """The only file, if it is short enough."""
    path, text = next(iter(files.items()))
    return (Region(path),) if len(files) == 1 and text.count("\n") <= most else ()


def _size(region: Region, files: Mapping[str, str]) -> int:
    return (files[region.path].count("\n") + 1 if region.end is None else region.end) - region.start


def _rewrite_all(
    task: EditTask, regions: Sequence[Region], transcript: _Transcript, retries: int, exists: Exists
) -> Generator[RewriteQuestion, str, EditProposal | EditFailure]:
    """Rewrite all regions. One that need not change is skipped, as long as another one changes."""
    texts = dict(task.files)
    changed: dict[str, str] = {}
    failure: EditFailure | None = None
    order = list(task.files)
    # From the end of each file, so that the line numbers of earlier regions stay valid.
    for region in sorted(regions, key=lambda r: (order.index(r.path), -r.start)):
        alone = len(regions) == 1
        result = yield from _rewrite_region(task, texts, region, transcript, retries, exists, alone=alone)
        if isinstance(result, Resolution):  # the model answered in blocks
            answer = transcript.answers[-1]
            return EditProposal(
                task.files, answer, result.texts, result.moves, result.failures, tuple(transcript.answers)
            )
        if isinstance(result, EditFailure):
            if result.reason is not EditFailureReason.UNCHANGED:
                return result
            failure = result
            continue
        texts[region.path] = changed[region.path] = result
    if not changed:
        assert failure is not None  # there is at least one region
        return failure
    return _done(task, transcript, changed)


def _rewrite_region(
    task: EditTask,
    texts: Mapping[str, str],
    region: Region,
    transcript: _Transcript,
    retries: int,
    exists: Exists,
    *,
    alone: bool = True,
) -> Rewriting:
    """Rewrite one region, asking again with the fault named. Returns the whole file, or the last fault.
    `alone`: there is no other region."""
    text = texts[region.path]
    inside = region.parts(text)[1]
    shown = {
        path: excerpt(content, path, region, task.instruction)
        for path, content in sorted(texts.items(), key=lambda item: item[0] == region.path)
    }
    first = rewrite_messages(region, text, task.instruction, task.rules, shown)
    messages = first
    prediction = fenced(inside, language_of(region.path) or "")
    kept: str | None = None  # a valid file that may be incomplete
    for attempt in range(retries + 1):
        answer = yield RewriteQuestion(messages, prediction, inside)
        transcript.answers.append(answer)
        result: str | Resolution | EditFailure
        if task.region is None and (has_blocks(answer) or is_envelope(answer)) and not has_blocks(inside):
            found = read_operations(task, answer, exists)  # an unrequested but usable format
            result = found.failures[0] if found.failures else found
        else:
            result = read_rewrite(answer, region, text, task.instruction)
        if isinstance(result, Resolution) or attempt == retries:
            break
        if isinstance(result, EditFailure):
            mended = result.reason in _MENDED or (alone and result.reason is EditFailureReason.UNCHANGED)
            if kept is not None or not (mended or task.region is not None):
                break
            said = _fault(result, task.instruction)
        else:
            doubted = (
                find_doubt(text, result, region.path, task.instruction) if len(task.files) == 1 else None
            )
            if doubted is None or kept is not None:
                break
            kept, said = result, f"Look again: {doubted}. Write it again, corrected and complete."
        messages = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": said}]
    if kept is None or isinstance(result, Resolution):
        return result
    if isinstance(result, EditFailure) or find_doubt(text, result, region.path, task.instruction) is not None:
        return kept
    return result


def _fault(failure: EditFailure, instruction: str) -> str:
    """The message to a model whose rewrite is unusable."""
    if failure.reason is EditFailureReason.UNCHANGED:
        return f"You wrote the same code again. Make the change: {instruction.strip()}"
    return f"That cannot be used: {failure.message}. Write it again, corrected and complete."


def read_rewrite(answer: str, region: Region, text: str, instruction: str) -> str | EditFailure:
    """The whole file after an answer: repaired at its edges, validated, without unrequested changes."""
    new = parse_rewrite(answer, region, text)
    if isinstance(new, EditFailure):
        return new
    if new == text:
        return EditFailure(EditFailureReason.UNCHANGED, region.path, "the answer changes nothing")
    new = validate_change(text, new, region.path, instruction)
    if isinstance(new, EditFailure):
        return new
    new = remove_drift(text, new, region.path, instruction)
    if new == text:
        return EditFailure(
            EditFailureReason.UNCHANGED, region.path, "the answer changes nothing but blank lines or quotes"
        )
    return new


def _ask_for_regions(
    task: EditTask, transcript: _Transcript
) -> Generator[RewriteQuestion, str, tuple[Region, ...]]:
    """The regions that the model chooses."""
    parts = list_parts(task.files)
    if len(parts) < 2:
        return ()
    answer = yield RewriteQuestion(point_messages(task.files, parts, task.instruction), most=40)
    transcript.answers.append(answer)
    chosen = parse_pointing(answer, parts)
    return tuple(
        region
        for path, text in task.files.items()
        for region in regions_for(path, [part.unit for part in chosen if part.path == path], text)
    )


# ── answers in blocks ──


def read_operations(task: EditTask, answer: str, exists: Exists) -> Resolution:
    """The result of an answer in blocks, an envelope or a diff."""
    operations = parse_answer(answer, tuple(task.files))
    if isinstance(operations, EditFailure):
        return Resolution(failures=(operations,))
    operations = [_meant(task, operation, exists) for operation in operations]
    for operation in operations:
        if operation.path not in task.files and exists(operation.path):
            unseen = EditFailure(
                EditFailureReason.UNKNOWN_FILE, operation.path, "this file is not part of the task"
            )
            return Resolution(failures=(unseen,))
    return resolve(operations, task.files.get)


def _meant(task: EditTask, operation: Operation, exists: Exists) -> Operation:
    """Complete a shortened path: `app.py` becomes `src/app.py` if that is the only match."""
    path = operation.path
    if isinstance(operation, Addition) or path in task.files or exists(path):
        return operation
    longer = [name for name in task.files if name.endswith(f"/{path}")]
    return dataclasses.replace(operation, path=longer[0]) if len(longer) == 1 else operation


def _done(task: EditTask, transcript: _Transcript, texts: Mapping[str, str]) -> EditProposal:
    return EditProposal(task.files, transcript.answers[-1], dict(texts), answers=tuple(transcript.answers))


def _failed(task: EditTask, transcript: _Transcript, failure: EditFailure) -> EditProposal:
    answer = transcript.answers[-1] if transcript.answers else ""
    return EditProposal(task.files, answer, failures=(failure,), answers=tuple(transcript.answers))
