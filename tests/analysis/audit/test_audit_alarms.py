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
    (
        "python",
        "a table and a number that a caller in the program gives",
        "def rows(cur, table: str, limit: int):\n    cur.execute(f'SELECT * FROM {table} LIMIT {limit}')\n",
        "from flask import request\ndef rows(cur):\n    cur.execute('SELECT * FROM ' + request.args['t'])\n",
        "python-sql-injection",
    ),
    (
        "python",
        "a table in quotes",
        "def rows(cur, table):\n    cur.execute('SELECT * FROM \"' + table + '\"')\n",
        "def rows(cur, name):\n    cur.execute('SELECT * FROM t WHERE n = \"' + name + '\"')\n",
        "python-sql-injection",
    ),
    (
        "python",
        "comparisons with placeholders",
        "def drop(cur, table, keys):\n    tests = ' AND '.join(f'{key.name} = ?' for key in keys)\n"
        "    cur.execute(f'DELETE FROM {table} WHERE {tests}', [key.value for key in keys])\n",
        "def drop(cur, name, size):\n"
        "    cur.execute(f\"DELETE FROM t WHERE n = '{name}' AND s = ?\", (size,))\n",
        "python-sql-injection",
    ),
    (
        "python",
        "an address from the settings of the program",
        "import os, requests\nurl = os.environ['API']\nr = requests.get(f'{url}/projects', timeout=5)\n",
        "import requests\nfrom flask import request\ndef f():\n    return requests.get(request.args['u'])\n",
        "python-ssrf",
    ),
    (
        "python",
        "a header in the log, which cannot hold a line break",
        "import logging\nfrom flask import request\n"
        "def f():\n    logging.info('%s', request.headers['X-Id'])\n",
        "import logging\nfrom flask import request\ndef f():\n    logging.info('%s', request.form['name'])\n",
        "python-log-injection",
    ),
    (
        "python",
        "a value in the log as Python writes it",
        "import logging\nfrom flask import request\ndef f():\n    logging.info('%r', request.form['name'])\n",
        "",
        "python-log-injection",
    ),
    (
        "python",
        "the answer of a server that the program asked, in the log",
        "import logging, requests\ndef f():\n    r = requests.get('https://a.org', timeout=5)\n"
        "    logging.info(f'{r.status_code} {r.text}')\n",
        "",
        "python-log-injection",
    ),
    (
        "python",
        "the text before a private key, without its bytes",
        "MARK = '-----BEGIN PRIVATE KEY-----'\n",
        "KEY = '-----BEGIN PRIVATE KEY-----\\nMIIEvQIBADANBgkqhkiG9w0B'\n",
        "python-secret-format",
    ),
    (
        "python",
        "an example of a key",
        "NOTE = 'key is sk-ant-api03-abcdefghijklmnopqrstuvwxyz0123456789'\n",
        "KEY = 'AKIAIQ4SFODNN7QHBDFG'\n",
        "python-secret-format",
    ),
    (
        "python",
        "a repeated mark of a list",
        "import re\nRULE = re.compile(r'^\\s*([-*_])(?:\\s*\\1){2,}\\s*$')\n",
        "import re\nRULE = re.compile(r'^(\\s*)(?:\\s*\\1){2,}x$')\n",
        "python-regex-from-user",
    ),
    (
        "python",
        "a page made by a template",
        "from django.http import HttpResponse\nfrom django.template import loader\ndef page(request):\n"
        "    template = loader.get_template('a.html')\n"
        "    return HttpResponse(template.render({'name': request.GET['name']}, request))\n",
        "from django.http import HttpResponse\ndef page(request):\n"
        "    return HttpResponse('<b>' + request.GET['name'])\n",
        "python-xss",
    ),
    (
        "python",
        "an answer parsed by Python's own parser, which fetches nothing",
        "import requests\nimport xml.etree.ElementTree as ET\ndef f():\n"
        "    return ET.fromstring(requests.get('https://a.org', timeout=5).text)\n",
        "import xml.etree.ElementTree as ET\ndef f(request):\n    return ET.fromstring(request.body)\n",
        "python-xxe",
    ),
    (
        "python",
        "a namespace in front of a tag",
        "class P:\n    SPACE = '{http://a.org/x}'\n    def find(self, element, tag):\n"
        "        return element.find(self.SPACE + tag)\n",
        "def find(tree, name):\n    return tree.find('.//user[@name=\"' + name + '\"]')\n",
        "python-xpath-injection",
    ),
    (
        "python",
        "templates that write code",
        "from jinja2 import Environment\nenv = Environment(trim_blocks=True, lstrip_blocks=True)\n",
        "from jinja2 import Environment\nenv = Environment(loader=None)\n",
        "python-autoescape-off",
    ),
    (
        "python",
        "a program that is looked for",
        "import os\ndef which(path):\n    return path if os.access(path, os.X_OK) else None\n",
        "import os\ndef f(p):\n    if os.access(p, os.W_OK):\n        return open(p, 'w')\n",
        "python-toctou",
    ),
    (
        "javascript",
        "a row under the names of its columns",
        "function label(row, columns) {\n  const out = {}\n  let i = 0\n  for (const { name } of columns) {\n"
        "    out[name] = row[i++]\n  }\n  return out\n}\n",
        "app.get('/', (req, res) => {\n  table[req.query.name][req.query.key] = req.query.value;\n});\n",
        "javascript-prototype-pollution",
    ),
    (
        "javascript",
        "a list that grows",
        "function on(event, handler) {\n  events[event] = events[event].concat(handler);\n}\n",
        "function set(target, key, source) {\n  target[key] = merge(target[key], source);\n}\n",
        "javascript-prototype-pollution",
    ),
    (
        "javascript",
        "a component that is merged under the name of its channel",
        "function f(axes, channel, child) {\n"
        "  axes[channel] = mergeAxisComponents(axes[channel], child.axes[channel]);\n}\n",
        "",
        "javascript-prototype-pollution",
    ),
    (
        "python",
        "a value that the driver quotes",
        "from clickhouse_connect.driver.binding import format_query_value\ndef f(client, name):\n"
        "    return client.query(f'SELECT 1 FROM t WHERE n = {format_query_value(name)}')\n",
        "def f(client, name):\n    return client.query(f'SELECT 1 FROM t WHERE n = {name}')\n",
        "python-sql-injection",
    ),
    (
        "python",
        "an answer that is no page",
        "from flask import make_response, request\ndef f():\n    r = make_response(reply(request.data))\n"
        "    r.headers['Content-Type'] = 'application/xml'\n    return r\n",
        "from flask import make_response, request\ndef f():\n    return make_response(request.args['a'])\n",
        "python-xss",
    ),
    (
        "python",
        "a hash that names content",
        "import hashlib\ndef name_of(data):\n    return hashlib.sha1(data).hexdigest()[:8]\n",
        "import hashlib\ndef f(password):\n    return hashlib.sha1(password).hexdigest()\n",
        "python-weak-hash",
    ),
    (
        "javascript",
        "a hash that names content",
        'const { createHash } = require("crypto");\n'
        'const nameOf = (data) => createHash("md5").update(data).digest("hex");\n',
        'const { createHash } = require("crypto");\n'
        'const sign = (data, secret) => createHash("md5").update(data + secret).digest("hex");\n',
        "javascript-weak-hash",
    ),
    (
        "python",
        "letters of an example",
        "import random, string\ndef make_plate():\n    return random.choice(string.ascii_uppercase)\n",
        "import random, string\ndef make_password():\n    return random.choice(string.ascii_uppercase)\n",
        "python-weak-random",
    ),
    (
        "python",
        "the digest of a file",
        "def is_copy(path, digest):\n    return sha256_of(path) == digest\n",
        "import hmac\ndef is_valid(key, body, signature):\n"
        "    return hmac.new(key, body, 'sha256').hexdigest() == signature\n",
        "python-timing-compare",
    ),
    ("python", "a name that stands for itself", '_MUST_PASS = "must_pass"\n', "", "python-hardcoded-secret"),
    (
        "python",
        "a text of the program",
        'TEXTS = {"result_pass": "\u7ed3\u679c\uff1a\u901a\u8fc7\u9a8c\u8bc1\u7ed3\u679c"}\n',
        "",
        "python-hardcoded-secret",
    ),
    (
        "python",
        "an address inside the machine room",
        "import urllib.request\nurllib.request.urlopen('http://169.254.169.254/latest/', timeout=1)\n",
        "import urllib.request\nurllib.request.urlopen('http://files.shop.org/latest/', timeout=1)\n",
        "python-insecure-protocol",
    ),
    (
        "python",
        "an address that another server gave",
        "import requests\ndef f():\n    made = requests.post('https://api.shop.org/x', timeout=9).json()\n"
        "    return requests.get(made['url'], timeout=9)\n",
        "import requests\nfrom flask import request\ndef f():\n"
        "    return requests.get(request.json['url'], timeout=9)\n",
        "python-ssrf",
    ),
    (
        "python",
        "a file beside the script",
        "import os\ndef read(name):\n    return open(os.path.dirname(__file__) + '/' + name).read()\n",
        "import os\nfrom flask import request\ndef read():\n"
        "    return open('/srv/' + request.args['name']).read()\n",
        "python-path-traversal",
    ),
    (
        "javascript",
        "an option of the command line",
        'const { Command } = require("commander");\nconst fs = require("fs");\n'
        'const given = new Command().option("-i <file>").parse().opts();\nfs.readFileSync(given.i);\n',
        'const fs = require("fs");\nfunction f(req) {\n  fs.readFileSync(req.query.i);\n}\n',
        "javascript-path-traversal",
    ),
    (
        "javascript",
        "a copy of one level",
        "function f(req) {\n  return Object.assign({}, JSON.parse(req.body.options));\n}\n",
        'const _ = require("lodash");\n'
        "function f(req) {\n  return _.merge({}, JSON.parse(req.body.options));\n}\n",
        "javascript-prototype-pollution",
    ),
    (
        "python",
        "a digest that says whether something changed",
        "import hashlib\ndef has_changed(old, new):\n    return hashlib.md5(old) != hashlib.md5(new)\n",
        "import hashlib\ndef sign(text):\n    return hashlib.md5(text).hexdigest()\n",
        "python-weak-hash",
    ),
    (
        "c",
        "a length that was compared with the buffer",
        "#include <string.h>\nint f(const char *p) {\n    char e[32];\n"
        "    if (strlen(p + 1) >= sizeof(e)) return -1;\n    strcpy(e, p + 1);\n    return 0;\n}\n",
        "int f(const char *p) {\n    char e[32];\n    strcpy(e, p + 1);\n    return 0;\n}\n",
        "c-unbounded-copy",
    ),
    (
        "c",
        "some bits of a random number, and a number that was tested",
        "#include <stdlib.h>\nint f(unsigned char *b, const char *r) {\n    b[0] = (unsigned char)rand();\n"
        "    return atoi(r) > 0 ? atoi(r) - 1 : 0;\n}\n",
        "#include <stdlib.h>\nint f(const char *r) {\n    return atoi(r) - 1;\n}\n",
        "c-integer-overflow",
    ),
    (
        "python",
        "a secret of the settings, as bytes",
        "from django.conf import settings\nsecret = settings.API_SECRET.encode('utf-8')\n",
        "secret = 'c0rrect-h0rse-battery'.encode('utf-8')\n",
        "python-hardcoded-secret",
    ),
    (
        "python",
        "numbers for rows of a simulation",
        "import random\ndef rows(tests):\n    for name, test_code in random.sample(tests, 3):\n"
        "        yield name, test_code\ndef reset(self):\n    self.size = random.randint(50, 200)\n",
        "import random\ndef reset_token():\n    return str(random.randint(0, 999999))\n",
        "python-weak-random",
    ),
    (
        "c",
        "twice the length of a text",
        "#include <stdlib.h>\n#include <string.h>\nchar *f(const char *p) {\n    size_t n = strlen(p);\n"
        "    return malloc(n * 2);\n}\n",
        "#include <stdlib.h>\nchar *f(size_t n) {\n    return malloc(n * 2);\n}\n",
        "c-allocation-overflow",
    ),
    (
        "javascript",
        "a buffer that is filled at once",
        "function join(a, b) {\n  const all = Buffer.allocUnsafe(a.length + b.length);\n  a.copy(all, 0);\n"
        "  b.copy(all, a.length);\n  return all;\n}\n",
        "function send(size, res) {\n  const all = Buffer.allocUnsafe(size);\n  res.end(all);\n}\n",
        "javascript-unsafe-buffer",
    ),
    (
        "javascript",
        "a buffer of a text",
        "function f(code) {\n  return new Buffer(String.fromCharCode(code));\n}\n"
        "function g(text) {\n  return new Buffer(text, 'utf8');\n}\n",
        "function f(size) {\n  return new Buffer(size);\n}\n",
        "javascript-unsafe-buffer",
    ),
    (
        "python",
        "a number written into a statement",
        "def f(cur, a, b):\n    cur.execute('SELECT * FROM t WHERE n BETWEEN %f AND %d' % (a, b))\n",
        "def f(cur, since):\n    cur.execute('SELECT * FROM t WHERE a > %s' % since)\n",
        "python-sql-injection",
    ),
    (
        "go",
        "a number written into a statement by a program that prints anything",
        "",
        f'{GO}import "fmt"\n\nfunc f(db *sql.DB, n string) {{\n'
        '\tdb.Query(fmt.Sprintf("SELECT 1 FROM u WHERE n = %d", n))\n}\n',
        "go-sql-injection",
    ),
    (
        "python",
        "a pass of a filter, a range and a zero address are no secrets",
        'bandpass: str = "0.5-40"\npassword = "2020-01-01"\ngas_token = "0x0000000000000000000000000000"\n',
        'userpass = "s3cr3t-40x"\n',
        "python-hardcoded-secret",
    ),
    (
        "python",
        "a path without a condition",
        'def f(tree, name):\n    return tree.find(".//{0}Response".format(name))\n',
        "def f(tree, name):\n    return tree.find(\".//user[@name='%s']\" % name)\n",
        "python-xpath-injection",
    ),
    (
        "python",
        "a document that the program writes itself",
        'from lxml import etree\ndef f(name):\n    return etree.fromstring("<a><b>%s</b></a>" % name)\n',
        "from lxml import etree\ndef f(text):\n    return etree.fromstring(text)\n",
        "python-xxe",
    ),
    (
        "python",
        "a key of a cache with the time",
        "import uuid\ndef f():\n    result_key = str(uuid.uuid1())\n    return result_key\n",
        "import uuid\ndef f():\n    reset_token = str(uuid.uuid1())\n    return reset_token\n",
        "python-weak-random",
    ),
    (
        "python",
        "a longer list of arguments",
        "def f(self, src, dest):\n    command = ['cp']\n    command = command + [src, dest]\n"
        "    return self.run_command(command)\n",
        "def f(self, src, dest):\n    return self.run_command('cp ' + src + ' ' + dest)\n",
        "python-command-injection",
    ),
    (
        "python",
        "the role of a message",
        "def insert(role):\n    assert role != Role.SYSTEM\n",
        "def drop(user):\n    assert user.role == 'admin'\n",
        "python-assert-security",
    ),
    (
        "python",
        "all fields of a request, printed as a table",
        "import logging\nfrom flask import request\ndef f():\n    logging.info('fields %s', request.args)\n",
        "import logging\nfrom flask import request\n"
        "def f():\n    logging.info('name %s', request.args['name'])\n",
        "python-log-injection",
    ),
    (
        "javascript",
        "a path with keys in parentheses",
        'function f(table, key) {\n  return WebResource.del(table + "(RowKey=\'" + key + "\')");\n}\n',
        'function f(client, user) {\n  return client.del("cn=" + user + ",dc=x");\n}\n',
        "javascript-ldap-injection",
    ),
    (
        "javascript",
        "a key of one character",
        "function f(table, font) {\n  const one = String.fromCharCode(font.first);\n"
        "  table[one][String.fromCharCode(font.second)] = 1;\n}\n",
        "function f(table, font) {\n  const [first, second] = font.name.split('.');\n"
        "  table[first][second] = 1;\n}\n",
        "javascript-prototype-pollution",
    ),
    (
        "javascript",
        "the line break of a word",
        'function f(word) {\n  return word.replace("\\n", "");\n}\n',
        'function f(word) {\n  return word.replace("<", "");\n}\n',
        "javascript-partial-replace",
    ),
    (
        "c",
        "as many bytes as the number says",
        "unsigned char *f(unsigned n) {\n    unsigned char *p = malloc(n * sizeof(unsigned char));\n"
        "    return p;\n}\n",
        "int *f(unsigned n) {\n    int *p = malloc(n * sizeof(int));\n    return p;\n}\n",
        "c-allocation-overflow",
    ),
    (
        "javascript",
        "the console of a browser",
        "function f() {\n  const t = new URLSearchParams(window.location.search).get('t');\n"
        "  console.log('tab ' + t);\n}\n",
        "app.get('/', (req, res) => {\n  console.log('tab ' + req.query.t);\n});\n",
        "javascript-log-injection",
    ),
    (
        "javascript",
        "a position that is counted on",
        "function f(target, position, c) {\n  if (c) target[0] = f(target[position], c);\n"
        "  target[position++] = c >> 6;\n  return f(target, position);\n}\n",
        "function f(target, source) {\n  for (const key in source) {\n"
        "    target[key] = f(target[key], source[key]);\n  }\n  return target;\n}\n",
        "javascript-prototype-pollution",
    ),
    (
        "javascript",
        "a pattern of the command line",
        "const pattern = new RegExp(process.argv[2]);\n",
        "app.get('/', (req, res) => {\n  res.json(list.find((n) => new RegExp(req.query.p).test(n)));\n});\n",
        "javascript-regex-dos",
    ),
    (
        "javascript",
        "an address as it was sent holds no line break",
        "function f(req, res) {\n  res.setHeader('Location', '/#' + req.url);\n}\n",
        "function f(req, res) {\n  res.setHeader('X-Name', req.query.name);\n}\n",
        "javascript-header-injection",
    ),
    (
        "python",
        "objects that were stored a line before",
        "import pickle\ndef copy(item):\n    stored = pickle.dumps(item)\n    return pickle.loads(stored)\n",
        "import pickle\ndef copy(stored):\n    return pickle.loads(stored)\n",
        "python-unsafe-deserialization",
    ),
    (
        "python",
        "a constant of a class within a function, below the method that reads it",
        "def make(base):\n    class Grammar(base):\n        def rule(self, names):\n"
        "            return eval(self._code, {}, names)\n"
        "        _code = compile('[a, b]', '<string>', 'eval')\n"
        "    return Grammar\n",
        "def make(base, code):\n    class Grammar(base):\n        def rule(self, names):\n"
        "            return eval(self._code, {}, names)\n        _code = code\n    return Grammar\n",
        "python-code-injection",
    ),
    (
        "python",
        "a token that is verified beside the first look at it",
        "from jose import jwt\ndef f(token, key):\n    claims = jwt.get_unverified_claims(token)\n"
        "    return jwt.decode(token, key, algorithms=['RS256'], audience=claims['aud'])\n",
        "from jose import jwt\ndef f(token):\n    return jwt.get_unverified_claims(token)['sub']\n",
        "python-jwt-unverified",
    ),
    (
        "python",
        "a port that is only tried",
        "import socket\ndef is_free(port):\n    s = socket.socket()\n    s.bind(('', port))\n    s.close()\n",
        "import socket\ndef serve(port):\n    s = socket.socket()\n    s.bind(('', port))\n    s.listen()\n"
        "    s.close()\n",
        "python-bind-all",
    ),
    (
        "python",
        "what a dependency gives to a handler",
        "import logging\nfrom fastapi import Depends, FastAPI\napp = FastAPI()\n@app.get('/a')\n"
        "async def a(user=Depends(find_user)):\n    logging.info('from %s', user)\n",
        "import logging\nfrom fastapi import Depends, FastAPI\napp = FastAPI()\n@app.get('/a')\n"
        "async def a(form: LoginForm = Depends()):\n    logging.info('from %s', form)\n",
        "python-log-injection",
    ),
    (
        "python",
        "headers that a handler declares",
        "import logging\nfrom fastapi import FastAPI, Header\napp = FastAPI()\n@app.get('/a')\n"
        "async def a(agent: str = Header()):\n    logging.info('from %s', agent)\n",
        "import logging\nfrom fastapi import FastAPI\napp = FastAPI()\n@app.get('/a')\n"
        "async def a(agent: str):\n    logging.info('from %s', agent)\n",
        "python-log-injection",
    ),
    (
        "python",
        "parts of an address, which hold no line break",
        "import logging\nfrom urllib.parse import urlparse\nfrom flask import request\ndef f():\n"
        "    logging.info('at %s', urlparse(request.args['u']).path)\n",
        "import logging\nfrom flask import request\ndef f():\n    logging.info('at %s', request.args['u'])\n",
        "python-log-injection",
    ),
    (
        "python",
        "a header of Tornado, which refuses line breaks",
        "from flask import request\nclass H(RequestHandler):\n    def get(self):\n"
        "        self.set_header('A', request.args['a'])\n",
        "from flask import request\ndef f(response):\n    response.headers.set('A', request.args['a'])\n",
        "python-header-injection",
    ),
    (
        "python",
        "templates of prompts",
        "from jinja2 import Environment\ndef make(system_prompt):\n"
        "    return Environment().from_string(system_prompt)\n",
        "from jinja2 import Environment\ndef make(page):\n    return Environment().from_string(page)\n",
        "python-autoescape-off",
    ),
    (
        "python",
        "the salt of a derived key",
        "import hmac\ndef hkdf(key, info):\n    return hmac.new(b'a/v1', key, 'sha256').digest()\n",
        "import hmac\ndef sign(text):\n    return hmac.new(b'a/v1', text, 'sha256').digest()\n",
        "python-static-iv",
    ),
    (
        "python",
        "an error of a computation that is ignored",
        "def f(x):\n    try:\n        return math.acos(x)\n    except:\n        pass\n",
        "def f(x):\n    try:\n        verify_signature(x)\n    except:\n        pass\n",
        "python-swallowed-error",
    ),
    (
        "javascript",
        "the name of a file to be saved, in a header that refuses line breaks",
        "function f(req, res) {\n"
        "  res.setHeader('Content-Disposition', `attachment; filename=${req.query.n}`);\n}\n",
        "function f(req, res) {\n  res.setHeader('Link', `<${req.query.n}>`);\n}\n",
        "javascript-header-injection",
    ),
    (
        "javascript",
        "what a file holds that the client names",
        "const fs = require('fs');\nfunction f(req, res) {\n"
        "  res.end(fs.readFileSync('/d/' + req.query.n));\n}\n",
        "const fs = require('fs');\nfunction f(req, res) {\n  res.end('<p>' + req.query.n);\n}\n",
        "javascript-xss-response",
    ),
    (
        "cpp",
        "a null by another name",
        "void *f(size_t n) {\n    void *p = malloc(n);\n    if (p == nil)\n        throw std::bad_alloc();\n"
        "    memset(p, 0, n);\n    return p;\n}\n",
        "void *f(size_t n) {\n    void *p = malloc(n);\n    memset(p, 0, n);\n    return p;\n}\n",
        "c-null-dereference",
    ),
    (
        "cpp",
        "several values at once",
        "int f(void) {\n    int a;\n    bool ok;\n    std::tie(a, ok) = read();\n    if (!ok) {\n"
        "        return 0;\n    }\n    return a;\n}\n",
        "int f(void) {\n    bool ok;\n    if (!ok) {\n        return 0;\n    }\n    return 1;\n}\n",
        "c-uninitialised",
    ),
    (
        "javascript",
        "a dot matches no carriage return",
        "const comment = /^(.|\\r?\\n)*?\\*\\//;\n",
        "const comment = /^(.|\\s?\\n)*?\\*\\//;\n",
        "javascript-regex-dos",
    ),
    (
        "python",
        "the request of a test's fixture",
        "import requests\ndef up(request, host):\n"
        "    return requests.get(f'{request.config.getoption(\"scheme\")}://{host}/', timeout=5)\n",
        "import requests\ndef up(request, host):\n    return requests.get(f'http://{host}/', timeout=5)\n",
        "python-ssrf",
    ),
    (
        "python",
        "fields that the program put into its error",
        "@app.get('/u')\ndef f():\n    try:\n        send()\n    except OffsetError as e:\n"
        "        return Response(status=409, headers={'Offset': str(e.offset)})\n",
        "@app.get('/u')\ndef f():\n    try:\n        send()\n    except OffsetError as e:\n"
        "        return Response(status=409, headers={'Offset': str(e)})\n",
        "python-error-exposed",
    ),
    (
        "python",
        "rows of a database in the log",
        "import logging\nfrom flask import request\nlogger = logging.getLogger(__name__)\ndef f():\n"
        "    row = session.get(Item, request.args.get('key'))\n    logger.debug('Result = %s', row)\n",
        "import logging\nfrom flask import request\nlogger = logging.getLogger(__name__)\ndef f():\n"
        "    row = request.args.get('key')\n    logger.debug('Result = %s', row)\n",
        "python-log-injection",
    ),
    (
        "python",
        "names in PRAGMA and types of new columns",
        "def add(con, table, column, kind):\n    con.execute(f'PRAGMA table_info({table})')\n"
        "    con.execute(f'ALTER TABLE {table} ADD COLUMN {column} {kind}')\n",
        "def add(con, table, text):\n    con.execute(f\"UPDATE {table} SET note = '{text}'\")\n",
        "python-sql-injection",
    ),
    (
        "python",
        "a template in a file",
        "from jinja2 import Template\ndef load(path):\n    with open(path) as f:\n"
        "        return Template(f.read(), autoescape=True)\n",
        "from jinja2 import Template\ndef load(text):\n    return Template(text, autoescape=True)\n",
        "python-template-injection",
    ),
    (
        "javascript",
        "a prefix that is known to be there",
        "function f(name) {\n  return name.startsWith('&') ? name.replace('&', '') : name;\n}\n",
        "function f(name) {\n  return name.replace('&', '');\n}\n",
        "javascript-partial-replace",
    ),
    (
        "javascript",
        "a program of the operating system, found by its environment",
        "const { execFile } = require('child_process');\n"
        "execFile(require('path').join(process.env.SystemRoot, 'reg.exe'), ['query']);\n",
        "const { execFile } = require('child_process');\n"
        "app.get('/', (req, res) => execFile(req.query.program, ['query']));\n",
        "javascript-command-injection",
    ),
    (
        "typescript",
        "a parameter called request with a type of its own",
        "function send(request: { url: string; method: string }) {\n  return axios.get(request.url);\n}\n",
        "function send(request: Request) {\n  return axios.get(request.query.url);\n}\n",
        "javascript-ssrf",
    ),
    (
        "javascript",
        "when the client's own token ends",
        "import { jwtDecode } from 'jwt-decode';\n"
        "function ends(token) {\n  return jwtDecode(token).exp * 1000;\n}\n",
        "import { jwtDecode } from 'jwt-decode';\n"
        "function user(token) {\n  return jwtDecode(token).user;\n}\n",
        "javascript-jwt-unverified",
    ),
    (
        "python",
        "values that an f-string writes by repr",
        "import logging\nfrom flask import request\ndef f():\n    name = request.args['name']\n"
        "    logging.info(f'{name=} {name!r}')\n",
        "import logging\nfrom flask import request\ndef f():\n    name = request.args['name']\n"
        "    logging.info(f'{name=!s}')\n",
        "python-log-injection",
    ),
    (
        "python",
        "a number that an f-string writes by repr",
        "from flask import request\ndef f(c):\n    n = int(request.args['n'])\n"
        "    c.execute(f'SELECT a FROM b WHERE n = {n!r}')\n",
        "from flask import request\ndef f(c):\n    n = request.args['n']\n"
        "    c.execute(f'SELECT a FROM b WHERE n = {n!r}')\n",
        "python-sql-injection",
    ),
    (
        "c",
        "the difference of two pointers, compared with the buffer",
        "int f(const char *s) {\n    char b[32];\n    const char *end = strchr(s, ':');\n"
        "    if (!end) return -1;\n    size_t n = (size_t)(end - s);\n"
        "    if (n >= sizeof(b) || strlen(end) > 9) return -1;\n    memcpy(b, s, n);\n    return b[0];\n}\n",
        "int f(const char *s) {\n    char b[32];\n    const char *end = strchr(s, ':');\n"
        "    if (!end) return -1;\n    size_t n = (size_t)(end - s);\n"
        "    memcpy(b, s, n);\n    return b[0];\n}\n",
        "c-unchecked-length",
    ),
    (
        "typescript",
        "keys that the object has already",
        "function f(all: any, name: string) {\n  let o = all;\n  o = o[name];\n"
        "  for (const key in o) {\n    o[key] = parseInt(o[key], 10);\n  }\n}\n",
        "function f(all: any, name: string, more: any) {\n  let o = all;\n"
        "  for (const step of name.split('.')) o = o[step];\n"
        "  for (const key in more) {\n    o[key] = parseInt(more[key], 10);\n  }\n}\n",
        "javascript-prototype-pollution",
    ),
    (
        "python",
        "what is stored under a key that the client names",
        "from flask import request, make_response\ndef page():\n"
        "    entry = pages.get(request.args['name'])\n"
        "    return make_response('<p>' + entry.body + '</p>')\n",
        "from flask import request, make_response\ndef page():\n"
        "    entry = pages.get('none', request.args['name'])\n"
        "    return make_response('<p>' + entry + '</p>')\n",
        "python-xss",
    ),
    (
        "python",
        "states of a check that passed",
        "STATES = {'PASS': 'GATEWAY_PASSED', 'BLOCK': 'GATEWAY_BLOCKED'}\n",
        "LOGIN = {'PASS': 'Hunter_2_Gateway', 'USER': 'root'}\n",
        "python-hardcoded-secret",
    ),
    (
        "c",
        "a buffer whose size is written elsewhere",
        'void f(void) {\n    char path[NAME_SIZE] = "";\n    strcat(path, "/etc/app/settings");\n}\n',
        'void f(void) {\n    char path[] = "";\n    strcat(path, "/etc/app/settings");\n}\n',
        "c-buffer-overflow",
    ),
    (
        "cpp",
        "a reference to what is set later",
        "int f(int n) {\n    int count;\n    int &again = count;\n    again = n;\n    return count;\n}\n",
        "int f(int n) {\n    int count;\n    int again = count;\n    again = n;\n    return count;\n}\n",
        "c-uninitialised",
    ),
    (
        "cpp",
        "a text from cin with its width",
        "void f() {\n    char name[20];\n    std::cin.width(20);\n    std::cin >> name;\n}\n",
        "void f() {\n    char name[20];\n    std::cin >> name;\n}\n",
        "c-unbounded-scan",
    ),
    (
        "javascript",
        "a rounded count of tokens",
        "const tokenCount = Math.ceil(text.length / 4);\nconst lastTokenMs = Math.max(a, b);\n",
        "const token = Math.round(Math.random() * 1e9);\n",
        "javascript-weak-random",
    ),
    (
        "python",
        "parts escaped one by one",
        "import re\ndef f():\n    words = [re.escape(word) for word in input().split()]\n"
        "    return re.compile('|'.join(words))\n",
        "import re\ndef f():\n    words = [word for word in input().split()]\n"
        "    return re.compile('|'.join(words))\n",
        "python-regex-from-user",
    ),
    (
        "python",
        "the arguments of the program handed on without a shell",
        "import subprocess, sys\ndef main(script):\n    command = [str(script)] + sys.argv[1:]\n"
        "    subprocess.run(command, check=False)\n",
        "import subprocess\nfrom flask import request\ndef f():\n    subprocess.run(request.args['a'])\n",
        "python-command-injection",
    ),
    (
        "python",
        "a whole JSON value and raw bytes in a log, written by repr",
        "async def f(request, s):\n    logger.info(await request.json())\n    logger.debug(s.recv(9))\n",
        "async def f(request):\n    body = await request.json()\n    logger.info(body['name'])\n",
        "python-log-injection",
    ),
    (
        "python",
        "entries of a table drawn at random",
        "import random\ndef f(table):\n"
        "    return {key: table[key] for key in random.sample(list(table.keys()), 3)}\n",
        "import random\ndef f():\n    api_key = random.sample('abcdef', 5)\n    return api_key\n",
        "python-weak-random",
    ),
    (
        "python",
        "a header of a request that is sent",
        "import urllib.request\ndef send(call_request, url):\n    out = urllib.request.Request(url)\n"
        "    out.add_header('X-A', call_request.headers['a'])\n",
        "from flask import request\ndef f(r):\n    r.headers.add('X-A', request.args['a'])\n",
        "python-header-injection",
    ),
    (
        "python",
        "settings saved by the program",
        "import os\ndef f(store):\n    store.save({}, os.environ['HOME'] + '/a')\n",
        "from flask import request\ndef f():\n    u = request.files['f']\n    u.save('up/' + u.filename)\n",
        "python-upload-unrestricted",
    ),
    (
        "python",
        "the name that the storage chose for an upload",
        "import os\nfrom django.core.files.storage import FileSystemStorage\ndef view(request):\n"
        "    up = request.FILES['f']\n    name = FileSystemStorage().save(up.name, up)\n"
        "    os.remove('/srv/' + name)\n",
        "import os\ndef view(request):\n    os.remove('/srv/' + request.POST['name'])\n",
        "python-path-traversal",
    ),
    (
        "python",
        "the address of a page of the application",
        "from flask import redirect, request, url_for\n@app.route('/a')\ndef f():\n"
        "    return redirect(url_for('page', name=request.args['name']))\n",
        "from flask import redirect, request\n@app.route('/a')\ndef f():\n"
        "    return redirect(request.args['next'])\n",
        "python-open-redirect",
    ),
    (
        "python",
        "the text of an error that the program defines",
        "from flask import jsonify\nfrom .errors import NameTooLong\ndef f():\n    try:\n        return g()\n"
        "    except NameTooLong as error:\n        return jsonify({'error': str(error)})\n",
        "from flask import jsonify\nfrom .errors import NameTooLong\ndef f():\n    try:\n        return g()\n"
        "    except (NameTooLong, OSError) as error:\n        return jsonify({'error': str(error)})\n",
        "python-error-exposed",
    ),
    (
        "python",
        "a text that asks for a password",
        "TEXTS = {'prompt_pass': 'Passwort: '}\n",
        "LOGIN = {'pass': 'Passw0rt:17'}\n",
        "python-hardcoded-secret",
    ),
    (
        "python",
        "markup of a terminal",
        "from rich.text import Text\ndef f(name):\n    return Text.from_markup(f'[b]{name}[/b]')\n",
        "from markupsafe import Markup\ndef f(name):\n    return Markup(f'<b>{name}</b>')\n",
        "python-xss",
    ),
    (
        "python",
        "the name of a kind, and a comparison that the database makes",
        "@app.get('/a')\ndef f(mode, secret):\n    if mode == Mode.password:\n"
        "        return db.query(Key).filter(Key.hashed_secret == secret)\n",
        "@app.get('/a')\ndef f(secret):\n    return self.api_secret == secret\n",
        "python-timing-compare",
    ),
    (
        "python",
        "the header of a token that chooses the key",
        "import jwt\ndef f(t):\n    kid = jwt.get_unverified_header(t)['kid']\n    return keys[kid]\n",
        "import jwt\ndef f(token):\n    return jwt.get_unverified_header(token)['sub']\n",
        "python-jwt-unverified",
    ),
    (
        "python",
        "a token that scripts read",
        "def f(response, value):\n    response.set_cookie(CSRF_COOKIE_NAME, value, secure=True)\n",
        "def f(response, value):\n    response.set_cookie(SESSION_COOKIE_NAME, value, secure=True)\n",
        "python-insecure-cookie",
    ),
    (
        "javascript",
        "what is called raw and is no query",
        "function f(codec, hash) {\n  return codec.fromRaw(hash + '\\n');\n}\n",
        "function f(knex, id) {\n  return knex('t').whereRaw('id = ' + id);\n}\n",
        "javascript-sql-injection",
    ),
    (
        "javascript",
        "the options of the program on its console",
        "const argv = require('yargs').options({}).argv;\nconsole.log(`reading ${argv.file}`);\n",
        "app.get('/a', (req, res) => {\n  console.log(`reading ${req.query.file}`);\n});\n",
        "javascript-log-injection",
    ),
    (
        "javascript",
        "a buffer of the bytes of a list",
        "function f(type, n) {\n  const bytes = [];\n  bytes.push(n);\n"
        "  return [new Buffer([type.byte]), new Buffer(bytes)];\n}\n",
        "function f(n) {\n  return new Buffer(n);\n}\n",
        "javascript-unsafe-buffer",
    ),
    (
        "tsx",
        "the styles of a component",
        "function C() {\n  const css = this.build();\n"
        "  return <style dangerouslySetInnerHTML={{ __html: css }} />;\n}\n",
        "function C(props) {\n  return <p dangerouslySetInnerHTML={{ __html: props.css }} />;\n}\n",
        "javascript-react-raw-html",
    ),
    (
        "javascript",
        "the styles of an element that is created",
        "function C() {\n  const css = this.build();\n"
        "  return React.createElement('style', {\n    dangerouslySetInnerHTML: {\n"
        "      __html: css\n    }\n  });\n}\n",
        "function C() {\n  const text = this.build();\n"
        "  return React.createElement('p', {\n    dangerouslySetInnerHTML: {\n"
        "      __html: text\n    }\n  });\n}\n",
        "javascript-react-raw-html",
    ),
    (
        "javascript",
        "a fragment of a page of the site",
        "function f(req, res) {\n  const route = req.url;\n  req.url = '/a';\n"
        "  res.setHeader('Location', req.url + '#' + route);\n}\n",
        "function f(req, res) {\n  res.setHeader('Location', req.query.to);\n}\n",
        "javascript-open-redirect",
    ),
    (
        "cpp",
        "a field of each item of a list",
        "void f(struct item *cur) {\n  struct item *next;\n  while (cur) {\n    next = cur->next;\n"
        "    free(cur->text);\n    free(cur);\n    cur = next;\n  }\n}\n",
        "void f(struct item *cur) {\n  free(cur->text);\n  free(cur->text);\n}\n",
        "c-double-free",
    ),
    (
        "cpp",
        "another function of the same name",
        "const char *name(const double key) {\n  return name((int)key);\n}\n",
        "int depth(int key) {\n  return depth(key);\n}\n",
        "c-uncontrolled-recursion",
    ),
    (
        "c",
        "an assertion that marks code as unreachable",
        'void f(int a) {\n  if (a > 9) assert(0 && "no such state");\n  else assert(!"nor this");\n}\n',
        "void f(void) {\n  int a = 1;\n  assert(a == 2);\n}\n",
        "c-reachable-assertion",
    ),
    (
        "c",
        "a condition that shifts",
        "int f(unsigned n) {\n  int r = 0;\n  while (n >>= 1) r++;\n  return r;\n}\n",
        "int f(unsigned n) {\n  int r = 0;\n  while (n > 1) r++;\n  return r;\n}\n",
        "c-endless-loop",
    ),
    (
        "python",
        "a channel within the machine",
        "import grpc\nchannel = grpc.insecure_channel('localhost:50051')\n",
        "import grpc\nchannel = grpc.insecure_channel('example.org:50051')\n",
        "python-insecure-protocol",
    ),
    (
        "python",
        "the parsed answer of another server in a log",
        "import json, logging, requests\ndef f(u):\n"
        "    logging.info(json.loads(requests.get(u, timeout=9).content)['id'])\n",
        "import json, logging\nfrom flask import request\ndef f():\n"
        "    logging.info(json.loads(request.data)['id'])\n",
        "python-log-injection",
    ),
    (
        "python",
        "an image in memory",
        "import io, requests\nfrom PIL import Image\ndef f(u):\n"
        "    return Image.open(io.BytesIO(requests.get(u, timeout=9).content))\n",
        "from PIL import Image\nfrom flask import request\ndef f():\n    Image.open(request.args['a'])\n",
        "python-path-traversal",
    ),
    (
        "python",
        "what a file holds",
        "@app.get('/{name}')\ndef f(name: str):\n    return '<pre>' + open(base(name)).read() + '</pre>'\n",
        "@app.get('/{name}')\ndef f(name: str):\n    return '<pre>' + name + '</pre>'\n",
        "python-xss",
    ),
    (
        "python",
        "tokens of a language model",
        "import hashlib\ndef count(text, token_count):\n    return hashlib.md5(text).hexdigest()\n",
        "import hashlib\ndef f(token):\n    return hashlib.md5(token).hexdigest()\n",
        "python-weak-hash",
    ),
    (
        "python",
        "authors, and the depth of a verification",
        "import random\ndef roast_author(lines):\n    return random.choice(lines)\n"
        "def f(genes):\n    verification_depth = random.uniform(0, 1)\n    return verification_depth\n",
        "import random\ndef auth_code(lines):\n    return random.choice(lines)\n",
        "python-weak-random",
    ),
    (
        "python",
        "settings written in Python, read from a file",
        "def f(name, to):\n    with open(name) as it:\n        exec(compile(it.read(), name, 'exec'), to)\n",
        "def f(name, text):\n    exec(compile(text, name, 'exec'))\n",
        "python-code-injection",
    ),
    (
        "python",
        "the assertions of a description of behaviour",
        "@then('the page is shown')\ndef step(context):\n    assert context.logged_in\n",
        "def step(context):\n    assert context.logged_in\n",
        "python-assert-security",
    ),
    (
        "python",
        "objects that the package brings along",
        "import os, pickle\nHERE = os.path.dirname(os.path.abspath(__file__))\ndef f():\n"
        "    with open(os.path.join(os.path.dirname(__file__), 'data', 'labels.pkl'), 'rb') as file:\n"
        "        return pickle.load(file)\n",
        "import os, pickle\ndef f(name):\n"
        "    with open(os.path.join(os.path.dirname(__file__), name), 'rb') as file:\n"
        "        return pickle.load(file)\n",
        "python-unsafe-deserialization",
    ),
    (
        "python",
        "a stack trace that the program keeps",
        "import traceback\ndef run(code):\n    try:\n        return work(code)\n    except Exception:\n"
        "        return {'trace': traceback.format_exc()}\n",
        "import traceback\ndef run(request):\n    try:\n        return work(request)\n"
        "    except Exception:\n        return {'trace': traceback.format_exc()}\n",
        "python-error-exposed",
    ),
    (
        "python",
        "frames of a film in any order",
        "import random\ndef get_key_frames(names):\n    random.shuffle(names)\n    return names\n",
        "import random\ndef get_key(names):\n    random.shuffle(names)\n    return names\n",
        "python-weak-random",
    ),
    (
        "python",
        "templates of settings",
        "from jinja2 import Environment\ndef f(loader):\n    env = Environment(loader=loader)\n"
        "    return env.get_template('haproxy.cfg.j2').render()\n",
        "from jinja2 import Environment\ndef f(loader):\n    env = Environment(loader=loader)\n"
        "    return env.get_template('page.html').render()\n",
        "python-autoescape-off",
    ),
    (
        "javascript",
        "a preference of the page",
        "function f(open) {\n  document.cookie = `sidebar=${open}; path=/`;\n}\n",
        "function f(token) {\n  document.cookie = `token=${token}; path=/`;\n}\n",
        "javascript-insecure-cookie",
    ),
    (
        "javascript",
        "the result of a recursion over other objects",
        "function diff(a, b) {\n  let out = {};\n  for (const key in a) {\n"
        "    const inner = diff(a[key], b[key])\n"
        "    if (inner) {\n      out[key] = inner\n    }\n  }\n  return out;\n}\n",
        "function merge(to, from) {\n  for (const key in from) {\n"
        "    if (isObject(to[key])) merge(to[key], from[key])\n    else to[key] = from[key]\n  }\n}\n",
        "javascript-prototype-pollution",
    ),
    (
        "javascript",
        "headers of an object that refuses line breaks",
        "export function GET(req) {\n  const out = new Response();\n"
        "  out.headers.append('X-Name', req.query.name);\n  return out;\n}\n",
        "app.get('/a', (req, res) => {\n  res.setHeader('X-Name', req.query.name);\n});\n",
        "javascript-header-injection",
    ),
    (
        "python",
        "what is written into a file of a fixed name",
        "from pathlib import Path\nfrom flask import request\ndef f():\n"
        "    Path('/srv/key.pem').write_text(request.form['pem'])\n",
        "from pathlib import Path\nfrom flask import request\ndef f():\n"
        "    Path('/srv', request.form['name']).write_text('')\n",
        "python-path-traversal",
    ),
    (
        "python",
        "values of a structured log",
        "from flask import request\ndef f():\n    logger.info('start', name=request.args['name'])\n",
        "from flask import request\ndef f():\n    logger.info('start ' + request.args['name'])\n",
        "python-log-injection",
    ),
    (
        "python",
        "the name of a column",
        "def f(run):\n    run(key='H_error_nakano_one_sided_right_2d')\n",
        "def f(run):\n    run(key='aB3dE5gH7jK9mN1pQ2rS4tU6vW8x')\n",
        "python-hardcoded-secret",
    ),
    (
        "python",
        "annotations of a class",
        "def f(item):\n    return {name: eval(kind) for name, kind in item.__annotations__.items()}\n",
        "def f(item):\n    return {name: eval(kind) for name, kind in item.parts.items()}\n",
        "python-code-injection",
    ),
    (
        "javascript",
        "the published key of an emulator",
        'const ACCESS_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq";\n',
        'const ACCESS_KEY = "Abx8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq";\n',
        "javascript-hardcoded-secret",
    ),
    (
        "javascript",
        "markup added to what an element holds",
        "const cell = document.querySelector('td');\ncell.innerHTML = cell.innerHTML + '<i></i>';\n",
        "function f(cell, text) {\n  cell.innerHTML = '<i>' + text + '</i>';\n}\n",
        "javascript-dom-xss",
    ),
    (
        "javascript",
        "tables by the UUIDs of devices",
        "class Store {\n  add(deviceUuid, serviceUuid, list) {\n    for (let i = 0; i < list.length; i++) {\n"
        "      this.table[deviceUuid][serviceUuid][list[i].uuid] = list[i];\n    }\n  }\n}\n",
        "class Store {\n  add(names, list) {\n    const [device, service] = names.split('/');\n"
        "    this.table[device][service] = list;\n  }\n}\n",
        "javascript-prototype-pollution",
    ),
    (
        "javascript",
        "a UUID that a client sends is no UUID yet",
        "function f(table, one, otherGuid) {\n  table[one][otherGuid] = 1;\n}\n",
        "app.get('/a', (req, res) => {\n  table[req.query.uuid] = req.query.value;\n});\n",
        "javascript-prototype-pollution",
    ),
    (
        "javascript",
        "properties that the item has already",
        "function f(args, change) {\n  for (const i in args) {\n    for (const k in args[i]) {\n"
        "      args[i][k] = change[k](args[i][k]);\n    }\n  }\n}\n",
        "function f(args, other) {\n  for (const i in other) {\n    for (const k in other[i]) {\n"
        "      args[i][k] = other[i][k];\n    }\n  }\n}\n",
        "javascript-prototype-pollution",
    ),
    (
        "javascript",
        "a column that was found to be a number",
        "function f(a, at, b) {\n  if (isNumber(at.col)) {\n    const n = at.col;\n"
        "    rows(a, at).forEach(function (m, j) {\n      a[m][n] = b[j];\n    });\n  }\n}\n",
        "function f(a, at, b) {\n  if (isText(at.name)) {\n    const n = at.name;\n"
        "    n.split('/').forEach(function (m, j) {\n      a[m][n] = b[j];\n    });\n  }\n}\n",
        "javascript-prototype-pollution",
    ),
    (
        "javascript",
        "the pairs of a query in a table of its own",
        "function f() {\n  const found = {};\n"
        "  Object.entries(parse(location.href).query).sort().forEach(([key, value]) => {\n"
        "    found[key] = value;\n  });\n  return found;\n}\n",
        "const found = load();\nfunction f() {\n"
        "  Object.entries(parse(location.href).query).sort().forEach(([key, value]) => {\n"
        "    found[key] = value;\n  });\n}\n",
        "javascript-prototype-pollution",
    ),
    (
        "typescript",
        "pairs by their places",
        "const parse = (text: string) => {\n  const found: Table<string> = {}\n"
        "  for (const pair of new URLSearchParams(text)) {\n    found[pair[0]] = pair[1]\n  }\n"
        "  return found\n}\n",
        "const parse = (text: string, found: Table<string>) => {\n"
        "  for (const pair of new URLSearchParams(text)) {\n    found[pair[0]] = pair[1]\n  }\n}\n",
        "javascript-prototype-pollution",
    ),
    (
        "javascript",
        "a script in a file that the program names",
        'const { readFileSync } = require("node:fs");\nconst vm = require("vm");\n'
        'function f() {\n  return new vm.Script(readFileSync(join(__dirname, "a.js")));\n}\n',
        'const fs = require("fs");\nconst vm = require("vm");\n'
        "function f(req) {\n  return new vm.Script(fs.readFileSync(req.query.name));\n}\n",
        "javascript-code-injection",
    ),
    (
        "python",
        "a message that binds values, of a database's protocol",
        "def run(self, name, values):\n    self.send(proto.bind('', name, values))\n",
        "import socket\ndef f():\n    s = socket.socket()\n    s.bind(('', 80))\n",
        "python-bind-all",
    ),
    (
        "python",
        "a folder that the program was started with, and a name that is joined safely",
        "import sys\nfrom flask import send_from_directory\nFOLDER = sys.argv[1]\n@app.route('/s/<name>')\n"
        "def show(name):\n    return send_from_directory(FOLDER, name)\n",
        "from flask import request, send_from_directory\n@app.route('/s')\n"
        "def show():\n    return send_from_directory(request.args['at'], 'a.txt')\n",
        "python-path-traversal",
    ),
    (
        "python",
        "a setting of the program in a header",
        "import sys\nAGE = sys.argv[1]\ndef f(resp):\n    resp.headers['Cache-Control'] = f'max-age={AGE}'\n",
        "from flask import request\ndef f(resp):\n"
        "    resp.headers['Cache-Control'] = f'max-age={request.args[\"age\"]}'\n",
        "python-header-injection",
    ),
    (
        "python",
        "a media type in a name that ends in token",
        "TYPE_OF_TOKEN = 'application/x-www-form-urlencoded;charset=UTF-8'\n",
        "TYPE_OF_TOKEN = 'appl1cation-x9Www-f0rmUrlenc0ded'\n",
        "python-hardcoded-secret",
    ),
    (
        "javascript",
        "the environment handed on to a constant command",
        'const { exec } = require("child_process");\nfunction f(done) {\n'
        '  exec("npm test", { env: { ...process.env, CI: "1" }, cwd: process.env.HOME }, done);\n}\n',
        'const { spawn } = require("child_process");\nfunction f(req) {\n'
        '  spawn("npm", ["run", req.query.name], { shell: true, env: process.env });\n}\n',
        "javascript-command-injection",
    ),
    (
        "c",
        "a header of C++ with two functions of one name",
        "inline size_t size(char c) {\n  return c & 3;\n}\ninline size_t size(char c, size_t left) {\n"
        "  size_t n = size(c);\n  return n < left ? n : left;\n}\n",
        "size_t size(char c, size_t left) {\n  size_t n = size(c, left);\n  return n < left ? n : left;\n}\n",
        "c-uncontrolled-recursion",
    ),
    (
        "python",
        "one of a few words",
        "import random\ndef make_token(seed):\n    kind = random.choice(['alert', 'progress'])\n"
        "    return digest(seed, kind)\n",
        "import random\ndef make_token(seed):\n    return ''.join(random.choice('abcdef') for _ in seed)\n",
        "python-weak-random",
    ),
    (
        "python",
        "the public name of an account, beside its secret key",
        "import logging\ndef add(access_key, secret_key):\n    logging.info('added %s', access_key)\n",
        "import logging\ndef add(access_key, secret_key):\n    logging.info('added %s', secret_key)\n",
        "python-secret-logged",
    ),
    (
        "python",
        "an access key that stands alone",
        "",
        "import logging\ndef add(access_key):\n    logging.info('added %s', access_key)\n",
        "python-secret-logged",
    ),
    (
        "python",
        "whether a line of state changed",
        "class View:\n    def show(self, label, error):\n        signature = (label.lower(), error)\n"
        "        changed = signature != self._last_signature\n        self._last_signature = signature\n"
        "        return changed\n",
        "class View:\n    def check(self, signature):\n        return signature == self._signature\n",
        "python-timing-compare",
    ),
    (
        "python",
        "settings of the environment given by name",
        "import os\ndef make(kind):\n    given = {}\n    given['url'] = os.getenv('URL')\n"
        "    return Factory.create(kind, **given)\n",
        "from flask import request\ndef make(kind):\n    return Factory.create(kind, **request.form)\n",
        "python-mass-assignment",
    ),
    (
        "python",
        "a page that another function makes",
        "from flask import request, Response\ndef page(pages):\n"
        "    return Response(pages.render(request.args['n']))\n",
        "from flask import request, Response\ndef page():\n"
        "    return Response(str(request.args['n']).strip())\n",
        "python-xss",
    ),
    (
        "python",
        "the styles that a caller names",
        "import streamlit as st\ndef style(key):\n"
        "    st.markdown(f'<style>.{key} p {{}}</style>', unsafe_allow_html=True)\n",
        "import streamlit as st\ndef show():\n"
        "    st.markdown('<b>' + st.text_input('n') + '</b>', unsafe_allow_html=True)\n",
        "python-xss",
    ),
    (
        "python",
        "a header of the request in a header of the answer",
        "from flask import request\ndef f(r):\n    r.headers.add('X-Id', request.headers['X-Id'])\n",
        "from flask import request\ndef f(r):\n    r.headers.add('X-Id', request.args['id'])\n",
        "python-header-injection",
    ),
    (
        "python",
        "the name in a token that was read by another function",
        "from flask import request, session\ndef f():\n"
        "    session['name'] = name_of(request.args['token'])\n",
        "from flask import request, session\ndef f():\n    session['name'] = request.args['name']\n",
        "python-trust-boundary",
    ),
    (
        "python",
        "the path of a route without a variable",
        "import logging\nfrom flask import request\n@app.route('/tags')\ndef tags():\n"
        "    logging.info('at %s', request.path)\n",
        "import logging\nfrom flask import request\n@app.route('/tags/<name>')\ndef tags(name):\n"
        "    logging.info('at %s', request.path)\n",
        "python-log-injection",
    ),
    (
        "python",
        "a path that is looked at before it is checked",
        "from pathlib import Path\nfrom flask import request, abort\ndef f():\n"
        "    p = Path(request.args['p'])\n"
        "    if not p.exists():\n        abort(404)\n    p.relative_to('/srv')\n    return p.read_text()\n",
        "from pathlib import Path\nfrom flask import request, abort\ndef f():\n"
        "    p = Path(request.args['p'])\n"
        "    return p.exists()\n",
        "python-path-traversal",
    ),
    (
        "python",
        "the name of an upload, without its folders",
        "import os\ndef f(request):\n    given = request.FILES['a']\n"
        "    os.replace('/tmp/a', '/srv/' + given.name)\n",
        "import os\ndef f(request):\n    os.replace('/tmp/a', '/srv/' + request.POST['name'])\n",
        "python-path-traversal",
    ),
    (
        "python",
        "the last part of a path",
        "from pathlib import Path\nfrom flask import request\ndef f():\n"
        "    return open('/srv/' + Path(request.args['p']).name)\n",
        "from pathlib import Path\nfrom flask import request\ndef f():\n"
        "    return open('/srv/' + str(Path(request.args['p'])))\n",
        "python-path-traversal",
    ),
    (
        "python",
        "a table named by a template beside marks of the driver",
        "def f(cur, table, name):\n"
        "    q = 'SELECT a FROM {} WHERE b IN %s AND c LIKE %s'.format(table)\n"
        "    cur.execute(q, (name, name))\n",
        "def f(cur, name):\n    cur.execute('SELECT a FROM t WHERE b = %s' % name)\n",
        "python-sql-injection",
    ),
    (
        "python",
        "a whole clause that a caller inside the program gives",
        "def count(cur, where):\n    cur.execute(f'SELECT COUNT(1) FROM t WHERE {where}')\n",
        "def count(cur, name):\n    cur.execute(f'SELECT COUNT(1) FROM t WHERE name = {name}')\n",
        "python-sql-injection",
    ),
    (
        "python",
        "a statement with a value of the environment",
        "import os\ndef f(cur):\n    cur.execute(f\"SET region = '{os.environ['REGION']}'\")\n",
        "from flask import request\ndef f(cur):\n    cur.execute(f\"SET region = '{request.args['r']}'\")\n",
        "python-sql-injection",
    ),
    (
        "python",
        "a message about what the client wrote",
        "from flask import Response\ndef f(text):\n    try:\n        check(text)\n"
        "    except SyntaxError as e:\n        return Response(str(e))\n",
        "from flask import Response\ndef f(text):\n    try:\n        check(text)\n"
        "    except Exception as e:\n        return Response(str(e))\n",
        "python-error-exposed",
    ),
    (
        "python",
        "a port that a with statement only tries",
        "import socket\ndef free(port):\n    with socket.socket() as s:\n        try:\n"
        "            s.bind(('', port))\n        except OSError:\n"
        "            return False\n    return True\n",
        "import socket\ndef serve(port):\n    with socket.socket() as s:\n        s.bind(('', port))\n"
        "        s.listen()\n",
        "python-bind-all",
    ),
    (
        "python",
        "a program that starts the one it is given",
        "import runpy, sys\ndef main():\n    runpy.run_module(sys.argv[1], run_name='__main__')\n",
        "import runpy\nfrom flask import request\ndef main():\n    runpy.run_module(request.args['m'])\n",
        "python-code-injection",
    ),
    (
        "python",
        "the name of a release",
        "import os\nversion = get_version('a/__init__.py')\nos.system(f'git tag {version}')\n",
        "import os\nversion = read('a/__init__.py')\nos.system(f'git tag {version}')\n",
        "python-command-injection",
    ),
    (
        "python",
        "one of a few numbers",
        "import random\ndef make_token():\n    return scale() * random.choice([1, 2, 4])\n",
        "import random\ndef make_token():\n    return random.choice('0123456789abcdef')\n",
        "python-weak-random",
    ),
    (
        "python",
        "a text of letters drawn at random",
        "import random, string\ndef random_string(n):\n"
        "    return ''.join(random.choice(string.ascii_letters) for _ in range(n))\n",
        "import random, string\ndef random_password(n):\n"
        "    return ''.join(random.choice(string.ascii_letters) for _ in range(n))\n",
        "python-weak-random",
    ),
    (
        "python",
        "a digest of words in a signature for similar texts",
        "import hashlib\ndef signature(words):\n    return [hashlib.sha1(w).digest() for w in words]\n",
        "import hashlib\ndef stored(password):\n    return hashlib.sha1(password).digest()\n",
        "python-weak-hash",
    ),
    (
        "python",
        "a service that asks for the digests of leaked passwords",
        "import hashlib\ndef is_pwned(password):\n    return ask(hashlib.sha1(password).hexdigest()[:5])\n",
        "import hashlib\ndef is_known(password):\n    return ask(hashlib.sha1(password).hexdigest())\n",
        "python-weak-hash",
    ),
    (
        "python",
        "a name put together, a state, a file and a demonstration",
        "KIND = 'dlt5Pt'\ndef f(password):\n    run(secret_key=f'H_error_{KIND}_4pt_Upright')\n"
        "    api_token = 'C:\\\\keys\\\\a81.json'\n    signing_key = 'a-demo-key-32'\n"
        "    return password == 'failure'\n",
        "def f(password):\n    return password == 'failure7'\n",
        "python-hardcoded-secret",
    ),
    (
        "python",
        "two secrets of the program",
        "import os\ndef f(kept):\n    return os.environ['API_KEY'] != CONFIG.api_key\n",
        "import os\ndef f(api_key):\n    return os.environ['API_KEY'] == api_key\n",
        "python-timing-compare",
    ),
    (
        "python",
        "letters that each stand once",
        "import re\nP = re.compile(r'^(?:[A-Z]{1}\\.{1}|[A-Z]{1}\\.{1}[A-Z]{1})+$')\n",
        "import re\nP = re.compile(r'^(?:[A-Z]+)+$')\n",
        "python-regex-from-user",
    ),
    (
        "python",
        "a redirect to an address that another function makes",
        "from flask import request, redirect\ndef f():\n"
        "    return redirect(address_of(request.args['shop']))\n",
        "from flask import request, redirect\ndef f():\n    return redirect(str(request.args['next']))\n",
        "python-open-redirect",
    ),
    (
        "python",
        "a document whose head the program writes",
        "import xml.etree.ElementTree as ET\ndef f(name):\n"
        "    return ET.fromstring(f'<a><b>{name}</b></a>')\n",
        "import xml.etree.ElementTree as ET\ndef f(text):\n    return ET.fromstring(text)\n",
        "python-xxe",
    ),
    (
        "javascript",
        "keys that a caller inside the program gives",
        "function f(counts, node) {\n  counts[node.file][node.ref] = 0;\n}\n",
        "function f(counts, path) {\n  counts[path[0]][path[1]] = 0;\n}\n",
        "javascript-prototype-pollution",
    ),
    (
        "javascript",
        "steps of a list that the program writes",
        "function set(o, steps, value) {\n  for (const step of steps.slice(1)) {\n    o = o[step];\n  }\n"
        "  o[steps[0]] = value;\n}\n",
        "function set(o, path, value) {\n  const steps = path.split('.');\n"
        "  for (const step of steps.slice(1)) {\n    o = o[step];\n  }\n  o[steps[0]] = value;\n}\n",
        "javascript-prototype-pollution",
    ),
    (
        "javascript",
        "a new table of what the client sends",
        "app.get('/a', (req, res) => {\n  const all = {};\n  all[req.query.name] = 1;\n});\n",
        "app.get('/a', (req, res) => {\n  all[req.query.name] = req.query.value;\n});\n",
        "javascript-prototype-pollution",
    ),
    (
        "javascript",
        "a list whose items are escaped one by one",
        "function f(el, all) {\n  el.innerHTML = all.map((x) => `<b>${escapeHtml(x.id)}</b>`).join('');\n}\n",
        "function f(el, all) {\n  el.innerHTML = all.map((x) => `<b>${x.id}</b>`).join('');\n}\n",
        "javascript-dom-xss",
    ),
    (
        "javascript",
        "texts of numbers and dates",
        "function time(t) {\n  if (!t) return '';\n  return new Date(t).toLocaleTimeString();\n}\n"
        "function f(el, x) {\n  el.innerHTML = `<b>${time(x.t)} ${x.n || 0} ${x.part.toFixed(1)}</b>`;\n}\n",
        "function f(el, x) {\n  el.innerHTML = `<b>${x.t} ${x.n || 'none'}</b>`;\n}\n",
        "javascript-dom-xss",
    ),
    (
        "javascript",
        "what the program calls markup",
        "function f(el, html) {\n  el.innerHTML = html;\n}\n"
        "function g(el) {\n  el.innerHTML = '<i>' + this.nameHtml + '</i>';\n}\n"
        "async function h(el, text) {\n  const { svg } = await draw(text);\n  el.innerHTML = svg;\n}\n",
        "function f(el) {\n  const html = location.hash;\n  el.innerHTML = html;\n}\n",
        "javascript-dom-xss",
    ),
    (
        "javascript",
        "markup with a part that is not escaped",
        "function f(el, x) {\n  const html = `<b>${escapeHtml(x.name)}</b>`;\n  el.innerHTML = html;\n}\n",
        "function f(el, x) {\n  const html = `<b>${x.name}</b>`;\n  el.innerHTML = html;\n}\n",
        "javascript-dom-xss",
    ),
    (
        "javascript",
        "marks of a template that is no HTML",
        "function role(name) {\n  return new Handlebars.SafeString(`<<<role:${name}>>>`);\n}\n",
        "function role(name) {\n  return new Handlebars.SafeString(`<b>${name}</b>`);\n}\n",
        "javascript-dom-xss",
    ),
    (
        "tsx",
        "markup of the program's own modules",
        "import { format, TEXTS } from './texts';\n"
        "const C = () => <p dangerouslySetInnerHTML={{ __html: format(TEXTS.first) }} />;\n",
        "class C extends React.Component {\n  render() {\n"
        "    return <p dangerouslySetInnerHTML={{ __html: this.props.text }} />;\n  }\n}\n",
        "javascript-react-raw-html",
    ),
    (
        "tsx",
        "code that a highlighter escaped",
        "import hljs from 'highlight.js';\nfunction C({ code }) {\n"
        "  const shown = hljs.highlight(code, { language: 'sql' }).value;\n"
        "  return <code dangerouslySetInnerHTML={{ __html: shown }} />;\n}\n",
        "function C({ code }) {\n  const [shown] = useState(code);\n"
        "  return <code dangerouslySetInnerHTML={{ __html: shown }} />;\n}\n",
        "javascript-react-raw-html",
    ),
    (
        "javascript",
        "memory that a helper gives to be filled",
        "function allocate(size) {\n  return Buffer.allocUnsafe(size);\n}\n"
        "const write = (() => {\n  const head = Buffer.allocUnsafe(4);\n"
        "  return (n) => encode(head, n);\n})();\n"
        "function copy(from, size) {\n  const all = new Buffer(size);\n  from.copy(all);\n  return all;\n}\n",
        "function show(size) {\n  return Buffer.allocUnsafe(size).toString('hex');\n}\n",
        "javascript-unsafe-buffer",
    ),
    (
        "typescript",
        "a class of the file that is called Buffer",
        "export class Parser {\n  get buffer() {\n    return new Buffer(this.nodes);\n  }\n}\n"
        "class Buffer {\n  constructor(readonly nodes) {}\n}\n",
        "export class Parser {\n  buffer(nodes) {\n    return new Buffer(nodes);\n  }\n}\n",
        "javascript-unsafe-buffer",
    ),
    (
        "javascript",
        "JSON for browsers without it",
        "function read(text) {\n  return window.JSON ? JSON.parse(text) : eval('(' + text + ')');\n}\n",
        "function read(text) {\n  return eval('(' + text + ')');\n}\n",
        "javascript-code-injection",
    ),
    (
        "javascript",
        "a function that the program writes",
        "function build(paths) {\n  return Function('o', `\n    if (typeof o !== 'object' || o === null) {\n"
        "      throw new TypeError('an object is needed to be cleaned')\n    }\n    const clean = {}\n"
        "    ${paths}\n    clean.done = true\n    return JSON.stringify(clean)\n  `);\n}\n",
        "function build(paths) {\n  return Function('o', `return o.${paths}`);\n}\n",
        "javascript-code-injection",
    ),
    (
        "javascript",
        "alternatives that no text fits twice",
        "const block = /\\{((?:[^{}]|\\${[^}]+})+)\\}/g;\n",
        "const block = /\\{((?:[^{}]|\\$+x)+)\\}/g;\n",
        "javascript-regex-dos",
    ),
    (
        "javascript",
        "a pattern of the page's own address",
        "const wanted = parse(window.location.search);\nconst shown = new RegExp(wanted.grep);\n",
        "app.get('/a', (req, res) => {\n  const shown = new RegExp(req.query.grep);\n});\n",
        "javascript-regex-dos",
    ),
    (
        "javascript",
        "the origin of a message in a log",
        "window.addEventListener('message', (event) => {\n  console.warn(`from ${event.origin}`);\n});\n",
        "",
        "javascript-log-injection",
    ),
    (
        "javascript",
        "the interpreter that runs the program",
        "const { spawn } = require('child_process');\nspawn(process.argv[0], ['work.js']);\n",
        "const { spawn } = require('child_process');\nfunction f(req) {\n  spawn(req.query.tool, []);\n}\n",
        "javascript-command-injection",
    ),
    (
        "cpp",
        "sizes of the program's own command line",
        "int main(int argc, char **argv) {\n  int rows = std::atoi(argv[1]);\n  return rows * 3;\n}\n",
        'int area() {\n  int rows;\n  scanf("%d", &rows);\n  return rows * 3;\n}\n',
        "c-integer-overflow",
    ),
    (
        "c",
        "a function of the file that ends the program",
        "#include <stdlib.h>\nvoid scream(int code) {\n  show(code);\n  exit(code);\n  return;\n}\n"
        "void usage(void) {\n  scream(1);\n  return;\n}\n"
        'int rate(void) {\n  int all;\n  scanf("%d", &all);\n  if (all < 1) usage();\n  return 2 / all;\n}\n',
        "#include <stdlib.h>\nvoid scream(int code) {\n  if (code > 1) return;\n  exit(code);\n}\n"
        "void usage(void) {\n  scream(1);\n  return;\n}\n"
        'int rate(void) {\n  int all;\n  scanf("%d", &all);\n  if (all < 1) usage();\n  return 2 / all;\n}\n',
        "c-zero-division",
    ),
    (
        "c",
        "an assertion of the project's own",
        "#include <stdlib.h>\nvoid fill(size_t n) {\n  char *dict = malloc(n);\n  FUZZ_ASSERT(dict);\n"
        "  memset(dict, 0, n);\n  free(dict);\n}\n",
        "#include <stdlib.h>\nvoid fill(size_t n) {\n  char *dict = malloc(n);\n  FUZZ_SHOW(dict);\n"
        "  memset(dict, 0, n);\n  free(dict);\n}\n",
        "c-null-dereference",
    ),
    (
        "c",
        "the bytes of a number",
        "#include <stdlib.h>\nvoid f(const char *s, unsigned char *to) {\n  unsigned n = strtoul(s, 0, 0);\n"
        "  to[0] = (unsigned char)(n >> 8);\n}\n",
        "#include <stdlib.h>\nvoid f(const char *s, unsigned char *to) {\n  unsigned n = strtoul(s, 0, 0);\n"
        "  to[0] = (unsigned char)(n);\n}\n",
        "c-integer-overflow",
    ),
    (
        "python",
        "commands that are not of a shell",
        "def f(lamp, name):\n    lamp.run_command(f'preset {name}')\n",
        "def f(host, name):\n    host.run_command(f'tar czf all.tgz {name}')\n",
        "python-command-injection",
    ),
    (
        "python",
        "a function of the module that is called like a builtin",
        "def eval(x):\n    return f'[{x}]'\ndef f(text):\n    return eval(text)\n",
        "class A:\n    def eval(self, x):\n        return f'[{x}]'\ndef f(text):\n    return eval(text)\n",
        "python-code-injection",
    ),
    (
        "python",
        "a time limit among other options",
        "import requests\nMORE = {'timeout': 9}\ndef f(u):\n    return requests.get(u, **MORE)\n",
        "import requests\ndef f(u):\n    return requests.get(u, headers={})\n",
        "python-request-no-timeout",
    ),
    (
        "javascript",
        "a buffer of what a function gives",
        "function f() {\n  var data = read();\n  return new Buffer(data);\n}\n",
        "function f(size) {\n  return new Buffer(size);\n}\n",
        "javascript-unsafe-buffer",
    ),
    (
        "c",
        "a division of fractions",
        "double rate(const char *s) {\n  double all = atoi(s);\n  return 2 / all;\n}\n",
        'int rate(void) {\n  int all;\n  scanf("%d", &all);\n  return 2 / all;\n}\n',
        "c-zero-division",
    ),
    (
        "c",
        "a variable that an earlier round set",
        "int f(const int *a, int n) {\n  int last;\n  for (int i = 0; i < n; i++) {\n    if (i > 0) {\n"
        "      if (last > a[i]) return 0;\n    }\n    last = a[i];\n  }\n  return 1;\n}\n",
        "int f(const int *a, int n) {\n  int last;\n  for (int i = 0; i < n; i++) {\n"
        "    if (last > a[i]) return 0;\n    last = a[i];\n  }\n  return 1;\n}\n",
        "c-uninitialised",
    ),
    (
        "c",
        "a variable that assembly sets",
        'unsigned long f(void) {\n  unsigned long mode;\n  asm volatile("mrs %0, fpcr" : "=r"(mode));\n'
        "  return mode;\n}\n",
        "unsigned long f(void) {\n  unsigned long mode;\n  return mode + 1;\n}\n",
        "c-uninitialised",
    ),
    (
        "c",
        "an overload that a cast in a header chooses",
        "static inline char* end(const char* at, int n) { return scan(at, n); }\n"
        "static inline char* end(char* at, int n) {\n"
        "  return const_cast<char*>(end(const_cast<const char*>(at), n));\n}\n",
        "char* end(char* at, int n) {\n  return end(at, n);\n}\n",
        "c-uncontrolled-recursion",
    ),
    (
        "c",
        "half of a number of 128 bits",
        "unsigned long high(uint64_t a, uint64_t b) {\n  __uint128_t product = (__uint128_t) a * b;\n"
        "  return product >> 64;\n}\n",
        "unsigned long high(uint64_t product) {\n  return product >> 64;\n}\n",
        "c-shift-width",
    ),
    (
        "javascript",
        "one level put over another",
        "function f(o, key, more) {\n  o[key] = Object.assign({}, o[key], more);\n}\n",
        "function f(o, key, more) {\n  o[key] = deepMerge({}, o[key], more);\n}\n",
        "javascript-prototype-pollution",
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
    "js/underscore-1.3.1.js": WRITTEN,
    "docs/jquery-ui-1.12.1.custom.js": WRITTEN,
    "vendor/a.py": "eval(input())\n",
    "pkg/_vendor/b.py": "eval(input())\n",
    "deps/lz/src/lz.py": "eval(input())\n",
    "dist2/main.js": "var x = __webpack_require__(1);\n" + WRITTEN,
    "one.js": "var a=1;" * 2000 + "\n" + WRITTEN,
    "lib/a.js": 'Object.defineProperty(exports, "__esModule", { value: true });\n' + WRITTEN,
    "es/b.js": WRITTEN + "//# sourceMappingURL=b.js.map\n",
    "docs/_build/c.js": WRITTEN,
    "ui/_next/static/d.js": WRITTEN,
    "ui/e.js": "(globalThis.TURBOPACK||(globalThis.TURBOPACK=[])).push([1]);\n" + WRITTEN,
    "docs/_static/doctools.js": WRITTEN,
    "docs/_static/theme.js": "/*\n * theme.js, for Sphinx\n */\n" + WRITTEN,
    "app/static/js/jquery.align.js": WRITTEN,
    "es/components/style.js": WRITTEN,
    "app/static/js/suites.js": (
        "(function (root, factory) {\n  typeof exports === 'object' && typeof module !== 'undefined'\n"
        "    ? module.exports = factory() : root.suites = factory();\n});\n" + WRITTEN
    ),
    "schema_pb2.py": "# Generated by the protocol buffer compiler.  DO NOT EDIT!\neval(input())\n",
}
OWN = {
    "docs/_static/site.js": WRITTEN,
    "es/other.js": WRITTEN,
    "src/components/style.tsx": WRITTEN,
    "src/own.js": WRITTEN,
    "deps/own/own.js": WRITTEN,
    "src/oauth-2.0.js": WRITTEN,
}


