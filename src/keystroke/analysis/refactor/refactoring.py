"""Rename, extract, inline, move, change a signature, organise imports: planned by rope, returned as edits.

Writes no file and runs no code of the project. A plan whose result does not parse or has a new error is
refused. Whatever rope cannot do raises InputError with one sentence.
"""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keystroke.analysis.check.check import check
from keystroke.analysis.check.diagnostic import Level
from keystroke.analysis.check.modules import Project
from keystroke.analysis.check.scope import parse_source, visible_names
from keystroke.analysis.refactor.import_roots import files_importing, import_roots
from keystroke.analysis.refactor.parentheses import remove_redundant_parentheses
from keystroke.analysis.refactor.signature import (
    Parameter,
    function_parameters,
    parse_parameters,
    signature_steps,
)
from keystroke.analysis.refactor.sources import OverlaySources, lf_offset, restore_line_ends
from keystroke.analysis.refactor.string_names import rename_in_strings
from keystroke.errors import InputError, KeystrokeError
from keystroke.text import Edit, apply_edits, minimal_diff

_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class RefactoringPlan:
    """A plan: edits by workspace path, and files that get another path (after their edits)."""

    title: str
    edits: Mapping[str, tuple[Edit, ...]]
    moves: Mapping[str, str] = field(default_factory=dict)


