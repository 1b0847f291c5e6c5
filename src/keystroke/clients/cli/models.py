"""`keystroke models`: lists, adds, chooses, verifies and removes models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from keystroke.clients.cli import options
from keystroke.clients.cli.console import format_size
from keystroke.clients.cli.options import Invocation, argument, invocation_of, option
from keystroke.config import load_settings
from keystroke.config.write import write_setting
from keystroke.engine.builtin import BUILT_IN, SMOLLM2
from keystroke.engine.library import (
    EMBEDDED,
    NAME,
    BrokenEntry,
    InstalledModel,
    ModelLibrary,
    Progress,
    identify_files,
)
from keystroke.engine.locate import resolve, shipped_model
from keystroke.engine.machine import fit, look_up_machine
from keystroke.engine.roles import Role, can_chat, is_remote, model_for
from keystroke.errors import NotFound, UsageError

app = options.command_group("models", "List, add, choose, check and remove models on this machine.")
app.info.no_args_is_help = False
Name = Annotated[str, argument("The model's name.", metavar="NAME")]


@app.callback(invoke_without_command=True)
def models(ctx: typer.Context) -> None:
    """List, add, choose, check and remove models on this machine; alone it lists them."""
    if ctx.invoked_subcommand is None:
        list_(ctx)


@app.command("list")
def list_(ctx: typer.Context, json: options.Json = False) -> None:
    """List the models that can be used by name, and what each is used for."""
    run = invocation_of(ctx)
    settings = run.settings
    rows = _rows(run)
    default = settings.model.default
    if default == "embedded" and shipped_model() is None:
        default = "smollm2"
    roles = {role: default if role is Role.FAST else model_for(role, settings) for role in Role}
    for row in rows:
        row["roles"] = [str(role) for role in Role if roles[role] == row["name"]]
    if run.json:
        run.console.json([{**row, "default": row["name"] == default} for row in rows])
        return
    shown = [
        (
            ("* " if row["name"] == default else "  ") + row["name"],
            row["kind"],
            format_size(row["size"]) if row["size"] else "",
            {True: "yes", False: "no", None: ""}[row.get("fits")],
            ", ".join(row["roles"]),
            row["where"],
        )
        for row in rows
    ]
    run.console.table(("  name", "kind", "size", "fits", "used for", "where"), shown)
    run.console.note("fits: it runs on this machine; `keystroke setup` recommends models and installs them")


def _rows(run: Invocation) -> list[dict[str, Any]]:
    from keystroke.engine.fetch.staging import folder_bytes

    settings = run.settings
    library = _library(run)
    rows: list[dict[str, Any]] = []
    if (own := shipped_model()) is not None:
        rows.append({"name": "embedded", "kind": "shipped", "size": folder_bytes(own), "where": str(own)})
    for entry in library.entries():
        if isinstance(entry, BrokenEntry):
            rows.append({"name": entry.name, "kind": "damaged", "size": 0, "where": entry.reason})
        else:
            where = entry.location or "in the library"
            rows.append({"name": entry.name, "kind": str(entry.kind), "size": entry.size, "where": where})
    known = {row["name"] for row in rows}
    for name, folder in library.partial_downloads():
        if name not in known:
            known.add(name)
            where = "incomplete download; repeat `keystroke models add` to resume, `models remove` to delete"
            rows.append({"name": name, "kind": "partial", "size": folder_bytes(folder), "where": where})
    machine = look_up_machine(settings.paths.models, measure=False)
    for row in rows:
        if (model := BUILT_IN.get(row["name"])) is not None:
            row["fits"] = fit(model, machine, installed=True).reason is None
    for model in BUILT_IN.values():
        if model.name not in known:
            found = fit(model, machine)
            how = "downloaded on first use" if model.on_demand else f"`keystroke models add {model.name}`"
            how += " (mapped, takes most of the memory)" if found.tight else ""
            where = f"{found.reason or how}; {model.about}"
            fits = {"fits": found.reason is None, "licence": model.licence}
            rows.append({"name": model.name, "kind": "built in", "size": model.size, "where": where, **fits})
    for name, named in settings.models.items():
        where = f"{named.base_url}#{named.model}" if named.base_url else str(named.path or named.model or "")
        kind = "remote" if is_remote(named) else "setting"
        rows.append({"name": name, "kind": kind, "size": 0, "where": where})
    return rows


@app.command()
def add(
    ctx: typer.Context,
    source: Annotated[
        str,
        argument(
            "A built-in name (see `keystroke models list`), OWNER/NAME[:FILE] on the Hugging Face hub, "
            "a folder in Hugging Face format, or a GGUF file."
        ),
    ],
    name: Annotated[str | None, option("Name for the model. Default: its own name.")] = None,
    copy: Annotated[bool, option("--copy", "Copy the files into the library.")] = False,
    if_missing: Annotated[
        bool, option("--if-missing", "Do nothing if the model is already installed.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Add a model under a name. Local files stay where they are unless --copy is given. Repeat the command to
    resume an interrupted download."""
    run = invocation_of(ctx)
    library = _library(run)
    try:
        with run.console.progress() as progress:
            if if_missing and (installed := name or source) in library.names():
                resolve(installed, run.settings, progress)  # checks it, and repairs a built-in model
                return
            entry = _add_source(library, source, name, copy, progress)
    except KeyboardInterrupt:
        if any(known in (name, source) for known, _ in library.partial_downloads()):
            run.console.note("stopped; repeat the command to resume the download")
        raise
    run.report(entry, f"added {entry.name}; {_next_step(entry, run)}")