def test_files_that_nobody_here_writes_are_skipped_and_said_so(tmp_path: Path) -> None:
    for name, text in {**FOREIGN, **OWN}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "deps/lz/LICENSE").touch()
    found = list(find_sources(tmp_path))
    read = [item.path.relative_to(tmp_path).as_posix() for item in found if isinstance(item, SourceFile)]
    assert sorted(read) == sorted(OWN)
    skipped = [item for item in found if isinstance(item, SkippedFile)]
    assert sorted(item.path.relative_to(tmp_path).as_posix() for item in skipped) == sorted(FOREIGN)
    assert {item.why for item in skipped} == {"vendored", "minified", "bundled", "generated"}
    assert len([item for item in find_sources(tmp_path, foreign=True) if isinstance(item, SourceFile)]) == 26
    app = typer.Typer()
    app.command()(audit)
    result = CliRunner().invoke(app, [str(tmp_path)])
    assert "20 files skipped: 2 bundled, 8 generated, 2 minified, 8 vendored; --all" in result.stderr
    everything = CliRunner().invoke(app, [str(tmp_path), "--all"])
    assert "skipped" not in everything.stderr
    assert everything.stdout.count("code-injection") > result.stdout.count("code-injection") == len(OWN)


def test_what_a_generator_adds_to_its_package_is_generated_too(tmp_path: Path) -> None:
    for folder, head in (("made", "# Code generated by a generator of clients.\n"), ("own", "# Our own.\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text(head)
        (tmp_path / folder / "_serialization.py").write_text("eval(input())\n")
    found = {item.path.relative_to(tmp_path).as_posix(): item for item in find_sources(tmp_path)}
    skipped = {name: item.why for name, item in found.items() if isinstance(item, SkippedFile)}
    assert skipped == {"made/__init__.py": "generated", "made/_serialization.py": "generated"}


def test_a_weakness_is_told_once() -> None:
    texts = [
        ("tsx", "const C = (p) => <p dangerouslySetInnerHTML={{ __html: p.text }}></p>;\n"),
        ("python", "app.add_middleware(\n    CORSMiddleware,\n    allow_origins=['*'],\n)\n"),
        ("python", "import random, string\nsession_id = ''.join(random.choices(string.digits, k=9))\n"),
        (
            "python",
            "import ssl\ndef f(c):\n    c.check_hostname = False\n    c.verify_mode = ssl.CERT_NONE\n",
        ),
        (
            "python",
            "def f():\n    api_token = 'a8Sd7fG6h5J4k3'\n    return Client(api_token=api_token)\n",
        ),
        (
            "javascript",
            "function f(text) {\n  return React.createElement('p', {\n    dangerouslySetInnerHTML: {\n"
            "      __html: text\n    }\n  });\n}\n",
        ),
        (
            "c",
            "static void add(float *to) {\n  to[0] = 1;\n}\nvoid f(int n) {\n  float *p = malloc(n);\n"
            "  add(p);\n  add(p);\n  free(p);\n}\n",
        ),
        (
            "c",
            "static void add(float *to, int n) {\n  if (n > 1) to[0] = 1;\n}\n"
            "static void clear(float *to, int n) {\n  if (n > 2) to[0] = 0;\n}\n"
            "void f(int n) {\n  float *p = malloc(4);\n  add(p, n);\n  clear(p, n);\n  free(p);\n}\n",
        ),
        ("python", "from ftplib import FTP\nserver = FTP('a.org')\n"),
    ]
    for language, text in texts:
        assert len(Auditor(language).audit(text)) == 1, text
    apart = 'exec("ls " + a, function () {\n  exec("rm " + b);\n});\n'
    text = f'const {{ exec }} = require("child_process");\nfunction f(a, b) {{\n  {apart}}}\n'
    assert len(Auditor("javascript").audit(text)) == 2


def test_a_file_that_is_named_is_audited_whatever_it_is(tmp_path: Path) -> None:
    (tmp_path / "app.min.js").write_text(WRITTEN)
    (found,) = find_sources(tmp_path / "app.min.js")
    assert isinstance(found, SourceFile)
