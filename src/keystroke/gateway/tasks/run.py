"""One run of a task: the agent works on its own thread, and its events and questions are handled on the loop.

State that clients see changes on the loop only. The thread posts events in batches and waits for answers;
stopping the run refuses open questions. A run ends with one `task.ended`.
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

from keystroke.agent.chat.receipt import StepReceipt
from keystroke.agent.chat.steering import Steering
from keystroke.agent.loop import ApprovalDecision, ApprovalRequest, EndedEvent, Event
from keystroke.agent.loop.events import (
    CostEvent,
    DiffEvent,
    NoteEvent,
    OutputEvent,
    StartedEvent,
    StepEvent,
    TextEvent,
)
from keystroke.agent.loop.hunks import ChangeHunk, split_hunks
from keystroke.engine.base import Interrupt
from keystroke.errors import InputError, KeystrokeError
from keystroke.gateway.tasks.log import EventLog
from keystroke.protocol import tasks as wire

log = logging.getLogger("keystroke.tasks")

_ANSWER_TIMEOUT = 3600.0  # seconds; then the change stays a proposal
TaskWork = Callable[["TaskRun"], object]


class TaskRun:
    """`start` runs the task's work on a thread; the work may raise any KeystrokeError."""

    def __init__(self, task: wire.Task, owner: str, log: EventLog, on_end: Callable[[TaskRun], None]) -> None:
        self.task, self.owner, self.log = task, owner, log
        self.interrupt, self.steering = Interrupt(), Steering()
        self.can_hand_over = False
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._posts: deque[Callable[[], None]] = deque()
        self._posted = False
        self._lock = threading.Lock()
        self._answers: queue.SimpleQueue[tuple[str, ApprovalDecision]] = queue.SimpleQueue()
        self._questions = 0
        self.over = asyncio.Event()
        self.thread: threading.Thread | None = None

    def start(self, work: TaskWork) -> None:
        self.thread = threading.Thread(target=self._run, args=(work,), name=self.task.id, daemon=True)
        self.thread.start()

    def snapshot(self, ahead: int = 0) -> wire.Task:
        """The current task; `ahead` 1 for an event that is about to be appended."""
        return msgspec.structs.replace(self.task, sequence_number=self.log.last + ahead)

    def steer(self, line: str, *, deep: bool) -> None:
        """Add a line for the model, or hand over. InputError where there is no deep model."""
        if deep and not self.can_hand_over:
            raise InputError("there is no deep model to take over; name one as `deep`", param="deep")
        if line.strip():
            self.steering.add_line(line.strip())
        if deep:
            self.steering.request_handover()
        self.log.append(wire.TaskSteered, line=line.strip(), deep=deep)

    def answer(self, question: str | None, answer: ApprovalDecision) -> None:
        """Answer the open question. InputError where it is another one, or a hunk does not exist."""
        open_question = self.task.question
        if open_question is None:
            raise InputError("the task asks nothing now", param="question")
        if question is not None and question != open_question.id:
            raise InputError(f"the task asks {open_question.id} now, not {question:.40}", param="question")
        if answer.hunks is not None:
            unknown = answer.hunks - {hunk.number for hunk in open_question.hunks}
            if unknown:
                raise InputError(f"there is no hunk {min(unknown)} in this question", param="hunks")
        self.task.question, self.task.status = None, "working"
        self.log.append(wire.TaskAnswered, question_id=open_question.id, approved=answer.approved)
        self._answers.put((open_question.id, answer))

    def stop(self) -> None:
        """Stop within a step. No effect after the end."""
        self.interrupt.set()

    def set_queue_position(self, position: int) -> None:
        """Report the position of the task, or of its model's answer, in a queue. From any thread."""
        self._post(lambda: self.log.append(wire.TaskQueued, position=position))

    def _run(self, work: TaskWork) -> None:
        try:
            work(self)
        except KeystrokeError as error:
            self._post(lambda error=error: self._end_with(error))  # type: ignore[misc]
        except BaseException as error:
            log.error("a task failed", exc_info=error)
            failure = KeystrokeError("The server failed on this task; see its log.")
            self._post(lambda: self._end_with(failure))
        self._post(self._finish)

    def handle_event(self, event: Event) -> None:
        self._post(lambda: self._publish(event))

    def ask_user(self, question: ApprovalRequest) -> ApprovalDecision:
        """Ask the task's owner and wait. Refused where the run is stopped or nobody answers."""
        self._questions += 1
        name = f"q{self._questions}"
        hunks = split_hunks(question.plan) if question.plan is not None else []
        refuse = lambda: self._answers.put((name, ApprovalDecision(False)))  # noqa: E731
        self._post(lambda: self._publish_question(name, question, hunks))
        self.interrupt.add_callback(refuse)
        end = time.monotonic() + _ANSWER_TIMEOUT
        try:
            while True:
                answered, answer = self._answers.get(timeout=max(0.0, end - time.monotonic()))
                if answered == name:
                    return answer
        except queue.Empty:
            self._post(lambda: self._expire_question(name))
            return ApprovalDecision(False)
        finally:
            self.interrupt.remove_callback(refuse)

    def _post(self, act: Callable[[], None]) -> None:
        with self._lock:
            self._posts.append(act)
            if self._posted:
                return
            self._posted = True
        try:
            self._loop.call_soon_threadsafe(self._run_posts)
        except RuntimeError:  # the loop is closed; the record on disk has the progress
            return

    def _run_posts(self) -> None:
        with self._lock:
            posts, self._posts, self._posted = self._posts, deque(), False
        for act in posts:
            act()

    def _publish(self, event: Event) -> None:
        task, append = self.task, self.log.append
        if isinstance(event, StartedEvent):
            task.status, task.model, task.sandbox = "working", event.model, event.sandbox
            append(wire.TaskBegan, model=event.model, sandbox=event.sandbox)
        elif isinstance(event, StepEvent):
            task.line = event.line
            append(wire.TaskDoing, line=event.line)
        elif isinstance(event, TextEvent):
            append(wire.TaskText, delta=event.text)
        elif isinstance(event, OutputEvent):
            append(wire.TaskOutput, delta=event.text)
        elif isinstance(event, NoteEvent):
            append(wire.TaskNoted, line=event.line, failed=event.failed)
        elif isinstance(event, DiffEvent):
            task.diff = event.diff
            append(wire.TaskChanged, diff=event.diff)
        elif isinstance(event, CostEvent):
            append(wire.TaskSpent, receipt=to_wire_receipt(event.receipt))
        elif isinstance(event, EndedEvent):
            task.line, task.diff, task.entry = event.line, event.diff, event.entry
            task.receipts = [to_wire_receipt(known) for known in event.receipts]
            self._end(str(event.status))

    def _publish_question(self, name: str, question: ApprovalRequest, hunks: Sequence[ChangeHunk]) -> None:
        if self.interrupt.is_set:
            return  # stopped before the question was published
        published = wire.TaskQuestion(
            id=name,
            kind="change" if question.plan is not None else "command",
            text=question.text,
            command=question.command,
            diff=question.diff,
            hunks=[to_wire_hunk(hunk) for hunk in hunks],
        )
        self.task.question, self.task.status = published, "asking"
        self.log.append(wire.TaskAsked, question=published)

    def _expire_question(self, name: str) -> None:
        if self.task.question is not None and self.task.question.id == name:
            self.task.question, self.task.status = None, "working"
            self.log.append(wire.TaskAnswered, question_id=name, approved=False)

    def _end_with(self, error: KeystrokeError) -> None:
        if self.task.ended_at is None:
            self.task.line = str(error)
            self._end("interrupted" if self.interrupt.is_set else "failed")

    def _end(self, status: Any) -> None:
        task = self.task
        task.status, task.question, task.ended_at = status, None, time.time()
        self.log.append(wire.TaskEnded, task=self.snapshot(1))

    def _finish(self) -> None:
        self.over.set()
        self.log.closed = True
        self.log.wake()
        self._on_end(self)


def to_wire_receipt(receipt: StepReceipt) -> wire.TaskReceipt:
    return msgspec.convert(receipt, wire.TaskReceipt, from_attributes=True)


def to_wire_hunk(hunk: ChangeHunk) -> wire.TaskHunk:
    return msgspec.convert(hunk, wire.TaskHunk, from_attributes=True)
