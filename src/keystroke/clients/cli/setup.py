"""`keystroke setup`: chooses models for this machine, installs them and configures editors.

Every step can be skipped, and `keystroke setup --undo` takes all of them back. Without a terminal and without
--yes it only shows what it would do.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer

from keystroke.clients.cli import options
from keystroke.clients.cli.console import format_size, print_error
from keystroke.clients.cli.editor_setup import EDITORS, EditorWriter, UserFolders
from keystroke.clients.cli.options import Invocation, invocation_of, option
from keystroke.clients.cli.setup_record import SetupRecord
from keystroke.config import load_settings
from keystroke.config.write import write_setting
from keystroke.engine.builtin import BUILT_IN, CODER
from keystroke.engine.library import ModelLibrary
from keystroke.engine.machine import Machine, ModelFit, NvidiaGpu, fit, look_up_machine, recommend_deep
from keystroke.engine.roles import Role, model_for
from keystroke.errors import KeystrokeError, NotFound, UsageError

EMBEDDED, NONE = "embedded", "none"


@dataclass(frozen=True, slots=True)
class SetupPlan:
    """What setup recommends for a machine: `fast` and `deep` are names of models; `deep_fit` is None where
    no model follows instructions at a usable speed. `notes` say what the user should know or do first."""

    machine: Machine
    fast: str
    deep: str | None
    fast_fit: ModelFit | None
    deep_fit: ModelFit | None
    downloads: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def record(self) -> dict[str, Any]:
        """The plan for JSON output."""

        def fact(name: str | None, fit: ModelFit | None) -> dict[str, Any] | None:
            if name is None:
                return None
            speed = round(fit.speed, 1) if fit is not None and fit.speed is not None else None
            size = fit.model.size if fit is not None and name in self.downloads else 0
            engine = fit.engine if fit is not None else None
            return {"model": name, "expected_tokens_per_second": speed, "download": size, "engine": engine}

        return {
            "machine": self.machine.describe(),
            "fast": fact(self.fast, self.fast_fit),
            "deep": fact(self.deep, self.deep_fit),
            "notes": list(self.notes),
        }


def make_plan(
    machine: Machine, installed: frozenset[str], *, fast: str | None = None, deep: str | None = None
) -> SetupPlan:
    """The recommendation for `machine`. `fast` and `deep` are the user's own choices. Raises NotFound for
    a name that is not in the catalogue, UsageError for a model that does not fit."""
    notes: list[str] = []
    if deep == NONE:
        deep_fit = None
    elif deep is not None:
        deep_fit = _chosen_fit(deep, machine, installed)
    else:
        deep_fit = recommend_deep(BUILT_IN.values(), machine, installed)
        if deep_fit is None:
            notes.append(
                "no model of the catalogue that follows instructions fits; name a server's with "
                "`keystroke config edit` ([models.NAME] with base_url and model)"
            )
    fast_fit = None
    if fast not in (None, NONE, EMBEDDED):
        assert fast is not None
        fast_fit = _chosen_fit(fast, machine, installed)
    elif fast is None and machine.gpu is not None:
        # A GPU runs the larger coder while typing, if both models fit its memory.
        taken = deep_fit.model.gpu_memory_bytes if deep_fit is not None and deep_fit.engine == "cuda" else 0
        if deep_fit is not None and deep_fit.model.name == CODER.name:
            taken = 0
        left = NvidiaGpu(machine.gpu.name, machine.gpu.memory_bytes - taken)
        found = fit(CODER, replace(machine, gpu=left), installed=CODER.name in installed)
        fast_fit = found if found.reason is None and found.engine == "cuda" else None
    if machine.gpu is not None and "cuda" not in machine.engines:
        notes.append("to use the GPU, first: pip install 'keystroke[cuda]' (in the environment of Keystroke)")
    if machine.is_mac and "mlx" not in machine.engines:
        notes.append("to use the GPU of this Mac, first: pip install mlx (in the environment of Keystroke)")
    if deep_fit is not None and deep_fit.speed is not None and deep_fit.speed < 30:
        notes.append(
            f"expect about {deep_fit.speed:.0f} tokens a second from {deep_fit.model.name}: edits of whole "
            "files take a while; `edit --lines A-B` is faster"
        )
    wanted = {one.model.name: one for one in (fast_fit, deep_fit) if one is not None}
    return SetupPlan(
        machine,
        fast_fit.model.name if fast_fit is not None else EMBEDDED,
        deep_fit.model.name if deep_fit is not None else None,
        fast_fit,
        deep_fit,
        tuple(name for name in wanted if name not in installed),
        tuple(notes),
    )


def _chosen_fit(name: str, machine: Machine, installed: frozenset[str]) -> ModelFit:
    model = BUILT_IN.get(name)
    if model is None:
        raise NotFound(
            f"there is no {name:.80} in the catalogue ({', '.join(BUILT_IN)}); "
            "`keystroke models add` takes others"
        )
    found = fit(model, machine, installed=name in installed)
    if found.reason is not None:
        raise UsageError(f"{name} {found.reason}")
    return found


def setup(
    ctx: typer.Context,
    fast: Annotated[
        str | None, option("Model for completion; embedded is the shipped one.", metavar="NAME")
    ] = None,
    deep: Annotated[
        str | None, option("Model for chat, edits and tasks; none installs none.", metavar="NAME")
    ] = None,
    editor: Annotated[
        list[str] | None,
        option(
            "Configure this editor or agent; may be repeated: vscode, neovim, zed, helix, jetbrains, codex, "
            "claude, opencode, found (all that are installed), none.",
            metavar="NAME",
        ),
    ] = None,
    measure: Annotated[bool, option("--measure/--no-measure", "Measure the models at the end.")] = True,
    dry_run: Annotated[bool, option("--dry-run", "Show the recommendation; change nothing.")] = False,
    undo: Annotated[bool, option("--undo", "Take back what setup has installed and written.")] = False,
    yes: options.Yes = False,
    json: options.Json = False,
) -> None:
    from keystroke.clients.cli.changes import has_terminal

    run = invocation_of(ctx)
    settings = run.settings
    if undo:
        _undo(run, yes)
        return
    known = [*EDITORS, "found", NONE]
    if unknown := [name for name in editor or () if name not in known]:
        raise UsageError(f"there is no editor {unknown[0]!r:.40}; choose from {', '.join(known)}")
    folders = UserFolders.of(run.environ)
    machine = look_up_machine(settings.paths.models)
    installed = frozenset(ModelLibrary(settings.paths.models).names())
    plan = make_plan(machine, installed, fast=fast, deep=deep)
    found = [writer for writer in EDITORS.values() if writer.is_found(folders)]
    if not run.json:
        _show_plan(run, plan, found)
    if dry_run or (not yes and not has_terminal()):
        if run.json:
            run.console.json({**plan.record(), "editors": [writer.name for writer in found]})
        else:
            run.console.note("nothing was changed" + ("" if dry_run else "; use --yes to install"))
        return
    record = SetupRecord.load(settings.paths.state) or SetupRecord()
    asker = _Asker(yes)
    try:
        added, failed = _install(run, plan, record, asker)
        roles = _choose_roles(run, plan, record, {*installed, *added})
        hints = _configure(run, _select_editors(editor, found, yes), folders, record, asker)
    finally:
        if record != SetupRecord():
            record.save(settings.paths.state)
    speeds = _measure(run, roles) if measure else {}
    if run.json:
        run.console.json(
            {**plan.record(), "installed": added, "roles": roles, "speeds": speeds, "editors": hints}
        )
    else:
        _show_result(run, roles, speeds, hints, undoable=record != SetupRecord())
    if failed:
        raise typer.Exit(1)


class _Asker:
    def __init__(self, yes: bool) -> None:
        self._yes = yes

    def ask(self, question: str) -> bool:
        """Whether the user agrees; Enter does."""
        from keystroke.clients.cli.changes import read_key

        return self._yes or read_key(f"{question} [Y/n] ", "ny") == "y"


def _show_plan(run: Invocation, plan: SetupPlan, found: list[EditorWriter]) -> None:
    def row(label: str, text: str) -> None:
        run.console.field(f"{label:12}", text)

    def model(label: str, fit: ModelFit) -> None:
        parts = [fit.model.title]
        if fit.speed is not None:
            parts.append(f"about {fit.speed:.0f} tokens/s expected")
        name = fit.model.name
        parts.append(f"{format_size(fit.model.size)} to download" if name in plan.downloads else "installed")
        row(label, f"{name}: {', '.join(parts)}")

    row("machine", plan.machine.describe())
    if plan.fast_fit is not None:
        model("fast", plan.fast_fit)
    else:
        row("fast", "embedded: keystroke-80m, installed")
    row("", "completion while typing")
    if plan.deep_fit is not None:
        model("deep", plan.deep_fit)
        row("", plan.deep_fit.model.about.partition(": ")[2])
    if found:
        row("editors", ", ".join(writer.title for writer in found) + " found")
    for note in plan.notes:
        row("note", note)


def _install(
    run: Invocation, plan: SetupPlan, record: SetupRecord, asker: _Asker
) -> tuple[list[str], list[str]]:
    """Download what the plan needs: what was added, and what failed. A failure is reported, and setup goes
    on."""
    from keystroke.engine.fetch.install import add_builtin

    added: list[str] = []
    failed: list[str] = []
    for name in plan.downloads:
        model = BUILT_IN[name]
        if not asker.ask(f"Download {model.title} ({format_size(model.size)}, {model.licence})?"):
            continue
        try:
            with run.console.progress() as progress:
                add_builtin(ModelLibrary(run.settings.paths.models), model, progress)
        except KeystrokeError as error:
            print_error(str(error))
            failed.append(name)
            continue
        added.append(name)
        record.models.append(name)
    return added, failed


def _choose_roles(run: Invocation, plan: SetupPlan, record: SetupRecord, usable: set[str]) -> dict[str, str]:
    """Write the models of the plan to the user's settings where they are not chosen anyway. Returns the
    model of each role."""

    def choose(key: str, role: Role, name: str) -> None:
        settings = load_settings(run.flags, environ=run.environ)
        if model_for(role, settings) == name:
            return
        before = settings.get(key)
        record.settings.setdefault(key, before if key in settings.origins else None)
        write_setting(key, name, run.environ)

    if plan.fast == EMBEDDED or plan.fast in usable:
        choose("model.default", Role.FAST, plan.fast)
    if plan.deep is not None and plan.deep in usable:
        choose("model.deep", Role.DEEP, plan.deep)
    after = load_settings(run.flags, environ=run.environ)
    roles = {"fast": model_for(Role.FAST, after), "deep": model_for(Role.DEEP, after)}
    return {role: name for role, name in roles.items() if name is not None}


def _select_editors(names: list[str] | None, found: list[EditorWriter], yes: bool) -> list[EditorWriter]:
    if names is None:
        return [] if yes else found  # a script configures only the editors it names
    if NONE in names:
        return []
    wanted = [EDITORS[name] for name in names if name in EDITORS]
    return [*wanted, *(writer for writer in found if "found" in names and writer not in wanted)]


def _configure(
    run: Invocation, writers: list[EditorWriter], folders: UserFolders, record: SetupRecord, asker: _Asker
) -> dict[str, str]:
    """Write the configuration of each program. Returns how to try each."""
    hints: dict[str, str] = {}
    for writer in writers:
        change = writer.plan(folders)
        for sentence in change.missing:
            run.console.note(f"{writer.title}: {sentence}")
        if not change.files and not change.commands:
            if not change.missing:
                hints[writer.title] = change.hint
            continue
        where = ", ".join([*map(str, change.files), *(" ".join(command) for command in change.commands)])
        if not asker.ask(f"Configure {writer.title} ({where})?"):
            continue
        for path, text in change.files.items():
            record.write_file(path, text)
        for command in change.commands:
            try:
                subprocess.run(command, check=True, capture_output=True, timeout=120)
                record.undo_commands += [list(one) for one in change.undo]
            except (OSError, subprocess.SubprocessError) as error:
                run.console.note(f"{' '.join(command)} failed ({error}); run it yourself")
        hints[writer.title] = change.hint
    return hints


def _measure(run: Invocation, roles: dict[str, str]) -> dict[str, float]:
    """Tokens a second of each model that is installed here."""
    from keystroke.clients.cli.doctor import examine

    speeds: dict[str, float] = {}
    for name in dict.fromkeys(roles.values()):
        try:
            run.console.note(f"measuring {name}")
            facts = examine(name, run)
        except KeystrokeError as error:
            run.console.note(f"{name} cannot be measured: {error}")
            continue
        if "speed" in facts:
            speeds[name] = round(facts["speed"]["decode"], 1)
    return speeds


def _show_result(
    run: Invocation, roles: dict[str, str], speeds: dict[str, float], hints: dict[str, str], undoable: bool
) -> None:
    def row(label: str, model: str, text: str) -> None:
        speed = f"{speeds[model]:.0f} tokens/s" if model in speeds else ""
        run.console.field(f"{label:14}{model:14}{speed:14}", text)

    run.console.line()
    row("completion", roles.get("fast", "-"), "try: keystroke play")
    if "deep" in roles:
        row("chat, edits", roles["deep"], 'try: keystroke chat, keystroke edit FILE -m "..."')
    else:
        row("chat, edits", "-", "no model follows instructions yet: repeat keystroke setup")
    for title, hint in hints.items():
        run.console.field(f"{title:14}", hint)
    if undoable:
        run.console.line(f"{'undo':14}keystroke setup --undo")
    run.console.line(f"{'more':14}keystroke --help, keystroke doctor, keystroke ps")


def _undo(run: Invocation, yes: bool) -> None:
    from keystroke.clients.cli.changes import confirm_deletion
    from keystroke.clients.cli.processes import stop_all
    from keystroke.clients.running import running_processes

    record = SetupRecord.load(run.settings.paths.state)
    if record is None:
        run.report({"undone": [], "left": []}, "there is nothing to undo: setup has changed nothing here")
        return
    parts = [
        *(f"the model {name}" for name in record.models),
        *record.settings,
        *(f.path for f in record.files),
    ]
    if not yes and not confirm_deletion(f"Undo {', '.join(parts)}?"):
        raise typer.Exit(1)
    if record.models:
        stop_all(run, [one for one in running_processes() if one.belongs_to(run.settings.paths.state)])
    done, left = record.undo(run)
    if run.json:
        run.console.json({"undone": done, "left": left})
        return
    for sentence in (*done, *left):
        run.console.note(sentence)
