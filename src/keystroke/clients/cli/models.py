"""`keystroke models`: what is on this machine, and what settings name.

Law: prints what the library knows and asks it for changes. Long work shows progress on standard error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from keystroke.clients.cli import options
from keystroke.clients.cli.invocation import Invocation, of
from keystroke.errors import UsageError

app = typer.Typer(
    name="models",
    help="List, add, check and remove models on this machine.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Name = Annotated[str, typer.Argument(metavar="NAME", help="The model's name.")]


@app.command("list")
def list_(ctx: typer.Context, json: options.Json = False) -> None:
    """List the models that can be used by name."""
    from keystroke.clients.cli.console import size
    from keystroke.engine.builtin import BUILT_IN
    from keystroke.engine.library import Broken, Library
    from keystroke.engine.locate import shipped

    run = of(ctx)
    settings = run.settings
    rows: list[dict[str, Any]] = []
    if (own := shipped()) is not None:
        rows.append({"name": "embedded", "kind": "shipped", "size": _bytes(own), "where": str(own)})
    for entry in Library(settings.paths.models).entries():
        if isinstance(entry, Broken):
            rows.append({"name": entry.name, "kind": "damaged", "size": 0, "where": entry.reason})
        else:
            where = entry.location or "in the library"
            rows.append({"name": entry.name, "kind": str(entry.kind), "size": entry.size, "where": where})
    known = {row["name"] for row in rows}
    for model in BUILT_IN.values():
        if model.name not in known:
            where = f"fetched when first used ({model.requirement})"
            rows.append({"name": model.name, "kind": "built in", "size": model.size, "where": where})
    for name, named in settings.models.items():
        where = f"{named.base_url}#{named.model}" if named.base_url else str(named.path or named.model or "")
        kind = "remote" if named.base_url or named.engine == "remote" else "setting"
        rows.append({"name": name, "kind": kind, "size": 0, "where": where})
    default = settings.model.default
    if default == "embedded" and own is None:
        default = "smollm2"
    if run.wants_json(json):
        run.console.json([{**row, "default": row["name"] == default} for row in rows])
        return
    shown = [
        (
            ("* " if row["name"] == default else "  ") + row["name"],
            row["kind"],
            size(row["size"]) if row["size"] else "",
            row["where"],
        )
        for row in rows
    ]
    run.console.table(("  name", "kind", "size", "where"), shown)


@app.command()
def add(
    ctx: typer.Context,
    source: Annotated[
        str, typer.Argument(help="A Hugging Face folder, a GGUF file, or a built-in name (smollm2).")
    ],
    name: Annotated[str | None, typer.Option(help="Call it this; its own name if left out.")] = None,
    copy: Annotated[bool, typer.Option("--copy", help="Copy the files into the library.")] = False,
    if_missing: Annotated[
        bool, typer.Option("--if-missing", help="Do nothing if a whole model of that name is there.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Add a model under a name. Files stay where they are unless --copy is given."""
    from keystroke.engine import builtin
    from keystroke.engine.checkpoint import open_checkpoint
    from keystroke.engine.library import Library, inspect
    from keystroke.engine.locate import resolve

    run = of(ctx)
    library = Library(run.settings.paths.models)
    with run.console.progress() as progress:
        if if_missing and (wanted := name or source) in library.names():
            resolve(wanted, run.settings, progress)  # whole, or for a built-in model made whole again
            return
        if source in builtin.BUILT_IN and not Path(source).exists():
            if name not in (None, source):
                raise UsageError(f"{source} is built in and keeps its name; leave out --name")
            library.check_free(source)
            entry = builtin.add(library, builtin.BUILT_IN[source], progress, show=not run.quiet)
        else:
            if name in builtin.BUILT_IN:
                raise UsageError(f"{name} is the name of a built-in model; choose another with --name")
            inspect(Path(source).expanduser())
            open_checkpoint(
                Path(source).expanduser()
            ).close()  # what cannot run is refused now, not at first use
            entry = library.add(Path(source), name, copy=copy, progress=progress)
    if run.wants_json(json):
        run.console.json(entry)
    else:
        run.console.note(f"added {entry.name}; try: keystroke chat --model {entry.name}")


@app.command()
def show(ctx: typer.Context, name: Name, json: options.Json = False) -> None:
    """Print what is known about a model."""
    from keystroke.clients.cli.console import size

    run = of(ctx)
    named = run.settings.models.get(name)
    if named is not None and (named.base_url or named.engine == "remote"):
        facts: dict[str, Any] = {
            "name": name,
            "server": named.base_url,
            "model": named.model,
            "role": named.role,
        }
    else:
        facts = _local_facts(name, run)
    if run.wants_json(json):
        run.console.json(facts)
        return
    for key, value in facts.items():
        if key == "sha256":
            for file, digest in value.items():
                run.console.line(f"{'sha256':13}{digest}  {file}")
        else:
            run.console.line(f"{key:13}{size(value) if key == 'size' else value}")


def _local_facts(name: str, run: Invocation) -> dict[str, Any]:
    from keystroke.engine.checkpoint import open_checkpoint
    from keystroke.engine.library import Library
    from keystroke.engine.locate import resolve

    with run.console.progress() as progress:
        place = resolve(name, run.settings, progress)
    with open_checkpoint(place) as checkpoint:
        spec = checkpoint.spec
    library = Library(run.settings.paths.models)
    entry = library.get(name) if name in library.names() else None
    facts: dict[str, Any] = {
        "name": name,
        "path": str(place),
        "size": entry.size if entry else _bytes(place),
        "architecture": spec.architecture,
        "layers": spec.layers,
        "hidden": spec.hidden,
        "vocabulary": spec.vocab_size,
        "context": spec.context_length,
    }
    if entry is not None:
        facts |= {"source": entry.source, "added": entry.added}
        facts["sha256"] = {file.name: file.sha256 for file in entry.files}
    return facts


@app.command()
def verify(ctx: typer.Context, name: Name, json: options.Json = False) -> None:
    """Read every byte of a model and compare it with what was added."""
    from keystroke.engine.builtin import SMOLLM2
    from keystroke.engine.library import EMBEDDED
    from keystroke.engine.locate import shipped

    run = of(ctx)
    if name == EMBEDDED:
        if (own := shipped()) is not None:
            _verify_shipped(own, run, run.wants_json(json))
            return
        name = SMOLLM2.name
    with run.console.progress() as progress:
        entry = _library(run).verify(name, progress)
    if run.wants_json(json):
        run.console.json({"name": name, "ok": True, "files": len(entry.files), "size": entry.size})
    else:
        run.console.line(f"{name}: all {len(entry.files)} files are as they were added")


def _verify_shipped(own: Path, run: Invocation, json: bool) -> None:
    from keystroke.engine.checksums import verify_checksums

    folder = own if own.is_dir() else own.parent
    with run.console.progress() as progress:
        files = verify_checksums(folder, progress)
    if json:
        run.console.json({"name": folder.name, "ok": True, "files": len(files)})
    else:
        run.console.line(f"{folder.name}: {', '.join(files)} as published")


@app.command()
def remove(ctx: typer.Context, name: Name) -> None:
    """Forget a model. Files that were added from elsewhere are not deleted."""
    run = of(ctx)
    _library(run).remove(name)
    run.console.note(f"removed {name}")


def _library(run: Invocation) -> Any:
    from keystroke.engine.library import Library

    return Library(run.settings.paths.models)


def _bytes(path: Path) -> int:
    return (
        path.stat().st_size
        if path.is_file()
        else sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    )
