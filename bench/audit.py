"""Measures the security audit: latency per key, recall and precision beside bandit and ruff, false alarms.

  latency    a line is typed and deleted again, key by key, at places spread over 1,000 lines of Python (the
             standard library's argparse), JavaScript (jQuery), TypeScript (zod) and Java (react-native-fs), a
             3,000-line C file and all of jQuery; each key is one edit of a live audit, in processor time:
             the cores are shared. `jquery_open_s` is the first audit of the whole file.
  cases      labelled files. Without --cases: the examples of bandit's source distribution, labelled by what
             its own functional tests expect of each file, fetched by pip into the cache. With --cases DIR:
             DIR/labels.json, a list of {"path": "a.py", "bad": true, "cwe": [89]}; `cwe` may be left out,
             then any finding counts.
  recall     bad files with a finding (of a named CWE where the label names one); precision: bad files among
             the files reported. bandit and ruff (rules S) read the same files in the same run; their language
             is Python, so their recall is over the Python files.
  alarms     findings per 1,000 lines over wheels of widely used packages, fetched by pip into the cache,
             tests left out (`known_alarms_per_kloc`); and how many thousand lines a second one core audits.
  fixes      programs with a weakness (audit_trials/, and more made at random), run before and after the fix
             that is offered: `fixes_run` were run, `fixes_right` of them kept every harmless result and ended
             the attack; the two must be equal. `fixes_offered_share`: of the findings in the rules' own
             examples, by language, how many have a fix (not a suggestion). See audit_fixes.py.
  projects   packages of the newest draw that readers judged: alarms, safe fixes, what readers said of them,
             and their own tests before and after these fixes (`alarms_per_kloc`, `true_share`, `fixes_safe`,
             `fixes_wrong`); see audit_projects.py.
  suites     with --suite NAME=DIR (as often as wanted): labelled folders as their authors publish them, see
             audit_suites.py. Recall over the weak lines or files, alarms over those marked as safe, apart
             for the half of the files that rules may be tuned on and the half that is held out.

Last line: JSON. `python bench/audit.py [--cases DIR] [--suite NAME=DIR]... [--packages N]
[--only latency,cases,alarms,fixes,suites,projects] [--resume]`. `--resume` continues a run that was
interrupted: parts that it finished are not measured again.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import subprocess
import sys
import tarfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from bench.audit_fixes import LANGUAGES, outcomes, read_trials, report, works
from bench.audit_projects import judged, measure
from bench.audit_random import trials
from bench.audit_suites import suite
from bench.project_archives import ProjectPin, fetch_project, read_pins
from bench.record import record
from keystroke.analysis.audit import Auditor, LiveAudit, load_rules
from keystroke.analysis.audit.files import language_of
from keystroke.errors import KeystrokeError

CACHE = Path(platformdirs.user_cache_dir("keystroke")) / "bench-audit"
BANDIT = "bandit==1.8.3"
PACKAGES = [
    "boto3",
    "botocore",
    "urllib3",
    "requests",
    "certifi",
    "idna",
    "charset-normalizer",
    "typing-extensions",
    "setuptools",
    "packaging",
    "python-dateutil",
    "six",
    "s3transfer",
    "numpy",
    "pyyaml",
    "fsspec",
    "s3fs",
    "pydantic",
    "attrs",
    "click",
    "cryptography",
    "jinja2",
    "markupsafe",
    "pandas",
    "cffi",
    "pytz",
    "rsa",
    "pyasn1",
    "jmespath",
    "wheel",
    "platformdirs",
    "filelock",
    "virtualenv",
    "colorama",
    "importlib-metadata",
    "zipp",
    "tomli",
    "pluggy",
    "pytest",
    "pygments",
    "rich",
    "markdown-it-py",
    "mdurl",
    "aiohttp",
    "yarl",
    "multidict",
    "frozenlist",
    "aiosignal",
    "async-timeout",
    "anyio",
    "sniffio",
    "httpx",
    "httpcore",
    "h11",
    "starlette",
    "fastapi",
    "uvicorn",
    "flask",
    "werkzeug",
    "itsdangerous",
    "blinker",
    "gunicorn",
    "django",
    "sqlparse",
    "asgiref",
    "sqlalchemy",
    "alembic",
    "mako",
    "redis",
    "celery",
    "kombu",
    "amqp",
    "vine",
    "billiard",
    "psutil",
    "tqdm",
    "joblib",
    "tabulate",
    "docutils",
    "jsonschema",
    "referencing",
    "rpds-py",
    "decorator",
    "ipython",
    "traitlets",
    "networkx",
    "beautifulsoup4",
    "soupsieve",
    "lxml",
    "paramiko",
    "pyjwt",
    "oauthlib",
    "requests-oauthlib",
    "google-auth",
    "cachetools",
    "grpcio",
    "protobuf",
    "tornado",
    "websocket-client",
    "docker",
    "black",
    "isort",
]


@dataclass(frozen=True)
class AuditCase:
    path: Path
    bad: bool
    cwe: frozenset[int]


# Latency


def latency(language: str, text: str, seed: int = 7, places: int = 40) -> list[float]:
    """Milliseconds of processor time per key, typed at random lines of the text."""
    pick = random.Random(seed)
    live = LiveAudit(language, text)
    lines = [at for at, char in enumerate(text[:-1]) if char == "\n" and text[at + 1] in " \t"]
    spent: list[float] = []

    def key(start: int, end: int, typed: str) -> None:
        begun = time.process_time()
        live.edit(start, end, typed)
        spent.append((time.process_time() - begun) * 1000)

    for _ in range(places):
        at = pick.choice(lines)
        indent = text[at + 1 : at + 1 + len(text[at + 1 :]) - len(text[at + 1 :].lstrip(" \t"))]
        line = f"\n{indent}" + ("value = compute(name)" if language == "python" else "total += count(name);")
        for char in line:
            key(at, at, char)
            at += 1
        for _ in line:
            key(at - 1, at, "")
            at -= 1
    return spent


SCRIPTS = {  # package, version and file
    "javascript": ("jquery", "3.7.1", "dist/jquery.js"),
    "typescript": ("zod", "3.25.76", "src/v3/types.ts"),
    "java": ("react-native-fs", "2.20.0", "android/src/main/java/com/rnfs/RNFSManager.java"),
}


def script_file(language: str, count: int | None = 1000) -> str:
    """The first lines of a published file; "" if it cannot be fetched."""
    name, version, path = SCRIPTS[language]
    root = fetch_project(ProjectPin("npm", name, version, 0))
    if root is None:
        return ""
    lines = (root / path).read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(lines[:count])


def python_file() -> str:
    lines = Path(argparse.__file__).read_text(encoding="utf-8").splitlines()[:1000]
    return "\n".join(lines) + "\n"


C_FUNCTIONS = r"""
int parse_{n}(const char *text, size_t size) {{
    char word[{k}];
    size_t used = 0;
    for (size_t i = 0; i < size; i++) {{
        if (text[i] == ' ' || used + 1 >= sizeof(word)) {{
            word[used] = 0;
            emit(word);
            used = 0;
            continue;
        }}
        word[used++] = text[i];
    }}
    return (int)used;
}}
----
struct item_{n} *find_{n}(struct table *t, const char *key) {{
    unsigned h = hash(key) % t->size;
    struct item_{n} *it = t->slots[h];
    while (it != NULL) {{
        if (strcmp(it->key, key) == 0) {{
            return it;
        }}
        it = it->next;
    }}
    return NULL;
}}
----
char *join_{n}(const char *a, const char *b) {{
    size_t size = strlen(a) + strlen(b) + {k};
    char *out = malloc(size);
    if (out == NULL) {{
        return NULL;
    }}
    snprintf(out, size, "%s/%s", a, b);
    return out;
}}
----
static void report_{n}(FILE *to, const struct stats *s) {{
    fprintf(to, "total %d\n", s->total);
    for (int i = 0; i < {k}; i++) {{
        if (s->count[i] > 0) {{
            fprintf(to, "%d: %d\n", i, s->count[i]);
        }}
    }}
}}
"""


def c_file(lines: int = 3000) -> str:
    """A text of typical C functions (parsing, tables, lists, strings), all different."""
    bodies = [body.strip("\n") for body in C_FUNCTIONS.split("----")]
    out = ["#include <stdio.h>", "#include <stdlib.h>", "#include <string.h>", ""]
    number = 0
    while len(out) < lines:
        out.extend(bodies[number % len(bodies)].format(n=number, k=16 + number % 40).splitlines())
        out.append("")
        number += 1
    return "\n".join(out[:lines]) + "\n"


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


# Cases


def given_cases(folder: Path) -> list[AuditCase]:
    labels = json.loads((folder / "labels.json").read_text(encoding="utf-8"))
    return [
        AuditCase(folder / item["path"], bool(item["bad"]), frozenset(item.get("cwe", ()))) for item in labels
    ]


def pip(*arguments: str) -> bool:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        *arguments,
    ]
    return subprocess.run(command, capture_output=True).returncode == 0


def bandit_cases() -> list[AuditCase]:
    """bandit's examples, labelled by the totals its functional tests expect."""
    place = CACHE / "bandit"
    if not any(place.glob("*/examples")):
        place.mkdir(parents=True, exist_ok=True)
        pip("--no-binary", ":all:", "-d", str(place), BANDIT)
        for archive in place.glob("*.tar.gz"):
            with tarfile.open(archive) as tar:
                tar.extractall(place, filter="data")
    cases: list[AuditCase] = []
    for source in place.glob("*/tests/functional/test_functional.py"):
        examples = source.parents[2] / "examples"
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                cases.extend(_expected(node, examples))
    return cases


