"""Function tasks: the prompt, the parser of the answer, the checker of attempts, and the solver.

The answer is one code block whose fence is written for the model, so it starts with code. The checker sees
the examples of the description, never the scoring tests.
"""

from __future__ import annotations

import ast
import os
import re
import time

from keystroke.agent.attempts import Attempt, AttemptEnd, CheckResult, WatchResult, WatchState, normalise
from keystroke.agent.attempts.checker import CONTINUE, AttemptWatch
from keystroke.agent.chat.model import ChatModel
from keystroke.agent.chat.sampling import SamplingRequest
from keystroke.agent.evaluation.evaluate import EvaluationConfig, Solution
from keystroke.agent.evaluation.interpreter_pool import InterpreterPool
from keystroke.agent.evaluation.programs import interpreter_pool, run_examples, run_program
from keystroke.agent.evaluation.tasks import FunctionTask, Task
from keystroke.agent.sandbox import Sandbox
from keystroke.engine.base import Interrupt
from keystroke.errors import UsageError

OPEN, CLOSE = "```python\n", "```"
_SYSTEM = "You are a careful Python programmer. You answer with code."
_ASK = """Write the Python function `{entry}` that is described below. Answer with one block of code that \
holds the whole function and every import it needs, and nothing else.

```python
{prompt}
```"""
_AGAIN = """That is wrong:
{problem}
Write the whole function again, corrected."""
_REPEATED = 24  # equal lines in a row that make an answer a loop
_SECONDS = 6.0  # for the examples of a description


def messages(task: FunctionTask) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": _SYSTEM},
        {"role": "user", "content": _ASK.format(entry=task.entry, prompt=task.prompt.strip("\n"))},
    ]


def retry_messages(task: FunctionTask, attempt: Attempt) -> list[dict[str, str]] | None:
    """The conversation that shows a failed attempt to the next one."""
    problem = attempt.check_result.message if attempt.check_result is not None else attempt.reason
    if not problem or not attempt.text.strip():
        return None
    return [
        *messages(task),
        {"role": "assistant", "content": f"{OPEN}{attempt.text.rstrip()}\n{CLOSE}"},
        {"role": "user", "content": _AGAIN.format(problem=problem)},
    ]


def program_of(task: FunctionTask, text: str) -> str:
    """The program of an answer: the function, preceded by the code of the description."""
    text = text.partition(CLOSE)[0]
    defines = re.search(rf"^(?:async\s+)?def\s+{re.escape(task.entry)}\b", text, re.MULTILINE)
    if defines is None and re.match(r"[ \t]+\S", text.lstrip("\n")) and "def " in task.prompt:
        text = f"{task.prompt[len(task.context) :].rstrip()}\n{text}"  # only the body was written
    return f"{task.context}\n{text}" if task.context.strip() else text


class FunctionChecker:
    """Checks the examples of the description; parses while an answer is written."""

    def __init__(self, interpreters: InterpreterPool, task: FunctionTask) -> None:
        self._interpreters, self._task = interpreters, task

    def watch(self) -> AttemptWatch:
        return _PythonWatch().feed

    def check(self, text: str, interrupt: Interrupt) -> CheckResult | None:
        code = program_of(self._task, text)
        try:
            tree = ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return CheckResult(0.0, f"it does not parse: {error}")
        if not any(
            isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)) and n.name == self._task.entry
            for n in tree.body
        ):
            return CheckResult(0.0, f"it does not define {self._task.entry}")
        if not self._task.examples:
            return None
        return run_examples(self._interpreters, code, self._task.examples, _SECONDS, interrupt)

    def key(self, text: str) -> str:
        return normalise(program_of(self._task, text), "python")


def score(
    sandbox: Sandbox, task: FunctionTask, text: str, interrupt: Interrupt | None = None
) -> tuple[bool, str]:
    """Whether an answer passes the scoring tests, and what went wrong if not."""
    code = program_of(task, text)
    reached, ended = run_program(sandbox, f"{code}\n\n{task.tests}", task.seconds, interrupt)
    if task.tests.rstrip().endswith("verbosity=0)"):  # unittest ends the program itself
        reached = ended.ok
    return reached, "" if reached else ended.output.strip()[-300:]


class _PythonWatch:
    """Watches Python as it is written: complete statements must parse, and no line may repeat endlessly."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._rest = ""
        self._run = 0

    def feed(self, piece: str) -> WatchResult:
        if "\n" not in piece:
            self._rest += piece
            return CONTINUE
        *complete, self._rest = (self._rest + piece).split("\n")
        for line in complete:
            self._run = self._run + 1 if self._lines and line == self._lines[-1] and line.strip() else 0
            self._lines.append(line)
            if self._run >= _REPEATED:
                return WatchResult(WatchState.HOPELESS, f"the line {line.strip()!r:.60} comes over and over")
            if line[:1] and line[:1] not in " \t#)]}\"'@" and len(self._lines) > 1 and not self._parses():
                return WatchResult(WatchState.HOPELESS, "what is written so far does not parse")
        return CONTINUE

    def _parses(self) -> bool:
        """Whether everything before the last line, which begins a new statement, is Python."""
        if re.match(r"(?:elif|else|except|finally|case)\b", self._lines[-1]):
            return True
        text = "\n".join(self._lines[:-1])
        if text.count('"""') % 2 or text.count("'''") % 2:
            return True  # inside a long string
        try:
            ast.parse(text)
        except SyntaxError as error:
            return "was never closed" in str(error) or "EOF" in str(error)
        except (ValueError, RecursionError, MemoryError):
            return False
        return True


class FunctionSolver:
    def __init__(self, model: ChatModel, sandbox: Sandbox, *, seed: int = 0) -> None:
        self._model, self._sandbox, self._seed = model, sandbox, seed
        # Few at a time: the answers that end first are the likeliest, and every further interpreter delays
        # their checks.
        self._workers = max(2, (os.cpu_count() or 2) // 4)
        self._interpreters = interpreter_pool(sandbox, self._workers)

    def close(self) -> None:
        """End the waiting interpreters. Idempotent."""
        self._interpreters.close()

    def solve(self, task: Task, config: EvaluationConfig, interrupt: Interrupt) -> Solution:
        if not isinstance(task, FunctionTask):
            raise UsageError(f"{task.id} is not a function to write")
        started = time.perf_counter()
        request = SamplingRequest(
            messages(task),
            FunctionChecker(self._interpreters, task),
            attempts=config.attempts,
            opening=OPEN,
            stop=(CLOSE,),
            policy=config.policy,
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            seed=self._seed,
            workers=self._workers,
            retry=lambda failed: retry_messages(task, failed),
            interrupt=interrupt,
        )
        race = self._model.sample(request).race
        # Where no attempt finished, the longest is scored.
        longest = max((attempt.text for attempt in race.attempts), key=len, default="")
        return Solution(
            answer=race.winner.text if race.winner is not None else longest,
            seconds=time.perf_counter() - started,
            tokens=race.tokens,
            prompt_tokens=race.prompt_tokens,
            attempts=len(race.attempts),
            ended_early=sum(a.end in (AttemptEnd.HOPELESS, AttemptEnd.BEATEN) for a in race.attempts),
            checked=race.passed,
        )

    def score(self, task: Task, solution: Solution, interrupt: Interrupt) -> tuple[bool, str]:
        assert isinstance(task, FunctionTask)
        return score(self._sandbox, task, solution.answer, interrupt)
