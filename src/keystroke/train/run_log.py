"""What a training run says of itself as it goes.

One JSON object a line, kept before anybody hears of it; a loss that is no number ends the run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keystroke.errors import ModelDamaged

Report = Callable[[dict[str, Any]], None]


def tell(run: Path, row: dict[str, Any], report: Report | None = None) -> None:
    """Keep a row in the run's log and report it. ModelDamaged where its loss is no number."""
    with (run / "log.jsonl").open("a") as stream:
        stream.write(json.dumps(row) + "\n")
    if report is not None:
        report(row)
    if math.isnan(row["loss"]):
        raise ModelDamaged(
            f"the loss is no number at step {row['step']}; start again with a lower learning rate"
        )
