"""The table of commands, and the options they share.

An entry of `COMMANDS` has a name, the location of a Typer app or function, one line of help, and the optional
extra it needs. Its module is imported only when the command runs, so `--help` and shell completion are fast.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from keystroke.clients.cli.options import Invocation, option
from keystroke.errors import ConfigError, UsageError


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """`target` is "module:attribute" of a Typer app or a function. Both default to the command's name; a
    module without a dot is in this folder."""

    help: str
    target: str = ""
    extra: str | None = None
    example: str = ""  # shown at the end of its help


LAB = "keystroke_lab"  # not in the wheel; `make lab` installs it
COMMANDS: dict[str, CommandEntry] = {
    "setup": CommandEntry("Choose models for this machine, install them, configure editors."),
    "complete": CommandEntry(
        "Complete code at a position in a file, or after standard input.",
        example="keystroke complete app.py:12:8",
    ),
    "generate": CommandEntry("Continue a prompt, streaming the text."),
    "chat": CommandEntry("Talk with a model; interrupt or redirect it while it answers."),
    "edit": CommandEntry(
        "Edit files by instruction, with minimal changes.",
        example='keystroke edit app.py -m "rename n to count"',
    ),
    "do": CommandEntry(
        "Run an agent on a task: find the code, change it, check it.",
        example='keystroke do "make the parser tests pass" --check "pytest -q"',
    ),
    "tasks": CommandEntry("Manage background tasks: list, watch, answer, undo.", ":app"),
    "undo": CommandEntry("Undo the last edit.", "edit:undo"),
    "run": CommandEntry("Run a command; if it fails, show a diagnosis and offer a fix."),
    "refactor": CommandEntry("Refactor Python: rename, extract, inline, move, change signatures.", ":app"),
    "review": CommandEntry("Review uncommitted changes; findings come with fixes."),
    "models": CommandEntry("List, add, check and remove models on this machine.", ":app"),
    "cache": CommandEntry("Show the files Keystroke stores on this machine, and delete them."),
    "config": CommandEntry("Show where settings come from, and edit them.", "settings:app"),
    "learn": CommandEntry("Learn from the suggestions you accept, on this machine only.", ":app"),
    "doctor": CommandEntry("Report on this machine, its models and their speed."),
    "ps": CommandEntry("List the Keystroke processes of this user: models, memory, clients.", "processes:ps"),
    "stop": CommandEntry("Stop the shared gateway and other Keystroke processes.", "processes:stop"),
    "serve": CommandEntry("Serve models to editors, the OpenAI SDK and Codex."),
    "tui": CommandEntry("Open chat and tasks in the terminal; same as `keystroke` alone."),
    "play": CommandEntry("Open the playground, an editor in the browser."),
    "scale": CommandEntry(
        "Serve with many replicas on Ray: this machine or a cluster.", ":app", extra="scale"
    ),
    "keys": CommandEntry("Create, list and revoke API keys of a server.", ":app"),
    "usage": CommandEntry("Show tokens, time and cost by key and model."),
    "store": CommandEntry("Back up and restore a server's database.", ":app"),
    "audit": CommandEntry("Find security weaknesses in files, with fixes."),
    "lsp": CommandEntry("Serve an editor over the Language Server Protocol."),
    "acp": CommandEntry("Serve as the agent of an editor over the Agent Client Protocol.", extra="acp"),
    "demo": CommandEntry("Watch the embedded model complete a few lines of code."),
    "eval": CommandEntry("Evaluate agents on sets of tasks: score against time.", ":evaluate"),
    "bench": CommandEntry("Run a benchmark."),
    "train": CommandEntry(
        "Make a model: corpus, tokenizer, training, evaluation (make lab).", f"{LAB}.cli:app"
    ),
    "version": CommandEntry("Print the version."),
}


class LazyGroup(TyperGroup):
    """A group that knows commands by name and help, and imports one only to run it."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        entry = COMMANDS.get(cmd_name)
        return TyperCommand(name=cmd_name, help=entry.help) if entry else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        self.commands = {name: self.get_command(ctx, name) for name in COMMANDS}  # for "did you mean"
        name, found, rest = super().resolve_command(ctx, args)
        return name, load_command(name) if found is not None and name else found, rest


def load_command(name: str) -> Any:
    """Import the command called `name`."""
    entry = COMMANDS[name]
    module, _, attribute = entry.target.partition(":")
    module = module if "." in module else f"keystroke.clients.cli.{module or name}"
    try:
        target = getattr(importlib.import_module(module), attribute or name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != LAB:
            raise
        raise UsageError(
            f"`keystroke {name}` is installed apart from the program: run `make lab` in a clone"
        ) from error
    if isinstance(target, typer.Typer):
        loaded: Any = typer.main.get_group(target)
    else:
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        epilog = f"Example: {entry.example}" if entry.example else None
        single.command(name, help=entry.help, epilog=epilog)(target)
        loaded = typer.main.get_command(single)
    loaded.name = name
    return loaded


def missing_package_message(arguments: list[str], package: str) -> str:
    """The sentence for a command whose optional extra is not installed."""
    name = next((a for a in arguments if a in COMMANDS), None)
    extra = COMMANDS[name].extra if name else None
    what = f"`keystroke {name}`" if name else "this"
    cure = f"; install it with: pip install 'keystroke[{extra}]'" if extra else ""
    return f"{what} needs {package}, which is not installed{cure}"


@functools.cache
def root_command() -> Any:
    """The whole command line as one click command."""
    return typer.main.get_command(app)


app = typer.Typer(
    cls=LazyGroup,
    name="keystroke",
    rich_markup_mode=None,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from keystroke.clients.cli.installed_version import release

        typer.echo(f"keystroke {release()}")
        raise typer.Exit


@app.callback()
def options(
    ctx: typer.Context,
    json: Annotated[bool, option("--json", "Print JSON for programs.")] = False,
    quiet: Annotated[bool, option("--quiet", "-q", "Print results and errors only.")] = False,
    config: Annotated[Path | None, option("Use this configuration file.", metavar="FILE")] = None,
    local: Annotated[
        bool, option("--local", "Load models in this process, not in the shared gateway.")
    ] = False,
    assignments: Annotated[
        list[str] | None, option("--set", "Override one setting; may be repeated.", metavar="KEY=VALUE")
    ] = None,
    version: Annotated[
        bool, option("--version", "-V", "Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Code completion and chat at the speed of typing, on the hardware you have."""
    flags = dict(map(_parse_assignment, assignments or ()))
    ctx.obj = Invocation(json=json, quiet=quiet, config=config, flags=flags, local=local)


def _parse_assignment(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set needs KEY=VALUE, for example engine.threads=2, not {text!r:.80}")
    return key.strip(), value
