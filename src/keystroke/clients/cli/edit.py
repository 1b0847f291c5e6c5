"""`keystroke edit` and `keystroke undo`: edits files by instruction, with minimal changes.

Nothing is written before the user agrees; all files are written or none, and every edit can be undone. The
command given with --check runs within a time limit; if it fails, the edit is undone.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keystroke.clients.cli import options
from keystroke.clients.cli.options import Invocation, argument, invocation_of, option
from keystroke.errors import InputError, KeystrokeError, NotFound, UsageError

if TYPE_CHECKING:
    from keystroke.assist.edit import EditPlan, Journal, JournalEntry, Region, Workspace


def edit(
    ctx: typer.Context,
    files: Annotated[
        list[str] | None, argument("Files to change; of this project or another.", metavar="FILE...")
    ] = None,
    instruction: Annotated[str, option("--message", "-m", "What to change, in words.")] = "",
    lines: Annotated[str, option("Change only these lines of the one file; faster.", metavar="A-B")] = "",
    patch: Annotated[str, option("Apply this patch file; - reads standard input.", metavar="FILE")] = "",
    dry_run: options.DryRun = False,
    yes: options.Yes = False,
    check: Annotated[
        str, option("Run this command after the edit; undo the edit if it fails.", metavar="CMD")
    ] = "",
    show_answer: Annotated[
        bool, option("--show-answer", "Print what the model wrote, rejected answers included.")
    ] = False,
    check_seconds: Annotated[float, option("Time limit of --check.", min=0.1, max=86400)] = 300.0,
    model: Annotated[
        str | None, option("A model name, a path, or URL#NAME of a model on a server.", metavar="MODEL")
    ] = None,
    json: options.Json = False,
    local: options.Local = False,
) -> None:
    from keystroke.clients.cli.changes import (
        as_record,
        confirm,
        open_workspace,
        show_diff,
        undo_hint,
        workspace_of,
    )

    run = invocation_of(ctx)
    if bool(patch) == bool(instruction.strip()):
        raise UsageError('describe the change with -m "...", or give a patch with --patch')
    workspace, journal = open_workspace(run, workspace_of(files or []))
    if patch:
        plan = _plan_by_patch(workspace, patch, files or [])
    else:
        plan = _plan_by_model(run, workspace, files or [], instruction, lines, model)
    if show_answer and not run.json:
        for number, answer in enumerate(plan.answers, 1):
            run.console.note(f"answer {number} of {len(plan.answers)}:\n{answer.rstrip()}")
    if plan.failures:
        if run.json:
            run.console.json({"applied": False, **as_record(plan, answers=show_answer)})
        hint = "" if show_answer or patch else "; --show-answer prints what the model wrote"
        raise InputError(f"nothing was changed: {'; '.join(plan.explain().splitlines())}{hint}")
    if not run.json:
        show_diff(run, plan.diff())
        for line in filter(None, (plan.confidence(), *plan.warnings)):
            run.console.note(line)
    applied = False
    verdict = None
    named = {workspace.name(file) for file in files or []}
    unasked = sorted(set(plan.auto_executed()) - named)
    if not dry_run and confirm("Apply this?", yes=yes, unasked=unasked):
        entry = plan.apply(journal)
        applied = True
        if check and entry is not None:
            verdict = _run_check(run, journal, entry, check, check_seconds, workspace.root)
            applied = verdict is None
        if applied and not run.json:
            for line in plan.summary():
                run.console.note(line)
            run.console.note(undo_hint(workspace.root))
    if run.json:
        run.console.json(
            {
                "applied": applied,
                **({"check": verdict} if verdict else {}),
                **as_record(plan, answers=show_answer),
            }
        )
    if verdict is not None:
        raise InputError(verdict)


def _plan_by_model(
    run: Invocation, workspace: Workspace, files: list[str], instruction: str, lines: str, model: str | None
) -> EditPlan:
    from keystroke.agent.evaluation.docstring_checks import DocstringChecks
    from keystroke.agent.sandbox import find_sandbox
    from keystroke.analysis.rules import project_rules
    from keystroke.assist.edit import plan_edit
    from keystroke.clients.cli.interruption import interruptible
    from keystroke.clients.cli.writers import open_writer, supports_blocks

    if not files:
        raise UsageError("give the files to change")
    names = [workspace.name(path) for path in files]
    region = _region(lines, names, workspace) if lines else None
    for name in names:
        workspace.read(name)  # refuse unusable files before a model is loaded
    rules = project_rules(workspace.root / names[0], workspace.root).prompt_header()
    show = None if run.json or run.quiet or not sys.stderr.isatty() else _CharacterCounter()
    faster = ["fewer lines" if lines else "`edit --lines A-B`"]
    with interruptible() as interrupt, open_writer(model, run, interrupt, faster=faster) as writer:
        plan = plan_edit(
            workspace,
            names,
            instruction,
            writer,
            region=region,
            rules=rules,
            blocks=region is None and supports_blocks(writer, run),
            on_text=show,
            checks=DocstringChecks(find_sandbox),
        )
        if interrupt.is_set:
            raise KeyboardInterrupt
    if show is not None:
        sys.stderr.write("\r\x1b[K")
    return plan


class _CharacterCounter:
    """Shows the number of characters the model has written, on one line of the terminal."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, text: str) -> None:
        self._count += len(text)
        sys.stderr.write(f"\rwriting … {self._count} characters")
        sys.stderr.flush()


