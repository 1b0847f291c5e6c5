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
from keystroke.assist.edit.blocks import block_messages, fenced, has_blocks, retry_messages
from keystroke.assist.edit.choice import choose_regions, enclosing_region, regions_for
from keystroke.assist.edit.completeness import find_doubt
from keystroke.assist.edit.drift import remove_drift
from keystroke.assist.edit.excerpt import excerpt
from keystroke.assist.edit.operations import Addition, EditFailure, Operation
from keystroke.assist.edit.operations import EditFailureReason as Reason
from keystroke.assist.edit.patch import is_envelope
from keystroke.assist.edit.pointing import list_parts, parse_pointing, point_messages
from keystroke.assist.edit.renaming import ambiguous_definitions, apply_renaming
from keystroke.assist.edit.resolve import Resolution, parse_answer, resolve
from keystroke.assist.edit.rewrite import Region, parse_rewrite, rewrite_messages
from keystroke.assist.edit.task import EditProposal, EditTask, RewriteQuestion
from keystroke.assist.edit.validation import validate_change
from keystroke.assist.edit.writer import Writer
from keystroke.errors import InputError

WHOLE = 120  # lines of a file that is rewritten whole where no part can be chosen
MAX_ANSWER = 4 << 20  # characters
LARGEST = 250  # lines that a model is asked to rewrite at once
# Faults that asking again for the same region can correct; the others need another region.
_MENDED = (
    Reason.SYNTAX, Reason.TRUNCATED, Reason.ELIDED, Reason.LOST, Reason.DOUBLED, Reason.NO_HUNKS,
    Reason.UNUSED, Reason.FOREIGN, Reason.RULES,
)  # fmt: skip

Exists = Callable[[str], bool]
Steps = Generator[RewriteQuestion, str, EditProposal]
Result = str | Resolution | EditFailure  # of a region: the whole file, several files, or what is wrong


def edit_steps(
    task: EditTask, *, blocks: bool = False, retries: int = 1, exists: Exists = lambda path: False
) -> Steps:
    """Ask until the task is done or no larger region is left. `blocks`: the model writes search/replace
    blocks well. `retries`: how often one question is repeated with its fault named; 0 asks once and tries no
    larger region."""
    asking = _Asking(task, retries, exists)
    if task.region is not None:
        return (yield from asking.one_region(task.region))
    if (texts := apply_renaming(task.files, task.instruction)) is not None:
        return EditProposal(task.files, "", texts)
    if (question := ambiguous_definitions(task.files, task.instruction)) is not None:
        return EditProposal(task.files, "", failures=(EditFailure(Reason.AMBIGUOUS, "", question),))
    if blocks:
        proposal = yield from asking.by_blocks()
        if not proposal.failures:
            return proposal
    return (yield from asking.by_regions())


def propose_edit(
    task: EditTask,
    writer: Writer,
    *,
    blocks: bool = False,
    retries: int = 1,
    on_text: Callable[[str], None] | None = None,
    exists: Exists = lambda path: False,
) -> EditProposal:
    """Let a model perform a task. `blocks`: it writes search/replace blocks well. `exists` tells which paths
    beyond the task's files exist. Raises InputError for an endless answer, and what the writer raises."""
    steps = edit_steps(task, blocks=blocks, retries=retries, exists=exists)
    try:
        question = next(steps)
        while True:
            stream = writer.write(question.messages, question.prediction or None)
            question = steps.send(_answered(stream, question.end_detector(), on_text))
    except StopIteration as stop:
        proposal = stop.value
        assert isinstance(proposal, EditProposal)
        return proposal


def _answered(
    stream: Iterator[str], ended: Callable[[str], bool], on_text: Callable[[str], None] | None
) -> str:
    pieces: list[str] = []
    size = 0
    for piece in stream:
        pieces.append(piece)
        size += len(piece)
        if on_text is not None:
            on_text(piece)
        if size > MAX_ANSWER:
            raise InputError(f"the model wrote more than {MAX_ANSWER:,} characters; ask for a smaller change")
        if ended(piece):
            break
    if isinstance(stream, Generator):
        stream.close()  # releases the model's session or connection now
    return "".join(pieces)