def _add_source(
    library: ModelLibrary, source: str, name: str | None, copy: bool, progress: Progress
) -> InstalledModel:
    from keystroke.engine.fetch import hub, install
    from keystroke.engine.traits import traits_of

    path = Path(source).expanduser()
    if source in BUILT_IN and not path.exists():
        if name not in (None, source):
            raise UsageError(f"{source} is built in and cannot be renamed; omit --name")
        return install.add_builtin(library, BUILT_IN[source], progress)
    if name in BUILT_IN:
        if path.is_file():  # the file of that model, which its checksum proves
            return install.add_file_of_builtin(library, BUILT_IN[name], path, copy=copy, progress=progress)
        raise UsageError(f"{name} is the name of a built-in model; choose another with --name")
    if not path.exists() and (reference := hub.REFERENCE.fullmatch(source)):
        from keystroke.engine.fetch.repositories import add_repository

        return add_repository(library, reference["repo"], reference["file"], name, progress)
    if not path.exists() and path.name == source:
        raise NotFound(
            f"{source:.80} is neither a path nor in the catalogue ({', '.join(BUILT_IN)}); "
            "other models are added as OWNER/NAME or as a path"
        )
    identify_files(path)
    traits = traits_of(path)  # what cannot run is refused now, not at first use
    return library.add(Path(source), name, copy=copy, progress=progress, traits=traits)


def _next_step(entry: InstalledModel, run: Invocation) -> str:
    if entry.traits is not None and entry.traits.chat:
        if model_for(Role.DEEP, run.settings) == entry.name:
            return "chat, edit, review, run --fix and serve now use it; try: `keystroke chat`"
        return f"try: `keystroke chat --model {entry.name}`"
    return f"try: `keystroke complete FILE:LINE --model {entry.name}`"


@app.command()
def use(
    ctx: typer.Context,
    name: Annotated[str, argument("The model's name; auto resets to the default.", metavar="NAME")],
    role: Annotated[
        list[str] | None,
        option("fast, deep or chat; may be repeated. Default: all it supports.", metavar="ROLE"),
    ] = None,
    json: options.Json = False,
) -> None:
    """Choose the model for a role in your settings: fast for completion while typing, deep for instructions
    (edits, reviews, fixes), chat for conversation."""
    run = invocation_of(ctx)
    known = [str(one) for one in Role]
    for one in role or ():
        if one not in known:
            raise UsageError(f"--role must be one of {', '.join(known)}, not {one!r:.40}", param="role")
    keys = {"fast": "model.default", "deep": "model.deep", "chat": "model.chat"}
    if name == "auto":
        roles, value = role or known, None
    else:
        _check_usable(name, run)
        able = can_chat(name, run.settings)
        roles, value = role or (["deep", "chat"] if able else ["fast"]), name
        if not able and (unfit := [one for one in roles if one != "fast"]):
            raise UsageError(
                f"{name} cannot be used for {unfit[0]}: it completes code but does not follow instructions; "
                "choose a model with a chat template"
            )
    for one in roles:
        file = write_setting(keys[one], value, run.environ)
    after = load_settings(run.flags, environ=run.environ)
    chosen = {one: after.get(keys[one]) for one in roles}
    if run.json:
        run.console.json({"file": str(file), "roles": chosen})
        return
    for one in roles:
        if value is not None and chosen[one] != value:
            run.console.note(f"{one}: {after.origin(keys[one])} sets {chosen[one]}, which overrides {file}")
        elif value is None:
            run.console.note(f"{one}: chosen automatically ({file})")
        else:
            run.console.note(f"{one}: {name} ({file})")


