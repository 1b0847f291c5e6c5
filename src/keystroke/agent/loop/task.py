"""One task, from an instruction to a change that landed, or to a clear word that none did.

The main loop reads aloud: work, hand over to the deep model where the fast one failed, review, land. The
workspace is touched once, at the end, as one edit that `undo` takes back. Whatever happens, the task's record
says how far it came, the copies are removed, and one `Ended` event is the last.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from keystroke.agent.chat import Account, Chat, HandOver, Message, Receipt, Steering
from keystroke.agent.loop import prompts
from keystroke.agent.loop.approvals import Approvals
from keystroke.agent.loop.calling import Calling
from keystroke.agent.loop.events import Began, Ended, Sink, Status
from keystroke.agent.loop.hunks import part_of
from keystroke.agent.loop.record import Records, TaskRecord, new_id
from keystroke.agent.loop.rewriting import Rewriting
from keystroke.agent.loop.working import Hands, TaskOptions, Working, as_records
from keystroke.agent.sandbox import Limits, Sandbox
from keystroke.agent.tools import Runner
from keystroke.agent.tools.mcp import McpServer, McpTools
from keystroke.agent.workspace import Overlay, Replicas
from keystroke.agent.workspace.scratch import task_folder
from keystroke.analysis.failures.tally import Tally, tally
from keystroke.analysis.rules import project_rules
from keystroke.assist.edit import Journal, Workspace
from keystroke.engine.base import Interrupt
from keystroke.errors import InputError, Interrupted, KeystrokeError


class AgentTask:
    """`chat` does the work; `deep` opens the model that takes over where it fails, and that reviews: called
    when it is first needed, and its model closed with the task."""

    def __init__(
        self,
        workspace: Workspace,
        journal: Journal,
        chat: Chat,
        sandbox: Sandbox,
        approvals: Approvals,
        *,
        deep: Callable[[], Chat] | None = None,
        options: TaskOptions | None = None,
        records: Records | None = None,
        limits: Limits | None = None,
        network: bool = False,
        sink: Sink | None = None,
        interrupt: Interrupt | None = None,
        steering: Steering | None = None,
        exclude: tuple[str, ...] = (),
        scratch: Path | None = None,
        identity: str = "",
        servers: Mapping[str, McpServer] | None = None,
        owner: str = "",
        given: dict[str, Any] | None = None,
    ) -> None:
        """`servers` are programs of the user's whose tools a model with tools may ask for. `identity` names
        the task's record; `owner` and `given` are kept in it for whoever serves tasks."""
        self._workspace, self._journal, self._chat = workspace, journal, chat
        self._open_deep = deep
        self._deep: Chat | None = None
        self._sandbox, self._approvals = sandbox, approvals
        self._options, self._records = options or TaskOptions(), records
        self._limits, self._network = limits, network
        self._sink = sink or (lambda event: None)
        self._interrupt, self._steering = interrupt or Interrupt(), steering or Steering()
        self._exclude, self._scratch = exclude, scratch
        self._id, self._owner, self._given = identity or new_id(), owner, given or {}
        self._created = time.time()
        self._mcp = McpTools(servers, approvals.command, self._interrupt) if servers else None
        self.overlay = Overlay(workspace)

    def run(self, instruction: str, previous: TaskRecord | None = None) -> Ended:
        """Do the task; `previous` is one to go on with. Every ending is an `Ended`, which is also told;
        errors of the tree are raised after it."""
        if not instruction.strip() and previous is None:
            raise InputError("the task is empty; say what to do")
        began = time.perf_counter()
        with task_folder(self._scratch) as folder:
            copies = Replicas(
                self._workspace.root,
                folder,
                self._sandbox,
                exclude=self._exclude,
                most=max(1, self._options.workers),
            )
            try:
                task = self._working(instruction, copies, previous)
                self._sink(Began(self._id, task.instruction, self._chat.name, str(self._sandbox.kind)))
                return self._guarded(task, began)
            finally:
                if self._mcp is not None:
                    self._mcp.close()
                copies.close()
                if self._deep is not None:
                    self._deep.close()

    def _guarded(self, task: Working, began: float) -> Ended:
        try:
            return self._done(task, began)
        except Interrupted:
            line = "stopped; `keystroke do --continue` goes on" if self._records else "stopped"
            return self._ended(task, Status.INTERRUPTED, line)
        except KeystrokeError as error:
            self._ended(task, Status.FAILED, str(error))
            raise

    def _done(self, task: Working, began: float) -> Ended:
        if self._mcp is not None:
            task.tools = tuple(self._mcp.start())
        try:
            done = self._hands(self._chat).work(task)
        except HandOver:
            done = False
            task.note(f"{self._chat.name} hands over")
            task.instruction = "\n".join([task.instruction, *self._steering.rest()])
        if not done and self._open_deep is not None:
            deep = self._opened(task, "takes over")
            done = self._hands(deep).work(task)
        if not done:
            return self._ended(task, Status.FAILED, self._why(task))
        if self._options.review and self._open_deep is not None and task.overlay.texts:
            self._review(task, self._opened(task, "reviews the change"))
        return self._landed(task, time.perf_counter() - began)

    @staticmethod
    def _hands(chat: Chat) -> Hands:
        return Rewriting(chat) if chat.small else Calling(chat)

    def _opened(self, task: Working, what: str) -> Chat:
        if self._deep is None:
            assert self._open_deep is not None
            self._deep = self._open_deep()
        task.doing(f"{self._deep.name} {what}")
        return self._deep

    def _why(self, task: Working) -> str:
        said = [line.strip() for line in (task.failure or task.refused).splitlines() if line.strip()]
        what = f": {said[-1]:.120}" if said else ""  # where programs say what went wrong
        if not task.overlay.texts or self._records is None:
            return f"no change that holds was found{what}; nothing was changed"
        counted = tally(task.checked.output) if task.checked is not None else Tally()
        got = f", with the one above {counted}" if counted.passed else what
        return (
            f"no change that holds was found{got}; nothing was changed: `keystroke do --continue` goes on "
            "from it, `keystroke tasks apply` makes it as it is"
        )

    # ── the deep model looks at the diff ──────────────────────────────────────────────────────

    def _review(self, task: Working, chat: Chat) -> None:
        reply = chat.reply(
            prompts.review(task.instruction, task.overlay.diff()), interrupt=self._interrupt, max_tokens=512
        )
        task.spent(reply.receipt)
        found = prompts.problems(reply.text)
        for problem in found:
            task.note(f"review: {problem:.200}", failed=True)
        if not found:
            task.note("review: OK")

    # ── landing ───────────────────────────────────────────────────────────────────────────────

    def _landed(self, task: Working, seconds: float) -> Ended:
        plan = task.overlay.plan(task.instruction.strip().splitlines()[0][:200])
        if not plan.changes:
            return self._ended(task, Status.DONE, "done; nothing had to be changed")
        if self._options.dry_run:
            line = f"would {', '.join(plan.summary())}; nothing was written"
            return self._ended(task, Status.PROPOSED, line, plan.diff())
        answer = self._approvals.change(plan)
        self._interrupt.check()
        if answer.yes and answer.hunks is not None:
            plan = part_of(plan, answer.hunks)
        if not answer.yes or not plan.changes:
            return self._ended(task, Status.PROPOSED, "not approved; nothing was written", plan.diff())
        diff, summary = plan.diff(), ", ".join(plan.summary())
        entry = plan.apply(self._journal)
        total = task.account.total()
        line = f"{summary} ({total.tokens:,} tokens, {seconds:.1f} s); `keystroke undo` takes it back"
        return self._ended(task, Status.DONE, line, diff, entry.id if entry else "")

    def _ended(self, task: Working, status: Status, line: str, diff: str = "", entry: str = "") -> Ended:
        landed = status is Status.DONE
        if landed:
            self.overlay = Overlay(self._workspace)  # what landed is the workspace's now
        receipts = tuple(receipt for model, receipt in task.account.by_model().items() if model)
        ended = Ended(status, line, diff or task.overlay.diff(), entry, receipts)
        try:
            self._keep(task, str(status), Overlay(self._workspace) if landed else None, ended)
        except KeystrokeError as error:  # what was done is done; only going on with it is not possible
            task.note(str(error), failed=True)
        self._sink(ended)
        return ended

    # ── beginning, and keeping ────────────────────────────────────────────────────────────────

    def _working(self, instruction: str, copies: Replicas, previous: TaskRecord | None) -> Working:
        messages: list[Message] = []
        receipts: tuple[Receipt, ...] = ()
        overlay = self.overlay
        if previous is not None:
            self._id, self._created = previous.id, previous.created or self._created
            overlay = self.overlay = Overlay.restored(self._workspace, previous.overlay)
            messages, receipts = list(previous.messages), previous.receipts
            instruction = instruction.strip() or previous.instruction
        runner = Runner(
            self._sandbox,
            overlay,
            copies,
            self._approvals.command,
            limits=self._limits,
            network=self._network,
            interrupt=self._interrupt,
        )
        first = self._options.files[0] if self._options.files else "."
        rules = project_rules(self._workspace.root / first, self._workspace.root).header()
        task = Working(
            instruction,
            self._options,
            overlay,
            runner,
            rules,
            self._sink,
            self._interrupt,
            self._steering,
            keep=lambda: self._keep(task, "working"),
            account=Account(receipts),
            messages=messages,
            tries=previous.tries if previous is not None else 0,
        )
        runner.on_output = task.printed
        self._keep(task, "working")
        return task

    def _keep(
        self, task: Working, status: str, overlay: Overlay | None = None, ended: Ended | None = None
    ) -> None:
        if self._records is None:
            return
        self._records.save(
            TaskRecord(
                id=self._id,
                instruction=task.instruction,
                status=status,
                model=self._chat.name,
                messages=as_records(task.messages),
                overlay=(overlay or task.overlay).saved(),
                receipts=tuple(task.account.receipts),
                tries=task.tries,
                check=self._options.check,
                files=self._options.files,
                time=time.time(),
                created=self._created,
                workspace=str(self._workspace.root),
                owner=self._owner,
                given=self._given,
                line=ended.line if ended is not None else "",
                diff=ended.diff if ended is not None else "",
                entry=ended.entry if ended is not None else "",
                pid=os.getpid(),
            )
        )


def sums(receipts: Sequence[Receipt]) -> str:
    """One line a model: what it took."""
    return "\n".join(f"{receipt.model}: {receipt.line()}" for receipt in receipts)
