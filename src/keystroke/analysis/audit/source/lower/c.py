"""Lowers C and C++.

Pointer syntax is normalised: `*p` becomes `p[0]`, `p->x` becomes `p.x`, and `&x` the operator "&".
"""

from __future__ import annotations

import re

from keystroke.analysis.audit.source import ir
from keystroke.analysis.audit.source.ir import Expr, Stmt, Syntax
from keystroke.analysis.audit.source.lower import Lowering, SwitchCases, first, named, number, text, unescape

_DECLARATORS = (
    *("pointer_declarator", "array_declarator", "reference_declarator"),
    *("function_declarator", "parenthesized_declarator"),
)
_ARRAY = re.compile(r"new\s+[\w:<>,\s]+\**\s*\[")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


class CLowering(Lowering):
    inside = 0  # depth of enclosing function definitions
    x_this = x_field_identifier = x_type_identifier = x_primitive_type = Lowering.x_identifier
    x_namespace_identifier = Lowering.x_identifier
    x_number_literal = Lowering.lower_number
    x_null = Lowering.lower_none
    x_initializer_list = Lowering.lower_list
    x_condition_clause = Lowering.x_parenthesized_expression

    def x_identifier(self, node: Syntax) -> Expr:
        return self.lower_none(node) if node.text() == "nil" else super().x_identifier(node)

    def x_qualified_identifier(self, node: Syntax) -> Expr:
        return ir.NameExpr(node, node.text().replace("::", ".").split("<", 1)[0].lstrip("."))

    x_template_function = x_template_type = x_qualified_identifier

    def x_string_literal(self, node: Syntax) -> Expr:
        source = node.text()
        return ir.ConstExpr(node, unescape(source[source.find('"') + 1 : -1]))

    def x_raw_string_literal(self, node: Syntax) -> Expr:
        return ir.ConstExpr(node, text(first(node, "raw_string_content")))

    def x_char_literal(self, node: Syntax) -> Expr:
        source = node.text()
        inner = unescape(source[source.find("'") + 1 : -1])
        return ir.ConstExpr(node, ord(inner) if len(inner) == 1 else None)

    def x_concatenated_string(self, node: Syntax) -> Expr:
        parts = self.children(node)
        return ir.ConstExpr(
            node, "".join(str(part.value) if isinstance(part, ir.ConstExpr) else "%s" for part in parts)
        )

    def x_field_expression(self, node: Syntax) -> Expr:
        return ir.AttrExpr(node, self.expr(node.field("argument")), node.field("field").text())

    def x_subscript_expression(self, node: Syntax) -> Expr:
        key = node.field("index") or node.field("indices")
        if key is not None and key.kind() == "subscript_argument_list":
            inner = named(key)
            key = inner[0] if inner else None
        base = self.expr(node.field("argument"))
        return ir.IndexExpr(node, base, self.optional(key) or ir.UnknownExpr(node, []))

    def x_pointer_expression(self, node: Syntax) -> Expr:
        inner = self.expr(node.field("argument"))
        if node.field("operator").text() == "&":
            return ir.OpExpr(node, "&", [inner])
        return ir.IndexExpr(node, inner, ir.ConstExpr(node, 0))

    def x_assignment_expression(self, node: Syntax) -> Expr:
        left = node.field("left")
        if left.kind() == "call_expression":  # tie(a, b) = f(): whatever is named gets a value
            return ir.UnknownExpr(node, [self.expr(node.field("right")), self.expr(left)])
        return super().x_assignment_expression(node)

    def x_call_expression(self, node: Syntax) -> Expr:
        args = self.children(node.field("arguments"))
        callee = node.field("function")
        cast = callee.kind() == "template_function" and text(callee.field("name")).endswith("_cast")
        if cast and args:
            return ir.CastExpr(node, callee.text(), args[0])
        return ir.CallExpr(node, self.expr(callee), args)

    def new_array(self, node: Syntax, size: Expr, type_name: str) -> Expr:
        args = [size, ir.ConstExpr(node, type_name)]
        return ir.CallExpr(node, ir.NameExpr(node, "new[]"), args, {}, True)

    def x_new_expression(self, node: Syntax) -> Expr:
        count = first(node, "new_declarator")
        if count is None and _ARRAY.match(node.text()):
            return self.new_array(node, ir.UnknownExpr(node, []), "?")
        if count is not None:
            inner = named(count)
            size = self.expr(inner[0]) if inner else ir.UnknownExpr(node, [])
            return self.new_array(node, size, node.field("type").text())
        args = self.children(node.field("arguments"))
        kwargs: dict[str, Expr] = {"type": ir.ConstExpr(node, node.field("type").text())}
        placement = node.field("placement")
        inner = named(placement) if placement is not None else []
        if inner:
            kwargs["place"] = self.expr(inner[0])
        return ir.CallExpr(node, ir.NameExpr(node, "new"), args, kwargs, True)

    def x_delete_expression(self, node: Syntax) -> Expr:
        array = any(child.text() == "[" for child in node.children() if not child.is_named())
        name = ir.NameExpr(node, "delete[]" if array else "delete")
        return ir.CallExpr(node, name, self.children(node)[:1])

    def x_binary_expression(self, node: Syntax) -> Expr:
        left, right = node.field("left"), node.field("right")
        if left.kind() == "new_expression" and right.kind() == "lambda_expression":
            # The grammar reads `new T*[n]` as a product with a lambda.
            return self.new_array(node, ir.UnknownExpr(node, []), "?")
        return ir.OpExpr(node, node.field("operator").text(), [self.expr(left), self.expr(right)])

    def x_update_expression(self, node: Syntax) -> Expr:
        op = "-" if text(node.field("operator")) == "--" else "+"
        return ir.AssignExpr(node, self.expr(node.field("argument")), ir.ConstExpr(node, 1), op)

    def x_cast_expression(self, node: Syntax) -> Expr:
        return ir.CastExpr(node, node.field("type").text(), self.expr(node.field("value")))

    def x_sizeof_expression(self, node: Syntax) -> Expr:
        kind, value, name = node.field("type"), node.field("value"), ir.NameExpr(node, "sizeof")
        if kind is not None:
            return ir.CallExpr(
                node, name, [ir.ConstExpr(node, kind.text())], {"type": ir.ConstExpr(node, True)}
            )
        return ir.CallExpr(node, name, [self.expr(value)] if value is not None else [])

    def x_conditional_expression(self, node: Syntax) -> Expr:
        test = self.expr(node.field("condition"))
        then = self.optional(node.field("consequence")) or test
        return ir.ConditionalExpr(node, test, then, self.expr(node.field("alternative")))

    def x_lambda_expression(self, node: Syntax) -> Expr:
        declarator = node.field("declarator")
        params = self.params(declarator.field("parameters")) if declarator is not None else []
        return ir.ClosureExpr(node, ir.Function(node, "", params, self.body(node.field("body"))))

    # Statements

    s_translation_unit = s_declaration_list = s_linkage_specification = Lowering.body
    s_preproc_else = s_preproc_elif = s_template_declaration = Lowering.body
    s_preproc_call = s_preproc_function_def = s_type_definition = s_using_declaration = Lowering.skip
    s_struct_specifier = s_union_specifier = s_enum_specifier = s_type_identifier = Lowering.skip
    s_identifier = s_access_specifier = Lowering.skip
    s_compound_statement = Lowering.s_block

    def s_preproc_if(self, node: Syntax) -> list[Stmt]:
        other = node.field("alternative")
        if not self.inside or other is None:  # outside functions the last definition of a name counts
            return self.body(node)
        skip = {
            part.range().start.index for part in (other, node.field("condition"), node.field("name")) if part
        }
        kept = [child for child in named(node) if child.range().start.index not in skip]
        then = [stmt for child in kept for stmt in self.stmt(child)]
        return [ir.IfStmt(node, ir.UnknownExpr(node, []), then, self.stmt(other))]

    s_preproc_ifdef = s_preproc_if

    def s_namespace_definition(self, node: Syntax) -> list[Stmt]:
        return self.body(node.field("body"))

    def s_preproc_include(self, node: Syntax) -> list[Stmt]:
        path = node.field("path")
        return [ir.ImportStmt(node, "#include", path.text().strip('<>"'))] if path is not None else []

    def s_preproc_def(self, node: Syntax) -> list[Stmt]:
        name, source = text(node.field("name")), text(node.field("value")).strip()
        if not name or not source:
            return []
        value: Expr
        if source.startswith(('"', 'L"')):
            value = ir.ConstExpr(node, unescape(source.removeprefix("L")[1:].split('"', 1)[0]))
        elif _IDENTIFIER.fullmatch(source) and source != name:  # an alias of a function or a constant
            value = ir.NameExpr(node, source)
        else:
            plain = number(source.strip("()"))
            if plain is None:
                return []
            value = ir.ConstExpr(node, plain)
        return [ir.DeclareStmt(node, name, value, "define")]

    def s_class_specifier(self, node: Syntax) -> list[Stmt]:
        return [ir.ClassStmt(node, text(node.field("name")), [], self.body(node.field("body")), [])]

    def s_declaration(self, node: Syntax) -> list[Stmt]:
        base = text(node.field("type"))
        constructor = base.replace("::", ".").split("<", 1)[0]
        static = any(
            child.kind() == "storage_class_specifier" and child.text() == "static"
            for child in node.children()
        )
        out: list[Stmt] = []
        for child in node.field_children("declarator"):
            initialised = child.kind() == "init_declarator"
            value = child.field("value") if initialised else None
            name, pointer, size, function = self.declared(child.field("declarator") if initialised else child)
            args = self.constructor_args(child) if function and value is None else None
            if args is not None:
                made = ir.CallExpr(child, ir.NameExpr(child, constructor), args, {}, True)
                out.append(ir.DeclareStmt(child, name, made, base))
            elif name and (not function or value is not None):  # a pointer to a function is a variable
                if value is not None and value.kind() == "argument_list":
                    func = ir.NameExpr(value, constructor)
                    lowered: Expr | None = ir.CallExpr(value, func, self.children(value), {}, True)
                else:
                    lowered = self.optional(value)
                out.append(ir.DeclareStmt(child, name, lowered, base, size, pointer, static))
        return out

    s_field_declaration = s_declaration

    def constructor_args(self, node: Syntax) -> list[Expr] | None:
        """The arguments of `T x(a);` in a function, which parses as the declaration of a function."""
        parameters = node.field("parameters") if self.inside else None
        parts = [named(child) for child in named(parameters)] if parameters is not None else []
        if not parts or any(len(part) != 1 or part[0].kind() != "type_identifier" for part in parts):
            return None
        return [ir.NameExpr(part[0], part[0].text()) for part in parts]

    def declared(self, node: Syntax | None) -> tuple[str, bool, Expr | None, bool]:
        """(name, is a pointer, array size, is a function) of a declarator."""
        pointer, function = False, False
        size: Expr | None = None
        while node is not None and node.kind() in _DECLARATORS:
            kind = node.kind()
            if kind == "pointer_declarator":
                pointer = True
            elif kind == "array_declarator":
                count = self.optional(node.field("size")) or ir.UnknownExpr(node, [])
                size = count if size is None else ir.OpExpr(node, "*", [count, size])
            elif kind == "function_declarator":
                function = True
            inner = node.field("declarator")
            if inner is None:
                parts = named(node)
                inner = parts[-1] if parts else None
            node = inner
        return text(node), pointer, size, function

    def s_do_statement(self, node: Syntax) -> list[Stmt]:
        test = node.field("condition")
        # The body runs at least once; a switch with one case catches its breaks.
        once = ir.SwitchStmt(node, ir.ConstExpr(node, True), [([], self.block(node.field("body")))])
        return [once, ir.ExprStmt(node, self.expr(test))] if test is not None else [once]

    def s_for_range_loop(self, node: Syntax) -> list[Stmt]:
        name, _, _, _ = self.declared(node.field("declarator"))
        right = node.field("right")
        if right is None:
            return self.body(node)
        body = self.block(node.field("body"))
        return [ir.LoopStmt(node, [], None, [], body, ir.NameExpr(node, name), self.expr(right))]

    def s_switch_statement(self, node: Syntax) -> list[Stmt]:
        cases: SwitchCases = []
        body = node.field("body")
        for child in named(body) if body is not None else []:
            if child.kind() != "case_statement":
                continue
            label = child.field("value")
            parts = named(child)
            stmts = [stmt for part in (parts[1:] if label is not None else parts) for stmt in self.stmt(part)]
            cases.append(([self.expr(label)] if label is not None else [], stmts))
        return [ir.SwitchStmt(node, self.expr(node.field("condition")), cases)]

    def s_goto_statement(self, node: Syntax) -> list[Stmt]:
        label = node.field("label")
        target = ir.NameExpr(node, label.text()) if label is not None else None
        return [ir.JumpStmt(node, "goto", target)]

    def s_labeled_statement(self, node: Syntax) -> list[Stmt]:
        rest = [stmt for child in named(node)[1:] for stmt in self.stmt(child)]
        return [ir.LabelStmt(node, text(node.field("label"))), *rest]

    def s_try_statement(self, node: Syntax) -> list[Stmt]:
        handlers = [
            self.block(child.field("body")) for child in named(node) if child.kind() == "catch_clause"
        ]
        return [ir.TryStmt(node, self.block(node.field("body")), handlers, [])]

    def s_function_definition(self, node: Syntax) -> list[Stmt]:
        declarator = node.field("declarator")
        while declarator is not None and declarator.kind() in ("pointer_declarator", "reference_declarator"):
            declarator = declarator.field("declarator") or (
                named(declarator)[-1] if named(declarator) else None
            )
        if declarator is None or declarator.kind() != "function_declarator":
            return self.block(node.field("body"))
        self.inside += 1
        body = self.body(node.field("body"))
        self.inside -= 1
        name, params = text(declarator.field("declarator")), self.params(declarator.field("parameters"))
        return [ir.FunctionStmt(node, ir.Function(node, name, params, body, [], text(node.field("type"))))]

    def params(self, node: Syntax | None) -> list[ir.Param]:
        out: list[ir.Param] = []
        for child in named(node) if node is not None else []:
            name, pointer, size, _ = self.declared(child.field("declarator"))
            if name:
                star = "*" if pointer or size is not None else ""
                reference = "&" if "&" in child.field("declarator").text() else ""
                out.append(ir.Param(name, text(child.field("type")) + star + reference))
        return out
