"""Weaknesses of real programs that were missed once, by the library they go through."""

from __future__ import annotations

import pytest

from keystroke.analysis.audit import Auditor
from keystroke.analysis.audit.source.units import split

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
    ("c", "c-shift-width", "int f(int x) {\n    return x << 32;\n}\n"),
    (
        "c",
        "c-shift-width",
        "#include <stdlib.h>\nint f(char *t) {\n    int n = atoi(t);\n    return 1 << n;\n}\n",
    ),
    (
        "c",
        "c-missing-terminator",
        "void f(const char *s) {\n    char b[16];\n    strncpy(b, s, 16);\n    puts(b);\n}\n",
    ),
    (
        "c",
        "c-integer-overflow",
        "#include <stdlib.h>\nshort f(char *t) {\n    int n = atoi(t);\n    short s = n;\n    return s;\n}\n",
    ),
    (
        "c",
        "c-integer-overflow",
        "#include <stdlib.h>\nint f(void) {\n    int n = rand();\n    return n * 3;\n}\n",
    ),
    ("c", "c-signed-length", "void f(char *d, const char *s) {\n    int n = -1;\n    memcpy(d, s, n);\n}\n"),
    ("c", "c-invalid-free", 'void f(void) {\n    char *p = "abc";\n    free(p);\n}\n'),
    ("c", "c-invalid-free", "static char g[10];\nvoid f(void) {\n    free(g);\n}\n"),
    ("c", "c-invalid-free", "void f(void) {\n    int x;\n    free(&x);\n}\n"),
    ("java", "java-hardcoded-secret", 'class A {\n  private final String apiKey = "AKx83hdf73hdkfQ2";\n}\n'),
    (
        "java",
        "java-hardcoded-secret",
        'class A {\n  private char[] password = "hunter2xyz".toCharArray();\n}\n',
    ),
    (
        "java",
        "java-error-exposed",
        "class A {\n  void f(HttpServletResponse r) throws Exception {\n"
        "    try { g(); } catch (Exception e) { r.sendError(500, e.toString()); }\n  }\n}\n",
    ),
    (
        "java",
        "java-error-exposed",
        "class A {\n  ResponseEntity<String> f() {\n    try { return g(); }\n"
        "    catch (Exception e) { return ResponseEntity.status(500).body(e.getMessage()); }\n  }\n}\n",
    ),
    (
        "javascript",
        "javascript-path-traversal",
        'const path = require("path");\nconst app = require("express")();\n'
        'app.get("/", (req, res) => {\n  res.sendFile(path.resolve(req.query.file));\n});\n',
    ),
    (
        "javascript",
        "javascript-tls-unverified",
        'require("https").request({ host: "shop.org", rejectUnauthorized: false });\n',
    ),
    (
        "python",
        "python-tls-unverified",
        "import aiohttp\nasync def f(session):\n    await session.get('https://shop.org', ssl=False)\n",
    ),
    (
        "python",
        "python-insecure-protocol",
        "import smtplib\ndef f(user, password):\n    server = smtplib.SMTP('mail.shop.org', 25)\n"
        "    server.login(user, password)\n",
    ),
]


@pytest.mark.parametrize(("language", "rule", "text"), MISSED)
def test_a_weakness_that_was_missed_is_found(language: str, rule: str, text: str) -> None:
    assert rule in [item.rule for item in Auditor(language).audit(text)]


def test_bound_and_local_neighbours_stay_silent() -> None:
    texts = [
        ("javascript", 'knex("u").whereRaw("id = ?", [req.query.id]);\n'),
        ("javascript", 'axios.post("http://localhost:3000/login", { password });\n'),
        ("c", "unsigned long f(void) {\n    return 1UL << 40;\n}\n"),
        ("c", "#include <stdint.h>\nuint64_t f(uint32_t x) {\n    uint64_t v = x;\n    return v << 32;\n}\n"),
        ("c", "int f(char *t) {\n    int n = atoi(t);\n    return n < 0 || n > 31 ? 0 : 1 << n;\n}\n"),
        ("cpp", "void f(std::ostream &out, char *t) {\n    int n = atoi(t);\n    out << n << 64;\n}\n"),
        ("c", 'void f(char *t) {\n    char *p = "";\n    p = strdup(t);\n    free(p);\n}\n'),
        ("c", 'void f(void) {\n    char b[16];\n    strncpy(b, "abc", 16);\n    puts(b);\n}\n'),
        ("python", "import httpx\nclient = httpx.Client(base_url='https://api.shop.org')\n"),
    ]
    for language, text in texts:
        found = [item.rule for item in Auditor(language).audit(text)]
        assert found == [], text


@pytest.mark.parametrize("head", ["function", "async function", "function ask", "class extends"])
def test_a_function_between_arguments_on_a_line_of_its_own_stays_with_its_call(head: str) -> None:
    text = (
        f"app.get(\n  '/x',\n  check(1),\n  {head} (req) {{\n    run(req);\n  }}\n);\n"
        "for (\n  const item of items\n) {\n  run(item);\n}\n"
    )
    assert [text[unit.start :].split("(")[0] for unit in split(text, "javascript")] == ["app.get", "for "]
    typed = "run(\nconst a = 1;\nrun(b\nfunction f() {\n  run(a);\n}\n"  # brackets still to be closed
    assert [typed[unit.start :].split("(")[0] for unit in split(typed, "javascript")] == ["function f"]
