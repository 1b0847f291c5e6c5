"""Which model answers `auto`, and why.

Law: a decision from words, size and task, made in microseconds and said aloud: every route carries its
reason, and naming a model (or a role) always overrides. It knows roles, not engines.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from keystroke.gateway.work.priority import Priority
from keystroke.protocol.response import Routing

# What people say when they want thought, and when they want speed. The user's words beat every other sign.
_WANTS_DEEP = re.compile(
    r"\b(think (hard|deeply|carefully|it through)|take your time|in depth|step by step plan|"
    r"use the (deep|big|large) model|deep model)\b",
    re.IGNORECASE,
)
_WANTS_FAST = re.compile(
    r"\b(quick(ly)?|fast|briefly|one[- ]liner|use the (fast|small) model|fast model)\b", re.IGNORECASE
)
_HARD_TASK = re.compile(
    r"\b(re-?design|architect(ure)?|migrat(e|ion)|re-?write the|port (this|the)|root cause|race condition|"
    r"deadlock|prove|across the (code ?base|repository|project)|multiple files|end[- ]to[- ]end|"
    r"implement (a|an|the) (feature|service|protocol|parser|compiler|scheduler))\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Task:
    """What a route is decided on. `words` is what the user said last; `size` is the prompt in characters."""

    priority: Priority
    words: str
    size: int
    background: bool = False
    effort: str | None = None  # reasoning.effort where the client set one


@dataclass(frozen=True, slots=True)
class Router:
    """`fast` and `deep` are model names, None where the registry has none of that role."""

    fast: str | None
    deep: str | None
    deep_from_chars: int = 120_000  # about 30k tokens: past this a small model loses the thread

    def choose(self, task: Task) -> tuple[str | None, str, str]:
        """(model name, role, reason)."""
        role, reason = self._role(task)
        name = self.deep if role == "deep" else self.fast
        if name is not None:
            return name, role, reason
        other, name = ("fast", self.fast) if role == "deep" else ("deep", self.deep)
        return name, other, f"{reason}, but no {role} model is configured"

    def _role(self, task: Task) -> tuple[str, str]:
        if task.priority < Priority.CHAT:
            return "fast", f"{task.priority.label} work is interactive"
        words = task.words[-4000:]
        if found := _WANTS_DEEP.search(words):
            return "deep", f"the user asked for depth ({found[0].lower()!r})"
        if found := _WANTS_FAST.search(words):
            return "fast", f"the user asked for speed ({found[0].lower()!r})"
        if task.effort in ("high", "xhigh"):
            return "deep", f"reasoning effort is {task.effort}"
        if task.background:
            return "deep", "background work does not keep anyone waiting"
        if task.size >= self.deep_from_chars:
            return "deep", f"the prompt is long ({task.size:,} characters)"
        if found := _HARD_TASK.search(words):
            return "deep", f"the task looks hard ({found[0].lower()!r})"
        return "fast", "a short interactive turn"


def named(requested: str, model: str, role: str) -> Routing:
    return Routing(requested=requested, model=model, role=role, reason="named by the client")
