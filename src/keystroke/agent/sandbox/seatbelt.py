"""A sandbox by `sandbox-exec` of macOS: everything readable but secrets, the workspace writable.

Makes the profile and the command line; runs nothing. A profile is text, so paths are written into it as
parameters, never spliced.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from keystroke.agent.sandbox.policy import Place

_PROFILE = """(version 1)
(allow default)
(deny file-write*)
(allow file-write* (subpath (param "ROOT")) (subpath (param "SCRATCH")))
(allow file-write-data (literal "/dev/null") (literal "/dev/zero") (literal "/dev/tty"))
(deny appleevent-send)
(deny job-creation)
(deny signal (target others))
(allow signal (target same-sandbox))
"""


def seatbelt(argv: Sequence[str], place: Place, scratch: Path) -> list[str]:
    """`argv` as `sandbox-exec` runs it. Paths must be real ones: the system compares resolved names."""
    parameters = {"ROOT": place.root.resolve(), "SCRATCH": scratch.resolve()}
    profile = _PROFILE
    for number, path in enumerate(place.readonly):
        parameters[f"READONLY{number}"] = path
        profile += f'(deny file-write* (subpath (param "READONLY{number}")))\n'
    for number, path in enumerate(place.hidden):
        parameters[f"HIDDEN{number}"] = path
        profile += f'(deny file-read* file-write* (subpath (param "HIDDEN{number}")))\n'
    if not place.network:
        profile += '(deny network*)\n(allow network* (local unix-socket) (subpath (param "SCRATCH")))\n'
    defined = [part for name, path in parameters.items() for part in ("-D", f"{name}={path}")]
    return ["/usr/bin/sandbox-exec", *defined, "-p", profile, *argv]
