"""The `keystroke` command: runs a subcommand and turns its result or exception into an exit code.

A KeystrokeError prints one sentence on standard error and exits with its own code, Ctrl-C exits with 130, and
a closed output pipe ends silently. Nothing heavy is imported here; each command imports what it needs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

INTERRUPTED = 130
DEBUG = "KEYSTROKE_DEBUG"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit with its code."""
    try:
        code = _run(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:
        code = INTERRUPTED
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        _mute()
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    if not arguments and sys.stdin.isatty() and sys.stdout.isatty():
        arguments = ["tui"]
    if arguments in (["--version"], ["-V"], ["version"]):  # fast path: scripts and editors call it often
        from keystroke.clients.cli.installed_version import release

        sys.stdout.write(f"keystroke {release()}\n")
        return 0
    from keystroke.clients.cli.app import missing_package_message, root_command
    from keystroke.clients.cli.console import print_error
    from keystroke.errors import KeystrokeError

    try:
        code = root_command().main(args=arguments, prog_name="keystroke", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except KeystrokeError as error:
        if os.environ.get(DEBUG):
            raise
        print_error(str(error))
        return error.exit_code
    except BrokenPipeError:
        _mute()
        return 0
    except Exception as error:
        if os.environ.get(DEBUG):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":  # a command group without a subcommand
            sys.stderr.write(f"{error}\n")
            return 2
        # An error of the option parser, known by its methods: its classes moved between releases.
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            print_error(_usage_sentence(error))
            return int(error.exit_code)
        if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("keystroke"):
            print_error(missing_package_message(arguments, error.name or "a package"))
            return 2
        if isinstance(error, OSError) and error.strerror:
            print_error(
                f"the system refused: {error.strerror}{f' ({error.filename})' if error.filename else ''}"
            )
            return 1
        if isinstance(error, MemoryError):
            print_error("this machine does not have enough memory; choose a smaller model or context")
            return 1
        print_error(f"unexpected failure ({type(error).__name__}: {error}); set {DEBUG}=1 to see where")
        return 1


def _usage_sentence(error: Exception) -> str:
    message = " ".join(str(error.format_message()).split())  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    if context is None or message.endswith("?"):  # "Did you mean ...?"
        return message
    return f"{message.rstrip('.')}; see `{context.command_path} --help`"


def _mute() -> None:
    """Redirect standard output to the null device, so that the interpreter's last flush does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
