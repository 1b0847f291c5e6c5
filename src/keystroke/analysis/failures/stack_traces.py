"""Parses failures of other languages: stack traces of Node, Go, Java and Rust, reports of sanitizers, and
errors of compilers and type checkers. Warnings are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from keystroke.analysis.failures.failure import Failure, Language, LocatedFailure, StackFrame, language_of

COMPILED = "compile error"

_NODE_AT = re.compile(
    r"^\s+at (?:(?P<name>.+?) \()?(?:file://)?(?P<path>[^():\n]+):(?P<line>\d+):(?P<column>\d+)\)?(?: \{)?$"
)
_NODE_INSIDE = re.compile(r"^\s+at (?:.+? \()?node:|^\s+\.\.\. \d+ lines matching cause")
_NODE_SAID = re.compile(
    r"^(?:Uncaught )?(?P<kind>[A-Z]\w*(?:Error|Exception)|Error)(?: \[\w+\])?(?:: (?P<message>.*))?$"
)
_NODE_CAUSE = re.compile(r"^\s*\[cause\]: (?P<rest>[A-Z]\w*: .*)$")
_NODE_FILE = re.compile(r"^(?:file://)?(?P<path>/[^:\n]+|[A-Za-z]:[^:\n]+):(?P<line>\d+)$")
_GO_AT = re.compile(r"^\t(?P<path>\S+\.go):(?P<line>\d+)(?: \+0x[0-9a-f]+)?$")
_GO_SAID = re.compile(r"^(?P<kind>panic|fatal error): (?P<message>.*)$")
_GO_TEST = re.compile(r"^    (?P<path>\w+_test\.go):(?P<line>\d+): (?P<message>.+)$")
_JAVA_SAID = re.compile(
    r"^(?:Exception in thread \"[^\"]*\" |Caused by: |.{0,120}? )?"
    r"(?P<kind>(?:[a-z_]\w*\.)+[A-Z]\w*(?:Exception|Error|Throwable)\w*)(?:: (?P<message>.*))?$"
)
_JAVA_AT = re.compile(
    r"^\s+at (?:[\w.$-]+(?:@[\w.-]+)?/)?(?P<name>[\w.$<>]+)"
    r"\((?P<file>[\w$]+\.(?:java|kt|scala)):(?P<line>\d+)\)"
)
_JAVA_MORE = re.compile(
    r"^\s+(?:at .+\((?:Native Method|Unknown Source|[\w$]+\.java)\)|\.\.\. \d+ (?:more|common))"
)
_RUST_PANIC = re.compile(
    r"^thread '[^']*'(?: \(\d+\))? panicked at (?P<path>[^:\n]+):(?P<line>\d+):(?P<column>\d+):$"
)
_RUST_OLD = re.compile(
    r"^thread '[^']*' panicked at '(?P<message>.*)', (?P<path>[^:\n]+):(?P<line>\d+):(?P<column>\d+)$"
)
_RUST_SAID = re.compile(r"^error(?:\[(?P<code>E\d+)\])?: (?P<message>.+)$")
_RUST_PLACE = re.compile(r"^\s*--> (?P<path>[^:\n]+):(?P<line>\d+):(?P<column>\d+)$")
_SANITIZER = re.compile(r"^==\d+==ERROR: (?P<kind>\w+Sanitizer): (?P<message>.+)$")
_SANITIZER_AT = re.compile(
    r"^\s+#\d+ 0x[0-9a-f]+ in (?P<name>\S+) (?P<path>[^:\n]+):(?P<line>\d+)(?::(?P<column>\d+))?$"
)
# gcc, clang, mypy, javac, swiftc, ...: path, line, perhaps a column, and the word.
_COLONS = re.compile(
    r"^(?P<path>(?:[A-Za-z]:)?[^\s:(][^:(\n]*\.\w+):(?P<line>\d+)(?::(?P<column>\d+))?: "
    r"(?:fatal error|runtime error|error): (?P<message>.+)$"
)
_TSC = re.compile(
    r"^(?P<path>[^\s:(][^:(\n]*\.[cm]?[jt]sx?)"
    r"(?:\((?P<line>\d+),(?P<column>\d+)\): |:(?P<line2>\d+):(?P<column2>\d+) - )"
    r"error (?P<code>TS\d+): (?P<message>.+)$"
)
_GO_COMPILER = re.compile(
    r"^(?P<path>\S+\.go):(?P<line>\d+)(?::(?P<column>\d+))?: (?!warning)(?P<message>.+)$"
)


def other_failures(lines: Sequence[str]) -> list[LocatedFailure]:
    parsers = (_parse_node, _parse_go, _parse_java, _parse_rust, _parse_sanitizers, _parse_compilers)
    return [found for parser in parsers for found in parser(lines)]


def _parse_node(lines: Sequence[str]) -> Iterator[LocatedFailure]:
    header: tuple[str, str] | None = None
    frames: list[StackFrame] = []
    file: StackFrame | None = None  # printed above the error if the file does not parse
    since = 0
    for at, line in enumerate([*lines, ""]):
        place = _NODE_AT.match(line)
        if header and (_NODE_INSIDE.match(line) or place):
            since = at
            if place and not place["path"].startswith("node:"):
                column = int(place["column"])
                frames.append(StackFrame(place["path"], int(place["line"]), place["name"] or "", column))
            continue
        if header and since:
            # Node prints the innermost frame first.
            if header[0] == "SyntaxError" and file is not None:
                yield since, Failure(Language.NODE, *header, (file,))
            elif frames:
                yield since, Failure(Language.NODE, *header, tuple(reversed(frames)))
            header, frames, file, since = None, [], None, 0
        cause = _NODE_CAUSE.match(line)
        if error := _NODE_SAID.match(cause["rest"] if cause else line):
            header, since = (error["kind"], error["message"] or ""), 0
        elif top := _NODE_FILE.match(line):
            file = StackFrame(top["path"], int(top["line"]))


def _parse_go(lines: Sequence[str]) -> Iterator[LocatedFailure]:
    header: tuple[str, str] | None = None
    frames: list[StackFrame] = []
    last = 0
    for at, line in enumerate(lines):
        if error := _GO_SAID.match(line):
            if header and frames:
                yield last, Failure(Language.GO, *header, tuple(reversed(frames)))
            header, frames = (error["kind"], error["message"]), []
        elif (place := _GO_AT.match(line)) and header:
            frames.append(StackFrame(place["path"], int(place["line"])))
            last = at
        elif test := _GO_TEST.match(line):
            yield (
                at,
                Failure(Language.GO, "test", test["message"], (StackFrame(test["path"], int(test["line"])),)),
            )
    if header and frames:
        yield last, Failure(Language.GO, *header, tuple(reversed(frames)))


def _parse_java(lines: Sequence[str]) -> Iterator[LocatedFailure]:
    header: tuple[str, str] | None = None
    frames: list[StackFrame] = []
    last = 0
    for at, line in enumerate([*lines, ""]):
        if (place := _JAVA_AT.match(line)) and header:
            package = place["name"].rpartition(".")[0].rpartition(".")[0].replace(".", "/")
            path = f"{package}/{place['file']}" if package else place["file"]
            frames.append(StackFrame(path, int(place["line"]), place["name"]))
            last = at
            continue
        if header and _JAVA_MORE.match(line):
            continue
        if header and frames:
            yield last, Failure(Language.JAVA, *header, tuple(reversed(frames)))
        header, frames = None, []
        if error := _JAVA_SAID.match(line):
            header = (error["kind"].rpartition(".")[2], error["message"] or "")


def _parse_rust(lines: Sequence[str]) -> Iterator[LocatedFailure]:
    for at, line in enumerate(lines):
        if panic := _RUST_PANIC.match(line):
            if at + 1 < len(lines):
                yield at + 1, Failure(Language.RUST, "panic", lines[at + 1].strip(), (_make_frame(panic),))
        elif panic := _RUST_OLD.match(line):
            yield at, Failure(Language.RUST, "panic", panic["message"], (_make_frame(panic),))
        elif (place := _RUST_PLACE.match(line)) and at and (header := _RUST_SAID.match(lines[at - 1])):
            kind = f"{COMPILED} {header['code']}" if header["code"] else COMPILED
            yield at, Failure(Language.RUST, kind, header["message"], (_make_frame(place),), compiled=True)


def _parse_sanitizers(lines: Sequence[str]) -> Iterator[LocatedFailure]:
    header: tuple[str, str] | None = None
    frames: list[StackFrame] = []
    for at, line in enumerate([*lines, ""]):
        if error := _SANITIZER.match(line):
            header, frames = (error["kind"], error["message"].partition(" on address")[0]), []
        elif header and (place := _SANITIZER_AT.match(line)):
            frames.append(_make_frame(place))
        elif header and frames:  # the first stack is where it happened
            yield at - 1, Failure(language_of(frames[0].path), *header, tuple(reversed(frames)))
            header = None


def _parse_compilers(lines: Sequence[str]) -> Iterator[LocatedFailure]:
    for at, line in enumerate(lines):
        if wrong := _COLONS.match(line):
            yield at, _compiler_failure(wrong["message"], _make_frame(wrong))
        elif wrong := _TSC.match(line):
            number = int(wrong["line"] or wrong["line2"]), int(wrong["column"] or wrong["column2"])
            place = StackFrame(wrong["path"], number[0], "", number[1])
            yield at, _compiler_failure(f"{wrong['code']}: {wrong['message']}", place)
        elif wrong := _GO_COMPILER.match(line):
            yield at, _compiler_failure(wrong["message"], _make_frame(wrong))


def _compiler_failure(message: str, place: StackFrame) -> Failure:
    return Failure(language_of(place.path), COMPILED, message, (place,), compiled=True)


def _make_frame(found: re.Match[str]) -> StackFrame:
    groups = found.groupdict()
    return StackFrame(
        groups["path"], int(groups["line"]), groups.get("name") or "", int(groups.get("column") or 0)
    )
