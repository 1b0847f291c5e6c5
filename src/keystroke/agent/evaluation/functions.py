"""A function asked of a model: what it is told, how its answer is read, and how attempts are judged.

Prompt and parser side by side. The answer is one block of code whose fence is written for the model, so
it cannot begin with talk; the judge sees the examples of the description, never the tests that score.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any

from keystroke.agent.attempts import Attempt, Go, Sign, Verdict, normalised
from keystroke.agent.attempts.judge import ON, Watch
from keystroke.agent.evaluation.programs import run_examples, run_program
from keystroke.agent.evaluation.standby import Standby
from keystroke.agent.evaluation.tasks import FunctionTask
from keystroke.agent.sandbox import Sandbox
from keystroke.engine.base import Interrupt
from keystroke.engine.model import Model
from keystroke.errors import UnsupportedModel

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
_REPEATED = 24  # equal lines in a row from which an answer is taken to be a loop
_SECONDS = 6.0  # for the examples of a description


def messages(task: FunctionTask) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": _SYSTEM},
        {"role": "user", "content": _ASK.format(entry=task.entry, prompt=task.prompt.strip("\n"))},
    ]


def prompt_tokens(model: Model, conversation: Sequence[dict[str, Any]]) -> list[int]:
    """The conversation with the answer's fence already written."""
    if model.chat is None:
        raise UnsupportedModel(f"{model.name} has no chat template, so it cannot be asked; choose another")
    return [*model.chat.tokens(model.tokenizer, conversation), *model.tokenizer.encode(OPEN)]


def retry_tokens(model: Model, task: FunctionTask, attempt: Attempt) -> list[int] | None:
    """The prompt of an attempt that is shown how another one failed."""
    problem = attempt.verdict.message if attempt.verdict is not None else attempt.reason
    if not problem or not attempt.text.strip():
        return None
    said = [
        *messages(task),
        {"role": "assistant", "content": f"{OPEN}{attempt.text.rstrip()}\n{CLOSE}"},
        {"role": "user", "content": _AGAIN.format(problem=problem)},
    ]
    return prompt_tokens(model, said)


def code_of(task: FunctionTask, text: str) -> str:
    """The program an answer stands for: the function, and before it what the description already has."""
    text = text.partition(CLOSE)[0]
    defines = re.search(rf"^(?:async\s+)?def\s+{re.escape(task.entry)}\b", text, re.MULTILINE)
    if defines is None and re.match(r"[ \t]+\S", text.lstrip("\n")) and "def " in task.prompt:
        text = f"{task.prompt[len(task.context) :].rstrip()}\n{text}"  # only the body was written
    return f"{task.context}\n{text}" if task.context.strip() else text


class FunctionJudge:
    """Judges by the examples of the description; parses while an answer grows."""

    def __init__(self, ready: Standby, task: FunctionTask) -> None:
        self._ready, self._task = ready, task

    def watch(self) -> Watch:
        return _Growing().heard

    def check(self, text: str, interrupt: Interrupt) -> Verdict | None:
        code = code_of(self._task, text)
        try:
            tree = ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return Verdict(0.0, f"it does not parse: {error}")
        if not any(
            isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)) and n.name == self._task.entry
            for n in tree.body
        ):
            return Verdict(0.0, f"it does not define {self._task.entry}")
        if not self._task.examples:
            return None
        return run_examples(self._ready, code, self._task.examples, _SECONDS, interrupt)

    def key(self, text: str) -> str:
        return normalised(code_of(self._task, text), "python")


def score(
    sandbox: Sandbox, task: FunctionTask, text: str, interrupt: Interrupt | None = None
) -> tuple[bool, str]:
    """Whether an answer passes the tests that score, and what went wrong if not."""
    code = code_of(task, text)
    reached, ended = run_program(sandbox, f"{code}\n\n{task.tests}", task.seconds, interrupt)
    if task.tests.rstrip().endswith("verbosity=0)"):  # unittest ends the program itself
        reached = ended.ok
    return reached, "" if reached else ended.output.strip()[-300:]


class _Growing:
    """Python as it is written: what is complete must parse, and no line may come over and over."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._rest = ""
        self._run = 0

    def heard(self, piece: str) -> Sign:
        if "\n" not in piece:
            self._rest += piece
            return ON
        *complete, self._rest = (self._rest + piece).split("\n")
        for line in complete:
            self._run = self._run + 1 if self._lines and line == self._lines[-1] and line.strip() else 0
            self._lines.append(line)
            if self._run >= _REPEATED:
                return Sign(Go.HOPELESS, f"the line {line.strip()!r:.60} comes over and over")
            if line[:1] and line[:1] not in " \t#)]}\"'@" and len(self._lines) > 1 and not self._parses():
                return Sign(Go.HOPELESS, "what is written so far does not parse")
        return ON

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
