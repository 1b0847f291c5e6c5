"""Reads from git what changed: each file's new text and its changed lines.

No external diff, text conversion or file system monitor of the repository is run. Binary files, files that
are too large and files outside the workspace are skipped and reported.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from keystroke.analysis.git import run_git
from keystroke.assist.edit import Workspace
from keystroke.errors import InputError, KeystrokeError, NotFound
from keystroke.text.encoding import decode

SECONDS = 60
MAX_FILES = 500
_HUNK = re.compile(r"^@@ -\d+(?:,\d+)? \+(\d+)(?:,(\d+))? @@")
_QUOTED = re.compile(r"\\([0-7]{3}|.)")
_ESCAPED = {"n": 10, "t": 9, "r": 13, "a": 7, "b": 8, "f": 12, "v": 11}


@dataclass(frozen=True, slots=True)
class ChangedFile:
    """A changed file. `lines` (from 1) were added or changed; `on_disk`: the file on disk has this text, so
    fixes can be applied."""

    path: str
    text: str
    lines: frozenset[int]
    on_disk: bool
    before: str | None = None  # None for a new or unreadable file


@dataclass(frozen=True, slots=True)
class UnreviewedFile:
    path: str
    why: str


def changed_files(
    workspace: Workspace, *, staged: bool = False, revision: str = ""
) -> tuple[list[ChangedFile], list[UnreviewedFile]]:
    """The working diff (with untracked files), the staged one, or the one since a revision."""
    root = workspace.root
    _git(root, "rev-parse", "--is-inside-work-tree")
    if revision.startswith("-"):
        raise InputError(f"{revision!r:.60} is not a revision; name a commit, a branch or A..B")
    if revision:
        for end in re.split(r"\.\.\.?", revision):
            commit = f"{end or 'HEAD'}^{{commit}}"
            _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", commit, what=revision)
    newer = re.split(r"\.\.\.?", revision)[1] or "HEAD" if ".." in revision else ""
    base = [revision] if revision else [] if staged else [_head_commit(root)]
    options = ["-U0", "--no-color", "--no-ext-diff", "--no-textconv", "--diff-filter=d", "-M"]
    options += ["--src-prefix=a/", "--dst-prefix=b/", *(["--cached"] if staged else [])]
    output = _git(root, "diff", *options, *base, "--")
    parts = _parse_diff(output.decode("utf-8", "surrogateescape"))
    if not staged and not revision:
        known = {path for path, *_ in parts}
        listed = _git(root, "ls-files", "-z", "--others", "--exclude-standard").split(b"\0")
        names = [name.decode("utf-8", "surrogateescape") for name in listed if name]
        parts += [(name, None, name) for name in names if name not in known]
    found: list[ChangedFile] = []
    left: list[UnreviewedFile] = []
    for path, lines, old in parts:
        if len(found) >= MAX_FILES:
            left.append(UnreviewedFile(path, f"more than {MAX_FILES} files changed"))
            continue
        if (root / path).is_dir():
            left.append(UnreviewedFile(path, "it is a repository of its own; review it there"))
            continue
        try:
            disk = workspace.read_bytes(path)
            data = _git(root, "show", f"{newer}:{path}") if staged or newer else disk
            if data is None:
                continue
            text = decode(data, path).text
        except KeystrokeError as error:
            left.append(UnreviewedFile(path, str(error)))
            continue
        every = frozenset(range(1, text.count("\n") + 2))
        before = None if lines is None else committed_text(root, old, base_commit(root, revision))
        changed = every if lines is None else frozenset(lines)
        found.append(ChangedFile(path, text, changed, disk == data, before))
    return found, left


def base_commit(root: Path, revision: str) -> str:
    """The commit that a review compares with."""
    older, dots, newer = revision.partition("..." if "..." in revision else "..")
    if dots == "...":
        try:
            return _git(root, "merge-base", older or "HEAD", newer or "HEAD").decode().strip()
        except KeystrokeError:
            return older or "HEAD"
    return older or "HEAD"


def committed_text(root: Path, path: str, commit: str = "HEAD") -> str | None:
    """A file's text in a commit; None where it has none."""
    try:
        return decode(_git(root, "show", f"{commit}:./{path}"), path).text
    except KeystrokeError:
        return None


def _head_commit(root: Path) -> str:
    """HEAD; of a repository without a commit, the empty tree."""
    try:
        _git(root, "rev-parse", "--verify", "--quiet", "HEAD")
    except KeystrokeError:
        return _git(root, "hash-object", "-t", "tree", "--stdin").decode().strip()
    return "HEAD"


def _parse_diff(diff: str) -> list[tuple[str, set[int] | None, str]]:
    """Each file of a diff without context: new name, new lines, old name."""
    found: list[tuple[str, set[int] | None, str]] = []
    lines: set[int] = set()
    path = old = ""
    head = True  # between a file's first line and its first hunk; content may look like a header
    for line in diff.split("\n"):
        if line.startswith("diff --git "):
            if path:
                found.append((path, lines, old))
            path, old, lines, head = "", "", set(), True
        elif head and line.startswith("--- "):
            old = _unquote_path(line[4:].rstrip("\t")).removeprefix("a/")
        elif head and line.startswith("+++ "):
            name = _unquote_path(line[4:].rstrip("\t"))
            path = name.removeprefix("b/") if name != "/dev/null" else ""
        elif hunk := _HUNK.match(line):
            head = False
            first, count = int(hunk[1]), int(hunk[2]) if hunk[2] is not None else 1
            # If lines were only removed, the line before them is marked.
            lines.update(range(first, first + count) if count else {max(1, first)})
    if path:
        found.append((path, lines, old))
    return found


def _unquote_path(name: str) -> str:
    """A path as git writes it in a header: in quotes where it has unusual characters."""
    if not name.startswith('"'):
        return name
    out = bytearray()
    body, at = name[1:-1], 0
    for found in _QUOTED.finditer(body):
        out += body[at : found.start()].encode("utf-8", "surrogateescape")
        code = found[1]
        if len(code) == 3:
            out.append(int(code, 8) & 255)
        else:
            out.append(_ESCAPED.get(code, ord(code) & 255))
        at = found.end()
    out += body[at:].encode("utf-8", "surrogateescape")
    return out.decode("utf-8", "surrogateescape")


def _git(root: Path, *arguments: str, what: str = "") -> bytes:
    try:
        done = run_git(root, *arguments, seconds=SECONDS)
    except FileNotFoundError:
        raise NotFound("git is not installed; a review needs it to know what changed") from None
    except subprocess.TimeoutExpired:
        raise InputError(
            f"git did not answer within {SECONDS} seconds; try again or review a smaller change"
        ) from None
    if done.returncode == 0:
        return done.stdout
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    if any("not a git repository" in line for line in lines):
        raise InputError(f"{root} is not in a git repository; run `git init`, or go to one")
    if what:
        raise NotFound(f"there is no revision {what!r:.80}; name a commit, a branch or A..B")
    raise InputError(f"git refused: {lines[-1][:200] if lines else 'no reason given'}")
