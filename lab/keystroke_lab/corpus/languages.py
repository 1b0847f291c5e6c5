"""The languages of the corpus, and which files of a project are hand-written in them.

Tests, generated files and vendored files are recognised by name; a header file is C++ where its text shows
it.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath

SUFFIXES = {
    ".py": "python",
    ".js": "javascript", ".mjs": "javascript", ".cjs": "javascript", ".jsx": "javascript",
    ".ts": "typescript", ".tsx": "typescript", ".mts": "typescript", ".cts": "typescript",
    ".go": "go", ".rs": "rust", ".java": "java", ".c": "c", ".h": "c",
    ".cc": "cpp", ".cpp": "cpp", ".cxx": "cpp", ".hpp": "cpp", ".hh": "cpp", ".hxx": "cpp",
}  # fmt: skip
LANGUAGES = tuple(dict.fromkeys(SUFFIXES.values()))
_CPP = re.compile(r"^\s*(class\s+\w|namespace\b|template\s*<|using\s+\w|public:|private:)|\bstd::", re.M)
_BUILT_FOLDERS = frozenset(
    [
        "dist",
        "build",
        "umd",
        "esm",
        "cjs",
        "bundle",
        "bundles",
        "bower_components",
        "min",
        "out",
        "labextension",
    ]
)
_GENERATED_NAMES = re.compile(
    r"(?i)\.min\.|bundle\.[cm]?js$|\.d\.[cm]?ts$|\.pb(\.\w+)?\.(go|cc|h)$|_generated\.|\.generated\.|\.gen\.(go|ts)$"
    r"|(^|/)(zz_|bindata|bindings\.rs|parser\.c$|lex\.yy\.|y\.tab\.|moc_|ui_|qrc_|jquery|config\.h$)|_string\.go$"
    r"|-bundle|\.bundle\."
)
_TESTS = re.compile(
    r"(?i)(_test\.(go|cc|cpp|c)$|\.(test|spec)\.[cm]?[jt]sx?$|tests?\.java$|(^|/)test[_-]\w+\.\w+$)"
)
_TEST_FOLDERS = frozenset(["__tests__", "testdata", "spec", "specs", "fixtures", "benches"])


def language_of(path: str, text: str = "") -> str | None:
    """The language of a file by its name, and of a header by its `text`; None for what is not learned."""
    language = SUFFIXES.get(PurePosixPath(path).suffix)
    return "cpp" if language == "c" and path.endswith(".h") and _CPP.search(text) else language


def is_built(path: str) -> bool:
    """Whether a tool wrote the file, by its name. For every language but Python, whose names are its own."""
    folders = path.lower().split("/")[:-1]
    script = SUFFIXES.get(PurePosixPath(path).suffix) in ("javascript", "typescript")
    return bool(_GENERATED_NAMES.search(path)) or (script and not _BUILT_FOLDERS.isdisjoint(folders))


def is_foreign_test(path: str) -> bool:
    """Whether it is a test by the habits of the languages other than Python."""
    return bool(_TESTS.search(path)) or not _TEST_FOLDERS.isdisjoint(path.split("/")[:-1])