def _region(lines: str, names: list[str], workspace: Workspace) -> Region:
    from keystroke.assist.edit import Region

    first, dash, last = lines.partition("-")
    if not first.isdigit() or not (last.isdigit() if dash else True) or int(first) < 1:
        raise UsageError(f"--lines needs A-B, for example 10-25, not {lines!r:.40}")
    if len(names) != 1:
        raise UsageError("--lines needs exactly one file")
    start, end = int(first), int(last) if dash else int(first)
    count = workspace.read(names[0]).text.count("\n") + 1
    if end < start:
        raise UsageError(f"--lines {lines} ends before it begins")
    if end > count:
        raise InputError(f"line {end} does not exist; {names[0]} has lines 1 to {count}")
    return Region(names[0], start - 1, end)


def _plan_by_patch(workspace: Workspace, patch: str, files: list[str]) -> EditPlan:
    from keystroke.assist.edit import plan_patch
    from keystroke.clients.cli.text_file import TextFile, read_input

    if files:
        raise UsageError("a patch names its own files; omit FILE")
    text = read_input() if patch == "-" else TextFile.read(Path(patch)).text
    return plan_patch(workspace, text)


def _run_check(
    run: Invocation, journal: Journal, entry: JournalEntry, command: str, seconds: float, root: Path
) -> str | None:
    """Run the user's check. None if it passed; otherwise the edit is undone and the message says so."""
    from keystroke.clients.cli.command_runner import run_captured

    run.console.note(f"running {command}")
    try:
        ended = run_captured(command, root, seconds)
    except BaseException:
        journal.revert(entry)
        raise
    if ended.code == 0:
        run.console.note("the check passed")
        return None
    why = f"did not finish within {seconds:g} seconds" if ended.timed_out else f"failed with {ended.code}"
    for line in ended.output.splitlines()[-20:]:
        run.console.note(f"  {line}")
    try:
        journal.revert(entry)
    except KeystrokeError as error:
        return f"the check {why}, and the edit could not be undone: {error}"
    return f"the check {why}; the edit was undone"


def undo(
    ctx: typer.Context,
    steps: Annotated[int, option("--steps", "-n", "Undo this many edits.", min=1)] = 1,
    listed: Annotated[bool, option("--list", "List the edits that can be undone.")] = False,
    folder: Annotated[
        Path | None, option("Undo edits of this project, not of the current one.", metavar="FOLDER")
    ] = None,
    json: options.Json = False,
) -> None:
    from keystroke.clients.cli.changes import open_workspace, workspace_root

    run = invocation_of(ctx)
    _, journal = open_workspace(run, workspace_root(folder) if folder is not None else None)
    if listed:
        entries = list(journal.entries())
        if not entries:
            run.console.note("there is nothing to undo in this workspace")
        for entry in entries:
            _print_entry(run, entry)
        return
    for step in range(steps):
        try:
            entry = journal.undo()
        except NotFound:
            if not step:
                raise
            run.console.note(f"there were only {step} edits to undo")
            return
        _print_entry(run, entry, undone=True)


def _print_entry(run: Invocation, entry: JournalEntry, *, undone: bool = False) -> None:
    files = [item.path for item in entry.files]
    if run.json:
        run.console.json({"undone" if undone else "edit": entry.instruction, "files": files})
    elif undone:
        run.console.line(f"undone: {entry.instruction}")
        for path in files:
            run.console.note(path)
    else:
        time_of_edit = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.time))
        run.console.line(f"{time_of_edit}  {entry.instruction}  ({', '.join(files)})")
