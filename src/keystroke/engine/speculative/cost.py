"""What verifying several rows costs on this machine.

Law: measures an engine through its contract alone, in under half a second on a small model, and leaves no
session behind. The result is a plain tuple, to be kept beside the model.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import median

from keystroke.engine.base import Engine
from keystroke.engine.speculative.base import MAX_DRAFT

_ROWS = (1, 2, 4, 8, 16, MAX_DRAFT + 1)
_CONTEXT = 32


def measure_verify_cost(engine: Engine, seconds: float = 0.4) -> tuple[float, ...]:
    """`cost[n]`: the time of a step over n rows in units of a step over one; cost[0] is 0. When `seconds`
    run out it stops, and extrapolates from what it has."""
    limit = min(engine.info.context_length // 2, _CONTEXT)
    if limit < 2:
        return cost_table({1: 1.0})
    measured: dict[int, float] = {}
    deadline = time.perf_counter() + seconds
    with engine.session() as session:
        session.extend([i % engine.info.vocab_size for i in range(1, limit + 1)])
        session.step()  # warm
        for rows in _ROWS:
            if limit + rows >= engine.info.context_length:
                break
            times = []
            for _ in range(5 if rows == 1 else 3):
                session.rollback(limit)
                # Tokens no model would choose: what is measured is the rows, not luck.
                draft = [(7 * i + 3) % engine.info.vocab_size for i in range(rows - 1)]
                started = time.perf_counter()
                session.step(draft)
                times.append(time.perf_counter() - started)
                if len(measured) > 2 and time.perf_counter() > deadline:
                    break
            measured[rows] = median(times)
            if len(measured) > 2 and time.perf_counter() > deadline:
                break
    return cost_table(measured)


def cost_table(seconds: Mapping[int, float]) -> tuple[float, ...]:
    """A cost for every number of rows, drawn straight between those measured and never falling.
    `seconds` must hold one row; beyond the last, the last slope goes on."""
    known = sorted(seconds)
    unit = max(seconds[1], 1e-9)
    points = [(rows, seconds[rows] / unit) for rows in known]
    table = [0.0, 1.0]
    for rows in range(2, MAX_DRAFT + 2):
        right = next((i for i, (r, _) in enumerate(points) if r >= rows), len(points) - 1)
        if right == 0:
            value = float(rows)
        else:
            (r0, c0), (r1, c1) = points[right - 1], points[right]
            value = c0 + (c1 - c0) * (rows - r0) / (r1 - r0)
        table.append(max(value, table[-1]))
    return tuple(table)
