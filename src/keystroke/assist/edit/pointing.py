"""Asks a model which parts of the files must change, with a numbered outline: prompt and parser."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from keystroke.analysis.outline import OutlineUnit, outline, walk_units
from keystroke.analysis.syntax import language_of
from keystroke.assist.edit.blocks import Message, chat

MOST_PARTS = 150  # shown; a small model does not cope with more
MOST_CHOSEN = 4
_SYSTEM = """You find the places in source files that a change needs. You answer with their numbers, the most
important one first, and nothing else."""


@dataclass(frozen=True, slots=True)
class OutlinePart:
    path: str
    unit: OutlineUnit


def list_parts(files: Mapping[str, str]) -> list[OutlinePart]:
    """The parts to choose from: functions, members and statements."""
    found = [
        OutlinePart(path, unit)
        for path, text in files.items()
        for unit in walk_units(outline(text, language_of(path)))
        if not unit.members
    ]
    return found[:MOST_PARTS]


def point_messages(files: Mapping[str, str], parts: list[OutlinePart], instruction: str) -> list[Message]:
    shown: list[str] = []
    path = ""
    for number, part in enumerate(parts, 1):
        if part.path != path:
            path = part.path
            shown.append(f"{path}:")
        owner = part.unit.name.rpartition(".")[0]
        lines = files[path].split("\n")[part.unit.start : part.unit.end]
        remark = next((line.strip() for line in lines if line.strip()[:3] in ('"""', "///", "/**")), "")
        where = f" (in {owner})" if owner else ""
        shown.append(f"{number}. {part.unit.header[:100]}{where} {remark[:100]}".rstrip())
    question = f"Task: {instruction.strip()}\n\nWhich of these parts must be changed for the task? Numbers:"
    return chat(_SYSTEM, "\n".join(shown) + f"\n\n{question}")


def parse_pointing(answer: str, parts: list[OutlinePart]) -> list[OutlinePart]:
    """The parts an answer names, in its order."""
    numbers = [int(found) for found in re.findall(r"\b\d{1,4}\b", answer[:400])]
    chosen = [parts[number - 1] for number in dict.fromkeys(numbers) if 1 <= number <= len(parts)]
    return chosen[:MOST_CHOSEN]
