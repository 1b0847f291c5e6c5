"""Finds hints that a valid change is incomplete: a name or text of the task is missing, or a function
only calls itself.

A hint is worth one more question. If the second answer is no better, the first one stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from keystroke.analysis.outline import UnitKind, outline, walk_units
from keystroke.analysis.syntax import language_of
from keystroke.assist.edit.mentions import read_mentions

_SHAPE = re.compile(r"_|\.|[a-z][A-Z]")
_TEXT = re.compile(
    r"\b(?:text|message|string|saying|says|label|title|prefix|suffix|separator)\s+(?:is\s+)?"
    r"(?:'([^'\n]{2,80})'|\"([^\"\n]{2,80})\"|`([^`\n]{2,80})`)",
    re.IGNORECASE,
)
_SHORTEST = 4  # letters of a name; "e.g." is none
_BRANCH = re.compile(
    r"\b(?:if|for|while|switch|match|case|try|catch|except|and|or|unless|when|lambda)\b|\?|&&|\|\||=>"
)


def find_doubt(old: str, new: str, path: str, instruction: str) -> str | None:
    """One sentence that a model can act on, or None."""
    task = instruction if "\n" not in instruction.strip() else ""  # pasted output names many things
    for name in _find_missing_names(old, new, language_of(path), task):
        return f"the task names {name}, and your code does not have it"
    for found in _TEXT.findall(task):
        text = next(filter(None, found))
        if text not in new:
            return f"the task gives the text {text!r}, and your code does not have it"
    if (function := _find_endless_function(old, new, language_of(path))) is not None:
        return f"{function} calls itself without an end"
    return None


def _find_missing_names(old: str, new: str, language: str | None, instruction: str) -> Iterator[str]:
    """Names that the instruction writes as code and neither text contains. Errors do not count: an
    instruction often names the error that happens now."""
    defined = {unit.short for unit in walk_units(outline(old, language))}
    for mention in read_mentions(instruction):
        text = mention.text
        written = f"`{text}" in instruction or f"{text}(" in instruction or bool(_SHAPE.search(text))
        if not (mention.code and mention.is_location and written and len(text) >= _SHORTEST):
            continue
        first, _, last = text.rpartition(".")
        if first and first.rpartition(".")[2] not in defined:
            # Code contains `strings.Join` literally, but `dict.setdefault` with a variable's name.
            there = text in old or text in new or new.count(f".{last}") > old.count(f".{last}")
        else:
            there = last in old or last in new  # the method `Cart.total` is written `total`
        if not there:
            yield text


def _find_endless_function(old: str, new: str, language: str | None) -> str | None:
    """A function that newly calls itself unconditionally."""
    before = dict(_find_self_calls(old, language))
    for name, calls in _find_self_calls(new, language):
        if calls and before.get(name) is False:
            return name.rpartition(".")[2]
    return None


def _find_self_calls(text: str, language: str | None) -> list[tuple[str, bool]]:
    """Each function, and whether it calls itself unconditionally."""
    if language is None:
        return []
    lines = text.split("\n")
    found = []
    for unit in walk_units(outline(text, language)):
        if unit.kind is not UnitKind.FUNCTION or not unit.name:
            continue
        source = "\n".join(lines[unit.start : unit.end])
        body = source[source.find(unit.header) + len(unit.header) :]
        itself = re.search(rf"(?:\b(?:self|this)\.|(?<![\w.>]))(?<!def ){re.escape(unit.short)}\s*\(", body)
        found.append((unit.name, itself is not None and not _BRANCH.search(body)))
    return found
