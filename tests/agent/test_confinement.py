"""Every attempt to reach beyond a sandbox fails in every kind that is used, as this user and as another."""

from __future__ import annotations

import os

import pytest

from bench import confinement
from keystroke.agent.sandbox import Sandbox, SandboxKind, find_escapes

HELD = confinement.held_kinds()


@pytest.mark.parametrize("kind", HELD, ids=str)
def test_no_attempt_succeeds(kind: SandboxKind) -> None:
    assert confinement.escapes(kind) == []


def test_no_attempt_succeeds_as_another_user() -> None:
    found = confinement.escapes_as_user()
    if isinstance(found, str):
        pytest.skip(found)
    assert found == {str(kind): [] for kind in found}
    assert found or not HELD


@pytest.mark.skipif(not HELD, reason="no sandbox holds on this machine")
def test_without_a_sandbox_the_attempts_succeed() -> None:
    """Otherwise the attempts prove nothing."""
    expected = {
        "file: create outside", "file: overwrite outside", "file: write through a link",
        "file: remove outside", "file: move outside", "file: read a home", "metadata: mode",
        "metadata: by descriptor",
        "metadata: times", "metadata: owner", "process: signal", "process: environment", "network: loopback",
        "network: datagram", "socket: by path", "socket: abstract", "privilege: new privileges",
        "privilege: system calls",
    }  # fmt: skip
    found = set(find_escapes(Sandbox(SandboxKind.NONE)))
    assert expected <= found
    if os.getuid() == 0:
        assert "privilege: capabilities" in found


def test_the_security_page_has_the_table_of_every_attempt_and_every_sandbox_of_linux() -> None:
    text = confinement.SECURITY.read_text(encoding="utf-8")
    shown = text.partition(confinement.BEGIN)[2].partition(confinement.END)[0]
    kinds = [SandboxKind.BUBBLEWRAP, SandboxKind.NAMESPACES, SandboxKind.LANDLOCK]
    assert shown == confinement.table({f"{kind}, {who}": [] for who in ("root", "user") for kind in kinds})
