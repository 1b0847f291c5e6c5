"""Detectors for weaknesses that the conditions of a rule cannot express.

A detector listens to the data flow and reports by name; the rule with that detector decides severity and
message.
"""

from __future__ import annotations

import re

from keystroke.analysis.audit.flow.base import CallEvent
from keystroke.analysis.audit.flow.folding import key_of
from keystroke.analysis.audit.flow.knowledge import XML_FACTORIES
from keystroke.analysis.audit.flow.values import CONSTANT, LOCAL, PARAMETER, REMOTE, Value
from keystroke.analysis.audit.memory.control import ControlMatcher
from keystroke.analysis.audit.memory.matcher import MemoryMatcher
from keystroke.analysis.audit.rules.match import RuleMatcher
from keystroke.analysis.audit.rules.secrets import (
    FORMAT_MARKS,
    FORMATS,
    is_formatted_secret,
    is_placeholder,
    is_secret,
)
from keystroke.analysis.audit.source import ir

_LOGIN = re.compile(r"(?i)connect|login|createConnection|create_engine|pool$|authenticate")

_TIMED = ("python", "javascript", "typescript", "tsx")
_TIMED_NAME = re.compile(
    r"(?i)(?:^|[._])(?:\w*(?:signature|hmac|csrf\w*|(?:secret|api|auth|access)_?(?:key|token)|password|passwd)|secret)$"
)
_TOKEN = re.compile(r"(?i)token$")
_LOGS = re.compile(
    r"^(?:print|console\.(?:log|info|warn|error|debug)|logging\.\w+)$"
    r"|(?i:log(?:ger|ging)?(?:\.getLogger\(\))?)\.(?:debug|info|warn|warning|error|critical|exception|log|trace|fatal)$"
)
_PRIVATE = re.compile(
    r"(?i)(?:^|[._]|(?<=[a-z])(?=[A-Z]))(?:password|passwd|passphrase|(?:api|secret|private|access)_?key"
    r"|(?:auth|access|refresh|bearer)_?token|client_?secret|secret|credit_?card(?:_?number)?|ssn|cvv)$"
)
_ACCESS_KEY = re.compile(r"(?i)(?:^|[._])\w*access_?key$")
_SECRET_KEY = re.compile(r"(?i)secret_?(?:access_?)?key")
_DIGEST = re.compile(r"(?i)hmac")
_KIND = re.compile(r"(?i)(?:^|[._])(?:mode|kind|type|method|status|state|role|action|stage|step|strategy)$")
_REMEMBERED = re.compile(r"(?i)(?:^|[._])(?:last|prev|previous|old)_\w+$")
_QUERY = re.compile(r"(?:\.|^)(?:filter|where|having|exists|and_|or_|not_|case|update|delete)$")
_ADDRESS = re.compile(
    r"(?i)(?:^|[._])(?:\w*url|\w*uri|location|href|parsed\w*|parts)\.|url(?:parse|split)\(\)|\bURL\(\)"
)


# An f-string: its text is put together, so no secret is written there.
_FORMATTED = re.compile(r"(?i)r?fr?[\"'][^{]*\{")


def _written(node: ir.Syntax) -> str:
    """The text of a value, without the name it is assigned to."""
    right = node.field("right")
    return str((right or node).text())


def _is_word(const: object) -> bool:
    """Whether a constant is one plain word, which a program compares with rather as a state than a secret."""
    return isinstance(const, str) and const.isalpha() and (const.islower() or const.isupper())


def _names_in_text(expr: ir.Expr, depth: int) -> list[str]:
    """The names whose text becomes part of the text of an expression."""
    parts: list[ir.Expr] = []
    if depth > 6:
        return []
    if isinstance(expr, ir.NameExpr):
        return [expr.id]
    if isinstance(expr, ir.AttrExpr):
        return [key_of(expr) or expr.name]
    if isinstance(expr, ir.IndexExpr) and isinstance(expr.key, ir.ConstExpr):
        return [str(expr.key.value)]
    if isinstance(expr, ir.TextExpr):
        parts = expr.parts
    elif isinstance(expr, ir.OpExpr) and expr.op in ("+", "%", "||", "or"):
        parts = expr.args
    elif isinstance(expr, ir.CollectionExpr) and expr.keys is None:
        parts = expr.items
    elif isinstance(expr, ir.CallExpr):
        func = expr.func
        if isinstance(func, ir.AttrExpr) and func.name in ("%", "format", "decode", "toString"):
            base = [func.base] if func.name in ("decode", "toString") else []
            parts = [*base, *expr.args, *expr.kwargs.values()]
        elif isinstance(func, ir.NameExpr) and func.id in ("str", "repr", "String"):
            parts = expr.args
    return [name for part in parts for name in _names_in_text(part, depth + 1)]


