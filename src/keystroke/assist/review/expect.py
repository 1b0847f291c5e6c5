"""Claims about what a changed definition returns, from its documentation, the project's tests or a model.

The model does not see the definition's code. Examples are parsed (`scripts`), never run as text. A claim
counts against a change only if it held before.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from keystroke.analysis.syntax import try_parse
from keystroke.assist.edit import Writer
from keystroke.assist.edit.blocks import fence_text
from keystroke.assist.edit.writer import read_answer
from keystroke.assist.review.scripts import Claim, docstring_examples, parse_claims

TESTS = 40  # test files that are read
_SIZE = 300_000  # bytes of one
_SHOWN = 140  # lines of a module that the model is shown
_ANSWER = 1_600  # characters of an answer that are read
_SKIPPED = {"node_modules", "venv", "site-packages", "__pycache__", "build", "dist"}
_SYSTEM = (
    "You write examples of how functions are used. You go by names, parameters and documentation. You answer "
    "with one block of Python code between ``` lines and nothing else."
)


def claims_from_docstrings(text: str, names: Collection[str]) -> list[Claim]:
    """Claims from the examples in a module's docstrings."""
    return [claim for code in docstring_examples(text) for claim in parse_claims(code, names)]


def claims_from_tests(root: Path, path: str, names: Collection[str]) -> Iterator[tuple[str, Claim]]:
    """Claims from the project's tests about a module's definitions, each with the test file's path."""
    module = Path(path).stem
    wanted = re.compile(rf"\b(?:from|import)\s+[\w.]*\b{re.escape(module)}\b")
    count = 0
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root)
        hidden = any(part.startswith(".") or part in _SKIPPED for part in name.parts)
        if hidden or not (name.name.startswith("test_") or name.stem.endswith("_test")):
            continue
        count += 1
        if count > TESTS:
            return
        try:
            if file.stat().st_size > _SIZE or file.is_symlink():
                continue
            code = file.read_text(encoding="utf-8")
        except (OSError, ValueError):
            continue
        if wanted.search(code):
            yield from ((name.as_posix(), claim) for claim in parse_claims(code, names))


def claims_from_model(text: str, name: str, names: Collection[str], writer: Writer) -> list[Claim]:
    """Claims of a model about a definition whose code it does not see."""
    shown = without_body(text, name)
    if shown is None:
        return []
    short = name.rpartition(".")[2]
    question = (
        f"{fence_text(shown, 'python')}\n\nThe code of {name} is hidden behind `...`. Write five short "
        f"examples of {short} that follow from its name and its documentation, among them the smallest and "
        "the empty case. Write each as `assert call == value`, with plain values and no imports, loops or "
        "comments."
    )
    answer = read_answer(
        writer, _SYSTEM, question, lambda text: len(text) > _ANSWER or text.rstrip().count("```") > 1
    )
    code = answer.partition("```")[2].partition("\n")[2].partition("```")[0] or answer
    # If the whole does not parse, each line is tried alone.
    whole = parse_claims(code, names)
    return whole or [claim for line in code.split("\n") for claim in parse_claims(line.strip(), names)]


def without_body(text: str, name: str) -> str | None:
    """The module with the body of one definition hidden; of a long module only the part around it. None where
    there is no such definition."""
    module = try_parse(text)
    if module is None:
        return None
    lines = text.split("\n")
    owner, _, short = name.rpartition(".")
    around = next((n for n in module.body if isinstance(n, ast.ClassDef) and n.name == owner), None)
    inside = around.body if around is not None else module.body
    node = next((n for n in inside if isinstance(n, ast.FunctionDef) and n.name == short), None)
    if node is None or node.end_lineno is None or node.body[0].lineno == node.lineno:
        return None
    documented = ast.get_docstring(node) is not None
    last = (node.body[0].end_lineno or 0) if documented else node.body[0].lineno - 1
    hidden = [*lines[:last], f"{' ' * node.body[0].col_offset}...", *lines[node.end_lineno :]]
    if len(hidden) <= _SHOWN:
        return "\n".join(hidden).strip("\n")
    part = around or node
    end = (part.end_lineno or 0) - (node.end_lineno - last) + 1
    return "\n".join(hidden[part.lineno - 1 : end][:_SHOWN])
