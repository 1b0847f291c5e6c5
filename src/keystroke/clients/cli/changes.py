"""Shows, confirms and applies changes to files.

Nothing is written without the user's consent, by a key on the terminal or by an option. `keystroke undo`
reverts what was written.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keystroke.assist.edit import EditPlan, FileChange, Journal, Workspace
from keystroke.clients.cli.console import GREEN, RED
from keystroke.errors import InputError, UsageError
from keystroke.text import Edit, apply_edits, minimal_diff, unified_diff
from keystroke.text.terminal import safe_for_terminal

if TYPE_CHECKING:
    from keystroke.clients.cli.options import Invocation


UNDO_HINT = "undo with `keystroke undo`"


def workspace_root(start: Path | None = None) -> Path:
    """The repository that contains the current folder, or the folder itself."""
    here = (start or Path.cwd()).resolve()
    return next((folder for folder in (here, *here.parents) if (folder / ".git").exists()), here)


def workspace_of(files: Sequence[str]) -> Path:
    """The workspace of the current folder; where a named file is outside of it, the file's own project.
    UsageError if the files are in several projects."""
    here = workspace_root()
    roots = dict.fromkeys(here if _inside(file, here) else workspace_root(_folder(file)) for file in files)
    if len(roots) > 1:
        both = " and ".join(str(root) for root in list(roots)[:2])
        raise UsageError(f"the files are in several projects ({both}); edit those of one at a time")
    return next(iter(roots), here)


def _inside(file: str, root: Path) -> bool:
    path = Path(os.path.abspath(file))
    return path.is_relative_to(root) or path.resolve().is_relative_to(root)


def _folder(file: str) -> Path:
    """The folder of a file, or the nearest one above it that exists."""
    path = Path(os.path.abspath(Path(file).expanduser())).parent
    return next((folder for folder in (path, *path.parents) if folder.is_dir()), path)


def undo_hint(root: Path) -> str:
    """How to undo an edit of the workspace at `root`."""
    if root == workspace_root():
        return UNDO_HINT
    return f"undo with `keystroke undo --folder {shlex.quote(str(root))}`"


def open_workspace(run: Invocation, root: Path | None = None) -> tuple[Workspace, Journal]:
    """The workspace at `root`, by default that of the current folder, and its undo journal."""
    settings = run.settings
    workspace = Workspace(root or workspace_root(), exclude=settings.assist.exclude)
    journal = Journal(settings.paths.state, workspace)
    for message in journal.recover():
        run.console.note(message)
    return workspace, journal


def plan_edits(
    workspace: Workspace, what: str, edits: Mapping[str, Iterable[Edit]], texts: Mapping[str, str]
) -> EditPlan:
    """A plan of the given edits. `texts` are the contents they were made for; InputError for a file that has
    changed since."""
    changes = []
    for path, file_edits in edits.items():
        before = workspace.read(path)
        if before.text != texts[path]:
            raise InputError(f"{path} changed meanwhile; nothing was written, try again")
        after = apply_edits(before.text, file_edits)
        changes.append(FileChange(path, before, after, minimal_diff(before.text, after)))
    return EditPlan(workspace, what, tuple(changes))


def show_diff(run: Invocation, diff: str) -> None:
    lines = diff.splitlines(keepends=True)
    for style, same in groupby(lines, _diff_style):  # a write for each line takes seconds for 100,000
        run.console.write("".join(same), style)


def _diff_style(line: str) -> str:
    if line.startswith(("---", "+++")):
        return ""
    return GREEN if line.startswith("+") else RED if line.startswith("-") else ""


def preview(run: Invocation, path: str, before: str, edits: Iterable[Edit]) -> None:
    """Show the diff of edits to one file on standard error."""
    show_diff_lines(run, unified_diff(before, apply_edits(before, edits), f"a/{path}", f"b/{path}"))


def show_diff_lines(run: Invocation, diff: str) -> None:
    """Print a diff on standard error, where questions are asked."""
    for line in diff.splitlines():
        run.console.prompt_line(line, _diff_style(line))


def edit_records(edits: Iterable[Edit]) -> list[dict[str, Any]]:
    """Edits for JSON output, offsets in characters."""
    return [{"start": edit.start, "end": edit.end, "text": edit.text} for edit in edits]


def as_record(plan: EditPlan, *, answers: bool = False) -> dict[str, Any]:
    """A plan for JSON output; `answers` includes what the model wrote."""
    return {
        **({"answers": list(plan.answers)} if answers else {}),
        "files": [
            {
                "path": change.path,
                "new": change.before is None,
                "removed": change.after is None,
                "edits": edit_records(change.edits),
            }
            for change in plan.changes
        ],
        "failures": [
            {"path": item.path, "reason": str(item.reason), "message": item.message} for item in plan.failures
        ],
        **({"agreement": list(plan.agreement)} if plan.agreement is not None else {}),
        **({"warnings": list(plan.warnings)} if plan.warnings else {}),
        "diff": plan.diff(),
    }


def confirm(question: str, *, yes: bool, unasked: Sequence[str] = ()) -> bool:
    """Whether to continue: `yes` was given, or the user agrees. UsageError without a terminal. `unasked`:
    files that run automatically and that the user did not name; `yes` does not cover them."""
    if yes and not unasked:
        return True
    if unasked and not has_terminal():
        raise UsageError(
            f"the change touches {', '.join(unasked)}, which runs automatically; name the file in the "
            "command, or answer at a terminal"
        )
    if not has_terminal():
        raise UsageError("there is no terminal to ask on; use --yes to apply, or --dry-run to only look")
    return read_key(f"{question} [y/N] ", "yn") == "y"


def confirm_deletion(question: str) -> bool:
    """Ask before deleting. UsageError without a terminal."""
    if not has_terminal():
        raise UsageError("there is no terminal to ask on; use --yes to delete")
    return read_key(f"{question} [y/N] ", "yn") == "y"


def has_terminal() -> bool:
    """Whether questions can be asked: on standard error, answered on standard input."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def read_key(question: str, known: str) -> str:
    """Read one key of `known`, without Enter; any other key counts as the last of them."""
    with _key_reader() as read:
        sys.stderr.write(safe_for_terminal(question))
        sys.stderr.flush()
        pressed = read().lower()
    chosen = pressed if pressed and pressed in known else known[-1]
    sys.stderr.write(f"{chosen}\n")
    return chosen


@contextmanager
def _key_reader() -> Iterator[Callable[[], str]]:
    """A function that waits for one key. Keys typed ahead are kept."""
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
