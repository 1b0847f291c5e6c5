"""Runs programs before and after their fixes, with harmless and with hostile input.

A trial is a program with a weakness, a driver that runs it with one input and returns the result, harmless and
hostile inputs, and a pattern that recognises a successful attack. A fix is right if every harmless result is the same
before and after, every attack works before, and none works after. Trials are in audit_trials/LANGUAGE.toml;
audit_random.py generates more. Languages whose tools are missing or broken are skipped.

Last line: JSON. `python -m bench.audit_fixes`, or `python -m bench.audit_fixes --projects ...`, which proves the
fixes on foreign code instead; `--projects --help` lists its options, `--projects --release SEED` draws 20 unread
packages (audit_projects.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from keystroke.analysis.audit import Auditor, Finding
from keystroke.text import apply_edits

TRIALS = Path(__file__).resolve().parent / "audit_trials"
LANGUAGES = ("python", "javascript", "c", "cpp", "go", "java")
TIMEOUT = 120  # seconds for one batch of runs


@dataclass(frozen=True)
class FixTrial:
    language: str
    rule: str
    program: str
    driver: str
    harmless: tuple[str, ...]
    hostile: tuple[str, ...]
    attacked: str  # a pattern in the result of an attack that worked
    name: str = ""
    title: str = ""  # of the fix, where a rule has several
    seen: str = ""  # where set, only what this pattern finds in a harmless result must stay the same
    setup: str = ""  # what stands before the program and is not audited
    statement: bool = False  # results are a statement of SQL and its values, as JSON: sqlite answers them
    sure: bool = True  # the attack must work before the fix; random programs may happen to resist it
    slow: bool = False  # it waits for a time limit: left to the benchmark

    @property
    def inputs(self) -> tuple[str, ...]:
        return (*self.harmless, *self.hostile)


@dataclass
class FixOutcome:
    trial: FixTrial
    fixed: str | None  # the program after its fix; None where none was offered
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> str:
        """Why the fix is wrong, or ""."""
        trial = self.trial
        if self.fixed is None:
            return "no fix was offered"
        if len(self.before) != len(trial.inputs) or len(self.after) != len(trial.inputs):
            return f"it did not run: {self.before[:1]} {self.after[:1]}"
        count = len(trial.harmless)
        for given, one, other in zip(trial.harmless, self.before, self.after, strict=False):
            if one.startswith("!"):
                return f"the program fails with harmless {given!r} even before: {one[:300]}"
            if _seen(trial, one) != _seen(trial, other):
                return f"with harmless {given!r}: {one[:300]!r} before, {other[:300]!r} after"
        attacked = re.compile(trial.attacked, re.DOTALL)
        for given, one, other in zip(trial.hostile, self.before[count:], self.after[count:], strict=True):
            if trial.sure and not attacked.search(one):
                return f"the attack {given!r} does not work even before: {one[:300]!r}"
            if attacked.search(other):
                return f"the attack {given!r} still works: {other[:300]!r}"
        return ""


def _seen(trial: FixTrial, result: str) -> object:
    return re.findall(trial.seen, result) if trial.seen else result


def read_trials(folder: Path = TRIALS) -> list[FixTrial]:
    """The trials of audit_trials, in order of language and file."""
    out: list[FixTrial] = []
    for path in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(path.read_text(encoding="utf-8"))["trial"]:
            entry = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
            entry.setdefault("hostile", ())
            entry.setdefault("attacked", "(?!)")
            out.append(FixTrial(language=path.stem.split("-")[0], **entry))
    return out


def fixed(trial: FixTrial) -> str | None:
    """The program after the fixes of its rule; None if a finding has none."""
    text = trial.program
    for _ in range(8):
        found = [item for item in Auditor(trial.language).audit(text) if item.rule == trial.rule]
        if not found:
            return text if text != trial.program else None
        fix = next(
            (fix for item in found for fix in (*item.fixes, *item.suggestions) if trial.title in fix.title),
            None,
        )
        if fix is None:
            return None
        text = apply_edits(text, fix.edits)
    return None


def findings(trial: FixTrial) -> list[Finding]:
    return list(Auditor(trial.language).audit(trial.program))


def outcomes(trials: Sequence[FixTrial]) -> list[FixOutcome]:
    """The outcomes of all trials whose language can be run here, in order."""
    out = [FixOutcome(trial, fixed(trial)) for trial in trials if works(trial.language)]
    for language in LANGUAGES:
        ready = [item for item in out if item.trial.language == language and item.fixed is not None]
        if not ready:
            continue
        jobs = [
            FixJob(
                text,
                item.trial.driver,
                item.trial.inputs,
                item.trial.setup,
                leaks="LeakSanitizer" in item.trial.attacked,
            )
            for item in ready
            for text in (item.trial.program, item.fixed or "")
        ]
        results = RUNNERS[language](jobs)
        for at, item in enumerate(ready):
            item.before, item.after = results[2 * at], results[2 * at + 1]
            if item.trial.statement:
                item.before, item.after = list(map(answer, item.before)), list(map(answer, item.after))
    return out


_TABLE = "CREATE TABLE users (id INTEGER, name TEXT, role TEXT, age INTEGER)"
_USERS = [(1, "ann", "a", 30), (2, "bob", "b", 40), (3, "anton", "100", 30), (4, "x y", "a", 50)]


def answer(asked: str) -> str:
    """The result of a statement and its values in a database with a few users."""
    if asked.startswith("!"):
        return asked
    statement, values = json.loads(asked)
    with contextlib.closing(sqlite3.connect(":memory:")) as base:
        base.execute(_TABLE)
        base.executemany("INSERT INTO users VALUES (?, ?, ?, ?)", _USERS)
        try:
            return str(base.execute(re.sub(r"\$(\d+)", r"?\1", statement), values).fetchall())
        except sqlite3.Error as error:
            return f"!{error}"


# Running


@dataclass(frozen=True)
class FixJob:
    program: str
    driver: str
    inputs: tuple[str, ...]
    setup: str = ""
    leaks: bool = False  # whether memory that is never freed is what it is about


def _run(
    command: Sequence[str | Path], folder: Path, given: str = "", **more: object
) -> tuple[int, str, str]:
    try:
        done = subprocess.run(
            [str(part) for part in command],
            cwd=folder,
            input=given,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT,
            **more,  # type: ignore[call-overload]
        )
    except (OSError, subprocess.SubprocessError) as error:
        return -1, "", str(error)
    return done.returncode, done.stdout, done.stderr


@cache
def works(language: str) -> bool:
    """Whether programs of a language can be run here; a broken tool counts as absent."""
    if language == "python":
        return True
    hello = {
        "javascript": FixJob("", "async function run(given) { return given; }", ("ok",)),
        "c": FixJob("#include <stdio.h>\n", "int main(int n, char **v) { puts(v[1]); return 0; }", ("ok",)),
        "cpp": FixJob("#include <cstdio>\n", "int main(int n, char **v) { puts(v[1]); return 0; }", ("ok",)),
        "go": FixJob("package main\n", "func run(given string) string { return given }", ("ok",)),
        "java": FixJob("class Trial { static String run(String given) { return given; } }", "", ("ok",)),
    }
    try:
        return [one[:2] for one in RUNNERS[language]([hello[language]])[0]] == ["ok"]
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return False


def _python(jobs: Sequence[FixJob]) -> list[list[str]]:
    """Runs each job in a fork of a process that has imported the slow modules."""
    heavy = (
        "torch",
        "numpy",
        "flask",
        "requests",
        "sqlalchemy",
        "lxml.etree",
        "yaml",
        "jinja2",
        "cryptography",
    )
    used = [name for name in heavy if any(name.split(".")[0] in job.program + job.driver for job in jobs)]
    with tempfile.TemporaryDirectory(prefix="trial-") as place:
        folder = Path(place)
        for at, job in enumerate(jobs):
            (folder / str(at)).mkdir()
            (folder / str(at) / "trial.py").write_text(
                f"{job.setup}\n{job.program}\n{job.driver}\n", encoding="utf-8"
            )
        (folder / "main.py").write_text(_PYTHON_MAIN, encoding="utf-8")
        given = json.dumps({"heavy": used, "inputs": [job.inputs for job in jobs]})
        code, out, err = _run([sys.executable, "-I", "main.py"], folder, given)
        try:
            return [[str(item) for item in got] for got in json.loads(out.strip().rsplit("\n", 1)[-1])]
        except ValueError:
            raise ValueError(f"{code}: {err[-2000:]}") from None


_PYTHON_MAIN = """
import contextlib, importlib, io, json, os, sys, traceback
asked = json.load(sys.stdin)
for name in asked["heavy"]:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)

