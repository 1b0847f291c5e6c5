"""Weaknesses of real programs that were missed once, by the library they go through."""

from __future__ import annotations

import pytest

from keystroke.analysis.audit import Auditor

FLASK = "from flask import request\n"
MISSED = [
    (
        "python",
        "python-ssrf",
        f"import httpx\n{FLASK}def f():\n    client = httpx.Client()\n"
        f"    return client.request('GET', request.args['u'])\n",
    ),
    (
        "python",
        "python-ssrf",
        f"import urllib3\n{FLASK}def f():\n    pool = urllib3.connection_from_url(request.args['u'])\n"
        "    return pool.request('GET', '/')\n",
    ),
    (
        "python",
        "python-ssrf",
        f"import urllib3\n{FLASK}http = urllib3.PoolManager()\ndef f():\n"
        f"    return http.urlopen('GET', request.args['u'])\n",
    ),
    (
        "python",
        "python-template-injection",
        "from django.template import Context, Template\ndef view(request):\n"
        "    form = TemplateForm(request.POST)\n"
        "    return Template(form.data['body']).render(Context())\n",
    ),
    (
        "javascript",
        "javascript-sql-injection",
        'const knex = require("knex")({});\napp.get("/", (req, res) => {\n'
        '  knex("u").whereRaw("id = " + req.query.id);\n});\n',
    ),
    (
        "javascript",
        "javascript-sql-injection",
        'const db = require("pg-promise")()(url);\napp.get("/", (req, res) => {\n  const q = req.query.q;\n'
        "  db.task((t) => t.one(q));\n});\n",
    ),
    (
        "javascript",
        "javascript-insecure-protocol",
        'const axios = require("axios");\naxios.post("http://api.shop.org/login", { password });\n',
    ),
    (
        "java",
        "java-log-injection",
        "import org.slf4j.Logger;\nclass A {\n  static final Logger log = LoggerFactory.getLogger(A.class);\n"
        "  void doGet(HttpServletRequest request, HttpServletResponse response) {\n"
        '    log.info("name {}", request.getParameter("n"));\n  }\n}\n',
    ),
    (
        "c",
        "c-missing-terminator",
        "#include <string.h>\nunsigned long f(const char *s) {\n    char b[16];\n"
        "    strncpy(b, s, sizeof(b));\n"
        "    return strlen(b);\n}\n",
    ),
    ("c", "c-shift-width", "unsigned long f(void) {\n    return 1 << 40;\n}\n"),
]


@pytest.mark.parametrize(("language", "rule", "text"), MISSED)
def test_a_weakness_that_was_missed_is_found(language: str, rule: str, text: str) -> None:
    assert rule in [item.rule for item in Auditor(language).audit(text)]


def test_bound_and_local_neighbours_stay_silent() -> None:
    texts = [
        ("javascript", 'knex("u").whereRaw("id = ?", [req.query.id]);\n'),
        ("javascript", 'axios.post("http://localhost:3000/login", { password });\n'),
        ("c", "unsigned long f(void) {\n    return 1UL << 40;\n}\n"),
        ("python", "import httpx\nclient = httpx.Client(base_url='https://api.shop.org')\n"),
    ]
    for language, text in texts:
        found = [item.rule for item in Auditor(language).audit(text)]
        assert found == [], text
