"""Chooses the model for a request, and says why.

Decides from the user's words, the prompt's size, the task and what each model can do, in microseconds; every
routing carries its reason. Naming a model or a role always overrides. A request that no model here can serve
is refused with what to install.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from keystroke.gateway.work.priority import Priority
from keystroke.protocol.faults import NoSuitableModel

# Phrases that ask for depth or for speed. They take precedence over every other signal.
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
class ModelCandidate:
    """A model that routing can choose. `converses`: it follows instructions. `here`: this server runs it."""

    name: str
    role: str
    converses: bool = True
    here: bool = True


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """What routing decides on. `words` is the user's last message; `size` is the prompt in characters.
    `converses`: the model has to follow instructions. `deep`: prefer the deep role. `here`: prefer an engine
    of this server, for requests at every key."""

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
    """Chooses among `candidates`; the first of a role represents it."""

    candidates: Sequence[ModelCandidate]
    deep_from_chars: int = 120_000  # about 30k tokens: small models answer badly beyond

    def choose(self, task: RoutingRequest) -> tuple[str, str, str]:
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
        preferred = [c for c in able if c.role == role]
        if role == "fast" and task.converses:  # chat has a model of its own where one is configured
            preferred = [c for c in able if c.role == "chat"] or preferred
        if task.here:
            preferred = [c for c in preferred if c.here] or [c for c in able if c.here] or preferred
        if preferred:
            return preferred[0].name, preferred[0].role, reason
        other = able[0]
        missing = any(c.role == role for c in self.candidates)
        why = f"no {role} model follows instructions" if missing else f"no {role} model is configured"
        return other.name, other.role, f"{reason}, but {why}"

    def _role(self, task: RoutingRequest) -> tuple[str, str]:
        if task.deep:
            return "deep", f"{task.priority.label} work with an instruction goes to the deep model"
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
