"""Solves folder tasks with the agent loop, each in a workspace of its own.

The agent sees the files a task is about and, where the task names one, a check. The scoring tests are
added to a copy of the result. A further try is shown the tests' output.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from keystroke.agent.chat.model import ChatModel
from keystroke.agent.evaluation.evaluate import EvaluationConfig, Solution
from keystroke.agent.evaluation.folder_sets import strip_downloads
from keystroke.agent.evaluation.tasks import FolderTask, Task
from keystroke.agent.loop import (
    AgentTask,
    ApprovalLevel,
    Approvals,
    EndStatus,
    TaskControl,
    TaskFiles,
    TaskModels,
    TaskOptions,
    TaskPermissions,
)
from keystroke.agent.loop.edit_checker import failure_message
from keystroke.agent.sandbox import CommandLimits, CompletedCommand, Sandbox, SandboxPolicy, credential_paths
from keystroke.assist.edit import Journal, Workspace
from keystroke.engine.base import Interrupt
from keystroke.errors import KeystrokeError, UsageError

TESTS_FAILED = """

This was written already, and its tests fail:
```
{said}
```
The tests are right. Find what is wrong with the code, and write it anew, corrected."""


class FolderSolver:
    def __init__(self, model: ChatModel, sandbox: Sandbox, *, workers: int = 2, seed: int = 0) -> None:
        self._model, self._sandbox, self._workers, self._seed = model, sandbox, workers, seed

    def solve(self, task: Task, config: EvaluationConfig, interrupt: Interrupt) -> Solution:
        if not isinstance(task, FolderTask):
            raise UsageError(f"{task.id} is not a folder to change")
        seconds, tokens, prompts, attempts, cost = 0.0, 0, 0, 0, 0.0
        passed, failed, diff, tries = False, "", "", 0
        with tempfile.TemporaryDirectory(prefix="keystroke-eval-", ignore_cleanup_errors=True) as folder:
            folder_path = Path(folder)
            root = folder_path / "work"
            prepare_workspace(task, root)
            for number in range(min(config.tries, task.tries)):
                began = time.perf_counter()
                agent = self._agent(task, config, root, folder_path / "state", interrupt)
                instruction = task.instruction + (TESTS_FAILED.format(said=failed) if failed else "")
                try:
                    ended = agent.run(instruction)
                except KeystrokeError as error:
                    if interrupt.is_set:
                        raise
                    failed = str(error)
                    seconds += time.perf_counter() - began
                    continue
                seconds += time.perf_counter() - began
                diff = ended.diff or diff
                for receipt in ended.receipts:
                    tokens, prompts = tokens + receipt.tokens, prompts + receipt.prompt_tokens
                    attempts, cost = attempts + max(receipt.attempts, 1), cost + receipt.cost
                if ended.status is EndStatus.INTERRUPTED:
                    interrupt.check()
                scored = run_scoring_tests(task, root, self._sandbox, interrupt)
                passed, failed = scored.ok, failure_message(scored)
                if passed:
                    tries = number + 1
                    break
        return Solution(diff, seconds, tokens, prompts, attempts, cost=cost, passed=passed, tries=tries)

    def score(self, task: Task, solution: Solution, interrupt: Interrupt) -> tuple[bool, str]:
        return bool(solution.passed), ""

    def close(self) -> None:
        """Nothing is held."""

    def _agent(
        self, task: FolderTask, config: EvaluationConfig, root: Path, state: Path, interrupt: Interrupt
    ) -> AgentTask:
        workspace = Workspace(root)
        options = TaskOptions(
            check=task.check.replace("{python}", sys.executable),
            files=task.files,
            attempts=config.attempts,
            policy=config.policy,
            temperature=config.temperature,
            max_tokens=config.max_tokens,
            seed=self._seed,
            workers=self._workers,
        )
        return AgentTask(
            files=TaskFiles(workspace=workspace, journal=Journal(state, workspace)),
            models=TaskModels(model=self._model),
            permissions=TaskPermissions(
                sandbox=self._sandbox,
                approvals=Approvals(ApprovalLevel.NEVER, None),
                limits=CommandLimits(seconds=task.seconds),
            ),
            options=options,
            control=TaskControl(interrupt=interrupt),
        )


def run_scoring_tests(
    task: FolderTask, root: Path, sandbox: Sandbox, interrupt: Interrupt | None = None
) -> CompletedCommand:
    """Run the scoring tests on a copy of the result."""
    with tempfile.TemporaryDirectory(prefix="keystroke-score-", ignore_cleanup_errors=True) as folder:
        folder_path = Path(folder)
        copy, tools = folder_path / "work", folder_path / "bin"
        shutil.copytree(root, copy, symlinks=True)
        for name, source in task.tests.items():
            # In a container tests lie beside the workspace, not in it.
            _write_test(task, copy, folder_path / name if task.container else copy / name, source)
        _write_shims(tools)
        filled = {"{python}": sys.executable, "{root}": str(folder_path)}
        env = {key: _substitute(value, filled) for key, value in task.environment.items()}
        env["PATH"] = f"{tools}{os.pathsep}{os.environ.get('PATH', '')}"
        return sandbox.run(
            ["/bin/sh", "-c", f"cd work && {_substitute(task.command, filled)}"],
            SandboxPolicy(folder_path, hidden=credential_paths()),
            CommandLimits(seconds=task.seconds),
            interrupt,
            env=env,
        )


def prepare_workspace(task: FolderTask, root: Path) -> None:
    """Create the workspace of a solver: the task's files without its tests and solutions."""
    root.mkdir()
    if not task.source.is_dir():
        return
    wanted = set(task.files) if task.files and not task.check else None
    for path in sorted(task.source.rglob("*")):
        name = path.relative_to(task.source)
        hidden = any(part.startswith(".") for part in name.parts)
        if not path.is_file() or path.is_symlink() or (hidden and task.container):
            continue
        if wanted is not None and name.as_posix() not in wanted and not task.container:
            continue
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def _write_test(task: FolderTask, copy: Path, target: Path, source: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_symlink() or target.is_dir():
        target.unlink() if target.is_symlink() else shutil.rmtree(target)
    data = source.read_bytes()
    if task.container:
        data = data.replace(b"/app", str(copy).encode())
        if target.name == "run-tests.sh":
            data = strip_downloads(data.decode("utf-8", "replace")).encode()
    target.write_bytes(data)


def _write_shims(folder: Path) -> None:
    """Wrappers that run this machine's Python under the names that scripts use."""
    folder.mkdir()
    for name, line in (
        ("python", f'exec "{sys.executable}" "$@"'),
        ("python3", f'exec "{sys.executable}" "$@"'),
        ("pytest", f'exec "{sys.executable}" -m pytest "$@"'),
    ):
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)


def _substitute(text: str, values: dict[str, str]) -> str:
    for key, value in values.items():
        text = text.replace(key, value)
    return text
