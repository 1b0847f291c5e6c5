"""Attempts to break out of every sandbox of this machine, as this user and, for root, as another user.

Regime: one command a sandbox tries all attempts of `keystroke.agent.sandbox.attempts`, without and with
network, and commands exceed each limit once. Ceiling: every attempt is stopped. The column `none` is the
control: it shows which attempts succeed on this machine when nothing confines them. Prints the table that
SECURITY.md includes (`--write` replaces it there); run it with `python -m bench.confinement`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.record import record
from keystroke.agent.sandbox import (
    CommandLimits,
    ExitReason,
    Sandbox,
    SandboxKind,
    SandboxPolicy,
    find_escapes,
    is_effective,
)
from keystroke.agent.sandbox.attempts import attempts

SECURITY = Path(__file__).parent.parent / "SECURITY.md"
BEGIN, END = "<!-- attempts: begin -->\n", "<!-- attempts: end -->\n"
OTHER_USER = 12345
_PYTHON = (sys.executable, "-I", "-S", "-c")
# name: program, limits, how it must end
_LIMITS = {
    "limit: time": ("import time; time.sleep(60)", CommandLimits(seconds=0.5), ExitReason.TIMEOUT),
    "limit: output": (
        "import os\nwhile True: os.write(1, bytes(65536))",
        CommandLimits(seconds=60, output=4 << 20),
        ExitReason.OUTPUT,
    ),
    "limit: memory of all processes": (
        "import os, time\nfor _ in range(3): os.fork()\nkeep = bytearray(60 << 20)\ntime.sleep(60)",
        CommandLimits(seconds=60, memory=256 << 20),
        ExitReason.MEMORY,
    ),
    "limit: size of a file": (
        "file = open('big', 'wb')\nfor _ in range(64): file.write(bytes(1 << 20))",
        CommandLimits(seconds=60, file=4 << 20),
        ExitReason.EXITED,
    ),
}


def names() -> list[str]:
    """Every attempt, in the order of the table."""
    target = {"shown": "", "workspace": "", "victim": 0}
    return [*attempts(target), *_LIMITS]


def held_kinds() -> list[SandboxKind]:
    return [kind for kind in SandboxKind if kind is not SandboxKind.NONE and is_effective(Sandbox(kind))]


def escapes(kind: SandboxKind) -> list[str]:
    """The attempts that succeed in a sandbox of this kind, with or without network, also over layers."""
    sandbox = Sandbox(kind)
    found = {*find_escapes(sandbox), *find_escapes(sandbox, network=True)}
    if kind.can_mount:
        found |= {*find_escapes(sandbox, layered=True)}
    return sorted(found | _exceeded(sandbox))


def _exceeded(sandbox: Sandbox) -> set[str]:
    found = set()
    for name, (program, limits, ending) in _LIMITS.items():
        with tempfile.TemporaryDirectory(prefix="keystroke-", ignore_cleanup_errors=True) as folder:
            ended = sandbox.run([*_PYTHON, program], SandboxPolicy(Path(folder)), limits)
            if ended.exit_reason is not ending or ended.ok:
                found.add(name)
    return found


def escapes_as_user() -> dict[str, list[str]] | str:
    """The same for another user, where this is root; a reason where it cannot be tried."""
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        return "needs root and setpriv"
    drop = ["setpriv", f"--reuid={OTHER_USER}", f"--regid={OTHER_USER}", "--clear-groups"]
    root = Path(__file__).parent.parent
    paths = os.pathsep.join([str(root), str(root / "src"), *filter(os.path.isdir, sys.path)])
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for python in (sys.executable, f"/usr/bin/{version}"):
        with tempfile.TemporaryDirectory(prefix="keystroke-home-") as home:
            os.chown(home, OTHER_USER, OTHER_USER)
            env = {"PATH": os.environ["PATH"], "HOME": home, "PYTHONPATH": paths}
            # Through a shell: the first program still has root's access to files.
            command = [*drop, "/bin/sh", "-c", 'exec "$0" -m bench.confinement --kinds', python]
            done = subprocess.run(
                command, env=env, cwd="/", capture_output=True, text=True, check=False, timeout=300
            )
            if done.returncode == 0:
                return dict(json.loads(done.stdout))
    return f"this interpreter cannot be run by another user: {done.stderr.strip()[-200:]}"


def table(columns: dict[str, list[str]]) -> str:
    """A table in Markdown: attempts by sandbox, `stopped` or `ESCAPED`."""
    rows = [f"| attempt | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for name in names():
        cells = ("ESCAPED" if name in found else "stopped" for found in columns.values())
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="replace the table in SECURITY.md")
    parser.add_argument("--kinds", action="store_true", help="print escapes by kind as JSON, for this user")
    given = parser.parse_args()
    found = {str(kind): escapes(kind) for kind in held_kinds()}
    if given.kinds:
        print(json.dumps(found))
        return
    who = "root" if os.getuid() == 0 else "user"
    columns = {f"{kind}, {who}": names for kind, names in found.items()}
    as_user = escapes_as_user()
    if isinstance(as_user, dict):
        columns |= {f"{kind}, user": names for kind, names in as_user.items()}
    else:
        print(f"not tried as another user: {as_user}")
    control = find_escapes(Sandbox(SandboxKind.NONE))
    text = table(columns)
    print(text)
    print(f"without a sandbox {len(control)} of {len(names())} succeed here")
    if given.write:
        before, _, rest = SECURITY.read_text(encoding="utf-8").partition(BEGIN)
        SECURITY.write_text(before + BEGIN + text + END + rest.partition(END)[2], encoding="utf-8")
    record(
        "confinement",
        {
            "attempts": len(names()),
            "sandboxes": len(columns),
            "escaped": sum(map(len, columns.values())),
            "control": len(control),
        },
    )


if __name__ == "__main__":
    main()
