"""C's pointers, lifetimes and helpers, followed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from keystroke.analysis.audit import Auditor, LiveAudit
from keystroke.analysis.audit.project import ProjectFacts


def rules(text: str, language: str = "c") -> set[str]:
    return {finding.rule for finding in Auditor(language).audit(text)}


def lines(text: str, rule: str, language: str = "c") -> list[int]:
    found = Auditor(language).audit(text)
    return [text.count("\n", 0, finding.start) + 1 for finding in found if finding.rule == rule]


def test_what_is_read_through_one_pointer_is_foreign_through_its_aliases() -> None:
    text = """
void f(void) {
    char buffer[100] = "";
    char *data = buffer;
    size_t used = strlen(data);
    if (fgets(data + used, 100 - used, stdin) == NULL) return;
    system(buffer);
}
"""
    assert "c-command-injection" in rules(text)
    assert "c-command-injection" not in rules(text.replace("system(buffer)", 'system("/bin/true")'))


def test_a_macro_is_another_name_for_a_function_and_for_a_variable() -> None:
    text = """
#define READ_ENV getenv
#define COMMAND data
#define RUN system
void f(void) {
    char *data = READ_ENV("CMD");
    RUN(COMMAND);
}
"""
    assert "c-command-injection" in rules(text)


@pytest.mark.parametrize("step", ["p - 8", "&p[-8]"])
def test_a_pointer_before_its_buffer_is_found_where_it_is_written_through(step: str) -> None:
    text = f"""
void f(const char *s) {{
    char room[50];
    char *p = room;
    char *q = {step};
    memcpy(q, s, 10);
}}
"""
    assert "c-buffer-overflow" in rules(text)
    assert "c-buffer-overflow" not in rules(text.replace(step, "p + 8"))


def test_an_address_leads_back_to_its_variable() -> None:
    text = """
void f(void) {
    char *data;
    char **where = &data;
    *where = getenv("CMD");
    system(data);
}
"""
    assert "c-command-injection" in rules(text)


HELPERS = """
static void sink(char *command) {
    system(command);
}
static char *source(void) {
    return getenv("CMD");
}
void bad(void) {
    char *data = source();
    sink(data);
}
void good(void) {
    sink("/bin/true");
}
"""


def test_a_helper_is_read_with_what_its_caller_gives_it() -> None:
    text = HELPERS.replace("system(command)", 'printf("%s", command); execl("/bin/x", command, NULL)')
    assert lines(text, "c-command-injection") == [10]


def test_what_a_helper_breaks_by_itself_is_said_there_alone() -> None:
    assert lines(HELPERS, "c-command-injection") == [3]


def test_memory_freed_by_a_helper_is_freed() -> None:
    text = """
static void done(char *p) {
    free(p);
}
void f(void) {
    char *p = malloc(10);
    if (p == NULL) return;
    done(p);
    free(p);
}
"""
    assert lines(text, "c-double-free") == [9]


def test_a_helper_with_many_callers_is_not_read_at_each() -> None:
    calls = "".join(f'void f{n}(void) {{ sink(getenv("A{n}")); }}\n' for n in range(8))
    text = 'static void sink(char *c) {\n    execl("/bin/x", c, NULL);\n}\n' + calls
    assert "c-command-injection" not in rules(text)


def test_only_one_way_of_a_preprocessor_condition_is_taken() -> None:
    text = """
void f(char *p) {
#ifdef LEGACY
    free(p);
#else
    free(p);
#endif
}
"""
    assert "c-double-free" not in rules(text)


def test_a_pointer_set_to_null_after_it_was_freed_may_be_freed_again() -> None:
    text = """
