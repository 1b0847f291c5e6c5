"""Which files the scan for safe fixes audits, and the Pythons that a project's tests run with."""

from __future__ import annotations

import io
import shutil
import sys
import tarfile
from pathlib import Path

import bench.audit_scan
import bench.project_tests
import pytest
from bench.audit_scan import may_have_fix, scan
from bench.project_tests import interpreters

FIXED = [
    ("python", "import yaml\nyaml.load(text, Loader=yaml.Loader)\n"),
    ("python", "token = ''.join(random.choice(letters) for _ in range(9))\n"),
    ("python", "def make_password():\n    letters = 'abc'\n    return random.choice(letters)\n"),
    ("python", "assert user.is_admin\n"),
    ("python", "def view(request):\n    logger.info(request.GET['name'])\n"),
    ("python", "@app.get('/{name}')\ndef view(name):\n    log.info(name)\n"),
    ("python", "cursor.execute(\"select a from b where c = '%s'\" % name)\n"),
    ("python", 'os.system("ls \'" + name + "\'")\n'),
    ("python", "tree.xpath('//a[@id=\"%s\"]' % name)\n"),
    ("python", "open(tempfile.mktemp(), 'w')\n"),
    ("javascript", "const a = Buffer.allocUnsafe(n)\n"),
    ("javascript", "console.log(req.query.name)\n"),
    ("c", "p = malloc(n * sizeof *p);\n"),
    ("c", 'sprintf(text, "%s", name);\n'),
]


@pytest.mark.parametrize(("language", "text"), FIXED)
def test_a_text_with_a_safe_fix_is_not_left_out(language: str, text: str) -> None:
    assert may_have_fix(language, text.encode())


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("python", "import os\nprint(os.getcwd())\n"),
        ("python", "random.shuffle(rows)\n"),
        ("javascript", "export const a = 1\n"),
        ("c", "free(p);\n"),
        ("go", "package main\n"),
    ],
)
def test_a_text_without_words_of_a_fix_is_left_out(language: str, text: str) -> None:
    assert not may_have_fix(language, text.encode())


def test_only_packages_with_tests_are_audited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def archive(files: dict[str, str]) -> bytes:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w:gz") as tar:
            for name, text in files.items():
                info = tarfile.TarInfo(f"example-1.0/{name}")
                info.size = len(text)
                tar.addfile(info, io.BytesIO(text.encode()))
        return out.getvalue()

    code = "import yaml\n\n\ndef read(text):\n    return yaml.load(text, Loader=yaml.Loader)\n" + "\n" * 300
    without = archive({"example.py": code})
    with_tests = archive({"example.py": code, "tests/test_read.py": "def test_read(): pass\n"})
    monkeypatch.setattr(bench.audit_scan, "CACHE", tmp_path)
    monkeypatch.setattr(bench.audit_scan, "find_archive", lambda *_: ("1.0", ""))
    monkeypatch.setattr(bench.audit_scan, "download", lambda *_, **__: without)
    assert scan("pypi", "example")["rules"] == []
    monkeypatch.setattr(bench.audit_scan, "download", lambda *_, **__: with_tests)
    assert scan("pypi", "example")["rules"] == ["python-unsafe-yaml"]


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        (None, [0, 9]),
        (">=3.6", [0, 9]),
        (">=3.10", [0, 10]),
        ("==3.11.*", [0]),
        (">=3.12", [12, 13]),
        ("<3.10", [9]),
        ("no version", [0, 9]),
    ],
)
def test_an_old_project_is_tried_with_an_old_python_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, declared: str | None, expected: list[int]
) -> None:
    monkeypatch.setattr(bench.project_tests, "_OWN_MINOR", 11)
    monkeypatch.setattr(
        shutil, "which", lambda name: name if name != "python3.8" and name != "python3.14" else None
    )
    if declared is not None:
        (tmp_path / "PKG-INFO").write_text(f"Name: x\nRequires-Python: {declared}\n", encoding="utf-8")
    names = [f"python3.{minor}" if minor else sys.executable for minor in expected]
    assert interpreters(tmp_path) == names
