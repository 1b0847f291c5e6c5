"""Parses failures of Python: tracebacks, syntax errors and reports of pytest.

A prefix that a logger or a container put before every line of a traceback is removed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from keystroke.analysis.failures.failure import Failure, Language, LocatedFailure, StackFrame

_GROUP = re.compile(r"^\s+[|+](?: |$|-)")  # the margin that exception groups draw
_HEAD = re.compile(r"^(?P<prefix>.{0,200}?)(?:Exception Group )?Traceback \(most recent call last\):\s*$")
_FRAME = re.compile(r'^\s*File "(?P<path>[^"\n]+)", line (?P<line>\d+)(?:, in (?P<name>.+))?\s*$')
_ERROR = re.compile(
    r"^(?P<kind>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Warning|Interrupt|Exit|Iteration|Group)?)"
    r"(?::\s?(?P<message>.*))?$"
)
# Some classes are lower case (struct.error, socket.timeout): they count only after frames.
_RAISED = re.compile(r"^(?P<kind>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)(?::\s?(?P<message>.*))?$")
_SYNTAX = ("SyntaxError", "IndentationError", "TabError")
_PYTEST = re.compile(r"^(?P<path>[^\s:][^:\n]*\.py):(?P<line>\d+): (?P<kind>[A-Z]\w*)\s*$")
_PYTEST_BETWEEN = re.compile(r"^(?P<path>[^\s:][^:\n]*\.py):(?P<line>\d+): \s*$")
_PYTEST_SAID = re.compile(r"^E\s{1,10}(?P<text>\S.*)$")
_HINT = re.compile(r"\.? Did you (?:mean|forget to import)[: ]+(?:import )?'(?P<name>[\w.]+)'\??\s*$")


def python_failures(lines: Sequence[str]) -> list[LocatedFailure]:
    plain = [_GROUP.sub("", line) for line in lines]
    found = [*_parse_tracebacks(plain)]
    known = {(item.kind, item.message) for _, item in found}
    found += [(at, item) for at, item in _bare_syntax_errors(lines) if (item.kind, item.message) not in known]
    return [*found, *_parse_pytest(lines)]


def _parse_tracebacks(lines: Sequence[str]) -> Iterator[LocatedFailure]:
    frames: list[StackFrame] | None = None
    prefix = ""
    for at, line in enumerate(lines):
        if "Traceback (" in line and (head := _HEAD.match(line)):
            frames, prefix = [], head["prefix"]
            continue
        if frames is None:
            continue
        line = line.removeprefix(prefix)
        if frame := _FRAME.match(line):
            frames.append(StackFrame(frame["path"], int(frame["line"]), frame["name"] or ""))
        elif not line[:1].isspace() and line and frames:
            if error_line := _RAISED.match(line):
                yield at, _make_failure(error_line["kind"], error_line["message"] or "", frames)
            frames = None


def _make_failure(kind: str, message: str, frames: list[StackFrame]) -> Failure:
    hint = _HINT.search(message)
    words = message[: hint.start()] if hint else message
    name = hint["name"] if hint else ""
    own = kind if kind.rpartition(".")[2][:1].islower() else kind.rpartition(".")[2]
    return Failure(Language.PYTHON, own, words, tuple(frames), name)


def _bare_syntax_errors(lines: Sequence[str]) -> Iterator[LocatedFailure]:
    """A script that does not parse prints a position, the line, a caret and the error."""
    for index, line in enumerate(lines):
        frame = _FRAME.match(line)
        if frame is None or frame["name"]:
            continue
        for at, after in enumerate(lines[index + 1 : index + 5], index + 1):
            error_line = _ERROR.match(after)
            if error_line and error_line["kind"] in _SYNTAX:
                place = StackFrame(frame["path"], int(frame["line"]))
                yield at, _make_failure(error_line["kind"], error_line["message"] or "", [place])
                break


def _parse_pytest(lines: Sequence[str]) -> Iterator[LocatedFailure]:
    error_line = ""
    frames: list[StackFrame] = []
    for at, line in enumerate(lines):
        if line.startswith(("____", "====")):
            error_line, frames = "", []
        elif text := _PYTEST_SAID.match(line):
            error_line = error_line or text["text"]
        elif place := _PYTEST.match(line):
            frames.append(StackFrame(place["path"], int(place["line"])))
            if error_line:
                error = _ERROR.match(error_line)
                own = error is not None and error["kind"].endswith(place["kind"])
                message = (error["message"] or "") if own and error is not None else error_line
                yield at, _make_failure(place["kind"], message, frames)
                error_line, frames = "", []
        elif between := _PYTEST_BETWEEN.match(line):
            frames.append(StackFrame(between["path"], int(between["line"])))
