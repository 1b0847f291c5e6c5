"""The result of a call, and its effects on the variables passed to it."""

from __future__ import annotations

import re

from keystroke.analysis.audit.flow.base import ESCAPING, SELF, CallEvent
from keystroke.analysis.audit.flow.folding import format_text, key_of, uses_after_replacing
from keystroke.analysis.audit.flow.narrowing import NarrowingFlow
from keystroke.analysis.audit.flow.roles import callback_roles
from keystroke.analysis.audit.flow.values import (
    ALL,
    CONSTANT,
    HOLE,
    HTML,
    LOCAL,
    NONE,
    PLAIN,
    REMOTE,
    UNKNOWN,
    Value,
    constant,
    mix,
    replace,
    text_of,
)
from keystroke.analysis.audit.source import ir

_PATH = frozenset({"path"})
_SETTER, _GETTER = re.compile(r"set[A-Z]\w*"), re.compile(r"get[A-Z]\w*")


# Functions of the language and its libraries that return the text they are given, whole or in parts.
_TEXT_FUNCTION = re.compile(
    r"(?:next|iter|map|filter|zip|enumerate|max|min|vars|getattr|super|type|str\.\w+)$"
    r"|(?:.*\.)?(?:format\w*|%|join|get|pop|setdefault|\w*substitute|r?partition|\w*gettext\w*|_)$"
    r"|(?:re|regex|base64|binascii|codecs|urllib|html|json|textwrap|string|markdown2?|unicodedata|operator"
    r"|functools|itertools|collections|typing|asyncio|io|six|ast|xml|zlib|gzip|pickle|yaml)\."
)
_ANSWERED = frozenset({"html", "header", "trust", "redirect"})
_CODECS = ("utf-8", "utf8", "UTF-8", "ascii", "latin-1", "latin1")  # how text is encoded is no part of it