def _is_condition_of_query(node: ir.Syntax) -> bool:
    """Whether a comparison is an argument of a query, which writes it as SQL."""
    parent = node.parent()
    while parent is not None and parent.kind() in ("parenthesized_expression", "binary_operator"):
        parent = parent.parent()
    call = parent.parent() if parent is not None and parent.kind() == "argument_list" else None
    function = call.field("function") if call is not None else None
    return function is not None and _QUERY.search(function.text()) is not None


class _Secrets(RuleMatcher):
    def on_assign(self, path: str, key: str, value: Value, node: ir.Syntax, target: ir.Expr) -> None:
        super().on_assign(path, key, value, node, target)
        name = path.rsplit(".", 1)[-1]
        if name.endswith("[]") and isinstance(target, ir.IndexExpr) and isinstance(target.key, ir.ConstExpr):
            name = str(target.key.value)
        self.check_named_secret(name, value, node)

    def on_call(self, event: CallEvent) -> Value | None:
        if self.language in _TIMED and _LOGS.search(event.path):
            self.check_logged_secret(event)
        for name, value in event.kwargs.items():
            # A variable with the name of a secret was reported where it was assigned.
            if not is_secret(ir.last_name(event.call.kwargs[name]) or "", str(value.const)):
                self.check_named_secret(name, value, event.call.kwargs[name].node)
            if (
                name in ("password", "passwd")
                and isinstance(value.const, str)
                and value.const
                and not is_placeholder(value.const)
                and _LOGIN.search(event.path)
            ):
                self.report("named-secret", event.call.kwargs[name].node)
        return super().on_call(event)

    def on_collection(self, value: Value, node: ir.Syntax, coll: ir.CollectionExpr) -> None:
        super().on_collection(value, node, coll)
        if coll.keys is not None:
            for key, item in zip(coll.keys, coll.items, strict=True):
                if (
                    isinstance(key, ir.ConstExpr)
                    and isinstance(key.value, str)
                    and isinstance(item, ir.ConstExpr)
                ):
                    self.check_named_secret(key.value, Value(item.value), item.node)

    def on_comparison(self, test: ir.OpExpr, args: list[Value]) -> None:
        self.check_timing(test, args)
        for side, other in ((0, 1), (1, 0)):
            name = ir.last_name(test.args[side])
            state = self.language == "python" and _is_word(args[other].const)
            if name and isinstance(test.args[other], ir.ConstExpr) and not state:
                self.check_named_secret(name, args[other], test.node)

    def check_timing(self, test: ir.OpExpr, args: list[Value]) -> None:
        """A secret compared with a caller's value in variable time."""
        if self.language not in _TIMED or any(not value.level or value.numeric for value in args):
            return
        names = [
            str(expr.key.value)
            if isinstance(expr, ir.IndexExpr) and isinstance(expr.key, ir.ConstExpr)
            else key_of(expr) or ""
            for expr in test.args
        ]
        # What the environment of the process holds is the secret, not what a caller sends.
        sent = [value.level >= PARAMETER and not value.origin.startswith("os.") for value in args]
        digest = any(_DIGEST.search(value.path) for value in args)
        if self.function is not None and self.function.name in ("__eq__", "__ne__", "equals"):
            return
        if any(map(_ADDRESS.search, names)) or any(_ADDRESS.search(value.path) for value in args):
            return  # parts of an address, among them its user and password, are not secret to who has it
        if any(map(_REMEMBERED.search, names)):
            return  # whether something changed since the last time
        if any(map(_KIND.search, names)) or _is_condition_of_query(test.node):
            return  # the name of a kind; a comparison that the database makes
        named = any(map(_TIMED_NAME.search, names)) or (
            any(value.level >= REMOTE for value in args) and any(map(_TOKEN.search, names))
        )
        if (named and sent[0] != sent[1]) or (digest and any(sent)):
            self.report("timing-compare", test.node)

    def check_logged_secret(self, event: CallEvent) -> None:
        """A password or key that is logged."""
        for arg in (*event.call.args, *event.call.kwargs.values()):
            for name in _names_in_text(arg, 0):
                held = self.flow.lookup(name)
                if _ACCESS_KEY.search(name) and self._has_secret_key():
                    continue  # the name of an account, beside the key that is secret
                if _PRIVATE.search(name) and not (
                    held is not None and (held.numeric or held.known or held.function is not None)
                ):
                    self.report("secret-logged", event.call.node, origin=name)
                    return

    def _has_secret_key(self) -> bool:
        return self.function is not None and _SECRET_KEY.search(self.function.node.text()) is not None

    def on_function(self, function: ir.Function, handler: bool) -> None:
        super().on_function(function, handler)
        for param in function.params:
            if isinstance(param.default, ir.ConstExpr) and isinstance(param.default.value, str):
                self.check_named_secret(param.name, Value(param.default.value), param.default.node)

    def check_named_secret(self, name: str, value: Value, node: ir.Syntax) -> None:
        text = value.const
        if isinstance(text, bytes):
            text = text.decode("latin-1")
        if isinstance(text, str) and is_secret(name, text) and not _FORMATTED.match(_written(node)):
            self.report("named-secret", node)

    def scan_text(self, root: ir.Syntax, text: str) -> None:
        """Keys recognised by their format, anywhere in the text."""
        pair = self.rules.detectors.get("secret-format")
        if pair is None or not any(mark in text for mark in FORMAT_MARKS):
            return
        for found in FORMATS.finditer(text):
            if is_formatted_secret(text, found.start(), found.end()):
                self.record_match(pair[0], pair[1], found.start(), found.end())