def _expected(node: ast.FunctionDef, examples: Path) -> Iterator[AuditCase]:
    totals: dict[str, int] = {}
    name = ""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Dict):
            for key, value in zip(inner.keys, inner.values, strict=True):
                if (
                    isinstance(key, ast.Constant)
                    and key.value in ("LOW", "MEDIUM", "HIGH")
                    and isinstance(value, ast.Constant)
                ):
                    totals[str(key.value)] = totals.get(str(key.value), 0) + int(str(value.value))
        if (
            isinstance(inner, ast.Call)
            and getattr(inner.func, "attr", "") == "check_example"
            and isinstance(inner.args[0], ast.Constant)
        ):
            name = str(inner.args[0].value)
    path = examples / name
    if name.endswith(".py") and path.is_file():
        yield AuditCase(path, sum(totals.values()) > 0, frozenset())


def reported(case: AuditCase) -> set[int]:
    language = language_of(case.path)
    if language is None:
        return set()
    try:
        return {
            number
            for finding in Auditor(language).audit(case.path.read_text(encoding="utf-8", errors="replace"))
            for number in finding.cwes
        }
    except KeystrokeError:
        return set()


def peer(command: list[str], files: list[Path], read: Any) -> set[Path] | None:
    """The files in which a peer reports something; None if it is not installed."""
    try:
        done = subprocess.run([*command, *map(str, files)], capture_output=True, text=True, timeout=300)
        if not done.stdout.strip():
            return None
        return {Path(name).resolve() for name in read(json.loads(done.stdout))}
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def judge(cases: list[AuditCase]) -> dict[str, Any]:
    table: dict[str, Counter[str]] = {}
    right = wrong = missed = 0
    for case in cases:
        found = reported(case)
        hit = bool(found & case.cwe) if case.cwe and case.bad else bool(found)
        group = f"CWE-{min(case.cwe)}" if case.cwe else "unnamed"
        row = table.setdefault(group, Counter())
        right, wrong, missed = (
            right + (case.bad and hit),
            wrong + (not case.bad and hit),
            missed + (case.bad and not hit),
        )
        row["bad"] += case.bad
        row["found"] += case.bad and hit
        row["good"] += not case.bad
        row["alarms"] += not case.bad and hit
    print(f"{'weakness':12} {'bad':>5} {'found':>6} {'good':>5} {'alarms':>7}")
    for group, row in sorted(table.items()):
        print(f"{group:12} {row['bad']:5} {row['found']:6} {row['good']:5} {row['alarms']:7}")
    python = [case for case in cases if case.path.suffix == ".py"]
    files = [case.path.resolve() for case in python]
    bandit = peer(
        [sys.executable, "-m", "bandit", "-q", "-f", "json"],
        files,
        lambda data: [item["filename"] for item in data.get("results", [])],
    )
    ruff = peer(
        [
            sys.executable,
            "-m",
            "ruff",
            "check",
            "--isolated",
            "--select",
            "S",
            "--output-format",
            "json",
            "--exit-zero",
        ],
        files,
        lambda data: [item["filename"] for item in data],
    )
    bad = [case.path.resolve() for case in python if case.bad]

    def share(found: set[Path] | None) -> float | None:
        return round(sum(path in found for path in bad) / len(bad), 3) if found is not None and bad else None

    return {
        "recall": round(right / max(right + missed, 1), 3),
        "precision": round(right / max(right + wrong, 1), 3),
        "bandit_recall": share(bandit),
        "ruff_recall": share(ruff),
        "cases": len(cases),
    }