def trial(inputs):
    with open("trial.py") as source:
        text = source.read()
    space = {"__name__": "trial", "__file__": os.path.abspath("trial.py")}
    heard, out = io.StringIO(), []
    with contextlib.redirect_stdout(heard):
        try:
            exec(compile(text, "trial.py", "exec"), space)
        except BaseException:
            return ["!" + traceback.format_exc(limit=-2)]
        for given in inputs:
            heard.seek(0)
            heard.truncate()
            try:
                got = space["run"](given)
                out.append(heard.getvalue() + str(got))
            except BaseException as error:
                out.append("!" + type(error).__name__ + ": " + str(error))
    return out

results = []
home = os.getcwd()
for at, inputs in enumerate(asked["inputs"]):
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.chdir(os.path.join(home, str(at)))
        with os.fdopen(writing, "w") as out:
            json.dump(trial(inputs), out)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as source:
        told = source.read()
    os.waitpid(child, 0)
    results.append(json.loads(told) if told else ["!it ended without a word"])
print(json.dumps(results))
"""

_SCRIPT_MAIN = """
const { Worker } = require("worker_threads");
const jobs = JSON.parse(require("fs").readFileSync(0, "utf8"));
(async () => {
  const out = [];
  for (let at = 0; at < jobs.length; at++) {
    out.push(await new Promise((done) => {
      const worker = new Worker("./job" + at + ".js", { workerData: jobs[at], stdout: true, stderr: true });
      worker.on("message", done);
      worker.on("error", (error) => done(["!" + (error && error.stack || error)]));
      worker.on("exit", () => done(["!it ended without a word"]));
    }));
  }
  process.stdout.write("\\n" + JSON.stringify(out));
})();
"""
_SCRIPT_JOB = """
(async () => {
  const { parentPort, workerData } = require("worker_threads");
  const out = [];
  for (const one of workerData) {
    try { out.push(String(await run(one))); } catch (error) { out.push("!" + error); }
  }
  parentPort.postMessage(out);
})();
"""


def _rendered(program: str) -> str:
    """Replaces JSX elements by the markup that a renderer writes."""

    def element(found: re.Match[str]) -> str:
        held = re.sub(r"=\{(\w+)\}", r'="${\1}"', found.group())
        return f"`{held}`"

    return re.sub(r"<a\s[^>]*>[^<]*</a>", element, program)


def _javascript(jobs: Sequence[FixJob]) -> list[list[str]]:
    """One process for all jobs, each in its own worker."""
    with tempfile.TemporaryDirectory(prefix="trial-") as place:
        folder = Path(place)
        for at, job in enumerate(jobs):
            text = f"{job.setup}\n{_rendered(job.program)}\n{job.driver}\n{_SCRIPT_JOB}"
            (folder / f"job{at}.js").write_text(text, encoding="utf-8")
        (folder / "main.js").write_text(_SCRIPT_MAIN, encoding="utf-8")
        code, out, err = _run(["node", "main.js"], folder, json.dumps([job.inputs for job in jobs]))
        try:
            return [[str(item) for item in got] for got in json.loads(out.strip().rsplit("\n", 1)[-1])]
        except ValueError:
            raise ValueError(f"{code}: {err[-2000:]}") from None


def _compiled(
    compiler: str, suffix: str, flags: Sequence[str]
) -> Callable[[Sequence[FixJob]], list[list[str]]]:
    def one(job: FixJob) -> list[str]:
        with tempfile.TemporaryDirectory(prefix="trial-") as place:
            folder = Path(place)
            (folder / f"trial{suffix}").write_text(f"{job.program}\n{job.driver}\n", encoding="utf-8")
            code, _, err = _run([compiler, *flags, f"trial{suffix}", "-o", "trial"], folder)
            if code:
                return [f"!{err[:600]}"]
            got: list[str] = []
            for given in job.inputs:
                code, told, err = _run([folder / "trial", given], folder, given, env=_sanitizer(job))
                report = re.search(r"(?:ERROR: \w+Sanitizer|runtime error): [^\n]*", err)
                got.append(f"{told}[exit {code}]{report.group() if report else ''}")
            return got

    def run(jobs: Sequence[FixJob]) -> list[list[str]]:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(one, jobs))

    return run


_SANITIZED = ("-w", "-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")


# On 64-bit ARM gcc's runtime walks the whole address space to find what was never freed, four seconds a program:
# there only trials that are about it look.
_LEAKS_ARE_DEAR = platform.machine() in ("aarch64", "arm64")


def _sanitizer(job: FixJob) -> dict[str, str]:
    # An allocation that cannot be had is for the program to handle, as it is without a sanitizer.
    leaks = int(job.leaks or not _LEAKS_ARE_DEAR)
    return {"ASAN_OPTIONS": f"allocator_may_return_null=1:detect_leaks={leaks}", "PATH": "/usr/bin:/bin"}


def _go(jobs: Sequence[FixJob]) -> list[list[str]]:
    """Builds all programs as packages of one module."""
    with tempfile.TemporaryDirectory(prefix="trial-") as place:
        folder = Path(place)
        drivers = ("github.com/lib/pq", "github.com/mattn/go-sqlite3", "github.com/go-sql-driver/mysql")
        lines = ["module trials", "", "go 1.19", ""]
        for number, path in enumerate(drivers):  # their names decide how values are marked; sqlite answers
            home = folder / f"driver{number}"
            home.mkdir()
            (home / "go.mod").write_text(f"module {path}\n\ngo 1.19\n", encoding="utf-8")
            (home / "driver.go").write_text(f"package driver{number}\n", encoding="utf-8")
            lines += [f"require {path} v0.0.0", f"replace {path} => ./driver{number}"]
        (folder / "go.mod").write_text("\n".join(lines) + "\n", encoding="utf-8")
        out: list[list[str]] = [[] for _ in jobs]
        good: list[int] = []
        for at, job in enumerate(jobs):
            home = folder / f"t{at}"
            home.mkdir()
            package = re.sub(r"(?m)^package \w+", f"package t{at}", job.program, count=1)
            (home / "trial.go").write_text(package, encoding="utf-8")
            (home / "driver.go").write_text(
                f"package t{at}\n{job.driver}\nfunc Run(given string) string {{ return run(given) }}\n",
                encoding="utf-8",
            )
        code, _, err = _run(["go", "vet", "-unreachable", "./..."], folder)
        broken = {int(found) for found in re.findall(r"(?:^|[/\s])t(\d+)/", err)} if code else set()
        for at in range(len(jobs)):
            if at in broken:
                told = [line for line in err.splitlines() if re.search(rf"\bt{at}/", line)]
                out[at] = ["!" + " ".join(told)[:600]]
                shutil.rmtree(folder / f"t{at}")
            else:
                good.append(at)
        listed = "".join(f'\tt{at} "trials/t{at}"\n' for at in good)
        table = "".join(f"\t{at}: t{at}.Run,\n" for at in good)
        (folder / "main.go").write_text(_GO_MAIN.format(imports=listed, table=table), encoding="utf-8")
        code, _, err = _run(["go", "build", "-o", "trials.bin", "."], folder)
        if code:
            raise ValueError(err[-2000:])
        given = {str(at): list(jobs[at].inputs) for at in good}
        code, printed, err = _run([folder / "trials.bin"], folder, json.dumps(given))
        try:
            for at, got in json.loads(printed.strip().rsplit("\n", 1)[-1]).items():
                out[int(at)] = [str(item) for item in got]
        except ValueError:
            raise ValueError(err[-2000:]) from None
        return out


_GO_MAIN = """package main

