"""What an attempt at a change is worth: it fits, it parses, it breaks no name, and the named check passes.

Law: cheap questions first; a change that fails one is not asked the next. Checks run in copies of the
workspace, several at a time; nothing here touches the workspace itself.
"""

from __future__ import annotations

import re
from pathlib import Path

from keystroke.agent.attempts import Verdict, normalised
from keystroke.agent.attempts.judge import COMPLETE, ON, Go, Sign, Watch
from keystroke.agent.sandbox import Ended
from keystroke.agent.tools import Runner
from keystroke.agent.workspace import Overlay
from keystroke.analysis.check import Level, Project, check, concerns
from keystroke.analysis.syntax import error_count, language_of
from keystroke.assist.edit import EditTask
from keystroke.engine.base import Interrupt
from keystroke.errors import Forbidden, InputError, KeystrokeError

_FITS, _PARSES, _SOUND, _TYPED = 0.05, 0.15, 0.3, 0.4  # how far a change got that failed the next question
_REPEATED = 24  # equal lines in a row from which an answer is taken to be a loop
_OUTPUT = 1500  # characters of a check's output that a model is shown


class EditJudge:
    """`opening` stands before every answer; `check` and `types` are shell lines of the user's."""

    def __init__(
        self,
        overlay: Overlay,
        task: EditTask,
        opening: str = "",
        runner: Runner | None = None,
        check: str = "",
        types: str = "",
    ) -> None:
        self._overlay, self._task, self._opening = overlay, task, opening
        self._runner, self._check, self._types = runner, check, types
        self._before = {path: _errors(overlay, path, text) for path, text in task.files.items()}

    def watch(self) -> Watch:
        ended = self._task.watch()
        ended(self._opening)
        loop = _Loop()

        def heard(piece: str) -> Sign:
            if ended(piece):
                return COMPLETE
            return Sign(Go.HOPELESS, "a line comes over and over") if loop.heard(piece) else ON

        return heard

    def changed(self, text: str) -> Overlay | str:
        """The overlay with an attempt's change made, or why it cannot be made."""
        proposal = self._task.read(self._opening + text, self._exists)
        if proposal.failures:
            return "; ".join(failure.message for failure in proposal.failures)
        trial = self._overlay.fork()
        try:
            for path, new in proposal.texts.items():
                trial.write(path, new)
        except (Forbidden, InputError) as error:
            return str(error)
        return trial

    def check(self, text: str, interrupt: Interrupt) -> Verdict | None:
        trial = self.changed(text)
        if isinstance(trial, str):
            return Verdict(0.0, trial)
        for path, new in trial.texts.items():
            if new is None or new == self._overlay.texts.get(path, ...):
                continue
            if (problem := self._broken(path, new)) is not None:
                return problem
        if self._runner is None:
            return None
        if self._types:
            typed = self._runner.check(self._types, trial, interrupt)
            if not typed.ok:
                return Verdict(_SOUND, f"the types do not fit:\n{tail(typed)}")
        if not self._check:
            return None
        ended = self._runner.check(self._check, trial, interrupt)
        if ended.ok:
            return Verdict(1.0)
        return Verdict(_TYPED + 0.5 * share_passed(ended.output), f"`{self._check}` fails:\n{tail(ended)}")

    def key(self, text: str) -> str:
        trial = self.changed(text)
        if isinstance(trial, str):
            return text
        return "\n".join(
            f"{path}\n{normalised(new, language_of(path)) if new is not None else ''}"
            for path, new in sorted(trial.texts.items())
        )

    def _exists(self, path: str) -> bool:
        try:
            return self._overlay.read(path) is not None
        except KeystrokeError:
            return True  # not to be touched

    def _broken(self, path: str, new: str) -> Verdict | None:
        """What a new text breaks that was whole before."""
        language = language_of(path)
        old = self._task.files.get(path, "")
        if language and error_count(new, language) > error_count(old, language):
            return Verdict(_FITS, f"{path} would no longer parse")
        fresh = _errors(self._overlay, path, new) - self._before.get(path, set())
        if fresh:
            return Verdict(_PARSES, f"{path}: {'; '.join(sorted(fresh)[:3])}")
        return None


def _errors(overlay: Overlay, path: str, text: str) -> set[str]:
    """What will fail when a text runs, as far as reading it tells."""
    if not concerns(path):
        return set()
    root = overlay.workspace.root
    try:
        found = check(text, root / path, project=Project(Path(root)), fixes=False)
    except KeystrokeError:
        return set()
    return {item.message for item in found if item.level is Level.ERROR}


def share_passed(output: str) -> float:
    """The share of tests that passed, where a runner says so in its summary."""
    passed = sum(map(int, re.findall(r"\b(\d{1,6}) (?:passed|passing)\b", output)))
    failed = sum(map(int, re.findall(r"\b(\d{1,6}) (?:failed|failing|errors?)\b", output)))
    return passed / (passed + failed) if passed + failed else 0.0


def tail(ended: Ended) -> str:
    """The end of what a command printed: where runners say what failed."""
    text = ended.output.strip()
    return text if len(text) <= _OUTPUT else f"…{text[-_OUTPUT:]}"


class _Loop:
    """Hears whether one line comes over and over."""

    def __init__(self) -> None:
        self._line, self._rest, self._run = "", "", 0

    def heard(self, piece: str) -> bool:
        *lines, self._rest = (self._rest + piece).split("\n")
        for line in lines:
            self._run = self._run + 1 if line.strip() and line == self._line else 0
            self._line = line
            if self._run >= _REPEATED:
                return True
        return False
