"""The file as it is now counts most, the line under the cursor not at all."""

from __future__ import annotations

from keystroke.analysis.text_index import Lexicon, TextIndex
from keystroke.assist.completion.ngram_cache import FileText, NgramCache
from keystroke.engine.mixing import Prediction

ABOVE = "def area(box):\n    return box.width * box.height\n\n\ndef edge(box):\n    return "
BELOW = "\n\n\ndef ratio(box):\n    return box.width / box.height\n"


def project(**files: str) -> TextIndex:
    lexicon = Lexicon()
    return TextIndex.of(lexicon, [(name, lexicon.lexed(text)) for name, text in files.items()])


def test_above_and_below_are_evidence_and_count_more_than_other_files() -> None:
    others = project(a="def edge(box):\n    return box.width - 1\n", own="return box.width @ 2\n")
    cache = NgramCache(f"{ABOVE}box.width", BELOW, FileText(), others, "own")
    assert cache.after("") == Prediction(12, {" - 1": 1.0})  # the whole head of the function stood there
    alone = NgramCache(f"{ABOVE}box.width", BELOW, FileText())
    assert alone.after("") == Prediction(9, {" * box.height": 3.0, " / box.height": 3.0})


def test_the_same_context_far_and_near_is_counted_together() -> None:
    others = project(a="x\nsame(1, far)\n")
    cache = NgramCache("x\nsame(1, near)\ny\nx\nsame(", "\n", FileText(), others)
    assert cache.after("") == Prediction(5, {"1, far)": 1.0, "1, near)": 3.0})
    assert cache.after("1, n") == Prediction(8, {"ear)": 3.0})


def test_the_line_of_the_cursor_is_no_evidence() -> None:
    """Whoever deletes the end of a line does not want it back."""
    cache = NgramCache("total = price(", "item, tax)\nother = price(item)\n", FileText())
    assert cache.after("") == Prediction(3, {"item)": 3.0})


def test_a_path_of_its_own_is_not_looked_up_as_another_file() -> None:
    others = project(own="old = call(before)\n")
    assert NgramCache("old = call(", "", FileText(), others, "own").after("") is None
    assert NgramCache("old = call(", "", FileText(), others, "else").after("") is not None


def test_an_empty_file_knows_nothing() -> None:
    assert NgramCache("", "", FileText()).after("x = ") is None


def test_keys_in_one_line_find_the_index_of_the_file_ready() -> None:
    file = FileText()
    first = file.index("a\nb", "\nc")
    assert file.index("a\nbcd", "ef\nc") is first
    assert file.index("a\nx\nb", "\nc") is not first
