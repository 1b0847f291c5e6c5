"""Functions of a file or a project that only hand a text of their caller on: to a shell, or to a database.

Law: told from the text of one function, without parsing: a parameter that is given as it came to a call that
runs it. A call of such a function is a call of what it hands on to.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

COMMAND, STATEMENT = "@runs.command", "@runs.statement"
_HEAD = re.compile(r"^[ \t]*(?:async\s+)?def\s+(\w+)\s*\(([^)]*)\)", re.MULTILINE)
_PARAMETER = re.compile(r"(?:^|,)\s*\*{0,2}(\w+)")
_HANDS = {
    COMMAND: re.compile(
        r"\b(?:os\.system|os\.popen|\w*\.exec_command|(?:subprocess\.)?get(?:status)?output|\w+_shell)\(\s*(\w+)\s*[,)]"
        r"|\b(?:subprocess\.\w+|Popen|check_output|check_call)\(\s*(\w+)\s*,[^()]*\bshell\s*=\s*True"
    ),
    STATEMENT: re.compile(r"\.(?:execute|executescript|raw|read_sql(?:_query)?)\(\s*(\w+)\s*[,)]"),
}
_WORDS = ("system", "popen", "exec_command", "output", "shell", "execute", "raw(", "read_sql")


@lru_cache(maxsize=4096)
def wrapper_of(source: str) -> tuple[str, str] | None:
    """The name of the function a unit of Python defines and what it hands its parameter on to, or None."""
    if not any(word in source for word in _WORDS):
        return None
    head = _HEAD.search(source)
    if head is None:
        return None
    given = frozenset(_PARAMETER.findall(head[2]))
    body = source[head.end() :]
    for kind, pattern in _HANDS.items():
        for found in pattern.finditer(body):
            name = found[1] or (found[2] if found.lastindex and found.lastindex > 1 else None)
            if name in given and not re.search(rf"^\s*{name}\s*=(?!=)", body, re.MULTILINE):
                return head[1], kind
    return None


def wrappers(sources: Iterable[str]) -> Mapping[str, str]:
    """Names of functions and what a call of each runs."""
    return dict(found for source in sources if (found := wrapper_of(source)) is not None)


def project_wrappers(texts: Iterable[str]) -> dict[str, str]:
    """The same for whole files of one project: a function ends where the next begins."""
    found: dict[str, str] = {}
    for text in texts:
        if not any(word in text for word in _WORDS):
            continue
        heads = list(_HEAD.finditer(text))
        for at, head in enumerate(heads):
            end = heads[at + 1].start() if at + 1 < len(heads) else len(text)
            one = wrapper_of(text[head.start() : end])
            if one is not None:
                found[one[0]] = one[1]
    return {name: kind for name, kind in found.items() if len(name) > 3}