class CallFlow(NarrowingFlow):
    def eval_call(self, expr: ir.CallExpr) -> Value:
        receiver: Value | None = None
        func = expr.func
        function = None
        if isinstance(func, ir.AttrExpr):
            receiver = self.eval(func.base)
            if receiver.path:
                path = f"{receiver.path}.{func.name}"
            elif isinstance(receiver.const, str):
                path = f"str.{func.name}"
            else:
                path = f"?.{func.name}"
            method = receiver.item(func.name)
            if method is not None and method.path and method.function is None:
                path = method.path
            elif receiver.path in SELF:
                held = self.lookup(func.name)
                function = held.function if held is not None else None
        else:
            callee = self.eval(func)
            path, function = callee.path or "?", callee.function
        args: list[Value] = []
        mapped: Value | None = None
        for arg in expr.args:
            if isinstance(arg, ir.ClosureExpr):
                args.append(
                    self.eval_closure(
                        arg,
                        self.element_of(receiver)
                        if receiver is not None
                        and receiver.level > CONSTANT
                        and self.knowledge.item_callbacks.match(path)
                        else None,
                        callback_roles(path, args, arg.function) if self.family == "javascript" else (),
                    )
                )
                if self.family == "javascript" and receiver is not None and receiver.level:
                    mapped = self.closure_result if path.endswith((".map", ".flatMap")) else None
            else:
                args.append(self.eval(arg))
        kwargs = {name: self.eval(arg) for name, arg in expr.kwargs.items()}
        event = CallEvent(expr, path, receiver, args, kwargs, self.functions[-1] if self.functions else None)
        replaced = self.listener.on_call(event) if not self.silent else None
        self.apply_effects(expr, path, receiver, args)
        if replaced is not None:
            return replaced
        if mapped is not None:  # a list of what the function makes of each item
            return replace(mapped, path=f"{path}()", const=UNKNOWN, items=None, function=None)
        if (
            function is None
            and self.find_function is not None
            and (
                receiver is None
                or (receiver.level == CONSTANT and self.family not in ("python", "javascript"))
                or (receiver.path in SELF and self.family == "javascript")
            )
        ):
            name = path.rsplit(".", 1)[-1]
            self.lookups[name] = self.function_text(name)
            function = self.find_function(name)
        if function is not None and function is not (self.functions[-1] if self.functions else None):
            result = self.inline_call(function, args)
            if result is not None:
                return replace(result, path=result.path or f"{path}()")
        return self.call_result(expr, path, receiver, args, kwargs)

    def call_result(
        self,
        expr: ir.CallExpr,
        path: str,
        receiver: Value | None,
        args: list[Value],
        kwargs: dict[str, Value],
    ) -> Value:
        know = self.knowledge
        out = f"{path}()"
        if args and receiver is not None and know.text_setters.match(path):
            # `$(...).text(value)` returns the element, with the value in it as text.
            return replace(mix([receiver, *args]).as_safe_for(HTML), path=out)
        if know.sources.match(out):
            return Value(
                level=REMOTE,
                path=out,
                origin=out,
                numeric=know.numeric.match(out),
                clean=know.sanitizers.uses(out),
            )
        if know.origins.match(out):
            return Value(level=LOCAL, path=out, origin=out, numeric=know.numeric.match(out))
        if know.contents.match(out):
            return Value(level=LOCAL, path=out, roots=receiver.roots if receiver is not None else NONE)
        stored = (  # what is stored under a key is not the key
            path.endswith(".get")
            and self.family in ("python", "javascript")
            and receiver is not None
            and receiver.level <= LOCAL
        )
        inputs = [receiver] if receiver is not None else []
        inputs += [*(args[1:] if stored else args), *kwargs.values()]
        if expr.new and not inputs:
            return Value(path=out)
        mixed = mix(inputs)
        if know.numeric.match(out):
            return Value(level=mixed.level, numeric=True, path=out, origin=mixed.origin, roots=mixed.roots)
        if know.parsers.match(path) and args and args[0].level >= REMOTE:
            return Value(
                level=REMOTE,
                path=out,
                origin=f"{path}({args[0].origin})",
                roots=args[0].roots,
                clean=args[0].clean | know.sanitizers.uses(out),
            )
        uses = know.sanitizers.uses(out)
        if receiver is not None and receiver.path.endswith("normalize()") and path.endswith(".replace"):
            uses |= _PATH if args and ".." in (args[0].text or "").replace("\\", "") else NONE
        if args and (path.endswith((".replace", ".replaceAll")) or path == "re.sub"):
            uses |= uses_after_replacing(args[0], self.family)
        if not uses and ESCAPING.search(path):
            uses = ALL
        if uses:
            return Value(
                level=max(mixed.level, LOCAL) if any(not item.known for item in inputs) else mixed.level,
                clean=mixed.clean | uses,
                numeric=len(inputs) == 1 and inputs[0].numeric,
                path=out,
                origin=mixed.origin,
                roots=mixed.roots,
            )
        if path == "require" and args and isinstance(args[0].const, str) and self.family == "javascript":
            return Value(path=args[0].const.removeprefix("node:"))
        last = path.rsplit(".", 1)[-1]
        if (
            self.family == "java"
            and not args
            and _GETTER.fullmatch(last)
            and isinstance(expr.func, ir.AttrExpr)
        ):
            holder = key_of(expr.func.base)
            given = self.env.get(f"{holder}.{last[3:]}") if holder is not None else None
            if given is not None:
                return given
        special = self.known_result(path, last, receiver, args, kwargs)
        if special is not None:
            return special
        if know.joiners.match(out):
            joined = self.join_path(args) if args else mixed
            if len(args) > 1 and args[0].const == "/" and know.normalizing_joiners.match(out):
                joined = joined.as_safe_for(_PATH)
            return replace(joined, path=out)
        if len(args) > 1 and args[1].const == "/" and know.relative_paths.match(out):
            return replace(args[0], path=out, const=UNKNOWN).as_safe_for(_PATH)
        if know.transparent.match(out):
            informative = [
                item
                for item in inputs
                if (item.level or item.known or item.items is not None or item.text is not None)
                and (item is receiver or item.const not in _CODECS)
            ]
            single = informative[0] if len(informative) == 1 else None
            if (
                single is not None
                and (single.text or "").startswith("/")
                and know.path_normalizers.match(out)
            ):
                single = single.as_safe_for(_PATH)  # normalised after being made absolute: contains no ".."
            if single is not None:
                return replace(
                    single,
                    path=out,
                    memory=None,
                    items=None,
                    const=single.const if isinstance(single.const, str | bytes) else UNKNOWN,
                )
            text = receiver.skeleton if receiver is not None else (args[0].skeleton if args else None)
            return replace(mixed, path=out, skeleton=text)
        level = mixed.level if mixed.level > LOCAL or (receiver is not None and receiver.known) else LOCAL
        if (
            receiver is not None
            and receiver.level == CONSTANT
            and not receiver.path
            and level == LOCAL
            and not mixed.level
        ):
            level = CONSTANT
        clean = mixed.clean
        if (
            self.family == "python"
            and level == REMOTE
            and (receiver is None or receiver.level < REMOTE)
            and not _TEXT_FUNCTION.match(path)
        ):
            clean |= _ANSWERED  # what another function answers is not what the client wrote
        return Value(level=level, path=out, clean=clean, origin=mixed.origin, roots=mixed.roots)

    def known_result(
        self, path: str, last: str, receiver: Value | None, args: list[Value], kwargs: dict[str, Value]
    ) -> Value | None:
        """The result of calls that can be evaluated: formatting, joining, access to known contents."""
        at = self.knowledge.formatters.get(path)
        if at is None and path.startswith(("str.", "?.")):
            at = self.knowledge.formatters.get(f"*.{last}")
        if at is not None:
            template = receiver if at < 0 else (args[at] if at < len(args) else None)
            rest = args if at < 0 else args[at + 1 :]
            if template is not None and template.text is not None:
                style = {"format": "{", "%": "%"}.get(last, "%{") if self.family == "python" else "%{"
                return format_text(template, rest, kwargs, strict=self.family != "go", style=style)
            if template is not None:
                return replace(mix([template, *rest, *kwargs.values()]), skeleton=HOLE)
        if last == "join" and receiver is not None and isinstance(receiver.const, str) and args:
            items = [value for _, value in args[0].items] if args[0].items else [args[0]]
            parts: list[Value] = []
            for item in items:
                parts += [receiver, item] if parts else [item]
            return text_of(parts)
        if (
            receiver is not None
            and last in self.knowledge.text_appenders
            and receiver.text is not None
            and args
        ):
            return replace(text_of([receiver, *args]), path=receiver.path)
        if (
            receiver is not None
            and receiver.items is not None
            and args
            and last in self.knowledge.item_getters
        ):
            if len(args) == 2 and isinstance(args[0].const, str) and isinstance(args[1].const, str):
                setting = receiver.item(f"{args[0].const}\n{args[1].const}")
                if setting is not None:
                    return setting
            if args[0].known:
                found = receiver.item(args[0].const)
                return found if found is not None else (args[1] if len(args) > 1 else constant(None))
            return self.element_of(receiver)
        if (
            receiver is not None
            and last == "charAt"
            and isinstance(receiver.const, str)
            and args
            and isinstance(args[0].const, int)
        ):
            place = args[0].const
            return constant(receiver.const[place]) if 0 <= place < len(receiver.const) else None
        if last in self.knowledge.call_wrappers and args:
            return args[0]
        if path == "compile" and self.family == "python" and args:
            return args[0]  # the file name is only told in errors
        if path == "RegExp" and args and isinstance(args[0].const, str):
            flags = args[1].const if len(args) > 1 and isinstance(args[1].const, str) else ""
            return Value(path="RegExp()", skeleton=f"/{args[0].const}/{flags}")
        return None

    def apply_effects(self, expr: ir.CallExpr, path: str, receiver: Value | None, args: list[Value]) -> None:
        """Applies the effects of a call to the variables passed to it."""
        know = self.knowledge
        last = path.rsplit(".", 1)[-1]
        fills = know.fills.get(path) or know.fills.get(f"*.{last}")
        if fills is not None:
            for at in range(fills[0], len(expr.args)) if fills[-1] < 0 else fills:
                if at < len(expr.args):
                    key = key_of(expr.args[at])
                    if key is not None:
                        known = self.lookup(key) or PLAIN
                        self.env[key] = replace(
                            known,
                            level=REMOTE,
                            const=UNKNOWN,
                            clean=NONE,
                            origin=f"{path}()",
                            roots=known.roots | {key},
                            low=None,
                            high=None,
                            bounded=False,
                            skeleton=None,
                        )
        copies = know.copies.get(path)
        if copies is not None and len(expr.args) > max(copies):
            target = key_of(expr.args[copies[0]])
            if target is not None:
                known = self.lookup(target) or PLAIN
                printed = "printf" in last and args[copies[1]].text is not None
                whole = format_text(args[copies[1]], args[copies[1] + 1 :]) if printed else args[copies[1]]
                if "cat" in last:
                    whole = text_of([known, whole])
                level = max(known.level if "cat" in last else CONSTANT, mix(args[copies[1] :]).level)
                self.env[target] = replace(
                    known,
                    level=level,
                    const=UNKNOWN,
                    origin=whole.origin,
                    roots=known.roots | whole.roots,
                    skeleton=whole.text,
                    clean=whole.clean,
                )
        if receiver is None or not isinstance(expr.func, ir.AttrExpr):
            return
        holder = key_of(expr.func.base)
        if holder is None or self.lookup(holder) is None:
            return
        if self.family == "java" and len(args) == 1 and _SETTER.fullmatch(last):
            self.env[f"{holder}.{last[3:]}"] = args[0]  # what its getter returns
            return
        if last in know.mutators and args:
            known = self.lookup(holder) or PLAIN
            if last == "set" and len(args) == 3:  # a setting in a section
                if known.items is None and know.section_types.match(known.path) and known.level <= LOCAL:
                    self.env[holder] = replace(known, items=())
                section, name = args[0].const, args[1].const
                constant_key = isinstance(section, str) and isinstance(name, str)
                self.store_item(holder, f"{section}\n{name}" if constant_key else UNKNOWN, args[2])
            elif last in know.keyed_setters and len(args) > 1:
                if known.items is None and know.mapping_types.match(known.path) and known.level <= LOCAL:
                    self.env[holder] = replace(known, items=())
                self.store_item(holder, args[0].const, args[1])
            elif known.text is not None or known.path in know.text_builders:
                start = known if known.text is not None or known.level else constant("")
                self.env[holder] = replace(text_of([start, *args]), path=known.path)
            elif (
                known.items is not None
                and last in know.list_adders
                and all(isinstance(key, int) for key, _ in known.items)
            ):
                self.store_item(holder, len(known.items), args[0])
            elif (
                know.list_types.match(known.path)
                and known.items is None
                and known.level <= LOCAL
                and last == "add"
            ):
                self.env[holder] = replace(
                    known,
                    items=((0, args[0]),),
                    level=args[0].level,
                    clean=args[0].clean,
                    origin=args[0].origin,
                )
            else:
                self.store_item(holder, UNKNOWN, mix(args))
        elif last in know.removers and (not args or isinstance(args[0].const, int)):
            known = self.lookup(holder) or PLAIN
            listed = known.items is not None and all(isinstance(key, int) for key, _ in known.items)
            if known.items and listed and not (last == "remove" and (not args or self.family == "python")):
                at = args[0].const if args else (0 if last == "shift" else -1)
                if at < 0:
                    at += len(known.items)
                left = [value for key, value in known.items if key != at]
                self.env[holder] = replace(known, items=tuple(enumerate(left)))
