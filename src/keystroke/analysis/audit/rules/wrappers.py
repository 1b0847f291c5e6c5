"""Finds functions of a file or a project that pass a parameter unchanged to a shell, or hide a builtin.

A call of one that passes a parameter on is treated as a call of a shell. The search is lexical and looks at
one function at a time. SQL needs no such list, because a statement is recognised by its words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

COMMAND = "@runs.command"
_HEAD = re.compile(r"^[ \t]*(?:async\s+)?def\s+(\w+)\s*\(([^)]*)\)", re.MULTILINE)
_PARAMETER = re.compile(r"(?:^|,)\s*\*{0,2}(\w+)")
_SHELL_CALL = re.compile(
    r"\b(?:os\.system|os\.popen|[\w.]*\.exec_command|(?:subprocess\.)?get(?:status)?output|\w+_shell)\(\s*(\w+)\s*[,)]"
    r"|\b(?:subprocess\.\w+|Popen|check_output|check_call)\(\s*(\w+)\s*,[^()]*\bshell\s*=\s*True"
)
_WORDS = ("system", "popen", "exec_command", "output", "shell")


_HIDES = re.compile(r"^(?:async\s+)?def\s+(compile|eval|exec|input|open)\s*\(", re.MULTILINE)


def hidden_builtins(text: str) -> dict[str, str]:
    """The builtins that a module defines anew, and the path of what is called instead."""
    return {name: f"?.{name}" for name in _HIDES.findall(text)}


@lru_cache(maxsize=4096)
def wrapper_of(source: str) -> str | None:
    """The name of the Python function that a unit defines, if it passes a parameter to a shell."""
    if not any(word in source for word in _WORDS):
        return None
    head = _HEAD.search(source)
    if head is None:
        return None
    given = frozenset(_PARAMETER.findall(head[2]))
    body = source[head.end() :]
    for found in _SHELL_CALL.finditer(body):
        name = found[1] or found[2]
        if name in given and not re.search(rf"^\s*{name}\s*=(?!=)", body, re.MULTILINE):
            return head[1]
    return None


def shell_wrappers(sources: Iterable[str]) -> Mapping[str, str]:
    """The wrappers among these units, and what a call of each runs."""
    return {name: COMMAND for source in sources if (name := wrapper_of(source)) is not None}


def project_wrappers(texts: Iterable[str]) -> dict[str, str]:
    """The wrappers in whole files; a function ends where the next one starts."""
    found: set[str] = set()
    for text in texts:
        if not any(word in text for word in _WORDS):
            continue
        heads = list(_HEAD.finditer(text))
        for at, head in enumerate(heads):
            end = heads[at + 1].start() if at + 1 < len(heads) else len(text)
            name = wrapper_of(text[head.start() : end])
            if name is not None and len(name) > 3:
                found.add(name)
    return dict.fromkeys(found, COMMAND)
