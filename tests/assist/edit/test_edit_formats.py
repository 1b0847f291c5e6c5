from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from installed import program
from keystroke.assist.edit.blocks import block_messages, fence_text
from keystroke.assist.edit.operations import (
    Addition,
    EditFailure,
    EditFailureReason,
    Move,
    Removal,
    Replacement,
)
from keystroke.assist.edit.resolve import Resolution, parse_answer, resolve
from keystroke.assist.edit.rewrite import FenceDetector, Region, parse_rewrite, rewrite_messages
from keystroke.text import unified_diff

FILES = {"src/app.py": "import os\n\n\ndef main():\n    print(1)\n", "notes.rst": "Title\n=======\n\ntext\n"}


def block(path: str, search: str, new: str) -> str:
    return f"{path}\n<<<<<<< SEARCH\n{search}\n=======\n{new}\n>>>>>>> REPLACE\n"


def made(answer: str, files: dict[str, str] | None = None) -> Resolution:
    texts = FILES if files is None else files
    operations = parse_answer(answer, tuple(texts))
    if isinstance(operations, EditFailure):
        return Resolution(failures=(operations,))
    return resolve(operations, texts.get)


def reasons(answer: str, files: dict[str, str] | None = None) -> list[EditFailureReason]:
    return [failure.reason for failure in made(answer, files).failures]


PRINTED = "import os\n\n\ndef main():\n    print(2)\n"


@pytest.mark.parametrize(
    "answer",
    [
        block("src/app.py", "    print(1)", "    print(2)"),
        "Sure! Here it is:\n\n```python\n"
        + block("src/app.py", "    print(1)", "    print(2)")
        + "```\nDone.",
        block("`src/app.py`:", "    print(1)", "    print(2)"),
        block("### File: src/app.py", "    print(1)", "    print(2)"),
        block("**src/app.py**", "    print(1)", "    print(2)"),
        "src/app.py\n```python\n<<<<<<< SEARCH\n    print(1)\n=======\n    print(2)\n>>>>>>> REPLACE\n```",
        block("./src/app.py", "    print(1)", "    print(2)").replace("\n", "\r\n"),
        "<<<<< ORIGINAL\n".join(["src/app.py\n", "    print(1)\n======\n    print(2)\n>>>>> UPDATED"]),
        "*** Begin Patch\n*** Update File: src/app.py\n@@ def main():\n"
        "-    print(1)\n+    print(2)\n*** End Patch",
        "--- a/src/app.py\n+++ b/src/app.py\n@@ -4,2 +4,2 @@\n def main():\n-    print(1)\n+    print(2)\n",
        # Counts and line numbers are wrong, as models write them.
        "```diff\n--- src/app.py\n+++ src/app.py\n@@ -90,7 +1,9 @@\n"
        " def main():\n-    print(1)\n+    print(2)\n```",
        "--- a/src/app.py\n+++ b/src/app.py\n@@ ... @@\n-    print(1)\n+    print(2)\n",
    ],
)
def test_every_way_of_writing_one_change_gives_the_same_file(answer: str) -> None:
    assert made(answer) == Resolution({"src/app.py": PRINTED})


def test_a_block_without_a_path_means_the_only_file() -> None:
    files = {"a.py": "x = 1\n"}
    answer = "<<<<<<< SEARCH\nx = 1\n=======\nx = 2\n>>>>>>> REPLACE"
    assert made(answer, files).texts == {"a.py": "x = 2\n"}
    assert reasons(answer) == [EditFailureReason.NO_PATH]


def test_a_heading_underlined_like_a_divider_survives() -> None:
    answer = block("notes.rst", "Title\n=======\n\ntext", "Title\n=======\n\nmore text")
    assert made(answer).texts == {"notes.rst": "Title\n=======\n\nmore text\n"}


