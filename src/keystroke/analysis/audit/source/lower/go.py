"""Lowers Go."""

from __future__ import annotations

from keystroke.analysis.audit.source import ir
from keystroke.analysis.audit.source.ir import Expr, Stmt, Syntax
from keystroke.analysis.audit.source.lower import Lowering, SwitchCases, first, named, text, unescape


class GoLowering(Lowering):
    x_field_identifier = x_type_identifier = x_package_identifier = Lowering.x_identifier
    x_int_literal = x_float_literal = Lowering.lower_number
    x_nil = Lowering.lower_none
    x_literal_value = Lowering.lower_list
    x_variadic_argument = x_literal_element = Lowering.x_parenthesized_expression

    def x_interpreted_string_literal(self, node: Syntax) -> Expr:
        return ir.ConstExpr(node, unescape(node.text()[1:-1]))

    x_rune_literal = x_interpreted_string_literal

    def x_raw_string_literal(self, node: Syntax) -> Expr:
        return ir.ConstExpr(node, node.text()[1:-1])

    def x_selector_expression(self, node: Syntax) -> Expr:
        return ir.AttrExpr(node, self.expr(node.field("operand")), node.field("field").text())

    def x_index_expression(self, node: Syntax) -> Expr:
        return ir.IndexExpr(node, self.expr(node.field("operand")), self.expr(node.field("index")))

    def x_slice_expression(self, node: Syntax) -> Expr:
        return ir.IndexExpr(node, self.expr(node.field("operand")), ir.UnknownExpr(node, []))

    def x_call_expression(self, node: Syntax) -> Expr:
        args = self.children(node.field("arguments"))
        return ir.CallExpr(node, self.expr(node.field("function")), args)

    def x_type_conversion_expression(self, node: Syntax) -> Expr:
        return ir.CastExpr(node, node.field("type").text(), self.expr(node.field("operand")))

    def x_type_assertion_expression(self, node: Syntax) -> Expr:
        return self.expr(node.field("operand"))

    def x_unary_expression(self, node: Syntax) -> Expr:
        op = node.field("operator").text()
        inner = self.expr(node.field("operand"))
        return inner if op in ("&", "*") else ir.OpExpr(node, op, [inner])

    def x_composite_literal(self, node: Syntax) -> Expr:
        body = node.field("body")
        keys: list[Expr] = []
        items: list[Expr] = []
        for child in named(body) if body is not None else []:
            if child.kind() == "keyed_element":
                parts = named(child)
                key = self.expr(parts[0])
                keys.append(ir.ConstExpr(key.node, key.id) if isinstance(key, ir.NameExpr) else key)
                items.append(self.expr(parts[-1]))
            else:
                items.append(self.expr(child))
        whole_keys = keys if keys and len(keys) == len(items) else None
        return ir.CollectionExpr(node, items, whole_keys, text(node.field("type")))

    def x_func_literal(self, node: Syntax) -> Expr:
        return ir.ClosureExpr(node, self.function(node))

    def x_expression_list(self, node: Syntax) -> Expr:
        parts = self.children(node)
        return parts[0] if len(parts) == 1 else ir.CollectionExpr(node, parts)

    # Statements

    s_source_file = s_statement_list = Lowering.body
    s_package_clause = s_type_declaration = Lowering.skip

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
            name = alias.text() if alias is not None else last.removeprefix("go-")
            out.append(ir.ImportStmt(spec, name, full))
        return out

    def s_var_declaration(self, node: Syntax) -> list[Stmt]:
        out: list[Stmt] = []
        specs = [child for child in named(node) if child.kind() in ("var_spec", "const_spec")]
        for group in named(node):
            if group.kind() == "var_spec_list":
                specs += [child for child in named(group) if child.kind() == "var_spec"]
        for spec in specs:
            values, kind = self.children(spec.field("value")), text(spec.field("type"))
            names = (child for child in spec.field_children("name") if child.is_named())
            for at, name in enumerate(names):
                value: Expr | None = None
                if values:
                    shared = at >= len(values)
                    value = ir.IndexExpr(spec, values[0], ir.ConstExpr(spec, at)) if shared else values[at]
                out.append(ir.DeclareStmt(spec, name.text(), value, kind))
        return out

    s_const_declaration = s_var_declaration

    def s_short_var_declaration(self, node: Syntax) -> list[Stmt]:
        left, right = node.field("left"), node.field("right")
        if left is None or right is None:
            return self.body(node)
        op = text(node.field("operator")).rstrip("=:")
        targets, values = named(left), named(right)
        if len(targets) == len(values):
            return [
                ir.ExprStmt(node, ir.AssignExpr(node, self.expr(target), self.expr(value), op))
                for target, value in zip(targets, values, strict=True)
            ]
        return [ir.ExprStmt(node, ir.AssignExpr(node, self.lower_list(left), self.expr(right)))]

    s_assignment_statement = s_short_var_declaration

    def s_inc_statement(self, node: Syntax) -> list[Stmt]:
        one = ir.ConstExpr(node, 1)
        return [
            ir.ExprStmt(node, ir.AssignExpr(node, target, one, "+")) for target in self.children(node)[:1]
        ]

    s_dec_statement = s_inc_statement

    def s_if_statement(self, node: Syntax) -> list[Stmt]:
        init = self.block(node.field("initializer"))
        test = self.optional(node.field("condition")) or ir.UnknownExpr(node, [])
        then, other = self.block(node.field("consequence")), self.block(node.field("alternative"))
        return [*init, ir.IfStmt(node, test, then, other)]

    def s_for_statement(self, node: Syntax) -> list[Stmt]:
        body = self.block(node.field("body"))
        for child in named(node):
            if child.kind() == "for_clause":
                init, test = self.block(child.field("initializer")), self.optional(child.field("condition"))
                return [ir.LoopStmt(node, init, test, self.block(child.field("update")), body)]
            if child.kind() == "range_clause":
                left, right = child.field("left"), child.field("right")
                if right is None:
                    break
                names = named(left) if left is not None else []
                target = self.expr(names[-1]) if names else None
                return [ir.LoopStmt(node, [], None, [], body, target, self.expr(right))]
        return [ir.LoopStmt(node, [], None, [], body)]

    def s_expression_switch_statement(self, node: Syntax) -> list[Stmt]:
        cases: SwitchCases = []
        for child in named(node):
            if child.kind() in ("expression_case", "type_case", "default_case", "communication_case"):
                labels = self.children(child.field("value"))
                lists = [part for part in named(child) if part.kind() == "statement_list"]
                stmts = [stmt for part in lists for stmt in self.body(part)]
                cases.append((labels, [*stmts, ir.JumpStmt(child, "break")]))
        init = self.block(node.field("initializer"))
        subject = self.optional(node.field("value")) or ir.ConstExpr(node, True)
        return [*init, ir.SwitchStmt(node, subject, cases)]

    s_type_switch_statement = s_select_statement = s_expression_switch_statement

    def s_labeled_statement(self, node: Syntax) -> list[Stmt]:
        return [stmt for child in named(node)[1:] for stmt in self.stmt(child)]

    def s_function_declaration(self, node: Syntax) -> list[Stmt]:
        return [ir.FunctionStmt(node, self.function(node))]

    s_method_declaration = s_function_declaration

    def function(self, node: Syntax) -> ir.Function:
        params = self.params(node.field("receiver")) + self.params(node.field("parameters"))
        body = self.body(node.field("body"))
        return ir.Function(node, text(node.field("name")), params, body, [], text(node.field("result")))

    def params(self, node: Syntax | None) -> list[ir.Param]:
        out: list[ir.Param] = []
        for child in named(node) if node is not None else []:
            kind = text(child.field("type")).lstrip("*")
            names = (name for name in child.field_children("name") if name.is_named())
            out.extend(ir.Param(name.text(), kind) for name in names)
        return out