# Alarms


def packages(count: int) -> Iterator[tuple[str, Path]]:
    place = CACHE / "wheels"
    place.mkdir(parents=True, exist_ok=True)
    for name in PACKAGES[:count]:
        folder = place / name
        if not folder.is_dir():
            pip("--only-binary", ":all:", "-d", str(place / "archives"), name)
            stem = name.replace("-", "_").lower()
            for wheel in (place / "archives").glob("*.whl"):
                if wheel.name.split("-", 1)[0].lower().replace(".", "_") == stem:
                    with zipfile.ZipFile(wheel) as archive:
                        archive.extractall(folder)
        if folder.is_dir():
            yield name, folder


def alarms(count: int) -> dict[str, Any]:
    lines = 0
    rules: Counter[str] = Counter()
    severities: Counter[str] = Counter()
    read = 0
    spent = 0.0
    auditor = Auditor("python")
    for _, folder in packages(count):
        read += 1
        for path in sorted(folder.rglob("*.py")):
            if {"tests", "test", "testing"} & set(path.parts) or path.name.startswith("test_"):
                continue
            text = path.read_text(encoding="utf-8", errors="replace")
            begun = time.process_time()
            try:
                found = auditor.audit(text)
            except KeystrokeError:
                continue
            spent += time.process_time() - begun
            lines += text.count("\n")
            rules.update(finding.rule for finding in found)
            severities.update(finding.severity.value for finding in found)
    total = sum(rules.values())
    thousands = max(lines / 1000, 0.001)
    print(f"{read} packages, {lines} lines, {total} findings")
    for rule, number in rules.most_common(20):
        print(f"  {rule:34} {number:6}  {number / thousands:.3f}")
    return {
        "known_alarms_per_kloc": round(total / thousands, 3),
        "serious_alarms_per_kloc": round((severities["high"] + severities["critical"]) / thousands, 3),
        "packages": read,
        "known_lines": lines,
        "kloc_per_second": round(thousands / max(spent, 0.001), 1),
    }


