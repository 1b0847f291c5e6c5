"""Settings all tests share."""

from __future__ import annotations

from hypothesis import settings

# A loaded machine is slow, not wrong: examples have no time limit of their own.
settings.register_profile("keystroke", deadline=None)
settings.load_profile("keystroke")
