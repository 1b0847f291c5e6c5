"""Syntax errors in languages other than Python: told where they are, and never in a file that is valid."""
# ruff: noqa: E501 - a case is one line

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from keystroke.analysis.check import check
from keystroke.text import apply_edits

BROKEN = [
    ("a.js", "function f() {\n  return (1 + 2;\n}\n", 2, "Missing `)`", "return (1 + 2);"),
    ("a.js", "function f() {\n  let x = ;\n}\n", 2, "not expected here (JavaScript)", None),
    ("a.ts", "interface A {\n  x: number\n", 2, "Missing `}`", "number}"),
    ("a.tsx", "const a = <div>{1}</div>;\nlet b = (;\n", 2, "", None),
    ("a.go", "package main\n\nfunc f() {\n\tx := (1 + 2\n}\n", 4, "Missing `)`", "x := (1 + 2)"),
    ("A.java", "class A {\n  int x = 1\n}\n", 2, "Missing `;`", "int x = 1;"),
    ("a.c", "int main(void) {\n  return 0\n}\n", 2, "Missing `;`", "return 0;"),
    ("a.cpp", "class A {\n  int x\n};\n", 2, "Missing `;`", "int x;"),
    ("a.json", '{\n  "a": 1,\n}\n', 3, "Expecting property name", '"a": 1\n'),
    ("a.json", '{\n  "a": 1\n  "b": 2\n}\n', 3, "Expecting ',' delimiter", '"a": 1,\n'),
    ("a.toml", "[a]\nb = \n", 2, "Invalid value", None),
    ("a.yaml", "a: [1, 2\nb: 3\n", 2, "", None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "text", "line", "words", "mended"), BROKEN, ids=[f"{c[0]}-{c[3][:12]}" for c in BROKEN]
)
def test_an_error_is_told_on_its_line_and_a_fix_leaves_none(
    path: str, text: str, line: int, words: str, mended: str | None
) -> None:
    found = check(text, path)
    assert found[0].code == "syntax-error"
    assert words in found[0].message
    assert text.count("\n", 0, found[0].start) + 1 == line
    for item in found:
        assert 0 <= item.start <= item.end <= len(text)
        for fix in item.fixes:
            assert len(check(apply_edits(text, fix.edits), path, fixes=False)) < len(found)
    if mended is not None:
        fixed = apply_edits(text, found[0].fixes[0].edits)
        assert mended in fixed
        assert check(fixed, path) == ()


VALID = [
    ("a.js", "#!/usr/bin/env node\nimport x from 'x' with { type: 'json' };\nclass A { #p = 1; static { } }\nconst r = /[)/]/g;"),
    ("a.jsx", "const a = <A {...p}>text {'}'} </A>;\n"),
    ("a.ts", "enum A { B }\nconst x = { a: 1 } satisfies Record<string, number>;\nfunction f<const T>(x: T): asserts x is T { }"),
    ("a.d.ts", "export declare const x: unique symbol\nexport { type A, type B as default } from './a';\n"),
    ("a.go", "package main\n\nimport \"fmt\"\n\nfunc Map[T any](x []T) {}\n\nfunc main() { fmt.Println(1) }"),
    ("A.java", "record A(int x) {\n  String s() { return switch (x) { case 1 -> \"a\"; default -> \"\"\"\n    b\n    \"\"\"; }; }\n}\n"),
    ("a.c", "#define BEGIN {\nint main(void) BEGIN\n  return 0;\n}\n"),
    ("a.h", "__BEGIN_DECLS\nextern int f (int) __THROW __nonnull ((1));\n__END_DECLS\n"),
    ("a.json", "\ufeff[1, 2.5e3, null, \"\\u00e9\"]"),
    ("tsconfig.json", "{\n  // a comment\n  \"a\": 1,\n}\n"),
    ("a.toml", "a = 1\r\n[b]\r\nc = 2026-11-15T10:00:00Z\r\n"),
    ("chart.yaml", "{{- if .Values.on }}\na: {{ .Values.a }}\n{{- end }}\n"),
    ("template.yml", "Resources:\n  A: !Ref B\n  C: !Sub\n    - ${D}\n    - D: 1\n---\nsecond: document\n"),
    ("a.yaml", ""),
    ("a.rs", "fn main() { let x = ; }"),
    ("README.md", "# {[("),
]  # fmt: skip


@pytest.mark.parametrize(("path", "text"), VALID, ids=[c[0] for c in VALID])
def test_valid_text_and_languages_that_are_not_checked_have_no_error(path: str, text: str) -> None:
    assert check(text, path) == ()


def test_a_file_of_macros_that_parsed_before_is_trusted_and_one_that_did_not_is_left_alone(
    tmp_path: Path,
) -> None:
    good, odd = tmp_path / "good.c", tmp_path / "odd.c"
    good.write_text("#define N 3\nint a[N];\nint f(void) { return N; }\n")
    odd.write_text("#define BEGIN {\nint f(void) BEGIN return 1; }\n")
    assert [item.message for item in check(good.read_text().replace("N; }", "N }"), good)] == ["Missing `;`"]
    assert check(odd.read_text().replace("1;", "1"), odd) == ()


def installed(*endings: str, limit: int) -> Iterator[Path]:
    """Files that others wrote and that compile or load: headers of this Python, of packages, of the system."""
    count = 0
    for place in (
        sysconfig.get_path("purelib"),
        sysconfig.get_path("include"),
        "/usr/include",
        "/usr/lib/node_modules",
    ):
        for folder, folders, names in os.walk(place):
            folders[:] = [
                f for f in sorted(folders) if f not in ("test", "tests", "templates", "fixtures", "test-data")
            ]
            for name in sorted(names):
                file = Path(folder) / name
                if name.endswith(endings) and file.is_file() and file.stat().st_size < 60_000:
                    yield file
                    count += 1
                    if count >= limit:
                        return


@pytest.mark.parametrize(
    "endings",
    [(".js", ".mjs"), (".h", ".hpp", ".c", ".cc", ".cpp"), (".json", ".toml", ".yaml", ".yml")],
    ids="-".join,
)
def test_files_that_are_installed_here_have_no_error(endings: tuple[str, ...]) -> None:
    for file in installed(*endings, limit=120):
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        # A grammar has gaps, and a fragment is no program: without a saved file only formats are sure.
        for path in (file, *([Path("unsaved" + file.suffix)] if ".json" in endings else [])):
            assert check(text, path, fixes=False) == (), file
