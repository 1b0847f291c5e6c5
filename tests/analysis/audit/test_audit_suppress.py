"""In-line suppression names its rule and says why."""

from __future__ import annotations

import pytest

from keystroke.analysis.audit import Auditor


def rules(text: str, language: str = "python", *, honour_others: bool = False) -> list[str]:
    return [finding.rule for finding in Auditor(language, honour_others=honour_others).audit(text)]


def test_a_reason_silences_the_named_rule_on_its_line_or_the_next() -> None:
    assert (
        rules("import hashlib\nx = hashlib.md5(b'')  # keystroke: ignore[python-weak-hash] a cache key\n")
        == []
    )
    assert (
        rules("import hashlib\n# keystroke: ignore[python-weak-hash] a cache key\nx = hashlib.md5(b'')\n")
        == []
    )
    assert (
        rules(
            "void f(char *s) {\n  printf(s); // keystroke: ignore[c-format-string] constant in practice\n}\n",
            "c",
        )
        == []
    )


def test_another_rule_is_not_silenced() -> None:
    text = "import hashlib\nx = hashlib.md5(b'')  # keystroke: ignore[python-ssrf] no\n"
    assert rules(text) == ["python-weak-hash"]


@pytest.mark.parametrize(
    "comment", ["keystroke: ignore[python-weak-hash]", "keystroke: ignore", "keystroke: ignore because"]
)
def test_a_suppression_without_rule_and_reason_is_itself_found(comment: str) -> None:
    text = f"import hashlib\nx = hashlib.md5(b'')  # {comment}\n"
    assert sorted(rules(text)) == ["python-weak-hash", "suppression-without-reason"]


def test_other_tools_comments_count_only_when_asked() -> None:
    text = "import hashlib\nx = hashlib.md5(b'')  # nosec\ny = hashlib.md5(b'')  # noqa: S324\n"
    assert rules(text) == ["python-weak-hash", "python-weak-hash"]
    assert rules(text, honour_others=True) == []
