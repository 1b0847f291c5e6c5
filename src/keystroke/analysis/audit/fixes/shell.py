"""Shell fixes: a value becomes exactly one word of the command.

Existing quotes around a value are taken into account. There is no fix for a value that is a command itself or
is interpreted by a second shell.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from keystroke.analysis.audit.fixes.site import (
    ChangedValue,
    FixEdits,
    FixSite,
    NoFix,
    named_children,
    require,
    required_value,
    span,
    without_parentheses,
)
from keystroke.analysis.audit.fixes.sql import composed_text, is_text
from keystroke.analysis.audit.fixes.text_parts import TextChar, TextComposition, TextHole
from keystroke.analysis.audit.flow.values import CONSTANT, HOLE
from keystroke.analysis.audit.rules.catalog import FixSpec
from keystroke.analysis.audit.source import ir
from keystroke.text import Edit

# Programs that pass their arguments to another shell or interpreter: quoting once is not enough.
_AGAIN = re.compile(
    r"(?:^|[\s;|&(/])(?:sh|bash|zsh|dash|ksh|su|ssh|rsh|eval|xargs|parallel|watch|awk|gawk|perl|python\d?|ruby|node|php"
    r"|sqlite3|mysql|psql|adb|docker\s+exec|kubectl\s+exec|cmd|powershell|pwsh|find\s.*-exec\w*|at|crontab|script|trap|source|\.)\s"
)
_WORDS = re.compile(
    r"(?i)(?:^|_)(?:args?|argv|arguments|options?|opts|flags?|params|cmd|command|extra|query)s?$|cmd|command"
)
_META = re.compile(r"[$`\"'\\|&;<>()*?\[\]#~!{}\n\r=^]")


@dataclass(frozen=True, slots=True)
class HolePosition:
    """The position of a hole in a command: its quotes, and whether it is all of the quoted text."""

    quote: str
    first: int  # atoms of the quotes around it
    last: int
    whole: bool


def hole_positions(skeleton: str) -> dict[int, HolePosition]:
    """The position of each hole of a command without unsupported syntax."""
    require(not any(mark in skeleton for mark in ("`", "$(", "<<", "\\", "#")))
    out: dict[int, HolePosition] = {}
    at, size = 0, len(skeleton)
    started = True  # the first word of a command comes next
    while at < size:
        char = skeleton[at]
        if char in "'\"":
            end = skeleton.find(char, at + 1)
            require(end >= 0)
            inside = skeleton[at + 1 : end]
            require(not (started and HOLE in inside))
            for number, held in enumerate(inside, at + 1):
                if held == HOLE:
                    out[number] = HolePosition(char, at, end, inside == HOLE)
            at = end
            started = False
        elif char == HOLE:
            require(not started)
            out[at] = HolePosition("", at, at, True)
        elif char in ";|&(\n":
            started = True
        elif not char.isspace():
            started = False
        at += 1
    return out


def composed_command(site: FixSite, node: ir.Syntax) -> TextComposition:
    """The command composed in a call or in a variable used only there."""
    text = composed_text(site, node)
    require(text.holes)
    before = text.skeleton.rsplit(HOLE, 1)[0]
    require(_AGAIN.search(f"{before} ") is None)
    return text


def quote_values(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Python: quotes each value for the shell."""
    given = site.arguments()
    require(given)
    text = composed_command(site, given[0])
    found = hole_positions(text.skeleton)
    edits: list[Edit] = []
    for at, hole in enumerate(text.atoms):
        if not isinstance(hole, TextHole):
            continue
        value = site.value(hole.node)
        if value.level == CONSTANT or value.numeric or "shell" in value.clean or "*" in value.clean:
            continue
        edits += _quote(site, text, at, hole, found[at])
    return FixEdits(tuple(edits))


def _quote(site: FixSite, text: TextComposition, at: int, hole: TextHole, place: HolePosition) -> list[Edit]:
    source = site.source(hole.node)
    require(not _several(source) and hole.format in ("", "%s"))
    site.changed.append(ChangedValue(hole.node, text.skeleton[:at]))
    start, end = span(hole.node)
    atoms = text.atoms
    known = hole.text or is_text(site, hole.node)
    before, after = ("shlex.quote(", ")") if known else ("shlex.quote(str(", "))")
    edits = [Edit(start, start, before), Edit(end, end, after)]
    if not place.quote:
        return edits
    left, right = atoms[place.first], atoms[place.last]
    require(isinstance(left, TextChar) and isinstance(right, TextChar))
    if place.whole:  # the value brings its own quotes
        return [*edits, Edit(left.start, left.end, ""), Edit(right.start, right.end, "")]
    # Inside a longer quoted text: close the quotes before the value and reopen them after it.
    spelled = site.text[left.start : left.end]
    near_left, near_right = atoms[at - 1], atoms[at + 1]
    require(isinstance(near_left, TextChar) and isinstance(near_right, TextChar))
    if place.first == at - 1:
        edits.append(Edit(left.start, left.end, ""))
    else:
        edits.append(Edit(near_left.end, near_left.end, spelled))
    if place.last == at + 1:
        edits.append(Edit(right.start, right.end, ""))
    else:
        edits.append(Edit(near_right.start, near_right.start, spelled))
    return edits


