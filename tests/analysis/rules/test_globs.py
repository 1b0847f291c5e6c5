"""Globs of `.editorconfig`: as the format's own package reads them, and in bounded time whatever they are."""

from __future__ import annotations

from pathlib import Path

import pytest
from editorconfig.fnmatch import fnmatch as reference
from hypothesis import example, given, settings
from hypothesis import strategies as st

from keystroke.analysis.rules.editorconfig import editorconfig_properties
from keystroke.analysis.rules.globs import LONGEST, matches

WORDS = st.text("ab.", min_size=1, max_size=3)
ATOMS = st.one_of(
    WORDS,
    st.sampled_from(["*", "**", "?", "[ab]", "[!a]", "[a-b.]", "/", "/**/", r"\a", "-"]),
)
ALTERNATIVES = st.lists(st.lists(ATOMS, max_size=2).map("".join), min_size=2, max_size=3).map(
    lambda parts: "{" + ",".join(parts) + "}"
)
GLOBS = st.lists(st.one_of(ATOMS, ALTERNATIVES), min_size=1, max_size=5).map("".join)
NAMES = st.lists(st.text("ab.-*", min_size=1, max_size=4), min_size=1, max_size=3).map("/".join)


def anchored(glob: str) -> str:
    """As the package anchors a section's glob to its folder."""
    return f"/{glob.removeprefix('/')}" if "/" in glob else f"/**/{glob}"


@settings(max_examples=400)
@given(GLOBS, NAMES)
@example("{a,b}*", "ab")
@example("a/**/b", "a/b")
@example("{*,a}{b,}", "a/b")
def test_well_formed_globs_mean_what_the_formats_package_says(glob: str, name: str) -> None:
    unclear = "//" in glob or "/." in f"/{name}"  # the package tidies such paths
    if not unclear:
        assert matches(glob, name) == reference(f"/{name}", anchored(glob)), glob


@pytest.mark.parametrize(
    ("glob", "name", "expected"),
    [
        ("file{-2..3}.c", "file-1.c", True),
        ("file{3..1}.c", "file2.c", True),
        ("{0..12}", "0", True),
        ("{0..12}", "012", False),
        ("{0..12}", "13", False),
        ("{0..12}3", "123", True),
        ("{a,b", "{a,b", True),
        ("{a}", "{a}", True),
        (r"\{a,b\}", "{a,b}", True),
        (r"\*", "*", True),  # the package takes this for any name
        (r"\*", "a", False),
        ("[", "[", True),
        ("[]", "[]", True),
        ("a\\", "a\\", True),
        ("{a,{b,c}d}e", "cde", True),
        ("{a,{b,c}d}e", "ce", False),
    ],
)
def test_ranges_and_signs_that_stand_for_themselves(glob: str, name: str, expected: bool) -> None:
    assert matches(glob, name) is expected


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "glob",
    [
        "*a" * 500 + "*b",
        "**a" * 340 + "b",
        "{a*,a*}" * 140 + "b",
        "{" * 500 + "a," + "}" * 500,
        "[a-z]*" * 170,
        "[" * LONGEST,
        "[a" * 511,
        "{1..999999999999999999}" * 44,
        "\\" * LONGEST,
    ],
)
def test_no_glob_can_explode(tmp_path: Path, glob: str) -> None:
    assert len(glob) <= LONGEST
    sections = f"[{glob}]\nindent_size = 3\n" * 60  # all that a file may hold
    (tmp_path / ".editorconfig").write_text(f"root = true\n{sections}")
    assert editorconfig_properties(tmp_path / ("a" * 200)) in ({}, {"indent_size": "3"})


def test_a_glob_longer_than_the_format_asks_for_matches_nothing() -> None:
    assert matches("*" * LONGEST, "a")
    assert not matches("*" * (LONGEST + 1), "a")


@pytest.mark.timeout(20)
def test_a_file_of_blank_lines_is_read_in_one_pass(tmp_path: Path) -> None:
    (tmp_path / ".editorconfig").write_text("\n" * 64_000)
    assert editorconfig_properties(tmp_path / "a.py", tmp_path) == {}


@given(st.text(max_size=40), NAMES)
def test_nonsense_raises_nothing(glob: str, name: str) -> None:
    assert matches(glob, name) in (True, False)
