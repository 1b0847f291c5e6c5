"""Which of several attempts is taken, and why.

Pure. A check decides where there is one: what passes, else what passes most of it. Where several are
equal by that, most of them agreeing decides, then the model's own likelihood, then who came first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from keystroke.agent.attempts.attempt import Attempt

Likelihood = Callable[[Attempt], float]


def choose(
    attempts: Sequence[Attempt], key: Callable[[str], str], likelihood: Likelihood | None = None
) -> tuple[Attempt | None, str]:
    """The one to take and one clause about why. `likelihood` is asked only where nothing else decides."""
    usable = [attempt for attempt in attempts if attempt.usable]
    if not usable:
        return None, "no attempt came to an end that could be used"
    checked = any(attempt.verdict is not None for attempt in usable)
    best = max(attempt.score for attempt in usable)
    leaders = [attempt for attempt in usable if attempt.score == best] if checked else usable
    said = ("it passed the check" if best >= 1.0 else f"it passed {best:.0%} of the check") if checked else ""
    if checked and best <= 0.0:
        said = "none passed the check"
    if len(leaders) == 1:
        return leaders[0], said or "it was the only one"
    keys = {attempt.number: key(attempt.text) for attempt in leaders}
    counts = Counter(keys.values())
    most = max(counts.values())
    agreed = [attempt for attempt in leaders if counts[keys[attempt.number]] == most]
    also = f" and {most} of {len(leaders)} agree" if most > 1 else ""
    if most > 1 and len({keys[attempt.number] for attempt in agreed}) == 1:
        return agreed[0], f"{said}{also}" if said else f"{most} of {len(leaders)} agree"
    if likelihood is None:
        return agreed[0], f"{said}{also}" if said else "it came first"
    taken = max(agreed, key=lambda attempt: (likelihood(attempt), -attempt.number))
    return taken, f"{said}{also}; it is the likeliest of them" if said else "it is the likeliest"
