"""A fix is safe only if the program shows that its harmless behaviour stays; otherwise it is a suggestion.

Each case is a fix that broke a real program, or one of its family; the neighbours in which the evidence is
there show that the grade depends on it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keystroke.analysis.audit import Auditor, Finding
from keystroke.analysis.audit.finding import FixGrade
from keystroke.analysis.audit.project import ProjectFacts, project_root
from keystroke.analysis.audit.report import AuditedFile, apply_fixes, as_json, as_text
from keystroke.analysis.audit.rules.catalog import FixSpec, load_rules
from keystroke.text import apply_edits

EXPRESS = 'const express = require("express");\nconst app = express();\n'
FLASK = "from flask import Flask, request, make_response, redirect\napp = Flask(__name__)\n"
HTTP = 'package m\n\nimport (\n\t"fmt"\n\t"html/template"\n\t"net/http"\n)\n\n'

# language, what it is, program
NOT_SAFE = [
    ("python", "a template that writes Python", "import jinja2\nenv = jinja2.Environment(loader=None)\n"),
    (
        "python",
        "a class of the project called Environment",
        "from .db import Environment\nenv = Environment(autoescape=False)\n",
    ),
    (
        "python",
        "a class of the file called Environment",
        "class Environment:\n    pass\n\n\nenv = Environment(autoescape=False)\n",
    ),
    (
        "python",
        "extractall of another library",
        "import py7zr\ndef f(p):\n    with py7zr.SevenZipFile(p) as archive:\n"
        "        archive.extractall(path=p)\n",
    ),
    (
        "python",
        "the branch for a Python without filters",
        "import tarfile\ndef f(p):\n    tar = tarfile.open(p)\n    if hasattr(tarfile, 'data_filter'):\n"
        "        tar.extractall(p, filter='data')\n    else:\n        tar.extractall(p)\n",
    ),
    (
        "python",
        "a redirect to another site",
        f"{FLASK}@app.route('/go')\ndef go():\n    return redirect(request.args['url'])\n",
    ),
    (
        "python",
        "rendered markup",
        f"{FLASK}from shop import render\n@app.route('/')\ndef page():\n"
        "    return make_response('<div>' + render(request.args['q']) + '</div>')\n",
    ),
    (
        "python",
        "a field that holds markup",
        f"{FLASK}@app.route('/')\ndef page():\n    return '<div>' + request.form['body_html'] + '</div>'\n",
    ),
    (
        "python",
        "a whole page",
        f"{FLASK}@app.route('/')\ndef page():\n    return make_response(request.form['page'])\n",
    ),
    (
        "python",
        "a page with a value put in by replace",
        f"{FLASK}@app.route('/')\ndef page():\n    html = open('p.html').read()\n"
        "    return make_response(html.replace('{{ param }}', request.args['p']))\n",
    ),
    (
        "python",
        "a response that is not HTML",
        f"{FLASK}@app.route('/')\ndef page():\n    r = make_response('<a>' + request.args['p'] + '</a>')\n"
        "    r.headers['Content-Type'] = 'text/plain'\n    return r\n",
    ),
    (
        "python",
        "a hash in a column of 40 characters",
        "import hashlib\ndef key(url):\n    return hashlib.sha1(url).hexdigest()\n",
    ),
    (
        "python",
        "a hash that a protocol defines",
        "import hashlib\ndef sign(password, salt):\n    return hashlib.md5(salt + password).hexdigest()\n",
    ),
    (
        "python",
        "numbers that may have to be repeatable",
        "import random\ndef make_token(rng_seed):\n    return random.choice('abcdef0123456789')\n",
    ),
    (
        "python",
        "a random module that is not Python's",
        "from lab import random\ndef make_token():\n    return random.choice('abcdef0123456789')\n",
    ),
    (
        "python",
        "a server with its own certificate",
        "import requests\ndef f(host):\n"
        "    return requests.get(f'https://{host}/x', timeout=9, verify=False)\n",
    ),
    (
        "python",
        "a server of this machine",
        "import requests\nr = requests.get('https://127.0.0.1:8443/', timeout=9, verify=False)\n",
    ),
    (
        "python",
        "a public server whose certificate may have expired",
        "import requests\nr = requests.get('https://pypi.org/simple/', timeout=9, verify=False)\n",
    ),
    ("python", "a time limit", "import requests\nrequests.get('https://example.org/feed')\n"),
    (
        "python",
        "a loader that may have constructors elsewhere",
        "import yaml\ndef f(s):\n    return yaml.load(s, Loader=yaml.FullLoader)\n",
    ),
    (
        "python",
        "a statement run by a class of the project",
        "import sqlite3\nfrom .store import Searcher\ndef f(name):\n    finder = Searcher()\n"
        '    return finder.execute("SELECT 1 FROM u WHERE n = \'" + name + "\'")\n',
    ),
    (
        "python",
        "a pattern that the shell expands",
        "import os\ndef clean(pattern):\n    os.system('rm -f ' + pattern)\n",
    ),
    ("python", "a name with words or a home", "import os\ndef f(name):\n    os.system('ls ' + name)\n"),
    (
        "python",
        "a name that the shell completes inside double quotes",
        "import os\ndef f(name):\n    os.system('ls \"' + name + '\"')\n",
    ),
    (
        "python",
        "a part of a statement that may be code",
        "import sqlite3\ndef f(path, value):\n    base = sqlite3.connect(path)\n"
        '    return base.execute("SELECT 1 FROM u WHERE n = " + value)\n',
    ),
    (
        "python",
        "a value that was escaped before",
        "import sqlite3\ndef f(path, name):\n    base = sqlite3.connect(path)\n"
        '    name = name.replace("\'", "\'\'")\n'
        '    return base.execute("SELECT 1 FROM u WHERE n = \'" + name + "\'")\n',
    ),
    (
        "python",
        "a driver that wants a number for a number",
        "import asyncpg\nasync def f(path, name):\n    conn = await asyncpg.connect(path)\n"
        '    return await conn.fetch("SELECT 1 FROM u WHERE n = \'" + name + "\'")\n',
    ),
    (
        "python",
        "a token of a language model",
        "import random\ndef mask_token(words):\n    token = random.choice(words)\n    return token\n",
    ),
    (
        "python",
        "noise in a picture",
        "import random\ndef add_salt(picture):\n    salt = random.randint(0, 9)\n    return picture + salt\n",
    ),
    (
        "python",
        "a drawing with entities of its own",
        f"{FLASK}from lxml import etree\n@app.route('/')\ndef page():\n"
        "    return str(etree.fromstring(request.data))\n",
    ),
    (
        "python",
        "a cookie over plain HTTP",
        f"{FLASK}@app.route('/')\ndef page():\n    r = make_response('x')\n"
        f"    r.set_cookie('sid', '1')\n    return r\n",
    ),
    ("python", "a folder that others use", "import os\nos.chmod('/srv/shared', 0o777)\n"),
    (
        "python",
        "a remark that the protocol demands it",
        "import os\ndef f(name):\n    # required by the protocol\n    os.system('ls ' + name)\n",
    ),
    (
        "c",
        "an end of the whole program inside a library",
        "#include <stdio.h>\nint save(const char *name, int value) {\n"
        '    FILE *file = fopen(name, "w");\n    fprintf(file, "%d", value);\n'
        "    fclose(file);\n    return 0;\n}\n",
    ),
    (
        "javascript",
        "a path inside the program",
        'const { join } = require("path");\nconst fs = require("fs");\n'
        'fs.readFileSync(join(__dirname, "../lib/motd"));\n',
    ),
    (
        "javascript",
        "every response of a static server",
        f'{EXPRESS}app.get("/*", (req, res) => {{\n  const page = files[req.path];\n'
        f"  res.send(page);\n}});\n",
    ),
    (
        "javascript",
        "markup set by a library",
        "function html(el, value) {\n  el.innerHTML = value;\n}\n",
    ),
    ("javascript", "an element that is appended", "function add(el) {\n  $('#list').append(el);\n}\n"),
    (
        "javascript",
        "a documented regular expression",
        f'{EXPRESS}app.get("/", (req, res) => {{\n  res.json(rows.filter((row) => '
        'new RegExp(req.query.name_like, "i").test(row)));\n});\n',
    ),
    (
        "javascript",
        "a fragment of a regular expression",
        "function words(parts) {\n  return new RegExp('^(' + parts.join('|') + ')$');\n}\n",
    ),
    ("javascript", "a secret of a few bits", "const jwtSecret = Math.random().toString(36);\n"),
    (
        "javascript",
        "a mixin that sets the constructor",
        "function extend(target, source) {\n  for (const key in source) {\n"
        "    target[key] = source[key];\n  }\n}\n",
    ),
    (
        "javascript",
        "a query with a missing value",
        f'{EXPRESS}app.get("/", async (req, res) => {{\n'
        f"  res.json(await User.findOne({{ name: req.query.name }}));\n}});\n",
    ),
    (
        "javascript",
        "a command that is a script on Windows",
        'const { execSync } = require("child_process");\n'
        "function f(name) {\n  execSync(`npm view ${name}`);\n}\n",
    ),
    (
        "javascript",
        "the first occurrence",
        'function f(text) {\n  return text.replace("<", "&lt;");\n}\n',
    ),
    (
        "javascript",
        "a program that is a script on Windows",
        'const { execSync } = require("child_process");\n'
        "function f(name) {\n  execSync(`mytool '${name}'`);\n}\n",
    ),
    (
        "javascript",
        "the branch for a Node.js without the function",
        "const make = async (n) => (Buffer.alloc ? Buffer.alloc(n) : new Buffer(n));\n",
    ),
    ("javascript", "a script for any Node.js", "var b = new Buffer(9);\n"),
    (
        "go",
        "an address that stays a script",
        f"{HTTP}func f(w http.ResponseWriter, r *http.Request) {{\n"
        '\tfmt.Fprint(w, template.URL(r.FormValue("u")))\n}\n',
    ),
    (
        "go",
        "a script",
        f'{HTTP}func f(r *http.Request) template.JS {{\n\treturn template.JS(r.FormValue("u"))\n}}\n',
    ),
    (
        "go",
        "the hash of a version 3 UUID",
        'package m\n\nimport "crypto/md5"\n\nfunc f(space, name []byte) []byte {\n\th := md5.New()\n'
        "\th.Write(space)\n\th.Write(name)\n\treturn h.Sum(nil)\n}\n",
    ),
    (
        "c",
        "a number that wraps around",
        "#include <stdlib.h>\nint hash(const char *s) {\n    int n = atoi(s);\n"
        "    int h = n * 31;\n    return h;\n}\n",
    ),
    (
        "c",
        "an early end that the callers do not know",
        "#include <stdlib.h>\n#include <string.h>\nint f(const char *s) {\n"
        "    char *copy = malloc(strlen(s) + 1);\n    strcpy(copy, s);\n    free(copy);\n    return 0;\n}\n",
    ),
    ("c", "a format of the program", "#include <stdio.h>\nvoid say(const char *fmt) { printf(fmt); }\n"),
]

# The same shapes with the evidence.
SAFE = [
    (
        "python",
        "a field between tags",
        f"{FLASK}@app.route('/')\ndef page():\n    return '<b>' + request.args['name'] + '</b>'\n",
        "html.escape(",
    ),
    (
        "python",
        "Python's own random numbers",
        "import random\ndef make_token():\n    return random.choice('abcdef0123456789')\n",
        "secrets.choice(",
    ),
    (
        "python",
        "a cursor of the imported driver",
        "import sqlite3\ndef f(path, name):\n    base = sqlite3.connect(path)\n"
        '    return base.execute("SELECT 1 FROM u WHERE n = \'" + name + "\'")\n',
        "WHERE n = ?",
    ),
    (
        "python",
        "one argument in quotes",
        'import os\ndef f(name):\n    os.system("ls \'" + name + "\'")\n',
        "shlex.quote(",
    ),
    (
        "javascript",
        "a field between tags",
        f'{EXPRESS}app.get("/", (req, res) => {{\n  res.send("<b>" + req.query.name + "</b>");\n}});\n',
        "String(req.query.name).replace(",
    ),
    (
        "javascript",
        "a script for a Node.js that has the function",
        "async function make(n) {\n  return new Buffer(9);\n}\n",
        "Buffer.alloc(9)",
    ),
    (
        "go",
        "a field between tags",
        'package m\n\nimport (\n\t"fmt"\n\t"net/http"\n)\n\n'
        "func f(w http.ResponseWriter, r *http.Request) {\n"
        '\tfmt.Fprintf(w, "<b>%s</b>", r.FormValue("name"))\n}\n',
        "html.EscapeString(",
    ),
]


def offers(language: str, text: str, project: ProjectFacts | None = None) -> tuple[Finding, ...]:
    return Auditor(language, project=project).audit(text)


@pytest.mark.parametrize(("language", "what", "text"), NOT_SAFE, ids=[f"{c[0]}: {c[1]}" for c in NOT_SAFE])
def test_without_evidence_a_fix_is_at_most_a_suggestion(language: str, what: str, text: str) -> None:
    findings = offers(language, text)
    assert [(item.rule, item.fixes) for item in findings if item.fixes] == []
    assert all(fix.changes for item in findings for fix in item.suggestions)
    assert apply_fixes(AuditedFile("a", text, findings)) == (text, 0)


@pytest.mark.parametrize(("language", "what", "text", "written"), SAFE, ids=[f"{c[0]}: {c[1]}" for c in SAFE])
def test_with_evidence_a_fix_is_safe(language: str, what: str, text: str, written: str) -> None:
    findings = offers(language, text)
    assert FixGrade.SAFE in {item.grade for item in findings}
    assert written in apply_fixes(AuditedFile("a", text, findings))[0]


def test_a_fix_that_would_raise_is_not_even_suggested() -> None:
    texts = [
        ("python", "import ssl\ndef f(s):\n    return ssl.wrap_socket(s, cert_reqs=ssl.CERT_NONE)\n"),
        ("javascript", 'const serialize = require("node-serialize");\nserialize.unserialize({ a: 1 });\n'),
        ("c", 'void f(const char *x) {\n    char b[9] = "";\n    sprintf(b, "%s x", b);\n}\n'),
        ("javascript", "var location = window.location;\n"),
    ]
    for language, text in texts:
        found = offers(language, text)
        assert [fix.title for item in found for fix in (*item.fixes, *item.suggestions)] == [], text


def test_an_unverified_context_that_is_set_up_later_gets_no_default_context() -> None:
    text = (
        "import ssl\ndef f():\n    context = ssl._create_unverified_context()\n"
        "    context.verify_mode = ssl.CERT_NONE\n    return context\n"
    )
    found = [fix for item in offers("python", text) for fix in (*item.fixes, *item.suggestions)]
    assert not any("create_default_context" in apply_edits(text, fix.edits) for fix in found)


def test_a_pipe_is_closed_by_its_own_function() -> None:
    text = (
        "#include <stdio.h>\nint f(void) {\n    char line[80];\n"
        '    FILE *in = popen("date", "r");\n    if (in == NULL) return 1;\n'
        "    fgets(line, sizeof(line), in);\n    return line[0];\n}\n"
    )
    fixed = [
        apply_edits(text, fix.edits)
        for item in offers("c", text)
        if item.rule == "c-handle-leak"
        for fix in item.suggestions
    ]
    assert fixed
    assert all("pclose(in)" in item and "fclose" not in item for item in fixed)


def test_a_name_in_a_comment_does_not_keep_an_unused_go_import() -> None:
    text = (
        'package m\n\nimport "crypto/md5"\n\n// md5.New is what the old version used.\n'
        "func f(b []byte) []byte {\n\th := md5.New()\n\th.Write(b)\n\treturn h.Sum(nil)\n}\n"
    )
    (finding,) = [item for item in offers("go", text) if item.suggestions]
    after = apply_edits(text, finding.suggestions[0].edits)
    assert '"crypto/md5"' not in after
    assert '"crypto/sha256"' in after


def test_what_the_project_declares_decides(tmp_path: Path) -> None:
    tar = "import tarfile\ndef f(p, d):\n    with tarfile.open(p) as t:\n        t.extractall(d)\n"
    load = "import yaml\ndef f(s):\n    return yaml.load(s, Loader=yaml.FullLoader)\n"
    (tmp_path / "a.py").write_text(tar)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "a"\nrequires-python = ">=3.9"\n')
    (old,) = offers("python", tar, ProjectFacts(tmp_path))
    assert old.grade is FixGrade.SUGGESTION
    assert "3.9" in old.suggestions[0].changes
    assert offers("python", load, ProjectFacts(tmp_path))[0].grade is FixGrade.SAFE
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "a"\nrequires-python = ">=3.12"\n')
    (tmp_path / "b.py").write_text("import yaml\nyaml.add_constructor('!env', print)\n")
    assert offers("python", tar, ProjectFacts(tmp_path))[0].grade is FixGrade.SAFE
    (custom,) = offers("python", load, ProjectFacts(tmp_path))
    assert (custom.grade, "add_constructor" in custom.suggestions[0].changes) == (FixGrade.SUGGESTION, True)


def test_a_call_that_the_tests_replace_is_not_changed_unasked(tmp_path: Path) -> None:
    text = "import random\ndef make_token():\n    return random.choice('abcdef0123456789')\n"
    (tmp_path / "setup.cfg").write_text("[options]\npython_requires = >=3.10\n")
    (tmp_path / "test_a.py").write_text("from unittest import mock\nmock.patch('a.random.choice')\n")
    (finding,) = offers("python", text, ProjectFacts(project_root(tmp_path / "test_a.py")))
    assert finding.grade is FixGrade.SUGGESTION
    assert "tests" in finding.suggestions[0].changes
    assert ProjectFacts(tmp_path).python == (3, 10)


def test_numbers_that_the_project_starts_with_a_seed_stay_as_they_are(tmp_path: Path) -> None:
    text = "import random\ndef make_token():\n    return random.choice('abcdef0123456789')\n"
    (tmp_path / "a.py").write_text(text)
    assert offers("python", text, ProjectFacts(tmp_path))[0].grade is FixGrade.SAFE
    (tmp_path / "run.py").write_text("import random\nrandom.seed(7)\n")
    assert offers("python", text, ProjectFacts(tmp_path))[0].grade is FixGrade.SUGGESTION


def test_the_grade_is_in_every_output() -> None:
    text = "import os\ndef f(a, code):\n    os.system(f\"ls '{a}'\")\n    eval(code)\n    exec(code)\n"
    file = AuditedFile("a.py", text, offers("python", text))
    assert [item.grade.value for item in file.findings] == ["safe", "suggestion", "none"]
    entries = json.loads(json.dumps(as_json([file])))["findings"]
    assert [entry["grade"] for entry in entries] == ["safe", "suggestion", "none"]
    assert entries[0]["fixes"][0]["grade"] == "safe"
    assert entries[1]["suggestions"][0]["changes"]
    lines = as_text([file])
    assert "(safe fix)" in lines[0]
    assert "(suggestion)" in lines[1]
    assert "may change" in lines[1]


def test_a_rule_says_what_makes_its_fix_safe_or_what_a_suggestion_changes() -> None:
    with pytest.raises(ValueError, match="evidence"):
        FixSpec(title="x")
    with pytest.raises(ValueError, match="changes"):
        FixSpec(title="x", suggest=True)
    for language in ("python", "javascript", "c", "go", "java"):
        assert all(spec.suggest or spec.evidence for rule in load_rules(language) for spec in rule.fixes)


@pytest.mark.parametrize(
    ("parameter", "product", "call"),
    [
        ("int n", "n * sizeof(int)", "calloc(n, sizeof(int))"),
        ("int n", "sizeof(int) * (n + 1)", "calloc(n + 1, sizeof(int))"),
        ("double n", "n * sizeof(int)", ""),
        ("float n", "sizeof(int) * n", ""),
        ("int n", "n * 1.5", ""),
        ("int n", "sizeof(int) * (n * 1.5)", ""),
        ("int n", "sizeof(int) * (size_t)sqrt(n)", ""),
    ],
)
def test_calloc_is_given_a_count_and_then_a_size_and_no_fraction(
    parameter: str, product: str, call: str
) -> None:
    text = f"void *f({parameter}) {{\n    return malloc({product});\n}}\n"
    found = [item for item in offers("c", text) if item.rule == "c-allocation-overflow"]
    fixed = [apply_edits(text, item.fixes[0].edits) for item in found if item.fixes]
    assert (call in fixed[0]) if call else not fixed


def test_memory_that_a_function_clears_only_on_demand_is_not_cleared_by_a_safe_fix() -> None:
    body = "    int *p{};\n    p = malloc(n * sizeof(int));\n    return p;\n}}\n"
    (plain,) = offers("c", "int *f(int n) {\n" + body.format(""))
    (chosen,) = offers("c", "int *f(int n, int clear) {\n" + body.format(" = clear ? calloc(n, 4) : 0"))
    assert [bool(item.fixes) for item in (plain, chosen)] == [True, False]
    assert "calls calloc elsewhere" in chosen.suggestions[0].changes


@pytest.mark.parametrize(
    ("head", "kept"),
    [
        ('#include "Python.h"\n', '#include "Python.h"\n#include <stdio.h>\n'),
        (
            '#ifdef HAVE_CONFIG\n#include "config.h"\n#endif\n#include "a.h"\n',
            '#endif\n#include "a.h"\n#include <stdio.h>\n',
        ),
    ],
)
def test_a_new_header_goes_behind_the_one_that_must_be_first(head: str, kept: str) -> None:
    text = head + "void f(const char *s) {\n    char b[9];\n    strcpy(b, s);\n}\n"
    (found,) = offers("c", text)
    assert kept in apply_edits(text, found.fixes[0].edits)


def test_a_bounded_print_needs_no_new_header() -> None:
    text = 'void f(const char *s) {\n    char b[9];\n    sprintf(b, "%s", s);\n}\n'
    (found,) = offers("c", text)
    assert "include" not in apply_edits(text, found.fixes[0].edits)


@pytest.mark.parametrize(
    "line",
    [
        "import commands",
        "from __future__ import print_function",
        "from __future__ import (\n    division,\n    absolute_import,\n)",
        "import six",
    ],
)
def test_code_that_also_runs_on_python_2_gets_no_function_that_is_missing_there(line: str) -> None:
    body = "import os\ndef f(a):\n    os.system(f\"ls '{a}'\")\n"
    assert offers("python", body)[0].fixes
    (found,) = offers("python", f"{line}\n{body}")
    assert not found.fixes
    assert "Python 2" in found.suggestions[0].changes


@pytest.mark.parametrize(
    ("imported", "body"),
    [
        ("from lxml import etree", "    return tree.xpath(\"//*[@id='%s']\" % a)\n"),
        ("import sqlite3", "    conn.execute(\"SELECT x FROM t WHERE y = '%s'\" % a)\n"),
    ],
)
def test_values_of_code_that_also_runs_on_python_2_are_not_converted(imported: str, body: str) -> None:
    text = f"{imported}\ndef f(tree, conn, a):\n{body}"
    assert "str(a)" in apply_edits(text, offers("python", text)[0].fixes[0].edits)
    (found,) = offers("python", f"from __future__ import print_function\n{text}")
    assert not found.fixes
    assert "Python 2" in found.suggestions[0].changes


def test_a_project_that_names_python_2_gets_no_function_that_is_missing_there(tmp_path: Path) -> None:
    text = "import os\ndef f(a):\n    os.system(f\"ls '{a}'\")\n"
    setup = tmp_path / "setup.py"
    for said, safe in (("Python :: 3", True), ("Python :: 2.7", False)):
        setup.write_text(f"setup(classifiers=['Programming Language :: {said}'])\n")
        assert bool(offers("python", text, ProjectFacts(tmp_path))[0].fixes) is safe
    for said, safe in ((">=3.8", True), (">=3.4", False)):
        setup.write_text(f"setup(python_requires='{said}')\n")
        assert bool(offers("python", text, ProjectFacts(tmp_path))[0].fixes) is safe


@pytest.mark.parametrize("line", ["print 'a'", "except ValueError, e:", "raise ValueError, 'a'"])
def test_a_project_written_for_python_2_gets_no_function_that_is_missing_there(
    tmp_path: Path, line: str
) -> None:
    text = "import os\ndef f(a):\n    os.system(f\"ls '{a}'\")\n"
    other = tmp_path / "other.py"
    for said, safe in (("print('a')", True), (f"    {line}", False)):
        other.write_text(f"{said}\n")
        assert bool(offers("python", text, ProjectFacts(tmp_path))[0].fixes) is safe


@pytest.mark.parametrize(
    ("imported", "call"),
    [
        ("import os", "os.system(f\"ls '{{{}}}'\")"),
        ("import sqlite3", "conn.execute(f\"SELECT x FROM t WHERE y = '{{{}}}'\")"),
        ("from lxml import etree", "tree.xpath(f\"//*[@id='{{{}}}']\")"),
    ],
)
def test_a_value_that_an_f_string_writes_with_its_name_is_not_replaced(imported: str, call: str) -> None:
    head = f"{imported}\ndef f(conn, tree, a):\n    "
    assert offers("python", head + call.format("a") + "\n")[0].fixes
    assert not offers("python", head + call.format("a=") + "\n")[0].fixes


def test_a_pointer_that_moves_has_no_size_that_is_known() -> None:
    head = "#include <stdio.h>\n#include <string.h>\nvoid f(const char *line) {\n    char buf[80], *walk;\n"
    still = head + "    walk = buf;\n    strcpy(walk, line);\n}\n"
    (found,) = offers("c", still)
    assert "snprintf(walk, sizeof(buf)" in apply_edits(still, found.fixes[0].edits)
    loop = "    walk = buf;\n    while (*line++) {\n        strcpy(walk, line);\n"
    (found,) = offers("c", head + loop + "        walk = buf + strlen(buf);\n    }\n}\n")
    assert not found.fixes


@pytest.mark.parametrize(("verb", "safe"), [("SELECT", True), ("DESCRIBE SELECT", False)])
def test_only_statements_that_take_parameters_get_them(verb: str, safe: bool) -> None:
    text = f"import sqlite3\ndef f(conn, p):\n    conn.execute(f\"{verb} v FROM t WHERE a = '{{p}}'\")\n"
    (found,) = offers("python", text)
    assert bool(found.fixes) is safe
