"""Python's grammar to the neutral form."""

from __future__ import annotations

from keystroke.analysis.audit.source.ir import (
    Attr,
    Bind,
    Block,
    Call,
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
    Loop,
    Name,
    Op,
    Other,
    Param,
    Pending,
    Return,
    Stmt,
    Switch,
    Syntax,
    Text,
    Try,
)
from keystroke.analysis.audit.source.lower import ERROR, Lowering, first, named, number, unescape


class PythonLowering(Lowering):
    # Expressions

    def x_identifier(self, node: Syntax) -> Expr:
        return Name(node, node.text())

    def x_integer(self, node: Syntax) -> Expr:
        return Const(node, number(node.text()))

    x_float = x_integer

    def x_true(self, node: Syntax) -> Expr:
        return Const(node, True)

    def x_false(self, node: Syntax) -> Expr:
        return Const(node, False)

    def x_none(self, node: Syntax) -> Expr:
        return Const(node, None)

    def x_string(self, node: Syntax) -> Expr:
        parts: list[Expr] = []
        start = first(node, "string_start")
        prefix = start.text().lower() if start else ""
        raw, binary = "r" in prefix, "b" in prefix.rstrip("\"'")
        for child in node.children():
            kind = child.kind()
            if kind == "string_content":
                text = child.text()
                parts.append(Const(child, text if raw else unescape(text)))
            elif kind == "interpolation":
                inner = child.field("expression")
                if inner is not None:
                    parts.append(self.expr(inner))
        if not parts:
            return Const(node, b"" if binary else "")
        if all(isinstance(part, Const) for part in parts):
            text = "".join(str(part.value) for part in parts if isinstance(part, Const))
            return Const(node, text.encode("latin-1", "replace") if binary else text)
        return Text(node, parts)

    def x_concatenated_string(self, node: Syntax) -> Expr:
        return _joined(node, [self.expr(child) for child in named(node)])

    def x_attribute(self, node: Syntax) -> Expr:
        return Attr(node, self.expr(node.field("object")), node.field("attribute").text())

    def x_subscript(self, node: Syntax) -> Expr:
        keys = node.field_children("subscript")
        base = self.expr(node.field("value"))
        if len(keys) == 1:
            return Index(node, base, self.expr(keys[0]))
        return Index(node, base, Coll(node, [self.expr(key) for key in keys]))

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
                    inner = named(child)
                    kwargs["**"] = self.expr(inner[0]) if inner else Other(child, [])
                else:
                    args.append(self.expr(child))
        elif arguments is not None:
            args.append(self.expr(arguments))
        return Call(node, self.expr(node.field("function")), args, kwargs)

    def x_binary_operator(self, node: Syntax) -> Expr:
        op = node.field("operator").text()
        if op == "+":
            return self.sum(node)
        left, right = self.expr(node.field("left")), self.expr(node.field("right"))
        if op == "%" and (
            isinstance(left, Text) or (isinstance(left, Const) and isinstance(left.value, str | bytes))
        ):
            return Call(
                node,
                Attr(left.node, left, "%"),
                right.items if isinstance(right, Coll) and right.keys is None else [right],
            )
        return Op(node, op, [left, right])

    def x_boolean_operator(self, node: Syntax) -> Expr:
        return Op(
            node,
            node.field("operator").text(),
            [self.expr(node.field("left")), self.expr(node.field("right"))],
        )

    def x_comparison_operator(self, node: Syntax) -> Expr:
        op = " ".join(child.text() for child in node.children() if not child.is_named())
        return Op(node, op or "==", [self.expr(child) for child in named(node)])

    def x_not_operator(self, node: Syntax) -> Expr:
        return Op(node, "!", [self.expr(node.field("argument"))])

    def x_unary_operator(self, node: Syntax) -> Expr:
        return Op(node, node.field("operator").text(), [self.expr(node.field("argument"))])

    def x_parenthesized_expression(self, node: Syntax) -> Expr:
        inner = named(node)
        return self.expr(inner[0]) if inner else Other(node, [])

    def x_await(self, node: Syntax) -> Expr:
        return self.x_parenthesized_expression(node)

    def x_list(self, node: Syntax) -> Expr:
        return Coll(node, [self.expr(child) for child in named(node)])

    x_tuple = x_set = x_expression_list = x_pattern_list = x_tuple_pattern = x_list_pattern = x_list

    def x_dictionary(self, node: Syntax) -> Expr:
        keys: list[Expr] = []
        items: list[Expr] = []
        for child in named(node):
            if child.kind() == "pair":
                keys.append(self.expr(child.field("key")))
                items.append(self.expr(child.field("value")))
            else:
                keys.append(Other(child, []))
                items.append(self.other(child))
        return Coll(node, items, keys)

    def x_conditional_expression(self, node: Syntax) -> Expr:
        parts = named(node)
        if len(parts) != 3:
            return self.other(node)
        return Cond(node, self.expr(parts[1]), self.expr(parts[0]), self.expr(parts[2]))

    def x_lambda(self, node: Syntax) -> Expr:
        body = node.field("body")
        value = self.expr(body) if body is not None else None
        return Closure(node, Function(node, "", self.params(node.field("parameters")), [Return(body, value)]))

    def x_named_expression(self, node: Syntax) -> Expr:
        return Bind(node, self.expr(node.field("name")), self.expr(node.field("value")))

    def x_assignment(self, node: Syntax) -> Expr:
        left, right = node.field("left"), node.field("right")
        return Bind(node, self.expr(left), self.expr(right) if right is not None else Other(node, []))

    def x_augmented_assignment(self, node: Syntax) -> Expr:
        op = node.field("operator").text().rstrip("=")
        return Bind(node, self.expr(node.field("left")), self.expr(node.field("right")), op)

    def x_list_comprehension(self, node: Syntax) -> Expr:
        body: Syntax | None = None
        parts: list[Expr] = []
        for child in named(node):
            if child.kind() == "for_in_clause":
                left, right = child.field("left"), child.field("right")
                if left is not None and right is not None:
                    parts.append(
                        Bind(child, self.expr(left), Index(right, self.expr(right), Other(right, [])))
                    )
            elif child.kind() == "if_clause":
                parts.append(self.other(child))
            else:
                body = child
        if body is not None:
            parts.append(self.expr(body))
        return Other(node, parts)

    x_set_comprehension = x_dictionary_comprehension = x_generator_expression = x_list_comprehension

    def x_as_pattern(self, node: Syntax) -> Expr:
        parts = named(node)
        target = named(parts[-1])
        if len(parts) < 2 or not target:
            return self.other(node)
        return Bind(node, self.expr(target[0]), self.expr(parts[0]))

    # Statements

    def s_expression_statement(self, node: Syntax) -> list[Stmt]:
        return [Do(node, self.expr(child)) for child in named(node)]

    def s_block(self, node: Syntax) -> list[Stmt]:
        return self.later(node)

    s_ERROR = s_block  # noqa: N815 - the grammar spells it so

    def later(self, node: Syntax | None) -> list[Stmt]:
        """The statements of a block, each lowered where the walk comes to it."""
        if node is None:
            return []
        depth = self.depth

        def lower(child: Syntax) -> list[Stmt]:
            held, self.depth = self.depth, depth
            try:
                return self.stmt(child)
            finally:
                self.depth = held

        return [Pending(child, lower) for child in named(node)]

    s_module = s_block

    def s_import_statement(self, node: Syntax) -> list[Stmt]:
        out: list[Stmt] = []
        for child in named(node):
            if child.kind() == "aliased_import":
                out.append(Import(node, child.field("alias").text(), child.field("name").text()))
            else:
                out.append(Import(node, child.text(), child.text()))
        return out

    def s_import_from_statement(self, node: Syntax) -> list[Stmt]:
        module = node.field("module_name")
        base = module.text() if module is not None else ""
        out: list[Stmt] = []
        for child in node.field_children("name"):
            if child.kind() == "aliased_import":
                out.append(Import(node, child.field("alias").text(), f"{base}.{child.field('name').text()}"))
            else:
                out.append(Import(node, child.text(), f"{base}.{child.text()}"))
        if not out:
            out.append(Import(node, "*", base))
        return out

    def s_if_statement(self, node: Syntax) -> list[Stmt]:
        clauses = [(node.field("condition"), node.field("consequence"))]
        otherwise: list[Stmt] = []
        for child in node.field_children("alternative"):
            if child.kind() == "elif_clause":
                clauses.append((child.field("condition"), child.field("consequence")))
            else:
                otherwise = self.later(child.field("body"))
        for test, then in reversed(clauses):
            if test is not None:
                otherwise = [If(test, self.expr(test), self.later(then), otherwise)]
        return otherwise

    def s_while_statement(self, node: Syntax) -> list[Stmt]:
        test = node.field("condition")
        return [
            Loop(node, [], self.expr(test) if test is not None else None, [], self.later(node.field("body")))
        ]

    def s_for_statement(self, node: Syntax) -> list[Stmt]:
        left, right = node.field("left"), node.field("right")
        if left is None or right is None:
            return self.body(node)
        return [Loop(node, [], None, [], self.later(node.field("body")), self.expr(left), self.expr(right))]

    def s_with_statement(self, node: Syntax) -> list[Stmt]:
        out: list[Stmt] = []
        clause = first(node, "with_clause")
        for item in named(clause) if clause is not None else []:
            out.extend(Do(part, self.expr(part)) for part in named(item))
        return [*out, Block(node, self.later(node.field("body")))]

    def s_try_statement(self, node: Syntax) -> list[Stmt]:
        handlers: list[list[Stmt]] = []
        final: list[Stmt] = []
        for child in named(node):
            if child.kind() in ("except_clause", "except_group_clause"):
                handlers.append(
                    self.caught(child)
                    + [stmt for part in named(child) if part.kind() == "block" for stmt in self.later(part)]
                )
            elif child.kind() in ("finally_clause", "else_clause"):
                final.extend(
                    stmt for part in named(child) if part.kind() == "block" for stmt in self.later(part)
                )
        return [Try(node, self.later(node.field("body")), handlers, final)]

    def caught(self, clause: Syntax) -> list[Stmt]:
        """`except E as name`: the name holds an error."""
        for part in named(clause):
            if part.kind() == "as_pattern":
                target = named(part)[-1]
                inner = named(target)
                name = inner[0] if inner else target
                if name.kind() == "identifier":
                    return [Do(part, Bind(part, Name(name, name.text()), Name(name, ERROR)))]
        return []

    def s_match_statement(self, node: Syntax) -> list[Stmt]:
        subject = node.field("subject")
        cases: list[tuple[list[Expr], list[Stmt]]] = []
        block = node.field("body") or first(node, "block")
        for clause in named(block) if block is not None else []:
            labels = [
                self.expr(part)
                for pattern in named(clause)
                if pattern.kind() == "case_pattern"
                for part in named(pattern)
            ]
            cases.append((labels, [*self.body(clause.field("consequence")), Jump(clause, "break")]))
        return [Switch(node, self.expr(subject) if subject is not None else Other(node, []), cases)]

    def s_return_statement(self, node: Syntax) -> list[Stmt]:
        inner = named(node)
        return [Return(node, self.expr(inner[0]) if inner else None)]

    def s_raise_statement(self, node: Syntax) -> list[Stmt]:
        inner = named(node)
        return [Jump(node, "raise", self.expr(inner[0]) if inner else None)]

    def s_break_statement(self, node: Syntax) -> list[Stmt]:
        return [Jump(node, "break")]

    def s_continue_statement(self, node: Syntax) -> list[Stmt]:
        return [Jump(node, "continue")]

    def s_assert_statement(self, node: Syntax) -> list[Stmt]:
        inner = named(node)
        return [Do(node, Call(node, Name(node, "assert"), [self.expr(inner[0])]))] if inner else []

    def s_function_definition(self, node: Syntax) -> list[Stmt]:
        return [Def(node, self.function(node, []))]

    def s_class_definition(self, node: Syntax) -> list[Stmt]:
        bases = node.field("superclasses")
        return [
            ClassDef(
                node,
                node.field("name").text(),
                [child.text() for child in named(bases)] if bases is not None else [],
                self.later(node.field("body")),
                [],
            )
        ]

    def s_decorated_definition(self, node: Syntax) -> list[Stmt]:
        marks = [
            self.expr(named(child)[0])
            for child in named(node)
            if child.kind() == "decorator" and named(child)
        ]
        definition = node.field("definition")
        if definition is None:
            return []
        if definition.kind() == "function_definition":
            return [Def(node, self.function(definition, marks))]
        out = self.stmt(definition)
        for stmt in out:
            if isinstance(stmt, ClassDef):
                stmt.decorators = marks
        return out

    def function(self, node: Syntax, decorators: list[Expr]) -> Function:
        name, returns = node.field("name"), node.field("return_type")
        return Function(
            node,
            name.text() if name is not None else "",
            self.params(node.field("parameters")),
            self.later(node.field("body")),
            decorators,
            returns.text() if returns is not None else "",
        )

    def params(self, node: Syntax | None) -> list[Param]:
        out: list[Param] = []
        for child in named(node) if node is not None else []:
            kind = child.kind()
            if kind == "identifier":
                out.append(Param(child.text()))
                continue
            name = child.field("name") or first(
                child, "identifier", "list_splat_pattern", "dictionary_splat_pattern"
            )
            type_, default = child.field("type"), child.field("value")
            if kind in ("list_splat_pattern", "dictionary_splat_pattern"):
                name = first(child, "identifier")
            if name is not None:
                out.append(
                    Param(
                        name.text().lstrip("*"),
                        type_.text() if type_ is not None else "",
                        (),
                        self.expr(default) if default is not None else None,
                    )
                )
        return out


def _joined(node: Syntax, parts: list[Expr]) -> Expr:
    if all(isinstance(part, Const) and isinstance(part.value, str) for part in parts):
        return Const(node, "".join(part.value for part in parts if isinstance(part, Const)))
    flat: list[Expr] = []
    for part in parts:
        flat.extend(part.parts if isinstance(part, Text) else [part])
    return Text(node, flat)
