"""False alarms of real projects, each with its family and with the weak neighbour that is still found."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from keystroke.analysis.audit import Auditor
from keystroke.analysis.audit.files import SkippedFile, SourceFile, find_sources
from keystroke.clients.cli.audit import audit

GO = 'package m\n\nimport "database/sql"\n\n'
# language, what it is, safe text, weak text or "", rule
PAIRS = [
    (
        "python",
        "a table the program names, with bound values",
        "class Store:\n    def get(self, cur, key):\n"
        "        cur.execute(f'SELECT v FROM {self.table} WHERE k = ?', (key,))\n",
        "def get(cur, key):\n    cur.execute(f\"SELECT v FROM t WHERE k = '{key}'\")\n",
        "python-sql-injection",
    ),
    (
        "python",
        "a list of placeholders",
        "def get(cur, keys):\n    marks = ','.join('?' for _ in keys)\n"
        "    cur.execute(f'SELECT v FROM t WHERE k IN ({marks})', keys)\n",
        "def get(cur, keys):\n    cur.execute('SELECT v FROM t WHERE k IN (' + ','.join(keys) + ')')\n",
        "python-sql-injection",
    ),
    (
        "python",
        "the columns of a model",
        "def read(self, cur):\n    cur.execute('SELECT ' + self.columns + ' FROM ' + self.name)\n",
        "from flask import request\ndef read(cur):\n    cur.execute('SELECT * FROM ' + request.args['t'])\n",
        "python-sql-injection",
    ),
    (
        "javascript",
        "a table the program names, with bound values",
        "class Store {\n  get(db, key) {\n"
        "    return db.query(`SELECT v FROM ${this.table} WHERE k = ?`, [key]);\n  }\n}\n",
        "function get(db, key) {\n  return db.query(`SELECT v FROM t WHERE k = '${key}'`);\n}\n",
        "javascript-sql-injection",
    ),
    (
        "go",
        "the arguments of a prepared statement",
        f'{GO}func f(stmt *sql.Stmt, where string) {{\n\tstmt.Query("select " + where + " from")\n}}\n',
        f'{GO}func f(db *sql.DB, n string) {{\n\tdb.Query("SELECT 1 FROM u WHERE n = \'" + n + "\'")\n}}\n',
        "go-sql-injection",
    ),
    (
        "python",
        "parts of an address",
        "from urllib.parse import urlsplit\ndef same(one, other):\n"
        "    a, b = urlsplit(one), urlsplit(other)\n    return a.password == b.password\n",
        "from flask import request\ndef hook():\n    return request.args['api_key'] == stored.api_key\n",
        "python-timing-compare",
    ),
    (
        "python",
        "an HMAC that a protocol defines",
        "import hashlib, hmac\ndef sign(key, text):\n    return hmac.new(key, text, hashlib.sha1).digest()\n",
        "import hashlib\ndef sign(key, text):\n    return hashlib.sha1(key + text).digest()\n",
        "python-weak-hash",
    ),
    (
        "javascript",
        "a program of its own, started without a shell",
        'const { fork } = require("child_process");\nfork(process.argv[2]);\n',
        'const { exec } = require("child_process");\nexec("ls " + process.argv[2]);\n',
        "javascript-command-injection",
    ),
    (
        "java",
        "a random source that is passed in",
        "import java.util.Random;\nclass A {\n  private final Random random;\n"
        "  A(Random random) { this.random = random; }\n"
        "  int draw() { return random.nextInt(9); }\n}\n",
        'import java.util.Random;\nclass A {\n  String token() { return "" + new Random().nextLong(); }\n}\n',
        "java-weak-random",
    ),
    (
        "python",
        "the file that a user names on the command line",
        "import sys\nwith open(sys.argv[1]) as file:\n    print(file.read())\n",
        "from flask import request\ndef f():\n    return open(request.args['f']).read()\n",
        "python-path-traversal",
    ),
    (
        "c",
        "a random index of the whole array",
        "#include <stdlib.h>\nint f(void) {\n    int buf[5] = {0};\n    return buf[rand() % 5];\n}\n",
        "#include <stdlib.h>\nint f(void) {\n    int buf[5] = {0};\n    return buf[rand() % 9];\n}\n",
        "",
    ),
    (
        "python",
        "a password that is not written down",
        "import psycopg2\nc = psycopg2.connect(host='h', password='******')\n",
        "import psycopg2\nc = psycopg2.connect(host='h', password='hunter22x')\n",
        "python-hardcoded-secret",
    ),
    (
        "javascript",
        "a copy of one level",
        "function assign(target, source) {\n  Object.keys(source).forEach((key) => {\n"
        "    target[key] = source[key];\n"
        "  });\n  return target;\n}\n",
        "function merge(target, source) {\n  for (const key in source) {\n"
        "    if (typeof source[key] === 'object') {\n"
        "      merge(target[key], source[key]);\n    } else {\n"
        "      target[key] = source[key];\n    }\n  }\n}\n",
        "javascript-prototype-pollution",
    ),
    (
        "python",
        "a redirect that was checked",
        "from django.shortcuts import redirect\n"
        "from django.utils.http import url_has_allowed_host_and_scheme\n"
        "def go(request):\n    url = request.GET['next']\n"
        "    if not url_has_allowed_host_and_scheme(url, allowed_hosts=None):\n"
        "        url = '/'\n    return redirect(url)\n",
        "from django.shortcuts import redirect\ndef go(request):\n    return redirect(request.GET['next'])\n",
        "python-open-redirect",
    ),
    (
        "python",
        "a redirect that a validator of the project checked",
        "from django.shortcuts import redirect\nfrom .urls import validate_target\n"
        "def go(request):\n    url = request.GET['next']\n    validate_target(url)\n"
        "    return redirect(url)\n",
        "",
        "python-open-redirect",
    ),
    (
        "python",
        "a redirect to one of a list",
        "from django.shortcuts import redirect\nTARGETS = ['/a', '/b']\n"
        "def go(request):\n    url = request.GET['next']\n    if url in TARGETS:\n"
        "        return redirect(url)\n    return None\n",
        "",
        "python-open-redirect",
    ),
]


@pytest.mark.parametrize(
    ("language", "what", "safe", "weak", "rule"), PAIRS, ids=[f"{case[0]}: {case[1]}" for case in PAIRS]
)
def test_safe_code_is_silent_and_its_weak_neighbour_is_not(
    language: str, what: str, safe: str, weak: str, rule: str
) -> None:
    found = [item.rule for item in Auditor(language).audit(safe)]
    assert rule not in found if rule else found == []
    if weak:
        assert rule in [item.rule for item in Auditor(language).audit(weak)] or (not rule)


def test_a_token_that_is_verified_is_told_what_is_wrong_with_it() -> None:
    text = "import jwt\ndef f(t):\n    return jwt.decode(t, 'k3y-for-all-of-us', algorithms=['HS256'])\n"
    (finding,) = [item for item in Auditor("python").audit(text) if item.rule == "python-jwt-unverified"]
    assert finding.cwe == 798
    assert "not verified" not in finding.message


WRITTEN = "function f(req) {\n  eval(req.query.x);\n}\n"
FOREIGN = {
    "app.min.js": WRITTEN,
    "static/jquery.js": "/*!\n * jQuery JavaScript Library v3.7.1\n */\n" + WRITTEN,
    "vendor/a.py": "eval(input())\n",
    "pkg/_vendor/b.py": "eval(input())\n",
    "dist2/main.js": "var x = __webpack_require__(1);\n" + WRITTEN,
    "one.js": "var a=1;" * 2000 + "\n" + WRITTEN,
    "schema_pb2.py": "# Generated by the protocol buffer compiler.  DO NOT EDIT!\neval(input())\n",
}


def test_files_that_nobody_here_writes_are_skipped_and_said_so(tmp_path: Path) -> None:
    for name, text in {**FOREIGN, "src/own.js": WRITTEN}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = list(find_sources(tmp_path))
    assert [item.path.name for item in found if isinstance(item, SourceFile)] == ["own.js"]
    skipped = [item for item in found if isinstance(item, SkippedFile)]
    assert sorted(item.path.relative_to(tmp_path).as_posix() for item in skipped) == sorted(FOREIGN)
    assert {item.why for item in skipped} == {"vendored", "minified", "bundled", "generated"}
    assert len([item for item in find_sources(tmp_path, foreign=True) if isinstance(item, SourceFile)]) == 8
    app = typer.Typer()
    app.command()(audit)
    result = CliRunner().invoke(app, [str(tmp_path)])
    assert "7 files skipped: 1 bundled, 1 generated, 2 minified, 3 vendored; --all" in result.stderr
    everything = CliRunner().invoke(app, [str(tmp_path), "--all"])
    assert "skipped" not in everything.stderr
    assert everything.stdout.count("code-injection") > result.stdout.count("code-injection") == 1


def test_a_file_that_is_named_is_audited_whatever_it_is(tmp_path: Path) -> None:
    (tmp_path / "app.min.js").write_text(WRITTEN)
    (found,) = find_sources(tmp_path / "app.min.js")
    assert isinstance(found, SourceFile)
