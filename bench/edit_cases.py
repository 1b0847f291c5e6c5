"""The labelled edits of `bench/edits.py`: the instruction, the check, and which lines may change.

A case is files, an instruction, a reference change and a check. The check runs the edited files
(Python, or the language's own tools where this machine has them; else the answer must equal the reference
but for layout and comments). Lines that no reference touches need not change: an answer that changes one is
not minimal. Answers are programs written by a model, so they run in a separate folder with limits
on time and file size.
"""

from __future__ import annotations

import hashlib
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from keystroke.analysis.syntax import language_of, parse_tree, walk
from keystroke.text.compare import compare

DATA = Path(__file__).parent / "data" / "edits"
SECONDS = 20
_COMMENT = re.compile(r"^\s*(?:#(?!\s*include|\[)|//|/\*|\*(?:\s|/|$)|--\s)")
_SHOWN = re.compile(r"\bprint\(|console\.log|__main__|fmt\.Print|System\.out|println!|printf\(")

_MARKS = ("<tool_call>", "</tool_call>", "<|im_", "*** End Patch", "```", "Now do what was asked", "\\n    ")

Texts = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class InstructionCase:
    id: str
    kind: str
    files: Texts
    instruction: str
    references: tuple[Texts, ...]
    check: str
    has: tuple[str, ...] = ()
    may: frozenset[int] = frozenset()  # lines (from 1) of the first changed file, beyond the references'
    harder: bool = False  # over a whole file, several places at once

    @property
    def held(self) -> bool:
        """Whether the case is one of the half that was not looked at while the feature was made."""
        return hashlib.sha256(self.id.encode()).digest()[0] % 2 == 1

    @property
    def language(self) -> str:
        return language_of(next(iter(self.files))) or ""


def read_cases(folder: Path = DATA) -> list[InstructionCase]:
    """Every case, in the order of the files. Raises ValueError where a reference does not fit its text."""
    found = [case for path in sorted(folder.glob("*.toml")) for case in _cases(path)]
    return found + [
        case for path in sorted(folder.glob("harder/*.toml")) for case in _cases(path, harder=True)
    ]


def _cases(path: Path, *, harder: bool = False) -> Iterator[InstructionCase]:
    table = tomllib.loads(path.read_text("utf-8"))
    files = {entry["path"]: entry["text"] for entry in table["file"]}
    for entry in table["case"]:
        changes = [entry["replace"], *entry.get("also", [])]
        yield InstructionCase(
            entry["id"],
            entry["kind"],
            files,
            entry["say"],
            tuple(_changed(files, pairs, entry["id"]) for pairs in changes),
            entry["check"],
            tuple(entry.get("has", ())),
            frozenset(entry.get("may", ())),
            harder,
        )


def _changed(files: Texts, pairs: list[list[str]], name: str) -> Texts:
    texts = dict(files)
    for old, new in pairs:
        places = [path for path, text in texts.items() if old in text]
        if len(places) != 1 or texts[places[0]].count(old) != 1:
            raise ValueError(f"{name}: {old!r} does not stand in exactly one place")
        texts[places[0]] = texts[places[0]].replace(old, new)
    return texts


def _broken(text: str, language: str) -> bool:
    return parse_tree(text, language).find(kind="ERROR") is not None


def is_damaged(case: InstructionCase, texts: Texts) -> bool:
    """Whether a file is worse than before, decided without the product's own checks: it no longer parses,
    holds markup of a conversation, or lost most of its lines while the reference keeps them."""
    for path, text in texts.items():
        old = case.files.get(path, "")
        language = language_of(path)
        if language is not None and _broken(text, language) and not _broken(old, language):
            return True
        if any(text.count(mark) > old.count(mark) for mark in _MARKS):
            return True
        kept = set(text.splitlines())
        lines = [line for line in old.splitlines() if line.strip()]
        wanted = case.references[0].get(path, old).splitlines()
        if sum(line in kept for line in lines) < 0.4 * sum(line in wanted for line in lines):
            return True
    return False


# ── right or wrong ────────────────────────────────────────────────────────────────────────────


def is_right(case: InstructionCase, texts: Texts) -> bool:
    """Whether the edited files do what was asked."""
    for path, text in texts.items():
        language = language_of(path)
        if language is not None and parse_tree(text, language).find(kind="ERROR") is not None:
            return False
    bare = " ".join(" ".join(texts.values()).split())
    if any(" ".join(wanted.split()) not in bare for wanted in case.has):
        return False
    runner = _RUNNERS[case.language]
    with tempfile.TemporaryDirectory(prefix="edit-case-") as name:
        folder = Path(name)
        for path, text in texts.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, "utf-8")
        commands = runner(case, texts, folder)
        if shutil.which(commands[0][0]) is None:
            return any(_bare(texts) == _bare(reference) for reference in case.references)
        return all(_passes(command, folder) for command in commands)


def _passes(command: list[str], folder: Path) -> bool:
    try:
        done = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS * 3,
            check=False, preexec_fn=_limits,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def _limits() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 20, 64 << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _python(case: InstructionCase, texts: Texts, folder: Path) -> list[list[str]]:
    (folder / "check_case.py").write_text(case.check, "utf-8")
    return [[sys.executable, "-B", "-P", "-c", "import sys; sys.path.insert(0, '.'); import check_case"]]


