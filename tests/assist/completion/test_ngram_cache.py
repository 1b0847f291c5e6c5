"""The file as it is now counts most, the line under the cursor not at all."""

from __future__ import annotations

from typing import Any

from keystroke.analysis.text_index import Lexicon, TextIndex
from keystroke.assist.completion.ngram_cache import FileText, NgramCache
from keystroke.engine.mixing import Continuations

ABOVE = "def area(box):\n    return box.width * box.height\n\n\ndef edge(box):\n    return "
BELOW = "\n\n\ndef ratio(box):\n    return box.width / box.height\n"


def cache_at(before: str, after: str, *arguments: Any) -> NgramCache:
    return NgramCache(before + after, len(before), *arguments)


def project(**files: str) -> TextIndex:
    lexicon = Lexicon()
    return TextIndex.build(lexicon, [(name, lexicon.lex(text)) for name, text in files.items()])


def test_above_and_below_are_evidence_and_count_more_than_other_files() -> None:
    others = project(a="def edge(box):\n    return box.width - 1\n", own="return box.width @ 2\n")
    cache = cache_at(f"{ABOVE}box.width", BELOW, FileText(), others, "own")
    assert cache.predict("") == Continuations(12, {" - 1": 1.0})  # the whole head of the function stood there
    alone = cache_at(f"{ABOVE}box.width", BELOW, FileText())
    assert alone.predict("") == Continuations(9, {" * box.height": 3.0, " / box.height": 3.0})


def test_the_same_context_far_and_near_is_counted_together() -> None:
    others = project(a="x\nsame(1, far)\n")
    cache = cache_at("x\nsame(1, near)\ny\nx\nsame(", "\n", FileText(), others)
    assert cache.predict("") == Continuations(5, {"1, far)": 1.0, "1, near)": 3.0})
    assert cache.predict("1, n") == Continuations(8, {"ear)": 3.0})


def test_the_line_of_the_cursor_is_no_evidence() -> None:
    """Whoever deletes the end of a line does not want it back."""
    cache = cache_at("total = price(", "item, tax)\nother = price(item)\n", FileText())
    assert cache.predict("") == Continuations(3, {"item)": 3.0})


def test_a_path_of_its_own_is_not_looked_up_as_another_file() -> None:
    others = project(own="old = call(before)\n")
    assert cache_at("old = call(", "", FileText(), others, "own").predict("") is None
    assert cache_at("old = call(", "", FileText(), others, "else").predict("") is not None


def test_an_empty_file_knows_nothing() -> None:
    assert cache_at("", "", FileText()).predict("x = ") is None


def test_keys_in_one_line_find_the_index_of_the_file_ready() -> None:
    file = FileText()
    first = file.index("a\nb\nc", 3)
    assert file.index("a\nbcdef\nc", 5) is first
    assert file.index("a\nx\nb\nc", 5) is not first
