"""Builds the profile and command line of macOS's `sandbox-exec`: everything readable but secrets, the
workspace writable. Paths are passed as parameters, never inserted into the profile's text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from keystroke.agent.sandbox.policy import SandboxPolicy

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


def seatbelt(argv: Sequence[str], policy: SandboxPolicy, scratch: Path) -> list[str]:
    """`argv` as `sandbox-exec` runs it. Paths must be real ones: the system compares resolved names."""
    parameters = {"ROOT": policy.root.resolve(), "SCRATCH": scratch.resolve()}
    profile = _PROFILE
    for number, path in enumerate(policy.readonly):
        parameters[f"READONLY{number}"] = path
        profile += f'(deny file-write* (subpath (param "READONLY{number}")))\n'
    for number, path in enumerate(policy.hidden):
        parameters[f"HIDDEN{number}"] = path
        profile += f'(deny file-read* file-write* (subpath (param "HIDDEN{number}")))\n'
    if not policy.network:
        profile += '(deny network*)\n(allow network* (local unix-socket) (subpath (param "SCRATCH")))\n'
    defined = [part for name, path in parameters.items() for part in ("-D", f"{name}={path}")]
    return ["/usr/bin/sandbox-exec", *defined, "-p", profile, *argv]
