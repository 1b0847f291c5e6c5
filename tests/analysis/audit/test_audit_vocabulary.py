"""The audit must not know names that occur only in public test suites for analysers."""

from __future__ import annotations

import re
from pathlib import Path

import keystroke.analysis.audit as audit
from keystroke.analysis.audit import Auditor

# Helpers, types and macros of Juliet (C and Java) and of OWASP Benchmark (Java and Python).
SUITE_NAMES = """
RAND32 RAND64 URAND31 printLine printWLine printIntLine printLongLine printLongLongLine printHexCharLine
printUnsignedLine printStructLine printDoubleLine printSizeTLine printWcharLine twoIntsStruct structCharVoid
ALLOCA globalReturnsTrue globalReturnsFalse globalReturnsTrueOrFalse staticReturnsTrue staticReturnsFalse
GLOBAL_CONST_TRUE GLOBAL_CONST_FALSE GLOBAL_CONST_FIVE STATIC_CONST_TRUE STATIC_CONST_FALSE globalTrue
globalFalse globalFive staticTrue staticFalse staticFive goodG2B goodB2G badSink goodG2BSink goodB2GSink
badSource std_testcase testcasesupport AbstractTestCase BenchmarkTest SeparateClassRequest getTheValue
getTheParameter ThingFactory ThingInterface createThing DatabaseHelper separate_request
"""


def test_no_rule_knowledge_or_code_names_a_test_suite_s_helpers() -> None:
    names = re.compile(rf"\b(?:{'|'.join(SUITE_NAMES.split())})|\bCWE\d+_|counts to one")
    root = Path(audit.__file__).parent
    files = [path for path in root.rglob("*") if path.suffix in (".py", ".toml")]
    assert len(files) > 60
    named = {str(path): names.findall(path.read_text(encoding="utf-8")) for path in files}
    assert {path: found for path, found in named.items() if found} == {}


def test_an_endless_loop_is_one_whose_calls_are_known_only_to_print() -> None:
    rules = {
        name: {
            item.rule
            for item in Auditor("c").audit(
                f'void f(void) {{\n    while (1) {{\n        {name}("x");\n    }}\n}}\n'
            )
        }
        for name in ("puts", "printf", "printLine", "serve")
    }
    assert rules["puts"] == rules["printf"] == {"c-endless-loop"}
    assert rules["printLine"] == rules["serve"] == set()


def test_a_loop_of_one_round_is_read_as_any_other_loop() -> None:
    text = """
#include <stdlib.h>
#include <string.h>
void f(const char *text) {
    for (int i = 0; i < %s; i++) {
        char *copy = malloc(strlen(text));
        if (copy == NULL) return;
        strcpy(copy, text);
        free(copy);
    }
}
"""
    one, many = (Auditor("c").audit(text % count) for count in ("1", "count"))
    assert [item.rule for item in one] == [item.rule for item in many]
    assert "c-strlen-allocation" in {item.rule for item in one}
