"""JavaScript's, TypeScript's and TSX's grammars to the neutral form."""

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
    Text,
    Try,
)
from keystroke.analysis.audit.source.lower import ERROR, Lowering, first, named, number, unescape


class ScriptLowering(Lowering):
    def x_identifier(self, node: Syntax) -> Expr:
        return Name(node, node.text())

    x_this = x_super = x_property_identifier = x_shorthand_property_identifier = x_identifier
    x_shorthand_property_identifier_pattern = x_identifier

    def x_number(self, node: Syntax) -> Expr:
        return Const(node, number(node.text()))

    def x_true(self, node: Syntax) -> Expr:
        return Const(node, True)

    def x_false(self, node: Syntax) -> Expr:
        return Const(node, False)

    def x_null(self, node: Syntax) -> Expr:
        return Const(node, None)

    x_undefined = x_null

    def x_string(self, node: Syntax) -> Expr:
        return Const(node, unescape(node.text()[1:-1]))

    def x_regex(self, node: Syntax) -> Expr:
        pattern = node.field("pattern")
        flags = node.field("flags")
        inner = Const(node, pattern.text() if pattern is not None else "")
        return Call(
            node,
            Name(node, "RegExp"),
            [inner, Const(node, flags.text() if flags is not None else "")],
            {},
            True,
        )

    def x_template_string(self, node: Syntax) -> Expr:
        parts: list[Expr] = []
        for child in named(node):
            if child.kind() == "template_substitution":
                parts.extend(self.expr(part) for part in named(child))
            else:
                parts.append(Const(child, unescape(child.text())))
        if all(isinstance(part, Const) for part in parts):
            return Const(node, "".join(str(part.value) for part in parts if isinstance(part, Const)))
        return Text(node, parts)

    def x_member_expression(self, node: Syntax) -> Expr:
        return Attr(node, self.expr(node.field("object")), node.field("property").text())

    def x_subscript_expression(self, node: Syntax) -> Expr:
        key = node.field("index")
        return Index(
            node, self.expr(node.field("object")), self.expr(key) if key is not None else Other(node, [])
        )

    def x_call_expression(self, node: Syntax) -> Expr:
        arguments = node.field("arguments")
        func = self.expr(node.field("function"))
        if arguments is None:
            return Call(node, func, [])
        if arguments.kind() == "template_string":
            return Call(node, func, [self.expr(arguments)], {"tagged": Const(node, True)})
        return Call(node, func, [self.expr(child) for child in named(arguments)])

    def x_new_expression(self, node: Syntax) -> Expr:
        arguments = node.field("arguments")
        args = [self.expr(child) for child in named(arguments)] if arguments is not None else []
        return Call(node, self.expr(node.field("constructor")), args, {}, True)

    def x_binary_expression(self, node: Syntax) -> Expr:
        op = node.field("operator").text()
        if op == "+":
            return self.sum(node)
        return Op(node, op, [self.expr(node.field("left")), self.expr(node.field("right"))])

    def x_unary_expression(self, node: Syntax) -> Expr:
        return Op(node, node.field("operator").text(), [self.expr(node.field("argument"))])

    def x_parenthesized_expression(self, node: Syntax) -> Expr:
        inner = named(node)
        return self.expr(inner[0]) if inner else Other(node, [])

    x_await_expression = x_non_null_expression = x_spread_element = x_parenthesized_expression
    x_jsx_expression = x_satisfies_expression = x_parenthesized_expression

    def x_as_expression(self, node: Syntax) -> Expr:
        parts = named(node)
        return self.expr(parts[0]) if parts else Other(node, [])

    def x_type_assertion(self, node: Syntax) -> Expr:
        parts = named(node)
        return self.expr(parts[-1]) if parts else Other(node, [])

    def x_array(self, node: Syntax) -> Expr:
        return Coll(node, [self.expr(child) for child in named(node)])

    x_array_pattern = x_array

    def x_object(self, node: Syntax) -> Expr:
        keys: list[Expr] = []
        items: list[Expr] = []
        for child in named(node):
            kind = child.kind()
            if kind in ("pair", "pair_pattern"):
                key = child.field("key")
                keys.append(self.key(key))
                value = child.field("value")
                items.append(self.expr(value) if value is not None else Other(child, []))
            elif kind.startswith("shorthand_property_identifier"):
                keys.append(Const(child, child.text()))
                items.append(Name(child, child.text()))
            elif kind == "method_definition":
                keys.append(self.key(child.field("name")))
                items.append(Closure(child, self.function(child, [])))
            elif kind == "object_assignment_pattern":
                left = child.field("left")
                keys.append(Const(child, left.text()))
                items.append(Name(left, left.text()))
            else:
                keys.append(Name(child, "..."))
                items.append(self.other(child))
        return Coll(node, items, keys)

    x_object_pattern = x_object

    def key(self, node: Syntax | None) -> Expr:
        if node is None:
            return Other(node, [])
        kind = node.kind()
        if kind in ("property_identifier", "identifier"):
            return Const(node, node.text())
        if kind == "computed_property_name":
            inner = named(node)
            return self.expr(inner[0]) if inner else Other(node, [])
        return self.expr(node)

    def x_ternary_expression(self, node: Syntax) -> Expr:
        return Cond(
            node,
            self.expr(node.field("condition")),
            self.expr(node.field("consequence")),
            self.expr(node.field("alternative")),
        )

    def x_arrow_function(self, node: Syntax) -> Expr:
        return Closure(node, self.function(node, []))

    x_function_expression = x_function = x_generator_function = x_arrow_function

    def x_assignment_expression(self, node: Syntax) -> Expr:
        return Bind(node, self.expr(node.field("left")), self.expr(node.field("right")))

    def x_augmented_assignment_expression(self, node: Syntax) -> Expr:
        op = node.field("operator").text().rstrip("=")
        return Bind(node, self.expr(node.field("left")), self.expr(node.field("right")), op)

    def x_jsx_attribute(self, node: Syntax) -> Expr:
        parts = named(node)
        if len(parts) < 2:
            return Other(node, [])
        return Bind(node, Attr(node, Name(node, "jsx"), parts[0].text()), self.expr(parts[1]))

    # Statements

    def s_expression_statement(self, node: Syntax) -> list[Stmt]:
        return [Do(node, self.expr(child)) for child in named(node)]

    def s_statement_block(self, node: Syntax) -> list[Stmt]:
        return [Block(node, self.body(node))]

    def s_program(self, node: Syntax) -> list[Stmt]:
        return self.body(node)

    def s_export_statement(self, node: Syntax) -> list[Stmt]:
        inner = node.field("declaration") or node.field("value")
        return self.stmt(inner) if inner is not None else []

    def s_lexical_declaration(self, node: Syntax) -> list[Stmt]:
        out: list[Stmt] = []
        for child in named(node):
            if child.kind() != "variable_declarator":
                continue
            name, value, type_ = child.field("name"), child.field("value"), child.field("type")
            lowered = self.expr(value) if value is not None else None
            required = _required(lowered)
            if name.kind() == "identifier":
                if required:
                    out.append(Import(child, name.text(), required))
                    if isinstance(lowered, Call):
                        out.append(Do(child, lowered))
                else:
                    out.append(Let(child, name.text(), lowered, _type(type_)))
            elif required and name.kind() == "object_pattern":
                target = self.x_object(name)
                if isinstance(target, Coll) and target.keys is not None:
                    for key, item in zip(target.keys, target.items, strict=True):
                        if isinstance(key, Const) and isinstance(item, Name):
                            out.append(Import(child, item.id, f"{required}.{key.value}"))
            elif lowered is not None:
                out.append(Do(child, Bind(child, self.expr(name), lowered)))
        return out

    s_variable_declaration = s_lexical_declaration

    def s_import_statement(self, node: Syntax) -> list[Stmt]:
        source = node.field("source")
        clause = first(node, "import_require_clause")
        if clause is not None:
            name, inner = first(clause, "identifier"), first(clause, "string")
            if name is None or inner is None:
                return []
            return [Import(node, name.text(), inner.text()[1:-1].removeprefix("node:"))]
        if source is None:
            return []
        path = source.text()[1:-1].removeprefix("node:")
        out: list[Stmt] = []
        clause = first(node, "import_clause")
        for child in named(clause) if clause is not None else []:
            kind = child.kind()
            if kind == "identifier":
                out.append(Import(node, child.text(), path))
            elif kind == "namespace_import":
                out.extend(Import(node, part.text(), path) for part in named(child))
            elif kind == "named_imports":
                for part in named(child):
                    name, alias = part.field("name"), part.field("alias")
                    if name is not None:
                        out.append(Import(node, (alias or name).text(), f"{path}.{name.text()}"))
        return out

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

    s_do_statement = s_while_statement

    def s_for_statement(self, node: Syntax) -> list[Stmt]:
        init, test, step = node.field("initializer"), node.field("condition"), node.field("increment")
        return [
            Loop(
                node,
                self.block(init),
                self.expr(test) if test is not None else None,
                [Do(step, self.expr(step))] if step is not None else [],
                self.block(node.field("body")),
            )
        ]

    def s_for_in_statement(self, node: Syntax) -> list[Stmt]:
        left, right = node.field("left"), node.field("right")
        if left is None or right is None:
            return self.body(node)
        operator = node.field("operator")
        iterable = self.expr(right)
        if operator is not None and operator.text() == "in":
            iterable = Call(right, Name(right, "Object.keys"), [iterable])
        return [Loop(node, [], None, [], self.block(node.field("body")), self.expr(left), iterable)]

    def s_try_statement(self, node: Syntax) -> list[Stmt]:
        handler, final = node.field("handler"), node.field("finalizer")
        caught: list[Stmt] = []
        name = handler.field("parameter") if handler is not None else None
        if name is not None:
            caught.append(Do(name, Bind(name, self.expr(name), Name(name, ERROR))))
        return [
            Try(
                node,
                self.body(node.field("body")),
                [[*caught, *self.body(handler.field("body"))]] if handler is not None else [],
                self.body(final.field("body")) if final is not None else [],
            )
        ]

    def s_switch_statement(self, node: Syntax) -> list[Stmt]:
        cases: list[tuple[list[Expr], list[Stmt]]] = []
        body = node.field("body")
        for child in named(body) if body is not None else []:
            label = child.field("value")
            stmts: list[Stmt] = []
            for part in child.field_children("body"):
                stmts.extend(self.stmt(part))
            cases.append(([self.expr(label)] if label is not None else [], stmts))
        return [Switch(node, self.expr(node.field("value")), cases)]

    def s_return_statement(self, node: Syntax) -> list[Stmt]:
        inner = named(node)
        return [Return(node, self.expr(inner[0]) if inner else None)]

    def s_throw_statement(self, node: Syntax) -> list[Stmt]:
        return [Jump(node, "raise", self.other(node))]

    def s_break_statement(self, node: Syntax) -> list[Stmt]:
        return [Jump(node, "break")]

    def s_continue_statement(self, node: Syntax) -> list[Stmt]:
        return [Jump(node, "continue")]

    def s_function_declaration(self, node: Syntax) -> list[Stmt]:
        return [Def(node, self.function(node, []))]

    s_generator_function_declaration = s_function_declaration

    def s_class_declaration(self, node: Syntax) -> list[Stmt]:
        name, body = node.field("name"), node.field("body")
        stmts: list[Stmt] = []
        marks: list[Expr] = []
        for child in named(body) if body is not None else []:
            kind = child.kind()
            if kind == "decorator":
                marks.extend(self.expr(part) for part in named(child))
            elif kind == "method_definition":
                stmts.append(Def(child, self.function(child, marks)))
                marks = []
            elif kind in ("field_definition", "public_field_definition"):
                field_name = child.field("property") or child.field("name")
                value = child.field("value")
                if field_name is not None:
                    stmts.append(
                        Let(
                            child,
                            field_name.text(),
                            self.expr(value) if value is not None else None,
                            _type(child.field("type")),
                        )
                    )
                marks = []
        return [ClassDef(node, name.text() if name is not None else "", [], stmts, [])]

    s_abstract_class_declaration = s_class_declaration

    def x_class(self, node: Syntax) -> Expr:
        function = Function(node, "", [], self.s_class_declaration(node))
        return Closure(node, function)

    def s_type_alias_declaration(self, node: Syntax) -> list[Stmt]:
        return []

    s_interface_declaration = s_type_alias_declaration

    def function(self, node: Syntax, decorators: list[Expr]) -> Function:
        name, single, body = node.field("name"), node.field("parameter"), node.field("body")
        params = [Param(single.text())] if single is not None else self.params(node.field("parameters"))
        stmts: list[Stmt] = []
        if body is not None:
            stmts = self.body(body) if body.kind() == "statement_block" else [Return(body, self.expr(body))]
        # Destructured parameters are names bound from the hidden parameter in the body's first statements.
        parameters = node.field("parameters")
        for child in named(parameters) if parameters is not None else []:
            pattern = child.field("pattern") or child
            if pattern.kind() == "assignment_pattern":
                pattern = pattern.field("left")
            if pattern.kind() in ("object_pattern", "array_pattern"):
                stmts.insert(0, Do(pattern, Bind(pattern, self.expr(pattern), Name(pattern, _slot(pattern)))))
        return Function(node, name.text() if name is not None else "", params, stmts, decorators)

    def params(self, node: Syntax | None) -> list[Param]:
        out: list[Param] = []
        for child in named(node) if node is not None else []:
            kind = child.kind()
            pattern = child
            marks: tuple[str, ...] = ()
            if kind in ("required_parameter", "optional_parameter"):
                marks = tuple(part.text() for part in child.children() if part.kind() == "decorator")
                pattern = child.field("pattern") or child
            if pattern.kind() == "assignment_pattern":
                pattern = pattern.field("left")
            if pattern.kind() in ("object_pattern", "array_pattern"):
                out.append(Param(_slot(pattern), _type(child.field("type")), marks))
            elif pattern.kind() == "rest_pattern":
                out.extend(Param(part.text(), "", marks) for part in named(pattern))
            else:
                out.append(Param(pattern.text(), _type(child.field("type")), marks))
        return out


def _slot(node: Syntax) -> str:
    return f"{{}}{node.range().start.index}"


def _type(node: Syntax | None) -> str:
    return node.text().lstrip(": ").strip() if node is not None else ""


def _required(value: Expr | None) -> str:
    """The module behind `require("x")`, `require("x").y` and `await import("x")`; "" for anything else."""
    if isinstance(value, Attr):
        base = _required(value.base)
        return f"{base}.{value.name}" if base else ""
    if (
        isinstance(value, Call)
        and isinstance(value.func, Name)
        and value.func.id in ("require", "import")
        and value.args
    ):
        module = value.args[0]
        if isinstance(module, Const) and isinstance(module.value, str):
            return module.value.removeprefix("node:")
    return ""
