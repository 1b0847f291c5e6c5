"""Tasks on the wire: requests, the task object, and its events.

A task outlives the connection that started it: every event has a sequence number, and a client that
reconnects requests those after the last one it saw. Output of models and commands is text, never markup.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

Name = Annotated[str, Meta(max_length=256)]
Path = Annotated[str, Meta(min_length=1, max_length=4096)]
Words = Annotated[str, Meta(max_length=100_000)]
Line = Annotated[str, Meta(max_length=10_000)]
TaskStatus = Literal[
    "queued",  # waits for a free slot
    "working",
    "asking",  # waits for an answer to `question`
    "done",  # the change was applied, or there was nothing to change
    "proposed",  # the change is ready and not applied
    "failed",
    "interrupted",  # it or its server was stopped; it can be resumed
    "undone",  # the change was applied and reverted
]


class TaskCreate(Struct, kw_only=True):
    """The body of `POST /v1/tasks`. `workspace` is a folder of the server's machine."""

    workspace: Path
    instruction: Annotated[Words, Meta(min_length=1)]
    model: Name = "auto"
    deep: Name | None = None  # takes over when the first model fails, and reviews; None: the configured one
    check: Line = ""  # a command that must pass; naming it permits running it
    types: Line = ""  # likewise, for types
    files: Annotated[list[Path], Meta(max_length=100)] = []
    attempts: Annotated[int, Meta(ge=0, le=64)] = 0  # 0: as many as cost about as much as one
    tries: Annotated[int, Meta(ge=1, le=20)] = 2
    run: bool = False  # the model may run commands
    network: bool = False
    mcp: Annotated[list[Name], Meta(max_length=16)] = []  # servers of the server's own file
    approve: Literal["never", "commands", "all"] = "all"
    review: bool = False
    dry_run: bool = False
    background: bool = False  # lowest priority
    seconds: Annotated[float, Meta(gt=0, le=86_400)] = 300.0  # time limit of one command
    max_tokens: Annotated[int, Meta(ge=1, le=100_000)] = 2048
    stream: bool = False  # answer with the task's events instead of the task


class TaskSteer(Struct, kw_only=True):
    """The body of `POST /v1/tasks/{id}/steer`. `deep`: the deep model takes over."""

    line: Line = ""
    deep: bool = False


class TaskAnswer(Struct, kw_only=True):
    """The body of `POST /v1/tasks/{id}/approve` and `/reject`. `question` guards against answering another
    one than was read. `hunks`: of a change, only these."""

    question: Name | None = None
    hunks: Annotated[list[int], Meta(max_length=10_000)] | None = None


class TaskApply(Struct, kw_only=True):
    """The body of `POST /v1/tasks/{id}/apply`: make the change that a task proposed, or part of it."""

    hunks: Annotated[list[int], Meta(max_length=10_000)] | None = None


class TaskResume(Struct, kw_only=True):
    """The body of `POST /v1/tasks/{id}/resume`: resume a task that has ended."""

    instruction: Words = ""


class TaskReceipt(Struct, frozen=True, kw_only=True):
    """What a step, or all steps of one model, took. `model` is empty for commands."""

    what: str
    model: str = ""
    prompt_tokens: int = 0
    reused_tokens: int = 0
    tokens: int = 0
    seconds: float = 0.0
    cost: float = 0.0
    attempts: int = 0


class TaskHunk(Struct, frozen=True, kw_only=True):
    """A part of a change that can be taken by itself: lines `first` to `last` (from 1, `last` below `first`
    where nothing is removed) of the file as it is become `after`."""

    number: int
    path: str
    first: int
    last: int
    before: str
    after: str
    whole: Literal["", "added", "removed"] = ""  # the file as such is new or goes


class TaskDiff(Struct, frozen=True, kw_only=True):
    """The body of `GET /v1/tasks/{id}/diff`."""

    diff: str
    hunks: list[TaskHunk]


class TaskQuestion(Struct, frozen=True, kw_only=True):
    """A question to the user. The hunks of a change can be approved one by one."""

    id: str
    kind: Literal["command", "change"]
    text: str
    command: str = ""
    diff: str = ""
    hunks: list[TaskHunk] = []


class Task(Struct, kw_only=True):
    """The state of a task. `entry` names it in the undo journal once its change is applied."""

    id: str
    status: TaskStatus
    workspace: str
    instruction: str
    model: str
    created_at: float
    object: Literal["task"] = "task"
    line: str = ""  # what it does, or how it ended
    sandbox: str = ""
    question: TaskQuestion | None = None
    diff: str = ""
    entry: str = ""
    receipts: list[TaskReceipt] = []  # one a model
    check: str = ""
    files: list[str] = []
    ended_at: float | None = None
    sequence_number: int = 0  # of its latest event


class TaskList(Struct, frozen=True, kw_only=True):
    """The body of `GET /v1/tasks`: newest first."""

    data: list[Task]
    object: Literal["list"] = "list"


class TaskEventBase(Struct, tag_field="type", kw_only=True):
    task_id: str
    sequence_number: int


class TaskCreated(TaskEventBase, tag="task.created"):
    """The first event, and the first again when a task is resumed."""

    task: Task


class TaskQueued(TaskEventBase, tag="task.queued"):
    """The task waits for a free slot, or its model waits in the model's queue. 0: it no longer waits."""

    position: int


class TaskBegan(TaskEventBase, tag="task.began"):
    model: str
    sandbox: str


class TaskDoing(TaskEventBase, tag="task.doing"):
    """The next step, in one line."""

    line: str


class TaskText(TaskEventBase, tag="task.text.delta"):
    """What the model writes."""

    delta: str


class TaskOutput(TaskEventBase, tag="task.output.delta"):
    """What a command prints."""

    delta: str


class TaskNoted(TaskEventBase, tag="task.noted"):
    """The result of a step, in one line."""

    line: str
    failed: bool = False


class TaskChanged(TaskEventBase, tag="task.changed"):
    """The whole change so far, not yet applied."""

    diff: str


class TaskSpent(TaskEventBase, tag="task.spent"):
    receipt: TaskReceipt


class TaskAsked(TaskEventBase, tag="task.asked"):
    question: TaskQuestion


class TaskAnswered(TaskEventBase, tag="task.answered"):
    question_id: str
    approved: bool


class TaskSteered(TaskEventBase, tag="task.steered"):
    line: str
    deep: bool = False


class TaskEnded(TaskEventBase, tag="task.ended"):
    """The last event of a run; the task says how it ended and what it cost."""

    task: Task


class TaskLanded(TaskEventBase, tag="task.landed"):
    """A proposed change was applied."""

    task: Task


class TaskUndone(TaskEventBase, tag="task.undone"):
    task: Task


TaskEvent = (
    TaskCreated | TaskQueued | TaskBegan | TaskDoing | TaskText | TaskOutput | TaskNoted | TaskChanged |
    TaskSpent | TaskAsked | TaskAnswered | TaskSteered | TaskEnded | TaskLanded | TaskUndone
)  # fmt: skip
