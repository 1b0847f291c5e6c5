"""What Go's and Java's libraries do to data, followed; fixes that write what a literal lacks."""

from __future__ import annotations

import pytest

from keystroke.analysis.audit import Auditor
from keystroke.text import apply_edits


def rules(language: str, text: str) -> set[str]:
    return {finding.rule for finding in Auditor(language).audit(text)}


GO = """package m
import ("net/http"; "strconv"; "database/sql")
type Box struct { Name string }
func box(name string) *Box {
	b := &Box{}
	b.Name = name
	return b
}
func f(w http.ResponseWriter, r *http.Request, db *sql.DB) {
	BODY
}
"""


@pytest.mark.parametrize(
    ("body", "rule"),
    [
        ('n, _ := strconv.Atoi(r.FormValue("n")); use(int32(n))', "go-number-range"),
        ('n, _ := strconv.ParseInt(r.FormValue("n"), 10, 64); use(int16(n))', "go-number-range"),
        ('n, _ := strconv.Atoi(r.FormValue("n")); use(make([]int, n))', "go-number-range"),
    ],
)
def test_a_number_from_outside_is_found_until_something_compares_it(body: str, rule: str) -> None:
    assert rule in rules("go", GO.replace("BODY", body))
    checked = body.replace("; use", "; if n < 0 || n > 100 { return }; use")
    assert rule not in rules("go", GO.replace("BODY", checked))


def test_a_field_set_in_a_helper_is_foreign_where_the_helper_is_called() -> None:
    body = 'b := box(r.FormValue("n")); db.Query("SELECT * FROM t WHERE n = \'" + b.Name + "\'")'
    assert "go-sql-injection" in rules("go", GO.replace("BODY", body))
    assert "go-sql-injection" not in rules("go", GO.replace("BODY", body.replace('r.FormValue("n")', '"x"')))


def test_a_builder_that_starts_from_data_keeps_it() -> None:
    text = """class A {
  void f(HttpServletRequest request, HttpServletResponse response) throws IOException {
    StringBuilder page = new StringBuilder(request.getParameter("q"));
    page.append(" found");
    response.getWriter().write(page.toString());
  }
}
"""
    assert "java-xss" in rules("java", text)
    assert "java-xss" not in rules("java", text.replace('request.getParameter("q")', '"nothing"'))


@pytest.mark.parametrize(
    ("setting", "safe"),
    [
        ('factory.setFeature("http://apache.org/xml/features/disallow-doctype-decl", true);', True),
        ('factory.setFeature("http://apache.org/xml/features/disallow-doctype-decl", false);', False),
        ('factory.setFeature("http://xml.org/sax/features/external-general-entities", true);', False),
        ("", False),
    ],
)
def test_an_xml_factory_is_judged_by_the_value_of_its_settings(setting: str, safe: bool) -> None:
    text = f"""class A {{
  void f() throws Exception {{
    DocumentBuilderFactory factory = DocumentBuilderFactory.newInstance();
    {setting}
    factory.newDocumentBuilder();
  }}
}}
"""
    assert ("java-xxe" not in rules("java", text)) is safe


def test_a_generator_given_by_the_caller_may_be_a_secure_one() -> None:
    assert "java-weak-random" not in rules("java", "class A { int f(Random r) { return r.nextInt(); } }")
    assert "java-weak-random" in rules(
        "java", "class A { int f() { Random r = new Random(); return r.nextInt(); } }"
    )


def test_a_fix_adds_the_fields_a_literal_lacks() -> None:
    text = 'package m\nimport "net/http"\nvar c = http.Cookie{Name: "a"}\n'
    (finding,) = Auditor("go").audit(text)
    assert finding.rule == "go-insecure-cookie"
    assert '{Name: "a", Secure: true, HttpOnly: true}' in apply_edits(text, finding.suggestions[0].edits)
