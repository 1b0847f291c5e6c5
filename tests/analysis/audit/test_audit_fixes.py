"""A fix is offered only when the rule is silent on the fixed text and the file parses no worse."""

from __future__ import annotations

import pytest
from ast_grep_py import SgRoot

from keystroke.analysis.audit import Auditor, Rule, all_rules
from keystroke.text import apply_edits

FIXABLE = sorted((rule for rule in all_rules().values() if rule.fixes), key=lambda rule: rule.id)


def errors(text: str, language: str) -> int:
    return len(SgRoot(text, language).root().find_all(kind="ERROR"))


@pytest.mark.parametrize("rule", FIXABLE, ids=lambda rule: rule.id)
def test_every_fix_offered_silences_its_rule_and_keeps_the_parse(rule: Rule) -> None:
    for text in rule.bad:
        for finding in Auditor(rule.language).audit(text):
            for fix in finding.fixes if finding.rule == rule.id else ():
                fixed = apply_edits(text, fix.edits)
                left = [f for f in Auditor(rule.language).audit(fixed) if f.rule == rule.id]
                assert len(left) < len([f for f in Auditor(rule.language).audit(text) if f.rule == rule.id])
                assert errors(fixed, rule.language) <= errors(text, rule.language)


CASES = [
    (
        "python",
        "import yaml\ndef f(s):\n    return yaml.load(s)\n",
        "import yaml\ndef f(s):\n    return yaml.safe_load(s)\n",
    ),
    (
        "python",
        "import sqlite3\ndef f(db, n):\n    db.execute(f\"SELECT * FROM u WHERE n = '{n}'\")\n",
        'import sqlite3\ndef f(db, n):\n    db.execute("SELECT * FROM u WHERE n = ?", (n,))\n',
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
        "import os\nos.chmod('key', 0o600)\n",
    ),
    (
        "python",
        "import torch\ndef f(p):\n    return torch.load(p)\n",
        "import torch\ndef f(p):\n    return torch.load(p, weights_only=True)\n",
    ),
    (
        "python",
        "import hashlib, os\ndef f(p):\n    return hashlib.pbkdf2_hmac('sha256', p, os.urandom(9), 9)\n",
        "import hashlib, os\ndef f(p):\n    return hashlib.pbkdf2_hmac('sha256', p, os.urandom(9), 600000)\n",
    ),
    ("javascript", "const b = Buffer.allocUnsafe(9);\n", "const b = Buffer.alloc(9);\n"),
    ("javascript", 'app.listen(80, "0.0.0.0");\n', 'app.listen(80, "127.0.0.1");\n'),
    (
        "c",
        "void f(const char *s) {\n    char b[9];\n    strcpy(b, s);\n}\n",
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
        "async function f(n) {\n  return db.query(`SELECT * FROM u WHERE n = ${n}`);\n}\n",
        'async function f(n) {\n  return db.query("SELECT * FROM u WHERE n = ?", [n]);\n}\n',
    ),
]


@pytest.mark.parametrize(("language", "before", "after"), CASES)
def test_a_fix_writes_what_a_person_would(language: str, before: str, after: str) -> None:
    fixes = [fix for finding in Auditor(language).audit(before) for fix in finding.fixes]
    assert apply_edits(before, fixes[0].edits) == after


def test_a_table_name_is_not_made_a_parameter() -> None:
    findings = Auditor("python").audit("def f(cur, t):\n    cur.execute(f'SELECT * FROM {t}')\n")
    assert [finding.rule for finding in findings] == ["python-sql-injection"]
    assert findings[0].fixes == ()
