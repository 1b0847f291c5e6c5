"""The strategy for models that call tools: one call after the other until the model says that the task is
done.

An answer that looks like a call but is malformed is sent back with the reason. The same call with the same
result three times, or too many steps, ends the task. Results of tools are data: they change neither the
tools nor their permissions.
"""

from __future__ import annotations

from collections import Counter
from contextlib import closing

from keystroke.agent.chat.calls import parse_calls
from keystroke.agent.chat.model import Reply
from keystroke.agent.loop import prompts
from keystroke.agent.loop.early_reads import EarlyReads
from keystroke.agent.loop.edit_checker import failure_message
from keystroke.agent.loop.state import AgentStrategy, TaskState
from keystroke.agent.tools import AgentTool, EditTool, ReadTool, RunTool, SearchTool, Toolbox, ToolInvocation
from keystroke.engine.generation import Finish
from keystroke.errors import ContextOverflow

_KEPT_RESULTS = (3, 1)  # results of tools that stay whole, each time the conversation is too long
_MAX_REPEATS = 3  # of a call with the same result
_MAX_MALFORMED = 3  # answers in a row that look like calls and are none


class ToolCallingStrategy(AgentStrategy):
    def run(self, task: TaskState) -> bool:
        tools: list[AgentTool] = [ReadTool(task.overlay), SearchTool(task.overlay), EditTool(task.overlay)]
        if task.options.may_run:
            tools.append(RunTool(task.runner))
        box = Toolbox([*tools, *task.tools])
        with closing(EarlyReads(box)) as reads:
            return self._run(task, box, reads)

    def _run(self, task: TaskState, box: Toolbox, reads: EarlyReads) -> bool:
        check = task.options.check
        if not task.messages:
            task.messages += prompts.opening_messages(
                task.instruction, task.overlay.files(), task.rules, runs=task.options.may_run
            )
            if task.failure and check:
                task.messages.append(prompts.check_failed(check, task.failure))
        else:
            task.messages.append({"role": "user", "content": task.instruction})
        for number in range(max(1, task.options.tries)):
            if not self._call_until_done(task, box, reads):
                return False
            if number == 0 and (damage := task.find_damage(complete=True)):
                task.note(f"the change is not right yet: {damage[0]:.200}", failed=True)
                task.messages.append(prompts.damage_found(damage))
                if not self._call_until_done(task, box, reads):
                    return False
            if not check:
                return True
            result = task.run_check()
            if result.ok:
                return True
            task.tries += 1
            task.failure = failure_message(result)
            if number + 1 < task.options.tries:
                task.messages.append(prompts.check_failed(check, task.failure))
                task.save()
        return False

    def _call_until_done(self, task: TaskState, box: Toolbox, reads: EarlyReads) -> bool:
        """Ask for answers until one makes no call. False where the model makes no progress."""
        seen: Counter[tuple[str, str, str]] = Counter()
        malformed = 0
        for _ in range(task.options.max_steps):
            task.control.interrupt.check()
            reads.next_answer()
            with task.busy:
                reply = self._reply(task, box, reads)
            task.add_receipt(reply.receipt)
            if reply.finish is Finish.LENGTH and not reply.calls and self._shorten(task, _KEPT_RESULTS[1]):
                continue  # the answer was cut because the conversation left no room for it
            task.messages += reply.messages
            problem = "" if reply.calls else parse_calls(reply.text).problem
            if reply.finish is Finish.LENGTH and not reply.calls:
                problem = problem or "it was cut off; answer in fewer words"
            if problem:
                malformed += 1
                task.note(f"the answer cannot be used: {problem:.100}", failed=True)
                if malformed == _MAX_MALFORMED:
                    return False
                task.messages.append(prompts.bad_call(problem, box.names))
                continue
            malformed = 0
            if not reply.calls:
                if reply.text.strip():
                    task.note(reply.text.strip()[:2000])
                return True
            ids = [call["id"] for call in reply.messages[-1].get("tool_calls", ())]
            for at, call in enumerate(reply.calls):
                call_id = ids[at] if at < len(ids) else f"call_{at}"
                if not self._invoke(task, box, reads, call, call_id, seen):
                    return False
            task.save()
        task.note(f"it did not finish within {task.options.max_steps} steps", failed=True)
        return False

    def _reply(self, task: TaskState, box: Toolbox, reads: EarlyReads) -> Reply:
        """The next answer; where the conversation is too long, what tools returned earlier is shortened."""
        for keep in _KEPT_RESULTS:
            try:
                return self.model.reply(
                    task.messages,
                    task.answer_options(tools=box.specifications()),
                    steering=task.control.steering,
                    on_text=task.add_text,
                    on_call=reads.start,
                )
            except ContextOverflow:
                if not self._shorten(task, keep) and keep == _KEPT_RESULTS[-1]:
                    raise
        return self.model.reply(task.messages, task.answer_options(tools=box.specifications()))

    @staticmethod
    def _shorten(task: TaskState, keep: int) -> bool:
        """Cut old results of tools; returns whether there was something to cut."""
        before = sum(len(str(message.get("content"))) for message in task.messages)
        task.messages[:] = prompts.shorten_results(task.messages, keep)
        cut = before - sum(len(str(message.get("content"))) for message in task.messages)
        if cut:
            task.note(f"the conversation is too long; {cut:,} characters of results are left out")
        return cut > 0

    def _invoke(
        self,
        task: TaskState,
        box: Toolbox,
        reads: EarlyReads,
        call: ToolInvocation,
        call_id: str,
        seen: Counter[tuple[str, str, str]],
    ) -> bool:
        """Make one call. False where it was repeated too often."""
        task.begin_step(box.describe(call))
        before = dict(task.overlay.texts)
        result = reads.result(call)
        task.messages.append(prompts.tool_result(call, result, call_id))
        if result.failed:
            task.note(result.text.splitlines()[0][:200] if result.text else "it failed", failed=True)
        if dict(task.overlay.texts) != before:
            task.report_change()
        key = (call.name, call.arguments, result.text)
        seen[key] += 1
        if seen[key] >= _MAX_REPEATS:
            task.note(f"the same call of {call.name} was repeated {_MAX_REPEATS} times", failed=True)
            return False
        if seen[key] == _MAX_REPEATS - 1:
            task.messages.append(prompts.repeated_call(call))
        return True
