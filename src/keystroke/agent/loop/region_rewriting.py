"""The strategy for small models: the program finds a region, the model rewrites it, in several attempts at
once.

What the model writes is checked before it becomes part of the task. A failed round leaves no change behind
and the next round gets a larger region; but where more tests pass and none fails that passed before, the
next round starts from that change.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from keystroke.agent.attempts import Attempt, CheckResult, RaceResult
from keystroke.agent.chat.sampling import SamplingRequest
from keystroke.agent.chat.steering import Message
from keystroke.agent.loop.edit_checker import EditChecker, failure_message, failure_messages
from keystroke.agent.loop.locate import describe_region, find_files, find_regions, read_text
from keystroke.agent.loop.region_edit import RegionEdit
from keystroke.agent.loop.renaming import rename_in_project
from keystroke.agent.loop.state import AgentStrategy, TaskState
from keystroke.analysis.failures.tally import PassFailTally, count_tests
from keystroke.analysis.stubs import find_stubs
from keystroke.assist.edit import Region
from keystroke.assist.edit.choice import enclosing_region, regions_for
from keystroke.assist.edit.pointing import list_parts, parse_pointing, point_messages
from keystroke.assist.edit.rewrite import LONG_TASK
from keystroke.assist.edit.steps import WHOLE
from keystroke.errors import NotFound

_EVERY = re.compile(
    r"\b(?:every|each|all(?: of)?(?: the)?) (?:function|method|class|definition)", re.IGNORECASE
)


class RewriteStrategy(AgentStrategy):
    def run(self, task: TaskState) -> bool:
        """Rewrite in rounds until the check passes or, without a check, until there is a change. Gives up
        after `tries` rounds without progress. NotFound where no file matches the instruction."""
        if self._rename(task):
            return True
        if task.options.check and task.last_check is None:
            task.run_check()
        regions: list[Region] = []
        fruitless = 0
        while fruitless < task.options.tries:
            before = task.last_check
            failing = [] if before is None or before.ok else failure_messages(before)
            task.failure = failing[fruitless % len(failing)] if failing else ""
            if not regions or fruitless < len(failing):
                task.refused = ""
                regions = self._find_regions(task)
            else:
                regions = _enlarge(regions, {r.path: read_text(task.overlay, r.path) for r in regions})
            if self._rewrite_all(task, regions):
                return True
            task.tries += 1
            task.save()
            fruitless = fruitless + 1 if task.last_check is before else 0
        if task.last_check is not None and not task.last_check.ok:
            task.failure = failure_message(task.last_check)
        return False

    def _rename(self, task: TaskState) -> bool:
        """Do a task that is only a rename, without a model. False where it is not, or its check fails.
        InputError where several definitions have the name."""
        if task.options.types:
            return False  # types are checked for what a model wrote
        texts = rename_in_project(task.overlay, task.instruction, task.options.files)
        if not texts:
            return False
        task.begin_step(
            f"{task.instruction.strip():.100}, without a model, in {', '.join(sorted(texts)):.200}"
        )
        before = task.overlay.fork()
        for name, text in texts.items():
            task.overlay.write(name, text)
        if task.options.check and not task.run_check().ok:
            task.overlay.replace_with(before)
            task.last_check = None
            return False
        task.report_change()
        return True

    def _find_regions(self, task: TaskState) -> list[Region]:
        """The regions that the program is sure of, else those that the model selects."""
        files = list(task.options.files) or find_files(task.overlay, task.instruction, task.failure)
        if not files:
            files = list(task.files) or task.overlay.files()
            if len(files) != 1:
                raise NotFound(
                    "it is unclear which file the task is about; name it in the task or with --file"
                )
        task.files = tuple(files)
        for name in files:
            task.overlay.check_writable(name)
        texts = {name: read_text(task.overlay, name) for name in files}
        if len(files) == 1 and _is_whole_file(texts[files[0]], task.instruction):
            return [Region(files[0])]
        choice = find_regions(task.overlay, files, task.instruction, task.failure)
        if choice.regions and choice.certain:
            return list(choice.regions)
        parts = list_parts(texts)
        if len(parts) > 1:
            task.begin_step(f"find the place in {', '.join(files)}")
            with task.busy:
                reply = self.model.reply(
                    point_messages(texts, parts, task.instruction), task.answer_options(24)
                )
            task.add_receipt(reply.receipt)
            chosen = parse_pointing(reply.text, parts)
            chosen_regions = [
                region
                for name in files
                for region in regions_for(name, [p.unit for p in chosen if p.path == name], texts[name])
            ]
            if chosen_regions:
                return chosen_regions
        return list(choice.regions) or [Region(files[0])]

    def _rewrite_all(self, task: TaskState, regions: Sequence[Region]) -> bool:
        """Rewrite every region once, all or none, from the end of each file so that line numbers stay
        valid. The check runs with the last region, when the whole change is there."""
        before, last_check = task.overlay.fork(), task.last_check
        ordered = sorted(regions, key=lambda region: (region.path, -region.start))
        changed = False
        for number, region in enumerate(ordered):
            last = number + 1 == len(ordered)
            did_change = self._rewrite(task, region, check=last, needed=last and not changed)
            if did_change is None:
                if task.last_check is last_check:
                    task.overlay.replace_with(before)
                return False
            changed = changed or did_change
        task.failure = ""
        task.report_change()
        return True

    def _rewrite(self, task: TaskState, region: Region, *, check: bool, needed: bool) -> bool | None:
        """Whether the region was changed; None where no attempt passes."""
        options = task.options
        text = read_text(task.overlay, region.path)
        task.begin_step(f"{'rewrite' if text else 'write'} {describe_region(region, text)}")
        edit = RegionEdit(region, text, task.instruction, task.rules, task.failure, task.refused)
        commands = (options.check, options.types) if check else ()
        # The first round enforces the project's rules; later a change that breaks one is applied and
        # reported.
        checker = EditChecker(
            task.overlay,
            edit,
            task.runner,
            *commands,
            needed=needed,
            keep_rules=task.tries == 0,
            before=task.last_check,
        )
        messages = edit.messages()
        question = str(messages[-1]["content"])
        asked_before = question in task.asked
        task.asked.add(question)
        request = SamplingRequest(
            messages=messages,
            checker=checker,
            attempts=task.attempts(self.model),
            greedy=not asked_before,
            opening=edit.opening,
            prediction=edit.prediction,
            policy=options.policy,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            seed=options.seed + 1000 * task.tries,
            workers=options.workers,
            retry=lambda failed: _retry_messages(edit, failed),
            on_attempt=lambda attempt: _note_attempt(task, attempt, task.attempts(self.model)),
            interrupt=task.control.interrupt,
            steering=task.control.steering,
            busy=task.busy,
        )
        if check and options.check:
            task.runner.prepare_check(options.check)
        result = self.model.sample(request)
        task.add_receipt(result.receipt)
        for line in result.steering_lines:
            task.instruction += f"\n{line}"
        return self._accept(task, edit, checker, result.race)

    def _accept(
        self, task: TaskState, edit: RegionEdit, checker: EditChecker, race: RaceResult
    ) -> bool | None:
        """Make the winner's change part of the task. Returns as `_rewrite` does."""
        winner = race.winner
        if len(race.attempts) > 1 or winner is None:
            task.note(race.summary(), failed=winner is None)
        if winner is None:
            task.refused = "it did not come to an end"
            return None
        changed = checker.apply_answer(winner.text)
        if isinstance(changed, str) or (winner.check_result is not None and not winner.passed):
            result = winner.check_result or CheckResult(0.0, str(changed))
            task.refused = result.message
            if not self._keep_progress(task, checker, race):
                task.note(f"the change fails: {_short_reason(result)}", failed=True)
            return None
        if changed.texts == task.overlay.texts:
            return False
        task.overlay.replace_with(changed)
        answer = {"role": "assistant", "content": edit.opening + winner.text}
        task.messages += [*edit.messages(), answer]
        return True

    @staticmethod
    def _keep_progress(task: TaskState, checker: EditChecker, race: RaceResult) -> bool:
        """Adopt the change of the best attempt, if more tests pass with it than before."""
        before = count_tests(task.last_check.output) if task.last_check is not None else PassFailTally()
        for attempt in sorted(race.attempts, key=lambda attempt: -attempt.score):
            result = attempt.check_result.command if attempt.check_result is not None else None
            if result is None or not (counts := count_tests(result.output)).improves_on(before):
                continue
            changed = checker.apply_answer(attempt.text)
            if not isinstance(changed, str):
                task.overlay.replace_with(changed)
                task.last_check = result
                task.note(f"{counts} now; the next round starts from this change")
                task.report_change()
                return True
        return False


