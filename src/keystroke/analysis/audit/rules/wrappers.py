"""Functions of a file or a project that only hand a text of their caller on to a shell.

Told from the text of one function, without parsing: a parameter that is given as it came to a call that
runs it. A call of such a function is a call of what it hands on to. Statements need no such list: a text of
SQL is known by its words wherever it is given.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

COMMAND = "@runs.command"
_HEAD = re.compile(r"^[ \t]*(?:async\s+)?def\s+(\w+)\s*\(([^)]*)\)", re.MULTILINE)
_PARAMETER = re.compile(r"(?:^|,)\s*\*{0,2}(\w+)")
_HANDS = re.compile(
    r"\b(?:os\.system|os\.popen|[\w.]*\.exec_command|(?:subprocess\.)?get(?:status)?output|\w+_shell)\(\s*(\w+)\s*[,)]"
    r"|\b(?:subprocess\.\w+|Popen|check_output|check_call)\(\s*(\w+)\s*,[^()]*\bshell\s*=\s*True"
)
_WORDS = ("system", "popen", "exec_command", "output", "shell")


@lru_cache(maxsize=4096)
def wrapper_of(source: str) -> str | None:
    """The name of the function a unit of Python defines, where it hands a parameter to a shell; or None."""
    if not any(word in source for word in _WORDS):
        return None
    head = _HEAD.search(source)
    if head is None:
        return None
    given = frozenset(_PARAMETER.findall(head[2]))
    body = source[head.end() :]
    for found in _HANDS.finditer(body):
        name = found[1] or found[2]
        if name in given and not re.search(rf"^\s*{name}\s*=(?!=)", body, re.MULTILINE):
            return head[1]
    return None


def wrappers(sources: Iterable[str]) -> Mapping[str, str]:
    """Names of functions and what a call of each runs."""
    return {name: COMMAND for source in sources if (name := wrapper_of(source)) is not None}


def project_wrappers(texts: Iterable[str]) -> dict[str, str]:
    """The same for whole files of one project: a function ends where the next begins."""
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
