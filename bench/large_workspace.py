"""A task's parts in a folder of many small files: list, edit, a command that changes two files, find its
changes, a second command, clean up.

Regime: files of 12 bytes in folders of 200, every kind of sandbox that holds here, the task's folder in the
system's temporary folder. Wall time, and CPU of this process without its commands. Ceiling: the command
itself, as in a folder of ten files. `python -m bench.large_workspace [FILES...]`;
its figures are in log/hardening.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from keystroke.agent.sandbox import Sandbox, SandboxKind, is_effective
from keystroke.agent.workspace import Overlay, WorkspaceReplicas
from keystroke.agent.workspace.scratch import task_folder
from keystroke.assist.edit import Workspace

EXCLUDE = (".env", ".env.*", "*.pem", "*.key", "id_rsa*")
COMMAND = ["sh", "-c", "echo z = 1 >> d0/f0.py; echo z = 1 > d0/new.py; cat a.py"]


def make_files(root: Path, count: int) -> None:
    for number in range(count):
        folder = root / f"d{number // 200}"
        if number % 200 == 0:
            folder.mkdir(parents=True)
        (folder / f"f{number % 200}.py").write_text(f"x = {number:06}\n")
    (root / "a.py").write_text("def add(a, b):\n    return a - b\n")


def measure(root: Path, kind: SandboxKind) -> dict[str, float]:
    """Seconds of each part."""
    found: dict[str, float] = {}
    started, spent = time.perf_counter(), time.process_time()

    def timed(name: str, part: Callable[[], object]) -> None:
        began = time.perf_counter()
        part()
        found[name] = round(time.perf_counter() - began, 3)

    sandbox, overlay = Sandbox(kind), Overlay(Workspace(root, exclude=EXCLUDE))
    timed("list", overlay.files)
    timed("edit", lambda: overlay.write("a.py", "def add(a, b):\n    return a + b\n"))
    with task_folder() as folder:
        copies = WorkspaceReplicas(root, folder, sandbox, exclude=EXCLUDE)
        began = time.perf_counter()
        with copies.borrow() as copy:
            copy.sync(overlay)
            found["prepare"] = round(time.perf_counter() - began, 3)
            timed("command", lambda: sandbox.run(COMMAND, copy.sandbox_policy()))
            began = time.perf_counter()
            changed, _ = copy.changes()
            found["changes"] = round(time.perf_counter() - began, 3)
            assert sorted(changed) == ["d0/f0.py", "d0/new.py"], changed
            began = time.perf_counter()
            copy.sync(overlay)
            sandbox.run(COMMAND, copy.sandbox_policy())
            found["second"] = round(time.perf_counter() - began, 3)
        timed("close", copies.close)
    found["whole"] = round(time.perf_counter() - started, 3)
    found["cpu"] = round(time.process_time() - spent, 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=int, default=[10, 60_000, 200_000])
    given = parser.parse_args()
    kinds = [kind for kind in SandboxKind if is_effective(Sandbox(kind))]
    figures: dict[str, dict[str, float]] = {}
    for files in given.files:
        folder = Path(tempfile.mkdtemp(prefix="keystroke-large-"))
        try:
            make_files(folder / "project", files)
            for kind in kinds:
                found = figures[f"{files}.{kind}"] = measure(folder / "project", kind)
                print(f"{files:>8,} {kind:<11}", *(f"{name} {value:.2f}" for name, value in found.items()))
        finally:
            shutil.rmtree(folder)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
