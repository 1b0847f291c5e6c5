"""The audit kept up to date equals the audit from scratch, whatever is typed."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from keystroke.analysis.audit import LANGUAGES, Auditor, LiveAudit, all_rules
from keystroke.analysis.audit.rules.triggers import FLOW, Triggers
from keystroke.analysis.audit.source.units import resplit, split
from keystroke.errors import InputError

SAMPLES = {
    language: "\n".join(
        text for rule in list(all_rules().values()) if rule.language == kind for text in rule.tests.bad[:1]
    )[:4000]
    for language, kind in (
        ("python", "python"),
        ("javascript", "javascript"),
        ("typescript", "javascript"),
        ("tsx", "javascript"),
        ("c", "c"),
        ("cpp", "c"),
        ("go", "go"),
        ("java", "java"),
    )
}
PIECES = [
    "",
    "x",
    "\n",
    "    ",
    "{",
    "}",
    "(",
    ")",
    '"',
    "'",
    '"""',
    "/*",
    "*/",
    "#",
    "//",
    ";",
    "def f(x):\n    eval(x)\n",
    "import os\n",
    "`",
    "é😀",
]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(LANGUAGES),
    st.lists(
        st.tuples(st.integers(0, 5000), st.integers(0, 12), st.sampled_from(PIECES)), min_size=1, max_size=4
    ),
)
def test_editing_and_auditing_afresh_agree(language: str, edits: list[tuple[int, int, str]]) -> None:
    live = LiveAudit(language, SAMPLES[language][:1500])
    for at, length, text in edits:
        start = min(at, len(live.text))
        live.edit(start, min(start + length, len(live.text)), text)
    assert live.findings == Auditor(language).audit(live.text)


LONG = """import os, re, subprocess
from flask import request

LIMIT = "ls"

def handle(name, rows, *, password=None):
    command = "ls " + name
    def quoted(text):
        if text.isalnum():
            return text
        return "'" + text + "'"
    total = 0
    for row in rows:
        if not row:
            continue
        elif row == "stop":
            break
        value = quoted(row)
        total += len(value)
        try:
            with open("/srv/" + row) as file:
                command = command + file.read()
        except OSError:
            command = LIMIT
        finally:
            total = 0
    while total < 10:
        total += 1
        if total == 5:
            name = request.args.get("name")
    if name in ("a", "b"):
        os.system(name)
    else:
        subprocess.run("echo " + quoted(name), shell=True)
    cursor.execute("select * from t where name = '%s'" % command)
    match = re.search(name, command)
    return eval(command) if match else None
"""
TYPED = [
    *PIECES,
    "value = name\n    ",
    "name",
    "row = quoted(name)\n        ",
    "break\n",
    "return\n",
    "=",
    ".",
    "if name:\n",
]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(st.integers(0, 1300), st.integers(0, 6), st.sampled_from(TYPED)), min_size=1, max_size=6
    )
)
def test_a_function_edited_step_by_step_is_judged_as_if_read_for_the_first_time(
    edits: list[tuple[int, int, str]],
) -> None:
    live = LiveAudit("python", LONG)
    for at, length, text in edits:
        start = min(at, len(live.text))
        live.edit(start, min(start + length, len(live.text)), text)
        assert live.findings == Auditor("python").audit(live.text)