# Fixes

RANDOM = {"python": 200, "javascript": 60, "c": 40, "go": 30, "java": 30}


def fixes() -> dict[str, Any]:
    run = right = 0
    for language in LANGUAGES:
        if not works(language):
            print(f"{language}: no working toolchain, its fixes were not run")
            continue
        written = [trial for trial in read_trials() if trial.language == language]
        done = outcomes(written)
        tried = outcomes(trials(1, RANDOM[language], language)) if language in RANDOM else []
        offered = [item for item in tried if item.fixed is not None]
        told, good = report([*done, *offered])
        print(
            f"{language}: {good} of {told} fixes right "
            f"({len(done)} written, {len(offered)} of {len(tried)} random)"
        )
        run, right = run + told, right + good
    shares: dict[str, float] = {}
    for language in ("python", "javascript", "cpp", "go", "java"):
        found = [
            finding
            for rule in load_rules(language)
            for text in rule.tests.bad
            for finding in Auditor(rule.language).audit(text)
        ]
        shares[language] = round(sum(bool(item.fixes) for item in found) / len(found), 3)
        print(
            f"{language}: {shares[language]:.3f} of {len(found)} findings in the rules' examples have a fix"
        )
    return {"fixes_run": run, "fixes_right": right, "fixes_offered_share": shares}