class Refactoring:
    """Refactorings of one workspace. `overlay`: texts of open buffers by workspace path, used instead of the
    files; offsets are into them."""

    def __init__(self, root: Path, overlay: Mapping[str, str] | None = None) -> None:
        self._sources = OverlaySources(root, overlay or {})
        self._project: Any = None

    def rename(self, path: str, offset: int, name: str) -> RefactoringPlan:
        """Rename the name at `offset` and all its uses. Also modules, at their imports."""
        from rope.refactor.rename import Rename

        old = self._word_at(path, offset)
        if name == old:
            raise InputError(f"it is called {name} already; choose another name")
        self._check_name(name)
        self._check_free(path, offset, name)
        with self._open_resource(path, f"rename {old}") as (project, resource):
            work = Rename(project, resource, lf_offset(self.text(path), offset))
            resources = self._resources(old)
            changes = work.get_changes(name, in_hierarchy=True, resources=resources)
            home = self._defining_file(work.old_pyname, old)

            def strings(texts: dict[str, str]) -> None:
                paths = [item.path for item in resources]
                if home is not None:
                    self._check_complete(texts, home, old, paths)
                rename_in_strings(texts, old, name, home, paths, self.text)

            return self._make_plan(f"Rename {old} to {name}", changes, also=strings)

    def extract_function(self, path: str, start: int, end: int, name: str) -> RefactoringPlan:
        """Turn statements or an expression into a function and call it in their place."""
        return self._extract(path, start, end, name, "ExtractMethod")

    def extract_variable(self, path: str, start: int, end: int, name: str) -> RefactoringPlan:
        return self._extract(path, start, end, name, "ExtractVariable")

    def inline(self, path: str, offset: int) -> RefactoringPlan:
        """Replace the uses of the function, variable or parameter at `offset` by its definition."""
        from rope.refactor.inline import create_inline

        old = self._word_at(path, offset)
        with self._open_resource(path, f"inline {old}") as (project, resource):
            work = create_inline(project, resource, lf_offset(self.text(path), offset))
            return self._make_plan(f"Inline {old}", work.get_changes(resources=self._resources(old)))

    def move(self, path: str, offset: int, target: str) -> RefactoringPlan:
        """Move the function, class or variable at `offset` to the module `target` and update imports."""
        from rope.refactor.move import MoveGlobal, create_move

        old = self._word_at(path, offset)
        if target == path:
            raise InputError(f"{old} is in {target} already; name another file")
        self.text(target)
        with self._open_resource(path, f"move {old}") as (project, resource):
            work = create_move(project, resource, lf_offset(self.text(path), offset))
            if not isinstance(work, MoveGlobal):
                raise InputError("only functions, classes and variables at the top of a module can be moved")
            destination = project.get_resource(target)
            changes = work.get_changes(destination, resources=self._resources(old, path, target))
            return self._make_plan(f"Move {old} to {target}", changes)

    def change_signature(self, path: str, offset: int, wanted: str) -> RefactoringPlan:
        """Give the function at `offset` the parameters `wanted` ("a, b, c=0") and update its calls. They are
        matched by name: missing ones are removed, new ones need a default, the order may change."""
        from rope.refactor.change_signature import (
            ArgumentAdder,
            ArgumentNormalizer,
            ArgumentRemover,
            ArgumentReorderer,
            ChangeSignature,
        )

        old = self._word_at(path, offset)
        with self._open_resource(path, f"change {old}") as (project, resource):
            work = ChangeSignature(project, resource, lf_offset(self.text(path), offset))
            home = self._sources.name(work.pyname.get_object().get_module().get_resource().real_path)
            if home is None:
                raise InputError(f"{old} is not defined in this workspace; only its own functions can change")
            node = _find_definition(self.text(home), work.pyname.get_object().get_ast().lineno, old)
            before = function_parameters(node.args)
            after = _with_old_defaults(before, parse_parameters(wanted))
            if [p.name for p in before] == [p.name for p in after]:
                raise InputError(f"{old} has these parameters already; name other ones")
            todo = signature_steps(before, after)
            changers: list[Any] = [ArgumentNormalizer()]
            changers += [ArgumentRemover(at) for at in todo.removed]
            count = len(before) - len(todo.removed)
            for at, item in enumerate(todo.added):
                changers.append(ArgumentAdder(count + at, item.name, item.default))
            if todo.order != tuple(range(len(todo.order))):
                changers.append(ArgumentReorderer(list(todo.order)))
            changes = work.get_changes(changers, in_hierarchy=False, resources=self._resources(old, home))
            finish = _Header(home, old, after)
            return self._make_plan(f"Change the parameters of {old}", changes, finish)

    def organise_imports(self, path: str) -> RefactoringPlan:
        """Remove unused imports and sort the others: future, standard library, packages, own."""
        from rope.refactor.importutils import ImportOrganizer

        with self._open_resource(path, "organise imports") as (project, resource):
            changes = ImportOrganizer(project).organize_imports(resource)
            return self._make_plan(f"Organise the imports of {path}", changes)

    def text(self, path: str) -> str:
        return self._sources.text(path)

    def close(self) -> None:
        if self._project is not None:
            self._project.close()
            self._project = None

    def _extract(self, path: str, start: int, end: int, name: str, kind: str) -> RefactoringPlan:
        from rope.refactor import extract

        self._check_name(name)
        if not start < end:
            raise InputError("the selection is empty; select what to extract")
        text = self.text(path)
        first, last = lf_offset(text, start), lf_offset(text, end)
        with self._open_resource(path, "extract") as (project, resource):
            work = getattr(extract, kind)(project, resource, first, last)
            bare = (
                (lambda _, plain: remove_redundant_parentheses(plain, name))
                if kind == "ExtractVariable"
                else None
            )
            return self._make_plan(f"Extract {name}", work.get_changes(name), bare)

    def _check_name(self, name: str) -> None:
        if not name.isidentifier() or keyword.iskeyword(name):
            raise InputError(f"{name!r:.60} is not a name in Python; use letters, digits and _")

    def _check_free(self, path: str, offset: int, name: str) -> None:
        """Refuse a name that is already defined at that position."""
        text = self.text(path)
        start = offset
        while start and (text[start - 1].isalnum() or text[start - 1] == "_"):
            start -= 1
        source = parse_source(text)
        if source is None or text[start - 1 : start] == ".":
            return
        if name in visible_names(source.tree, source.document.position(start).line + 1):
            raise InputError(f"{name} already means something at that place in {path}; choose another name")

    def _word_at(self, path: str, offset: int) -> str:
        text = self.text(path)
        if not 0 <= offset <= len(text):
            raise InputError(f"offset {offset} is outside {path}, which has {len(text)} characters")
        for found in _WORD.finditer(text, max(0, offset - 200)):
            if found.start() <= offset <= found.end():
                return found[0]
            if found.start() > offset:
                break
        raise InputError(f"there is no name at that place in {path}; point at one")

    @contextmanager
    def _open_resource(self, path: str, what: str) -> Iterator[tuple[Any, Any]]:
        """The rope project and the file's resource. Errors of rope become InputError."""
        from rope.base import exceptions
        from rope.base.project import Project as RopeProject

        if parse_source(self.text(path)) is None:
            raise InputError(f"{path} does not parse; mend its syntax first")
        try:
            if self._project is None:
                # No folder of rope's own: nothing is stored, and no configuration of the project is executed.
                self._project = RopeProject(
                    str(self._sources.root),
                    fscommands=self._sources,
                    ropefolder=None,
                    ignore_syntax_errors=True,
                    ignore_bad_imports=True,
                    automatic_soa=False,
                    source_folders=import_roots(self._sources.root),
                )
            yield self._project, self._project.get_resource(path)
        except exceptions.ResourceNotFoundError:
            raise InputError(
                f"{path} is not saved yet; save it once so that others can refer to it"
            ) from None
        except exceptions.RopeError as error:
            words = " ".join(str(error).split()).rstrip(".").replace("<", "").replace(">", "")
            raise InputError(f"cannot {what}: {words[:1].lower()}{words[1:200]}") from None
        except KeystrokeError:
            raise
        except RecursionError:
            raise InputError(f"cannot {what}: the code nests too deeply") from None
        except (AttributeError, LookupError, TypeError, ValueError, SyntaxError, AssertionError) as error:
            raise InputError(
                f"cannot {what}: the code at that place is not understood ({type(error).__name__})"
            ) from None

    def _resources(self, word: str, *paths: str) -> list[Any]:
        names = dict.fromkeys([*self._sources.files_containing(word), *paths])
        return [self._project.get_resource(name) for name in names]

    def _check_complete(self, texts: Mapping[str, str], home: str, old: str, paths: Sequence[str]) -> None:
        """Refuse a rename that leaves imports of the old name behind."""
        others = [path for path in paths if path not in texts]
        exports = {path for path in texts if path.endswith("__init__.py")}
        if missed := files_importing(others, home, old, self.text, exports):
            raise InputError(
                f"{', '.join(missed[:3])} also import {old}, and how is not understood; nothing was changed"
            )

    def _defining_file(self, pyname: Any, name: str) -> str | None:
        """The file that defines a module-level name; None for parameters, methods and local names."""
        module, _ = pyname.get_definition_location()
        resource = module.get_resource() if module is not None else None
        if resource is None or module.get_attributes().get(name) is not pyname:
            return None
        return self._sources.name(resource.real_path)

    def _make_plan(
        self,
        title: str,
        changes: Any,
        finish: Callable[[str, str], str] | None = None,
        also: Callable[[dict[str, str]], None] | None = None,
    ) -> RefactoringPlan:
        """Convert a change of rope to a plan. `also` edits all texts, then `finish` each file's text."""
        from rope.base.change import ChangeContents, ChangeSet, MoveResource

        texts: dict[str, str] = {}
        moves: dict[str, str] = {}
        todo = [changes]
        while todo:
            change = todo.pop(0)
            if isinstance(change, ChangeSet):
                todo = [*change.changes, *todo]
            elif isinstance(change, ChangeContents):
                texts[change.resource.path] = change.new_contents
            elif isinstance(change, MoveResource):
                moves[change.resource.path] = change.new_resource.path
            elif change is not None:
                raise InputError("this refactoring would make or remove files, which is not supported")
        if also is not None:
            also(texts)
        edits: dict[str, tuple[Edit, ...]] = {}
        for path, plain in texts.items():
            text = self.text(path)
            new = finish(path, plain) if finish is not None else plain
            found = restore_line_ends(text, minimal_diff(text.replace("\r\n", "\n"), new))
            if found:
                self._prove(path, text, apply_edits(text, found))
                edits[path] = found
        if not edits and not moves:
            raise InputError("there is nothing to change")
        return RefactoringPlan(title, edits, moves)

    def _prove(self, path: str, before: str, after: str) -> None:
        if parse_source(before) is not None and parse_source(after) is None:
            raise InputError(f"the result in {path} would not parse; nothing was changed")
        project = Project(self._sources.root)
        names = [
            {
                item.message
                for item in check(text, self._sources.root / path, project=project, fixes=False)
                if item.level is Level.ERROR and item.code in ("undefined-name", "undefined-local")
            }
            for text in (before, after)
        ]
        if new := names[1] - names[0]:
            raise InputError(f"the result in {path} would be wrong ({min(new)}); nothing was changed")


