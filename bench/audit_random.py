"""Generates random programs from templates, to find fixes that go wrong.

The seed determines the programs. Each puts foreign values into a statement, a command, a page or a path: with sums,
interpolation, positional or named templates, both kinds of quotes, and values next to each other or to constant text.
A program need not get a fix, but every fix must be right.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from bench.audit_fixes import FixTrial

Parts = list[str | int]  # constant text, or the number of a value


def trials(seed: int, count: int, language: str) -> list[FixTrial]:
    """`count` programs of one language."""
    makers = MAKERS[language]
    return [makers[at % len(makers)](random.Random(f"{seed} {language} {at}"), at) for at in range(count)]


# Texts


def _python_text(pick: random.Random, parts: Parts, names: list[str]) -> str:
    """A Python expression that concatenates the parts."""
    style = pick.choice(["sum", "interpolated", "percent", "format", "named", "mixed"])
    quote = pick.choice(['"', "'", '"""'])

    def literal(text: str, prefix: str = "") -> str:
        body = text.replace("\\", "\\\\")
        if quote == "'":
            body = body.replace("'", "\\'")
        elif quote == '"':
            body = body.replace('"', '\\"')
        elif body.endswith('"'):
            body = body[:-1] + '\\"'
        return f"{prefix}{quote}{body}{quote}"

    def interpolated() -> str:
        texts = [
            p.replace("{", "{{").replace("}", "}}") if isinstance(p, str) else f"{{{names[p]}}}"
            for p in parts
        ]
        return literal("".join(texts), "f")

    if style == "interpolated":
        return interpolated()
    if style == "mixed" and len(parts) > 3 and isinstance(parts[2], str):
        first = "".join(p if isinstance(p, str) else f"{{{names[p]}}}" for p in parts[:3])
        if "{" not in "".join(p for p in parts if isinstance(p, str)):
            rest = [literal(p) if isinstance(p, str) else names[p] for p in parts[3:]]
            return " + ".join([literal(first, "f"), *rest])
    if style in ("percent", "mixed"):
        text = "".join(p.replace("%", "%%") if isinstance(p, str) else "%s" for p in parts)
        values = [names[p] for p in parts if isinstance(p, int)]
        single = len(values) == 1 and pick.random() < 0.5
        return f"{literal(text)} % {values[0] if single else '(' + ', '.join(values) + ',)'}"
    if style in ("format", "named"):
        used: list[str] = []
        text = ""
        for part in parts:
            if isinstance(part, str):
                text += part.replace("{", "{{").replace("}", "}}")
            else:
                used.append(names[part])
                text += "{}" if style == "format" else f"{{v{len(used)}}}"
        values = used if style == "format" else [f"v{at}={name}" for at, name in enumerate(used, 1)]
        return f"{literal(text)}.format({', '.join(values)})"
    return " + ".join(literal(p) if isinstance(p, str) else names[p] for p in parts)


def _script_text(pick: random.Random, parts: Parts, names: list[str]) -> str:
    if pick.random() < 0.5:
        texts = [
            p.replace("\\", "\\\\").replace("`", "\\`").replace("${", "\\${")
            if isinstance(p, str)
            else f"${{{names[p]}}}"
            for p in parts
        ]
        return f"`{''.join(texts)}`"
    quote = pick.choice("\"'")
    return " + ".join(
        quote + p.replace("\\", "\\\\").replace(quote, f"\\{quote}") + quote
        if isinstance(p, str)
        else names[p]
        for p in parts
    )


def _strict_text(pick: random.Random, parts: Parts, names: list[str]) -> str:
    """Java and Go: a sum."""
    return " + ".join(
        '"' + p.replace("\\", "\\\\").replace('"', '\\"') + '"' if isinstance(p, str) else names[p]
        for p in parts
    )


# SQL

_COLUMNS = ("name", "role", "age")
_TEXTS = ["ann", "bob", "rome", "o", "x y", "100", "z"]