@dataclass(frozen=True, slots=True)
class _Asking:
    """One task with the answers so far."""

    task: EditTask
    retries: int
    exists: Exists
    answers: list[str] = field(default_factory=list)

    def one_region(self, region: Region) -> Steps:
        """The lines the user chose, and no others."""
        result = yield from self._rewrite_region(self.task.files, region)
        if isinstance(result, str):
            return self._proposal(Resolution({region.path: result}))
        assert isinstance(result, EditFailure)  # blocks are not read where a region was given
        return self._proposal(Resolution(failures=(result,)))

    def by_blocks(self) -> Steps:
        task = self.task
        messages = block_messages(task.files, task.instruction, task.rules)
        prediction = "\n".join(task.files.values())
        for attempt in range(self.retries + 1):
            answer = yield RewriteQuestion(messages, prediction)
            self.answers.append(answer)
            found = read_operations(task, answer, self.exists)
            if not found.failures or attempt == self.retries:
                break
            messages = [*messages, *retry_messages(answer, found.failures)]
        return self._proposal(found)

    def by_regions(self) -> Steps:
        """Try the chosen regions, then larger ones."""
        task = self.task
        choice = choose_regions(task.files, task.instruction, near=task.near)
        regions = choice.regions
        if not choice.certain:
            regions = _whole(task.files, WHOLE) or (yield from self._ask_for_regions()) or regions
        message = "nothing in the files answers to the instruction; name a function or lines"
        failure = EditFailure(Reason.NO_PLACE, "", message)
        # The regions chosen by words are tried last if they were not tried first.
        last = [choice.regions] if choice.regions and choice.regions != regions else []
        for level in (*_region_levels(task.files, regions), *last):
            result = yield from self._rewrite_all(level)
            if isinstance(result, Resolution):
                return self._proposal(result)
            failure = result
            if not self.retries:
                break
        return self._proposal(Resolution(failures=(failure,)))

    def _proposal(self, found: Resolution) -> EditProposal:
        answer = self.answers[-1] if self.answers else ""
        return EditProposal(
            self.task.files, answer, found.texts, found.moves, found.failures, tuple(self.answers)
        )

    def _rewrite_all(
        self, regions: Sequence[Region]
    ) -> Generator[RewriteQuestion, str, Resolution | EditFailure]:
        """Rewrite all regions. One that need not change is skipped, as long as another one changes."""
        texts = dict(self.task.files)
        changed: dict[str, str] = {}
        failure: EditFailure | None = None
        order = list(texts)
        # From the end of each file, so that the line numbers of earlier regions stay valid.
        for region in sorted(regions, key=lambda r: (order.index(r.path), -r.start)):
            result = yield from self._rewrite_region(texts, region, alone=len(regions) == 1)
            if isinstance(result, Resolution):  # the model answered in blocks
                return result
            if isinstance(result, str):
                texts[region.path] = changed[region.path] = result
            elif result.reason is Reason.UNCHANGED:
                failure = result
            else:
                return result
        if changed:
            return Resolution(changed)
        assert failure is not None  # there is at least one region
        return failure

    def _rewrite_region(
        self, texts: Mapping[str, str], region: Region, *, alone: bool = True
    ) -> Generator[RewriteQuestion, str, Result]:
        """Rewrite one region, asking again with the fault named. Returns the whole file, or the last fault.
        `alone`: there is no other region."""
        task, text = self.task, texts[region.path]
        inside = region.parts(text)[1]
        shown = {
            path: excerpt(content, path, region, task.instruction)
            for path, content in sorted(texts.items(), key=lambda item: item[0] == region.path)
        }
        first = rewrite_messages(region, text, task.instruction, task.rules, shown)
        messages = first
        prediction = fenced(inside, language_of(region.path) or "")
        kept: str | None = None  # a valid file that may be incomplete
        for attempt in range(self.retries + 1):
            answer = yield RewriteQuestion(messages, prediction, inside)
            self.answers.append(answer)
            result: Result
            if task.region is None and (has_blocks(answer) or is_envelope(answer)) and not has_blocks(inside):
                found = read_operations(task, answer, self.exists)  # an unrequested but usable format
                result = found.failures[0] if found.failures else found
            else:
                result = read_rewrite(answer, region, text, task.instruction)
            if isinstance(result, Resolution) or attempt == self.retries:
                break
            if isinstance(result, EditFailure):
                mended = result.reason in _MENDED or (alone and result.reason is Reason.UNCHANGED)
                if kept is not None or not (mended or task.region is not None):
                    break
                said = _fault(result, task.instruction)
            else:
                alone_file = len(task.files) == 1
                doubted = find_doubt(text, result, region.path, task.instruction) if alone_file else None
                if doubted is None or kept is not None:
                    break
                kept, said = result, f"Look again: {doubted}. Write it again, corrected and complete."
            messages = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": said}]
        if kept is None or isinstance(result, Resolution):
            return result
        worse = isinstance(result, EditFailure) or find_doubt(text, result, region.path, task.instruction)
        return kept if worse else result

    def _ask_for_regions(self) -> Generator[RewriteQuestion, str, tuple[Region, ...]]:
        """The regions that the model chooses."""
        files, parts = self.task.files, list_parts(self.task.files)
        if len(parts) < 2:
            return ()
        answer = yield RewriteQuestion(point_messages(files, parts, self.task.instruction), most=40)
        self.answers.append(answer)
        chosen = parse_pointing(answer, parts)
        return tuple(
            region
            for path, text in files.items()
            for region in regions_for(path, [part.unit for part in chosen if part.path == path], text)
        )


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


