"""Folders changed by a model: each task in a workspace of its own, by the same loop that users run.

A solver sees the files a task is about and, where the task names one, a check; the tests that score are
put beside the result afterwards and thrown away with it. Where a task gives several tries, the next one is
shown what the tests said.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from keystroke.agent.chat import Chat
from keystroke.agent.evaluation.evaluate import Solved, Way
from keystroke.agent.evaluation.folder_sets import offline
from keystroke.agent.evaluation.tasks import FolderTask, Task
from keystroke.agent.loop import AgentTask, Approvals, Approve, Status, TaskOptions
from keystroke.agent.loop.edit_judge import said
from keystroke.agent.sandbox import Ended, Limits, Place, Sandbox, secrets
from keystroke.assist.edit import Journal, Workspace
from keystroke.engine.base import Interrupt
from keystroke.errors import KeystrokeError, UsageError

TESTS_SAID = """

This was written already, and its tests fail:
```
{said}
```
The tests are right. Find what is wrong with the code, and write it anew, corrected."""


class FolderSolver:
    def __init__(self, chat: Chat, sandbox: Sandbox, *, workers: int = 2, seed: int = 0) -> None:
        self._chat, self._sandbox, self._workers, self._seed = chat, sandbox, workers, seed

    def solve(self, task: Task, way: Way, interrupt: Interrupt) -> Solved:
        if not isinstance(task, FolderTask):
            raise UsageError(f"{task.id} is no folder to change")
        seconds, tokens, prompts, attempts, cost = 0.0, 0, 0, 0, 0.0
        passed, failed, diff, tries = False, "", "", 0
        with tempfile.TemporaryDirectory(prefix="keystroke-eval-", ignore_cleanup_errors=True) as folder:
            place = Path(folder)
            root = place / "work"
            laid_out(task, root)
            for number in range(min(way.tries, task.tries)):
                began = time.perf_counter()
                agent = self._agent(task, way, root, place / "state", interrupt)
                told = task.instruction + (TESTS_SAID.format(said=failed) if failed else "")
                try:
                    ended = agent.run(told)
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
                if ended.status is Status.INTERRUPTED:
                    interrupt.check()
                scored = judged(task, root, self._sandbox, interrupt)
                passed, failed = scored.ok, said(scored)
                if passed:
                    tries = number + 1
                    break
        return Solved(diff, seconds, tokens, prompts, attempts, cost=cost, verdict=passed, tries=tries)

    def score(self, task: Task, solved: Solved, interrupt: Interrupt) -> tuple[bool, str]:
        return bool(solved.verdict), ""

    def close(self) -> None:
        """Nothing is held: the chat is its owner's."""

    def _agent(self, task: FolderTask, way: Way, root: Path, state: Path, interrupt: Interrupt) -> AgentTask:
        workspace = Workspace(root)
        options = TaskOptions(
            check=task.check.replace("{python}", sys.executable),
            files=task.files,
            attempts=way.attempts,
            policy=way.policy,
            temperature=way.temperature,
            max_tokens=way.max_tokens,
            seed=self._seed,
            workers=self._workers,
        )
        return AgentTask(
            workspace,
            Journal(state, workspace),
            self._chat,
            self._sandbox,
            Approvals(Approve.NEVER, None),
            options=options,
            limits=Limits(seconds=task.seconds),
            interrupt=interrupt,
        )


def judged(task: FolderTask, root: Path, sandbox: Sandbox, interrupt: Interrupt | None = None) -> Ended:
    """Run the tests that score on a copy of what was made."""
    with tempfile.TemporaryDirectory(prefix="keystroke-score-", ignore_cleanup_errors=True) as folder:
        place = Path(folder)
        copy, tools = place / "work", place / "bin"
        shutil.copytree(root, copy, symlinks=True)
        for name, source in task.tests.items():
            # In a container tests lie beside the work, not in it: both may be looked through for tests.
            _placed(task, copy, place / name if task.container else copy / name, source)
        _shims(tools)
        filled = {"{python}": sys.executable, "{root}": str(place)}
        env = {key: _filled(value, filled) for key, value in task.environment.items()}
        env["PATH"] = f"{tools}{os.pathsep}{os.environ.get('PATH', '')}"
        return sandbox.run(
            ["/bin/sh", "-c", f"cd work && {_filled(task.command, filled)}"],
            Place(place, hidden=secrets()),
            Limits(seconds=task.seconds),
            interrupt,
            env=env,
        )


def laid_out(task: FolderTask, root: Path) -> None:
    """The folder a solver works in: what the task shows, without what scores and without its answers."""
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


def _placed(task: FolderTask, copy: Path, target: Path, source: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_symlink() or target.is_dir():
        target.unlink() if target.is_symlink() else shutil.rmtree(target)
    data = source.read_bytes()
    if task.container:
        data = data.replace(b"/app", str(copy).encode())
        if target.name == "run-tests.sh":
            data = offline(data.decode("utf-8", "replace")).encode()
    target.write_bytes(data)


def _shims(folder: Path) -> None:
    """This machine's Python under the names that scripts use."""
    folder.mkdir()
    for name, line in (
        ("python", f'exec "{sys.executable}" "$@"'),
        ("python3", f'exec "{sys.executable}" "$@"'),
        ("pytest", f'exec "{sys.executable}" -m pytest "$@"'),
    ):
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)


def _filled(text: str, values: dict[str, str]) -> str:
    for key, value in values.items():
        text = text.replace(key, value)
    return text