def _is_whole_file(text: str, instruction: str) -> bool:
    """Whether a short file is to be rewritten as a whole: the instruction describes a program, the file
    has several empty functions, or every definition is meant. A long description names parts of it only by
    chance."""
    described = len(instruction) > LONG_TASK or len(find_stubs(text)) > 1
    return text.count("\n") <= WHOLE and (described or _EVERY.search(instruction) is not None)


def _enlarge(regions: Sequence[Region], texts: dict[str, str]) -> list[Region]:
    """The next larger region around each region, without duplicates."""
    return list(dict.fromkeys(enclosing_region(region, texts[region.path]) for region in regions))


def _retry_messages(edit: RegionEdit, failed: Attempt) -> list[Message] | None:
    problem = failed.check_result.message if failed.check_result is not None else failed.reason
    return edit.retry_messages(failed.text, problem) if problem and failed.text.strip() else None


def _short_reason(verdict: CheckResult) -> str:
    """One line: how many tests pass, or the last line of a command's output."""
    lines = [line.strip() for line in verdict.message.splitlines() if line.strip()] or ["it fails"]
    counted = count_tests(verdict.command.output) if verdict.command is not None else PassFailTally()
    return str(counted) if counted.passed + counted.failed else lines[-1 if verdict.score else 0]


def _note_attempt(task: TaskState, attempt: Attempt, attempts: int) -> None:
    """Report one of several attempts in a line."""
    if attempts == 1:
        return
    state = attempt.reason or str(attempt.end)
    if attempt.check_result is not None:
        state = "passes" if attempt.check_result.passed else _short_reason(attempt.check_result)
    task.note(f"attempt {attempt.number + 1}: {state:.100}", failed=bool(attempt.reason))