SCRIPT = """const { exec } = require("child_process");
(function ($, window) {
  var base = "ls ";
  function quoted(text) {
    return helper(text, 1);
  }
  function helper(text, count) {
    if (count) { return "'" + text + "'"; }
    return text;
  }
  app.get("/x", function (req, res) {
    var name = req.query.name, total = 0;
    for (var i = 0; i < 3; i++) {
      if (name === "stop") { break; }
      total += i;
      try { name = name + quoted(req.params.id); } catch (error) { res.send(error.stack); }
    }
    const parts = [name].map((item) => { total++; return base + item; });
    exec(base + quoted(name));
    res.send("<b>" + parts + "</b>");
  });
  class Store {
    find(req) {
      switch (req.query.kind) {
        case "a": return this.read(req.query.file);
        default: return eval(req.query.code);
      }
    }
    read(file) { return fs.readFileSync("/srv/" + file); }
  }
  $("#x").html(location.hash);
}(jQuery, this));
"""
SCRIPT_TYPED = [
    *PIECES,
    "name = req.query.x;\n",
    "function f(a) {\n",
    "})();\n",
    "quoted(name)",
    "(function () {",
    "=>",
]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.one_of(st.just(len(SCRIPT)), st.integers(0, len(SCRIPT))),
    st.lists(
        st.tuples(st.integers(0, 1200), st.integers(0, 6), st.sampled_from(SCRIPT_TYPED)),
        min_size=1,
        max_size=6,
    ),
)
@example(948, [(365, 0, "(function () {"), (0, 0, "x")])  # what a remembered statement returns
def test_a_script_edited_step_by_step_is_judged_as_if_read_for_the_first_time(
    written: int, edits: list[tuple[int, int, str]]
) -> None:
    live = LiveAudit("javascript", SCRIPT[:written])
    for at, length, text in edits:
        start = min(at, len(live.text))
        live.edit(start, min(start + length, len(live.text)), text)
        assert split(live.text, "javascript") == live._units
        assert live.findings == Auditor("javascript").audit(live.text)


def test_functions_without_a_word_any_rule_waits_for_are_silent_when_walked_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = [
        text
        for rule in all_rules().values()
        if rule.language == "python"
        for text in (*rule.tests.bad, *rule.tests.good)
    ]
    expected = [Auditor("python").audit(text) for text in texts]
    monkeypatch.setattr(Triggers, "required_analysis", lambda *_: FLOW)
    assert [Auditor("python").audit(text) for text in texts] == expected


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(LANGUAGES), st.integers(0, 5000), st.integers(0, 12), st.sampled_from(PIECES))
def test_cutting_again_around_an_edit_gives_the_same_units(
    language: str, at: int, length: int, text: str
) -> None:
    before = SAMPLES[language]
    start = min(at, len(before))
    end = min(start + length, len(before))
    after = before[:start] + text + before[end:]
    assert resplit(after, language, split(before, language), start, end, len(text) - (end - start)) == split(
        after, language
    )


def test_units_lie_in_order_and_apart() -> None:
    for language, text in SAMPLES.items():
        units = split(text, language)
        assert units
        assert all(one.end <= other.start for one, other in pairwise(units))


def test_a_changed_import_reaches_the_functions_that_use_it() -> None:
    live = LiveAudit("python", "import json as p\n\ndef f(b):\n    return p.loads(b)\n")
    assert live.findings == ()
    assert [f.rule for f in live.edit(7, 11, "pickle")] == ["python-unsafe-deserialization"]
    assert live.edit(7, 13, "json") == ()


def test_findings_move_with_the_text() -> None:
    live = LiveAudit("python", "import os\n\ndef f(x):\n    os.system(x)\n")
    (before,) = live.findings
    (after,) = live.edit(0, 0, "# one more line\n")
    assert (after.start - before.start, after.end - before.end) == (16, 16)
    assert live.text[after.start : after.end] == "os.system(x)"


def test_an_edit_outside_the_text_is_refused_and_changes_nothing() -> None:
    live = LiveAudit("python", "x = 1\n")
    with pytest.raises(InputError, match="does not lie in a text of 6"):
        live.edit(5, 9, "")
    assert live.text == "x = 1\n"


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize(
    "text",
    [
        "(" * 5000,
        "{" * 5000,
        "[" * 3000 + "]" * 3000,
        "x = " + "1 + " * 3000 + "1",
        'x = "a"' + ' + "b"' * 2000,
        "if (x) {" * 400,
        "a." * 5000,
        "\ud800 = 1",
        "def def ( class } ; '",
        "x" * 1_000_000,
        "é" * 1000 + "\r\n\t" * 1000,
        "if x:\n" + "".join(" " * n + "if x:\n" for n in range(1, 300)),
    ],
    ids=range(12),
)
def test_hostile_text_ends_in_findings_or_in_a_refusal(language: str, text: str) -> None:
    with suppress(InputError):
        assert isinstance(Auditor(language).audit(text), tuple)


def test_binary_and_huge_texts_are_refused_with_a_sentence() -> None:
    with pytest.raises(InputError, match="binary"):
        Auditor("python").audit("a\0b")
    with pytest.raises(InputError, match="at most"):
        Auditor("python").audit("x" * 4_000_001)
