"""What a fix writes, when it is not offered, and what is only suggested.

That fixes are right is shown by running them, in test_audit_fixes_run.py.
"""

from __future__ import annotations

import pytest
from ast_grep_py import SgRoot

from keystroke.analysis.audit import Auditor, Rule, all_rules
from keystroke.analysis.audit.fixes.build import find_fixer
from keystroke.analysis.audit.report import AuditedFile, apply_fixes
from keystroke.text import apply_edits

FIXABLE = sorted((rule for rule in all_rules().values() if rule.fixes), key=lambda rule: rule.id)


def errors(text: str, language: str) -> int:
    return len(SgRoot(text, language).root().find_all(kind="ERROR"))


@pytest.mark.parametrize("rule", FIXABLE, ids=lambda rule: rule.id)
def test_every_fix_offered_silences_its_rule_and_keeps_the_parse(rule: Rule) -> None:
    for text in rule.tests.bad:
        for finding in Auditor(rule.language).audit(text):
            for fix in finding.fixes if finding.rule == rule.id else ():
                after = apply_edits(text, fix.edits)
                left = [f for f in Auditor(rule.language).audit(after) if f.rule == rule.id]
                assert len(left) < len([f for f in Auditor(rule.language).audit(text) if f.rule == rule.id])
                assert errors(after, rule.language) <= errors(text, rule.language)


CASES = [
    (
        "python",
        "import yaml\ndef f(s):\n    return yaml.load(s)\n",
        "import yaml\ndef f(s):\n    return yaml.safe_load(s)\n",
    ),
    (
        "python",
        "import sqlite3\ndef f(db, n: str):\n    db.execute(f\"SELECT * FROM u WHERE n = '{n}'\")\n",
        'import sqlite3\ndef f(db, n: str):\n    db.execute("SELECT * FROM u WHERE n = ?", (n,))\n',
    ),
    (
        "python",
        "import sqlite3\ndef f(db, n):\n    db.execute(f\"SELECT * FROM u WHERE n = '{n}'\")\n",
        'import sqlite3\ndef f(db, n):\n    db.execute("SELECT * FROM u WHERE n = ?", (str(n),))\n',
    ),
    (
        "python",
        "import psycopg2\ndef f(cur, n):\n    cur.execute(\"SELECT '5%' FROM u WHERE n = '\" + n + \"'\")\n",
        "import psycopg2\ndef f(cur, n):\n    cur.execute(\"SELECT '5%%' FROM u WHERE n = %s\", (n,))\n",
    ),
    (
        "python",
        "import os\ndef f(h):\n    os.system('ping ' + h)\n",
        "import shlex\nimport os\ndef f(h):\n    os.system('ping ' + shlex.quote(h))\n",
    ),
    (
        "python",
        "import requests\ndef f(u):\n    return requests.get(u, timeout=9, verify=False)\n",
        "import requests\ndef f(u):\n    return requests.get(u, timeout=9, verify=True)\n",
    ),
    (
        "python",
        "import random\ndef make_token():\n    return random.getrandbits(64)\n",
        "import secrets\nimport random\ndef make_token():\n    return secrets.randbits(64)\n",
    ),
    (
        "python",
        "import os\nos.chmod('key', 0o777)\n",
        "import os\nos.chmod('key', 0o755)\n",
    ),
    (
        "python",
        "import torch\ndef f(p):\n    return torch.load(p)\n",
        "import torch\ndef f(p):\n    return torch.load(p, weights_only=True)\n",
    ),
    ("javascript", "const b = Buffer.allocUnsafe(size);\n", "const b = Buffer.alloc(size);\n"),
    (
        "c",
        "void f(const char *s) {\n    char b[9];\n    strcpy(b, s);\n}\n",
        "#include <stdio.h>\n"
        'void f(const char *s) {\n    char b[9];\n    snprintf(b, sizeof(b), "%s", s);\n}\n',
    ),
    ("c", "void f(const char *s) { printf(s); }\n", 'void f(const char *s) { printf("%s", s); }\n'),
    (
        "go",
        'package m\nimport "crypto/tls"\nvar c = tls.Config{InsecureSkipVerify: true}\n',
        'package m\nimport "crypto/tls"\nvar c = tls.Config{InsecureSkipVerify: false}\n',
    ),
    (
        "javascript",
        'import pg from "pg";\nasync function f(db, n) {\n  return db.query(`SELECT * FROM u WHERE n = ${n}`);\n}\n',
        'import pg from "pg";\nasync function f(db, n) {\n  return db.query(`SELECT * FROM u WHERE n = $1`, [n]);\n}\n',
    ),
]


@pytest.mark.parametrize(("language", "before", "after"), CASES)
def test_a_fix_writes_what_a_person_would(language: str, before: str, after: str) -> None:
    fixes = [fix for item in Auditor(language).audit(before) for fix in (*item.fixes, *item.suggestions)]
    assert apply_edits(before, fixes[0].edits) == after


