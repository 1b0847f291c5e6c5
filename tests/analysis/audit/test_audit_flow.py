"""Data flow: what makes a value foreign, what makes it safe, and what keeps it constant."""

from __future__ import annotations

import pytest

from keystroke.analysis.audit import Auditor, LiveAudit

HEAD = "import os, shlex, re, subprocess\nfrom flask import request, abort\n"


def rules(language: str, text: str) -> set[str]:
    return {finding.rule for finding in Auditor(language).audit(text)}


@pytest.mark.parametrize(
    "body",
    [
        "def f(x):\n    os.system('ls ' + x)\n",
        "def f(x):\n    c = 'ls'\n    c = c + x\n    os.system(c)\n",
        "def f(x):\n    c = 'ls {}'.format(x)\n    os.system(c)\n",
        "def f(x):\n    c = ' '.join(['ls', x])\n    os.system(c)\n",
        "def f(x):\n    a, b = x, 1\n    os.system('ls ' + a)\n",
        "def f(x, y):\n    c = 'ls'\n    if y:\n        c += x\n    os.system(c)\n",
        "def f(xs):\n    for x in xs:\n        os.system('ls ' + x)\n",
        "def f(x):\n    d = {'a': 'b'}\n    d['k'] = x\n    os.system(d['k'])\n",
        "def f(x):\n    try:\n        c = 'l' + x\n    except KeyError:\n        c = ''\n    os.system(c)\n",
        "def g(x):\n    def h(y):\n        return 'ls ' + y\n    os.system(h(x))\n",
        "def f(x):\n    if x == 'a':\n        pass\n    os.system('ls ' + x)\n",
        "c = input()\nos.system(c)\n",
    ],
)
def test_data_reaches_a_sink_through_local_variables(body: str) -> None:
    assert "python-command-injection" in rules("python", HEAD + body)


@pytest.mark.parametrize(
    "body",
    [
        "def f():\n    c = 'ls'\n    c += ' -l'\n    os.system(c)\n",
        "def f(x):\n    os.system('kill %d' % int(x))\n",
        "def f(x):\n    x = shlex.quote(x)\n    os.system('ls ' + x)\n",
        "OK = {'a', 'b'}\ndef f(x):\n    if x not in OK:\n        raise OSError\n    os.system('ls ' + x)\n",
        "def f(x):\n    if x in ('a', 'b'):\n        os.system('ls ' + x)\n",
        "def f(x):\n    if not x.isalnum():\n        abort(400)\n    os.system('ls ' + x)\n",
        "def f(x):\n    if not re.fullmatch('[a-z]+', x):\n        return\n    os.system('ls ' + x)\n",
        "def f(x):\n    d = {'a': 'ls', 'b': x}\n    os.system(d['a'])\n",
        "def f(x):\n    if x == 'a':\n        os.system('ls ' + x)\n",
        "def f(x):\n    c = 'ls ' + x if False else 'ls'\n    os.system(c)\n",
    ],
)
def test_constants_and_checked_values_stay_silent(body: str) -> None:
    assert "python-command-injection" not in rules("python", HEAD + body)


def test_a_java_map_keeps_its_entries_apart() -> None:
    text = """class A {{ void f(HttpServletRequest request, Statement st) throws Exception {{
      HashMap<String, Object> m = new HashMap<>();
      m.put("a", "x"); m.put("b", request.getParameter("p"));
      st.executeQuery("SELECT * FROM t WHERE a='" + m.get("{key}") + "'");
    }} }}"""
    assert "java-sql-injection" in rules("java", text.format(key="b"))
    assert "java-sql-injection" not in rules("java", text.format(key="a"))


def test_a_branch_that_can_never_run_brings_no_data() -> None:
    text = """class A {{ void f(HttpServletRequest request, Statement st) throws Exception {{
      int n = 106; String b;
      if ((7 * 18) + n > {limit}) b = "x"; else b = request.getParameter("p");
      st.executeQuery("SELECT * FROM t WHERE a='" + b + "'");
    }} }}"""
    assert "java-sql-injection" in rules("java", text.format(limit=500))
    assert "java-sql-injection" not in rules("java", text.format(limit=200))