def _check_usable(name: str, run: Invocation) -> None:
    """Raise NotFound or UsageError unless settings may name this model."""
    if not NAME.fullmatch(name):
        raise UsageError(
            f"{name:.80} is not a valid name; add the model first with `keystroke models add`", param="name"
        )
    built_in = BUILT_IN.get(name)
    if (
        name == EMBEDDED
        or (built_in is not None and built_in.on_demand)
        or is_remote(run.settings.models.get(name))
    ):
        return
    resolve(name, run.settings)


@app.command()
def show(ctx: typer.Context, name: Name, json: options.Json = False) -> None:
    """Show the details of a model."""
    run = invocation_of(ctx)
    named = run.settings.models.get(name)
    if named is not None and is_remote(named):
        facts: dict[str, Any] = {
            "name": name,
            "server": named.base_url,
            "model": named.model,
            "role": named.role,
        }
    else:
        facts = _known_facts(name, run)
    if run.json:
        run.console.json(facts)
        return
    for key, value in facts.items():
        if key == "sha256":
            for file, digest in value.items():
                run.console.line(f"{'sha256':13}{digest}  {file}")
        else:
            run.console.line(f"{key:13}{format_size(value) if key in ('size', 'memory') else value}")


def _known_facts(name: str, run: Invocation) -> dict[str, Any]:
    """A model on this disk, and of the catalogue's also what it needs and whether it fits this machine."""
    model = BUILT_IN.get(name)
    if model is None:
        return _local_facts(name, run)
    installed = name in _library(run).names()
    found = fit(model, look_up_machine(run.settings.paths.models), installed=installed)
    facts: dict[str, Any] = {"name": name, "size": model.size, "architecture": model.architecture}
    if installed or model.on_demand:
        facts = _local_facts(name, run)
    else:
        facts["installed"] = f"no: `keystroke models add {name}`"
    return {"title": model.title, **facts, "memory": model.memory_bytes, "fits": found.describe()}


def _local_facts(name: str, run: Invocation) -> dict[str, Any]:
    from keystroke.engine.checkpoint import open_checkpoint
    from keystroke.engine.fetch.staging import folder_bytes

    with run.console.progress() as progress:
        place = resolve(name, run.settings, progress)
    with open_checkpoint(place) as checkpoint:
        spec = checkpoint.spec
    library = _library(run)
    entry = library.get(name) if name in library.names() else None
    facts: dict[str, Any] = {
        "name": name,
        "path": str(place),
        "size": entry.size if entry else folder_bytes(place),
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
    """Verify the checksums of a model's files."""
    run = invocation_of(ctx)
    if name == EMBEDDED:
        if (own := shipped_model()) is not None:
            _verify_shipped(own, run)
            return
        name = SMOLLM2.name
    with run.console.progress() as progress:
        entry = _library(run).verify(name, progress)
    if run.json:
        run.console.json({"name": name, "ok": True, "files": len(entry.files), "size": entry.size})
    else:
        run.console.line(f"{name}: all {len(entry.files)} files are intact")


def _verify_shipped(own: Path, run: Invocation) -> None:
    from keystroke.engine.checksums import verify_checksums

    folder = own if own.is_dir() else own.parent
    with run.console.progress() as progress:
        files = verify_checksums(folder, progress)
    if run.json:
        run.console.json({"name": folder.name, "ok": True, "files": len(files)})
    else:
        run.console.line(f"{folder.name}: {', '.join(files)} intact")


@app.command()
def remove(ctx: typer.Context, name: Name) -> None:
    """Remove a model. Files that were added without --copy are not deleted."""
    run = invocation_of(ctx)
    _library(run).remove(name)
    run.console.note(f"removed {name}")


def _library(run: Invocation) -> ModelLibrary:
    return ModelLibrary(run.settings.paths.models)
