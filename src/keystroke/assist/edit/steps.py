"""The steps from an instruction to a change: `edit_steps` yields questions and is sent answers.

A renaming needs no question. A model that writes search/replace blocks well is asked for those. Otherwise it
rewrites the regions that the program chose; after a failure it is asked again with the fault named, then for
the next larger region, up to the whole file. All regions of a task are changed, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from keystroke.analysis.normalise import normalise
from keystroke.analysis.syntax import language_of
from keystroke.assist.edit.blocks import block_messages, fence_text, has_blocks, retry_messages
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
from keystroke.assist.edit.rule_checks import find_violation
from keystroke.assist.edit.task import EditProposal, EditTask, RewriteQuestion
from keystroke.assist.edit.validation import validate_change
from keystroke.assist.edit.writer import BatchWriter, SamplingWriter, Writer
from keystroke.errors import InputError
from keystroke.text import minimal_diff

WHOLE = 120  # lines of a file that is rewritten whole where no part can be chosen
MAX_ANSWER = 4 << 20  # characters
CHEAP = 4  # answers that cost about as much as one; with so many, several are always asked for
MOST = 8  # candidates
FEW = 3  # further candidates where each costs as much as the first
TEMPERATURE = 0.8
HOTTER = 1.0  # used after the checks refused every candidate
LARGEST = 250  # lines that a model is asked to rewrite at once
# Faults that a second question about the same region can correct; the others need another region.
_CORRECTABLE = (
    Reason.SYNTAX, Reason.TRUNCATED, Reason.ELIDED, Reason.LOST, Reason.DOUBLED, Reason.NO_HUNKS,
    Reason.UNUSED, Reason.FOREIGN, Reason.RULES,
)  # fmt: skip

Exists = Callable[[str], bool]
# Scores several texts of a file from 0 to 1, given its path and old text; empty: no score is known.
Checks = Callable[[str, str, Sequence[str]], Sequence[float]]
Answer = str | list[str]  # to a question, or to it and those in its `also`
Steps = Generator[RewriteQuestion, Answer, EditProposal]
Result = str | Resolution | EditFailure  # of a region: the new file, several files, or a failure


def edit_steps(
    task: EditTask,
    *,
    blocks: bool = False,
    retries: int = 1,
    exists: Exists = lambda path: False,
    candidates: int = 0,
    checks: Checks | None = None,
) -> Steps:
    """Ask until the task is done or no larger region is left. `blocks`: the model writes search/replace
    blocks well. `retries`: how often one question is repeated with its fault named; 0 asks once and tries no
    larger region. `candidates`: answers that cost about as much as one; with fewer than four, several are
    asked for only where the first answers fail or leave a doubt; 0: never. `checks` compares candidates."""
    run = _EditRun(task, retries, exists, candidates, checks)
    if task.region is not None:
        return (yield from run.one_region(task.region))
    if (texts := apply_renaming(task.files, task.instruction)) is not None:
        return EditProposal(task.files, "", texts)
    if (question := ambiguous_definitions(task.files, task.instruction)) is not None:
        return EditProposal(task.files, "", failures=(EditFailure(Reason.AMBIGUOUS, "", question),))
    if blocks:
        proposal = yield from run.by_blocks()
        if not proposal.failures:
            return proposal
    return (yield from run.by_regions())


def propose_edit(
    task: EditTask,
    writer: Writer,
    *,
    blocks: bool = False,
    retries: int = 1,
    on_text: Callable[[str], None] | None = None,
    exists: Exists = lambda path: False,
    checks: Checks | None = None,
) -> EditProposal:
    """Let a model perform a task. `blocks`: it writes search/replace blocks well. `exists` tells which paths
    beyond the task's files exist, `checks` which of several candidates does best. Raises InputError for an
    endless answer, and what the writer raises."""
    steps = edit_steps(
        task,
        blocks=blocks,
        retries=retries,
        exists=exists,
        candidates=min(MOST, getattr(writer, "candidates", 0)),
        checks=checks,
    )
    question = next_question(steps, None)
    while isinstance(question, RewriteQuestion):
        if question.also and isinstance(writer, BatchWriter) and writer.parallel > 1:
            question = next_question(steps, writer.write_all((question, *question.also)))
            continue
        if question.temperature and isinstance(writer, SamplingWriter):
            stream = writer.sample(question.messages, question.temperature, question.seed)
        else:
            stream = writer.write(question.messages, question.prediction or None)
        question = next_question(steps, _collect_answer(stream, question.end_detector(), on_text))
    return question


def next_question(steps: Steps, answer: Answer | None) -> RewriteQuestion | EditProposal:
    """The next question after an answer (None: the first one), or the result."""
    try:
        return next(steps) if answer is None else steps.send(answer)
    except StopIteration as stop:
        proposal = stop.value
        assert isinstance(proposal, EditProposal)
        return proposal


def _collect_answer(
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
class _EditRun:
    """One task and the answers so far."""

    task: EditTask
    retries: int
    exists: Exists
    candidates: int = 0
    checks: Checks | None = None
    answers: list[str] = field(default_factory=list)

    def one_region(self, region: Region) -> Steps:
        """The lines the user chose, and no others."""
        result = yield from self._rewrite_region(self.task.files, region)
        if isinstance(result, str):
            return self._make_proposal(Resolution({region.path: result}))
        assert isinstance(result, EditFailure)  # blocks are not read where a region was given
        return self._make_proposal(Resolution(failures=(result,)))

    def by_blocks(self) -> Steps:
        task = self.task
        messages = block_messages(task.files, task.instruction, task.rules)
        prediction = "\n".join(task.files.values())
        for attempt in range(self.retries + 1):
            answer = _first_answer((yield RewriteQuestion(messages, prediction)))
            self.answers.append(answer)
            found = read_operations(task, answer, self.exists)
            if not found.failures or attempt == self.retries:
                break
            messages = [*messages, *retry_messages(answer, found.failures)]
        return self._make_proposal(found)

    def by_regions(self) -> Steps:
        """Try the chosen regions, then larger ones."""
        task = self.task
        choice = choose_regions(task.files, task.instruction, near=task.near)
        regions = choice.regions
        if not choice.certain:
            regions = _whole_file(task.files, WHOLE) or (yield from self._ask_for_regions()) or regions
        message = "nothing in the files answers to the instruction; name a function or lines"
        failure = EditFailure(Reason.NO_PLACE, "", message)
        if self.candidates >= CHEAP and (found := (yield from self._by_candidates(regions, self.candidates))):
            return found
        # The regions chosen by words are tried last if they were not tried first.
        last = [choice.regions] if choice.regions and choice.regions != regions else []
        for level in (*_region_levels(task.files, regions), *last):
            result = yield from self._rewrite_all(level)
            if isinstance(result, Resolution):
                return (yield from self._confirm(result, regions))
            failure = result
            if not self.retries:
                break
        more = self.retries and self._samples_when_unsure and failure.reason is not Reason.NO_PLACE
        if more and (found := (yield from self._by_candidates(regions, FEW))):
            return found
        return self._make_proposal(Resolution(failures=(failure,)))

    @property
    def _samples_when_unsure(self) -> bool:
        """Whether several candidates are asked for only where there is a reason."""
        return 0 < self.candidates < CHEAP

    def _confirm(self, result: Resolution, regions: Sequence[Region]) -> Steps:
        """The result, or what more candidates agree on where it leaves a doubt."""
        task = self.task
        path = next(iter(result.texts)) if len(result.texts) == len(task.files) == 1 else None
        text = result.texts[path] if path is not None else None
        if path is None or text is None or path not in task.files or not self._samples_when_unsure:
            return self._make_proposal(result)
        if not self.retries or self._find_doubt(task.files[path], text, path) is None:
            return self._make_proposal(result)
        found = yield from self._by_candidates(regions, FEW, text)
        return found or self._make_proposal(result)

    def _by_candidates(
        self, regions: Sequence[Region], count: int, first: str | None = None
    ) -> Generator[RewriteQuestion, Answer, EditProposal | None]:
        """Ask for several candidates, drop unusable ones, and return the one that most agree on. `first`: an
        existing candidate. None where no candidate can be used."""
        task = self.task
        if len(task.files) != 1:
            return None
        ((path, text),) = task.files.items()
        options = list(
            dict.fromkeys([*(regions if len(regions) == 1 else ()), *_whole_file(task.files, LARGEST)])
        )
        if not options:
            return None
        cheap = self.candidates >= CHEAP
        found = [] if first is None else [first]
        found += yield from self._ask_all(_sampling_plan(options, count, greedy=cheap))
        scores = self._run_checks(path, text, found)
        if cheap and scores and max(scores.values()) < 1.0:
            more = [(region, HOTTER) for region, _ in _sampling_plan(options, count, greedy=False)]
            found += yield from self._ask_all(more, seed=count)
            scores = self._run_checks(path, text, found)
        if not found:
            return None
        chosen, votes = choose_candidate(found, text, path, task.instruction, task.rules, scores)
        return replace(self._make_proposal(Resolution({path: chosen})), agreement=(votes, len(found)))

    def _ask_all(
        self, options: Sequence[tuple[Region, float]], seed: int = 0
    ) -> Generator[RewriteQuestion, Answer, list[str]]:
        """The usable answers of all candidates: whole files."""
        task = self.task
        text = task.files[options[0][0].path]
        questions = [
            replace(self._make_question(region, task.files), temperature=heat, seed=seed + number)
            for number, (region, heat) in enumerate(options)
        ]
        reply = yield replace(questions[0], also=tuple(questions[1:]))
        answers = reply if isinstance(reply, list) else [reply]
        while len(answers) < len(questions):
            more = yield questions[len(answers)]
            answers += more if isinstance(more, list) else [more]
        self.answers.extend(answers)
        results = (
            read_rewrite(answer, region, text, task.instruction)
            for (region, _), answer in zip(options, answers, strict=True)
        )
        return [result for result in results if isinstance(result, str)]

    def _run_checks(self, path: str, old: str, texts: Sequence[str]) -> dict[str, float]:
        distinct = list(dict.fromkeys(texts))
        if self.checks is None or not distinct:
            return {}
        return dict(zip(distinct, self.checks(path, old, distinct), strict=False))

    def _find_doubt(self, old: str, new: str, path: str) -> str | None:
        """A doubt about a usable change: something is missing, or a rule is broken."""
        task = self.task
        return find_doubt(old, new, path, task.instruction) or find_violation(old, new, path, task.rules)

    def _make_question(self, region: Region, texts: Mapping[str, str]) -> RewriteQuestion:
        task, text = self.task, texts[region.path]
        shown = {
            path: excerpt(content, path, region, task.instruction)
            for path, content in sorted(texts.items(), key=lambda item: item[0] == region.path)
        }
        messages = rewrite_messages(region, text, task.instruction, task.rules, shown)
        inside = region.parts(text)[1]
        return RewriteQuestion(messages, fence_text(inside, language_of(region.path) or ""), inside)

    def _make_proposal(self, found: Resolution) -> EditProposal:
        answer = self.answers[-1] if self.answers else ""
        return EditProposal(
            self.task.files, answer, found.texts, found.moves, found.failures, tuple(self.answers)
        )

    def _rewrite_all(
        self, regions: Sequence[Region]
    ) -> Generator[RewriteQuestion, Answer, Resolution | EditFailure]:
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
    ) -> Generator[RewriteQuestion, Answer, Result]:
        """Rewrite one region, asking again with the fault named. Returns the whole file, or the last fault.
        `alone`: there is no other region."""
        task, text = self.task, texts[region.path]
        first = question = self._make_question(region, texts)
        kept: str | None = None  # a valid file that may be incomplete
        for attempt in range(self.retries + 1):
            answer = _first_answer((yield question))
            self.answers.append(answer)
            result: Result
            in_blocks = (has_blocks(answer) or is_envelope(answer)) and not has_blocks(first.inside or "")
            if task.region is None and in_blocks:
                found = read_operations(task, answer, self.exists)  # an unrequested but usable format
                result = found.failures[0] if found.failures else found
            else:
                result = read_rewrite(answer, region, text, task.instruction)
            if isinstance(result, Resolution) or attempt == self.retries:
                break
            if isinstance(result, EditFailure):
                correctable = result.reason in _CORRECTABLE or (alone and result.reason is Reason.UNCHANGED)
                if kept is not None or not (correctable or task.region is not None):
                    break
                message = _fault_message(result, task.instruction)
            else:
                alone_file = len(task.files) == 1
                doubted = self._find_doubt(text, result, region.path) if alone_file else None
                if doubted is None or kept is not None:
                    break
                kept, message = result, f"Look again: {doubted}. Write it again, corrected and complete."
            again = ({"role": "assistant", "content": answer}, {"role": "user", "content": message})
            question = replace(first, messages=[*first.messages, *again])
        if kept is None or isinstance(result, Resolution):
            return result
        worse = isinstance(result, EditFailure) or self._find_doubt(text, result, region.path)
        return kept if worse else result

    def _ask_for_regions(self) -> Generator[RewriteQuestion, Answer, tuple[Region, ...]]:
        """The regions that the model chooses."""
        files, parts = self.task.files, list_parts(self.task.files)
        if len(parts) < 2:
            return ()
        answer = _first_answer(
            (yield RewriteQuestion(point_messages(files, parts, self.task.instruction), most=40))
        )
        self.answers.append(answer)
        chosen = parse_pointing(answer, parts)
        return tuple(
            region
            for path, text in files.items()
            for region in regions_for(path, [part.unit for part in chosen if part.path == path], text)
        )


def _first_answer(answer: Answer) -> str:
    return answer if isinstance(answer, str) else answer[0]


def _sampling_plan(regions: Sequence[Region], count: int, *, greedy: bool) -> list[tuple[Region, float]]:
    """Which region each candidate rewrites, and how it is sampled: each once greedily, then in turn."""
    options = [(region, 0.0) for region in regions] if greedy else []
    while len(options) < count:
        options.append((regions[-1 - len(options) % len(regions)], TEMPERATURE))
    return options[:count]


def choose_candidate(
    found: Sequence[str],
    old: str,
    path: str,
    instruction: str,
    rules: str = "",
    scores: Mapping[str, float] = MappingProxyType({}),
) -> tuple[str, int]:
    """The text that most candidates agree on, as syntax trees, and how many do; first of those that the
    checks (`scores`) find best. Of equally frequent ones, one without a doubt, then the one that changes
    least."""
    language = language_of(path)
    groups: dict[str, list[str]] = {}
    for text in found:
        groups.setdefault(normalise(text, language), []).append(text)

    def rank(texts: list[str]) -> tuple[float, int, bool, int]:
        doubt = find_doubt(old, texts[0], path, instruction) or find_violation(old, texts[0], path, rules)
        size = sum(len(edit.text) for edit in minimal_diff(old, texts[0]))
        return scores.get(texts[0], 0.0), len(texts), not doubt, -size

    best = max(groups.values(), key=rank)
    return best[0], len(best)


def _region_levels(files: Mapping[str, str], regions: Sequence[Region]) -> Iterator[tuple[Region, ...]]:
    """The regions, then the next larger ones, up to whole files that are not too large."""
    level = tuple(regions) or _whole_file(files, LARGEST)
    while level:
        yield level
        larger = tuple(dict.fromkeys(enclosing_region(region, files[region.path]) for region in level))
        level = larger if larger != level and all(_region_size(r, files) <= LARGEST for r in larger) else ()


def _whole_file(files: Mapping[str, str], most: int) -> tuple[Region, ...]:
    """The only file, if it is short enough."""
    path, text = next(iter(files.items()))
    return (Region(path),) if len(files) == 1 and text.count("\n") <= most else ()


def _region_size(region: Region, files: Mapping[str, str]) -> int:
    return (files[region.path].count("\n") + 1 if region.end is None else region.end) - region.start


def _fault_message(failure: EditFailure, instruction: str) -> str:
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
    operations = [_complete_path(task, operation, exists) for operation in operations]
    unseen = [one.path for one in operations if one.path not in task.files and exists(one.path)]
    if unseen:
        failure = EditFailure(Reason.UNKNOWN_FILE, unseen[0], "this file is not part of the task")
        return Resolution(failures=(failure,))
    return _validate_resolution(task, resolve(operations, task.files.get))


def _validate_resolution(task: EditTask, found: Resolution) -> Resolution:
    """The resolution with every text checked and repaired, or its faults."""
    texts: dict[str, str | None] = dict(found.texts)
    for path, text in found.texts.items():
        if text is None or path in found.moves.values():
            continue
        result = validate_change(task.files.get(path, ""), text, path, task.instruction)
        if isinstance(result, EditFailure):
            return Resolution(failures=(result,))
        texts[path] = result
    return replace(found, texts=texts)


def _complete_path(task: EditTask, operation: Operation, exists: Exists) -> Operation:
    """Complete a shortened path: `app.py` becomes `src/app.py` if that is the only match."""
    path = operation.path
    if isinstance(operation, Addition) or path in task.files or exists(path):
        return operation
    longer = [name for name in task.files if name.endswith(f"/{path}")]
    return replace(operation, path=longer[0]) if len(longer) == 1 else operation
