"""Measures what it costs an engine to verify several rows in one step.

Takes under half a second on a small model. The result is kept for as long as the engine exists.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from keystroke.engine.base import Engine, Session
from keystroke.engine.speculative.base import MAX_DRAFT

if TYPE_CHECKING:
    from keystroke.engine.checkpoint.spec import ExpertsSpec  # which loads numpy; commands start without it

# The most informative first, in case time runs out: the cost of the smallest drafts, and the slope.
_ROWS = (1, 4, 16, 2, 8, MAX_DRAFT + 1)
_ENOUGH = 3
_CONTEXT = 32

_measured: WeakKeyDictionary[Engine, tuple[float, ...]] = WeakKeyDictionary()


def verify_cost(engine: Engine) -> tuple[float, ...]:
    """The costs measured for this engine. Before that, those of a small model on two laptop cores, which are
    higher than most, so that drafts are short; an engine with a draft of its own has cheap rows."""
    return _measured.get(engine, CHEAP if engine.drafts else CAUTIOUS)


def remember_cost(engine: Engine, table: Sequence[float]) -> None:
    """Store costs that were measured elsewhere, for an engine in another process."""
    _measured[engine] = tuple(table)


def remember_expert_cost(engine: Engine, experts: ExpertsSpec | None, share: float) -> None:
    """The costs to begin with where a model is a mixture. An engine with a draft of its own keeps its cheap
    ones, since a guess that seems dear is never tried and so never measured."""
    if experts is not None and not engine.drafts:
        remember_cost(engine, expert_cost(experts, share))


def measure_verify_cost(
    engine: Engine, seconds: float = 0.4, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, ...]:
    """`cost[n]`: the time of a step over n rows, divided by that of a step over one row; cost[0] is 0. Stops
    after `seconds` and extrapolates from what was measured. Stored for `verify_cost`."""
    limit = min(engine.info.context_length // 2, _CONTEXT)
    measured: dict[int, float] = {1: 1.0} if limit < 2 else {}
    deadline = clock() + seconds
    with engine.session() as session:
        # One token more than the rollback keeps: a step right after an extend may reuse its logits.
        session.extend([i % engine.info.vocab_size for i in range(1, max(limit, 1) + 2)])
        for rows in _ROWS:
            if limit + rows >= engine.info.context_length:
                continue
            # Tokens that no model would choose, so that none is accepted.
            draft = [(7 * i + 3) % engine.info.vocab_size for i in range(rows - 1)]
            if len(measured) < _ENOUGH or clock() < deadline:
                measured[rows] = min(
                    _time_step(session, limit, draft, clock) for _ in range(4 if rows == 1 else 2)
                )
    table = _measured[engine] = cost_table(measured)
    return table


def _time_step(session: Session, length: int, draft: Sequence[int], clock: Callable[[], float]) -> float:
    session.rollback(length)
    started = clock()
    session.step(draft)
    return clock() - started


def cost_table(seconds: Mapping[int, float]) -> tuple[float, ...]:
    """A cost for every number of rows, interpolated linearly and never decreasing. `seconds` must contain
    one row; beyond the last measurement the last slope continues."""
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


def expert_cost(experts: ExpertsSpec, share: float) -> tuple[float, ...]:
    """The cost of every number of rows that choose their experts independently, each of which is read once.
    `share`: the part of a plain step's time that its experts take."""
    left = 1.0 - experts.top / experts.count
    distinct = [(1.0 - left**rows) * experts.count / experts.top for rows in range(MAX_DRAFT + 2)]
    return (0.0, *(1.0 - share + share * number for number in distinct[1:]))


def drafts_can_pay(table: Sequence[float], each: float, most: int) -> bool:
    """Whether a draft of up to `most` tokens, which take `each` plain steps to make, saves time if all of
    them are accepted."""
    longest = min(most, len(table) - 2)
    return any(n + 1 > table[n + 1] + n * each for n in range(1, longest + 1))


CHEAP = cost_table({1: 1.0, 2: 1.08, 8: 1.16, 16: 1.28, 32: 1.5})
CAUTIOUS = cost_table({1: 1.0, 2: 1.4, 4: 2.2, 8: 3.8, 16: 7.2, 32: 14.0})
