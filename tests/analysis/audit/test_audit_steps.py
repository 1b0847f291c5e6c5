"""The work of an audit grows with the text, not faster; the work of a key with the function it is typed in.

Work is counted in calls of Python and built-in functions and in characters parsed, never in time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from keystroke.analysis.audit import Auditor, LiveAudit, auditor

SIZES = (20, 80)  # functions in the smaller and the larger text


class Work:
    calls = 0
    parsed = 0


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Work]:
    work = Work()
    parse = auditor._parse

    def counting(source: str, language: str) -> Any:
        work.parsed += len(source)
        return parse(source, language)

    def count(frame: FrameType, event: str, arg: Any) -> None:
        if event in ("call", "c_call"):
            work.calls += 1

    with monkeypatch.context() as patch:
        patch.setattr(auditor, "_parse", counting)
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            yield work
        finally:
            sys.setprofile(before)


def function(number: int) -> str:
    return f"""function f{number}(req, res) {{
  var name = req.query.name{number};
  var rows = [];
  for (var i = 0; i < 3; i++) {{
    if (name === rows[i]) {{
      rows.push(helper(name, i));
    }}
  }}
  db.query("SELECT * FROM t WHERE n = '" + name + "'");
  return f{max(number - 1, 0)}(rows, res);
}}
"""


HELPER = "function helper(a, b) {\n  return a + String(b);\n}\n"


def plain(count: int) -> str:
    return HELPER + "".join(map(function, range(count)))


def wrapped(count: int) -> str:
    return f"(function (window, factory) {{\n{plain(count)}}})(this);\n"


def methods(count: int) -> str:
    listed = "".join(function(at).replace(f"function f{at}", f"f{at}") for at in range(count))
    return f"class Store {{\n{listed}}}\n"


def statements(count: int) -> str:
    return "".join(f"var v{at} = load('a{at}') + v{max(at - 1, 0)};\n" for at in range(count * 8))


def one_function(count: int) -> str:
    return (
        "function all(req) {\n  var name = req.query.n;\n"
        + "".join(
            f"  var v{at} = load(name, {at});\n  if (v{at}) {{ use(v{at}); }}\n" for at in range(count * 3)
        )
        + "}\n"
    )


def findings_of_one_function(count: int) -> str:
    return (
        'const { exec } = require("child_process");\nasync function all(req) {\n'
        + "".join(
            f"  const v{at} = req.query.n{at};\n  exec(`ls '${{v{at}}}'`);\n  use(new Buffer({at + 1}));\n"
            for at in range(count)
        )
        + "}\n"
    )


def python_findings_of_one_function(count: int) -> str:
    return "import os\nfrom flask import request\ndef all():\n" + "".join(
        f"    v{at} = request.args['n{at}']\n    os.system(f\"ls '{{v{at}}}'\")\n" for at in range(count)
    )


def java(count: int) -> str:
    listed = "".join(
        f"  String m{at}(String name) {{\n    String text = name + {at};\n"
        "    for (int i = 0; i < 3; i++) {\n"
        f"      text = helper(text);\n    }}\n    return m{max(at - 1, 0)}(text);\n  }}\n"
        for at in range(count)
    )
    return f"class Store {{\n  String helper(String a) {{ return a.trim(); }}\n{listed}}}\n"


def python(count: int) -> str:
    return "from flask import request\n" + "".join(
        f"def f{at}(cur, rows):\n    name = request.args['n{at}']\n    for row in rows:\n"
        f"        if row == name:\n            f{max(at - 1, 0)}(cur, [row])\n"
        f'    cur.execute("SELECT * FROM t WHERE n = \'" + name + "\'")\n'
        for at in range(count)
    )


def c(count: int) -> str:
    return "#include <string.h>\n" + "".join(
        f"int f{at}(const char *text, int n) {{\n    char word[{at + 9}];\n"
        "    for (int i = 0; i < n; i++) {\n"
        f"        if (text[i] == ' ') {{ f{max(at - 1, 0)}(text + i, n); }}\n    }}\n"
        "    strcpy(word, text);\n    return word[0];\n}\n"
        for at in range(count)
    )


def go(count: int) -> str:
    return 'package m\n\nimport "database/sql"\n\n' + "".join(
        f"func f{at}(db *sql.DB, name string, n int) {{\n\tfor i := 0; i < n; i++ {{\n"
        f"\t\tf{max(at - 1, 0)}(db, name, i)\n\t}}\n"
        '\tdb.Query("SELECT * FROM t WHERE n = \'" + name + "\'")\n}\n'
        for at in range(count)
    )


SHAPES: list[tuple[str, Callable[[int], str]]] = [
    ("javascript", plain),
    ("typescript", wrapped),
    ("javascript", methods),
    ("javascript", statements),
    ("javascript", one_function),
    ("java", java),
]
OTHERS: list[tuple[str, Callable[[int], str]]] = [
    ("javascript", findings_of_one_function),
    ("typescript", findings_of_one_function),
    ("python", python_findings_of_one_function),
    ("python", python),
    ("c", c),
    ("go", go),
]


@pytest.mark.parametrize(
    ("language", "shape"),
    SHAPES + OTHERS,
    ids=[f"{language}: {shape.__name__}" for language, shape in SHAPES + OTHERS],
)
def test_the_work_of_an_audit_is_linear_in_the_text(
    language: str, shape: Callable[[int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    LiveAudit(language, shape(2))  # loads the rules
    done: list[tuple[float, float]] = []
    for size in SIZES:
        text = shape(size)
        with counted(monkeypatch) as work:
            LiveAudit(language, text)
        done.append((work.calls / len(text), work.parsed / len(text)))
    assert done[1][0] < 1.6 * done[0][0], done
    assert done[1][1] < 1.6 * done[0][1], done


@pytest.mark.parametrize(
    ("language", "shape"),
    [item for item in SHAPES if item[1] is not one_function and item[1] is not statements],
)
def test_the_work_of_a_key_does_not_grow_with_the_rest_of_the_file(
    language: str, shape: Callable[[int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[int, int]] = []
    for size in SIZES:
        text = shape(size)
        live = LiveAudit(language, text)
        at = text.index("\n", text.index("rows = []" if language != "java" else "String text"))
        live.edit(at, at, "\n  x")
        with counted(monkeypatch) as work:
            live.edit(at + 4, at + 4, "y")
        done.append((work.calls, work.parsed))
    per_unit = 150  # calls for each further function: its cached result is looked up
    assert done[1][0] < 1.5 * done[0][0] + per_unit * (SIZES[1] - SIZES[0]), done
    assert done[1][1] < 1.2 * done[0][1] + 100, done


def test_many_fixes_of_one_function_are_all_proved() -> None:
    for language, shape in (
        ("javascript", findings_of_one_function),
        ("python", python_findings_of_one_function),
    ):
        few, many = (LiveAudit(language, shape(count)).findings for count in (2, 30))
        assert len(many) == 15 * len(few)
        assert {(item.rule, item.grade) for item in many} == {(item.rule, item.grade) for item in few}


def test_the_methods_of_a_typed_class_are_audited_apart() -> None:
    body = "    const name = load(data);\n    return name;\n  }\n"
    text = (
        "export abstract class Store<Output = any, Input = Output> extends Base<Output> {\n"
        f"  parse(data: unknown, params?: Partial<Params>): Output {{\n{body}"
        f"  async read(data: unknown): Promise<Result<Input, Output>> {{\n{body}"
        f"  write(data: unknown): {{ ok: boolean }} | undefined {{\n{body}}}\n"
    )
    units = [text[unit.start : unit.end] for unit in LiveAudit("typescript", text)._units]
    assert [unit.split("(")[0] for unit in units if unit.endswith("name;\n  }")] == ["parse", "async read"]


def test_an_open_bracket_does_not_join_the_functions_behind_it() -> None:
    text = plain(30)
    live = LiveAudit("javascript", text)
    at = text.index("\n", text.index("rows = []"))
    count = len(live._units)
    live.edit(at, at, "\n  total += count(name")
    assert len(live._units) == count
    assert live.findings == LiveAudit("javascript", live.text).findings


def test_the_statements_of_a_module_wrapper_are_audited_like_those_of_a_file() -> None:
    body = (
        'var db = require("mysql").createConnection({});\n'
        'function list(req, res) {\n  db.query("SELECT * FROM t WHERE n = \'" + req.query.n + "\'");\n}\n'
    )
    heads = [
        ("(function () {\n", "})();\n"),
        ("(function (root, factory) {\n  root.x = factory();\n}(this, function ($) {\n", "}));\n"),
        ("!function () {\n", "}();\n"),
        ('define(["a"], function (a) {\n', "});\n"),
        ("module.exports = function (app) {\n", "};\n"),
        ("(() => {\n", "})();\n"),
        ("(async function () {\n(function () {\n", "})();\n})();\n"),
        ("$(document).ready(function () {\n", "});\n"),
    ]
    (alone,) = LiveAudit("javascript", body).findings
    for head, tail in heads:
        live = LiveAudit("javascript", head + body + tail)
        (finding,) = live.findings
        assert (finding.rule, finding.start) == (alone.rule, alone.start + len(head)), head
        assert sum(not unit.skipped for unit in live._units) == 1, head


@pytest.mark.parametrize("language", ["javascript", "typescript"])
def test_a_key_in_a_function_without_its_end_walks_only_the_statements_it_touches(
    language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[int] = []
    for size in SIZES:
        branches = "".join(
            f"    if (item.kind === {at}) {{\n      found = read({at});\n      out.push(found);\n    }}\n"
            for at in range(size)
        )
        text = (
            f'const read = require("read");\nclass Store {{\n  parse(input) {{\n{branches}    last();\n'
            "    for (const item of input) {\n      if (item.last) {\n        note({\n          one: item,\n"
        )
        live = LiveAudit(language, text)
        at = text.index("\n    last")
        live.edit(at, at, "\n    x")
        with counted(monkeypatch) as work:
            live.edit(at + 6, at + 6, "y")
        assert live.findings == Auditor(language).audit(live.text)
        done.append(work.calls)
    per_branch = (
        200  # calls to find the remembered effect of a statement; a walk of it takes three times as many
    )
    assert done[1] - done[0] < per_branch * (SIZES[1] - SIZES[0]), done


def test_a_long_function_is_not_evaluated_at_its_calls() -> None:
    def found(length: int) -> int:
        body = "  note(1);\n" * length
        text = (
            'const { exec } = require("child_process");\n'
            f"function clean(text) {{\n{body}  return Number(text);\n}}\n"
            'app.get("/", (req, res) => { exec("ls " + clean(req.query.name)); });\n'
        )
        return len(LiveAudit("javascript", text).findings)

    assert (found(2), found(400)) == (0, 1)