def _javascript(case: InstructionCase, texts: Texts, folder: Path) -> list[list[str]]:
    for path, text in texts.items():
        if path.endswith(".ts"):
            (folder / path).with_suffix(".js").write_text(without_types(text), "utf-8")
    (folder / "check_case.js").write_text(f"const assert = require('assert');\n{case.check}", "utf-8")
    return [["node", "check_case.js"]]


def _go(case: InstructionCase, texts: Texts, folder: Path) -> list[list[str]]:
    must = 'func must(ok bool) {\n\tif !ok {\n\t\tpanic("wrong")\n\t}\n}\n'
    (folder / "check_case.go").write_text(f"package main\n\n{must}\nfunc main() {{\n{case.check}}}\n")
    return [["go", "run", *texts, "check_case.go"]]


def _java(case: InstructionCase, texts: Texts, folder: Path) -> list[list[str]]:
    must = 'static void must(boolean ok) { if (!ok) throw new RuntimeException("wrong"); }'
    main = f"public static void main(String[] a) {{\n{case.check}}}"
    (folder / "CheckCase.java").write_text(f"public class CheckCase {{\n{must}\n{main}\n}}\n")
    return [["javac", "-J-Xmx256m", *texts, "CheckCase.java"], ["java", "-Xmx256m", "CheckCase"]]


def _c(case: InstructionCase, texts: Texts, folder: Path) -> list[list[str]]:
    includes = "".join(f'#include "{path}"\n' for path in texts)
    must = '#include <stdio.h>\n#define must(ok) do { if (!(ok)) { puts("wrong"); return 1; } } while (0)\n'
    (folder / "check_case.c").write_text(f"{includes}{must}int main(void)\n{{\n{case.check}\nreturn 0;\n}}\n")
    return [["gcc", "-O1", "-fsanitize=address", "check_case.c", "-o", "check_case"], ["./check_case"]]


def _rust(case: InstructionCase, texts: Texts, folder: Path) -> list[list[str]]:
    body = "".join(f'include!("{path}");\n' for path in texts)
    (folder / "check_case.rs").write_text(f"{body}fn main() {{\n{case.check}}}\n")
    return [["rustc", "-A", "warnings", "check_case.rs"], ["./check_case"]]


_RUNNERS: dict[str, Callable[[InstructionCase, Texts, Path], list[list[str]]]] = {
    "python": _python,
    "javascript": _javascript,
    "typescript": _javascript,
    "go": _go,
    "java": _java,
    "c": _c,
    "rust": _rust,
}

_TYPES = {"type_annotation", "interface_declaration", "type_alias_declaration", "accessibility_modifier",
          "readonly", "asserts_annotation", "type_parameters", "type_predicate_annotation"}  # fmt: skip


def without_types(text: str) -> str:
    """TypeScript as the JavaScript it stands for; enough for plain classes and functions."""
    gone: list[tuple[int, int]] = []
    names: list[str] = []
    for node in walk(parse_tree(text, "typescript")):
        span = node.range()
        if node.kind() in _TYPES or (node.kind() == "?" and node.parent() is not None
                                     and "parameter" in node.parent().kind()):  # fmt: skip
            gone.append((span.start.index, span.end.index))
        elif node.kind() == "export_statement":
            gone.append((span.start.index, span.start.index + len("export")))
            names += [n.text() for c in node.children() if c.kind().startswith(("class", "function"))
                      for n in c.children() if n.kind().endswith("identifier")][:1]  # fmt: skip
        elif node.kind() == "as_expression":
            gone.append((node.children()[0].range().end.index, span.end.index))
    out, at = [], 0
    for start, end in sorted(gone):
        if start >= at:
            out.append(text[at:start])
            at = end
    return "".join([*out, text[at:], f"\nmodule.exports = {{ {', '.join(names)} }};\n"])


def _bare(texts: Texts) -> list[tuple[str, tuple[str, ...]]]:
    """The tokens of the files, without comments and layout."""
    result = []
    for path, text in sorted(texts.items()):
        leaves = [n for n in walk(parse_tree(text, language_of(path) or "")) if n.is_leaf()]
        result.append((path, tuple(n.text().strip() for n in leaves if "comment" not in n.kind())))
    return result


# ── minimal or not ────────────────────────────────────────────────────────────────────────────


def minimal(case: InstructionCase, texts: Texts) -> bool:
    """Whether no line changed that need not: each old line that went is one that a reference changes too, and
    no line came that is only a remark or a demonstration, unless a reference brings such lines."""
    extra = {(path, n) for path in case.references[0] for n in case.may if _touched(case, path)}
    allowed = {place for reference in case.references for place in _gone(case.files, reference)} | extra
    if not set(_gone(case.files, texts)) <= allowed:
        return False
    spoken = [line for reference in case.references for line in _came(case.files, reference)]
    came = list(_came(case.files, texts))
    for pattern in (_COMMENT, _SHOWN):
        if any(map(pattern.search, came)) and not any(map(pattern.search, spoken)):
            return False
    return set(texts) == set(case.files)


def _touched(case: InstructionCase, path: str) -> bool:
    return case.references[0][path] != case.files[path]


def _gone(before: Texts, after: Texts) -> Iterator[tuple[str, int]]:
    for path, text in before.items():
        for a0, a1, _, _ in compare(text.splitlines(), after.get(path, "").splitlines()):
            yield from ((path, line + 1) for line in range(a0, a1))


def _came(before: Texts, after: Texts) -> Iterator[str]:
    for path, text in before.items():
        new = after.get(path, "").splitlines()
        for _, _, b0, b1 in compare(text.splitlines(), new):
            yield from new[b0:b1]
