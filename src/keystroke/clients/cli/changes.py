"""Changes to files as the command line shows, confirms and makes them.

Nothing is written before the user has said so: by a key on the terminal or by an option. What is written
can be taken back with `keystroke undo`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keystroke.assist.edit import EditPlan, FileChange, Journal, Workspace
from keystroke.clients.cli.console import GREEN, RED
from keystroke.errors import InputError, UsageError
from keystroke.text import Edit, apply_edits, minimal_diff, unified_diff

if TYPE_CHECKING:
    from keystroke.clients.cli.invocation import Invocation


def workspace_root(start: Path | None = None) -> Path:
    """The repository the user stands in, or the folder where there is none."""
    here = (start or Path.cwd()).resolve()
    return next((folder for folder in (here, *here.parents) if (folder / ".git").exists()), here)


def open_workspace(run: Invocation) -> tuple[Workspace, Journal]:
    settings = run.settings
    workspace = Workspace(workspace_root(), exclude=settings.assist.exclude)
    journal = Journal(settings.paths.state, workspace)
    for said in journal.recover():
        run.console.note(said)
    return workspace, journal


def plan_edits(
    workspace: Workspace, what: str, edits: Mapping[str, Iterable[Edit]], texts: Mapping[str, str]
) -> EditPlan:
    """A plan that makes given edits of files. `texts` are what the edits were made for: a file that has
    changed since is refused."""
    changes = []
    for path, wanted in edits.items():
        before = workspace.read(path)
        if before.text != texts[path]:
            raise InputError(f"{path} changed meanwhile; nothing was written, try again")
        after = apply_edits(before.text, wanted)
        changes.append(FileChange(path, before, after, minimal_diff(before.text, after)))
    return EditPlan(workspace, what, tuple(changes))


def show_diff(run: Invocation, plan: EditPlan) -> None:
    for line in plan.diff().splitlines(keepends=True):
        head = line.startswith(("---", "+++"))
        style = "" if head else GREEN if line.startswith("+") else RED if line.startswith("-") else ""
        run.console.write(line, style)


def preview(run: Invocation, path: str, before: str, edits: Iterable[Edit]) -> None:
    """What edits of one file would change, shown beside the question whether to make them."""
    show_diff_lines(run, unified_diff(before, apply_edits(before, edits), f"a/{path}", f"b/{path}"))


def show_diff_lines(run: Invocation, diff: str) -> None:
    """A diff on standard error, where questions are asked."""
    for line in diff.splitlines():
        head = line.startswith(("---", "+++"))
        style = "" if head else GREEN if line.startswith("+") else RED if line.startswith("-") else ""
        run.console.prompt_line(line, style)


def as_record(plan: EditPlan, *, answers: bool = False) -> dict[str, Any]:
    """A plan for programs: each file with its edits, offsets in characters; with what the model wrote if
    `answers`."""
    return {
        **({"answers": list(plan.answers)} if answers else {}),
        "files": [
            {
                "path": change.path,
                "new": change.before is None,
                "removed": change.after is None,
                "edits": [{"start": e.start, "end": e.end, "text": e.text} for e in change.edits],
            }
            for change in plan.changes
        ],
        "failures": [
            {"path": item.path, "reason": str(item.reason), "message": item.message} for item in plan.failures
        ],
        "diff": plan.diff(),
    }


def confirm(question: str, *, yes: bool, unasked: Sequence[str] = ()) -> bool:
    """Whether to go on: `yes` was given, or the user says so. No terminal to ask on is an error. `unasked`:
    files that would run by themselves and that the user did not name; `yes` does not cover them."""
    if yes and not unasked:
        return True
    if unasked and not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(
            f"the change touches {', '.join(unasked)}, which runs by itself once it is there; name it, or "
            "answer at a terminal"
        )
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError("there is no terminal to ask on; say --yes to apply, or --dry-run to look only")
    return read_key(f"{question} [y/N] ", "yn") == "y"


def read_key(question: str, known: str) -> str:
    """One key of `known`; the last of them stands for every other answer. No Enter is needed."""
    with _unbuffered() as read:
        sys.stderr.write(question)
        sys.stderr.flush()
        pressed = read().lower()
    chosen = pressed if pressed and pressed in known else known[-1]
    sys.stderr.write(f"{chosen}\n")
    return chosen


@contextmanager
def _unbuffered() -> Iterator[Callable[[], str]]:
    """A function that waits for one key. Keys typed ahead count: nothing is discarded."""
    try:
        import termios
        import tty
    except ImportError:
        yield lambda: sys.stdin.readline()[:1]
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd, termios.TCSANOW)
        yield lambda: os.read(fd, 1).decode("ascii", "replace")
    finally:
        termios.tcsetattr(fd, termios.TCSANOW, before)


def apply_plan(run: Invocation, plan: EditPlan, journal: Journal) -> None:
    plan.apply(journal)
    for line in plan.summary():
        run.console.note(line)
    run.console.note("`keystroke undo` takes it back")