def _with_old_defaults(before: list[Parameter], after: list[Parameter]) -> list[Parameter]:
    """The wanted parameters, with defaults and annotations of the old ones where the new have none."""
    old = {item.name: item for item in before}
    result = []
    for item in after:
        known = old.get(item.name, item)
        result.append(
            Parameter(item.name, item.default or known.default, item.annotation or known.annotation)
        )
    return result


def _find_definition(text: str, line: int, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef:
    source = parse_source(text.replace("\r\n", "\n"))
    for node in (*source.nodes(ast.FunctionDef), *source.nodes(ast.AsyncFunctionDef)) if source else ():
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if first <= line <= node.lineno and node.name in (name, "__init__"):
                return node
    raise InputError(f"the definition of {name} cannot be found; point at its `def`")


class _Header:
    """Rewrites the parameters of a definition, because rope drops annotations."""

    def __init__(self, path: str, name: str, after: list[Parameter]) -> None:
        self._path, self._name, self._after = path, name, after

    def __call__(self, path: str, text: str) -> str:
        if path != self._path:
            return text
        wanted = [item.name for item in self._after]
        source = parse_source(text)
        if source is None:
            return text
        for node in (*source.nodes(ast.FunctionDef), *source.nodes(ast.AsyncFunctionDef)):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            if node.name in (self._name, "__init__") and [a.arg for a in node.args.args] == wanted:
                opened = text.index("(", source.offset(node.lineno, node.col_offset))
                closed = _closing_parenthesis(text, opened)
                return text[: opened + 1] + ", ".join(map(str, self._after)) + text[closed:]
        return text


def _closing_parenthesis(text: str, opened: int) -> int:
    depth = 0
    for at in range(opened, len(text)):
        depth += (text[at] in "([{") - (text[at] in ")]}")
        if depth == 0:
            return at
    return len(text)