def test_conflict_markers_in_a_file_can_be_edited() -> None:
    files = {"a.txt": "1\n<<<<<<< HEAD\nours\n=======\ntheirs\n>>>>>>> topic\n2\n"}
    answer = block("a.txt", "<<<<<<< HEAD\nours\n=======\ntheirs\n>>>>>>> topic", "ours")
    assert made(answer, files).texts == {"a.txt": "1\nours\n2\n"}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("I would rather not.", EditFailureReason.NO_HUNKS),
        ("src/app.py\n<<<<<<< SEARCH\n    print(1)\n=======\n    pri", EditFailureReason.TRUNCATED),
        ("src/app.py\n<<<<<<< SEARCH\n    print(1)\n>>>>>>> REPLACE", EditFailureReason.TRUNCATED),
        (block("src/app.py", "    print(9999, 'x')", "x"), EditFailureReason.NOT_FOUND),
        (block("src/app.py", "", "x"), EditFailureReason.EMPTY_SEARCH),
        (block("src/app.py", "import os", "import os"), EditFailureReason.UNCHANGED),
        (block("other.py", "import os", "x"), EditFailureReason.UNKNOWN_FILE),
        ("*** Begin Patch\n*** Update File: src/app.py\n-import os", EditFailureReason.TRUNCATED),
        ("*** Begin Patch\n*** End Patch", EditFailureReason.NO_HUNKS),
        ("*** Begin Patch\n*** Update File: src/app.py\n*** End Patch", EditFailureReason.NO_HUNKS),
        ("*** Begin Patch\n*** Add File: src/app.py\n+x\n*** End Patch", EditFailureReason.FILE_EXISTS),
        ("*** Begin Patch\n*** Delete File: nope\n*** End Patch", EditFailureReason.UNKNOWN_FILE),
        ("--- a/src/app.py\n+++ b/src/app.py\n", EditFailureReason.TRUNCATED),
    ],
)
def test_a_bad_answer_has_a_named_reason(answer: str, reason: EditFailureReason) -> None:
    assert reasons(answer) == [reason]


def test_one_failed_block_leaves_every_file_untouched() -> None:
    answer = block("src/app.py", "import os", "import sys") + block("notes.rst", "not there at all", "x")
    assert made(answer).texts == {}
    assert reasons(answer) == [EditFailureReason.NOT_FOUND]


def test_later_blocks_see_what_earlier_ones_did() -> None:
    answer = block("src/app.py", "import os", "import sys") + block("src/app.py", "import sys", "import re")
    assert made(answer).texts == {"src/app.py": FILES["src/app.py"].replace("os", "re")}


def test_an_envelope_adds_deletes_and_moves() -> None:
    patch = """*** Begin Patch
*** Add File: new/mod.py
+a = 1
+
*** Delete File: notes.rst
*** Update File: src/app.py
*** Move to: src/main.py
@@
-import os
+import sys
*** End Patch"""
    operations = parse_answer(patch, ())
    assert isinstance(operations, list)
    assert [type(op) for op in operations] == [Addition, Removal, Replacement, Move]
    assert made(patch) == Resolution(
        {
            "new/mod.py": "a = 1\n\n",
            "notes.rst": None,
            "src/app.py": None,
            "src/main.py": FILES["src/app.py"].replace("os", "sys"),
        },
        {"src/app.py": "src/main.py"},
    )


def test_nested_headers_narrow_the_place_down() -> None:
    text = "class A:\n    def f(self):\n        return 0\n\nclass B:\n    def f(self):\n        return 0\n"
    hunk = "@@ class B:\n@@     def f(self):\n-        return 0\n+        return 1\n"
    patch = f"*** Begin Patch\n*** Update File: a\n{hunk}*** End Patch"
    assert made(patch, {"a": text}).texts == {"a": text[:-2] + "1\n"}


def test_end_of_file_marks_the_last_of_equal_places() -> None:
    patch = "*** Begin Patch\n*** Update File: a\n@@\n-x\n+y\n*** End of File\n*** End Patch"
    assert made(patch, {"a": "x\nb\nx\n"}).texts == {"a": "x\nb\ny\n"}


def test_removed_lines_that_look_like_headers_are_content() -> None:
    old = "-- old comment\nselect 1\n"
    new = "++ new comment\nselect 1\n"
    assert made(unified_diff(old, new, "a/q.sql", "b/q.sql"), {"q.sql": old}).texts == {"q.sql": new}


def test_unified_diffs_create_and_remove_files() -> None:
    assert made(
        "--- /dev/null\n+++ b/n.txt\n@@ -0,0 +1,2 @@\n+a\n+b\n\\ No newline at end of file\n"
    ).texts == {"n.txt": "a\nb"}
    assert made("--- a/notes.rst\n+++ /dev/null\n@@ -1,4 +0,0 @@\n-Title\n").texts == {"notes.rst": None}


