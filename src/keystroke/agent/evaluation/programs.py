"""Runs small Python programs in the sandbox to check code.

A program counts as finished only after printing a random word that it cannot know beforehand, so that code
which prints or exits early does not pass.
"""

from __future__ import annotations

import secrets
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from keystroke.agent.attempts import CheckResult
from keystroke.agent.evaluation.interpreter_pool import InterpreterPool
from keystroke.agent.sandbox import CommandLimits, CompletedCommand, ExitReason, Sandbox, SandboxPolicy
from keystroke.engine.base import Interrupt
from keystroke.errors import Interrupted

_LIMITS = CommandLimits(memory=2 << 30, output=4 << 20, processes=128)
_MESSAGE = 600  # characters
_CHECK = """
def _try(passed, failed, check, source):
    try:
        check()
    except AssertionError as error:
        failed.append(source + (" -- " + str(error) if str(error) else " does not hold"))
    except BaseException as error:
        failed.append(source + " raised " + type(error).__name__ + ": " + str(error)[:200])
    else:
        passed.append(source)

import math
_passed, _failed = [], []
"""
_REPORT = r"""
if _failed:
    print("\n\n%d %d" % (len(_passed), len(_failed)))
    print("\n".join(_failed[:3]))
    raise SystemExit(9)
"""


# Runs the program as the main module, with installed packages and the builtins that `site` adds.
_QUICK = """\
import builtins, sys
sys.path += {path}
sys.argv = ["program.py"]
builtins.exit = builtins.quit = sys.exit
exec(compile(open("program.py", encoding="utf-8", errors="surrogatepass").read(), "program.py", "exec"))
"""


@cache
def _packages() -> list[str]:
    return [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]


def run_program(
    sandbox: Sandbox, program: str, seconds: float, interrupt: Interrupt | None = None
) -> tuple[bool, CompletedCommand]:
    """Run a program: whether it reached its end, and its result. Interrupted."""
    word = secrets.token_hex(8)
    with tempfile.TemporaryDirectory(prefix="keystroke-", ignore_cleanup_errors=True) as folder:
        root = Path(folder)
        (root / "program.py").write_text(
            _with_end_marker(program, word), encoding="utf-8", errors="surrogatepass"
        )
        result = sandbox.run(
            [sys.executable, "-I", "-B", "program.py"],
            SandboxPolicy(root),
            replace(_LIMITS, seconds=seconds),
            interrupt,
        )
    return _reached(result, word), result


def interpreter_pool(sandbox: Sandbox, size: int) -> InterpreterPool:
    """Interpreters that wait for small programs, started without `site`."""
    return InterpreterPool(sandbox, _QUICK.format(path=_packages()), _LIMITS, size)


def _with_end_marker(program: str, word: str) -> str:
    return f"{program}\nprint()\nprint({word!r})\n"


def _reached(result: CompletedCommand, word: str) -> bool:
    if result.exit_reason is ExitReason.INTERRUPTED:
        raise Interrupted("stopped on request")
    return result.ok and result.output.rstrip().endswith(word)


def run_examples(
    ready: InterpreterPool,
    code: str,
    examples: Sequence[str],
    seconds: float,
    interrupt: Interrupt | None = None,
) -> CheckResult:
    """Check how many assertions hold after `code`. Interrupted."""
    checks = []
    for number, example in enumerate(examples):
        checks.append(f"def _check{number}():\n    {example}\n")
        shown = example.removeprefix("assert ").strip()[:300]
        checks.append(f"_try(_passed, _failed, _check{number}, {shown!r})\n")
    program = "\n".join([code, _CHECK, *checks, _REPORT])
    word = secrets.token_hex(8)
    result = ready.run(_with_end_marker(program, word), seconds, interrupt)
    if _reached(result, word):
        return CheckResult(1.0)
    if result.exit_reason is ExitReason.TIMEOUT:
        return CheckResult(0.0, f"it did not end within {seconds:g} seconds")
    if result.code == 9:
        counts, _, message = result.output[result.output.rfind("\n\n") + 2 :].partition("\n")
        numbers = counts.split()
        if len(numbers) == 2 and all(number.isdigit() for number in numbers):
            passed, failed = map(int, numbers)
            return CheckResult(min(passed / max(passed + failed, 1), 0.99), message.strip()[:_MESSAGE])
    return CheckResult(0.0, failure_of(result))


def failure_of(result: CompletedCommand) -> str:
    """The last lines of a program's output, where Python prints the error."""
    lines = [line for line in result.output.strip().splitlines() if line.strip()]
    if result.exit_reason is not ExitReason.EXITED:
        return f"it was stopped: {result.exit_reason}"
    return "\n".join(lines[-3:])[-_MESSAGE:] or f"it ended with code {result.code}"
