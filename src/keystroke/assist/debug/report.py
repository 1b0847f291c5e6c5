"""What a program said when it failed: tracebacks and stack traces in its output, as values.

Law: reads text, knows formats, touches no file. Python tracebacks (chained ones, syntax errors, pytest's own
style) give the error and its frames; Node and Go give locations and the sentence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-_]")
_GROUP = re.compile(r"^\s+[|+](?: |$|-)")  # the margin that exception groups draw
_HEAD = re.compile(r"^\s*(?:Exception Group )?Traceback \(most recent call last\):\s*$")
_FRAME = re.compile(r'^\s*File "(?P<path>[^"\n]+)", line (?P<line>\d+)(?:, in (?P<name>.+))?\s*$')
_ERROR = re.compile(
    r"^(?P<kind>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Warning|Interrupt|Exit|Iteration|Group)?)"
    r"(?::\s?(?P<message>.*))?$"
)
_PYTEST = re.compile(r"^(?P<path>[^\s:][^:\n]*\.py):(?P<line>\d+): (?P<kind>[A-Z]\w*)\s*$")
_PYTEST_SAID = re.compile(r"^E\s{1,10}(?P<text>\S.*)$")
_HINT = re.compile(r"\.? Did you (?:mean|forget to import)[: ]+(?:import )?'(?P<name>[\w.]+)'\??\s*$")
_NODE_AT = re.compile(
    r"^\s+at (?:(?P<name>.+?) \()?(?:file://)?(?P<path>[^():\n]+):(?P<line>\d+):(?P<column>\d+)\)?\s*$"
)
_NODE_SAID = re.compile(
    r"^(?:Uncaught )?(?P<kind>[A-Z]\w*(?:Error|Exception)|Error)(?: \[\w+\])?: (?P<message>.*)$"
)
_GO_AT = re.compile(r"^\t(?P<path>\S+\.go):(?P<line>\d+)(?: \+0x[0-9a-f]+)?$")
_GO_SAID = re.compile(r"^(?P<kind>panic|fatal error): (?P<message>.*)$")
_GO_COMPILER = re.compile(r"^(?P<path>\S+\.go):(?P<line>\d+)(?::(?P<column>\d+))?: (?P<message>.+)$")


class Language(StrEnum):
    PYTHON = "python"
    NODE = "javascript"
    GO = "go"


@dataclass(frozen=True, slots=True)
class Frame:
    """A place in a file; line counts from 1, as the program printed it. `column` likewise, 0 if not told."""

    path: str
    line: int
    name: str = ""
    column: int = 0


@dataclass(frozen=True, slots=True)
class Failure:
    """One error with its frames, the innermost last. `hint` is the name the interpreter itself suggests."""

    language: Language
    kind: str
    message: str
    frames: tuple[Frame, ...]
    hint: str = ""


def failures(output: str, limit: int = 20) -> tuple[Failure, ...]:
    """Every failure in a program's output, in order, each once. Of a chain the last is what stopped it."""
    lines = [line.rstrip("\r") for line in _ESCAPES.sub("", output).split("\n")]
    found = _tracebacks([_GROUP.sub("", line) for line in lines])
    told = {(item.kind, item.message) for item in found}
    found += [item for item in _bare_syntax_errors(lines) if (item.kind, item.message) not in told]
    found += _pytest(lines)
    if not found:
        found = [*_node(lines), *_go(lines)]
    return tuple(dict.fromkeys(found))[-limit:]


def _tracebacks(lines: list[str]) -> list[Failure]:
    found: list[Failure] = []
    frames: list[Frame] | None = None  # those of the traceback being read
    for line in lines:
        if _HEAD.match(line):
            frames = []
        elif frames is None:
            continue
        elif frame := _FRAME.match(line):
            frames.append(Frame(frame["path"], int(frame["line"]), frame["name"] or ""))
        elif not line[:1].isspace() and line and frames:
            if said := _ERROR.match(line):
                found.append(_failure(said["kind"], said["message"] or "", frames))
            frames = None
    return found


def _failure(kind: str, message: str, frames: list[Frame]) -> Failure:
    hint = _HINT.search(message)
    words = message[: hint.start()] if hint else message
    name = hint["name"] if hint else ""
    return Failure(Language.PYTHON, kind.rpartition(".")[2], words, tuple(frames), name)


def _bare_syntax_errors(lines: list[str]) -> list[Failure]:
    """A script that does not parse has no traceback: a place, the line, a caret and the error."""
    found: list[Failure] = []
    for index, line in enumerate(lines):
        frame = _FRAME.match(line)
        if frame is None or frame["name"]:
            continue
        for after in lines[index + 1 : index + 5]:
            said = _ERROR.match(after)
            if said and said["kind"] in ("SyntaxError", "IndentationError", "TabError"):
                place = Frame(frame["path"], int(frame["line"]))
                found.append(_failure(said["kind"], said["message"] or "", [place]))
                break
    return found


def _pytest(lines: list[str]) -> list[Failure]:
    found: list[Failure] = []
    said = ""
    frames: list[Frame] = []
    for line in lines:
        if line.startswith(("____", "====")):
            said, frames = "", []
        elif text := _PYTEST_SAID.match(line):
            said = said or text["text"]
        elif place := _PYTEST.match(line):
            frames.append(Frame(place["path"], int(place["line"])))
            if said:
                error = _ERROR.match(said)
                own = error is not None and error["kind"].endswith(place["kind"])
                message = (error["message"] or "") if own and error is not None else said
                found.append(_failure(place["kind"], message, frames))
                said, frames = "", []
        elif between := re.match(r"^(?P<path>[^\s:][^:\n]*\.py):(?P<line>\d+): \s*$", line):
            frames.append(Frame(between["path"], int(between["line"])))
    return found


def _node(lines: list[str]) -> list[Failure]:
    found: list[Failure] = []
    said: tuple[str, str] | None = None
    frames: list[Frame] = []
    for line in [*lines, ""]:
        place = _NODE_AT.match(line)
        if place and said:
            frames.append(Frame(place["path"], int(place["line"]), place["name"] or "", int(place["column"])))
            continue
        if said and frames:
            # Node tells the innermost frame first.
            found.append(Failure(Language.NODE, *said, tuple(reversed(frames))))
            said, frames = None, []
        if error := _NODE_SAID.match(line):
            said = (error["kind"], error["message"])
    return found


def _go(lines: list[str]) -> list[Failure]:
    found: list[Failure] = []
    said: tuple[str, str] | None = None
    frames: list[Frame] = []
    for line in lines:
        if error := _GO_SAID.match(line):
            said = (error["kind"], error["message"])
        elif (place := _GO_AT.match(line)) and said:
            frames.append(Frame(place["path"], int(place["line"])))
        elif wrong := _GO_COMPILER.match(line):
            frame = Frame(wrong["path"], int(wrong["line"]), "", int(wrong["column"] or 0))
            found.append(Failure(Language.GO, "compile error", wrong["message"], (frame,)))
    if said and frames:
        found.append(Failure(Language.GO, *said, tuple(reversed(frames))))
    return found
