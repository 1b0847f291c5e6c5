"""`keystroke refactor`: rename, extract, inline, move, signature, imports.

The change is shown as a diff and applied when the user agrees, to all files or none; `keystroke undo` reverts
it. Positions are FILE:LINE:COLUMN, counted from 1 as editors show them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keystroke.clients.cli import options
from keystroke.clients.cli.options import Invocation, argument, invocation_of, option
from keystroke.clients.cli.text_file import FilePosition
from keystroke.errors import InputError, UsageError
from keystroke.text import Document

if TYPE_CHECKING:
    from keystroke.analysis.refactor import Refactoring, RefactoringPlan
    from keystroke.assist.edit import EditPlan, Journal, Workspace

app = options.command_group("refactor", "Refactor Python: rename, extract, inline, move, change signatures.")

Where = Annotated[str, argument("The position of the name.", metavar="FILE:LINE:COLUMN")]
Span = Annotated[
    str, argument("What to extract; whole lines without columns.", metavar="FILE:LINE[:COL]-LINE[:COL]")
]


def _refactoring(plan: Callable[..., RefactoringPlan]) -> Callable[..., None]:
    """Make a command of a planning function by adding the options that all refactorings share."""

    def command(ctx: typer.Context, dry_run: bool, yes: bool, json: bool, **arguments: Any) -> None:
        session = RefactorSession.open(ctx)
        session.finish(plan(session, **arguments), dry_run, yes)

    del plan.__annotations__["return"]  # for type checkers only: its module is not loaded yet
    own = list(inspect.signature(plan, eval_str=True).parameters.values())[1:]
    shared = [("dry_run", options.DryRun), ("yes", options.Yes), ("json", options.Json)]
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context),
        *(one.replace(kind=kind) for one in own),
        *(inspect.Parameter(name, kind, annotation=hint, default=False) for name, hint in shared),
    ]
    command.__name__, command.__doc__ = plan.__name__, plan.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    app.command()(command)
    return command


@dataclass
class RefactorSession:
    """One refactoring on the files of the workspace."""

    run: Invocation
    workspace: Workspace
    journal: Journal
    work: Refactoring

    @classmethod
    def open(cls, ctx: typer.Context) -> RefactorSession:
        from keystroke.analysis.refactor import Refactoring
        from keystroke.clients.cli.changes import open_workspace

        run = invocation_of(ctx)
        workspace, journal = open_workspace(run)
        return cls(run, workspace, journal, Refactoring(workspace.root))

    def position(self, where: str) -> tuple[str, int]:
        """The workspace path and the offset of FILE:LINE:COLUMN."""
        position = FilePosition.parse(where)
        if position.line is None or position.column is None:
            raise UsageError(f"the position must be FILE:LINE:COLUMN, not {where!r:.120}")
        name = self.workspace.name(position.path)
        return name, self._offset(name, position.line, position.column)

    def span(self, text: str) -> tuple[str, int, int]:
        head, dash, tail = text.rpartition("-")
        begin = FilePosition.parse(head)
        line, _, column = tail.partition(":")
        if not dash or begin.line is None or not line.isdigit() or (column and not column.isdigit()):
            raise UsageError(f"the range must be FILE:LINE-LINE or FILE:LINE:COL-LINE:COL, not {text!r:.120}")
        name = self.workspace.name(begin.path)
        if bool(column) != (begin.column is not None):
            raise UsageError("give a column for both ends, or for neither")
        start = self._offset(name, begin.line, begin.column or 1)
        if column:
            return name, start, self._offset(name, int(line), int(column))
        first = self._offset(name, int(line), 1)
        end = self.work.text(name).find("\n", first)
        return name, start, len(self.work.text(name)) if end < 0 else end + 1

    def _offset(self, path: str, line: int, column: int) -> int:
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

    def finish(self, refactoring: RefactoringPlan, dry_run: bool, yes: bool) -> None:
        from keystroke.clients.cli.changes import UNDO_HINT, as_record, confirm, show_diff

        plan = self._plan(refactoring)
        self.work.close()
        if not self.run.json:
            show_diff(self.run, plan.diff())
        applied = not dry_run and confirm(f"{refactoring.title}?", yes=yes)
        if applied:
            plan.apply(self.journal)
            for line in (*plan.summary(), UNDO_HINT):
                self.run.console.note(line)
        if self.run.json:
            self.run.console.json({"title": refactoring.title, "applied": applied, **as_record(plan)})

    def _plan(self, refactoring: RefactoringPlan) -> EditPlan:
        from keystroke.clients.cli.changes import plan_edits

        if refactoring.moves:
            raise InputError(
                "this would rename the file itself, which is not supported; rename the file first"
            )
        texts = {path: self.work.text(path) for path in refactoring.edits}
        return plan_edits(self.workspace, refactoring.title, refactoring.edits, texts)


@_refactoring
def rename(
    session: RefactorSession, where: Where, name: Annotated[str, argument("The new name.")]
) -> RefactoringPlan:
    """Rename a function, class, variable, parameter or method everywhere."""
    return session.work.rename(*session.position(where), name)


@_refactoring
def extract(
    session: RefactorSession,
    span: Span,
    name: Annotated[str, argument("Name of the function or variable.")],
    variable: Annotated[bool, option("--variable", "Extract a variable, not a function.")] = False,
) -> RefactoringPlan:
    """Turn lines or an expression into a function, or an expression into a variable."""
    action = session.work.extract_variable if variable else session.work.extract_function
    return action(*session.span(span), name)


@_refactoring
def inline(session: RefactorSession, where: Where) -> RefactoringPlan:
    """Replace the uses of a function or variable by its body or value."""
    return session.work.inline(*session.position(where))


@_refactoring
def move(
    session: RefactorSession,
    where: Where,
    target: Annotated[str, argument("The module to move it to.", metavar="FILE")],
) -> RefactoringPlan:
    """Move a function, class or variable to another module and update imports."""
    return session.work.move(*session.position(where), session.workspace.name(target))


@_refactoring
def signature(
    session: RefactorSession,
    where: Where,
    parameters: Annotated[str, argument("The new parameters.", metavar='"a, b, c=0"')],
) -> RefactoringPlan:
    """Add, remove or reorder a function's parameters and update every call."""
    return session.work.change_signature(*session.position(where), parameters)


@_refactoring
def imports(
    session: RefactorSession, file: Annotated[str, argument("The file to tidy.", metavar="FILE")]
) -> RefactoringPlan:
    """Remove unused imports and sort the others."""
    return session.work.organise_imports(session.workspace.name(file))
