"""Who a function's parameters belong to, and what that makes of the data in it."""

from __future__ import annotations

import pytest

from keystroke.analysis.audit import Auditor


def rules(language: str, text: str) -> set[str]:
    return {finding.rule for finding in Auditor(language).audit(text)}


@pytest.mark.parametrize(
    "text",
    [
        'app.get("/u", (a, b) => { b.send("<p>" + a.query.n); });',
        'router.post("/u", async function (first, second, next) { second.status(200).send(first.body.n); });',
        'app.use((err, q, s, next) => { s.send("<p>" + q.query.n); });',
        'http.createServer((i, o) => { o.end("<p>" + i.url); });',
        'app.route("/u").get((a, b) => b.send("<p>" + a.params.n));',
        "export function f(call: express.Request, answer: express.Response) { answer.send(call.query.n); }",
        'app.get("/u", ({ query }, b) => { b.send("<p>" + query.n); });',
    ],
)
def test_a_request_is_known_by_its_place_or_type_whatever_it_is_called(text: str) -> None:
    assert "javascript-xss-response" in rules("typescript", text)


def test_a_callback_of_something_else_gets_no_request() -> None:
    text = 'cache.each("k", (a, b) => { b.send("<p>" + a.query.n); });'
    assert "javascript-xss-response" not in rules("javascript", text)


def test_what_one_callback_collects_the_next_one_sees() -> None:
    text = (
        "http.createServer((req, res) => {\n"
        '  let body = "";\n'
        '  req.on("data", (part) => { body += part; });\n'
        '  req.on("end", () => { eval(body); });\n'
        "});\n"
    )
    (found,) = [
        item for item in Auditor("javascript").audit(text) if item.rule == "javascript-code-injection"
    ]
    assert found.origin


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ("def page(request, name):", True),
        ("def handler(event, context):\n    name = event['n']", True),
        ("def get(self, request, name):", True),
        ("def helper(name):", False),
        ("def get(self, name):", False),
    ],
)
def test_views_and_cloud_functions_are_called_by_clients(head: str, expected: bool) -> None:
    text = f"{head}\n    return open('/srv/' + name.strip() + '.txt')\n"
    found = [f for f in Auditor("python").audit(text) if f.rule == "python-path-traversal"]
    assert any(f.severity.value == "high" for f in found) is expected


def test_an_object_s_path_is_foreign_only_where_http_is_served() -> None:
    text = "class A:\n    def {}(self):\n        return open(self.path)\n"
    assert "python-path-traversal" in rules("python", text.format("do_GET"))
    assert "python-path-traversal" not in rules("python", text.format("load"))


def test_an_error_is_followed_to_the_answer_and_not_to_the_log() -> None:
    text = (
        "from flask import jsonify\n"
        "def f():\n"
        "    try:\n"
        "        return g()\n"
        "    except ValueError as problem:\n"
        "        {}\n"
    )
    shown = text.format("return jsonify(message=f'failed: {problem}')")
    kept = text.format("log(problem); return jsonify(message='failed')")
    assert "python-error-exposed" in rules("python", shown)
    assert "python-error-exposed" not in rules("python", kept)
