"""Names of JavaScript: scopes decide which declarations are visible."""

from __future__ import annotations

import pytest

from keystroke.analysis.check.javascript_names import javascript_names


@pytest.mark.parametrize(
    ("language", "text", "free"),
    [
        (
            "javascript",
            "function f(a, {b, c: d = 1}, [e], ...r) { return a + b + d + e + r.length + c; }",
            {"c"},
        ),
        ("javascript", "function g() { let inner = 2; }\nfunction loose() { return inner; }", {"inner"}),
        ("javascript", "f(); function f() { if (1) { var late = 1; } return late; }", set()),
        ("javascript", "{ const x = 1; }\nconsole.log(x, typeof window, typeof nothing);", {"x"}),
        ("javascript", "for (const k of [1]) { k; }\ntry {} catch ({ message }) { message; }\nk;", {"k"}),
        ("javascript", "const o = { a: 1, b() { return this.a; }, short };\no.nothing.here;", {"short"}),
        ("javascript", "export { a as b, c } from './x';\nexport { d };", {"d"}),
        ("typescript", "import a, { b as c, type T } from 'x';\nconst y: T = a + c + b;", {"b"}),
        (
            "typescript",
            "enum E { A, B = 1 }\nnamespace N { export const z = 1; }\nlet t = E.A as Q; N.z;",
            set(),
        ),
        (
            "typescript",
            "abstract class A<T> { constructor(private x: T) {} m(q?: Foo): Bar { return q; } }",
            set(),
        ),
        ("tsx", "const C = (p: P) => <div id={p.c}><Foo.Bar x={u} /><Baz /></div>;", {"u", "Foo", "Baz"}),
        ("javascript", "/* global shop, cart */\nshop(cart, other);", {"other"}),
    ],
)
def test_names_without_a_visible_declaration_are_free(language: str, text: str, free: set[str]) -> None:
    assert javascript_names(text, language).free == free


def test_declarations_of_one_scope_are_counted() -> None:
    text = (
        "var y = 1;\nvar y = 2;\nlet z = 1;\nfunction f() { let z = 2; for (var i;;) {} for (var i;;) {} }\n"
    )
    assert javascript_names(text, "javascript").twice == {"y": 2}
