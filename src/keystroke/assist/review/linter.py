"""The project's own linter: ruff, where the project has configured it and it is installed.

The text is given on standard input, so nothing is written and nothing of the project is run. Only the
ruff of the user's PATH or of this installation is used, never a program in the workspace.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from keystroke.analysis.audit import Severity
from keystroke.assist.review.changes import ChangedFile
from keystroke.assist.review.finding import ReviewFinding, ReviewFix
from keystroke.errors import InputError
from keystroke.text import Document, Edit, apply_edits

SECONDS = 30
MAX_PROOFS = 20
_GRAVE = ("F", "E9", "PLE", "B0", "S", "ASYNC")


def find_ruff(root: Path) -> str | None:
    """The program to run; None where the project does not use it or it is not there."""
    if not _is_configured(root):
        return None
    beside = Path(sys.executable).with_name("ruff")
    found = str(beside) if beside.exists() else shutil.which("ruff")
    # A program inside the reviewed workspace is part of what is reviewed.
    if found is None or (Path(found).resolve().is_relative_to(root) and not beside.exists()):
        return None
    return found


def _is_configured(root: Path) -> bool:
    if any((root / name).is_file() for name in ("ruff.toml", ".ruff.toml")):
        return True
    try:
        table = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))
    except (OSError, ValueError):
        return False
    tool = table.get("tool")
    return isinstance(tool, dict) and "ruff" in tool


def lint(program: str, root: Path, file: ChangedFile) -> list[ReviewFinding]:
    """Ruff's findings on the changed lines of a file."""
    document = Document(file.text)
    found: list[ReviewFinding] = []
    for item in _run_ruff(program, root, file.path, file.text):
        line = int(item["location"]["row"])
        if line not in file.lines:
            continue
        start, end = _offset(document, item["location"]), _offset(document, item["end_location"])
        code = str(item.get("code") or "invalid-syntax")
        severity = Severity.MEDIUM if code.startswith(_GRAVE) else Severity.LOW
        if code == "invalid-syntax":
            severity = Severity.HIGH
        fix = _prove_fix(program, root, file, item, document) if len(found) < MAX_PROOFS else None
        column = int(item["location"]["column"])
        message = " ".join(str(item["message"]).split())
        found.append(
            ReviewFinding(
                "ruff", code, severity, message, file.path, line, column, start, max(start, end), fix
            )
        )
    return found


def _run_ruff(program: str, root: Path, path: str, text: str) -> list[Any]:
    command = [program, "check", "--output-format", "json", "--no-cache", "--force-exclude", "--exit-zero"]
    try:
        done = subprocess.run(
            [*command, "--stdin-filename", path, "-"],
            input=text.encode("utf-8", "surrogateescape"),
            capture_output=True,
            cwd=root,
            timeout=SECONDS,
            check=False,
        )
        answer = msgspec.json.decode(done.stdout) if done.stdout.strip() else []
    except subprocess.TimeoutExpired:
        raise InputError(f"ruff did not answer within {SECONDS} seconds for {path}") from None
    except OSError as error:
        raise InputError(f"ruff cannot be run: {error.strerror}") from None
    except msgspec.DecodeError:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise InputError(f"ruff failed on {path}: {lines[0][:200] if lines else 'no answer'}") from None
    if done.returncode:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise InputError(f"ruff refused: {lines[0][:200] if lines else done.returncode}")
    return answer if isinstance(answer, list) else []


def _prove_fix(
    program: str, root: Path, file: ChangedFile, item: Any, document: Document
) -> ReviewFix | None:
    fix = item.get("fix")
    if not fix or fix.get("applicability") != "safe":
        return None
    edits = tuple(
        Edit(_offset(document, e["location"]), _offset(document, e["end_location"]), e["content"])
        for e in fix["edits"]
    )
    after = _run_ruff(program, root, file.path, apply_edits(file.text, edits))
    before = _run_ruff(program, root, file.path, file.text)
    code = item.get("code")
    if sum(i.get("code") == code for i in after) >= sum(i.get("code") == code for i in before):
        return None
    return ReviewFix(str(fix.get("message") or f"Fix {code}"), edits)


def _offset(document: Document, place: Any) -> int:
    return document.offset(
        max(0, int(place["row"]) - 1), max(0, int(place["column"]) - 1), "utf-32", clamp=True
    )