@given(
    st.lists(st.sampled_from("abc"), max_size=14),
    st.lists(st.sampled_from("abc"), max_size=14),
    st.booleans(),
)
def test_our_own_unified_diffs_are_read_back_exactly(old: list[str], new: list[str], ended: bool) -> None:
    before = "".join(f"{x}\n" for x in old)
    after = "\n".join(new) + ("\n" if ended and new else "")
    if before == after or not before or not after:
        return
    diff = unified_diff(before, after, "a/f", "b/f", context=3)
    result = made(diff, {"f": before})
    # Repetitive files can make a hunk truly ambiguous; then it is refused, never misplaced.
    if [failure.reason for failure in result.failures] != [EditFailureReason.AMBIGUOUS]:
        assert result.texts == {"f": after}


@pytest.mark.skipif(program("git") is None, reason="needs git")
@pytest.mark.parametrize("seed", range(8))
def test_diffs_written_by_git_are_read_exactly(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    old = "".join(f"line {i}\n" for i in range(60))
    lines = old.splitlines(keepends=True)
    for _ in range(4):
        lines[chance.randrange(len(lines))] = f"changed {chance.random()}\n"
        del lines[chance.randrange(len(lines))]
        lines.insert(chance.randrange(len(lines)), "inserted\n")
    new = "".join(lines) + chance.choice(["", "no newline"])
    (tmp_path / "a").write_text(old)
    (tmp_path / "b").write_text(new)
    command = ["git", "diff", "--no-index", f"-U{chance.choice([0, 1, 3])}", "a", "b"]
    diff = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout.replace("b/b", "b/a")
    assert made(diff, {"a": old}).texts == {"a": new}


PIECES = [
    "src/app.py",
    "notes.rst",
    "```",
    "```python",
    "<<<<<<< SEARCH",
    "=======",
    ">>>>>>> REPLACE",
    "import os",
    "",
    "    print(1)",
    "Title",
    "*** Begin Patch",
    "*** End Patch",
    "*** Update File: src/app.py",
    "*** Add File: n",
    "*** Delete File: notes.rst",
    "*** Move to: m",
    "*** End of File",
    "@@",
    "@@ def main():",
    "@@ -1,2 +1,2 @@",
    "--- a/src/app.py",
    "+++ b/src/app.py",
    "--- /dev/null",
    "+++ /dev/null",
    "-import os",
    "+import sys",
    " import os",
    "\\ No newline at end of file",
    "@@ -99999999999999999999 +0,0 @@",
    "+",
    "-",
    " ",
    "\r",
    "\u2028",
]


@given(st.lists(st.sampled_from(PIECES), max_size=16).map("\n".join))
def test_no_answer_whatever_breaks_the_parser_or_half_applies(answer: str) -> None:
    result = made(answer)
    assert bool(result.failures) != bool(result.texts)
    region = Region("src/app.py", 3, 5)
    rewritten = parse_rewrite(answer, region, FILES["src/app.py"])
    assert isinstance(rewritten, EditFailure) or rewritten.startswith("import os\n\n\n")


# ── rewriting a region ────────────────────────────────────────────────────────────────────────


def test_a_rewritten_region_leaves_the_rest_of_the_file_alone() -> None:
    text = "a\r\nb\r\nc\r\n"
    assert parse_rewrite("```\nB\nB2\n```", Region("f", 1, 2), text) == "a\r\nB\r\nB2\r\nc\r\n"
    assert parse_rewrite("```py\nC\n```\nas you wished", Region("f", 2), "a\nb\nc") == "a\nb\nC"
    assert parse_rewrite("A\n", Region("f", 0, 1), "a\nb\n") == "A\nb\n"


@given(st.text(st.sampled_from("ab\t\r\n"), max_size=30), st.integers(0, 6), st.integers(0, 6))
def test_a_region_written_anew_unchanged_changes_no_byte(text: str, start: int, length: int) -> None:
    region = Region("f", start, start + length)
    answer = fence_text(region.parts(text)[1])
    result = parse_rewrite(answer, region, text)
    # A region of nothing but white space reads like no answer.
    assert result == text or (isinstance(result, EditFailure) and not answer.strip("`\r\n\t "))


def test_mixed_line_ends_survive_a_rewrite() -> None:
    assert parse_rewrite("```\na\nB\nc\nd\n```", Region("f"), "a\r\nb\nc\rd") == "a\r\nB\nc\rd"


def test_a_rewrite_that_leaves_code_out_is_refused() -> None:
    text = "def f():\n    pass\n\ndef g():\n    pass\n"
    for remark in (
        "# ... rest of the code unchanged ...",
        "# existing code here",
        "... remaining functions same",
    ):
        result = parse_rewrite(f"```\ndef f():\n    return 1\n{remark}\n```", Region("f"), text)
        assert isinstance(result, EditFailure)
        assert result.reason is EditFailureReason.ELIDED
    assert isinstance(parse_rewrite("```\nother.methods(existing_code)\n```", Region("f"), text), str)


def test_blank_lines_lost_in_passing_are_kept_unless_they_are_the_point() -> None:
    text = "import re\n\n\ndef f():  \n    return 1\n\n\ndef g():\n    pass\n"
    answer = "```\nimport re\n\ndef f():\n    return 2\n\ndef g():\n    pass\n```"
    assert parse_rewrite(answer, Region("f"), text) == text.replace("return 1", "return 2")
    inserted = answer.replace("def g", "x = 1\n\n\ndef g")
    assert parse_rewrite(inserted, Region("f"), text) == (
        "import re\n\n\ndef f():  \n    return 2\n\nx = 1\n\n\ndef g():\n    pass\n"
    )
    removed = "```\nimport re\n\ndef g():\n    pass\n```"
    assert parse_rewrite(removed, Region("f"), text) == "import re\n\n\ndef g():\n    pass\n"
    only_blanks = "```\nimport re\n\ndef f():\n    return 1\n\ndef g():\n    pass\n```"
    assert parse_rewrite(only_blanks, Region("f"), text) == only_blanks[4:-3]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_the_end_of_a_rewrite_is_seen_however_it_streams(size: int) -> None:
    answer = "Here:\n```py\nx = 1\n```\nI changed x."
    watch = FenceDetector("x = 0\n")
    seen = ""
    for start in range(0, len(answer), size):
        seen += answer[start : start + size]
        if watch.feed(answer[start : start + size]):
            break
    assert seen.startswith("Here:\n```py\nx = 1\n```\n")
    assert len(seen) < len("Here:\n```py\nx = 1\n```\n") + size
    assert not any(map(FenceDetector("```\n").feed, answer))


def test_an_unfinished_rewrite_is_refused() -> None:
    result = parse_rewrite("```\ndef f():", Region("f"), "x\n")
    assert isinstance(result, EditFailure)
    assert result.reason is EditFailureReason.TRUNCATED


def test_fences_inside_a_region_survive() -> None:
    text = "# Doc\n```sh\nls\n```\nend\n"
    assert parse_rewrite("````\n# Doc\n```sh\nls -l\n```\nend\n````", Region("f"), text) == text.replace(
        "ls", "ls -l"
    )
    assert parse_rewrite("```\n# Doc\n```sh\nls -l\n```\nend\n```", Region("f"), text) == text.replace(
        "ls", "ls -l"
    )


def test_prompts_hold_the_files_the_task_and_the_rules() -> None:
    messages = block_messages(FILES, "do it", "no tabs")
    assert all(text in messages[1]["content"] for text in (*FILES, *FILES.values(), "do it"))
    assert "no tabs" in messages[0]["content"]
    part = rewrite_messages(Region("a", 1, 2), "x\ny\nz\n", "do it")[1]["content"]
    assert all(line in part for line in ("x\n", "y\n", "z\n", "do it"))


@given(st.text(st.sampled_from("`a\n"), max_size=30))
def test_a_fence_is_longer_than_any_inside(text: str) -> None:
    wrapped = fence_text(text)
    fence = wrapped.split("\n")[0]
    assert fence not in text


def test_empty_functions_are_asked_for_by_name_and_others_are_left_alone() -> None:
    stub, written = "def half(n):\n    pass\n", "def half(n):\n    return n / 2\n"
    asked = rewrite_messages(Region("a.py"), stub, "Half of n.")
    assert "Still empty: half." in asked[1]["content"]
    assert "change nothing else" not in asked[0]["content"]
    plain = rewrite_messages(Region("a.py"), written, "Half of n.")
    assert "Still empty" not in plain[1]["content"]
    assert "change nothing else" in plain[0]["content"]