_XML_LEVELS = {"": CONSTANT, "local": LOCAL, "remote": REMOTE}
_XML_SAFE = re.compile(
    r"(?:disallow-doctype-decl|FEATURE_SECURE_PROCESSING|secure-processing)\"?\s*,\s*(?:true|Boolean\.TRUE)"
    r"|(?:external-general-entities|external-parameter-entities|load-external-dtd)\"\s*,\s*(?:false|Boolean\.FALSE)"
    r"|(?:SUPPORT_DTD|supportDTD|(?:IS_SUPPORTING_EXTERNAL|isSupportingExternal)\w*)\"?\s*,\s*(?:\"?false|Boolean\.FALSE)"
    r"|ACCESS_EXTERNAL|accessExternal|setExpandEntityReferences\(\s*false|setEntityResolver|setXMLResolver"
)


class Detectors(_Secrets):
    def on_call(self, event: CallEvent) -> Value | None:
        if self.language == "java":
            self.check_xml_factory(event)
            self.check_cookie(event)
        return super().on_call(event)

    def on_assign(self, path: str, key: str, value: Value, node: ir.Syntax, target: ir.Expr) -> None:
        if path == "jsx.dangerouslySetInnerHTML" and value.level < REMOTE and _is_in_style(node):
            return  # the program's own styles
        super().on_assign(path, key, value, node, target)
        if path == "jsx.target" and value.const in ("_blank", "blank"):
            element = node.parent()
            if element is not None and _LINK.match(element.text()) and not _TIED.search(element.text()):
                self.report("blank-target", element)

    def on_collection(self, value: Value, node: ir.Syntax, coll: ir.CollectionExpr) -> None:
        markup = coll.keys is not None and any(
            isinstance(key, ir.ConstExpr) and key.value == "__html" for key in coll.keys
        )
        if not (markup and value.level < REMOTE and _is_in_style(node)):
            super().on_collection(value, node, coll)

    def check_xml_factory(self, event: CallEvent) -> None:
        """A Java XML factory used without a setting that disables external entities."""
        owner, _, method = event.path.rpartition(".")
        name = owner.split(".", 1)[0].removesuffix("()")
        factory = XML_FACTORIES.get(name)
        if factory is None or method not in factory.methods:
            return
        if factory.foreign and not (event.args and event.args[0].level >= _XML_LEVELS[factory.foreign]):
            return
        root = event.call.node.get_root().root()
        if not _XML_SAFE.search(root.text()):
            self.report("xml-factory", event.call.node)

    def check_cookie(self, event: CallEvent) -> None:
        """A Java cookie without the Secure or HttpOnly flag."""
        if not event.path.endswith(".addCookie") or not event.call.args:
            return
        holder = event.call.args[0]
        if not isinstance(holder, ir.NameExpr) or event.args[0].path not in ("Cookie", "Cookie()"):
            return
        text = event.call.node.get_root().root().text()
        if f"{holder.id}.setSecure(" not in text:
            self.report("plain-cookie", event.call.node)
        if f"{holder.id}.setHttpOnly(" not in text:
            self.report("bare-cookie", event.call.node)

    def _follows_path(self) -> bool:
        """Whether a function here splits a text, or takes a path."""
        return "split(" in self.flow.functions[0].node.text() or any(
            param.name in ("path", "keyPath") for function in self.flow.functions for param in function.params
        )

    def _is_told_later(self, detector: str, node: ir.Syntax) -> bool:
        """Whether the rule of a detector has a match behind a node in its function; those before it go."""
        if self.function is None or detector not in self.rules.detectors:
            return False
        rule, span = self.rules.detectors[detector][0].id, self.function.node.range()
        here = node.range().start.index
        for known, start in list(self.matches):
            if known == rule and span.start.index <= start < span.end.index:
                if start > here:
                    return True
                del self.matches[known, start]
        return False

    def on_index(self, base: Value, key: Value, node: ir.Syntax, expr: ir.IndexExpr) -> None:
        """`target[key] = value` with a foreign key: JavaScript prototypes and Python sessions."""
        if self.language == "python":
            if (
                key.level >= REMOTE
                and not key.numeric
                and base.path.endswith("session")
                and _assignment_of(node) is not None
            ):
                self.report("session-key", node, origin=key.origin)
            return
        if (
            self.language not in ("javascript", "typescript", "tsx")
            or key.numeric
            or key.level < PARAMETER
            or key.is_safe_for("proto")
            or _ONE_CHARACTER.search(key.path)
        ):
            return
        parent = _assignment_of(node)
        if parent is None:
            return
        around = self.function.node.text() if self.function is not None else ""
        nested = False
        if isinstance(expr.base, ir.IndexExpr):
            outer = self.flow.eval_silently(expr.base.key)
            nested = not outer.is_safe_for("proto") and (
                outer.level >= REMOTE
                or (outer.level >= PARAMETER and _are_steps((expr.base.key, expr.key), (outer, key), around))
            )
        if _GUARDED.search(around) or _COUNTED.search(key_of(expr.key) or ""):
            return
        right = parent.field("right")
        if right is not None and right.kind() in ("function_expression", "arrow_function"):
            return  # a method that is defined
        name = key_of(expr.base)
        walked = bool(name and re.search(rf"\b{re.escape(name)}\s*=\s*{re.escape(name)}\s*\[", around))
        own = self.function.name if self.function is not None else ""
        into = rf"\b{re.escape(own)}\s*\([^;)]*\b{re.escape(name or '')}\s*\["
        body = around.partition("{")[2]  # without its own head
        recursed = bool(name and own) and re.search(into, body)
        if name is not None and re.search(_OWNED.format(re.escape(name)), around):
            return
        spelled = key_of(expr.key) or ""
        held = name or expr.base.node.text()
        if spelled and re.search(_OWN_KEYS.format(re.escape(spelled), re.escape(held)), around):
            return
        # A copy of one level sets at most the prototype of the copy; one that calls itself reaches further.
        given = rf"[(,]\s*{re.escape(name or '')}\s*\[\s*{re.escape(spelled)}\s*\]\s*(?:[,)]|\|\||\?\?)"
        deep = (
            right is not None
            and right.kind() == "call_expression"
            and right.field("function").text() != "Object.assign"  # one level
            and (right.field("function").text() == own or bool(_MERGE.search(right.field("function").text())))
            and bool(name and spelled)
            and re.search(given, right.text()) is not None
        )
        sent = key.level >= REMOTE and not _OWN_DATA.search(key.origin)
        if sent and name and right is not None and not (walked or recursed or deep):
            sent = not _is_new_table(expr.node, name)
        walked = walked and (sent or self._follows_path())
        if (walked or recursed or deep) and self._is_told_later("foreign-property", parent):
            return  # all steps of a merge are one weakness, told where the value is set
        if nested or walked or recursed or deep or sent:
            self.report("foreign-property", parent, origin=key.origin)


