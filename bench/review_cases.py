"""The labelled diffs of `bench/review.py`: a file before and after, and whether it gains a defect.

Made from the edits of `bench/edit_cases.py`, whose checks decide what is right. `fix`: an edit that fixes a
defect, reverted, so that the diff introduces it. `change`: an edit as it is, which is right.
`refactor`: a change that keeps the behaviour, written in `data/review.toml`. A second set, in
`data/review_held.toml`, has other files and other kinds of defects; nothing was tuned on it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.edit_cases import DATA, InstructionCase, read_cases
from keystroke.assist.review import ChangedFile
from keystroke.text.compare import compare

LABELS = Path(__file__).parent / "data" / "review.toml"
HELD = LABELS.with_name("review_held.toml")


@dataclass(frozen=True, slots=True)
class LabelledDiff:
    id: str
    kind: str  # fix, defect: it brings a defect in; mend, change, refactor: it does not
    path: str
    before: str
    after: str

    @property
    def defect(self) -> bool:
        return self.kind in ("fix", "defect")

    def changed(self) -> ChangedFile:
        """The diff as `git` would tell it."""
        spans = compare(self.before.split("\n"), self.after.split("\n"))
        lines = {n for _, _, b0, b1 in spans for n in (range(b0 + 1, b1 + 1) if b1 > b0 else [max(1, b0)])}
        return ChangedFile(self.path, self.after, frozenset(lines), False, self.before)


def read_diffs() -> list[LabelledDiff]:
    """All of them, in the order of the labels. Raises ValueError where a label does not fit its file."""
    table = tomllib.loads(LABELS.read_text("utf-8"))
    cases = {case.id: case for case in read_cases()}
    diffs = [
        LabelledDiff(name, kind, path, *((new, old) if kind == "fix" else (old, new)))
        for kind in ("fix", "change")
        for name in table[kind]
        for path, old, new in _touched(cases[name])
    ]
    return [*diffs, *map(_refactored, table["refactor"])]


def read_held() -> list[LabelledDiff]:
    """The diffs of the second set. Raises ValueError where one does not fit its file."""
    table = tomllib.loads(HELD.read_text("utf-8"))
    texts = {module["path"]: module["text"].lstrip("\n") for module in table["module"]}
    diffs = []
    for entry in table["diff"]:
        path = entry["module"]
        diffs.append(
            LabelledDiff(entry["id"], entry["kind"], path, texts[path], _replaced(texts[path], entry))
        )
    return diffs


def _touched(case: InstructionCase) -> Iterator[tuple[str, str, str]]:
    """The first file that the reference changes: its old text and its new one."""
    reference = case.references[0]
    path = next(path for path, text in case.files.items() if reference[path] != text)
    yield path, case.files[path], reference[path]


def _refactored(entry: dict[str, object]) -> LabelledDiff:
    table = tomllib.loads((DATA / f"{entry['file']}.toml").read_text("utf-8"))
    path, before = table["file"][0]["path"], table["file"][0]["text"]
    return LabelledDiff(str(entry["id"]), "refactor", path, before, _replaced(before, entry))


def _replaced(text: str, entry: dict[str, object]) -> str:
    for old, new in entry["replace"]:  # type: ignore[attr-defined]
        if text.count(old) != 1:
            raise ValueError(f"{entry['id']}: the old lines do not stand in exactly one place")
        text = text.replace(old, new)
    return text
