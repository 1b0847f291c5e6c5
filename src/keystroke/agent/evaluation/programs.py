"""Small Python programs run in the sandbox, each to see whether a piece of code does what it should.

What a program says of itself counts only after a word that it could not know beforehand, so that code
which prints or exits cannot pass for code that is right.
"""

from __future__ import annotations

import secrets
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from keystroke.agent.attempts import Verdict
from keystroke.agent.evaluation.standby import Standby
from keystroke.agent.sandbox import Ended, Ending, Limits, Place, Sandbox
from keystroke.engine.base import Interrupt
from keystroke.errors import Interrupted

_LIMITS = Limits(memory=2 << 30, output=4 << 20, processes=128)
_MESSAGE = 600  # characters of what went wrong
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
_TOLD = r"""
if _failed:
    print("\n\n%d %d" % (len(_passed), len(_failed)))
    print("\n".join(_failed[:3]))
    raise SystemExit(9)
"""


# The program as the main module, with installed packages and what `site` adds to the builtins.
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
    sandbox: Sandbox,
    program: str,
    seconds: float,
    interrupt: Interrupt | None = None,
    files: Mapping[str, str] | None = None,
) -> tuple[bool, Ended]:
    """Run a program to its end: whether it reached it, and what was printed. Interrupted."""
    word = secrets.token_hex(8)
    with tempfile.TemporaryDirectory(prefix="keystroke-", ignore_cleanup_errors=True) as folder:
        root = Path(folder)
        for name, text in (files or {}).items():
            (root / name).write_text(text)
        (root / "program.py").write_text(_telling(program, word), encoding="utf-8", errors="surrogatepass")
        ended = sandbox.run(
            [sys.executable, "-I", "-B", "program.py"],
            Place(root),
            replace(_LIMITS, seconds=seconds),
            interrupt,
        )
    return _reached(ended, word), ended


def standby(sandbox: Sandbox, size: int) -> Standby:
    """Interpreters ready for small programs, without what Python does for itself before one (`site`)."""
    return Standby(sandbox, _QUICK.format(path=_packages()), _LIMITS, size)


def _telling(program: str, word: str) -> str:
    return f"{program}\nprint()\nprint({word!r})\n"


def _reached(ended: Ended, word: str) -> bool:
    if ended.ending is Ending.INTERRUPTED:
        raise Interrupted("stopped on request")
    return ended.ok and ended.output.rstrip().endswith(word)


def run_examples(
    ready: Standby, code: str, examples: Sequence[str], seconds: float, interrupt: Interrupt | None = None
) -> Verdict:
    """How many of some assertions hold after `code`. Interrupted."""
    checks = []
    for number, example in enumerate(examples):
        checks.append(f"def _check{number}():\n    {example}\n")
        checks.append(f"_try(_passed, _failed, _check{number}, {_shown(example)!r})\n")
    program = "\n".join([code, _CHECK, *checks, _TOLD])
    word = secrets.token_hex(8)
    ended = ready.run(_telling(program, word), seconds, interrupt)
    if _reached(ended, word):
        return Verdict(1.0)
    if ended.ending is Ending.TIMEOUT:
        return Verdict(0.0, f"it did not end within {seconds:g} seconds")
    if ended.code == 9:
        counts, _, message = ended.output[ended.output.rfind("\n\n") + 2 :].partition("\n")
        numbers = counts.split()
        if len(numbers) == 2 and all(number.isdigit() for number in numbers):
            passed, failed = map(int, numbers)
            return Verdict(min(passed / max(passed + failed, 1), 0.99), message.strip()[:_MESSAGE])
    return Verdict(0.0, failure_of(ended))


def failure_of(ended: Ended) -> str:
    """The last lines of what a program printed: where Python says what went wrong."""
    lines = [line for line in ended.output.strip().splitlines() if line.strip()]
    if ended.ending is not Ending.EXITED:
        return f"it was stopped: {ended.ending}"
    return "\n".join(lines[-3:])[-_MESSAGE:] or f"it ended with code {ended.code}"


def _shown(example: str) -> str:
    return example.removeprefix("assert ").strip()[:300]
