"""`keystroke run -- COMMAND`: a program as ever, and when something in it fails, where and what to do.

The command's output, exit code and signals are its own. A failure is told while the command still runs,
between two lines of it, on standard error. A fix is written only after it ended and when the user agrees (a
key, or --fix); --verify runs the command again.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keystroke.clients.cli import options
from keystroke.clients.cli.console import DIM, PLAIN, supports_colour
from keystroke.clients.cli.invocation import Invocation, invocation_of
from keystroke.errors import KeystrokeError, UsageError

if TYPE_CHECKING:
    from keystroke.analysis.failures.diagnose import Diagnosis, Repair
    from keystroke.analysis.failures.failure import Failure
    from keystroke.assist.edit import Journal, JournalEntry, Workspace

# What is known of a fix before it is tried. Only --verify runs the command with it.
CHECKED = {"check": "the check finds nothing worse", "parse": "it parses, untried"}
_OFFERED = 3  # failures of one run that fixes are offered for; the last ones are the ones that count


def run(
    ctx: typer.Context,
    command: Annotated[list[str] | None, typer.Argument(metavar="-- COMMAND...", help="The command.")] = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Apply the best fix without asking, when the command has ended.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Run the command again with the fix; keep it only if it helped.")
    ] = False,
    seconds: Annotated[
        float, typer.Option("--verify-seconds", min=0.1, max=86400, help="Time limit of that run.")
    ] = 120.0,
    model: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="Let this model try where no rule helps.")
    ] = None,
    json: options.Json = False,
) -> None:
    from keystroke.clients.cli.command_runner import run_command
    from keystroke.clients.cli.live_run import LiveRun

    invocation = invocation_of(ctx)
    if not command:
        raise UsageError("name the command to run, after --, for example: `keystroke run -- python app.py`")
    work = FailureFixer(invocation, model, as_json=invocation.wants_json(json))
    live = LiveRun(work.diagnose, work.say)
    code = run_command(command, listener=live)
    found = live.finish()
    if code != -signal.SIGINT:
        for diagnosis in found[: -_OFFERED - 1 : -1]:
            if work.offer(diagnosis, command if verify else None, seconds, fix=fix):
                break
    _leave(code)


def _leave(code: int) -> None:
    """End as the command ended: by the same signal, or with the same code."""
    if code >= 0:
        raise typer.Exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    number = -code
    if number in (signal.SIGKILL, signal.SIGSTOP):
        raise typer.Exit(128 + number)
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core file of this crash is enough
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


class FailureFixer:
    """Where a failure is looked at: its workspace, its fixes, the talk about them."""

    def __init__(self, invocation: Invocation, model: str | None, *, as_json: bool) -> None:
        self.invocation, self.model, self.as_json = invocation, model, as_json
        self.texts: dict[str, str] = {}  # as they were when they were looked at
        self._opened: tuple[Workspace, Journal] | None = None
        self._hinted = False

    def _open(self) -> tuple[Workspace, Journal]:
        """When something failed, and not before: a command that goes well pays nothing."""
        from keystroke.clients.cli.changes import open_workspace

        if self._opened is None:
            self._opened = open_workspace(self.invocation)
        return self._opened

    @property
    def workspace(self) -> Workspace:
        return self._open()[0]

    @property
    def journal(self) -> Journal:
        return self._open()[1]

    def diagnose(self, failure: Failure) -> Diagnosis | None:
        """The failure placed in the workspace. None where nothing can be said beyond what was printed."""
        from keystroke.analysis.failures.diagnose import diagnose

        try:
            found = diagnose(failure, self.workspace.root, Path.cwd(), self._text)
        except KeystrokeError:
            return None
        return found if found.path or found.advice else None

    def _text(self, path: str) -> str | None:
        try:
            self.texts[path] = self.workspace.read(path).text
        except KeystrokeError:
            return None
        return self.texts[path]

    def _by_model(self, found: Diagnosis) -> Diagnosis:
        """A fix by the model that follows instructions, where one was named or is configured."""
        import dataclasses

        from keystroke.analysis.rules import project_rules
        from keystroke.assist.fix.model_fix import model_repair
        from keystroke.clients.cli.interruption import interruptible
        from keystroke.clients.cli.writers import open_writer
        from keystroke.engine.roles import Role, advice, model_for

        note = self.invocation.console.note
        name = self.model or model_for(Role.DEEP, self.invocation.settings)
        text = self._text(found.path)
        if text is None:
            return found
        if name is None:
            if not self.as_json and not self._hinted:
                note(f"  no rule mends this; for a model's attempt, {advice(self.invocation.settings)}")
            self._hinted = True
            return found
        rules = project_rules(self.workspace.root / found.path, self.workspace.root).prompt_header()
        try:
            with interruptible() as interrupt, open_writer(name, self.invocation, interrupt) as writer:
                repair = model_repair(found, text, self.workspace.root, writer, rules)
        except KeystrokeError as error:
            note(f"the model could not help: {error}")
            return found
        if repair is None:
            return found
        found = dataclasses.replace(found, repairs=(repair,))
        if self.as_json:
            sys.stderr.write(f"{self._record(found)}\n")
        else:
            note(f"  1. {repair.fix.title} ({repair.path}; {CHECKED[repair.checked]})")
        return found

    def say(self, found: Diagnosis) -> str:
        """What is told about a failure: lines for a person, or one line of JSON. Empty with --quiet."""
        if self.as_json:
            return self._record(found)
        if self.invocation.quiet:
            return ""
        where = ""
        if found.path:
            shown = os.path.relpath(self.workspace.root / found.path)  # a terminal makes it a link
            where = f"{shown}:{found.line}:{f'{found.column}:' if found.column else ''} "
        lines = ["", f"keystroke: {where}{found.title}"]
        if found.code:
            lines.append(f"  {found.line:5} | {found.code[:200]}")
        if found.advice:
            lines.append(f"  {found.advice}")
        for number, repair in enumerate(found.repairs, 1):
            lines.append(f"  {number}. {repair.fix.title} ({repair.path}; {CHECKED[repair.checked]})")
        text = "\n".join(lines)
        return f"{DIM}{text}{PLAIN}" if supports_colour(sys.stderr) else text

    def _record(self, found: Diagnosis) -> str:
        import msgspec

        failure = found.failure
        record = {
            "language": str(failure.language),
            "kind": failure.kind,
            "message": failure.message,
            "path": found.path,
            "line": found.line,
            "column": found.column,
            "advice": found.advice,
            "frames": [{"path": f.path, "line": f.line, "name": f.name} for f in failure.frames],
            "fixes": [
                {
                    "path": repair.path,
                    "title": repair.fix.title,
                    "checked": repair.checked,
                    "edits": [{"start": e.start, "end": e.end, "text": e.text} for e in repair.fix.edits],
                }
                for repair in found.repairs
            ],
        }
        return msgspec.json.encode(record).decode()

    def offer(self, found: Diagnosis, command: list[str] | None, seconds: float, *, fix: bool) -> bool:
        """Apply a fix if the user wants it. Whether something was applied and kept."""
        from keystroke.clients.cli.changes import plan_edits, preview, read_key

        note = self.invocation.console.note
        asked = sys.stdin.isatty() and sys.stderr.isatty() and not self.as_json
        if not found.repairs and found.path and not found.failure.compiled:
            found = self._by_model(found)
        if not found.repairs or not (fix or asked):
            return False
        if any(self.workspace.read(repair.path).text != self.texts[repair.path] for repair in found.repairs):
            return False  # edited while the command ran: the fix was for another text
        chosen = 0
        if not fix:
            for number, repair in enumerate(found.repairs, 1):
                note(f"\n  {number}. {repair.fix.title}")
                preview(self.invocation, repair.path, self.texts[repair.path], repair.fix.edits)
            numbers = "".join(str(n + 1) for n in range(len(found.repairs)))
            pressed = read_key(f"  {found.title[:80]}: apply {'/'.join(numbers)}, or n? ", f"{numbers}n")
            if pressed == "n":
                return False
            chosen = int(pressed) - 1
        for repair in found.repairs[chosen:] if fix else found.repairs[chosen : chosen + 1]:
            plan = plan_edits(
                self.workspace, f"fix {found.title[:80]}", {repair.path: repair.fix.edits}, self.texts
            )
            if fix and not self.as_json:
                preview(self.invocation, repair.path, self.texts[repair.path], repair.fix.edits)
            entry = plan.apply(self.journal)
            note(f"  applied: {repair.fix.title}; `keystroke undo` takes it back")
            if command is None or entry is None or self._verified(found, repair, entry, command, seconds):
                return True
        return False

    def _verified(
        self, found: Diagnosis, repair: Repair, entry: JournalEntry, command: list[str], seconds: float
    ) -> bool:
        from keystroke.analysis.failures.report import find_failures
        from keystroke.clients.cli.command_runner import run_captured

        note = self.invocation.console.note
        try:
            ended = run_captured(command, Path.cwd(), seconds)
        except BaseException:
            self.journal.take_back(entry)
            raise
        same = any(item.place == found.failure.place for item in find_failures(ended.output))
        if ended.code == 0:
            note("  verified: the command now succeeds")
            return True
        if not same and not ended.timed_out:
            note(f"  this failure is gone, but the command still ends with {ended.code}")
            return True
        self.journal.take_back(entry)
        why = f"it did not end within {seconds:g} seconds" if ended.timed_out else "it fails as before"
        note(f"  {repair.fix.title}: {why}, so the fix was taken back")
        return False
