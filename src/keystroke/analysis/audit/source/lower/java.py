"""Lowers Java. Types are identified by their simple names."""

from __future__ import annotations

from keystroke.analysis.audit.source import ir
from keystroke.analysis.audit.source.ir import Expr, Stmt, Syntax
from keystroke.analysis.audit.source.lower import Lowering, SwitchCases, first, named, text, unescape


class JavaLowering(Lowering):
    for_fields = ("init", "condition", "update")
    x_this = x_super = Lowering.x_identifier
    x_decimal_integer_literal = x_hex_integer_literal = x_octal_integer_literal = Lowering.lower_number
    x_decimal_floating_point_literal = Lowering.lower_number
    x_null_literal = Lowering.lower_none
    x_array_initializer = x_element_value_array_initializer = Lowering.lower_list

    def x_type_identifier(self, node: Syntax) -> Expr:
        return ir.NameExpr(node, simple_name(node))

    x_scoped_type_identifier = x_generic_type = x_type_identifier

    def x_scoped_identifier(self, node: Syntax) -> Expr:
        scope, name = node.field("scope"), node.field("name")
        if scope is None or name is None:
            return ir.NameExpr(node, node.text())
        return ir.AttrExpr(node, self.expr(scope), name.text())

    def x_string_literal(self, node: Syntax) -> Expr:
        source = node.text()
        return ir.ConstExpr(node, source[3:-3] if source.startswith('"""') else unescape(source[1:-1]))

    x_character_literal = x_string_literal

    def x_field_access(self, node: Syntax) -> Expr:
        return ir.AttrExpr(node, self.expr(node.field("object")), node.field("field").text())

    def x_array_access(self, node: Syntax) -> Expr:
        return ir.IndexExpr(node, self.expr(node.field("array")), self.expr(node.field("index")))

    def x_method_invocation(self, node: Syntax) -> Expr:
        owner, name = node.field("object"), node.field("name").text()
        func: Expr = ir.NameExpr(node, name) if owner is None else ir.AttrExpr(node, self.expr(owner), name)
        return ir.CallExpr(node, func, self.arguments(node))

    def x_explicit_constructor_invocation(self, node: Syntax) -> Expr:
        return ir.CallExpr(node, ir.NameExpr(node, "super"), self.arguments(node))

    def x_object_creation_expression(self, node: Syntax) -> Expr:
        name = ir.NameExpr(node, simple_name(node.field("type")))
        call = ir.CallExpr(node, name, self.arguments(node), {}, True)
        body = first(node, "class_body")
        if body is None:
            return call
        members = ir.ClosureExpr(body, ir.Function(body, "", [], self.body(body)))
        return ir.UnknownExpr(node, [call, members])

    def arguments(self, node: Syntax) -> list[Expr]:
        return self.children(node.field("arguments") or first(node, "argument_list"))

    def x_array_creation_expression(self, node: Syntax) -> Expr:
        value = node.field("value")
        if value is not None:
            return self.expr(value)
        return ir.CollectionExpr(node, [], None, simple_name(node.field("type")) + "[]")

    def x_update_expression(self, node: Syntax) -> Expr:
        inner = named(node)
        if not inner:
            return ir.UnknownExpr(node, [])
        return ir.AssignExpr(node, self.expr(inner[0]), ir.ConstExpr(node, 1), "+")

    def x_cast_expression(self, node: Syntax) -> Expr:
        return ir.CastExpr(node, simple_name(node.field("type")), self.expr(node.field("value")))

    def x_lambda_expression(self, node: Syntax) -> Expr:
        params, body = node.field("parameters"), node.field("body")
        names: list[ir.Param] = []
        if params is not None:
            if params.kind() == "identifier":
                names = [ir.Param(params.text())]
            elif params.kind() == "inferred_parameters":
                names = [ir.Param(child.text()) for child in named(params)]
            else:
                names = self.params(params)
        stmts: list[Stmt] = []
        if body is not None:
            block = body.kind() == "block"
            stmts = self.body(body) if block else [ir.ReturnStmt(body, self.expr(body))]
        return ir.ClosureExpr(node, ir.Function(node, "", names, stmts))

    def x_class_literal(self, node: Syntax) -> Expr:
        return ir.ConstExpr(node, node.text())

    def x_switch_expression(self, node: Syntax) -> Expr:
        return ir.ClosureExpr(node, ir.Function(node, "", [], self.s_switch_expression(node)))

    # Statements

    s_program = Lowering.body
    s_constructor_body = s_synchronized_statement = s_static_initializer = Lowering.s_block
    s_package_declaration = Lowering.skip

    def s_expression_statement(self, node: Syntax) -> list[Stmt]:
        inner = named(node)
        if inner and inner[0].kind() == "switch_expression":
            return self.s_switch_expression(inner[0])
        return super().s_expression_statement(node)

    def s_import_declaration(self, node: Syntax) -> list[Stmt]:
        inner = named(node)
        if not inner:
            return []
        path = inner[0].text()
        wildcard = first(node, "asterisk") is not None
        return [ir.ImportStmt(node, "*" if wildcard else path.rsplit(".", 1)[-1], path)]

    def s_local_variable_declaration(self, node: Syntax) -> list[Stmt]:
        kind = simple_name(node.field("type"))
        static = "static" in text(first(node, "modifiers"))
        return [
            ir.DeclareStmt(
                child, child.field("name").text(), self.optional(child.field("value")), kind, static=static
            )
            for child in node.field_children("declarator")
            if child.kind() == "variable_declarator"
        ]

    s_field_declaration = s_local_variable_declaration

    def s_enhanced_for_statement(self, node: Syntax) -> list[Stmt]:
        name, value = node.field("name"), node.field("value")
        if name is None or value is None:
            return self.body(node)
        body = self.block(node.field("body"))
        return [ir.LoopStmt(node, [], None, [], body, self.expr(name), self.expr(value))]

    def s_try_statement(self, node: Syntax) -> list[Stmt]:
        before: list[Stmt] = []
        resources = node.field("resources")
        for child in named(resources) if resources is not None else []:
            name, value = child.field("name"), child.field("value")
            if name is not None and value is not None:
                kind = simple_name(child.field("type"))
                before.append(ir.DeclareStmt(child, name.text(), self.expr(value), kind))
        handlers: list[list[Stmt]] = []
        final: list[Stmt] = []
        for child in named(node):
            if child.kind() == "catch_clause":
                handlers.append(self.block(child.field("body")))
            elif child.kind() == "finally_clause":
                final = self.body(child)
        return [*before, ir.TryStmt(node, self.block(node.field("body")), handlers, final)]

    s_try_with_resources_statement = s_try_statement

    def s_switch_expression(self, node: Syntax) -> list[Stmt]:
        cases: SwitchCases = []
        body = node.field("body")
        for group in named(body) if body is not None else []:
            labels: list[Expr] = []
            stmts: list[Stmt] = []
            for child in named(group):
                if child.kind() == "switch_label":
                    labels.extend(self.children(child))
                else:
                    stmts.extend(self.stmt(child))
            if group.kind() == "switch_rule":
                stmts.append(ir.JumpStmt(group, "break"))
            cases.append((labels, stmts))
        return [ir.SwitchStmt(node, self.expr(node.field("condition")), cases)]

    s_switch_statement = s_switch_expression

    def s_class_declaration(self, node: Syntax) -> list[Stmt]:
        parents = [text(part) for name in ("superclass", "interfaces") if (part := node.field(name))]
        body, annotations = self.body(node.field("body")), self.annotations(node)
        return [ir.ClassStmt(node, text(node.field("name")), parents, body, annotations)]

    s_interface_declaration = s_enum_declaration = s_record_declaration = s_class_declaration

    def s_method_declaration(self, node: Syntax) -> list[Stmt]:
        params, body = self.params(node.field("parameters")), self.body(node.field("body"))
        name, returns = text(node.field("name")), text(node.field("type"))
        function = ir.Function(node, name, params, body, self.annotations(node), returns)
        return [ir.FunctionStmt(node, function)]

    s_constructor_declaration = s_method_declaration

    def annotations(self, node: Syntax) -> list[Expr]:
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
            name = ir.NameExpr(child, child.field("name").text())
            out.append(ir.CallExpr(child, name, args, kwargs))
        return out

    def params(self, node: Syntax | None) -> list[ir.Param]:
        out: list[ir.Param] = []
        for child in named(node) if node is not None else []:
            if child.kind() not in ("formal_parameter", "spread_parameter"):
                continue
            name = child.field("name")
            if name is None:
                declarator = first(child, "variable_declarator")
                name = declarator.field("name") if declarator is not None else None
            kind = child.field("type") or (named(child)[0] if named(child) else None)
            annotations = tuple(
                item.func.id
                for item in self.annotations(child)
                if isinstance(item, ir.CallExpr) and isinstance(item.func, ir.NameExpr)
            )
            if name is not None:
                out.append(ir.Param(name.text(), simple_name(kind), annotations))
        return out


def simple_name(node: Syntax | None) -> str:
    """`Map` for `java.util.Map<String, X>`."""
    return text(node).split("<", 1)[0].rsplit(".", 1)[-1].strip()
