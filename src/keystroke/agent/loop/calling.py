"""A model with tools at work: it asks for one thing after the other until it says that the task is done.

Each answer is read strictly; one that is no call and looks like one is told what is wrong with it. The
same call with the same result thrice, or too many steps, is the end. What tools return is data: which tools
there are and what they may do was decided before and is not looked at again.
"""

from __future__ import annotations

from collections import Counter

from keystroke.agent.chat.calls import read_calls
from keystroke.agent.loop import prompts
from keystroke.agent.loop.edit_judge import said
from keystroke.agent.loop.working import Hands, Working
from keystroke.agent.tools import Call, Edit, Read, Run, Search, Tool, Toolbox
from keystroke.engine.generation import Finish

_SAME = 3  # times that the same call may come back with the same result
_BAD = 3  # answers in a row that are no calls though they look like some


class Calling(Hands):
    def work(self, task: Working) -> bool:
        tools: list[Tool] = [Read(task.overlay), Search(task.overlay), Edit(task.overlay)]
        if task.options.may_run:
            tools.append(Run(task.runner))
        tools += task.tools
        box = Toolbox(tools)
        if not task.messages:
            task.messages += prompts.opening(
                task.instruction, task.overlay.files(), task.rules, runs=task.options.may_run
            )
            if task.failure and task.options.check:
                task.messages.append(prompts.check_failed(task.options.check, task.failure))
        else:
            task.messages.append({"role": "user", "content": task.instruction})
        for number in range(max(1, task.options.tries)):
            if not self._turns(task, box):
                return False
            if not task.options.check:
                return True
            ended = task.check()
            if ended.ok:
                return True
            task.tries += 1
            task.failure = said(ended)
            if number + 1 < task.options.tries:
                task.messages.append(prompts.check_failed(task.options.check, task.failure))
                task.keep()
        return False

    def _turns(self, task: Working, box: Toolbox) -> bool:
        """Answers until one makes no call. False where the model does not get anywhere."""
        seen: Counter[tuple[str, str, str]] = Counter()
        bad = 0
        for _ in range(task.options.max_steps):
            task.interrupt.check()
            reply = self.chat.reply(
                task.messages,
                box.specifications(),
                max_tokens=task.options.max_tokens,
                interrupt=task.interrupt,
                steering=task.steering,
                on_text=task.wrote,
            )
            task.spent(reply.receipt)
            task.messages += reply.said
            problem = "" if reply.calls else read_calls(reply.text).problem
            if reply.finish is Finish.LENGTH and not reply.calls:
                problem = problem or "it was cut off; answer in fewer words"
            if problem:
                bad += 1
                task.note(f"the answer cannot be used: {problem:.100}", failed=True)
                if bad == _BAD:
                    return False
                task.messages.append(prompts.bad_call(problem, box.names))
                continue
            bad = 0
            if not reply.calls:
                if reply.text.strip():
                    task.note(reply.text.strip()[:2000])
                return True
            keys = [c["id"] for c in reply.said[-1].get("tool_calls", ())]
            for at, call in enumerate(reply.calls):
                if not self._made(task, box, call, keys[at] if at < len(keys) else f"call_{at}", seen):
                    return False
            task.keep()
        task.note(f"it did not come to an end within {task.options.max_steps} steps", failed=True)
        return False

    def _made(
        self, task: Working, box: Toolbox, call: Call, key: str, seen: Counter[tuple[str, str, str]]
    ) -> bool:
        """Make one call. False where it is one too many of its kind."""
        task.doing(box.about(call))
        before = dict(task.overlay.texts)
        result = box.make(call)
        task.messages.append(prompts.answered(call, result, key))
        if result.failed:
            task.note(result.text.splitlines()[0][:200] if result.text else "it failed", failed=True)
        if dict(task.overlay.texts) != before:
            task.changed()
        what = (call.name, call.arguments, result.text)
        seen[what] += 1
        if seen[what] >= _SAME:
            task.note(
                f"the same call of {call.name} came {_SAME} times; it goes round in circles", failed=True
            )
            return False
        if seen[what] == _SAME - 1:
            task.messages.append(prompts.looped(call))
        return True