def _statement(pick: random.Random) -> tuple[Parts, list[bool]]:
    """A SELECT of one to three conditions, and which of its values are numbers."""
    parts: Parts = ["SELECT id FROM users WHERE "]
    numbers: list[bool] = []
    for at in range(pick.randint(1, 3)):
        if at:
            parts.append(pick.choice([" AND ", " OR "]))
        column = pick.choice(_COLUMNS)
        if column == "age":
            parts += [f"age {pick.choice(['=', '<', '>=', '<>'])} ", len(numbers)]
            numbers.append(True)
        else:
            form = pick.choice(["= '{}'", "='{}'", "LIKE '%{}%'", "LIKE '{}%'", "<> '{}'", "= 'x-{}'"])
            before, after = form.split("{}")
            parts += [f"{column} {before}", len(numbers), after]
            numbers.append(False)
    parts.append(pick.choice(["", " ORDER BY id", " AND id > 0", ";", " LIMIT 50"]))
    merged: Parts = []
    for part in parts:
        if isinstance(part, str) and merged and isinstance(merged[-1], str):
            merged[-1] += part
        elif part != "":
            merged.append(part)
    return merged, numbers


def _payloads(numbers: list[bool]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    harmless = ["|".join("30" if number else word for number in numbers) for word in _TEXTS]
    hostile = [
        "|".join("0 UNION SELECT 424242 --" if number else "zz' UNION SELECT 424242 --" for number in numbers)
    ]
    hostile.append(
        "|".join("0" if number else "' OR 1=(SELECT 1) UNION SELECT 424242 --" for number in numbers)
    )
    return tuple(harmless), tuple(hostile)


_ROWS = "[(1,'ann','rome',30),(2,'bob','oslo',40),(3,'x y','100',30),(777,'secret','vault',99)]"


def python_sql(pick: random.Random, at: int) -> FixTrial:
    parts, numbers = _statement(pick)
    names = [f"v{number}" for number in range(len(numbers))]
    text = _python_text(pick, parts, names)
    given = ", ".join(names)
    body = (
        f"    return db.execute({text}).fetchall()\n"
        if pick.random() < 0.5
        else f"    query = {text}\n    cursor = db.cursor()\n    cursor.execute(query)\n    return cursor.fetchall()\n"
    )
    driver = (
        "def run(given):\n    db = sqlite3.connect(':memory:')\n"
        "    db.execute('CREATE TABLE users (id INTEGER, name TEXT, role TEXT, age INTEGER)')\n"
        f"    db.executemany('INSERT INTO users VALUES (?,?,?,?)', {_ROWS})\n"
        "    return find(db, *given.split('|'))\n"
    )
    harmless, hostile = _payloads(numbers)
    program = f"import sqlite3\ndef find(db, {given}):\n{body}"
    return FixTrial(
        "python",
        "python-sql-injection",
        program,
        driver,
        harmless,
        hostile,
        "424242",
        f"random {at}",
        sure=False,
    )


def script_sql(pick: random.Random, at: int) -> FixTrial:
    parts, numbers = _statement(pick)
    names = [f"v{number}" for number in range(len(numbers))]
    text = _script_text(pick, parts, names)
    module = pick.choice(["mysql", "pg"])
    program = (
        f'const db = require("{module}").connect();\n'
        f"async function find({', '.join(names)}) {{\n  const sql = {text};\n  return db.query(sql);\n}}\n"
    )
    setup = (
        "const handed = (sql, values) => JSON.stringify([sql, values || []]);\n"
        'require("module")._load = ((found) => (name, ...rest) => (name === "mysql" || name === "pg" '
        '? { connect: () => ({ query: handed }) } : found(name, ...rest)))(require("module")._load);\n'
    )
    driver = 'function run(given) { return find(...given.split("|")); }\n'
    harmless, hostile = _payloads(numbers)
    return FixTrial(
        "javascript",
        "javascript-sql-injection",
        program,
        driver,
        harmless,
        hostile,
        "424242",
        f"random {at}",
        setup=setup,
        statement=True,
        sure=False,
    )


# Commands


def _command(pick: random.Random) -> tuple[Parts, int]:
    parts: Parts = ["printf '[%s]' "]
    count = 0
    for _ in range(pick.randint(1, 3)):
        form = pick.choice(
            ["{} ", "'{}' ", '"{}" ', "pre-{} ", '"a {} b" ', "'a {} b' ", "--x={} ", "{}.txt ", "word "]
        )
        if "{}" not in form:
            parts.append(form)
            continue
        before, after = form.split("{}")
        parts += [before, count, after]
        count += 1
    if not count:
        parts += ["", 0]
        count = 1
    merged: Parts = []
    for part in parts:
        if isinstance(part, str) and merged and isinstance(merged[-1], str):
            merged[-1] += part
        elif part != "":
            merged.append(part)
    return merged, count


_WORDS = ("ann", "a-b.txt", "x_1")
_ATTACKS = ("x; echo PWN$((1+1)) ", "$(echo PWN$((1+1)))", "'; echo PWN$((1+1)); '", '"; echo PWN$((1+1)); "')


def python_shell(pick: random.Random, at: int) -> FixTrial:
    parts, count = _command(pick)
    names = [f"w{number}" for number in range(count)]
    text = _python_text(pick, parts, names)
    call = pick.choice(
        ["subprocess.getoutput({})", "subprocess.run({}, shell=True, capture_output=True, text=True).stdout"]
    )
    program = f"import subprocess\ndef show({', '.join(names)}):\n    return {call.format(text)}\n"
    driver = f"def run(given): return show(*[given] * {count})\n"
    return FixTrial(
        "python",
        "python-command-injection",
        program,
        driver,
        _WORDS,
        _ATTACKS,
        "PWN2",
        f"random {at}",
        sure=False,
    )


def script_shell(pick: random.Random, at: int) -> FixTrial:
    parts, count = _command(pick)
    names = [f"w{number}" for number in range(count)]
    text = _script_text(pick, parts, names)
    program = (
        'const cp = require("child_process");\n'
        f"function show({', '.join(names)}) {{\n  return cp.execSync({text}).toString();\n}}\n"
    )
    driver = f"function run(given) {{ return show(...Array({count}).fill(given)); }}\n"
    return FixTrial(
        "javascript",
        "javascript-command-injection",
        program,
        driver,
        _WORDS,
        _ATTACKS,
        "PWN2",
        f"random {at}",
        sure=False,
    )


def go_shell(pick: random.Random, at: int) -> FixTrial:
    parts, count = _command(pick)
    names = [f"w{number}" for number in range(count)]
    text = _strict_text(pick, parts, names)
    program = (
        'package main\n\nimport "os/exec"\n\n'
        f"func show({', '.join(names)} string) string {{\n"
        f'\tout, _ := exec.Command("sh", "-c", {text}).Output()\n\treturn string(out)\n}}\n'
    )
    driver = f"func run(given string) string {{ return show({', '.join(['given'] * count)}) }}\n"
    return FixTrial(
        "go", "go-command-injection", program, driver, _WORDS, _ATTACKS, "PWN2", f"random {at}", sure=False
    )


# Pages


def _page(pick: random.Random) -> tuple[Parts, int]:
    parts: Parts = ["<div>"]
    count = pick.randint(1, 3)
    for number in range(count):
        form = pick.choice(
            ["<p>{}</p>", "<b title='{}'>x</b>", '<i class="a {}">y</i>', "{}<br>", "<td>{} of</td>"]
        )
        before, after = form.split("{}")
        if isinstance(parts[-1], str):
            parts[-1] += before
        else:
            parts.append(before)
        parts += [number, after]
    parts.append("</div>")
    merged: Parts = []
    for part in parts:
        if isinstance(part, str) and merged and isinstance(merged[-1], str):
            merged[-1] += part
        else:
            merged.append(part)
    return merged, count


_NAMES = ("ann", "Bob Smith", "x1")
_MARKUP = ("<b4d>x</b4d>", "' onx='1", '" onx="1')
_SHOWN = "<b4d>|' onx='1'|\" onx=\"1\""


def python_page(pick: random.Random, at: int) -> FixTrial:
    parts, count = _page(pick)
    names = [f"p{number}" for number in range(count)]
    text = _python_text(pick, parts, names)
    sources = ['request.args["q"]', 'request.args.get("q")', 'request.args.get("q", "")']
    lines = "".join(f"    {name} = {pick.choice(sources)}\n" for name in names)
    held = pick.random() < 0.5
    end = f"    page = {text}\n    return page\n" if held else f"    return {text}\n"
    program = (
        f'from flask import Flask, request\napp = Flask(__name__)\n@app.route("/")\ndef show():\n{lines}{end}'
    )
    driver = 'def run(given): return app.test_client().get("/", query_string={"q": given}).get_data(as_text=True)\n'
    return FixTrial(
        "python", "python-xss", program, driver, _NAMES, _MARKUP, _SHOWN, f"random {at}", sure=False
    )


def script_page(pick: random.Random, at: int) -> FixTrial:
    parts, count = _page(pick)
    names = [f"p{number}" for number in range(count)]
    text = _script_text(pick, parts, names)
    lines = "".join(f"  const {name} = req.query.q;\n" for name in names)
    program = f"function show(req, res) {{\n{lines}  res.send({text});\n}}\n"
    driver = (
        "function run(given) {\n  let out;\n  show({ query: { q: given } }, { send: (text) => { out = text; } });\n"
        "  return out;\n}\n"
    )
    return FixTrial(
        "javascript",
        "javascript-xss-response",
        program,
        driver,
        _NAMES,
        _MARKUP,
        _SHOWN,
        f"random {at}",
        sure=False,
    )


def java_page(pick: random.Random, at: int) -> FixTrial:
    parts, count = _page(pick)
    names = [f"p{number}" for number in range(count)]
    text = _strict_text(pick, parts, names)
    lines = "".join(f'    String {name} = request.getParameter("q");\n' for name in names)
    program = (
        "class Trial {\n  static void show(HttpServletRequest request, HttpServletResponse response) {\n"
        f"{lines}    response.getWriter().println({text});\n  }}\n"
        "  static String run(String given) {\n    HttpServletRequest request = new HttpServletRequest();\n"
        "    request.given = given;\n    HttpServletResponse response = new HttpServletResponse();\n"
        "    show(request, response);\n    return response.out.toString();\n  }\n}\n"
    )
    driver = (
        "class HttpServletRequest { String given; String getParameter(String name) { return given; } }\n"
        "class HttpServletResponse { java.io.StringWriter out = new java.io.StringWriter(); "
        "java.io.PrintWriter getWriter() { return new java.io.PrintWriter(out, true); } }\n"
    )
    return FixTrial("java", "java-xss", program, driver, _NAMES, _MARKUP, _SHOWN, f"random {at}", sure=False)


# Paths


def python_path(pick: random.Random, at: int) -> FixTrial:
    forms = [
        'os.path.join("files", name)',
        'os.path.join("files", "deep", name)',
        '"files/" + name',
        'f"files/deep/{name}"',
        'os.path.join(os.path.join("files", "deep"), name)',
        'BASE + "/" + name',
    ]
    form = pick.choice(forms)
    body = f"open({form})" if pick.random() < 0.5 else "open(path)"
    line = f"    path = {form}\n" if body == "open(path)" else ""
    program = (
        'import os\nfrom flask import Flask, request\napp = Flask(__name__)\nBASE = "files"\n@app.route("/")\n'
        f'def show():\n    name = request.args["q"]\n{line}    with {body} as source:\n'
        '        return {"text": source.read()}\n'
    )
    driver = (
        "def run(given):\n    os.makedirs('files/deep/more', exist_ok=True)\n"
        "    for name in ('files/a.txt', 'files/deep/a.txt', 'files/deep/more/a.txt', 'files/more.txt', 'secret.txt'):\n"
        "        with open(name, 'w') as out: out.write('text of ' + name)\n"
        "    return app.test_client().get('/', query_string={'q': given}).get_data(as_text=True)\n"
    )
    hostile = ("../secret.txt", "../../secret.txt", "x/../../secret.txt", "x/../../../secret.txt")
    return FixTrial(
        "python",
        "python-path-traversal",
        program,
        driver,
        ("a.txt", "./a.txt"),
        hostile,
        "text of secret",
        f"random {at}",
        sure=False,
    )


# C


def c_copy(pick: random.Random, at: int) -> FixTrial:
    size = pick.randint(4, 40)
    copies = ["strcpy(room, text);", "strcat(room, text);"]
    prints = ['sprintf(room, "%s", text);', 'sprintf(room, "<%s>", text);', 'sprintf(room, "%d%s", 7, text);']
    rule, forms = pick.choice([("c-unbounded-copy", copies), ("c-unbounded-print", prints)])
    lines = "".join(f"    {pick.choice(forms)}\n" for _ in range(pick.randint(1, 3)))
    pointer = pick.random() < 0.3
    start = "    char *at = room;\n" if pointer else ""
    lines = lines.replace("(room", "(at") if pointer else lines
    program = (
        "#include <stdio.h>\n#include <string.h>\nvoid show(const char *text) {\n"
        f'    char room[{size}] = "";\n{start}{lines}    printf("[%s]\\n", room);\n}}\n'
    )
    driver = "int main(int n, char **v) { show(v[1]); return 0; }\n"
    harmless = ("", "a") if size >= 12 else ("",)
    return FixTrial(
        "c", rule, program, driver, harmless, ("x" * 60,), "AddressSanitizer", f"random {at}", sure=False
    )


MAKERS: dict[str, list[Callable[[random.Random, int], FixTrial]]] = {
    "python": [python_sql, python_shell, python_page, python_sql, python_path],
    "javascript": [script_sql, script_shell, script_page],
    "go": [go_shell],
    "java": [java_page],
    "c": [c_copy],
}
