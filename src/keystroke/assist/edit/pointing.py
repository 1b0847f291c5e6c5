"""The model's own pointing: which parts of the files must change, asked with a numbered outline.

The prompt and the parser side by side. A number that is not in the list means nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from keystroke.analysis.outline import Unit, flattened, outline
from keystroke.analysis.syntax import language_of
from keystroke.assist.edit.blocks import Message

MOST_PARTS = 150  # shown; a longer list is more than a small model reads
MOST_CHOSEN = 4
_SYSTEM = """You find the places in source files that a change needs. You answer with their numbers, the most
important one first, and nothing else."""


@dataclass(frozen=True, slots=True)
class Part:
    path: str
    unit: Unit


def parts_of(files: Mapping[str, str]) -> list[Part]:
    """What can be pointed at: functions, members and statements, each on its own."""
    found = [
        Part(path, unit)
        for path, text in files.items()
        for unit in flattened(outline(text, language_of(path)))
        if not unit.members
    ]
    return found[:MOST_PARTS]


def point_messages(files: Mapping[str, str], parts: list[Part], instruction: str) -> list[Message]:
    """The conversation that asks for numbers."""
    shown: list[str] = []
    path = ""
    for number, part in enumerate(parts, 1):
        if part.path != path:
            path = part.path
            shown.append(f"{path}:")
        owner = part.unit.name.rpartition(".")[0]
        lines = files[path].split("\n")[part.unit.start : part.unit.end]
        said = next((line.strip() for line in lines if line.strip()[:3] in ('"""', "///", "/**")), "")
        where = f" (in {owner})" if owner else ""
        shown.append(f"{number}. {part.unit.header[:100]}{where} {said[:100]}".rstrip())
    question = f"Task: {instruction.strip()}\n\nWhich of these parts must be changed for the task? Numbers:"
    return [
        {"role": "system", "content": _SYSTEM},
        {"role": "user", "content": "\n".join(shown) + f"\n\n{question}"},
    ]


def parse_pointing(answer: str, parts: list[Part]) -> list[Part]:
    """The parts an answer names, in its order."""
    numbers = [int(found) for found in re.findall(r"\b\d{1,4}\b", answer[:400])]
    chosen = [parts[number - 1] for number in dict.fromkeys(numbers) if 1 <= number <= len(parts)]
    return chosen[:MOST_CHOSEN]
