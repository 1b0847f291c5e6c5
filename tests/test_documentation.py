"""What the documentation says can be followed: links, anchors, imports, commands; and the log keeps
its form."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import subprocess
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

from keystroke.clients.cli.app import COMMANDS

ROOT = Path(__file__).parents[1]
SKIPPED = {".venv", "node_modules", "build", "dist", "site"}
PAGES = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not any(part in SKIPPED or part.startswith(".") for part in path.relative_to(ROOT).parts)
)
FENCE = re.compile(
    r"^(?P<marks>```+|~~~+)(?P<info>[^\n]*)\n(?P<body>.*?)^(?P=marks)[ \t]*$", re.MULTILINE | re.DOTALL
)
LINK = re.compile(r"\[(?:[^\]\[]|\[[^\]]*\])*\]\(<?(?P<target>[^)\s>]+)>?(?:\s+\"[^\"]*\")?\)")
DEFINITION = re.compile(r"^\[[^\]]+\]:\s+<?(?P<target>[^\s>]+)", re.MULTILINE)
HEADING = re.compile(r"^(#{1,6})\s+(?P<text>.+?)\s*#*$", re.MULTILINE)
VERDICT = re.compile(r"\b(kept|dropped|measured|missed|mended|explained|open|predictions?)\b")
OUTSIDE = ("http://", "https://", "mailto:")
DOTTED = re.compile(r"(?<![\w./-])keystroke(?:\.[A-Za-z_]\w*)+")
NOT_PYTHON = {"keystroke.bearer.KEY"}  # a WebSocket subprotocol
GUIDES = [page for page in PAGES if page.parent == ROOT or page.is_relative_to(ROOT / "docs")]


def prose(page: Path) -> str:
    """A page without its code."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page's headings, as the usual hosts of Markdown make them."""
    seen: dict[str, int] = {}
    found = set()
    for heading in HEADING.finditer(FENCE.sub("", page.read_text(encoding="utf-8"))):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading["text"]).replace("`", "").replace("*", "")
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        count = seen.get(slug, 0)
        seen[slug] = count + 1
        found.add(f"{slug}-{count}" if count else slug)
    return frozenset(found)


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_inside_the_repository_leads_somewhere(page: Path) -> None:
    text = prose(page)
    lost = []
    for target in [found["target"] for pattern in (LINK, DEFINITION) for found in pattern.finditer(text)]:
        if target.startswith(OUTSIDE):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / unquote(path)).resolve() if path else page
        if (
            not there.exists()
            or not there.is_relative_to(ROOT)
            or (anchor and there.suffix == ".md" and unquote(anchor) not in anchors(there))
        ):
            lost.append(target)
    assert not lost


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_what_snippets_import_is_there(page: Path) -> None:
    for block in FENCE.finditer(page.read_text(encoding="utf-8")):
        if block["info"].strip() != "python" or "keystroke" not in block["body"]:
            continue
        for line in re.findall(r"^\s*((?:from|import) keystroke.*)$", block["body"], re.MULTILINE):
            (node,) = ast.parse(line.strip()).body
            assert isinstance(node, ast.ImportFrom)
            module = importlib.import_module(node.module or "")
            assert not [alias.name for alias in node.names if not hasattr(module, alias.name)], line


def resolves(dotted: str) -> bool:
    """Whether a name is a module, or an attribute of the longest prefix that is one."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        module = ".".join(parts[:length])
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            continue
        if found is None:
            continue
        if length == len(parts):
            return True
        value: object = importlib.import_module(module)
        for part in parts[length:]:
            value = getattr(value, part, None)
        return value is not None
    return False


@pytest.mark.parametrize("page", GUIDES, ids=name)
def test_python_names_of_the_guides_exist(page: Path) -> None:
    """Names with two dots, and classes; others (`keystroke.toml`, editor commands) are not Python's."""
    names = set(DOTTED.findall(page.read_text(encoding="utf-8"))) - NOT_PYTHON
    python = {found for found in names if found.count(".") > 1 or found.split(".")[1][0].isupper()}
    assert not [found for found in python if not resolves(found)]


def test_a_python_name_that_does_not_exist_is_noticed() -> None:
    assert resolves("keystroke.text.Document.apply")
    assert not resolves("keystroke.text.nothing")
    assert not resolves("keystroke.nowhere.Document")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_in_snippets_are_commands(page: Path) -> None:
    for block in FENCE.finditer(page.read_text(encoding="utf-8")):
        if block["info"].strip() not in ("console", "sh", "bash"):
            continue
        for found in re.finditer(
            r"^(?:\$ )?keystroke\s+(?P<command>[a-z][\w-]*)", block["body"], re.MULTILINE
        ):
            assert found["command"] in COMMANDS, found[0]


def test_every_page_is_on_the_site() -> None:
    listed = {
        page.resolve()
        for block in FENCE.finditer((ROOT / "docs" / "index.md").read_text(encoding="utf-8"))
        if block["info"].strip() == "{toctree}"
        for line in block["body"].splitlines()
        if line.strip() and not line.startswith(":")
        for page in (ROOT / "docs").glob(f"{line.strip()}.md")
    }
    shown = {
        page for page in PAGES if page.parent == ROOT or name(page).startswith(("docs/", "log/", "models/"))
    }
    assert listed == shown - {ROOT / "docs" / "index.md"}


@pytest.mark.parametrize("page", [ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"], ids=name)
def test_files_that_the_map_names_are_there(page: Path) -> None:
    roots = (ROOT, ROOT / "src" / "keystroke", ROOT / "src" / "keystroke" / "gateway")
    named = re.findall(r"`([a-z0-9_/.-]+(?:\.py|\.toml|/))`", FENCE.sub("", page.read_text(encoding="utf-8")))
    lost = [
        path
        for path in named
        if not any((root / path).exists() for root in roots)
        and not ("/" not in path and any((ROOT / "src").rglob(path)))
    ]
    assert len(named) > 10
    assert not lost


@pytest.mark.parametrize("page", sorted((ROOT / "log").glob("*.md")), ids=name)
def test_every_entry_of_the_log_has_a_verdict_in_its_title(page: Path) -> None:
    if page.name == "README.md":
        listed = {found["target"] for found in LINK.finditer(page.read_text(encoding="utf-8"))}
        assert {other.name for other in page.parent.glob("*.md")} - {"README.md"} <= listed
        return
    headings = list(HEADING.finditer(FENCE.sub("", page.read_text(encoding="utf-8"))))
    leaves = [
        one for one, after in zip(headings, [*headings[1:], None], strict=True)
        if len(one[1]) > 1 and (after is None or len(after[1]) <= len(one[1]))
    ]  # fmt: skip
    assert leaves
    assert not [leaf["text"] for leaf in leaves if not VERDICT.search(leaf["text"].lower())]


def test_only_files_of_the_repository_are_linked() -> None:
    """A link to a file that is here and not in the repository leads nowhere in a fresh clone."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    tracked = {(ROOT / line).resolve() for line in done.stdout.splitlines()}
    folders = {folder for path in tracked for folder in path.parents}
    for page in PAGES:
        for found in LINK.finditer(prose(page)):
            if not found["target"].startswith((*OUTSIDE, "#")):
                there = (page.parent / unquote(found["target"].partition("#")[0])).resolve()
                assert there in tracked or there in folders, f"{name(page)}: {found['target']}"
