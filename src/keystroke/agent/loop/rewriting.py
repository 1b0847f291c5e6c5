"""A small model at work: the program finds the place, the model writes it anew, several times at once.

The model is asked for one thing at a time, a region, and can answer with nothing else. What it writes is
judged before it becomes part of the task. A round that failed leaves nothing behind, and the next has a
larger region; but where more tests pass, and none fails that passed before, the next begins from there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from keystroke.agent.attempts import Attempt, Outcome, Verdict
from keystroke.agent.chat import Asked, Message
from keystroke.agent.loop.edit_judge import EditJudge, each_said, said
from keystroke.agent.loop.place import about, find_files, find_regions, text_of
from keystroke.agent.loop.region_edit import RegionEdit
from keystroke.agent.loop.renaming import project_renamed
from keystroke.agent.loop.working import Hands, Working
from keystroke.analysis.failures.tally import Tally, tally
from keystroke.analysis.stubs import stubs
from keystroke.assist.edit import Region
from keystroke.assist.edit.choice import enclosing, spans
from keystroke.assist.edit.ladder import WHOLE
from keystroke.assist.edit.pointing import parse_pointing, parts_of, point_messages
from keystroke.assist.edit.rewrite import DESCRIBED
from keystroke.errors import NotFound

_EVERY = re.compile(
    r"\b(?:every|each|all(?: of)?(?: the)?) (?:function|method|class|definition)", re.IGNORECASE
)


class Rewriting(Hands):
    def work(self, task: Working) -> bool:
        """Rounds until the check passes, or a change is there where none was named; given up after `tries`
        that got no further. NotFound where no file answers to the instruction."""
        if self._renamed(task):
            return True
        if task.options.check and task.checked is None:
            task.check()
        regions: list[Region] = []
        in_vain = 0
        while in_vain < task.options.tries:
            begun = task.checked
            failing = [] if begun is None or begun.ok else each_said(begun)
            task.failure = failing[in_vain % len(failing)] if failing else ""
            if not regions or in_vain < len(failing):
                task.refused = ""
                regions = self._regions(task)
            else:
                regions = _larger(regions, {r.path: text_of(task.overlay, r.path) for r in regions})
            if self._round(task, regions):
                return True
            task.tries += 1
            task.keep()
            in_vain = in_vain + 1 if task.checked is begun else 0
        if task.checked is not None and not task.checked.ok:
            task.failure = said(task.checked)
        return False

    def _renamed(self, task: Working) -> bool:
        """Whether the task was nothing but a renaming, and its check passes with it."""
        if task.options.files or task.options.types:
            return False  # names have uses elsewhere; types are asked of what a model wrote
        texts = project_renamed(task.overlay, task.instruction)
        if not texts:
            return False
        task.doing(f"{task.instruction.strip():.100}, without a model, in {', '.join(sorted(texts)):.200}")
        before = task.overlay.fork()
        for name, text in texts.items():
            task.overlay.write(name, text)
        if task.options.check and not task.check().ok:
            task.overlay.take(before)
            task.checked = None
            return False
        task.changed()
        return True

    def _regions(self, task: Working) -> list[Region]:
        """Where to write: what the program is sure of, else what the model points at."""
        files = list(task.options.files) or find_files(task.overlay, task.instruction, task.failure)
        if not files:
            files = task.overlay.files()
            if len(files) != 1:
                raise NotFound(
                    "it is not clear which file the task is about; name it in the task or with --file"
                )
        texts = {name: text_of(task.overlay, name) for name in files}
        if len(files) == 1 and _to_be_written(texts[files[0]], task.instruction):
            return [Region(files[0])]
        choice = find_regions(task.overlay, files, task.instruction, task.failure)
        if choice.regions and choice.sure:
            return list(choice.regions)
        parts = parts_of(texts)
        if len(parts) > 1:
            task.doing(f"look where in {', '.join(files)}")
            reply = self.chat.reply(
                point_messages(texts, parts, task.instruction),
                max_tokens=24,
                interrupt=task.interrupt,
            )
            task.spent(reply.receipt)
            chosen = parse_pointing(reply.text, parts)
            pointed = [
                region
                for name in files
                for region in spans(name, [p.unit for p in chosen if p.path == name], texts[name])
            ]
            if pointed:
                return pointed
        return list(choice.regions) or [Region(files[0])]

    def _round(self, task: Working, regions: Sequence[Region]) -> bool:
        """Every region once, from the end of each file so that lines stay where they are; all or none. The
        check is asked of the last, when everything is there."""
        before, begun = task.overlay.fork(), task.checked
        ordered = sorted(regions, key=lambda region: (region.path, -region.start))
        changed = False
        for number, region in enumerate(ordered):
            last = number + 1 == len(ordered)
            made = self._rewritten(task, region, check=last, needed=last and not changed)
            if made is None:
                if task.checked is begun:
                    task.overlay.take(before)
                return False
            changed = changed or made
        task.failure = ""
        task.changed()
        return True

    def _rewritten(self, task: Working, region: Region, *, check: bool, needed: bool) -> bool | None:
        """Whether the region was changed; None where no attempt holds."""
        options = task.options
        text = text_of(task.overlay, region.path)
        task.doing(f"{'rewrite' if text else 'write'} {about(region, text)}")
        edit = RegionEdit(region, text, task.instruction, task.rules, task.failure, task.refused)
        commands = (options.check, options.types) if check else ()
        judge = EditJudge(task.overlay, edit, task.runner, *commands, needed=needed)
        asked = Asked(
            messages=edit.messages(),
            judge=judge,
            attempts=options.attempts,
            opening=edit.opening,
            prediction=edit.prediction,
            policy=options.policy,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            seed=options.seed + 1000 * task.tries,
            workers=options.workers,
            retry=lambda failed: _again(edit, failed),
            on_attempt=lambda attempt: _told(task, attempt),
        )
        outcome, receipt, steered = self.chat.attempts(
            asked, interrupt=task.interrupt, steering=task.steering
        )
        task.spent(receipt)
        for line in steered.lines:
            task.instruction += f"\n{line}"
        return self._taken(task, edit, judge, outcome)

    def _taken(self, task: Working, edit: RegionEdit, judge: EditJudge, outcome: Outcome) -> bool | None:
        winner = outcome.winner
        if task.options.attempts > 1 or winner is None:
            task.note(outcome.report(), failed=winner is None)
        if winner is None:
            task.refused = "it did not come to an end"
            return None
        changed = judge.changed(winner.text)
        failed = winner.verdict is not None and not winner.verdict.passed
        if isinstance(changed, str) or failed:
            verdict = winner.verdict or Verdict(0.0, str(changed))
            task.refused = verdict.message
            if not self._built_on(task, judge, outcome):
                task.note(f"that does not hold: {_short(verdict)}", failed=True)
            return None
        if changed.texts == task.overlay.texts:
            return False
        task.overlay.take(changed)
        answer = {"role": "assistant", "content": edit.opening + winner.text}
        task.messages += [*edit.messages(), answer]
        return True

    @staticmethod
    def _built_on(task: Working, judge: EditJudge, outcome: Outcome) -> bool:
        """Have the change of the attempt that got furthest, if one got further than the task was."""
        begun = tally(task.checked.output) if task.checked is not None else Tally()
        for attempt in sorted(outcome.attempts, key=lambda attempt: -attempt.score):
            ended = attempt.verdict.ended if attempt.verdict is not None else None
            if ended is None or not (counted := tally(ended.output)).further(begun):
                continue
            changed = judge.changed(attempt.text)
            if not isinstance(changed, str):
                task.overlay.take(changed)
                task.checked = ended
                task.note(f"{counted} now; the next round goes on from there")
                task.changed()
                return True
        return False


def _to_be_written(text: str, instruction: str) -> bool:
    """Whether a short file is the task as a whole: a description of a program, empty functions that it has to
    fill, or every one of its parts. Which of them the words of a description name is chance."""
    described = len(instruction) > DESCRIBED or len(stubs(text)) > 1
    return text.count("\n") <= WHOLE and (described or _EVERY.search(instruction) is not None)


def _larger(regions: Sequence[Region], texts: dict[str, str]) -> list[Region]:
    """The next larger place of each region, each once."""
    return list(dict.fromkeys(enclosing(region, texts[region.path]) for region in regions))


def _again(edit: RegionEdit, failed: Attempt) -> list[Message] | None:
    problem = failed.verdict.message if failed.verdict is not None else failed.reason
    return edit.again(failed.text, problem) if problem and failed.text.strip() else None


def _short(verdict: Verdict) -> str:
    """What is wrong, in a line: how many tests pass, or the last that a command said."""
    lines = [line.strip() for line in verdict.message.splitlines() if line.strip()] or ["it fails"]
    counted = tally(verdict.ended.output) if verdict.ended is not None else Tally()
    return str(counted) if counted.passed + counted.failed else lines[-1 if verdict.score else 0]


def _told(task: Working, attempt: Attempt) -> None:
    """One line about an attempt, where there are several."""
    if task.options.attempts == 1:
        return
    state = attempt.reason or str(attempt.end)
    if attempt.verdict is not None:
        state = "passes" if attempt.verdict.passed else _short(attempt.verdict)
    task.note(f"attempt {attempt.number + 1}: {state:.100}", failed=bool(attempt.reason))
