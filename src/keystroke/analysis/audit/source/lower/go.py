"""Go's grammar to the neutral form."""

from __future__ import annotations

from keystroke.analysis.audit.source.ir import (
    Attr,
    Bind,
    Block,
    Call,
    Cast,
    Closure,
    Coll,
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
)
from keystroke.analysis.audit.source.lower import Lowering, first, named, number, unescape


class GoLowering(Lowering):
    def x_identifier(self, node: Syntax) -> Expr:
        return Name(node, node.text())

    x_field_identifier = x_type_identifier = x_package_identifier = x_identifier

    def x_int_literal(self, node: Syntax) -> Expr:
        return Const(node, number(node.text()))

    x_float_literal = x_int_literal

    def x_true(self, node: Syntax) -> Expr:
        return Const(node, True)

    def x_false(self, node: Syntax) -> Expr:
        return Const(node, False)

    def x_nil(self, node: Syntax) -> Expr:
        return Const(node, None)

    def x_interpreted_string_literal(self, node: Syntax) -> Expr:
        return Const(node, unescape(node.text()[1:-1]))

    def x_raw_string_literal(self, node: Syntax) -> Expr:
        return Const(node, node.text()[1:-1])

    def x_rune_literal(self, node: Syntax) -> Expr:
        return Const(node, unescape(node.text()[1:-1]))

    def x_selector_expression(self, node: Syntax) -> Expr:
        return Attr(node, self.expr(node.field("operand")), node.field("field").text())

    def x_index_expression(self, node: Syntax) -> Expr:
        return Index(node, self.expr(node.field("operand")), self.expr(node.field("index")))

    def x_slice_expression(self, node: Syntax) -> Expr:
        return Index(node, self.expr(node.field("operand")), Other(node, []))

    def x_call_expression(self, node: Syntax) -> Expr:
        arguments = node.field("arguments")
        args = [self.expr(child) for child in named(arguments)] if arguments is not None else []
        return Call(node, self.expr(node.field("function")), args)

    def x_type_conversion_expression(self, node: Syntax) -> Expr:
        return Cast(node, node.field("type").text(), self.expr(node.field("operand")))

    def x_type_assertion_expression(self, node: Syntax) -> Expr:
        return self.expr(node.field("operand"))

    def x_binary_expression(self, node: Syntax) -> Expr:
        op = node.field("operator").text()
        if op == "+":
            return self.sum(node)
        return Op(node, op, [self.expr(node.field("left")), self.expr(node.field("right"))])

    def x_unary_expression(self, node: Syntax) -> Expr:
        op = node.field("operator").text()
        inner = self.expr(node.field("operand"))
        return inner if op in ("&", "*") else Op(node, op, [inner])

    def x_parenthesized_expression(self, node: Syntax) -> Expr:
        inner = named(node)
        return self.expr(inner[0]) if inner else Other(node, [])

    x_variadic_argument = x_literal_element = x_parenthesized_expression

    def x_composite_literal(self, node: Syntax) -> Expr:
        body, type_ = node.field("body"), node.field("type")
        keys: list[Expr] = []
        items: list[Expr] = []
        for child in named(body) if body is not None else []:
            if child.kind() == "keyed_element":
                parts = named(child)
                key = self.expr(parts[0])
                keys.append(Const(key.node, key.id) if isinstance(key, Name) else key)
                items.append(self.expr(parts[-1]))
            else:
                items.append(self.expr(child))
        name = type_.text() if type_ is not None else ""
        return Coll(node, items, keys if keys and len(keys) == len(items) else None, name)

    def x_literal_value(self, node: Syntax) -> Expr:
        return Coll(node, [self.expr(child) for child in named(node)])

    def x_func_literal(self, node: Syntax) -> Expr:
        return Closure(node, self.function(node))

    def x_expression_list(self, node: Syntax) -> Expr:
        parts = [self.expr(child) for child in named(node)]
        return parts[0] if len(parts) == 1 else Coll(node, parts)

    # Statements

    def s_source_file(self, node: Syntax) -> list[Stmt]:
        return self.body(node)

    s_statement_list = s_source_file

    def s_block(self, node: Syntax) -> list[Stmt]:
        return [Block(node, self.body(node))]

    def s_expression_statement(self, node: Syntax) -> list[Stmt]:
        return [Do(node, self.expr(child)) for child in named(node)]

    def s_package_clause(self, node: Syntax) -> list[Stmt]:
        return []

    s_type_declaration = s_package_clause

    def s_import_declaration(self, node: Syntax) -> list[Stmt]:
        specs = [child for child in named(node) if child.kind() == "import_spec"]
        group = first(node, "import_spec_list")
        if group is not None:
            specs += [child for child in named(group) if child.kind() == "import_spec"]
        out: list[Stmt] = []
        for spec in specs:
            path, alias = spec.field("path"), spec.field("name")
            if path is None:
                continue
            full = path.text()[1:-1]
            last = full.rsplit("/", 1)[-1]
            if last.startswith("v") and last[1:].isdigit() and "/" in full:
                last = full.rsplit("/", 2)[-2]
            out.append(Import(spec, alias.text() if alias is not None else last.removeprefix("go-"), full))
        return out

    def s_var_declaration(self, node: Syntax) -> list[Stmt]:
        out: list[Stmt] = []
        specs = [child for child in named(node) if child.kind() in ("var_spec", "const_spec")]
        for group in named(node):
            if group.kind() == "var_spec_list":
                specs += [child for child in named(group) if child.kind() == "var_spec"]
        for spec in specs:
            names, value, type_ = spec.field_children("name"), spec.field("value"), spec.field("type")
            values = [self.expr(child) for child in named(value)] if value is not None else []
            kind = type_.text() if type_ is not None else ""
            for at, name in enumerate(child for child in names if child.is_named()):
                lowered = (
                    values[at]
                    if at < len(values)
                    else (Index(spec, values[0], Const(spec, at)) if values else None)
                )
                out.append(Let(spec, name.text(), lowered, kind))
        return out

    s_const_declaration = s_var_declaration

    def s_short_var_declaration(self, node: Syntax) -> list[Stmt]:
        left, right = node.field("left"), node.field("right")
        if left is None or right is None:
            return self.body(node)
        operator = node.field("operator")
        op = operator.text().rstrip("=:") if operator is not None else ""
        targets, values = named(left), named(right)
        if len(targets) == len(values):
            return [
                Do(node, Bind(node, self.expr(target), self.expr(value), op))
                for target, value in zip(targets, values, strict=True)
            ]
        return [Do(node, Bind(node, Coll(left, [self.expr(target) for target in targets]), self.expr(right)))]

    s_assignment_statement = s_short_var_declaration

    def s_inc_statement(self, node: Syntax) -> list[Stmt]:
        inner = named(node)
        return [Do(node, Bind(node, self.expr(inner[0]), Const(node, 1), "+"))] if inner else []

    s_dec_statement = s_inc_statement

    def s_if_statement(self, node: Syntax) -> list[Stmt]:
        init, other = node.field("initializer"), node.field("alternative")
        test = node.field("condition")
        return [
            *self.block(init),
            If(
                node,
                self.expr(test) if test is not None else Other(node, []),
                self.block(node.field("consequence")),
                self.block(other),
            ),
        ]

    def s_for_statement(self, node: Syntax) -> list[Stmt]:
        body = self.block(node.field("body"))
        for child in named(node):
            if child.kind() == "for_clause":
                test = child.field("condition")
                return [
                    Loop(
                        node,
                        self.block(child.field("initializer")),
                        self.expr(test) if test is not None else None,
                        self.block(child.field("update")),
                        body,
                    )
                ]
            if child.kind() == "range_clause":
                left, right = child.field("left"), child.field("right")
                if right is None:
                    break
                target: Expr | None = None
                if left is not None:
                    names = named(left)
                    target = self.expr(names[-1]) if names else None
                return [Loop(node, [], None, [], body, target, self.expr(right))]
        return [Loop(node, [], None, [], body)]

    def s_expression_switch_statement(self, node: Syntax) -> list[Stmt]:
        value = node.field("value")
        cases: list[tuple[list[Expr], list[Stmt]]] = []
        for child in named(node):
            if child.kind() in ("expression_case", "type_case", "default_case", "communication_case"):
                label = child.field("value")
                stmts = [
                    stmt
                    for part in named(child)
                    if part.kind() == "statement_list"
                    for stmt in self.body(part)
                ]
                cases.append(
                    (
                        [self.expr(part) for part in named(label)] if label is not None else [],
                        [*stmts, Jump(child, "break")],
                    )
                )
        return [
            *self.block(node.field("initializer")),
            Switch(node, self.expr(value) if value is not None else Const(node, True), cases),
        ]

    s_type_switch_statement = s_select_statement = s_expression_switch_statement

    def s_return_statement(self, node: Syntax) -> list[Stmt]:
        inner = named(node)
        return [Return(node, self.expr(inner[0]) if inner else None)]

    def s_break_statement(self, node: Syntax) -> list[Stmt]:
        return [Jump(node, "break")]

    def s_continue_statement(self, node: Syntax) -> list[Stmt]:
        return [Jump(node, "continue")]

    def s_labeled_statement(self, node: Syntax) -> list[Stmt]:
        return [stmt for child in named(node)[1:] for stmt in self.stmt(child)]

    def s_function_declaration(self, node: Syntax) -> list[Stmt]:
        return [Def(node, self.function(node))]

    s_method_declaration = s_function_declaration

    def function(self, node: Syntax) -> Function:
        name, returns = node.field("name"), node.field("result")
        params = self.params(node.field("receiver"))
        params += self.params(node.field("parameters"))
        body = node.field("body")
        return Function(
            node,
            name.text() if name is not None else "",
            params,
            self.body(body) if body is not None else [],
            [],
            returns.text() if returns is not None else "",
        )

    def params(self, node: Syntax | None) -> list[Param]:
        out: list[Param] = []
        for child in named(node) if node is not None else []:
            type_ = child.field("type")
            kind = type_.text().lstrip("*") if type_ is not None else ""
            out.extend(Param(name.text(), kind) for name in child.field_children("name") if name.is_named())
        return out
