"""Weaknesses and their repaired twins: each vulnerable text is found under its number, no repaired one is."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import jinja2
import pytest

from keystroke.analysis.audit import Auditor, Severity
from keystroke.analysis.audit.rules.wrappers import project_wrappers

TWINS: list[dict[str, Any]] = [
    twin
    for file in sorted((Path(__file__).parent / "twins").glob("*.toml"))
    for twin in tomllib.loads(file.read_text(encoding="utf-8"))["twin"]
]


def found(twin: dict[str, Any], text: str) -> bool:
    return any(twin["cwe"] in finding.cwes for finding in Auditor(twin["language"]).audit(text))


@pytest.mark.parametrize(
    "twin", TWINS, ids=lambda twin: f"{twin['language']}-{twin['weakness']}-{twin['cwe']}"
)
def test_a_weakness_is_found_and_its_repaired_twin_is_silent(twin: dict[str, Any]) -> None:
    assert [text for text in twin.get("bad", []) if not found(twin, text)] == []
    assert [text for text in twin.get("good", []) if found(twin, text)] == []
    assert twin.get("bad") or twin.get("good")


def test_a_wrapper_in_another_file_of_the_project_counts_as_the_shell_it_hands_on_to() -> None:
    tools = "import os\ndef launch(line):\n    os.system(line)\n"
    caller = "from tools import launch\ndef unpack(name):\n    launch('tar xf ' + name)\n"
    quoted = caller.replace("+ name", "+ shlex.quote(name)").replace("from tools", "import shlex\nfrom tools")
    helpers = project_wrappers([tools, caller])
    assert helpers == {"launch": "@runs.command"}
    assert [item.rule for item in Auditor("python", helpers=helpers).audit(caller)] == [
        "python-command-injection"
    ]
    assert Auditor("python").audit(caller) == ()
    assert Auditor("python", helpers=helpers).audit(quoted) == ()


def test_a_template_engine_is_not_alarmed_by_its_own_markup() -> None:
    loud = [
        (file.name, finding.rule)
        for file in sorted(Path(jinja2.__file__).parent.glob("*.py"))
        for finding in Auditor("python").audit(file.read_text(encoding="utf-8"))
        if 79 in finding.cwes and finding.severity in (Severity.HIGH, Severity.CRITICAL)
    ]
    assert loud == []
