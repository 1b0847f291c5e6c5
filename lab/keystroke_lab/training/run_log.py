"""The log of a training run: one JSON object a line in `log.jsonl`, written before it is reported."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keystroke.errors import ModelDamaged

Report = Callable[[dict[str, Any]], None]


def append_row(run: Path, row: dict[str, Any], report: Report | None = None) -> None:
    """Append `row` to the run's log and report it. Raises ModelDamaged where its loss is not finite."""
    with (run / "log.jsonl").open("a") as stream:
        stream.write(json.dumps(row) + "\n")
    if report is not None:
        report(row)
    if "loss" in row and not math.isfinite(row["loss"]):
        raise ModelDamaged(
            f"the loss is no number at step {row['step']}; start again with a lower learning rate"
        )
