"""The next edit: found where a change asks for it, nowhere else, and kept true while typing goes on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keystroke.assist.next_edit import Burst, Cause, NextEditProposal, NextEditTracker, burst_between
from keystroke.text import Dropped, Edit, apply_edits


def typed(before: str, old: str, new: str, nth: int = 0) -> tuple[str, Edit]:
    """Replace the nth `old` by `new`."""
    start = -1
    for _ in range(nth + 1):
        start = before.index(old, start + 1)
    edit = Edit(start, start + len(old), new)
    return apply_edits(before, [edit]), edit


def proposed(
    before: str, old: str, new: str, language: str = "python", nth: int = 0, **others: str
) -> tuple[NextEditProposal | None, str]:
    tracker = NextEditTracker(before, language)
    after, edit = typed(before, old, new, nth)
    tracker.apply_edits(before, [edit])
    found = tracker.rule_search().propose(after, edit.start, others)
    return tracker.adopt(found), after


def applied(proposal: NextEditProposal | None, text: str) -> str:
    assert proposal is not None
    return apply_edits(text, [p.edit for p in proposal.edits if p.buffer is None])


class TestRename:
    def test_a_function_renamed_at_its_definition_renames_its_uses(self) -> None:
        before = "def load(path):\n    return path\n\nx = load('load')  # load\ny = other.load\nload(x)\n"
        proposal, after = proposed(before, "load", "read")
        assert applied(proposal, after) == (
            "def read(path):\n    return path\n\nx = read('load')  # load\ny = other.load\nread(x)\n"
        )
        assert proposal is not None
        assert (proposal.cause, proposal.title) == (Cause.RENAME, "Rename load to read")

    def test_a_parameter_is_renamed_inside_its_function_only(self) -> None:
        before = "def f(size):\n    a = size\n    g(size=1)\n    return size\n\nsize = 2\nprint(size)\n"
        proposal, after = proposed(before, "size", "count")
        assert applied(proposal, after) == (
            "def f(count):\n    a = count\n    g(size=1)\n    return count\n\nsize = 2\nprint(size)\n"
        )

    def test_a_nested_function_with_a_name_of_its_own_is_left_alone(self) -> None:
        before = "def f(n):\n    def g(n):\n        return n\n    return n + g(1)\n"
        proposal, after = proposed(before, "n", "total", nth=0 + before[: before.index("(n)")].count("n"))
        assert applied(proposal, after) == (
            "def f(total):\n    def g(n):\n        return n\n    return total + g(1)\n"
        )

    def test_a_method_is_renamed_where_it_is_reached_through_an_object(self) -> None:
        before = (
            "class A:\n    def go(self):\n        self.go()\n\ndef go():\n    pass\n\na = A()\na.go()\ngo()\n"
        )
        proposal, after = proposed(before, "go", "run")
        assert applied(proposal, after) == (
            "class A:\n    def run(self):\n        self.run()\n\n"
            "def go():\n    pass\n\na = A()\na.run()\ngo()\n"
        )

    def test_a_changed_use_is_no_rename(self) -> None:
        proposal, _ = proposed("def f():\n    pass\n\nf()\nf()\n", "f()\n", "g()\n", nth=1)
        assert proposal is None

    def test_other_open_files_that_import_the_name_follow(self) -> None:
        proposal, _ = proposed(
            "def load(path):\n    return path\n",
            "load",
            "read",
            b="from a import load\nload(1)\n",
            c="load = 3\nprint(load)\n",
        )
        assert proposal is not None
        assert [(p.buffer, p.edit) for p in proposal.edits] == [
            ("b", Edit(14, 18, "read")),
            ("b", Edit(19, 23, "read")),
        ]

    @pytest.mark.parametrize(
        ("language", "before", "old", "after"),
        [
            (
                "javascript",
                "function load(a) { return a; }\nload(1);\no.load();\n",
                "load",
                "function read(a) { return a; }\nread(1);\no.load();\n",
            ),
            (
                "typescript",
                "const size = 1;\nconst x: number = size + size;\n",
                "size",
                "const read = 1;\nconst x: number = read + read;\n",
            ),
            (
                "go",
                "package a\nfunc load() {}\nfunc main() { load() }\n",
                "load",
                "package a\nfunc read() {}\nfunc main() { read() }\n",
            ),
            (
                "c",
                "int load(int a) { return a; }\nint main() { return load(1); }\n",
                "load",
                "int read(int a) { return a; }\nint main() { return read(1); }\n",
            ),
        ],
    )
    def test_other_languages_have_names_too(self, language: str, before: str, old: str, after: str) -> None:
        proposal, text = proposed(before, old, "read", language)
        assert applied(proposal, text) == after

    def test_typing_a_name_letter_by_letter_proposes_the_whole(self) -> None:
        text = "def load():\n    pass\n\nload()\n"
        tracker = NextEditTracker(text, "python")
        for edit in [
            *(Edit(n, n + 1, "") for n in (7, 6, 5, 4)),
            *(Edit(4 + i, 4 + i, c) for i, c in enumerate("read")),
        ]:
            tracker.apply_edits(text, [edit])
            text = apply_edits(text, [edit])
        proposal = tracker.adopt(tracker.rule_search().propose(text, 8, {}))
        assert applied(proposal, text) == "def read():\n    pass\n\nread()\n"


class TestSignature:
    @pytest.mark.parametrize(
        ("old", "new", "calls", "updated"),
        [
            ("(a)", "(a, b)", "f(1)\nf(a=1)\n", "f(1, b)\nf(a=1, b=b)\n"),
            ("(a)", "(b, a)", "f(1)\n", "f(b, 1)\n"),
            ("(a, b)", "(a)", "f(1, 2)\nf(1, b=2)\n", "f(1)\nf(1)\n"),
            ("(a, b)", "(b)", "f(1, 2)\n", "f(2)\n"),
            ("()", "(a)", "f()\n", "f(a)\n"),
        ],
    )
    def test_calls_follow_the_parameters(self, old: str, new: str, calls: str, updated: str) -> None:
        head = f"def f{old}:\n    pass\n\n"
        proposal, after = proposed(head + calls, old, new)
        assert applied(proposal, after) == f"def f{new}:\n    pass\n\n" + updated
        assert proposal is not None
        assert proposal.cause is Cause.SIGNATURE

    @pytest.mark.parametrize("calls", ["f(*args)\n", "f(1, 2)\n", "g(1)\n", "x.f(1)\n"])
    def test_calls_that_cannot_be_counted_or_need_nothing_are_left_alone(self, calls: str) -> None:
        proposal, _ = proposed(f"def f(a):\n    pass\n\n{calls}", "(a)", "(a, b)")
        assert proposal is None

    def test_a_parameter_with_a_default_asks_nothing_of_calls(self) -> None:
        assert proposed("def f(a):\n    pass\n\nf(1)\n", "(a)", "(a, b=1)")[0] is None


class TestRepeat:
    def test_the_same_change_made_twice_is_offered_where_it_fits(self) -> None:
        text = "log(one)\n\n\nlog(two)\n\n\nlog(three)\nlogs(four)\n"
        tracker = NextEditTracker(text, "python")
        for _ in range(2):
            before = text
            text, edit = typed(before, "log(", "print(")
            tracker.apply_edits(before, [edit])
        proposal = tracker.adopt(tracker.rule_search().propose(text, 0, {}))
        assert applied(proposal, text) == "print(one)\n\n\nprint(two)\n\n\nprint(three)\nlogs(four)\n"
        assert proposal is not None
        assert proposal.cause is Cause.REPEAT

    def test_one_change_alone_is_no_pattern(self) -> None:
        assert proposed("log(a)\nlog(b)\n", "log(", "print(", language="yaml")[0] is None


class TestFollowing:
    def rename(self) -> tuple[NextEditTracker, str, NextEditProposal]:
        before = "def load():\n    pass\n\nload()\nload()\n"
        tracker = NextEditTracker(before, "python")
        text, edit = typed(before, "load", "read")
        tracker.apply_edits(before, [edit])
        proposal = tracker.adopt(tracker.rule_search().propose(text, edit.start, {}))
        assert proposal is not None
        return tracker, text, proposal

    def test_taking_one_leaves_the_next(self) -> None:
        tracker, text, proposal = self.rename()
        while tracker.proposal is not None:
            edit = tracker.proposal.edits[0].edit
            assert tracker.apply_edits(text, [edit]) is None
            text = apply_edits(text, [edit])
        assert text == "def read():\n    pass\n\nread()\nread()\n"
        assert len(proposal.edits) == 2
        assert tracker.rule_search().propose(text, 0, {}) is None

    def test_typing_elsewhere_moves_it(self) -> None:
        tracker, text, proposal = self.rename()
        edit = Edit(0, 0, "# note\n")
        assert tracker.apply_edits(text, [edit]) is None
        moved = tracker.proposal
        assert moved is not None
        assert [p.edit.start for p in moved.edits] == [p.edit.start + 7 for p in proposal.edits]

    def test_changing_its_place_drops_it_with_a_reason(self) -> None:
        tracker, text, proposal = self.rename()
        spans = [p.edit for p in proposal.edits]
        edits = [Edit(e.start + 1, e.start + 2, "") for e in sorted(spans, key=lambda e: -e.start)]
        dropped = tracker.apply_edits(text, edits)
        assert isinstance(dropped, Dropped)
        assert dropped.reason == "overlapped"
        assert tracker.proposal is None

    def test_dismissed_it_does_not_come_back(self) -> None:
        tracker, text, _ = self.rename()
        tracker.dismiss(text)
        assert tracker.rule_search().propose(text, 0, {}) is None


@given(st.text(alphabet="ab \n", max_size=30), st.text(alphabet="ab \n", max_size=30))
def test_a_burst_is_the_whole_difference(before: str, after: str) -> None:
    burst = burst_between(before, after)
    if burst is None:
        assert before == after
        return
    for seen in (burst, burst.words(), burst.with_neighbours()):
        assert isinstance(seen, Burst)
        assert before[: seen.start] + seen.new + before[seen.old_end :] == after


@given(
    st.text(alphabet="def(a, b):=\n x", max_size=60),
    st.integers(0, 60),
    st.text(alphabet="ab(),\n", max_size=4),
)
def test_no_text_makes_a_proposal_that_does_not_fit(text: str, at: int, new: str) -> None:
    at = min(at, len(text))
    edit = Edit(at, min(len(text), at + 1), new)
    tracker = NextEditTracker(text, "python")
    tracker.apply_edits(text, [edit])
    after = apply_edits(text, [edit])
    proposal = tracker.rule_search().propose(after, at, {})
    if proposal is not None:
        apply_edits(after, [p.edit for p in proposal.edits])