_MERGE = re.compile(
    r"(?i)(?:^|[._])(?:deep_?)?(?:merge|extend|assign|defaults|clone)(?:_?(?:deep|with|objects?))?$"
)
_ONE_CHARACTER = re.compile(r"\.(?:fromCharCode|fromCodePoint|charAt|toFixed)\(\)$")  # no name of a property
_PIECE = re.compile(r"\.(?:split|slice|substring|substr)\(\)")  # cut from a text
_OWN_DATA = re.compile(r"^(?:JSON\.parse|process\.|minimist|yargs|commander|fs\.)")
_COUNTED = re.compile(r"(?:^|[._])[ij]$|(?i:index|idx|length|count|offset|position|number|row|col)$")
_LINK = re.compile(r"<a\s[\s\S]*\bhref=(?:\{|[\"']https?:)")
_TIED = re.compile(r"\brel=|\{\.\.\.")
_OWNED = r"hasOwn(?:Property)?(?:\.call)?\(\s*{0}\s*,|\b{0}\.hasOwnProperty\("
# A loop over the keys that the object itself has: none of them is new.
_OWN_KEYS = r"\b{0}\s+(?:in\s+{1}|of\s+Object\.keys\({1}\))\s*\)|Object\.keys\({1}\)\.forEach\(\s*\(?{0}\b"
_GUARDED = re.compile(
    r"__proto__|\b(?:[A-Z][A-Z_]{2,}|\w*(?i:block|forbid|unsafe|danger|reserved|proto)\w*)\.(?:has|includes|indexOf)\(|"
    r"Object\.create\(null\)|new Map\b|isPrototypePolluted|isSafeKey|isUnsafe(?:Key|Property)"
)


