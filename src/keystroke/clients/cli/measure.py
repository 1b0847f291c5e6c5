"""Measures the speed of a loaded model in about two seconds.

The prompt is random, because engines cache content. The figures are a quick estimate, not a benchmark.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from statistics import median

from keystroke.engine.base import Engine
from keystroke.engine.speculative import measure_verify_cost

PROMPT = 256


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second, milliseconds per step, and the cost of verifying n rows in single steps."""

    prefill: float
    decode: float
    step_ms: float
    verify: dict[int, float]


def measure(engine: Engine, seconds: float = 2.0) -> Speed:
    info = engine.info
    length = min(PROMPT, info.context_length // 2)
    prompt = [random.randrange(info.vocab_size // 2, info.vocab_size) for _ in range(length)]
    with engine.session() as session:
        session.extend(prompt[:8])
        session.step()  # the first step includes one-time setup
        began = time.perf_counter()
        session.extend(prompt)
        session.step()
        prefill = (length - 8) / (time.perf_counter() - began)
        times: list[float] = []
        until = time.perf_counter() + seconds * 0.4
        while time.perf_counter() < until and session.length + 1 < info.context_length:
            began = time.perf_counter()
            session.step()
            times.append(time.perf_counter() - began)
    step = median(times)
    cost = measure_verify_cost(engine, seconds * 0.4)
    return Speed(
        prefill, 1 / step, step * 1000, {n: round(cost[n], 2) for n in (2, 4, 8, 16) if n < len(cost)}
    )
