"""One task under way: the agent on a thread of its own, what it tells and asks on the event loop.

Everything that a client sees is changed on the loop alone. The thread tells by posting, in batches, and
waits for answers to its questions; stopping it answers them with no. A run ends with one `task.ended`.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from keystroke.agent.chat import Receipt, Steering
from keystroke.agent.loop import Answer, Ended, Event, Question
from keystroke.agent.loop.events import Began, Changed, Doing, Noted, Printed, Spent, Wrote
from keystroke.agent.loop.hunks import ChangeHunk, hunks_of
from keystroke.engine.base import Interrupt
from keystroke.errors import InputError, KeystrokeError
from keystroke.gateway.tasks.log import EventLog
from keystroke.protocol import tasks as wire

log = logging.getLogger("keystroke.tasks")

_PATIENCE = 3600.0  # seconds that a question waits; then the change is kept as a proposal
Work = Callable[["TaskRun"], object]


class TaskRun:
    """`work` does the task on the run's thread and tells `sink`; it may raise any error of the tree."""

    def __init__(self, task: wire.Task, owner: str, log: EventLog, on_end: Callable[[TaskRun], None]) -> None:
        self.task, self.owner, self.log = task, owner, log
        self.interrupt, self.steering = Interrupt(), Steering()
        self.can_hand_over = False
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._posts: deque[Callable[[], None]] = deque()
        self._posted = False
        self._lock = threading.Lock()
        self._answers: queue.SimpleQueue[tuple[str, Answer]] = queue.SimpleQueue()
        self._questions = 0
        self.over = asyncio.Event()
        self.thread: threading.Thread | None = None

    def start(self, work: Work) -> None:
        self.thread = threading.Thread(target=self._run, args=(work,), name=self.task.id, daemon=True)
        self.thread.start()

    # ── from the loop ─────────────────────────────────────────────────────────────────────────

    def asked_in(self, workspace: str) -> bool:
        return self.task.workspace == workspace.rstrip("/")

    def snapshot(self, ahead: int = 0) -> wire.Task:
        """The task as it stands; `ahead` 1 for an event that is about to be told."""
        return msgspec.structs.replace(self.task, sequence_number=self.log.last + ahead)

    def steer(self, line: str, *, deep: bool) -> None:
        """InputError where there is no deep model to hand over to."""
        if deep and not self.can_hand_over:
            raise InputError("there is no deep model to take over; name one as `deep`", param="deep")
        if line.strip():
            self.steering.say(line.strip())
        if deep:
            self.steering.hand_over()
        self.log.tell(wire.TaskSteered, line=line.strip(), deep=deep)

    def answer(self, question: str | None, answer: Answer) -> None:
        """InputError where nothing, or something else, is asked, or a hunk is named that is not there."""
        asked = self.task.question
        if asked is None:
            raise InputError("the task asks nothing now", param="question")
        if question is not None and question != asked.id:
            raise InputError(f"the task asks {asked.id} now, not {question:.40}", param="question")
        if answer.hunks is not None:
            strange = answer.hunks - {hunk.number for hunk in asked.hunks}
            if strange:
                raise InputError(f"there is no hunk {min(strange)} in this question", param="hunks")
        self.task.question, self.task.status = None, "working"
        self.log.tell(wire.TaskAnswered, question_id=asked.id, approved=answer.yes)
        self._answers.put((asked.id, answer))

    def stop(self) -> None:
        """Stop within a step; harmless after the end."""
        self.interrupt.set()

    def moved(self, position: int) -> None:
        """Where it, or its model's answer, stands in a queue. From any thread."""
        self._post(lambda: self.log.tell(wire.TaskQueued, position=position))

    # ── on the task's thread ──────────────────────────────────────────────────────────────────

    def _run(self, work: Work) -> None:
        try:
            work(self)
        except KeystrokeError as error:
            self._post(lambda error=error: self._end_with(error))  # type: ignore[misc]
        except BaseException as error:
            log.error("a task failed", exc_info=error)
            failure = KeystrokeError("The server failed on this task; its log says how.")
            self._post(lambda: self._end_with(failure))
        self._post(self._ended)

    def sink(self, event: Event) -> None:
        self._post(lambda: self._tell(event))

    def ask(self, question: Question) -> Answer:
        """Put a question to whoever made the task, and wait. No, where it is stopped or nobody answers."""
        self._questions += 1
        name = f"q{self._questions}"
        hunks = hunks_of(question.plan) if question.plan is not None else []
        refuse = lambda: self._answers.put((name, Answer(False)))  # noqa: E731
        self._post(lambda: self._asked(name, question, hunks))
        self.interrupt.add_callback(refuse)
        end = time.monotonic() + _PATIENCE
        try:
            while True:
                answered, answer = self._answers.get(timeout=max(0.0, end - time.monotonic()))
                if answered == name:
                    return answer
        except queue.Empty:
            self._post(lambda: self._unanswered(name))
            return Answer(False)
        finally:
            self.interrupt.remove_callback(refuse)

    def _post(self, act: Callable[[], None]) -> None:
        with self._lock:
            self._posts.append(act)
            if self._posted:
                return
            self._posted = True
        try:
            self._loop.call_soon_threadsafe(self._take)
        except RuntimeError:  # the loop is gone; the record on disk says how far it came
            return

    # ── what it told, on the loop ─────────────────────────────────────────────────────────────

    def _take(self) -> None:
        with self._lock:
            posts, self._posts, self._posted = self._posts, deque(), False
        for act in posts:
            act()

    def _tell(self, event: Event) -> None:
        task, tell = self.task, self.log.tell
        if isinstance(event, Began):
            task.status, task.model, task.sandbox = "working", event.model, event.sandbox
            tell(wire.TaskBegan, model=event.model, sandbox=event.sandbox)
        elif isinstance(event, Doing):
            task.line = event.line
            tell(wire.TaskDoing, line=event.line)
        elif isinstance(event, Wrote):
            tell(wire.TaskText, delta=event.text)
        elif isinstance(event, Printed):
            tell(wire.TaskOutput, delta=event.text)
        elif isinstance(event, Noted):
            tell(wire.TaskNoted, line=event.line, failed=event.failed)
        elif isinstance(event, Changed):
            task.diff = event.diff
            tell(wire.TaskChanged, diff=event.diff)
        elif isinstance(event, Spent):
            tell(wire.TaskSpent, receipt=as_receipt(event.receipt))
        elif isinstance(event, Ended):
            task.line, task.diff, task.entry = event.line, event.diff, event.entry
            task.receipts = [as_receipt(known) for known in event.receipts]
            self._end(str(event.status))

    def _asked(self, name: str, question: Question, hunks: Sequence[ChangeHunk]) -> None:
        if self.interrupt.is_set:
            return  # it was stopped before anybody could be asked
        asked = wire.TaskQuestion(
            id=name,
            kind="change" if question.plan is not None else "command",
            text=question.text,
            command=question.command,
            diff=question.diff,
            hunks=[as_hunk(hunk) for hunk in hunks],
        )
        self.task.question, self.task.status = asked, "asking"
        self.log.tell(wire.TaskAsked, question=asked)

    def _unanswered(self, name: str) -> None:
        if self.task.question is not None and self.task.question.id == name:
            self.task.question, self.task.status = None, "working"
            self.log.tell(wire.TaskAnswered, question_id=name, approved=False)

    def _end_with(self, error: KeystrokeError) -> None:
        if self.task.ended_at is None:
            self.task.line = str(error)
            self._end("interrupted" if self.interrupt.is_set else "failed")

    def _end(self, status: Any) -> None:
        task = self.task
        task.status, task.question, task.ended_at = status, None, time.time()
        self.log.tell(wire.TaskEnded, task=self.snapshot(1))

    def _ended(self) -> None:
        self.over.set()
        self.log.closed = True
        self.log.wake()
        self._on_end(self)


def as_receipt(known: Receipt) -> wire.TaskReceipt:
    return wire.TaskReceipt(
        what=known.what,
        model=known.model,
        prompt_tokens=known.prompt_tokens,
        reused_tokens=known.reused_tokens,
        tokens=known.tokens,
        seconds=known.seconds,
        cost=known.cost,
        attempts=known.attempts,
    )


def as_hunk(hunk: ChangeHunk) -> wire.TaskHunk:
    return wire.TaskHunk(
        number=hunk.number,
        path=hunk.path,
        first=hunk.first,
        last=hunk.last,
        before=hunk.before,
        after=hunk.after,
        whole=hunk.whole,  # type: ignore[arg-type]
    )
