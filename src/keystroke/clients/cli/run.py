"""`keystroke run -- COMMAND`: a program as ever, and when it fails, where and what to do.

Law: the command's output, exit code and signals are its own; what we have to say comes afterwards, on
standard error. A fix is written only when the user agrees (a key, or --fix); --verify runs the command again.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keystroke.clients.cli import options
from keystroke.clients.cli.invocation import Invocation, of
from keystroke.errors import KeystrokeError, UsageError

if TYPE_CHECKING:
    from keystroke.assist.debug.diagnose import Diagnosis, Repair
    from keystroke.assist.edit import Journal, Workspace

_SHOWN = 3  # failures of one run that are worked on; the last ones are the ones that count


def run(
    ctx: typer.Context,
    command: Annotated[list[str] | None, typer.Argument(metavar="-- COMMAND...", help="The command.")] = None,
    fix: Annotated[bool, typer.Option("--fix", help="Apply the best fix without asking.")] = False,
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
    from keystroke.assist.debug.report import failures
    from keystroke.assist.debug.runner import run_command

    invocation = of(ctx)
    if not command:
        raise UsageError("name the command to run, after --, for example: keystroke run -- python app.py")
    ended = run_command(command)
    found = failures(ended.output)[-_SHOWN:]
    if found and ended.code != -signal.SIGINT:
        work = Bench(invocation, model, as_json=invocation.wants_json(json))
        fixed = False
        for failure in found[::-1]:
            diagnosis = work.diagnose(failure)
            if diagnosis is None or fixed:
                continue
            fixed = work.offer(diagnosis, command if verify else None, seconds, fix=fix)
    _leave(ended.code)


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


class Bench:
    """Where a failure is looked at: its workspace, its fixes, the talk about them."""

    def __init__(self, invocation: Invocation, model: str | None, *, as_json: bool) -> None:
        from keystroke.clients.cli.changes import open_workspace

        self.invocation, self.model, self.as_json = invocation, model, as_json
        self.texts: dict[str, str] = {}  # as they were when they were looked at
        self.workspace: Workspace
        self.journal: Journal
        self.workspace, self.journal = open_workspace(invocation)

    def diagnose(self, failure: Any) -> Diagnosis | None:
        """The failure placed in the workspace. None where nothing can be said beyond what was printed."""
        from keystroke.assist.debug.diagnose import diagnose

        found = diagnose(failure, self.workspace.root, Path.cwd(), self._text)
        if not found.path and not found.advice:
            return None
        if not found.repairs and found.path:
            found = self._by_model(found)
        if self.as_json:
            self._say_json(found)
        else:
            self._say(found)
        return found

    def _text(self, path: str) -> str | None:
        try:
            self.texts[path] = self.workspace.read(path).text
        except KeystrokeError:
            return None
        return self.texts[path]

    def _by_model(self, found: Diagnosis) -> Diagnosis:
        """A fix by the model that follows instructions, where one was named or is configured."""
        import dataclasses

        from keystroke.assist.debug.model_fix import model_repair
        from keystroke.assist.rules import project_rules
        from keystroke.clients.cli.interruption import interruptible
        from keystroke.clients.cli.writers import deep_model, open_writer

        name = self.model or deep_model(self.invocation.settings)
        text = self._text(found.path)
        if name is None or text is None:
            return found
        rules = project_rules(self.workspace.root / found.path, self.workspace.root).header()
        try:
            with interruptible() as interrupt, open_writer(name, self.invocation, interrupt) as writer:
                repair = model_repair(found, text, self.workspace.root, writer, rules)
        except KeystrokeError as error:
            self.invocation.console.note(f"the model could not help: {error}")
            return found
        return dataclasses.replace(found, repairs=(repair,)) if repair is not None else found

    def _say(self, found: Diagnosis) -> None:
        note = self.invocation.console.note
        place = f"{found.path}:{found.line}: " if found.path else ""
        note(f"\nkeystroke: {place}{found.title}")
        if found.advice:
            note(f"  {found.advice}")
        for number, repair in enumerate(found.repairs, 1):
            note(f"  {number}. {repair.fix.title} ({repair.path}, proved by {repair.proof})")
        if found.path and not found.repairs:
            from keystroke.clients.cli.writers import HOW, deep_model

            if self.model is None and deep_model(self.invocation.settings) is None:
                note(f"  no rule mends this; for a model's attempt, {HOW}")

    def _say_json(self, found: Diagnosis) -> None:
        import msgspec

        failure = found.failure
        record = {
            "language": str(failure.language),
            "kind": failure.kind,
            "message": failure.message,
            "path": found.path,
            "line": found.line,
            "advice": found.advice,
            "frames": [{"path": f.path, "line": f.line, "name": f.name} for f in failure.frames],
            "fixes": [
                {
                    "path": repair.path,
                    "title": repair.fix.title,
                    "proof": repair.proof,
                    "edits": [{"start": e.start, "end": e.end, "text": e.text} for e in repair.fix.edits],
                }
                for repair in found.repairs
            ],
        }
        # Standard output is the command's own.
        sys.stderr.write(msgspec.json.encode(record).decode() + "\n")

    def offer(self, found: Diagnosis, command: list[str] | None, seconds: float, *, fix: bool) -> bool:
        """Apply a fix if the user wants it. Whether something was applied and kept."""
        from keystroke.clients.cli.changes import key, plan_edits

        asked = sys.stdin.isatty() and sys.stderr.isatty() and not self.as_json
        if not found.repairs or not (fix or asked):
            return False
        chosen = 0
        if not fix:
            numbers = "".join(str(n + 1) for n in range(len(found.repairs)))
            pressed = key(f"  apply {'/'.join(numbers)}, or n? ", f"{numbers}n")
            if pressed == "n":
                return False
            chosen = int(pressed) - 1
        for repair in found.repairs[chosen:] if fix else found.repairs[chosen : chosen + 1]:
            plan = plan_edits(
                self.workspace, f"fix {found.title[:80]}", {repair.path: repair.fix.edits}, self.texts
            )
            plan.apply(self.journal)
            self.invocation.console.note(f"  applied: {repair.fix.title}; `keystroke undo` takes it back")
            if command is None or self._verified(found, repair, command, seconds):
                return True
        return False

    def _verified(self, found: Diagnosis, repair: Repair, command: list[str], seconds: float) -> bool:
        from keystroke.assist.debug.report import failures
        from keystroke.assist.debug.runner import run_quietly

        note = self.invocation.console.note
        ended = run_quietly(command, Path.cwd(), seconds)
        same = any(
            (item.kind, item.message, item.frames[-1:])
            == (found.failure.kind, found.failure.message, found.failure.frames[-1:])
            for item in failures(ended.output)
        )
        if ended.code == 0:
            note("  verified: the command now succeeds")
            return True
        if not same and not ended.timed_out:
            note(f"  this failure is gone, but the command still ends with {ended.code}")
            return True
        self.journal.undo()
        why = f"it did not end within {seconds:g} seconds" if ended.timed_out else "it fails as before"
        note(f"  {repair.fix.title}: {why}, so the fix was taken back")
        return False
