"""Lowers Python. The statements of a block are lowered lazily."""

from __future__ import annotations

from keystroke.analysis.audit.source import ir
from keystroke.analysis.audit.source.ir import Expr, Stmt, Syntax
from keystroke.analysis.audit.source.lower import ERROR, Lowering, SwitchCases, first, named, text, unescape


class PythonLowering(Lowering):
    x_integer = x_float = Lowering.lower_number
    x_none = Lowering.lower_none
    x_list = x_tuple = x_set = x_expression_list = x_pattern_list = Lowering.lower_list
    x_tuple_pattern = x_list_pattern = Lowering.lower_list
    x_await = Lowering.x_parenthesized_expression
    x_augmented_assignment = Lowering.x_assignment_expression
    x_unary_operator = Lowering.x_unary_expression

    def x_string(self, node: Syntax) -> Expr:
        parts: list[Expr] = []
        prefix = text(first(node, "string_start")).lower()
        raw, binary = "r" in prefix, "b" in prefix.rstrip("\"'")
        for child in node.children():
            kind = child.kind()
            if kind == "string_content":
                parts.append(ir.ConstExpr(child, child.text() if raw else unescape(child.text())))
            elif kind == "interpolation":
                inner = child.field("expression")
                if inner is not None:
                    value = self.expr(inner)
                    shown = _is_shown_by_repr(child)
                    parts.append(ir.CallExpr(inner, ir.NameExpr(inner, "repr"), [value]) if shown else value)
        if not parts:
            return ir.ConstExpr(node, b"" if binary else "")
        if all(isinstance(part, ir.ConstExpr) for part in parts):
            whole = "".join(str(part.value) for part in parts if isinstance(part, ir.ConstExpr))
            return ir.ConstExpr(node, whole.encode("latin-1", "replace") if binary else whole)
        return ir.TextExpr(node, parts)

    def x_concatenated_string(self, node: Syntax) -> Expr:
        parts = self.children(node)
        if all(isinstance(part, ir.ConstExpr) and isinstance(part.value, str) for part in parts):
            return ir.ConstExpr(node, "".join(part.value for part in parts if isinstance(part, ir.ConstExpr)))
        flat: list[Expr] = []
        for part in parts:
            flat.extend(part.parts if isinstance(part, ir.TextExpr) else [part])
        return ir.TextExpr(node, flat)

    def x_attribute(self, node: Syntax) -> Expr:
        return ir.AttrExpr(node, self.expr(node.field("object")), node.field("attribute").text())

    def x_subscript(self, node: Syntax) -> Expr:
        base = self.expr(node.field("value"))
        keys = [self.expr(key) for key in node.field_children("subscript")]
        return ir.IndexExpr(node, base, keys[0] if len(keys) == 1 else ir.CollectionExpr(node, keys))

    def x_call(self, node: Syntax) -> Expr:
        args: list[Expr] = []
        kwargs: dict[str, Expr] = {}
        arguments = node.field("arguments")
        if arguments is not None and arguments.kind() == "argument_list":
            for child in named(arguments):
                kind = child.kind()
                if kind == "keyword_argument":
                    kwargs[child.field("name").text()] = self.expr(child.field("value"))
                elif kind == "dictionary_splat":
                    kwargs["**"] = self.x_parenthesized_expression(child)
                else:
                    args.append(self.expr(child))
        elif arguments is not None:
            args.append(self.expr(arguments))
        return ir.CallExpr(node, self.expr(node.field("function")), args, kwargs)

    def x_binary_operator(self, node: Syntax) -> Expr:
        op = node.field("operator").text()
        if op == "+":
            return self.sum(node)
        left, right = self.expr(node.field("left")), self.expr(node.field("right"))
        if op == "%" and (
            isinstance(left, ir.TextExpr)
            or (isinstance(left, ir.ConstExpr) and isinstance(left.value, str | bytes))
        ):
            several = isinstance(right, ir.CollectionExpr) and right.keys is None
            func = ir.AttrExpr(left.node, left, "%")
            return ir.CallExpr(node, func, right.items if several else [right])  # type: ignore[attr-defined]
        return ir.OpExpr(node, op, [left, right])

    def x_boolean_operator(self, node: Syntax) -> Expr:
        args = [self.expr(node.field("left")), self.expr(node.field("right"))]
        return ir.OpExpr(node, node.field("operator").text(), args)

    def x_comparison_operator(self, node: Syntax) -> Expr:
        op = " ".join(child.text() for child in node.children() if not child.is_named())
        return ir.OpExpr(node, op or "==", self.children(node))

    def x_not_operator(self, node: Syntax) -> Expr:
        return ir.OpExpr(node, "!", [self.expr(node.field("argument"))])

    def x_dictionary(self, node: Syntax) -> Expr:
        keys: list[Expr] = []
        items: list[Expr] = []
        for child in named(node):
            if child.kind() == "pair":
                keys.append(self.expr(child.field("key")))
                items.append(self.expr(child.field("value")))
            else:
                keys.append(ir.UnknownExpr(child, []))
                items.append(self.unknown(child))
        return ir.CollectionExpr(node, items, keys)

    def x_conditional_expression(self, node: Syntax) -> Expr:
        parts = named(node)
        if len(parts) != 3:
            return self.unknown(node)
        return ir.ConditionalExpr(node, self.expr(parts[1]), self.expr(parts[0]), self.expr(parts[2]))

    def x_lambda(self, node: Syntax) -> Expr:
        body = node.field("body")
        result: list[Stmt] = [ir.ReturnStmt(body, self.optional(body))]
        return ir.ClosureExpr(node, ir.Function(node, "", self.params(node.field("parameters")), result))

    def x_named_expression(self, node: Syntax) -> Expr:
        return ir.AssignExpr(node, self.expr(node.field("name")), self.expr(node.field("value")))

    def x_assignment(self, node: Syntax) -> Expr:
        value = self.optional(node.field("right")) or ir.UnknownExpr(node, [])
        return ir.AssignExpr(node, self.expr(node.field("left")), value)

    def x_list_comprehension(self, node: Syntax) -> Expr:
        body: Syntax | None = None
        parts: list[Expr] = []
        for child in named(node):
            if child.kind() == "for_in_clause":
                left, right = child.field("left"), child.field("right")
                if left is not None and right is not None:
                    element = ir.IndexExpr(right, self.expr(right), ir.UnknownExpr(right, []))
                    parts.append(ir.AssignExpr(child, self.expr(left), element))
            elif child.kind() == "if_clause":
                parts.append(self.unknown(child))
            else:
                body = child
        if body is not None:
            parts.append(self.expr(body))
        return ir.UnknownExpr(node, parts, last=body is not None)

    x_set_comprehension = x_dictionary_comprehension = x_generator_expression = x_list_comprehension

    def x_as_pattern(self, node: Syntax) -> Expr:
        parts = named(node)
        target = named(parts[-1])
        if len(parts) < 2 or not target:
            return self.unknown(node)
        return ir.AssignExpr(node, self.expr(target[0]), self.expr(parts[0]))

    # Statements

    s_module = s_block = Lowering.lazy
    s_ERROR = Lowering.lazy  # noqa: N815 - the grammar's name

    def s_import_statement(self, node: Syntax) -> list[Stmt]:
        return [_import_statement(node, child, "") for child in named(node)]

    def s_import_from_statement(self, node: Syntax) -> list[Stmt]:
        base = text(node.field("module_name"))
        out: list[Stmt] = [
            _import_statement(node, child, f"{base}.") for child in node.field_children("name")
        ]
        return out or [ir.ImportStmt(node, "*", base)]

    def s_if_statement(self, node: Syntax) -> list[Stmt]:
        clauses = [(node.field("condition"), node.field("consequence"))]
        otherwise: list[Stmt] = []
        for child in node.field_children("alternative"):
            if child.kind() == "elif_clause":
                clauses.append((child.field("condition"), child.field("consequence")))
            else:
                otherwise = self.lazy(child.field("body"))
        for test, then in reversed(clauses):
            if test is not None:
                otherwise = [ir.IfStmt(test, self.expr(test), self.lazy(then), otherwise)]
        return otherwise

    def s_while_statement(self, node: Syntax) -> list[Stmt]:
        test = self.optional(node.field("condition"))
        return [ir.LoopStmt(node, [], test, [], self.lazy(node.field("body")))]

    def s_for_statement(self, node: Syntax) -> list[Stmt]:
        left, right = node.field("left"), node.field("right")
        if left is None or right is None:
            return self.body(node)
        body = self.lazy(node.field("body"))
        return [ir.LoopStmt(node, [], None, [], body, self.expr(left), self.expr(right))]

    def s_with_statement(self, node: Syntax) -> list[Stmt]:
        out: list[Stmt] = []
        clause = first(node, "with_clause")
        for item in named(clause) if clause is not None else []:
            out.extend(ir.ExprStmt(part, self.expr(part)) for part in named(item))
        return [*out, ir.BlockStmt(node, self.lazy(node.field("body")))]

    def s_try_statement(self, node: Syntax) -> list[Stmt]:
        handlers: list[list[Stmt]] = []
        final: list[Stmt] = []
        for child in named(node):
            blocks = (part for part in named(child) if part.kind() == "block")
            if child.kind() in ("except_clause", "except_group_clause"):
                body = [stmt for part in blocks for stmt in self.lazy(part)]
                handlers.append(self.caught(child) + body)
            elif child.kind() in ("finally_clause", "else_clause"):
                final.extend(stmt for part in blocks for stmt in self.lazy(part))
        return [ir.TryStmt(node, self.lazy(node.field("body")), handlers, final)]

    def caught(self, clause: Syntax) -> list[Stmt]:
        """The assignment that `except E as name` makes."""
        for part in named(clause):
            if part.kind() == "as_pattern":
                target = named(part)[-1]
                inner = named(target)
                name = inner[0] if inner else target
                if name.kind() == "identifier":
                    error = ir.CastExpr(name, named(part)[0].text(), ir.NameExpr(name, ERROR))
                    assign = ir.AssignExpr(part, ir.NameExpr(name, name.text()), error)
                    return [ir.ExprStmt(part, assign)]
        return []

    def s_match_statement(self, node: Syntax) -> list[Stmt]:
        cases: SwitchCases = []
        block = node.field("body") or first(node, "block")
        for clause in named(block) if block is not None else []:
            patterns = [part for part in named(clause) if part.kind() == "case_pattern"]
            labels = [label for pattern in patterns for label in self.children(pattern)]
            body = self.body(clause.field("consequence"))
            cases.append((labels, [*body, ir.JumpStmt(clause, "break")]))
        subject = self.optional(node.field("subject")) or ir.UnknownExpr(node, [])
        return [ir.SwitchStmt(node, subject, cases)]

    def s_raise_statement(self, node: Syntax) -> list[Stmt]:
        inner = named(node)
        return [ir.JumpStmt(node, "raise", self.expr(inner[0]) if inner else None)]

    def s_assert_statement(self, node: Syntax) -> list[Stmt]:
        inner = named(node)
        if not inner:
            return []
        call = ir.CallExpr(node, ir.NameExpr(node, "assert"), [self.expr(inner[0])])
        return [ir.ExprStmt(node, call)]

    def s_function_definition(self, node: Syntax) -> list[Stmt]:
        return [ir.FunctionStmt(node, self.function(node, []))]

    def s_class_definition(self, node: Syntax) -> list[Stmt]:
        parents = node.field("superclasses")
        bases = [child.text() for child in named(parents)] if parents is not None else []
        return [ir.ClassStmt(node, node.field("name").text(), bases, self.lazy(node.field("body")), [])]

    def s_decorated_definition(self, node: Syntax) -> list[Stmt]:
        decorators = [
            self.expr(named(child)[0])
            for child in named(node)
            if child.kind() == "decorator" and named(child)
        ]
        definition = node.field("definition")
        if definition is None:
            return []
        if definition.kind() == "function_definition":
            return [ir.FunctionStmt(node, self.function(definition, decorators))]
        out = self.stmt(definition)
        for stmt in out:
            if isinstance(stmt, ir.ClassStmt):
                stmt.decorators = decorators
        return out

    def function(self, node: Syntax, decorators: list[Expr]) -> ir.Function:
        params, body = self.params(node.field("parameters")), self.lazy(node.field("body"))
        returns = text(node.field("return_type"))
        return ir.Function(node, text(node.field("name")), params, body, decorators, returns)

    def params(self, node: Syntax | None) -> list[ir.Param]:
        out: list[ir.Param] = []
        for child in named(node) if node is not None else []:
            kind = child.kind()
            if kind == "identifier":
                out.append(ir.Param(child.text()))
                continue
            splats = ("list_splat_pattern", "dictionary_splat_pattern")
            name = child.field("name") or first(child, "identifier", *splats)
            if kind in splats:
                name = first(child, "identifier")
            if name is not None:
                default = self.optional(child.field("value"))
                out.append(ir.Param(name.text().lstrip("*"), text(child.field("type")), (), default))
        return out


def _import_statement(node: Syntax, name: Syntax, prefix: str) -> Stmt:
    if name.kind() == "aliased_import":
        return ir.ImportStmt(node, name.field("alias").text(), prefix + name.field("name").text())
    return ir.ImportStmt(node, name.text(), prefix + name.text())


def _is_shown_by_repr(interpolation: Syntax) -> bool:
    """Whether a part of an f-string is written as in the source: {x!r}, {x!a}, {x=}."""
    marks: dict[str, str] = {child.kind(): child.text() for child in interpolation.children()}
    if "type_conversion" in marks:
        return marks["type_conversion"] != "!s"
    return "=" in marks and "format_specifier" not in marks
