"""What an attempt at a change is worth: it fits, it parses, it breaks no name, and the named check passes.

Cheap questions first; a change that fails one is not asked the next. Checks run in copies of the
workspace, several at a time; nothing here touches the workspace itself.
"""

from __future__ import annotations

from keystroke.agent.attempts import Verdict, normalised
from keystroke.agent.attempts.judge import COMPLETE, ON, Sign, Watch
from keystroke.agent.loop.region_edit import RegionEdit
from keystroke.agent.sandbox import Ended, Ending
from keystroke.agent.tools import Runner
from keystroke.agent.workspace import Overlay
from keystroke.analysis.failures.tally import tally
from keystroke.analysis.failures.telling import different, telling
from keystroke.analysis.syntax import language_of
from keystroke.assist.edit import Failure
from keystroke.assist.edit.operations import Reason
from keystroke.engine.base import Interrupt

# How far a change got that failed the next question; next to nothing: a score is the share that passed.
_FITS, _TYPED = 0.001, 0.002


class EditJudge:
    """`check` and `types` are shell lines of the user's. `needed`: an answer that changes nothing is none;
    else another region was what had to be changed."""

    def __init__(
        self,
        overlay: Overlay,
        edit: RegionEdit,
        runner: Runner,
        check: str = "",
        types: str = "",
        *,
        needed: bool = True,
    ) -> None:
        self._overlay, self._edit, self._needed = overlay, edit, needed
        self._runner, self._check, self._types = runner, check, types

    def watch(self) -> Watch:
        ended = self._edit.watch()

        def heard(piece: str) -> Sign:
            return COMPLETE if ended(piece) else ON

        return heard

    def changed(self, text: str) -> Overlay | str:
        """The overlay with an attempt's change made, or why it cannot be made."""
        new = self._edit.read(text)
        trial = self._overlay.fork()
        if isinstance(new, str):
            trial.write(self._edit.region.path, new)
        elif self._needed or new.reason is not Reason.UNCHANGED:
            return new.message
        return trial

    def check(self, text: str, interrupt: Interrupt) -> Verdict | None:
        trial = self.changed(text)
        if isinstance(trial, str):
            return Verdict(0.0, trial)
        if self._types:
            typed = self._runner.check(self._types, trial, interrupt)
            if not typed.ok:
                return Verdict(_FITS, f"the types do not fit:\n{said(typed)}")
        if not self._check:
            return None
        ended = self._runner.check(self._check, trial, interrupt)
        if ended.ok:
            return Verdict(1.0)
        share = tally(ended.output).share
        return Verdict(_TYPED + (1 - 2 * _TYPED) * share, f"`{self._check}` fails:\n{said(ended)}", ended)

    def key(self, text: str) -> str:
        new = self._edit.read(text)
        return text if isinstance(new, Failure) else normalised(new, language_of(self._edit.region.path))


def each_said(ended: Ended) -> list[str]:
    """What a failed command says, one failure after the other: a small model mends one at a time."""
    return (different(ended.output) if ended.ending is not Ending.TIMEOUT else []) or [said(ended)]


def said(ended: Ended) -> str:
    """What a failed command says to a model: what was expected and what came, or that it never ended."""
    text = telling(ended.output)
    if ended.ending is Ending.TIMEOUT:
        waited = f"It did not end within {ended.seconds:.0f} seconds and was stopped"
        return f"{waited}: is there an endless loop?\n{text}"
    return text
