"""Hostile texts hold up nobody: the checker is bounded, audits of the departed end, the loop never stalls."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import psutil
import pytest
from gateway_support import scripted_model, serving

from keystroke.analysis.audit import LiveAudit
from keystroke.analysis.check import check
from keystroke.clients.live_connection import LiveClient
from keystroke.errors import InputError, Interrupted
from keystroke.gateway.live.audit import LARGE, BufferAudit
from keystroke.gateway.live.key_process import CheckProcess, RefactorProcess
from keystroke.gateway.live.mirror import BufferMirror
from keystroke.isolation import IsolatedFunction
from keystroke.protocol import live_messages as live
from keystroke.text import Edit, apply_edits

DIGITS = "x = " + "1" * 50_000 + "\n"


def test_a_literal_of_fifty_thousand_digits_is_checked_and_offered_no_fix() -> None:
    (problem,) = check(DIGITS)
    assert (problem.code, problem.fixes) == ("syntax-error", ())


async def test_a_check_elsewhere_finds_what_it_finds_here() -> None:
    text = "import oss\nprint(undefined_name)\ndef f(:\n"
    assert await CheckProcess().check(text, None, None) == check(text)
    text = "import os\nprnt(1)\n"
    assert await CheckProcess().check(text, None, None) == check(text) != ()


def sleeper(seconds: float) -> IsolatedFunction:
    """A process that would do anything for half a minute."""
    made = IsolatedFunction("time:sleep", seconds=seconds, memory=64 << 20)
    made.call = lambda *_: IsolatedFunction.call(made, 30)  # type: ignore[method-assign]
    return made


async def test_a_text_that_takes_too_long_is_an_error_and_the_next_is_checked() -> None:
    with pytest.raises(InputError, match="could not be checked"):
        await CheckProcess(sleeper(0.2)).check("x", None, None)
    assert await CheckProcess().check("x = 1\n", None, None) == ()


async def test_each_key_has_a_process_of_its_own_which_goes_with_its_last_connection() -> None:
    one, same, other = CheckProcess.for_key("a"), CheckProcess.for_key("a"), CheckProcess.for_key("b")
    assert one is same
    assert one is not other
    assert type(RefactorProcess.for_key("a")) is RefactorProcess
    await one.check("x = 1\n", None, None)
    process = one._function._process
    assert process is not None
    del one, same
    assert process.wait(60) != 0
    assert (CheckProcess, "a") not in CheckProcess.known


SOURCE = "def f(x):\n    return x\n"
RENAME = live.RefactorAsk(id="r", buffer="b", version=1, kind="rename", start=6, end=6, name="y")


async def test_a_refactoring_that_takes_too_long_is_an_error_and_holds_up_only_its_own_key() -> None:
    slow, other = RefactorProcess(sleeper(0.5)), RefactorProcess.for_key("other")
    before = threading.active_count()
    many = [asyncio.ensure_future(slow.plan(RENAME, None, None, SOURCE, {})) for _ in range(50)]
    done = await other.plan(RENAME, None, None, SOURCE, {})
    assert [(d.start, d.end, d.text) for d in done.files[0].edits] == [(6, 7, "y"), (21, 22, "y")]
    assert threading.active_count() <= before + 2  # one for each key, however many ask
    with pytest.raises(InputError, match="was stopped; nothing was changed"):
        await many[0]
    for waiting in many[2:]:
        waiting.cancel()


async def test_a_refactoring_ends_with_the_last_connection_of_its_key() -> None:
    elsewhere = sleeper(30)
    mine = RefactorProcess(elsewhere)
    asked = asyncio.ensure_future(mine.plan(RENAME, None, None, SOURCE, {}))
    while elsewhere._process is None:  # noqa: ASYNC110 - a thread makes it
        await asyncio.sleep(0.01)
    thread = mine._thread
    asked.cancel()
    await asyncio.wait([asked])
    del mine, asked
    thread.shutdown(wait=True)  # returns: nobody is left to wait half a minute for
    assert elsewhere._process is None


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
    audits = [BufferAudit(BufferMirror("b", "", 0, language="python"), lambda _event: None) for _ in range(8)]
    for audit in audits:
        audit.apply_edits(text, 1, ())
    await asyncio.sleep(0.1)
    for audit in audits:
        audit.close()
    assert await asyncio.wait_for(asyncio.to_thread(lambda: 1), 5) == 1  # the common threads are free
    heard: list[live.LiveEvent] = []
    done = BufferAudit(BufferMirror("c", "", 0, language="python"), heard.append)
    done.apply_edits("x = 1\n", 1, ())
    for _ in range(1000):
        if heard:
            break
        await asyncio.sleep(0.01)
    assert heard, "audits of the departed still run"


async def test_a_large_text_is_audited_elsewhere_with_the_same_findings_after_every_edit() -> None:
    unit = "def f(a):\n    return eval(a)\n\n"
    text = "import os\n" + unit * (LARGE // len(unit) + 1)
    heard: list[live.LiveEvent] = []
    audit = BufferAudit(BufferMirror("b", "", 0, language="python"), heard.append, "large")

    async def told() -> live.Diagnostics:
        while not heard:  # noqa: ASYNC110 - it is told from a task of its own
            await asyncio.sleep(0.01)
        event = heard.pop()
        assert isinstance(event, live.Diagnostics)
        return event

    audit.apply_edits(text, 1, ())
    assert [f.start for f in (await told()).findings] == [f.start for f in LiveAudit("python", text).findings]
    edit = Edit(len(text), len(text), "os.system(input())\n")
    grown = apply_edits(text, (edit,))
    audit.apply_edits(grown, 2, (edit,))
    event = await told()
    assert event.version == 2
    assert [f.rule for f in event.findings] == [f.rule for f in LiveAudit("python", grown).findings]
    assert audit._audit is None  # nothing of it was parsed here
    small = "import os\nos.system(input())\n"
    audit.apply_edits(small, 3, (Edit(0, len(grown), small),))
    assert [f.start for f in (await told()).findings] == [
        f.start for f in LiveAudit("python", small).findings
    ]


def stolen() -> float:
    """Seconds of this machine's processors that its host gave to others; the clock of a thread has them."""
    return float(getattr(psutil.cpu_times(), "steal", 0.0))


class Watchdog:
    """Notes every callback of a loop that takes over `limit` seconds of the thread's own time, less what the
    host took away from this machine meanwhile: waiting for a loaded machine is nobody's fault."""

    def __init__(self, limit: float = 0.05) -> None:
        self.limit = limit
        self.stalls: list[tuple[float, str]] = []
        self._run: Callable[[asyncio.Handle], None] = asyncio.Handle._run

    def __enter__(self) -> Watchdog:
        def run(handle: asyncio.Handle) -> None:
            taken, began = stolen(), time.thread_time()
            self._run(handle)
            spent = time.thread_time() - began - (stolen() - taken)
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
                    edits = [live.BufferEdit(6 * n, 6 * n, "y") for n in range(count)]
                    client._send(
                        live.BufferChange(buffer="b", base=version, version=version + 1, edits=edits)
                    )
                    version += 1
                    await asyncio.sleep(0.3)
            assert watchdog.stalls == []
