"""`keystroke refactor`: rename, extract, inline, move, signature, imports.

Law: shows the change as a diff and makes it only when the user agrees; all files or none, and `keystroke
undo` takes it back. Places are FILE:LINE:COLUMN, counted from 1 as editors show them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from keystroke.clients.cli import options
from keystroke.clients.cli.invocation import Invocation, of
from keystroke.errors import InputError, UsageError

if TYPE_CHECKING:
    from keystroke.assist.edit import EditPlan, Journal, Workspace
    from keystroke.assist.refactor import Refactored, Refactoring

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Rename, extract, inline, move: Python by its meaning.",
)

Where = Annotated[str, typer.Argument(metavar="FILE:LINE:COLUMN", help="Where the name stands.")]
Span = Annotated[
    str,
    typer.Argument(
        metavar="FILE:LINE[:COL]-LINE[:COL]", help="What to extract; whole lines without columns."
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the diff; write nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Apply without asking.")]


@app.command()
def rename(
    ctx: typer.Context,
    where: Where,
    name: Annotated[str, typer.Argument(help="The new name.")],
    dry_run: DryRun = False,
    yes: Yes = False,
    json: options.Json = False,
) -> None:
    """Give a function, class, variable, parameter or method another name, everywhere."""
    desk = Desk.open(ctx)
    path, offset = desk.place(where)
    desk.finish(desk.work.rename(path, offset, name), dry_run, yes, json)


@app.command()
def extract(
    ctx: typer.Context,
    span: Span,
    name: Annotated[str, typer.Argument(help="Name of the function or variable.")],
    variable: Annotated[bool, typer.Option("--variable", help="Extract a variable, not a function.")] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: options.Json = False,
) -> None:
    """Turn lines or an expression into a function, or an expression into a variable."""
    desk = Desk.open(ctx)
    path, start, end = desk.span(span)
    action = desk.work.extract_variable if variable else desk.work.extract_function
    desk.finish(action(path, start, end, name), dry_run, yes, json)


@app.command()
def inline(
    ctx: typer.Context, where: Where, dry_run: DryRun = False, yes: Yes = False, json: options.Json = False
) -> None:
    """Replace a function or variable by what it stands for."""
    desk = Desk.open(ctx)
    path, offset = desk.place(where)
    desk.finish(desk.work.inline(path, offset), dry_run, yes, json)


@app.command()
def move(
    ctx: typer.Context,
    where: Where,
    target: Annotated[str, typer.Argument(metavar="FILE", help="The module it goes to.")],
    dry_run: DryRun = False,
    yes: Yes = False,
    json: options.Json = False,
) -> None:
    """Move a function, class or variable to another module; imports follow."""
    desk = Desk.open(ctx)
    path, offset = desk.place(where)
    desk.finish(desk.work.move(path, offset, desk.workspace.name(target)), dry_run, yes, json)


@app.command()
def signature(
    ctx: typer.Context,
    where: Where,
    parameters: Annotated[str, typer.Argument(metavar='"a, b, c=0"', help="The parameters it shall have.")],
    dry_run: DryRun = False,
    yes: Yes = False,
    json: options.Json = False,
) -> None:
    """Add, remove or reorder a function's parameters; every call follows."""
    desk = Desk.open(ctx)
    path, offset = desk.place(where)
    desk.finish(desk.work.change_signature(path, offset, parameters), dry_run, yes, json)


@app.command()
def imports(
    ctx: typer.Context,
    file: Annotated[str, typer.Argument(metavar="FILE", help="The file to tidy.")],
    dry_run: DryRun = False,
    yes: Yes = False,
    json: options.Json = False,
) -> None:
    """Remove unused imports and sort the others."""
    desk = Desk.open(ctx)
    desk.finish(desk.work.organise_imports(desk.workspace.name(file)), dry_run, yes, json)


@dataclass
class Desk:
    """One refactoring on the files of the workspace."""

    run: Invocation
    workspace: Workspace
    journal: Journal
    work: Refactoring

    @classmethod
    def open(cls, ctx: typer.Context) -> Desk:
        from keystroke.assist.refactor import Refactoring
        from keystroke.clients.cli.changes import open_workspace

        run = of(ctx)
        workspace, journal = open_workspace(run)
        return cls(run, workspace, journal, Refactoring(workspace.root))

    def place(self, where: str) -> tuple[str, int]:
        """The workspace name and the offset of FILE:LINE:COLUMN."""
        from keystroke.clients.cli.source import Place

        place = Place.parse(where)
        if place.line is None or place.column is None:
            raise UsageError(f"say where: FILE:LINE:COLUMN, not {where!r:.120}")
        name = self.workspace.name(place.path)
        return name, self._offset(name, place.line, place.column)

    def span(self, text: str) -> tuple[str, int, int]:
        from keystroke.clients.cli.source import Place

        head, dash, tail = text.rpartition("-")
        begin = Place.parse(head)
        line, _, column = tail.partition(":")
        if not dash or begin.line is None or not line.isdigit() or (column and not column.isdigit()):
            raise UsageError(f"say what: FILE:LINE-LINE or FILE:LINE:COL-LINE:COL, not {text!r:.120}")
        name = self.workspace.name(begin.path)
        if bool(column) != (begin.column is not None):
            raise UsageError("give a column on both sides, or on neither")
        start = self._offset(name, begin.line, begin.column or 1)
        if column:
            return name, start, self._offset(name, int(line), int(column))
        first = self._offset(name, int(line), 1)
        end = self.work.text(name).find("\n", first)
        return name, start, len(self.work.text(name)) if end < 0 else end + 1

    def _offset(self, path: str, line: int, column: int) -> int:
        from keystroke.text import Document

        self.workspace.read(path)
        document = Document(self.work.text(path))
        if not 1 <= line <= document.line_count:
            raise InputError(f"line {line} does not exist; {path} has lines 1 to {document.line_count}")
        first, last = document.line_span(line - 1)
        if not 1 <= column <= last - first + 1:
            raise InputError(
                f"column {column} does not exist; line {line} of {path} has columns 1 to {last - first + 1}"
            )
        return first + column - 1

    def finish(self, done: Refactored, dry_run: bool, yes: bool, json: bool) -> None:
        from keystroke.clients.cli.changes import agreed, apply, as_record, show_diff

        plan = self._plan(done)
        self.work.close()
        as_json = self.run.wants_json(json)
        if not as_json:
            show_diff(self.run, plan)
        applied = not dry_run and agreed(f"{done.title}?", yes=yes)
        if applied:
            apply(self.run, plan, self.journal)
        if as_json:
            self.run.console.json({"title": done.title, "applied": applied, **as_record(plan)})

    def _plan(self, done: Refactored) -> EditPlan:
        from keystroke.clients.cli.changes import plan_edits

        if done.moves:
            raise InputError("this would rename the file itself; rename the file first, then its uses")
        texts = {path: self.work.text(path) for path in done.edits}
        return plan_edits(self.workspace, done.title, done.edits, texts)