def _fault(failure: EditFailure, instruction: str) -> str:
    """The message to a model whose rewrite is unusable."""
    if failure.reason is Reason.UNCHANGED:
        return f"You wrote the same code again. Make the change: {instruction.strip()}"
    return f"That cannot be used: {failure.message}. Write it again, corrected and complete."


def read_rewrite(answer: str, region: Region, text: str, instruction: str) -> str | EditFailure:
    """The whole file after an answer: repaired at its edges, validated, without unrequested changes."""
    new = parse_rewrite(answer, region, text)
    what = "the answer changes nothing"
    if isinstance(new, str) and new != text:
        new = validate_change(text, new, region.path, instruction)
        if isinstance(new, str):
            new = remove_drift(text, new, region.path, instruction)
            what = "the answer changes nothing but blank lines or quotes"
    return EditFailure(Reason.UNCHANGED, region.path, what) if new == text else new


# ── answers in blocks ──


def read_operations(task: EditTask, answer: str, exists: Exists) -> Resolution:
    """The result of an answer in blocks, an envelope or a diff."""
    operations = parse_answer(answer, tuple(task.files))
    if isinstance(operations, EditFailure):
        return Resolution(failures=(operations,))
    operations = [_meant(task, operation, exists) for operation in operations]
    for operation in operations:
        if operation.path not in task.files and exists(operation.path):
            message = "this file is not part of the task"
            unseen = EditFailure(Reason.UNKNOWN_FILE, operation.path, message)
            return Resolution(failures=(unseen,))
    return _validated(task, resolve(operations, task.files.get))


def _validated(task: EditTask, found: Resolution) -> Resolution:
    """The resolution with every text checked and repaired, or its faults."""
    texts: dict[str, str | None] = dict(found.texts)
    for path, text in found.texts.items():
        if text is None or path in found.moves.values():
            continue
        result = validate_change(task.files.get(path, ""), text, path, task.instruction)
        if isinstance(result, EditFailure):
            return Resolution(failures=(result,))
        texts[path] = result
    return dataclasses.replace(found, texts=texts)


def _meant(task: EditTask, operation: Operation, exists: Exists) -> Operation:
    """Complete a shortened path: `app.py` becomes `src/app.py` if that is the only match."""
    path = operation.path
    if isinstance(operation, Addition) or path in task.files or exists(path):
        return operation
    longer = [name for name in task.files if name.endswith(f"/{path}")]
    return dataclasses.replace(operation, path=longer[0]) if len(longer) == 1 else operation
