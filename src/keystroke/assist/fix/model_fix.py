"""A fix written by a model, for failures that no rule repairs.

The model rewrites the lines around the failure. The fix is offered only if it changes more than the layout
and has no new error.
"""

from __future__ import annotations

import ast
from pathlib import Path

from keystroke.analysis.check.check import can_check, check
from keystroke.analysis.check.diagnostic import Fix, Level
from keystroke.analysis.check.modules import Project
from keystroke.analysis.failures.diagnose import Diagnosis, Repair
from keystroke.analysis.syntax import try_parse
from keystroke.assist.edit import EditTask, Region, Writer, propose_edit
from keystroke.text import apply_edits

AROUND = 12  # lines before and after the failing one that may be rewritten


def model_repair(
    diagnosis: Diagnosis, text: str, root: Path, writer: Writer, rules: str = ""
) -> Repair | None:
    """Ask for a fix of the failing file; None where the answer does not hold."""
    region = Region(diagnosis.path, max(0, diagnosis.line - 1 - AROUND), diagnosis.line + AROUND)
    calls = "".join(f"\n  {frame.path}, line {frame.line}" for frame in diagnosis.failure.frames[-8:])
    instruction = (
        f"Running this program failed at line {diagnosis.line} with\n{diagnosis.title[:2000]}\n"
        f"called through{calls}\nCorrect the cause with the smallest change."
    )
    task = EditTask({diagnosis.path: text}, instruction, region, rules)
    proposal = propose_edit(task, writer, retries=1)
    edits = proposal.edits(diagnosis.path)
    if proposal.failures or not edits:
        return None
    after = apply_edits(text, edits)
    if _same_program(diagnosis.path, text, after):
        return None
    if can_check(diagnosis.path):
        project = Project(root)
        before = _count_errors(text, root / diagnosis.path, project)
        if _count_errors(after, root / diagnosis.path, project) > before:
            return None
    return Repair(diagnosis.path, Fix("Fix written by the model", edits), "check")


def _same_program(path: str, before: str, after: str) -> bool:
    """Whether only the layout differs; of Python, comments too."""
    if path.endswith((".py", ".pyi")):
        old, new = try_parse(before), try_parse(after)
        return ast.dump(old) == ast.dump(new) if old is not None and new is not None else before == after
    return before.split() == after.split()


def _count_errors(text: str, path: Path, project: Project) -> int:
    return sum(item.level is Level.ERROR for item in check(text, path, project=project, fixes=False))