def _are_steps(keys: tuple[ir.Expr, ir.Expr], values: tuple[Value, Value], around: str) -> bool:
    """Whether two keys in a row are one path: cut from a text, items of one list, keys of another object."""
    if any(_PIECE.search(value.path) for value in values):
        return True
    one, other = keys
    if isinstance(one, ir.IndexExpr) and isinstance(other, ir.IndexExpr):
        return key_of(one.base) == key_of(other.base) is not None
    return all(re.search(rf"\b{re.escape(key_of(step) or ',')}\s+in\b", around) for step in keys)


def _is_new_table(node: ir.Syntax, name: str) -> bool:
    """Whether a table is made empty around a node: a key sets at most the prototype of the table itself."""
    new = rf"\b(?:const|let|var)\s+{re.escape(name)}\s*(?::[^=;]*)?=\s*\{{\s*\}}"
    at = node
    while at is not None:
        if re.search(new, at.text()):
            return True
        at = at.parent()
    return False


_STYLE = re.compile(r"<style\b|[\w.]*createElement\(\s*[\"']style[\"']")


def _is_in_style(node: ir.Syntax) -> bool:
    """Whether the content of a style element is near around a node."""
    at = node
    for _ in range(5):
        parent = at.parent()
        if parent is None:
            return False
        if _STYLE.match(parent.text()):
            return True
        at = parent
    return False


def _assignment_of(node: ir.Syntax) -> ir.Syntax | None:
    """The assignment that has a node as its left side."""
    parent = node.parent()
    if (
        parent is None
        or parent.kind() not in ("assignment_expression", "assignment")
        or parent.field("left").range().start.index != node.range().start.index
    ):
        return None
    return parent


class MemoryDetectors(_Secrets, ControlMatcher, MemoryMatcher):
    pass