# What is not surely right is not offered: each is a fix that went wrong once, or would.
REFUSED = [
    (
        "python",
        "a table's name",
        "import sqlite3\nfrom flask import request\n"
        "def f(cur):\n    cur.execute('SELECT * FROM ' + request.args['t'])\n",
    ),
    ("python", "no driver", "def f(cur, n):\n    cur.execute(f\"SELECT 1 FROM u WHERE n = '{n}'\")\n"),
    (
        "python",
        "two drivers",
        'import sqlite3, psycopg2\ndef f(cur, n):\n    cur.execute("SELECT 1 FROM u WHERE n = \'" + n + "\'")\n',
    ),
    (
        "python",
        "a list of values",
        "import sqlite3\ndef f(cur, n):\n    cur.execute(f\"SELECT 1 FROM u WHERE n IN ({','.join(n)})\")\n",
    ),
    (
        "python",
        "the value changes before it is used",
        'import sqlite3\ndef f(db, n):\n    q = "SELECT 1 FROM u WHERE n = \'" + n + "\'"\n    n = n.strip()\n'
        "    db.execute(q)\n",
    ),
    ("python", "a command of several words", "import os\ndef f(args):\n    os.system('ls ' + args)\n"),
    ("python", "a second shell", "import os\ndef f(x):\n    os.system(f'ssh host \"ls {x}\"')\n"),
    ("python", "the program itself", "import os\ndef f(x):\n    os.system(x + ' --help')\n"),
    (
        "python",
        "a folder is made of the name",
        "import os, tempfile\ndef f():\n    p = tempfile.mktemp()\n    os.mkdir(p)\n",
    ),
    (
        "python",
        "a script, where HTML is not escaped",
        "from flask import Flask, request\napp = Flask(__name__)\n@app.route('/')\ndef f():\n"
        "    return '<script>x = \"' + request.args['q'] + '\"</script>'\n",
    ),
    (
        "python",
        "an address in an attribute",
        "from flask import Flask, request\napp = Flask(__name__)\n@app.route('/')\ndef f():\n"
        "    return '<a href=\"' + request.args['q'] + '\">x</a>'\n",
    ),
    (
        "python",
        "a digest that others keep",
        "import hashlib\ndef f(token, kept):\n    return hashlib.md5(token).hexdigest() == kept\n",
    ),
    ("c", "a pointer of unknown size", "void f(char *b, const char *s) { strcpy(b, s); }\n"),
    ("c", "the result is used", "char *f(const char *s) { char b[9]; return strdup(strcpy(b, s)); }\n"),
    (
        "go",
        "no driver",
        'package m\nimport "database/sql"\nfunc f(db *sql.DB, n string) {\n'
        '\tdb.Query("SELECT 1 FROM u WHERE n = \'" + n + "\'")\n}\n',
    ),
    (
        "javascript",
        "an object, not a text",
        "function f(req, res) {\n  console.log(req.body);\n}\n",
    ),
]


@pytest.mark.parametrize(
    ("language", "why", "text"), REFUSED, ids=[f"{case[0]}: {case[1]}" for case in REFUSED]
)
def test_a_fix_that_may_be_wrong_is_not_offered(language: str, why: str, text: str) -> None:
    findings = Auditor(language).audit(text)
    assert findings
    assert [fix for finding in findings for fix in finding.fixes if finding.severity.value != "low"] == []
    assert why


def test_a_direction_alone_is_a_suggestion_and_never_applied() -> None:
    text = "def calc(text):\n    return eval(text)\n"
    (finding,) = Auditor("python").audit(text)
    assert finding.fixes == ()
    assert [fix.title for fix in finding.suggestions] == ["Accept literals only"]
    assert apply_fixes(AuditedFile("a.py", text, (finding,))) == (text, 0)


def test_fixes_that_meet_are_not_applied_together() -> None:
    text = "import os\ndef f(a, b):\n    os.system(f\"x '{a}'\")\n    os.system(f\"y '{b}'\")\n"
    file = AuditedFile("a.py", text, Auditor("python").audit(text))
    after, count = apply_fixes(file)
    assert count == 2
    assert after.count("import shlex") == 1
    assert after.count("shlex.quote(") == 2


def test_an_import_that_a_fix_made_needless_is_taken_away() -> None:
    text = (
        'package m\n\nimport (\n\t"database/sql"\n\t"fmt"\n\n\t_ "github.com/lib/pq"\n)\n\n'
        "func f(db *sql.DB, n string) {\n\tdb.Query(fmt.Sprintf(\"SELECT 1 FROM u WHERE n = '%s'\", n))\n}\n"
        "func g(db *sql.DB, n string) {\n\tdb.Query(fmt.Sprintf(\"SELECT 2 FROM u WHERE n = '%s'\", n))\n}\n"
    )
    after, count = apply_fixes(AuditedFile("a.go", text, Auditor("go").audit(text)))
    assert count == 2
    assert '"fmt"' not in after
    assert 'db.Query("SELECT 2 FROM u WHERE n = $1", n)' in after


def test_every_fixer_a_rule_names_is_known() -> None:
    named = {spec.fixer for rule in all_rules().values() for spec in rule.fixes if spec.fixer}
    assert all(callable(find_fixer(name)) for name in named)
