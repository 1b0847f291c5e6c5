"""Builds the profile and command line of macOS's `sandbox-exec`: everything readable but homes and secrets,
the workspace writable, no network but through the proxy. Paths are passed as parameters, never inserted into
the profile's text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from keystroke.agent.sandbox.policy import SandboxPolicy
from keystroke.agent.sandbox.proxy import NetworkProxy, proxy_variables
from keystroke.agent.sandbox.view import FileView

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


def seatbelt(
    argv: Sequence[str], policy: SandboxPolicy, view: FileView, scratch: Path, proxy: NetworkProxy | None
) -> list[str]:
    """`argv` as `sandbox-exec` runs it. Paths must be real ones: the system compares resolved names. The last
    rule that matches decides."""
    parameters: dict[str, Path | str] = {"ROOT": policy.root.resolve(), "SCRATCH": scratch.resolve()}
    profile = _PROFILE

    def rule(text: str, name: str, paths: Iterable[Path]) -> None:
        nonlocal profile
        for number, path in enumerate(paths):
            parameters[f"{name}{number}"] = path
            profile += f'({text} (subpath (param "{name}{number}")))\n'

    rule("deny file-read-data", "EMPTY", (path.resolve() for path in view.emptied))
    rule("allow file-read*", "LENT", (path.resolve() for path in view.lent))
    profile += '(allow file-read* (subpath (param "ROOT")) (subpath (param "SCRATCH")))\n'
    rule("allow file-read*", "READ", policy.readonly.values())
    rule("deny file-write*", "READONLY", policy.readonly.values())
    rule("deny file-read* file-write*", "HIDDEN", view.hidden)
    profile += "(deny network*)\n"
    if proxy is not None:
        profile += f'(allow network-outbound (remote ip "localhost:{proxy.port}"))\n'
    variables = [] if proxy is None else ["/usr/bin/env", *proxy_variables(proxy.url)]
    defined = [part for name, path in parameters.items() for part in ("-D", f"{name}={path}")]
    return ["/usr/bin/sandbox-exec", *defined, "-p", profile, *variables, *argv]
