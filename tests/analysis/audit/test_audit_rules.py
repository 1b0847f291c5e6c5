"""Every rule against the snippets written beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from keystroke.analysis.audit import Auditor, Rule, all_rules, find_rule
from keystroke.analysis.audit.rules.catalog import parse_rules
from keystroke.analysis.audit.rules.reference import reference
from keystroke.errors import ConfigError, NotFound

RULES = sorted(all_rules().values(), key=lambda rule: rule.id)
DOCS = Path(__file__).parents[3] / "docs" / "audit" / "rules.md"


def found(rule: Rule, text: str) -> bool:
    return any(finding.rule == rule.id for finding in Auditor(rule.language).audit(text))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_rule_finds_its_bad_snippets_and_leaves_the_good_ones_alone(rule: Rule) -> None:
    assert len(rule.tests.bad) >= 2
    assert len(rule.tests.good) >= 2
    assert [found(rule, text) for text in rule.tests.bad] == [True] * len(rule.tests.bad)
    assert [found(rule, text) for text in rule.tests.good] == [False] * len(rule.tests.good)


def test_there_are_rules_for_every_language_and_each_names_a_weakness() -> None:
    assert len(RULES) >= 110
    assert {rule.language for rule in RULES} == {"python", "javascript", "c", "cpp", "go", "java"}
    assert all(rule.cwe > 0 and rule.why and rule.references for rule in RULES)


def test_the_rule_reference_is_what_the_rules_say() -> None:
    assert DOCS.read_text(encoding="utf-8") == reference()


WHOLE = """
[[rule]]
id = "python-x-y"
cwe = 1
severity = "low"
title = "t"
message = "m"
why = "w"
[[rule.when]]
call = ["f"]
"""


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[[rule", "not valid TOML"),
        ("x = 1", "only [[rule]] tables"),
        (
            WHOLE.replace('severity = "low"', 'severity = "grave"'),
            "Invalid enum value 'grave' - at `$.severity`",
        ),
        (WHOLE.replace("cwe = 1", 'cwe = "1"'), "Expected `int`, got `str` - at `$.cwe`"),
        (WHOLE.replace('title = "t"', 'titel = "t"'), "unknown field `titel`"),
        (WHOLE.replace('title = "t"', ""), "missing required field `title`"),
        (WHOLE + "wiht = {}", "unknown field `wiht` - at `$.when[0]`"),
        (WHOLE + "[[rule.fix]]\ntitel = 't'", "unknown field `titel` - at `$.fix[0]`"),
        (WHOLE.replace("cwe = 1", "cwe = 1\nlanguage = 'go'"), "folder of a rule names its language"),
        (WHOLE.replace('id = "python-x-y"', 'id = "X"'), "an id is lower-case words"),
        (WHOLE.replace('call = ["f"]', ""), "exactly one of"),
        (WHOLE.replace('call = ["f"]', 'call = "f"'), "Expected `array`, got `str` - at `$.when[0].call`"),
        (WHOLE + 'is = "tained"', "the condition 'tained' cannot be read"),
        (WHOLE + 'is = "~("', "cannot be read"),
        (WHOLE + 'text = "("', "not a valid regular expression"),
        (WHOLE.replace('call = ["f"]', 'pattern = "f($A)"'), "must list in 'needs'"),
    ],
)
def test_a_malformed_rule_is_refused_with_its_place(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=r"python/x\.toml") as error:
        parse_rules(text, "python", "x.toml")
    assert sentence in str(error.value)


def test_an_unknown_rule_or_language_says_what_is_known() -> None:
    with pytest.raises(NotFound, match="--rules list"):
        find_rule("python-nothing")
    with pytest.raises(NotFound, match="known languages: python"):
        Auditor("cobol")
