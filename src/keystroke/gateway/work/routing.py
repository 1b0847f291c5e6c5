"""Which model does a piece of work, and why.

A decision from words, size, task and what each model can do, made in microseconds and said aloud: every
route carries its reason, and naming a model (or a role) always overrides. It knows what models can, not
engines. Work that no model here can do is refused with what to add, never given to one that would babble.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from keystroke.gateway.work.priority import Priority
from keystroke.protocol.faults import NoSuitableModel
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
class Candidate:
    """A model as a route sees it. `converses`: it follows instructions. `here`: this server runs it."""

    name: str
    role: str
    converses: bool = True
    here: bool = True


@dataclass(frozen=True, slots=True)
class Task:
    """What a route is decided on. `words` is what the user said last; `size` is the prompt in characters.
    `converses`: only a model that follows instructions will do. `deep`: the deep one where there is one.
    `here`: asked at every key, so an engine of this server where there is one."""

    priority: Priority
    words: str = ""
    size: int = 0
    background: bool = False
    effort: str | None = None  # reasoning.effort where the client set one
    converses: bool = False
    deep: bool = False
    here: bool = False


@dataclass(frozen=True, slots=True)
class Router:
    """Chooses among `candidates`, the first of a role standing for it."""

    candidates: Sequence[Candidate]
    deep_from_chars: int = 120_000  # about 30k tokens: past this a small model loses the thread

    def choose(self, task: Task) -> tuple[str, str, str]:
        """(model name, role, reason). Raises NoSuitableModel."""
        able = [c for c in self.candidates if c.converses or not task.converses]
        if not able:
            names = ", ".join(c.name for c in self.candidates)
            raise NoSuitableModel(
                f"No model here follows instructions ({names} only completes code); add one, for example "
                "with `keystroke models add coder`, or name a remote server in [models.NAME].",
                param="model",
            )
        role, reason = self._role(task)
        wanted = [c for c in able if c.role == role]
        if role == "fast" and task.converses:  # talk has a model of its own where one was chosen
            wanted = [c for c in able if c.role == "chat"] or wanted
        if task.here:
            wanted = [c for c in wanted if c.here] or [c for c in able if c.here] or wanted
        if wanted:
            return wanted[0].name, wanted[0].role, reason
        other = able[0]
        missing = any(c.role == role for c in self.candidates)
        why = f"no {role} model follows instructions" if missing else f"no {role} model is configured"
        return other.name, other.role, f"{reason}, but {why}"

    def _role(self, task: Task) -> tuple[str, str]:
        if task.deep:
            return "deep", f"{task.priority.label} work by instruction is the deep model's"
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
