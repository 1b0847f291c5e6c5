"""Search/replace blocks: the prompt and the parser.

The parser accepts the variants that models write (fences, marker lengths, decorated paths, a divider that is
also content) and never guesses which file is meant.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from keystroke.assist.edit.operations import Addition, EditFailure, Operation, Replacement, SearchReplace
from keystroke.assist.edit.operations import EditFailureReason as Reason

Message = Mapping[str, str]

_SYSTEM = """You change source files. Answer only with search/replace blocks, no explanation.

A block is:
path/of/the/file
<<<<<<< SEARCH
lines to find, copied exactly from the file
=======
the lines that take their place
>>>>>>> REPLACE

Rules:
- Change as little as possible. Leave out everything that stays the same.
- SEARCH holds whole lines, with their indentation, and enough of them to occur only once in the file.
- Several places need several blocks. To delete lines, leave the lower part empty.
- To make a new file, leave SEARCH empty and write the file below the divider."""

# The words distinguish these from the conflict markers of a merge.
_OPEN = re.compile(r"^<{5,9}\s*(?:SEARCH|ORIGINAL)\b.*$")
_DIVIDER = re.compile(r"^={5,9}\s*$")
_CLOSE = re.compile(r"^>{5,9}\s*(?:REPLACE|UPDATED)\b.*$")
_MAX_READINGS = 16  # divider lines tried in one block
_FENCE = re.compile(r"^\s*(?:```|~~~)")
_DECORATION = re.compile(
    r"^(?:#+\s+|[-*]\s+|\*\*|//\s*|#\s*)?(?:(?:File(?:name)?|Path)\s*:\s*)?", re.IGNORECASE
)


def block_messages(files: Mapping[str, str], instruction: str, rules: str = "") -> list[Message]:
    """The messages that ask for blocks. Files come first, so that their KV cache serves every instruction."""
    system = f"{_SYSTEM}\n\nThe project's rules:\n{rules.strip()}" if rules.strip() else _SYSTEM
    parts = [f"{path}\n{fence_text(text)}" for path, text in files.items()]
    return chat(system, "\n\n".join([*parts, f"Task: {instruction.strip()}"]))


def chat(system: str, user: str) -> list[Message]:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def retry_messages(answer: str, failures: Sequence[EditFailure]) -> list[Message]:
    """The messages to a model whose blocks did not match."""
    problems = "\n".join(f"- {failure.path or 'answer'}: {failure.message}" for failure in failures)
    return [
        {"role": "assistant", "content": answer},
        {
            "role": "user",
            "content": f"Nothing was changed, because:\n{problems}\nAnswer again, completely and corrected.",
        },
    ]


def fence_text(text: str, tag: str = "") -> str:
    """The text between fences longer than any inside it; `tag` names its language."""
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{tag}\n{text}{'' if not text or text.endswith(chr(10)) else chr(10)}{fence}"


def has_blocks(answer: str) -> bool:
    return any(_OPEN.match(line) for line in answer.splitlines())


def parse_blocks(answer: str, paths: Sequence[str]) -> list[Operation] | EditFailure:
    """The operations of an answer. `paths` are the files shown: a block that names none means the one before,
    or the only file there is."""
    lines = answer.replace("\r\n", "\n").split("\n")
    operations: list[Operation] = []
    current = paths[0] if len(paths) == 1 else None
    index = 0
    while index < len(lines):
        if not _OPEN.match(lines[index]):
            index += 1
            continue
        path = _path_before(lines, index, paths) or current
        close = next((i for i in range(index + 1, len(lines)) if _CLOSE.match(lines[i])), None)
        reopened = next((i for i in range(index + 1, close or len(lines)) if _OPEN.match(lines[i])), None)
        if close is None or reopened is not None:
            return EditFailure(
                Reason.TRUNCATED, path or "", "a block begins but does not end; write it completely"
            )
        if path is None:
            return EditFailure(
                Reason.NO_PATH, "", "a block does not name its file; put the path on the line before it"
            )
        body = lines[index + 1 : close]
        cuts = [cut for cut, line in enumerate(body) if _DIVIDER.match(line)][:_MAX_READINGS]
        # The longest search first: a shorter one would leave divider lines behind.
        readings = tuple(SearchReplace(tuple(body[:cut]), tuple(body[cut + 1 :])) for cut in reversed(cuts))
        if not readings:
            return EditFailure(
                Reason.TRUNCATED, path, "a block has no ======= between its two parts; write it completely"
            )
        shortest = readings[-1]
        if not any(line.strip() for line in shortest.search) and path not in paths:
            operations.append(Addition(path, "".join(f"{line}\n" for line in shortest.replace)))
        else:
            operations.append(Replacement(path, readings))
        current = path
        index = close + 1
    return operations


def _path_before(lines: Sequence[str], index: int, paths: Sequence[str]) -> str | None:
    """The path written above a block: the nearest line that is neither blank nor a bare fence."""
    for line in reversed(lines[max(0, index - 3) : index]):
        text = line.strip()
        if _FENCE.match(text):
            text = text.lstrip("`~").partition(" ")[2].strip() or (text.lstrip("`~") if "/" in text else "")
        if not text:
            continue
        if _CLOSE.match(text):
            return None
        name = _DECORATION.sub("", text, count=1).strip().strip("`*\"'").rstrip(":").strip("`*\"' ")
        if name in paths:
            return name
        # Only a single word that looks like a path counts.
        return name if name and re.fullmatch(r"[^\s<>|:*?\"]+", name) and re.search(r"[./\\]", name) else None
    return None
