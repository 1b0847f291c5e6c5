"""Java's grammar to the neutral form. Types are known by their simple names."""

from __future__ import annotations

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


class JavaLowering(Lowering):
    def x_identifier(self, node: Syntax) -> Expr:
        return Name(node, node.text())

    x_this = x_super = x_identifier

    def x_type_identifier(self, node: Syntax) -> Expr:
        return Name(node, simple(node))

    x_scoped_type_identifier = x_generic_type = x_type_identifier

    def x_scoped_identifier(self, node: Syntax) -> Expr:
        scope, name = node.field("scope"), node.field("name")
        return (
            Attr(node, self.expr(scope), name.text())
            if scope is not None and name is not None
            else Name(node, node.text())
        )

    def x_decimal_integer_literal(self, node: Syntax) -> Expr:
        return Const(node, number(node.text()))

    x_hex_integer_literal = x_octal_integer_literal = x_decimal_floating_point_literal = (
        x_decimal_integer_literal
    )

    def x_true(self, node: Syntax) -> Expr:
        return Const(node, True)

    def x_false(self, node: Syntax) -> Expr:
        return Const(node, False)

    def x_null_literal(self, node: Syntax) -> Expr:
        return Const(node, None)

    def x_string_literal(self, node: Syntax) -> Expr:
        text = node.text()
        return Const(node, text[3:-3] if text.startswith('"""') else unescape(text[1:-1]))

    x_character_literal = x_string_literal

    def x_field_access(self, node: Syntax) -> Expr:
        return Attr(node, self.expr(node.field("object")), node.field("field").text())

    def x_array_access(self, node: Syntax) -> Expr:
        return Index(node, self.expr(node.field("array")), self.expr(node.field("index")))

    def x_method_invocation(self, node: Syntax) -> Expr:
        owner, name = node.field("object"), node.field("name").text()
        func: Expr = Name(node, name) if owner is None else Attr(node, self.expr(owner), name)
        return Call(node, func, self.arguments(node))

    def x_explicit_constructor_invocation(self, node: Syntax) -> Expr:
        return Call(node, Name(node, "super"), self.arguments(node))

    def x_object_creation_expression(self, node: Syntax) -> Expr:
        type_ = node.field("type")
        call = Call(node, Name(node, simple(type_)), self.arguments(node), {}, True)
        body = first(node, "class_body")
        if body is not None:
            return Other(node, [call, Closure(body, Function(body, "", [], self.class_body(body)))])
        return call

    def arguments(self, node: Syntax) -> list[Expr]:
        arguments = node.field("arguments") or first(node, "argument_list")
        return [self.expr(child) for child in named(arguments)] if arguments is not None else []

    def x_array_creation_expression(self, node: Syntax) -> Expr:
        value = node.field("value")
        return (
            self.expr(value) if value is not None else Coll(node, [], None, simple(node.field("type")) + "[]")
        )

    def x_array_initializer(self, node: Syntax) -> Expr:
        return Coll(node, [self.expr(child) for child in named(node)])

    x_element_value_array_initializer = x_array_initializer

    def x_binary_expression(self, node: Syntax) -> Expr:
        op = node.field("operator").text()
        if op == "+":
            return self.sum(node)
        return Op(node, op, [self.expr(node.field("left")), self.expr(node.field("right"))])

    def x_unary_expression(self, node: Syntax) -> Expr:
        return Op(node, node.field("operator").text(), [self.expr(node.field("operand"))])

    def x_update_expression(self, node: Syntax) -> Expr:
        inner = named(node)
        return Bind(node, self.expr(inner[0]), Const(node, 1), "+") if inner else Other(node, [])

    def x_parenthesized_expression(self, node: Syntax) -> Expr:
        inner = named(node)
        return self.expr(inner[0]) if inner else Other(node, [])

    def x_cast_expression(self, node: Syntax) -> Expr:
        return Cast(node, simple(node.field("type")), self.expr(node.field("value")))

    def x_ternary_expression(self, node: Syntax) -> Expr:
        return Cond(
            node,
            self.expr(node.field("condition")),
            self.expr(node.field("consequence")),
            self.expr(node.field("alternative")),
        )

    def x_assignment_expression(self, node: Syntax) -> Expr:
        op = node.field("operator").text().rstrip("=")
        return Bind(node, self.expr(node.field("left")), self.expr(node.field("right")), op)

    def x_lambda_expression(self, node: Syntax) -> Expr:
        params, body = node.field("parameters"), node.field("body")
        names: list[Param] = []
        if params is not None:
            if params.kind() == "identifier":
                names = [Param(params.text())]
            elif params.kind() == "inferred_parameters":
                names = [Param(child.text()) for child in named(params)]
            else:
                names = self.params(params)
        stmts: list[Stmt] = []
        if body is not None:
            stmts = self.body(body) if body.kind() == "block" else [Return(body, self.expr(body))]
        return Closure(node, Function(node, "", names, stmts))

    def x_class_literal(self, node: Syntax) -> Expr:
        return Const(node, node.text())

    def x_switch_expression(self, node: Syntax) -> Expr:
        return Closure(node, Function(node, "", [], self.s_switch_expression(node)))

    # Statements

    def s_program(self, node: Syntax) -> list[Stmt]:
        return self.body(node)

    def s_block(self, node: Syntax) -> list[Stmt]:
        return [Block(node, self.body(node))]

    s_constructor_body = s_synchronized_statement = s_static_initializer = s_block

    def s_expression_statement(self, node: Syntax) -> list[Stmt]:
        inner = named(node)
        if inner and inner[0].kind() == "switch_expression":
            return self.s_switch_expression(inner[0])
        return [Do(node, self.expr(child)) for child in inner]

    def s_import_declaration(self, node: Syntax) -> list[Stmt]:
        inner = named(node)
        if not inner or first(node, "asterisk") is not None:
            return [Import(node, "*", inner[0].text())] if inner else []
        path = inner[0].text()
        return [Import(node, path.rsplit(".", 1)[-1], path)]

    def s_package_declaration(self, node: Syntax) -> list[Stmt]:
        return []

    def s_local_variable_declaration(self, node: Syntax) -> list[Stmt]:
        type_ = simple(node.field("type"))
        modifiers = first(node, "modifiers")
        static = modifiers is not None and "static" in modifiers.text()
        out: list[Stmt] = []
        for child in node.field_children("declarator"):
            if child.kind() != "variable_declarator":
                continue
            value = child.field("value")
            out.append(
                Let(
                    child,
                    child.field("name").text(),
                    self.expr(value) if value is not None else None,
                    type_,
                    static=static,
                )
            )
        return out

    s_field_declaration = s_local_variable_declaration

    def s_if_statement(self, node: Syntax) -> list[Stmt]:
        return [
            If(
                node,
                self.expr(node.field("condition")),
                self.block(node.field("consequence")),
                self.block(node.field("alternative")),
            )
        ]

    def s_while_statement(self, node: Syntax) -> list[Stmt]:
        return [Loop(node, [], self.expr(node.field("condition")), [], self.block(node.field("body")))]

    s_do_statement = s_while_statement

    def s_for_statement(self, node: Syntax) -> list[Stmt]:
        init, test, step = node.field("init"), node.field("condition"), node.field("update")
        return [
            Loop(
                node,
                self.block(init),
                self.expr(test) if test is not None else None,
                [Do(step, self.expr(step))] if step is not None else [],
                self.block(node.field("body")),
            )
        ]

    def s_enhanced_for_statement(self, node: Syntax) -> list[Stmt]:
        name, value = node.field("name"), node.field("value")
        if name is None or value is None:
            return self.body(node)
        return [Loop(node, [], None, [], self.block(node.field("body")), self.expr(name), self.expr(value))]

    def s_try_statement(self, node: Syntax) -> list[Stmt]:
        before: list[Stmt] = []
        resources = node.field("resources")
        for child in named(resources) if resources is not None else []:
            name, value = child.field("name"), child.field("value")
            if name is not None and value is not None:
                before.append(Let(child, name.text(), self.expr(value), simple(child.field("type"))))
        handlers: list[list[Stmt]] = []
        final: list[Stmt] = []
        for child in named(node):
            if child.kind() == "catch_clause":
                handlers.append(self.block(child.field("body")))
            elif child.kind() == "finally_clause":
                final = self.body(child)
        return [*before, Try(node, self.block(node.field("body")), handlers, final)]

    s_try_with_resources_statement = s_try_statement

    def s_switch_expression(self, node: Syntax) -> list[Stmt]:
        cases: list[tuple[list[Expr], list[Stmt]]] = []
        body = node.field("body")
        for group in named(body) if body is not None else []:
            labels: list[Expr] = []
            stmts: list[Stmt] = []
            for child in named(group):
                if child.kind() == "switch_label":
                    labels.extend(self.expr(part) for part in named(child))
                else:
                    stmts.extend(self.stmt(child))
            if group.kind() == "switch_rule":
                stmts.append(Jump(group, "break"))
            cases.append((labels, stmts))
        return [Switch(node, self.expr(node.field("condition")), cases)]

    s_switch_statement = s_switch_expression

    def s_return_statement(self, node: Syntax) -> list[Stmt]:
        inner = named(node)
        return [Return(node, self.expr(inner[0]) if inner else None)]

    def s_throw_statement(self, node: Syntax) -> list[Stmt]:
        return [Jump(node, "raise", self.other(node))]

    def s_break_statement(self, node: Syntax) -> list[Stmt]:
        return [Jump(node, "break")]

    def s_continue_statement(self, node: Syntax) -> list[Stmt]:
        return [Jump(node, "continue")]

    def s_class_declaration(self, node: Syntax) -> list[Stmt]:
        name, body = node.field("name"), node.field("body")
        parents = [part for part in (node.field("superclass"), node.field("interfaces")) if part is not None]
        return [
            ClassDef(
                node,
                name.text() if name is not None else "",
                [parent.text() for parent in parents],
                self.class_body(body) if body is not None else [],
                self.marks(node),
            )
        ]

    s_interface_declaration = s_enum_declaration = s_record_declaration = s_class_declaration

    def class_body(self, node: Syntax) -> list[Stmt]:
        return self.body(node)

    def s_method_declaration(self, node: Syntax) -> list[Stmt]:
        name, body, returns = node.field("name"), node.field("body"), node.field("type")
        return [
            Def(
                node,
                Function(
                    node,
                    name.text() if name is not None else "",
                    self.params(node.field("parameters")),
                    self.body(body) if body is not None else [],
                    self.marks(node),
                    returns.text() if returns is not None else "",
                ),
            )
        ]

    s_constructor_declaration = s_method_declaration

    def marks(self, node: Syntax) -> list[Expr]:
        modifiers = first(node, "modifiers")
        out: list[Expr] = []
        for child in named(modifiers) if modifiers is not None else []:
            if child.kind() not in ("annotation", "marker_annotation"):
                continue
            args: list[Expr] = []
            kwargs: dict[str, Expr] = {}
            arguments = child.field("arguments")
            for part in named(arguments) if arguments is not None else []:
                if part.kind() == "element_value_pair":
                    kwargs[part.field("key").text()] = self.expr(part.field("value"))
                else:
                    args.append(self.expr(part))
            out.append(Call(child, Name(child, child.field("name").text()), args, kwargs))
        return out

    def params(self, node: Syntax | None) -> list[Param]:
        out: list[Param] = []
        for child in named(node) if node is not None else []:
            if child.kind() not in ("formal_parameter", "spread_parameter"):
                continue
            name = child.field("name")
            if name is None:
                declarator = first(child, "variable_declarator")
                name = declarator.field("name") if declarator is not None else None
            type_ = child.field("type") or (named(child)[0] if named(child) else None)
            marks = tuple(
                mark.func.id
                for mark in self.marks(child)
                if isinstance(mark, Call) and isinstance(mark.func, Name)
            )
            if name is not None:
                out.append(Param(name.text(), simple(type_), marks))
        return out


def simple(node: Syntax | None) -> str:
    """`java.util.Map<String, X>` is `Map`."""
    if node is None:
        return ""
    return str(node.text()).split("<", 1)[0].rsplit(".", 1)[-1].strip()


__all__ = ["JavaLowering", "simple"]
