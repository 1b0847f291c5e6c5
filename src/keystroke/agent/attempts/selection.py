"""Selects one of several attempts.

The check decides where there is one: the attempt that passes, else the one that passes most of it. Ties
are decided by the number of attempts that agree, then by the model's likelihood, then by order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from keystroke.agent.attempts.attempt import Attempt

Likelihood = Callable[[Attempt], float]


def select_attempt(
    attempts: Sequence[Attempt], key: Callable[[str], str], likelihood: Likelihood | None = None
) -> tuple[Attempt | None, str]:
    """The selected attempt and one clause about why. `key` gives the normal form of a text: attempts with
    equal keys agree. `likelihood` is computed only where nothing else decides."""
    usable = [attempt for attempt in attempts if attempt.usable]
    if not usable:
        return None, "no attempt came to an end that could be used"
    checked = any(attempt.check_result is not None for attempt in usable)
    best = max(attempt.score for attempt in usable)
    leaders = [attempt for attempt in usable if attempt.score == best] if checked else usable
    reason = (
        ("it passed the check" if best >= 1.0 else f"it passed {best:.0%} of the check") if checked else ""
    )
    if checked and best <= 0.0:
        reason = "no attempt passed the check"
    if len(leaders) == 1:
        return leaders[0], reason or "it was the only one"
    keys = {attempt.number: key(attempt.text) for attempt in leaders}
    counts = Counter(keys.values())
    most = max(counts.values())
    agreed = [attempt for attempt in leaders if counts[keys[attempt.number]] == most]
    also = f" and {most} of {len(leaders)} agree" if most > 1 else ""
    if also and checked and best <= 0.0:
        also = f", but {most} of {len(leaders)} wrote this"
    if most > 1 and len({keys[attempt.number] for attempt in agreed}) == 1:
        return agreed[0], f"{reason}{also}" if reason else f"{most} of {len(leaders)} agree"
    if likelihood is None:
        return agreed[0], f"{reason}{also}" if reason else "it came first"
    likeliest = max(agreed, key=lambda attempt: (likelihood(attempt), -attempt.number))
    return likeliest, f"{reason}{also}; it is the likeliest of them" if reason else "it is the likeliest"
