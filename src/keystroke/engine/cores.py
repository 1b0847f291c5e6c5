"""How many processor cores this process may use.

Asks the system and guesses nothing.
"""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Those this process is allowed on, where the system tells; all of the machine's elsewhere."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