def test_facts_outside_a_function_are_known_inside_it() -> None:
    assert "python-weak-hash" in rules("python", "import hashlib as h\n\ndef sign(b):\n    return h.md5(b)\n")
    assert "python-static-iv" in rules(
        "python",
        "from Crypto.Cipher import AES\nIV = b'0000000000000000'\n\ndef f(k):\n    AES.new(k, 2, IV)\n",
    )


def test_the_origin_of_the_data_is_named() -> None:
    (finding,) = Auditor("python").audit(
        "import os\nfrom flask import request\ndef f():\n    os.system('ls ' + request.args['d'])\n"
    )
    assert finding.origin == "flask.request.args"


HELPER = """class A {{
  void f(HttpServletRequest request, Statement st) throws Exception {{
    st.executeQuery("SELECT * FROM t WHERE a='" + pick(request.getParameter("p")) + "'");
  }}
  private static String pick(String x) {{ return {result}; }}
}}"""


def test_a_helper_of_the_same_file_is_read_at_its_call() -> None:
    assert "java-sql-injection" in rules("java", HELPER.format(result="x"))
    assert "java-sql-injection" not in rules("java", HELPER.format(result='"a"'))


def test_typing_in_a_helper_changes_what_its_callers_are_told() -> None:
    text = HELPER.format(result="x")
    live = LiveAudit("java", text)
    at = text.index("return x") + len("return ")
    assert "java-sql-injection" not in {finding.rule for finding in live.edit(at, at + 1, '"a"')}
    assert "java-sql-injection" in {finding.rule for finding in live.edit(at, at + 3, "x")}


@pytest.mark.parametrize(
    ("check", "safe"),
    [
        ('if "\'" in name:\n        return None', True),
        ("name = name.replace(\"'\", '')", True),
        ("name = re.sub(r'[^a-z0-9]', '', name)", True),
        ("name = name.replace('x', '')", False),
        ("if 'x' in name:\n        return None", False),
    ],
)
def test_a_value_without_the_quote_cannot_leave_the_quotes(check: str, safe: bool) -> None:
    text = f"import re\ndef f(tree, name):\n    {check}\n    return tree.xpath(f\"//u[@n='{{name}}']\")\n"
    found = {finding.rule for finding in Auditor("python").audit(text)}
    assert ("python-xpath-injection" not in found) is safe


def test_a_global_replacement_cleans_and_the_first_occurrence_alone_does_not() -> None:
    text = 'app.get("/", (req, res) => { res.send("<p>" + req.query.n.replace(%s, "")); });'
    for pattern, safe in (("/[<>]/g", True), ("/[<>]/", False), ("/[^a-z]/g", True), ("/<script>/g", False)):
        found = {finding.rule for finding in Auditor("javascript").audit(text % pattern)}
        assert ("javascript-xss-response" not in found) is safe, pattern


def test_an_unknown_part_of_our_own_does_not_undo_what_made_the_rest_safe() -> None:
    text = "import os, shlex\nfrom flask import request\ndef f(self):\n    os.system(self.tool + ' ' + {})\n"
    unsafe = Auditor("python").audit(text.format("request.args['a']"))
    safe = Auditor("python").audit(text.format("shlex.quote(request.args['a'])"))
    assert [finding.rule for finding in unsafe] == ["python-command-injection"]
    assert safe == ()


def test_guessable_numbers_are_followed_through_conversions_to_a_secret() -> None:
    text = (
        "import random, base64\n"
        "def f():\n"
        "    raw = random.randbytes(9)\n"
        "    {} = str(base64.b64encode(raw))\n"
    )
    for name, weak in (("reset_token", True), ("label", False)):
        found = {finding.rule for finding in Auditor("python").audit(text.format(name))}
        assert ("python-weak-random" in found) is weak


def test_settings_and_lists_keep_their_items_apart() -> None:
    text = (
        "import configparser, os\n"
        "def f(word):\n"
        "    settings = configparser.ConfigParser()\n"
        "    settings.set('a', 'fixed', 'ls')\n"
        "    settings.set('a', 'given', word)\n"
        "    items = ['ls', word]\n"
        "    items.pop(0)\n"
        "    os.system({})\n"
    )
    for used, weak in (
        ("settings.get('a', 'fixed')", False),
        ("settings.get('a', 'given')", True),
        ("items[0]", True),
    ):
        assert bool(Auditor("python").audit(text.format(used))) is weak, used
