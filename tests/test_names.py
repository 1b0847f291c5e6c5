"""Public class names are unique, and module docstrings carry no label."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = [path for folder in ("src", "lab", "bench") for path in sorted((ROOT / folder).rglob("*.py"))]


def test_public_class_names_are_unique() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in FILES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert len(places) > 500
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_text_is_labelled_as_a_law() -> None:
    label = "Law" + ":"
    tests = sorted((ROOT / "tests").rglob("*.py"))
    assert [
        path.relative_to(ROOT).as_posix()
        for path in (*FILES, *tests)
        if label in path.read_text(encoding="utf-8")
    ] == []
