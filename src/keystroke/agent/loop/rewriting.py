"""A small model at work: the program finds the place, the model writes it anew, several times at once.

Law: the model is asked for one thing at a time, a region, and can answer with nothing else. What it writes is
judged before it becomes part of the task; where nothing holds, the next round has the failure and a larger
region.
"""

from __future__ import annotations

from keystroke.agent.attempts import Attempt
from keystroke.agent.chat import Asked, Message
from keystroke.agent.loop.edit_judge import EditJudge, tail
from keystroke.agent.loop.place import Found, find_files, find_regions
from keystroke.agent.loop.working import Hands, Working
from keystroke.analysis.syntax import language_of
from keystroke.assist.edit import EditTask, Region
from keystroke.assist.edit.blocks import fenced, retry_messages
from keystroke.assist.edit.operations import Failure, Reason
from keystroke.errors import NotFound


class Rewriting(Hands):
    def work(self, task: Working) -> bool:
        """Rounds until the check passes, or a change is there where none was named. NotFound where no file
        answers to the instruction."""
        if task.options.check and not task.failure:
            first = task.check()
            task.failure = "" if first.ok else tail(first)
        places = self._places(task)
        for number in range(task.options.tries):
            place = places[min(number, len(places) - 1)]
            if self._round(task, place):
                return True
            task.tries += 1
            task.keep()
        return False

    def _places(self, task: Working) -> list[Found]:
        """Where to write, best first, each larger or elsewhere than the one before."""
        options = task.options
        files = list(options.files) or find_files(task.overlay, task.instruction, task.failure)
        if not files:
            known = task.overlay.files()
            if len(known) != 1:
                raise NotFound(
                    "it is not clear which file the task is about; name it in the task or with --file"
                )
            files = known
        places = find_regions(task.overlay, files, task.instruction, task.failure)
        whole = [
            Found(Region(name), name) for name in files if Region(name) not in [p.region for p in places]
        ]
        return places + whole

    def _round(self, task: Working, place: Found) -> bool:
        options, region = task.options, place.region
        text = task.overlay.read(region.path)
        if text is None:
            text = ""
        task.doing(f"{'rewrite' if text else 'write'} {place.about}")
        instruction = task.instruction
        if task.failure:
            instruction += f"\n\nThis is what fails now:\n{fenced(task.failure)}"
        edit = EditTask({region.path: text}, instruction, region, task.rules)
        language = language_of(region.path) or ""
        opening = f"```{language}\n"
        judge = EditJudge(task.overlay, edit, opening, task.runner, options.check, options.types)
        asked = Asked(
            messages=edit.messages(),
            judge=judge,
            attempts=options.attempts,
            opening=opening,
            prediction=edit.prediction().partition("\n")[2],
            policy=options.policy,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            seed=options.seed + 1000 * task.tries,
            workers=options.workers,
            retry=lambda failed: _again(edit, opening, failed),
            on_attempt=lambda attempt: _told(task, attempt),
        )
        outcome, receipt, steered = self.chat.attempts(
            asked, interrupt=task.interrupt, steering=task.steering
        )
        task.spent(receipt)
        for line in steered.lines:
            task.instruction += f"\n{line}"
        winner = outcome.winner
        if options.attempts > 1 or winner is None:
            task.note(outcome.report(), failed=winner is None)
        if winner is None:
            task.failure = task.failure or "the answer could not be used"
            return False
        changed = judge.changed(winner.text)
        if isinstance(changed, str) or (winner.verdict is not None and not winner.verdict.passed):
            problem = winner.verdict.message if winner.verdict is not None else str(changed)
            task.note(f"that does not hold: {problem.splitlines()[0] if problem else 'unknown'}", failed=True)
            task.failure = problem
            return False
        for path, new in changed.texts.items():
            task.overlay.write(path, new)
        task.messages += [*edit.messages(), {"role": "assistant", "content": opening + winner.text}]
        task.failure = ""
        task.changed()
        return True


def _again(edit: EditTask, opening: str, failed: Attempt) -> list[Message] | None:
    problem = failed.verdict.message if failed.verdict is not None else failed.reason
    if not problem or not failed.text.strip():
        return None
    failure = Failure(Reason.NOT_FOUND, "", problem)
    return [*edit.messages(), *retry_messages(opening + failed.text, [failure])]


def _told(task: Working, attempt: Attempt) -> None:
    """One line about an attempt, where there are several."""
    if task.options.attempts == 1:
        return
    state = attempt.reason or str(attempt.end)
    if attempt.verdict is not None:
        state = "passes" if attempt.verdict.passed else (attempt.verdict.message.splitlines() or ["fails"])[0]
    task.note(f"attempt {attempt.number + 1}: {state:.100}", failed=bool(attempt.reason))
