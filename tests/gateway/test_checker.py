"""Hostile texts hold up nobody: the checker is bounded, audits of the departed end, the loop never stalls."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest
from gateway_support import scripted_model, serving

from keystroke.analysis.audit import LiveAudit
from keystroke.analysis.check import check
from keystroke.clients.live_connection import LiveClient
from keystroke.errors import InputError, Interrupted
from keystroke.gateway.live import checker
from keystroke.gateway.live.audit import BufferAudit
from keystroke.gateway.live.checker import Checker, checker_of
from keystroke.isolation import Isolated
from keystroke.protocol import live_messages as live

DIGITS = "x = " + "1" * 50_000 + "\n"


def test_a_literal_of_fifty_thousand_digits_is_checked_and_offered_no_fix() -> None:
    (problem,) = check(DIGITS)
    assert (problem.code, problem.fixes) == ("syntax-error", ())


def test_a_check_elsewhere_finds_what_it_finds_here() -> None:
    text = "import oss\nprint(undefined_name)\ndef f(:\n"
    assert Checker().problems(text, None, None) == check(text)
    text = "import os\nprnt(1)\n"
    assert Checker().problems(text, None, None) == check(text) != ()


def test_a_text_that_takes_too_long_is_an_error_and_the_next_is_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = Checker()
    slow._elsewhere = Isolated("time:sleep", seconds=0.2, memory=64 << 20)
    monkeypatch.setattr(slow._elsewhere, "call", lambda *_: Isolated.call(slow._elsewhere, 30))
    with pytest.raises(InputError, match="could not be checked"):
        slow.problems("x", None, None)
    assert Checker().problems("x = 1\n", None, None) == ()


def test_each_key_has_a_process_of_its_own_which_goes_with_its_last_connection() -> None:
    one, same, other = checker_of("a"), checker_of("a"), checker_of("b")
    assert one is same
    assert one is not other
    one.problems("x = 1\n", None, None)
    process = one._elsewhere._process
    assert process is not None
    del one, same
    assert process.wait(10) != 0
    assert "a" not in checker._checkers


def test_an_audit_that_nobody_waits_for_ends_before_its_next_unit() -> None:
    gone = threading.Event()
    text = "".join(f"def f{n}(a):\n    return eval(a)\n\n" for n in range(50))
    audit = LiveAudit("python", text, abandoned=gone.is_set)
    assert audit.findings
    gone.set()
    with pytest.raises(Interrupted):
        audit.replace(text.replace("eval", "exec"))


async def test_audits_of_clients_that_left_are_ended_and_take_no_other_thread() -> None:
    text = "".join(f"def f{n}(a):\n    b = a + {n}\n    return eval(b)\n\n" for n in range(4000))
    audits = [BufferAudit("b", "python", lambda _event: None) for _ in range(8)]
    for audit in audits:
        audit.follow(text, 1, ())
    await asyncio.sleep(0.1)
    for audit in audits:
        audit.close()
    assert await asyncio.wait_for(asyncio.to_thread(lambda: 1), 5) == 1  # the common threads are free
    heard: list[live.LiveEvent] = []
    done = BufferAudit("c", "python", heard.append)
    done.follow("x = 1\n", 1, ())
    for _ in range(1000):
        if heard:
            break
        await asyncio.sleep(0.01)
    assert heard, "audits of the departed still run"


class Watchdog:
    """Notes every callback of a loop that takes over `limit` seconds of the thread's own time: waiting for a
    loaded machine is nobody's fault."""

    def __init__(self, limit: float = 0.05) -> None:
        self.limit = limit
        self.stalls: list[tuple[float, str]] = []
        self._run: Callable[[asyncio.Handle], None] = asyncio.Handle._run

    def __enter__(self) -> Watchdog:
        def run(handle: asyncio.Handle) -> None:
            began = time.thread_time()
            self._run(handle)
            spent = time.thread_time() - began
            if spent > self.limit and threading.current_thread() is not threading.main_thread():
                self.stalls.append((round(spent, 3), repr(handle)[:200]))

        setattr(asyncio.Handle, "_run", run)  # noqa: B010 - there is no public way to look
        return self

    def __exit__(self, *_: object) -> None:
        setattr(asyncio.Handle, "_run", self._run)  # noqa: B010


async def test_no_frame_of_a_large_buffer_stalls_the_loop() -> None:
    """15 MB in a buffer, then one edit, many edits, and more edits than are taken at once."""
    with serving(scripted_model()) as running:
        async with LiveClient(running.url) as client:
            with Watchdog() as watchdog:
                size = 15_000_000
                client.open("b", "x = 1\n" * (size // 6), version=1, language="plaintext")
                version = 1
                for count in (1, 4, 10_000):
                    edits = [live.Delta(6 * n, 6 * n, "y") for n in range(count)]
                    client._send(
                        live.BufferChange(buffer="b", base=version, version=version + 1, edits=edits)
                    )
                    version += 1
                    await asyncio.sleep(0.3)
            assert watchdog.stalls == []