def latencies() -> dict[str, Any]:
    out: dict[str, Any] = {}
    median: dict[str, float] = {}
    texts = {"python": python_file(), "c": c_file(), **{name: script_file(name) for name in SCRIPTS}}
    texts["jquery"] = script_file("javascript", None)
    for name, text in texts.items():
        if not text:
            print(f"{name}: no file to type in; the registry cannot be reached")
            continue
        language = "javascript" if name == "jquery" else name
        begun = time.process_time()
        LiveAudit(language, text)
        out[f"{name}_open_s"] = round(time.process_time() - begun, 2)
        spent = latency(language, text)
        median[name] = out[f"{name}_p50_ms"] = round(percentile(spent, 0.5), 2)
        out[f"{name}_p95_ms"] = round(percentile(spent, 0.95), 2)
        print(f"{name}: {len(spent)} keys, p50 {median[name]} ms, p95 {out[f'{name}_p95_ms']} ms")
    return out | {"key_p50_ms": median}


def projects(minutes: float) -> dict[str, Any]:
    newest = max(pin.seed for pin in read_pins() if judged(pin.seed))
    return measure([pin for pin in read_pins() if pin.seed == newest], minutes) | judged(newest)


def suites(given: list[str]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for item in given:
        name, _, folder = item.partition("=")
        out |= suite(name, Path(folder))
    return out


PARTS = CACHE / "parts.json"  # what a run has measured so far


def _kept(resume: bool) -> dict[str, dict[str, Any]]:
    """The parts that an interrupted run finished."""
    if not resume or not PARTS.is_file():
        return {}
    kept: dict[str, dict[str, Any]] = json.loads(PARTS.read_text(encoding="utf-8"))
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=Path, default=None)
    parser.add_argument("--suite", action="append", default=[], metavar="NAME=DIR")
    parser.add_argument("--packages", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=40, help="for the tests of drawn projects")
    parser.add_argument("--only", default="latency,cases,alarms,fixes,suites,projects")
    parser.add_argument(
        "--resume", action="store_true", help="keep the parts that an interrupted run finished"
    )
    options = parser.parse_args()
    for item in options.suite:
        if not Path(item.partition("=")[2]).is_dir():
            parser.error(f"--suite {item} names no folder; write NAME=DIR")
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "latency": latencies,
        "cases": lambda: judge(given_cases(options.cases) if options.cases else bandit_cases()),
        "alarms": lambda: alarms(options.packages),
        "fixes": fixes,
        "projects": lambda: projects(options.minutes),
        "suites": lambda: suites(options.suite),
    }
    out: dict[str, Any] = {}
    done = _kept(options.resume)
    for name in options.only.split(","):
        if name not in done:
            begun = time.monotonic()
            done[name] = parts[name]()
            print(f"{name} took {time.monotonic() - begun:.0f} s", flush=True)
            PARTS.parent.mkdir(parents=True, exist_ok=True)
            PARTS.write_text(json.dumps(done), encoding="utf-8")
        out |= done[name]
    record("audit", out)


if __name__ == "__main__":
    main()
