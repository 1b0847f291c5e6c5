"""Lowers JavaScript, TypeScript and TSX."""

from __future__ import annotations

from keystroke.analysis.audit.source import ir
from keystroke.analysis.audit.source.ir import Expr, Stmt, Syntax
from keystroke.analysis.audit.source.lower import ERROR, Lowering, SwitchCases, first, named, text, unescape


class ScriptLowering(Lowering):
    for_fields = ("initializer", "condition", "increment")
    x_this = x_super = x_property_identifier = x_shorthand_property_identifier = Lowering.x_identifier
    x_shorthand_property_identifier_pattern = Lowering.x_identifier
    x_number = Lowering.lower_number
    x_null = x_undefined = Lowering.lower_none
    x_array = x_array_pattern = Lowering.lower_list
    x_await_expression = x_non_null_expression = x_spread_element = Lowering.x_parenthesized_expression
    x_jsx_expression = x_satisfies_expression = x_as_expression = Lowering.x_parenthesized_expression
    x_augmented_assignment_expression = Lowering.x_assignment_expression

    def x_update_expression(self, node: Syntax) -> Expr:
        return ir.OpExpr(node, "-", [self.expr(node.field("argument"))])  # a number, whatever it was

    def x_string(self, node: Syntax) -> Expr:
        return ir.ConstExpr(node, unescape(node.text()[1:-1]))

    def x_regex(self, node: Syntax) -> Expr:
        pattern, flags = (ir.ConstExpr(node, text(node.field(name))) for name in ("pattern", "flags"))
        return ir.CallExpr(node, ir.NameExpr(node, "RegExp"), [pattern, flags], {}, True)

    def x_template_string(self, node: Syntax) -> Expr:
        parts: list[Expr] = []
        for child in named(node):
            if child.kind() == "template_substitution":
                parts.extend(self.children(child))
            else:
                parts.append(ir.ConstExpr(child, unescape(child.text())))
        if all(isinstance(part, ir.ConstExpr) for part in parts):
            constants = (str(part.value) for part in parts if isinstance(part, ir.ConstExpr))
            return ir.ConstExpr(node, "".join(constants))
        return ir.TextExpr(node, parts)

    def x_member_expression(self, node: Syntax) -> Expr:
        return ir.AttrExpr(node, self.expr(node.field("object")), node.field("property").text())

    def x_subscript_expression(self, node: Syntax) -> Expr:
        base = self.expr(node.field("object"))
        return ir.IndexExpr(node, base, self.optional(node.field("index")) or ir.UnknownExpr(node, []))

    def x_call_expression(self, node: Syntax) -> Expr:
        arguments = node.field("arguments")
        func = self.expr(node.field("function"))
        if arguments is not None and arguments.kind() == "template_string":
            return ir.CallExpr(node, func, [self.expr(arguments)], {"tagged": ir.ConstExpr(node, True)})
        return ir.CallExpr(node, func, self.children(arguments))

    def x_new_expression(self, node: Syntax) -> Expr:
        args = self.children(node.field("arguments"))
        return ir.CallExpr(node, self.expr(node.field("constructor")), args, {}, True)

    def x_type_assertion(self, node: Syntax) -> Expr:
        parts = named(node)
        return self.expr(parts[-1]) if parts else ir.UnknownExpr(node, [])

    def x_object(self, node: Syntax) -> Expr:
        keys: list[Expr] = []
        items: list[Expr] = []
        for child in named(node):
            kind = child.kind()
            if kind in ("pair", "pair_pattern"):
                keys.append(self.key(child.field("key")))
                items.append(self.optional(child.field("value")) or ir.UnknownExpr(child, []))
            elif kind.startswith("shorthand_property_identifier"):
                keys.append(ir.ConstExpr(child, child.text()))
                items.append(ir.NameExpr(child, child.text()))
            elif kind == "method_definition":
                keys.append(self.key(child.field("name")))
                items.append(ir.ClosureExpr(child, self.function(child, [])))
            elif kind == "object_assignment_pattern":
                left = child.field("left")
                keys.append(ir.ConstExpr(child, left.text()))
                items.append(ir.NameExpr(left, left.text()))
            else:
                keys.append(ir.NameExpr(child, "..."))
                items.append(self.unknown(child))
        return ir.CollectionExpr(node, items, keys)

    x_object_pattern = x_object

    def key(self, node: Syntax | None) -> Expr:
        if node is None:
            return ir.UnknownExpr(node, [])
        kind = node.kind()
        if kind in ("property_identifier", "identifier"):
            return ir.ConstExpr(node, node.text())
        if kind == "computed_property_name":
            return self.x_parenthesized_expression(node)
        return self.expr(node)

    def x_arrow_function(self, node: Syntax) -> Expr:
        return ir.ClosureExpr(node, self.function(node, []))

    x_function_expression = x_function = x_generator_function = x_arrow_function

    def x_jsx_attribute(self, node: Syntax) -> Expr:
        parts = named(node)
        if len(parts) < 2:
            return ir.UnknownExpr(node, [])
        target = ir.AttrExpr(node, ir.NameExpr(node, "jsx"), parts[0].text())
        return ir.AssignExpr(node, target, self.expr(parts[1]))

    # Statements

    s_statement_block = s_program = Lowering.lazy
    s_ERROR = Lowering.lazy  # noqa: N815 - the grammar's name
    s_type_alias_declaration = s_interface_declaration = Lowering.skip

    def s_export_statement(self, node: Syntax) -> list[Stmt]:
        return self.block(node.field("declaration") or node.field("value"))

    def s_lexical_declaration(self, node: Syntax) -> list[Stmt]:
        out: list[Stmt] = []
        for child in named(node):
            if child.kind() != "variable_declarator":
                continue
            name = child.field("name")
            lowered = self.optional(child.field("value"))
            required = _required_module(lowered)
            if name.kind() == "identifier":
                if required:
                    out.append(ir.ImportStmt(child, name.text(), required))
                    if isinstance(lowered, ir.CallExpr):
                        out.append(ir.ExprStmt(child, lowered))
                else:
                    out.append(ir.DeclareStmt(child, name.text(), lowered, _type(child.field("type"))))
            elif required and name.kind() == "object_pattern":
                target = self.x_object(name)
                if isinstance(target, ir.CollectionExpr) and target.keys is not None:
                    for key, item in zip(target.keys, target.items, strict=True):
                        if isinstance(key, ir.ConstExpr) and isinstance(item, ir.NameExpr):
                            out.append(ir.ImportStmt(child, item.id, f"{required}.{key.value}"))
            elif lowered is not None:
                out.append(ir.ExprStmt(child, ir.AssignExpr(child, self.expr(name), lowered)))
        return out

    s_variable_declaration = s_lexical_declaration

    def s_import_statement(self, node: Syntax) -> list[Stmt]:
        source = node.field("source")
        clause = first(node, "import_require_clause")
        if clause is not None:
            name, inner = first(clause, "identifier"), first(clause, "string")
            if name is None or inner is None:
                return []
            return [ir.ImportStmt(node, name.text(), inner.text()[1:-1].removeprefix("node:"))]
        if source is None:
            return []
        path = source.text()[1:-1].removeprefix("node:")
        out: list[Stmt] = []
        clause = first(node, "import_clause")
        for child in named(clause) if clause is not None else []:
            kind = child.kind()
            if kind == "identifier":
                out.append(ir.ImportStmt(node, child.text(), path))
            elif kind == "namespace_import":
                out.extend(ir.ImportStmt(node, part.text(), path) for part in named(child))
            elif kind == "named_imports":
                for part in named(child):
                    name, alias = part.field("name"), part.field("alias")
                    if name is not None:
                        out.append(ir.ImportStmt(node, (alias or name).text(), f"{path}.{name.text()}"))
        return out

    def s_for_in_statement(self, node: Syntax) -> list[Stmt]:
        left, right = node.field("left"), node.field("right")
        if left is None or right is None:
            return self.body(node)
        iterable = self.expr(right)
        if text(node.field("operator")) == "in":
            iterable = ir.CallExpr(right, ir.NameExpr(right, "Object.keys"), [iterable])
        body = self.block(node.field("body"))
        return [ir.LoopStmt(node, [], None, [], body, self.expr(left), iterable)]

    def s_try_statement(self, node: Syntax) -> list[Stmt]:
        handler, final = node.field("handler"), node.field("finalizer")
        handlers: list[list[Stmt]] = []
        body = self.body(node.field("body"))
        if handler is not None:
            caught: list[Stmt] = []
            name = handler.field("parameter")
            if name is not None:
                bound = ir.AssignExpr(name, self.expr(name), ir.NameExpr(name, ERROR))
                caught.append(ir.ExprStmt(name, bound))
            handlers.append([*caught, *self.body(handler.field("body"))])
        last = self.body(final.field("body")) if final is not None else []
        return [ir.TryStmt(node, body, handlers, last)]

    def s_switch_statement(self, node: Syntax) -> list[Stmt]:
        cases: SwitchCases = []
        body = node.field("body")
        for child in named(body) if body is not None else []:
            label = child.field("value")
            stmts = [stmt for part in child.field_children("body") for stmt in self.stmt(part)]
            cases.append(([self.expr(label)] if label is not None else [], stmts))
        return [ir.SwitchStmt(node, self.expr(node.field("value")), cases)]

    def s_function_declaration(self, node: Syntax) -> list[Stmt]:
        return [ir.FunctionStmt(node, self.function(node, []))]

    s_generator_function_declaration = s_function_declaration

    def s_class_declaration(self, node: Syntax) -> list[Stmt]:
        body = node.field("body")
        stmts: list[Stmt] = []
        decorators: list[Expr] = []
        for child in named(body) if body is not None else []:
            kind = child.kind()
            if kind == "decorator":
                decorators.extend(self.children(child))
            elif kind == "method_definition":
                stmts.append(ir.FunctionStmt(child, self.function(child, decorators)))
                decorators = []
            elif kind in ("field_definition", "public_field_definition"):
                name = child.field("property") or child.field("name")
                if name is not None:
                    value = self.optional(child.field("value"))
                    stmts.append(ir.DeclareStmt(child, name.text(), value, _type(child.field("type"))))
                decorators = []
        return [ir.ClassStmt(node, text(node.field("name")), [], stmts, [])]

    s_abstract_class_declaration = s_class_declaration

    def x_class(self, node: Syntax) -> Expr:
        return ir.ClosureExpr(node, ir.Function(node, "", [], self.s_class_declaration(node)))

    def function(self, node: Syntax, decorators: list[Expr]) -> ir.Function:
        single, body, parameters = node.field("parameter"), node.field("body"), node.field("parameters")
        params = [ir.Param(single.text())] if single is not None else self.params(parameters)
        stmts: list[Stmt] = []
        if body is not None:
            block = body.kind() == "statement_block"
            stmts = self.lazy(body) if block else [ir.ReturnStmt(body, self.expr(body))]
        # The first statements of the body assign the names of a destructured parameter.
        for child in named(parameters) if parameters is not None else []:
            pattern = _pattern(child)
            if pattern.kind() in ("object_pattern", "array_pattern"):
                value = ir.NameExpr(pattern, _slot(pattern))
                stmts.insert(0, ir.ExprStmt(pattern, ir.AssignExpr(pattern, self.expr(pattern), value)))
        return ir.Function(node, text(node.field("name")), params, stmts, decorators)

    def params(self, node: Syntax | None) -> list[ir.Param]:
        out: list[ir.Param] = []
        for child in named(node) if node is not None else []:
            annotations: tuple[str, ...] = ()
            if child.kind() in ("required_parameter", "optional_parameter"):
                annotations = tuple(part.text() for part in child.children() if part.kind() == "decorator")
            pattern = _pattern(child)
            kind = pattern.kind()
            if kind == "rest_pattern":
                out.extend(ir.Param(part.text(), "", annotations) for part in named(pattern))
            else:
                hidden = kind in ("object_pattern", "array_pattern")
                name = _slot(pattern) if hidden else pattern.text()
                out.append(ir.Param(name, _type(child.field("type")), annotations))
        return out


def _pattern(param: Syntax) -> Syntax:
    """What a parameter binds, without its default value."""
    pattern = param.field("pattern") or param
    return pattern.field("left") if pattern.kind() == "assignment_pattern" else pattern


def _slot(node: Syntax) -> str:
    """The name of the hidden parameter that a pattern destructures."""
    return f"{{}}{node.range().start.index}"


def _type(node: Syntax | None) -> str:
    return text(node).lstrip(": ").strip()


def _required_module(value: Expr | None) -> str:
    """The module of `require("x")`, `require("x").y` and `await import("x")`; "" for anything else."""
    if isinstance(value, ir.AttrExpr):
        base = _required_module(value.base)
        return f"{base}.{value.name}" if base else ""
    if (
        isinstance(value, ir.CallExpr)
        and isinstance(value.func, ir.NameExpr)
        and value.func.id in ("require", "import")
        and value.args
    ):
        module = value.args[0]
        if isinstance(module, ir.ConstExpr) and isinstance(module.value, str):
            return module.value.removeprefix("node:")
    return ""