import (
\t"encoding/json"
\t"fmt"
\t"os"
{imports})

var table = map[int]func(string) string{{
{table}}}

func guarded(f func(string) string, given string) (out string) {{
\tdefer func() {{
\t\tif e := recover(); e != nil {{
\t\t\tout = fmt.Sprint("!", e)
\t\t}}
\t}}()
\treturn f(given)
}}

func main() {{
\tvar given map[int][]string
\tjson.NewDecoder(os.Stdin).Decode(&given)
\tout := map[int][]string{{}}
\tfor at, inputs := range given {{
\t\tfor _, one := range inputs {{
\t\t\tout[at] = append(out[at], guarded(table[at], one))
\t\t}}
\t}}
\ttext, _ := json.Marshal(out)
\tfmt.Println()
\tfmt.Println(string(text))
}}
"""


def _java(jobs: Sequence[FixJob]) -> list[list[str]]:
    """Compiles all programs together; programs with errors are left out and the rest is compiled again."""
    with tempfile.TemporaryDirectory(prefix="trial-") as place:
        folder = Path(place)
        out: list[list[str]] = [[] for _ in jobs]
        alive = list(range(len(jobs)))
        for at, job in enumerate(jobs):
            home = folder / f"t{at}"
            home.mkdir()
            (home / "Trial.java").write_text(
                f"package t{at};\n{job.program}\n{job.driver}\n", encoding="utf-8"
            )
            (home / "Entry.java").write_text(
                f"package t{at};\npublic class Entry {{ public static String run(String given) throws Exception "
                f"{{ return Trial.run(given); }} }}\n",
                encoding="utf-8",
            )
        for _ in range(3):
            table = "".join(f"    table.put({at}, t{at}.Entry::run);\n" for at in alive)
            (folder / "Main.java").write_text(_JAVA_MAIN.replace("TABLE", table), encoding="utf-8")
            files = [f"t{at}/{name}.java" for at in alive for name in ("Trial", "Entry")]
            code, _, err = _run(["javac", "-nowarn", "-d", "classes", "Main.java", *files], folder)
            if not code:
                break
            broken = {int(found) for found in re.findall(r"^t(\d+)/\w+\.java:\d+: error", err, re.MULTILINE)}
            if not broken:
                raise ValueError(err[-2000:])
            for at in broken:
                told = [line for line in err.splitlines() if line.startswith(f"t{at}/")]
                out[at] = ["!" + " ".join(told)[:600]]
            alive = [at for at in alive if at not in broken]
        lines = "".join(f"{at}\t{given.encode('utf-8').hex()}\n" for at in alive for given in jobs[at].inputs)
        code, printed, err = _run(["java", "-cp", "classes", "Main"], folder, lines)
        for line in printed.splitlines():
            found = re.fullmatch(r"@(\d+)\t([0-9a-f]*)", line)
            if found is not None:
                out[int(found[1])].append(bytes.fromhex(found[2]).decode("utf-8", "replace"))
        return out


_JAVA_MAIN = """import java.util.*;
import java.io.*;
import java.nio.charset.StandardCharsets;
public class Main {
  interface Run { String run(String given) throws Exception; }
  static String hex(String text) {
    StringBuilder out = new StringBuilder();
    for (byte b : text.getBytes(StandardCharsets.UTF_8)) out.append(String.format("%02x", b));
    return out.toString();
  }
  public static void main(String[] args) throws Exception {
    Map<Integer, Run> table = new HashMap<>();
TABLE
    BufferedReader in = new BufferedReader(new InputStreamReader(System.in));
    for (String line; (line = in.readLine()) != null;) {
      String[] parts = line.split("\\t", -1);
      byte[] bytes = new byte[parts[1].length() / 2];
      for (int i = 0; i < bytes.length; i++) bytes[i] = (byte) Integer.parseInt(parts[1].substring(2 * i, 2 * i + 2), 16);
      String got;
      try { got = String.valueOf(table.get(Integer.parseInt(parts[0])).run(new String(bytes, StandardCharsets.UTF_8))); }
      catch (Throwable error) { got = "!" + error; }
      System.out.println("@" + parts[0] + "\\t" + hex(got));
    }
    System.out.flush();
    System.exit(0);
  }
}
"""

RUNNERS: dict[str, Callable[[Sequence[FixJob]], list[list[str]]]] = {
    "python": _python,
    "javascript": _javascript,
    "c": _compiled("gcc", ".c", _SANITIZED),
    "cpp": _compiled("g++", ".cpp", _SANITIZED),
    "go": _go,
    "java": _java,
}


def report(done: Iterable[FixOutcome]) -> tuple[int, int]:
    """Prints the failures; returns how many fixes were run and how many were right."""
    run = right = 0
    for item in done:
        run += 1
        wrong = item.wrong
        right += not wrong
        if wrong:
            print(f"  wrong: {item.trial.rule} {item.trial.name}: {wrong}")
    return run, right


def main() -> None:
    if "--projects" in sys.argv:
        from bench.audit_projects import main as prove_on_projects

        prove_on_projects([item for item in sys.argv[1:] if item != "--projects"])
        return
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    told, good = report(outcomes(read_trials()))
    print(json.dumps({"fixes_run": told, "fixes_right": good}))


if __name__ == "__main__":
    main()