int f(int fail) {
    char *p = malloc(10);
    if (!p) return 1;
    if (fail) { free(p); p = NULL; goto out; }
    use(p);
out:
    free(p);
    return 0;
}
"""
    assert "c-double-free" not in rules(text)


@pytest.mark.parametrize(
    ("body", "leaks"),
    [
        ("char *p = malloc(9); if (!p) return; p[0] = 1;", True),
        ("char *p = malloc(9); if (!p) return; p[0] = 1; free(p);", False),
        ("char *p = malloc(9); if (!p) return; p[0] = 1; keep(p);", False),
        ("char *p = malloc(9); if (!p) return; owner->name = p;", False),
        ("char *p = malloc(9); char *q = malloc(9); if (!p || !q) return; p = q; p[0] = 1; free(p);", True),
        ("char *p; if (x && (p = malloc(9)) != NULL) { p[0] = 1; }", False),
    ],
)
def test_memory_leaks_only_where_no_one_else_can_hold_it(body: str, leaks: bool) -> None:
    text = f"void f(int x, struct s *owner) {{\n    {body}\n}}\n"
    assert ("c-memory-leak" in rules(text)) is leaks


@pytest.mark.parametrize(
    ("body", "unset"),
    [
        ("int n; return n + 1;", True),
        ("int n; fill(&n); return n + 1;", False),
        ("int n; LOAD(); return n + 1;", False),
        ("int n; get_count(n); return n + 1;", False),
        ("int n; if (x) n = 1; return n + 1;", False),
        ("int n; return sizeof(n);", False),
        ("char b[8]; if (x && read_line(b)) return 1; return b[0];", False),
        ("char b[8]; return b[0];", True),
    ],
)
def test_a_variable_is_unset_only_where_nothing_can_have_written_it(body: str, unset: bool) -> None:
    text = f"int f(int x) {{\n    {body}\n}}\n"
    assert ("c-uninitialised" in rules(text)) is unset


def test_editing_helpers_and_callers_key_by_key_equals_auditing_afresh() -> None:
    pick = random.Random(11)
    text = HELPERS + "#define LIMIT 10\nvoid more(void) {\n    char b[LIMIT];\n    b[10] = 0;\n}\n"
    live = LiveAudit("c", text)
    pieces = [
        "x",
        ";",
        "}",
        "{",
        " free(data);",
        "sink(data);",
        "\n",
        "12",
        "static char *g;",
        "#define A b\n",
    ]
    for _ in range(150):
        at = pick.randrange(len(live.text) + 1)
        if pick.random() < 0.5:
            live.edit(at, at, pick.choice(pieces))
        else:
            live.edit(at, min(len(live.text), at + pick.randrange(4)), "")
        assert live.findings == LiveAudit("c", live.text).findings


@pytest.mark.parametrize("step", ["n++", "++n", "n--", "n += 1", "n = n > 0 ? n - 1 : 0"])
def test_a_number_from_outside_may_be_stepped_in_every_way(step: str) -> None:
    text = f'int f(void) {{\n    int n;\n    scanf("%d", &n);\n    {step};\n    return n;\n}}\n'
    assert ("c-integer-overflow" in rules(text)) is ("?" not in step)


def test_macros_of_the_projects_headers_are_other_names_and_numbers(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "cells.h").write_text('#include "names.h"\n#define WIDTH (8) /* cells */\n')
    (tmp_path / "names.h").write_text(
        "#define ON_STACK alloca\n#ifdef WIDE\n#define PAIRS 9\n#else\n#define PAIRS 4\n#endif\n"
    )
    text = """#include "cells.h"
double first(void) {
    double *data = (double *)ON_STACK(10 * sizeof(double));
    return data[0];
}
void fill(void) {
    char cells[WIDTH], pairs[PAIRS];
    cells[7] = 0;
    cells[8] = 0;
    pairs[4] = 0;
}
"""
    found = Auditor("c", project=ProjectFacts(tmp_path)).audit(text)
    assert {(text.count("\n", 0, item.start) + 1, item.rule) for item in found} == {
        (4, "c-uninitialised"),
        (9, "c-buffer-overflow"),  # PAIRS has two values, so pairs[4] may be inside
    }
    assert rules(text) == set()
