"""Regular expressions as trees: what every language has, what each adds, and what none can read."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keystroke.analysis.audit.rules.regex_tree import (
    ANY,
    RegexAlternation,
    RegexAnchor,
    RegexAtomic,
    RegexBackreference,
    RegexChars,
    RegexGroup,
    RegexLookaround,
    RegexRepeat,
    parse,
)


def one(sign: str) -> RegexChars:
    return RegexChars(1 << ord(sign))


A, B = one("a"), one("b")


@pytest.mark.parametrize(
    ("pattern", "tree"),
    [
        ("ab", (A, B)),
        ("a|b", (RegexAlternation(((A,), (B,))),)),
        ("(a)(?:b)(?P<x>a)(?<y>b)", (RegexGroup((A,)), RegexGroup((B,)), RegexGroup((A,)), RegexGroup((B,)))),
        (
            "a*b+?a?b{2}",
            (
                RegexRepeat(0, None, (A,)),
                RegexRepeat(1, None, (B,)),
                RegexRepeat(0, 1, (A,)),
                RegexRepeat(2, 2, (B,)),
            ),
        ),
        ("a{,3}b{3,}", (RegexRepeat(0, 3, (A,)), RegexRepeat(3, None, (B,)))),
        ("a{}", (A, one("{"), one("}"))),
        ("a++(?>b)", (RegexAtomic((RegexRepeat(1, None, (A,)),)), RegexAtomic((B,)))),
        ("^a$\\b", (RegexAnchor(), A, RegexAnchor(), RegexAnchor())),
        ("(?=a)(?<!b)", (RegexLookaround((A,)), RegexLookaround((B,)))),
        (
            r"(a)\1(?P=x)\k<y>",
            (RegexGroup((A,)), RegexGroup((A,)), RegexBackreference(), RegexBackreference()),
        ),
        (
            r"(?:a)(?P<n>a*)(b)\1\2",
            (
                RegexGroup((A,)),
                RegexGroup((RegexRepeat(0, None, (A,)),)),
                RegexGroup((B,)),
                RegexBackreference(),
                RegexGroup((B,)),
            ),
        ),
        ("[ab]", (RegexChars(A.options | B.options),)),
        ("[^a]", (RegexChars(ANY ^ A.options),)),
        ("[]a]", (RegexChars(one("]").options | A.options),)),
        ("[^]", (RegexChars(ANY),)),
        ("[^]a]b", (RegexChars(ANY), A, one("]"), B)),  # JavaScript's reading where both are possible
        (
            "([^](a])",
            (RegexGroup((RegexChars(ANY ^ sum(one(s).options for s in "](a")),)),),
        ),  # Python's where one is
        ("[a-c]", (RegexChars(sum(one(s).options for s in "abc")),)),
        ("[a-]", (RegexChars(A.options | one("-").options),)),
        (r"\x61\u0062\u{61}\141", (A, B, A, A)),
        ("é€", (RegexChars(1 << 233), RegexChars(1 << 256))),
        (".", (RegexChars(ANY ^ (1 << 10)),)),
        ("(?x) a # b\n b", (A, B)),
        ("(?i)a(?i:b)(?#c)", (A, RegexGroup((B,)))),
    ],
)
def test_an_expression_is_read_as_its_tree(pattern: str, tree: object) -> None:
    assert parse(pattern) == tree


@pytest.mark.parametrize(("sign", "flag"), [("d", "a"), ("w", "a"), ("s", "u")])
def test_kinds_of_characters_are_those_of_the_standard_library(sign: str, flag: str) -> None:
    (found,) = parse(f"\\{sign}")
    (opposite,) = parse(f"\\{sign.upper()}")
    assert isinstance(found, RegexChars)
    assert isinstance(opposite, RegexChars)
    expected = {code for code in range(256) if re.match(rf"(?{flag}:\{sign})", chr(code))}
    assert {code for code in range(257) if found.options >> code & 1} == expected
    assert found.options ^ opposite.options == ANY


@pytest.mark.parametrize(
    "pattern", ["(", ")", "a)", "[a", "*", "a|*", "(?", "(?z", "[b-a]", "a{3,2}", "\\", "(" * 200 + ")" * 200]
)
def test_what_cannot_be_read_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse(pattern)


@given(st.text(r"ab(|)[]^$*+?{}\.,1-<>:=!#Pkxu0 ", max_size=30))
def test_every_text_is_read_or_refused(pattern: str) -> None:
    try:
        parse(pattern)
    except ValueError:
        return
