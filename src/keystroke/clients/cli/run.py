"""`keystroke run -- COMMAND`: runs a command, diagnoses its failures and offers fixes.

The command's output, exit code and signals are unchanged. A failure is reported on standard error while the
command runs. A fix is applied only after the command has ended and with consent (a key, or --fix); --verify
runs the command again.
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
from keystroke.clients.cli.options import Invocation, argument, invocation_of, option
from keystroke.errors import KeystrokeError, UsageError
from keystroke.text.terminal import safe_for_terminal

if TYPE_CHECKING:
    from keystroke.analysis.failures.diagnose import Diagnosis, Repair
    from keystroke.analysis.failures.failure import Failure
    from keystroke.assist.edit import Journal, JournalEntry, Workspace

# How a fix was checked. Only --verify runs the command with it.
CHECKED = {"check": "no new errors found", "parse": "parses, not run"}
_OFFERED = 3  # fixes are offered for the last failures of a run


def run(
    ctx: typer.Context,
    command: Annotated[list[str] | None, argument("The command to run.", metavar="-- COMMAND...")] = None,
    fix: Annotated[
        bool, option("--fix", "Apply the best fix without asking, after the command has ended.")
    ] = False,
    verify: Annotated[
        bool, option("--verify", "Run the command again with the fix; keep it only if it helped.")
    ] = False,
    seconds: Annotated[
        float, option("--verify-seconds", "Time limit of that run.", min=0.1, max=86400)
    ] = 120.0,
    model: Annotated[
        str | None, option("Ask this model for a fix if no rule has one.", metavar="MODEL")
    ] = None,
    json: options.Json = False,
    local: options.Local = False,
) -> None:
    from keystroke.clients.cli.command_runner import run_command
    from keystroke.clients.cli.live_run import LiveRun

    invocation = invocation_of(ctx)
    if not command:
        raise UsageError("give the command to run after --, for example: `keystroke run -- python app.py`")
    fixer = FailureFixer(invocation, model)
    live = LiveRun(fixer.diagnose, fixer.describe)
    code = run_command(command, listener=live)
    found = live.finish()
    if code != -signal.SIGINT:
        for diagnosis in found[: -_OFFERED - 1 : -1]:
            if fixer.offer_fix(diagnosis, command if verify else None, seconds, fix=fix):
                break
        else:
            if fix:
                invocation.console.note(_nothing_fixed(code, len(found)))
    _leave(code)


def _nothing_fixed(code: int, failures: int) -> str:
    """What --fix says where it changed nothing."""
    if code == 0 and not failures:
        return "the command succeeded; there was nothing to fix"
    if not failures:
        return (
            f"the command ended with {code}, and no failure in its output is understood; nothing was changed"
        )
    return "no fix was found for this failure; nothing was changed"


def _leave(code: int) -> None:
    """Exit as the command did: by the same signal, or with the same code."""
    if code >= 0:
        raise typer.Exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    number = -code
    if number in (signal.SIGKILL, signal.SIGSTOP):
        raise typer.Exit(128 + number)
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command already wrote a core file
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


class FailureFixer:
    """Diagnoses the failures of a command and applies fixes."""

    def __init__(self, invocation: Invocation, model: str | None) -> None:
        self.invocation, self.model = invocation, model
        self.texts: dict[str, str] = {}  # files as they were when diagnosed
        self._opened: tuple[Workspace, Journal] | None = None
        self._hinted = False

    def _open(self) -> tuple[Workspace, Journal]:
        """Open the workspace on the first failure, so that a successful command costs nothing."""
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
        """Diagnose a failure; None if there is nothing to add to what was printed."""
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

    def _repair_by_model(self, found: Diagnosis) -> Diagnosis:
        """Ask the named or configured model for a fix."""
        import dataclasses

        from keystroke.analysis.rules import project_rules
        from keystroke.assist.fix.model_fix import model_repair
        from keystroke.clients.cli.interruption import interruptible
        from keystroke.clients.cli.writers import open_writer
        from keystroke.engine.roles import Role, chat_model_advice, model_for

        note = self.invocation.console.note
        name = self.model or model_for(Role.DEEP, self.invocation.settings)
        text = self._text(found.path)
        if text is None:
            return found
        if name is None:
            if not self.invocation.json and not self._hinted:
                advice = chat_model_advice(self.invocation.settings)
                note(f"  no rule fixes this; to let a model try, {advice}")
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
        if self.invocation.json:
            sys.stderr.write(f"{self._record(found)}\n")
        else:
            note(f"  1. {repair.fix.title} ({repair.path}; {CHECKED[repair.checked]})")
        return found

    def describe(self, found: Diagnosis) -> str:
        """The report of a failure: some lines of text, or one of JSON. Empty with --quiet."""
        if self.invocation.json:
            return self._record(found)
        if self.invocation.quiet:
            return ""
        where = ""
        if found.path:
            shown = os.path.relpath(self.workspace.root / found.path)  # terminals turn it into a link
            where = f"{shown}:{found.line}:{f'{found.column}:' if found.column else ''} "
        lines = ["", f"keystroke: {where}{found.title}"]
        if found.code:
            lines.append(f"  {found.line:5} | {found.code[:200]}")
        if found.advice:
            lines.append(f"  {found.advice}")
        for number, repair in enumerate(found.repairs, 1):
            lines.append(f"  {number}. {repair.fix.title} ({repair.path}; {CHECKED[repair.checked]})")
        text = "\n".join(lines)
        text = safe_for_terminal(text) if sys.stderr.isatty() else text
        return f"{DIM}{text}{PLAIN}" if supports_colour(sys.stderr) else text

    def _record(self, found: Diagnosis) -> str:
        import msgspec

        from keystroke.clients.cli.changes import edit_records

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
                    "edits": edit_records(repair.fix.edits),
                }
                for repair in found.repairs
            ],
        }
        return msgspec.json.encode(record).decode()

    def offer_fix(self, found: Diagnosis, command: list[str] | None, seconds: float, *, fix: bool) -> bool:
        """Apply a fix if the user agrees. Returns whether a fix was applied and kept."""
        from keystroke.clients.cli.changes import UNDO_HINT, plan_edits, preview, read_key

        note = self.invocation.console.note
        can_ask = sys.stdin.isatty() and sys.stderr.isatty() and not self.invocation.json
        if not found.repairs and found.path and not found.failure.compiled:
            found = self._repair_by_model(found)
        if not found.repairs or not (fix or can_ask):
            return False
        if any(self.workspace.read(repair.path).text != self.texts[repair.path] for repair in found.repairs):
            return False  # a file was edited while the command ran
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
            if fix and not self.invocation.json:
                preview(self.invocation, repair.path, self.texts[repair.path], repair.fix.edits)
            entry = plan.apply(self.journal)
            note(f"  applied: {repair.fix.title}; {UNDO_HINT}")
            if command is None or entry is None or self._verify(found, repair, entry, command, seconds):
                return True
        return False

    def _verify(
        self, found: Diagnosis, repair: Repair, entry: JournalEntry, command: list[str], seconds: float
    ) -> bool:
        from keystroke.analysis.failures.report import find_failures
        from keystroke.clients.cli.command_runner import run_captured

        note = self.invocation.console.note
        try:
            ended = run_captured(command, Path.cwd(), seconds)
        except BaseException:
            self.journal.revert(entry)
            raise
        same = any(item.place == found.failure.place for item in find_failures(ended.output))
        if ended.code == 0:
            note("  verified: the command now succeeds")
            return True
        if not same and not ended.timed_out:
            note(f"  this failure is gone, but the command still ends with {ended.code}")
            return True
        self.journal.revert(entry)
        why = f"did not finish within {seconds:g} seconds" if ended.timed_out else "fails as before"
        note(f"  {repair.fix.title}: the command {why}, so the fix was undone")
        return False
