"""Seconds that commands with a model take, with a warm gateway and with loading the model each time.

Regime: `keystroke complete`, `edit` and `chat` as a user runs them, each a process of its own, in a home of
its own; the model is converted before anything is timed. `warm` asks the gateway that the first command
started; `local` loads the model in the process each time (`--local`). Both give the same text, which is
checked. The order alternates, and medians are given. Ceiling: what Python takes to start and read its
modules (`keystroke config path`), which no warm gateway can save.

    python -m bench.commands --model coder --rounds 3
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench.record import record

SOURCE = """def area(width, height):
    return width * height


def perimeter(width, height):
    return
"""


@dataclass(frozen=True)
class TimedCommand:
    """One command: its name in the table, its arguments, and what it reads."""

    name: str
    arguments: tuple[str, ...]
    stdin: str = ""


def commands(model: str | None) -> list[TimedCommand]:
    chosen = () if model is None else ("--model", model)
    asked = [TimedCommand("complete", ("complete", "a.py:6", "--lines", "1", *chosen))]
    if model is not None:  # the shipped weights follow no instructions
        edit = (
            "edit",
            "a.py",
            "--lines",
            "1-2",
            "-m",
            "rename the function to surface",
            "--dry-run",
            *chosen,
        )
        asked.append(TimedCommand("edit", edit))
        asked.append(
            TimedCommand("chat", ("chat", "--max-tokens", "24", *chosen), "Name three sorting algorithms.\n")
        )
    return asked


class Home:
    """A user of this program with nothing but a source file; models and converted models are the
    machine's."""

    def __init__(self, root: Path) -> None:
        from keystroke.config import load_settings

        paths = load_settings().paths
        self.root = root
        (root / "a.py").write_text(SOURCE)
        ours = {name: value for name, value in os.environ.items() if not name.startswith("KEYSTROKE_")}
        self.environment = {
            **ours,
            "KEYSTROKE_CONFIG": str(root),
            "KEYSTROKE_PATHS_MODELS": str(paths.models),
            "KEYSTROKE_PATHS_CACHE": str(paths.cache),
            "KEYSTROKE_PATHS_STATE": str(root / "state"),
        }

    def run(self, *arguments: str, stdin: str = "") -> tuple[float, str]:
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", "from keystroke.clients.cli import main; main()", "-q", *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            env=self.environment,
            cwd=self.root,
            check=False,
        )
        if done.returncode not in (0, 2):  # 2: an edit that this model could not make took its time, too
            raise SystemExit(f"{arguments[0]} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
        return time.perf_counter() - began, done.stdout

    def close(self) -> None:
        from keystroke.clients.local_gateway import running_gateways

        for said in running_gateways(self.root / "state"):
            os.kill(said.pid, 15)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", action="append", help="also with this model; may be repeated")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder))
        try:
            start = statistics.median(home.run("config", "path")[0] for _ in range(given.rounds))
            print(f"{'':28}{'local s':>10}{'first s':>10}{'warm s':>10}{'saved':>8}")
            for model in (None, *(given.model or ())):
                for asked in commands(model):
                    label = f"{asked.name} {model or 'embedded'}"
                    figures[label] = measure(home, asked, given.rounds)
                    row = figures[label]
                    times = row["local_s"] / row["warm_s"]
                    print(
                        f"{label:28}{row['local_s']:10.2f}{row['first_s']:10.2f}{row['warm_s']:10.2f}{times:7.1f}x"
                    )
            print(f"{'start of the program alone':28}{start:10.2f}")
        finally:
            home.close()
            shutil.rmtree(home.root / "state", ignore_errors=True)
    record("commands", {"benchmark": "commands", "start_s": round(start, 3), "figures": figures})


def measure(home: Home, asked: TimedCommand, rounds: int) -> dict[str, float]:
    """Medians of `rounds`; `first` is the command that had to have the model loaded in the gateway."""
    home.run("--local", *asked.arguments, stdin=asked.stdin)  # converts, and warms the disk's cache
    first, said = home.run(*asked.arguments, stdin=asked.stdin)
    local: list[float] = []
    warm: list[float] = []
    for _ in range(rounds):
        for options, seconds in ((("--local",), local), ((), warm)):
            took, text = home.run(*options, *asked.arguments, stdin=asked.stdin)
            if text != said:
                raise SystemExit(f"{asked.name}: the gateway and the model loaded here do not say the same")
            seconds.append(took)
    return {
        "local_s": round(statistics.median(local), 3),
        "first_s": round(first, 3),
        "warm_s": round(statistics.median(warm), 3),
    }


if __name__ == "__main__":
    main()