def _several(source: str) -> bool:
    """Whether a value looks like several words of a command."""
    name = re.split(r"[.\[(]", source)[-1] if re.fullmatch(r"[\w.]+", source) else source
    key = re.search(r"[\"'](\w+)[\"']\s*[\])]", source)
    return (
        "\n" in source
        or ".join" in source
        or _WORDS.search(name) is not None
        or (key is not None and _WORDS.search(key[1]) is not None)
    )


# Without a shell: the words of the command as a list


def command_words(site: FixSite, text: TextComposition) -> list[str]:
    """The words of a command that needs no shell, as expressions; the first is constant."""
    hole_positions(text.skeleton)
    out: list[list[str]] = [[]]
    constant = ""
    quote = ""

    def flush() -> None:
        nonlocal constant
        if constant:
            out[-1].append(f'"{constant}"')
            constant = ""

    for atom in text.atoms:
        if isinstance(atom, TextHole):
            source = site.source(atom.node)
            require(not atom.format and not _several(source))
            site.changed.append(ChangedValue(atom.node))
            flush()
            out[-1].append(source)
        elif atom.text in "'\"" and (not quote or quote == atom.text):
            quote = "" if quote else atom.text
        elif atom.text.isspace() and not quote:
            flush()
            if out[-1]:
                out.append([])
        elif _META.search(atom.text) and not (atom.text in "=~" and out[-1] + [constant] != [""]):
            raise NoFix
        else:
            constant += atom.text
    flush()
    made = [_word(parts) for parts in out if parts]
    require(len(made) >= 2 and made[0].startswith('"'))
    return made


def _word(parts: list[str]) -> str:
    if len(parts) == 1:
        return parts[0]
    if any(re.search(r"\s[-+*/?:|&]|=>", part) for part in parts if not part.startswith('"')):
        parts = [part if part.startswith('"') else f"({part})" for part in parts]
    return " + ".join(parts)


def use_exec_file(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """JavaScript: replaces `exec("tool " + value)` by `execFile("tool", [value])`."""
    call, given = required_value(site.call), site.arguments()
    require(given and site.method in ("exec", "execSync"))
    require("promisify" not in site.text and not any("promis" in path for path in site.imports))
    parent = call.node.parent()
    require(parent is None or parent.kind() not in ("await_expression", "spread_element"))
    require(not any(arg.kind() == "object" and "shell" in arg.text() for arg in given[1:]))
    text = composed_command(site, given[0])
    listed = command_words(site, text)
    require(not (any(hole.form == "inside" for hole in text.holes) and any("`" in word for word in listed)))
    start, end = span(text.node)
    require((start, end) == span(without_parentheses(given[0])))  # the variable may be used elsewhere
    file = "execFileSync" if site.method.endswith("Sync") else "execFile"
    edits = [Edit(start, end, f"{listed[0]}, [{', '.join(listed[1:])}]")]
    at, stop = span(call.func.node)
    if isinstance(call.func, ir.AttrExpr):
        name = required_value(call.func.node.field("property"))
        edits.append(Edit(*span(name), file))
        return FixEdits(tuple(edits))
    require(call.func.node.text() == site.method)
    require("child_process" in site.imports or f"child_process.{site.method}" in site.imports)
    edits.append(Edit(at, stop, f'require("child_process").{file}'))
    return FixEdits(tuple(edits), ("require",))


def use_positional_arguments(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """Replaces `sh -c "tool " + value` by `sh -c 'tool "$1"' sh value`."""
    command = _shell_command(site)
    text = composed_command(site, command)
    found = hole_positions(text.skeleton)
    edits: list[Edit] = []
    values: list[str] = []
    for number, atom in enumerate(text.atoms):
        if not isinstance(atom, TextHole):
            continue
        if site.value(atom.node).level == CONSTANT and not text.template:
            continue
        source = site.source(atom.node)
        require(not _several(source) and atom.format in ("", "%d", "%v"))
        site.changed.append(ChangedValue(atom.node, text.skeleton[:number]))
        place = found[number]
        values.append(source if not atom.format else f"fmt.Sprint({source})")
        name = f"${len(values)}" if len(values) < 10 else f"${{{len(values)}}}"
        if place.quote == '"':
            edits += text.substitute(number, number, name)
        elif place.quote == "'" and not place.whole:
            edits += text.substitute(number, number, f"'\"{name}\"'")
        else:
            edits += text.substitute(place.first, place.last, f'"{name}"')
    require(values)
    if text.template:
        require(len(values) == len(text.holes))
        edits += [*text.unwrap, *text.undouble]
    end = span(command)[1]
    return FixEdits((*edits, Edit(end, end, f', "sh", {", ".join(values)}')))


_SHELL = re.compile(r"[\"'](?:/bin/|/usr/bin/)?(?:ba|da|z|k)?sh[\"']")
_BEHIND = ("object", "arrow_function", "function_expression", "null_literal")


def _shell_command(site: FixSite) -> ir.Syntax:
    """The command of a call whose arguments are a shell, "-c" and the command."""
    found: list[ir.Syntax] = []
    for node in site.arguments():
        inner = node.field("value") if node.kind() == "array_creation_expression" else node
        if inner is not None and inner.kind() in ("array", "list", "array_initializer"):
            found += named_children(inner)
        else:
            found.append(node)
    at = required_value(
        next((number for number, node in enumerate(found) if _SHELL.fullmatch(node.text())), None)
    )
    require(len(found) >= at + 3 and found[at + 1].text().strip("\"'") == "-c")
    require(len(found) <= at + 3 or found[at + 3].kind() in _BEHIND)
    return found[at + 2]
