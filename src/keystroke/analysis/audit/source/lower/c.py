"""C's and C++'s grammars to the neutral form.

Pointers keep no shape here: `*p` is `p[0]`, `p->x` is `p.x`, `&x` is the operator "&".
"""

from __future__ import annotations

import re

from keystroke.analysis.audit.source.ir import (
    Attr,
    Bind,
    Block,
    Call,
    Cast,
    ClassDef,
    Closure,
    Coll,
    Cond,
    Const,
    Def,
    Do,
    Expr,
    Function,
    If,
    Import,
    Index,
    Jump,
    Label,
    Let,
    Loop,
    Name,
    Op,
    Other,
    Param,
    Return,
    Stmt,
    Switch,
    Syntax,
    Try,
)
from keystroke.analysis.audit.source.lower import Lowering, first, named, number, unescape

_DECLARATORS = (
    "pointer_declarator",
    "array_declarator",
    "reference_declarator",
    "function_declarator",
    "parenthesized_declarator",
)


_ARRAY = re.compile(r"new\s+[\w:<>,\s]+\**\s*\[")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


class CLowering(Lowering):
    inside = 0  # functions around

    def x_identifier(self, node: Syntax) -> Expr:
        return Name(node, node.text())

    x_this = x_field_identifier = x_type_identifier = x_primitive_type = x_namespace_identifier = x_identifier

    def x_qualified_identifier(self, node: Syntax) -> Expr:
        return Name(node, node.text().replace("::", ".").split("<", 1)[0].lstrip("."))

    x_template_function = x_template_type = x_qualified_identifier

    def x_number_literal(self, node: Syntax) -> Expr:
        return Const(node, number(node.text()))

    def x_true(self, node: Syntax) -> Expr:
        return Const(node, True)

    def x_false(self, node: Syntax) -> Expr:
        return Const(node, False)

    def x_null(self, node: Syntax) -> Expr:
        return Const(node, None)

    def x_string_literal(self, node: Syntax) -> Expr:
        text = node.text()
        return Const(node, unescape(text[text.find('"') + 1 : -1]))

    def x_raw_string_literal(self, node: Syntax) -> Expr:
        content = first(node, "raw_string_content")
        return Const(node, content.text() if content is not None else "")

    def x_char_literal(self, node: Syntax) -> Expr:
        text = node.text()
        inner = unescape(text[text.find("'") + 1 : -1])
        return Const(node, ord(inner) if len(inner) == 1 else None)

    def x_concatenated_string(self, node: Syntax) -> Expr:
        parts = [self.expr(child) for child in named(node)]
        return Const(node, "".join(str(part.value) if isinstance(part, Const) else "%s" for part in parts))

    def x_field_expression(self, node: Syntax) -> Expr:
        return Attr(node, self.expr(node.field("argument")), node.field("field").text())

    def x_subscript_expression(self, node: Syntax) -> Expr:
        key = node.field("index") or node.field("indices")
        if key is not None and key.kind() == "subscript_argument_list":
            inner = named(key)
            key = inner[0] if inner else None
        return Index(
            node, self.expr(node.field("argument")), self.expr(key) if key is not None else Other(node, [])
        )

    def x_pointer_expression(self, node: Syntax) -> Expr:
        inner = self.expr(node.field("argument"))
        if node.field("operator").text() == "&":
            return Op(node, "&", [inner])
        return Index(node, inner, Const(node, 0))

    def x_call_expression(self, node: Syntax) -> Expr:
        arguments = node.field("arguments")
        args = [self.expr(child) for child in named(arguments)] if arguments is not None else []
        callee = node.field("function")
        if callee.kind() == "template_function":
            name = callee.field("name")
            if name is not None and name.text().endswith("_cast") and args:
                return Cast(node, callee.text(), args[0])
        return Call(node, self.expr(callee), args)

    def x_new_expression(self, node: Syntax) -> Expr:
        count = first(node, "new_declarator")
        if count is None and _ARRAY.match(node.text()):
            return Call(node, Name(node, "new[]"), [Other(node, []), Const(node, "?")], {}, True)
        if count is not None:
            inner = named(count)
            size = self.expr(inner[0]) if inner else Other(node, [])
            return Call(node, Name(node, "new[]"), [size, Const(node, node.field("type").text())], {}, True)
        arguments = node.field("arguments")
        args = [self.expr(child) for child in named(arguments)] if arguments is not None else []
        told: dict[str, Expr] = {"type": Const(node, node.field("type").text())}
        placement = node.field("placement")
        inner = named(placement) if placement is not None else []
        if inner:
            told["place"] = self.expr(inner[0])
        return Call(node, Name(node, "new"), args, told, True)

    def x_delete_expression(self, node: Syntax) -> Expr:
        inner = named(node)
        array = any(child.text() == "[" for child in node.children() if not child.is_named())
        return Call(
            node, Name(node, "delete[]" if array else "delete"), [self.expr(inner[0])] if inner else []
        )

    def x_binary_expression(self, node: Syntax) -> Expr:
        if (
            node.field("left").kind() == "new_expression"
            and node.field("right").kind() == "lambda_expression"
        ):
            # `new T*[n]` reads like a product with a lambda
            return Call(node, Name(node, "new[]"), [Other(node, []), Const(node, "?")], {}, True)
        return Op(
            node,
            node.field("operator").text(),
            [self.expr(node.field("left")), self.expr(node.field("right"))],
        )

    def x_unary_expression(self, node: Syntax) -> Expr:
        return Op(node, node.field("operator").text(), [self.expr(node.field("argument"))])

    def x_update_expression(self, node: Syntax) -> Expr:
        op = node.field("operator")
        return Bind(
            node,
            self.expr(node.field("argument")),
            Const(node, 1),
            "-" if op is not None and op.text() == "--" else "+",
        )

    def x_parenthesized_expression(self, node: Syntax) -> Expr:
        inner = named(node)
        return self.expr(inner[0]) if inner else Other(node, [])

    x_condition_clause = x_parenthesized_expression

    def x_cast_expression(self, node: Syntax) -> Expr:
        return Cast(node, node.field("type").text(), self.expr(node.field("value")))

    def x_sizeof_expression(self, node: Syntax) -> Expr:
        type_, value = node.field("type"), node.field("value")
        if type_ is not None:
            return Call(node, Name(node, "sizeof"), [Const(node, type_.text())], {"type": Const(node, True)})
        return Call(node, Name(node, "sizeof"), [self.expr(value)] if value is not None else [])

    def x_conditional_expression(self, node: Syntax) -> Expr:
        then = node.field("consequence")
        test = self.expr(node.field("condition"))
        return Cond(
            node, test, self.expr(then) if then is not None else test, self.expr(node.field("alternative"))
        )

    def x_assignment_expression(self, node: Syntax) -> Expr:
        op = node.field("operator").text().rstrip("=")
        return Bind(node, self.expr(node.field("left")), self.expr(node.field("right")), op)

    def x_initializer_list(self, node: Syntax) -> Expr:
        return Coll(node, [self.expr(child) for child in named(node)])

    def x_lambda_expression(self, node: Syntax) -> Expr:
        body = node.field("body")
        declarator = node.field("declarator")
        params = self.params(declarator.field("parameters")) if declarator is not None else []
        return Closure(node, Function(node, "", params, self.body(body) if body is not None else []))

    # Statements

    def s_translation_unit(self, node: Syntax) -> list[Stmt]:
        return self.body(node)

    s_declaration_list = s_linkage_specification = s_translation_unit
    s_preproc_else = s_preproc_elif = s_template_declaration = s_translation_unit

    def s_preproc_if(self, node: Syntax) -> list[Stmt]:
        other = node.field("alternative")
        if not self.inside or other is None:  # outside functions the last definition of a name counts
            return self.body(node)
        skip = {
            part.range().start.index for part in (other, node.field("condition"), node.field("name")) if part
        }
        then = [
            stmt
            for child in named(node)
            if child.range().start.index not in skip
            for stmt in self.stmt(child)
        ]
        return [If(node, Other(node, []), then, self.stmt(other))]

    s_preproc_ifdef = s_preproc_if

    def s_namespace_definition(self, node: Syntax) -> list[Stmt]:
        return self.body(node.field("body"))

    def s_preproc_include(self, node: Syntax) -> list[Stmt]:
        path = node.field("path")
        return [Import(node, "#include", path.text().strip('<>"'))] if path is not None else []

    def s_preproc_def(self, node: Syntax) -> list[Stmt]:
        name, value = node.field("name"), node.field("value")
        if name is None or value is None:
            return []
        text = value.text().strip()
        if text.startswith(('"', 'L"')):
            text = text.removeprefix("L")
            return [Let(node, name.text(), Const(node, unescape(text[1:].split('"', 1)[0])), "define")]
        if _IDENTIFIER.fullmatch(text) and text != name.text():  # another name for a function or a constant
            return [Let(node, name.text(), Name(node, text), "define")]
        plain = number(text.strip("()"))
        return [Let(node, name.text(), Const(node, plain), "define")] if plain is not None else []

    def s_preproc_call(self, node: Syntax) -> list[Stmt]:
        return []

    s_preproc_function_def = s_type_definition = s_using_declaration = s_struct_specifier = s_preproc_call
    s_union_specifier = s_enum_specifier = s_type_identifier = s_identifier = s_access_specifier = (
        s_preproc_call
    )

    def s_class_specifier(self, node: Syntax) -> list[Stmt]:
        name, body = node.field("name"), node.field("body")
        return [ClassDef(node, name.text() if name is not None else "", [], self.body(body), [])]

    def s_compound_statement(self, node: Syntax) -> list[Stmt]:
        return [Block(node, self.body(node))]

    def s_expression_statement(self, node: Syntax) -> list[Stmt]:
        return [Do(node, self.expr(child)) for child in named(node)]

    def s_declaration(self, node: Syntax) -> list[Stmt]:
        type_ = node.field("type")
        base = type_.text() if type_ is not None else ""
        static = any(
            child.kind() == "storage_class_specifier" and child.text() == "static"
            for child in node.children()
        )
        out: list[Stmt] = []
        for child in node.field_children("declarator"):
            value = child.field("value") if child.kind() == "init_declarator" else None
            inner = child.field("declarator") if child.kind() == "init_declarator" else child
            name, pointer, size, function = self.declared(inner)
            given = self.given(child) if function and value is None else None
            if given is not None:
                made = Call(child, Name(child, base.replace("::", ".").split("<", 1)[0]), given, {}, True)
                out.append(Let(child, name, made, base))
            elif name and (not function or value is not None):  # a pointer to a function is a variable
                lowered = self.expr(value) if value is not None else None
                if value is not None and value.kind() == "argument_list":
                    lowered = Call(
                        value,
                        Name(value, base.replace("::", ".").split("<", 1)[0]),
                        [self.expr(part) for part in named(value)],
                        {},
                        True,
                    )
                out.append(Let(child, name, lowered, base, size, pointer, static))
        return out

    s_field_declaration = s_declaration

    def given(self, node: Syntax) -> list[Expr] | None:
        """The arguments of `T x(a);` in a function, which reads like a declaration of a function."""
        parameters = node.field("parameters") if self.inside else None
        parts = [named(child) for child in named(parameters)] if parameters is not None else []
        if not parts or any(len(part) != 1 or part[0].kind() != "type_identifier" for part in parts):
            return None
        return [Name(part[0], part[0].text()) for part in parts]

    def declared(self, node: Syntax | None) -> tuple[str, bool, Expr | None, bool]:
        """(name, is a pointer, array size, is a function) of a declarator."""
        pointer, function = False, False
        size: Expr | None = None
        while node is not None and node.kind() in _DECLARATORS:
            kind = node.kind()
            if kind == "pointer_declarator":
                pointer = True
            elif kind == "array_declarator":
                extent = node.field("size")
                count = self.expr(extent) if extent is not None else Other(node, [])
                size = count if size is None else Op(node, "*", [count, size])
            elif kind == "function_declarator":
                function = True
            inner = node.field("declarator")
            if inner is None:
                parts = named(node)
                inner = parts[-1] if parts else None
            node = inner
        return (node.text() if node is not None else "", pointer, size, function)

    def s_if_statement(self, node: Syntax) -> list[Stmt]:
        other = node.field("alternative")
        return [
            If(
                node,
                self.expr(node.field("condition")),
                self.block(node.field("consequence")),
                self.body(other) if other is not None else [],
            )
        ]

    def s_while_statement(self, node: Syntax) -> list[Stmt]:
        return [Loop(node, [], self.expr(node.field("condition")), [], self.block(node.field("body")))]

    def s_do_statement(self, node: Syntax) -> list[Stmt]:
        test = node.field("condition")
        # Its body runs at least once; a switch with one way catches the breaks in it.
        once = Switch(node, Const(node, True), [([], self.block(node.field("body")))])
        return [once, Do(node, self.expr(test))] if test is not None else [once]

    def s_for_statement(self, node: Syntax) -> list[Stmt]:
        init, test, step = node.field("initializer"), node.field("condition"), node.field("update")
        return [
            Loop(
                node,
                self.block(init),
                self.expr(test) if test is not None else None,
                [Do(step, self.expr(step))] if step is not None else [],
                self.block(node.field("body")),
            )
        ]

    def s_for_range_loop(self, node: Syntax) -> list[Stmt]:
        name, _, _, _ = self.declared(node.field("declarator"))
        right = node.field("right")
        if right is None:
            return self.body(node)
        return [Loop(node, [], None, [], self.block(node.field("body")), Name(node, name), self.expr(right))]

    def s_switch_statement(self, node: Syntax) -> list[Stmt]:
        cases: list[tuple[list[Expr], list[Stmt]]] = []
        body = node.field("body")
        for child in named(body) if body is not None else []:
            if child.kind() != "case_statement":
                continue
            label = child.field("value")
            parts = named(child)
            stmts = [stmt for part in (parts[1:] if label is not None else parts) for stmt in self.stmt(part)]
            cases.append(([self.expr(label)] if label is not None else [], stmts))
        return [Switch(node, self.expr(node.field("condition")), cases)]

    def s_return_statement(self, node: Syntax) -> list[Stmt]:
        inner = named(node)
        return [Return(node, self.expr(inner[0]) if inner else None)]

    def s_goto_statement(self, node: Syntax) -> list[Stmt]:
        label = node.field("label")
        return [Jump(node, "goto", Name(node, label.text()) if label is not None else None)]

    def s_throw_statement(self, node: Syntax) -> list[Stmt]:
        return [Jump(node, "raise", self.other(node))]

    def s_break_statement(self, node: Syntax) -> list[Stmt]:
        return [Jump(node, "break")]

    def s_continue_statement(self, node: Syntax) -> list[Stmt]:
        return [Jump(node, "continue")]

    def s_labeled_statement(self, node: Syntax) -> list[Stmt]:
        label = node.field("label")
        rest = [stmt for child in named(node)[1:] for stmt in self.stmt(child)]
        return [Label(node, label.text() if label is not None else ""), *rest]

    def s_try_statement(self, node: Syntax) -> list[Stmt]:
        handlers = [
            self.block(child.field("body")) for child in named(node) if child.kind() == "catch_clause"
        ]
        return [Try(node, self.block(node.field("body")), handlers, [])]

    def s_function_definition(self, node: Syntax) -> list[Stmt]:
        returns = node.field("type")
        declarator = node.field("declarator")
        while declarator is not None and declarator.kind() in ("pointer_declarator", "reference_declarator"):
            declarator = declarator.field("declarator") or (
                named(declarator)[-1] if named(declarator) else None
            )
        if declarator is None or declarator.kind() != "function_declarator":
            return self.block(node.field("body"))
        name = declarator.field("declarator")
        self.inside += 1
        body = self.body(node.field("body"))
        self.inside -= 1
        return [
            Def(
                node,
                Function(
                    node,
                    name.text() if name is not None else "",
                    self.params(declarator.field("parameters")),
                    body,
                    [],
                    returns.text() if returns is not None else "",
                ),
            )
        ]

    def params(self, node: Syntax | None) -> list[Param]:
        out: list[Param] = []
        for child in named(node) if node is not None else []:
            type_ = child.field("type")
            name, pointer, size, _ = self.declared(child.field("declarator"))
            base = type_.text() if type_ is not None else ""
            if name:
                mark = "&" if "&" in child.field("declarator").text() else ""
                out.append(Param(name, base + ("*" if pointer or size is not None else "") + mark))
        return out
