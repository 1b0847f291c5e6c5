"""Generates calls that exercise a changed definition, with arguments chosen by name, annotation and default.

A plan is a list of steps that a runner executes on two versions of a module; values are JSON, with tags for
what JSON lacks. Generation is deterministic.
"""

from __future__ import annotations

import ast
import random
import re
import re._parser as _parser  # type: ignore[import-not-found]
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

PLANS = 40  # per changed definition
_WARM = 5  # calls of other methods before the tested one
_TEXTS = ["", "a", "Hello, World!", "ab  ab", " x ", "A man a plan", "1,2,x", "/a?x=1", "-"]
_INTS = [0, 1, 2, -1, 3, 5, 10]
_FLOATS = [0.0, 1.0, 2.5, -1.0, 90.0]
_DATES = [[2024, 1, 31], [2024, 3, 1], [2023, 12, 31], [2000, 6, 15], [2024, 6, 14]]
_VALUES: dict[str, list[Any]] = {
    "int": _INTS,
    "float": [*_FLOATS, *_INTS],
    "bool": [True, False],
    "rows": [[[1, 2], [3, 4]], [[1]], [[1, 2, 3]], [["a", "12"], ["bcd", "3"]], []],
    "list[str]": [[], ["a"], ["b", "a", "c"], ["x", "x"]],
    "list[int]": [[], [1], [3, 1, 2], [5, 5], [-2, -1]],
    "list[float]": [[], [1], [3, 1, 2], [5, 5], [-2, -1]],
}
_TAGGED: dict[str, tuple[str, list[Any]]] = {
    "date": ("date", _DATES),
    "Decimal": ("decimal", ["0", "1", "10", "2.50", "-1"]),
    "clock": ("function", ["zero", "ten"]),
    **dict.fromkeys(("time", "datetime"), ("time", _DATES)),
    **dict.fromkeys(("function", "Callable"), ("function", ["nothing", "same", "zero"])),
}
_WORDS = {
    "text": (
        "text name title word line path sku email message topic key s isbn author separator prefix "
        "label owner customer event slug string "
    ),
    "texts or ints": "items values words names lines numbers parts keys entries elements",
    "rows": "rows matrix grid table",
    "objects": "points accounts orders users nodes loans books events pages",
    "int": (
        "n count size width limit number index i k times quantity amount start end year days copies "
        "id user_id around a b x y total step length attempts depth level "
    ),
    "float": "price rate factor degrees celsius seconds delay weight spread ratio base most angle",
    "date": "today date born taken day when",
    "time": "now created time moment",
    "function": "fn function handler action callback get listener send sleep predicate",
    "clock": "clock timer",
    "dict": "settings mapping options extra environ data entry row d config",
    "bool": "flag reverse strict directed done active invoked",
}
_QUOTED = re.compile(r"`([^`\n]{1,40})`|such as ([^\n,.;]{1,40})")
_KINDS = {name: kind for kind, names in _WORDS.items() for name in names.split()}


class PlanGenerator:
    """Generates plans for the definitions of one module."""

    def __init__(self, module: ast.Module, seed: str) -> None:
        self._random = random.Random(seed)
        self._classes = {node.name: node for node in module.body if isinstance(node, ast.ClassDef)}
        self._functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
        words = {
            n.value for n in ast.walk(module) if isinstance(n, ast.Constant) and isinstance(n.value, str)
        }
        self._words = sorted(word for word in words if 0 < len(word) <= 12 and "\n" not in word)
        self._matching = [text for node in ast.walk(module) for text in _matching_texts(node, self._random)]
        self._quoted = sorted({a or b for word in words for a, b in _QUOTED.findall(word)})
        self.doubtful = False  # the last plan has a guessed argument

    def plans(self, name: str) -> Iterator[list[Any]]:
        """Plans that end in a call of the function `f` or the method `C.m`, with varying arguments."""
        owner, _, method = name.rpartition(".")
        for _ in range(PLANS):
            plan: list[Any] = []
            self.doubtful = False
            if not owner:
                function = self._functions.get(method)
                if function is None:
                    return
                plan.append({"call": method, "arguments": self._make_arguments(function.args, plan, 0)})
                yield plan
                continue
            instance = self._make_object(owner, plan, 0)
            if instance is None:
                return
            if method != "__init__":
                target = next((m for m in self._methods(owner) if m.name == method), None)
                if target is None:
                    return
                others = [m for m in self._methods(owner) if m.name != method and not m.name.startswith("_")]
                # Earlier calls change an object's state, so a second call may show a difference.
                earlier = [*others, target, target]
                for other in self._random.choices(earlier, k=self._random.randint(0, _WARM)):
                    plan.append({**self._make_call(instance, other, plan), "before": True})
                plan.append(self._make_call(instance, target, plan))
                reader = self._random.choice(others) if others else None
                if reader is not None and len(reader.args.args) == 1:
                    plan.append({**self._make_call(instance, reader, plan), "after": True})
            yield plan

    def _make_call(self, instance: int, method: ast.FunctionDef, plan: list[Any]) -> dict[str, Any]:
        decorated = {d.id for d in method.decorator_list if isinstance(d, ast.Name)}
        arguments = [] if "property" in decorated else self._make_arguments(method.args, plan, 1)
        return {"on": instance, "call": method.name, "arguments": arguments}

    def _methods(self, owner: str) -> list[ast.FunctionDef]:
        body = self._classes[owner].body if owner in self._classes else []
        return [node for node in body if isinstance(node, ast.FunctionDef)]

    def _make_object(self, name: str, plan: list[Any], depth: int) -> int | None:
        """Add a step that creates an object of a class; its number."""
        node = self._classes.get(name)
        if node is None or depth > 2:
            return None
        init = next((m for m in self._methods(name) if m.name == "__init__"), None)
        if init is not None:
            arguments = self._make_arguments(init.args, plan, 1, depth + 1)
        elif any(_decorator_name(d) == "dataclass" for d in node.decorator_list):
            needed = [f for f in node.body if isinstance(f, ast.AnnAssign) and f.value is None]
            arguments = [
                self._make_argument(f.target.id, f.annotation, plan, depth + 1)
                for f in needed
                if isinstance(f.target, ast.Name)
            ]
        else:
            arguments = []
        plan.append({"call": name, "arguments": arguments})
        instance = len(plan) - 1
        others = [m for m in self._methods(name) if not m.name.startswith("_")] if depth else []
        if others and self._random.random() < 0.4:
            plan.append(self._make_call(instance, self._random.choice(others), plan))
        return instance

    def _make_arguments(self, given: ast.arguments, plan: list[Any], skip: int, depth: int = 0) -> list[Any]:
        names = [*given.posonlyargs, *given.args]
        defaults = [*([None] * (len(names) - len(given.defaults))), *given.defaults]
        pairs = list(zip(names, defaults, strict=True))[skip:]
        optional = len(given.defaults)
        if optional and self._random.random() < 0.5:
            pairs = pairs[: len(pairs) - self._random.randint(0, min(optional, len(pairs)))]
        return [self._make_argument(i.arg, i.annotation, plan, depth, default) for i, default in pairs]

    def _make_argument(
        self,
        name: str,
        annotation: ast.expr | None,
        plan: list[Any],
        depth: int,
        default: ast.expr | None = None,
    ) -> Any:
        kind = _kind_of_annotation(annotation) or _kind_of_default(default) or self._kind_of_name(name)
        if kind in self._classes:
            step = self._make_object(kind, plan, depth)
            return {"step": step} if step is not None else None
        return self._make_value(kind, name, plan, depth)

    def _kind_of_name(self, name: str) -> str:
        plain = name.strip("_").lower()
        for known in self._classes:
            if known.lower() in (plain, plain.rstrip("s")) or (plain == "other" and len(self._classes) == 1):
                return known if known.lower() == plain or plain == "other" else "objects"
        return _KINDS.get(plain) or _KINDS.get(plain.rpartition("_")[2]) or "any"

    def _make_value(self, kind: str, name: str, plan: list[Any], depth: int) -> Any:
        pick = self._random.choice
        if kind in _VALUES:
            return pick(_VALUES[kind])
        if kind in _TAGGED:
            tag, values = _TAGGED[kind]
            return {tag: pick(values)}
        match kind:
            case "text" | "str":
                return pick([*_TEXTS, *self._words, *self._quoted, *3 * self._matching])
            case "objects":
                return self._make_objects(name, plan, depth)
            case "dict" | "mapping":
                return self._make_dict()
            case "texts or ints" | "list":
                words = self._random.choices(self._words, k=self._random.randint(1, 4)) if self._words else []
                return pick(
                    [[], [1], [3, 1, 2], ["a", "b"], ["x"], list(range(50)), words, words, self._matching]
                )
        self.doubtful = True
        return pick([*_INTS, *_TEXTS[:4], [1, 2, 3], [], None])

    def _make_dict(self) -> Any:
        """Keys that occur in the module, with values of all kinds."""
        pick = self._random.choice
        values = [*_INTS, *_TEXTS, "true", "500", 500, {"dict": [["b", 2]]}]
        keys = self._random.sample(self._words, min(len(self._words), self._random.randint(0, 4)))
        return {"dict": [[key, pick(values)] for key in keys or pick([[], ["a"]])]}

    def _make_objects(self, name: str, plan: list[Any], depth: int) -> Any:
        single = name.rstrip("s").lower()
        known = next((c for c in self._classes if c.lower() == single), next(iter(self._classes), None))
        if known is None or depth > 1:
            return self._random.choice([[], [1, 2], ["a"]])
        steps = [self._make_object(known, plan, depth + 1) for _ in range(self._random.randint(0, 3))]
        return [{"step": step} for step in steps if step is not None]


def _kind_of_annotation(annotation: ast.expr | None) -> str:
    if annotation is None:
        return ""
    text = ast.unparse(annotation).strip("'\"")
    if "[" in text and not text.startswith("Optional["):
        return text
    return text.removesuffix(" | None").removeprefix("Optional[").removesuffix("]")


def _kind_of_default(default: ast.expr | None) -> str:
    """The kind of a parameter by its default."""
    if isinstance(default, ast.Constant) and default.value is not None:
        kind = type(default.value).__name__
        return {"str": "text", "bool": "bool", "int": "int", "float": "float"}.get(kind, "")
    if isinstance(default, ast.Call) and isinstance(default.func, ast.Name):
        return default.func.id if default.func.id == "Decimal" else ""
    return {ast.List: "list", ast.Tuple: "list", ast.Dict: "dict"}.get(type(default), "")


# ── texts from the module ──


def _matching_texts(node: ast.AST, chance: random.Random) -> list[str]:
    """Texts that match a regular expression of the module."""
    if not (isinstance(node, ast.Call) and node.args and isinstance(node.func, ast.Attribute)):
        return []
    if ast.unparse(node.func) not in ("re.compile", "re.match", "re.fullmatch", "re.search", "re.findall"):
        return []
    pattern = node.args[0]
    if not isinstance(pattern, ast.Constant) or not isinstance(pattern.value, str):
        return []
    try:
        parsed = _parser.parse(pattern.value)
        return list(dict.fromkeys(_text_for_pattern(parsed, chance) for _ in range(4)))
    except (re.error, RecursionError, OverflowError, ValueError):
        return []


def _text_for_pattern(parsed: Any, chance: random.Random) -> str:
    """A text for a parsed pattern; lookarounds are ignored."""
    out = ""
    for op, given in parsed:
        match str(op):
            case "LITERAL":
                out += chr(given)
            case "NOT_LITERAL":
                out += "x" if given != ord("x") else "y"
            case "ANY":
                out += chance.choice("ab1 ")
            case "IN":
                out += _character_for_set(given, chance)
            case "BRANCH":
                out += _text_for_pattern(chance.choice(given[1]), chance)
            case "SUBPATTERN":
                out += _text_for_pattern(given[3], chance)
            case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
                low, high, part = given
                times = chance.randint(low, max(low, min(int(high), low + 2)))
                out += "".join(_text_for_pattern(part, chance) for _ in range(times))
            case "ATOMIC_GROUP":
                out += _text_for_pattern(given, chance)
    return out


_CLASSES = {"CATEGORY_DIGIT": "0123456789", "CATEGORY_SPACE": " ", "CATEGORY_WORD": "abcxyz019_"}


def _character_for_set(items: Any, chance: random.Random) -> str:
    letters = ""
    for op, given in items:
        if str(op) == "LITERAL":
            letters += chr(given)
        elif str(op) == "RANGE":
            low, high = given
            letters += chr(low) + chr(high) + chr(chance.randint(low, high))
        elif str(op) == "CATEGORY":
            letters += _CLASSES.get(str(given), "x-")
    if str(items[0][0]) == "NEGATE":
        letters = next((c for c in "abxyz019" if c not in letters), "~")
    return chance.choice(letters or "x")


def _decorator_name(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        node = node.func
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


# ── formatting ──


def format_plan(plan: Sequence[Any], skipped: Collection[int] = ()) -> str:
    """A plan as readable code: an object that is used once is inlined, one that is used again gets a name.
    `skipped`: steps that were left out."""
    kept = [item for number, item in enumerate(plan) if number not in skipped]
    users = [[item for item in kept if item is not step and _uses(item, i)] for i, step in enumerate(plan)]
    names: dict[int, str] = {}
    for i, step in enumerate(plan):
        if len(users[i]) > 1:
            name = str(step["call"]).lower()
            names[i] = name if name not in names.values() else f"{name}{i}"
    parts = []
    for i, step in enumerate(plan):
        if i in skipped:
            continue
        if i in names:
            parts.append(f"{names[i]} = {_format_step(step, plan, names)}")
        elif not users[i]:
            parts.append(_format_step(step, plan, names))
    return "; ".join(parts)


def _uses(item: Any, step: int) -> bool:
    if isinstance(item, dict):
        return step in (item.get("step"), item.get("on")) or any(_uses(v, step) for v in item.values())
    return isinstance(item, list) and any(_uses(part, step) for part in item)


def _format_step(item: Any, plan: Sequence[Any], names: Mapping[int, str]) -> str:
    def of(part: Any) -> str:
        return _format_step(part, plan, names)

    def instance(step: int) -> str:
        return names[step] if step in names else of(plan[step])

    if isinstance(item, list):
        return f"[{', '.join(map(of, item))}]"
    if not isinstance(item, dict):
        return repr(item)
    if "step" in item:
        return instance(item["step"])
    for tag, name in (("date", "date"), ("time", "datetime")):
        if tag in item:
            return f"{name}({', '.join(map(str, item[tag]))})"
    if "decimal" in item:
        return f"Decimal({item['decimal']!r})"
    if "function" in item:
        return "..."
    if "tuple" in item:
        inside = ", ".join(map(of, item["tuple"]))
        return f"({inside},)" if len(item["tuple"]) == 1 else f"({inside})"
    if "set" in item:
        return "{" + ", ".join(map(of, item["set"])) + "}" if item["set"] else "set()"
    if "dict" in item:
        return "{" + ", ".join(f"{of(k)}: {of(v)}" for k, v in item["dict"]) + "}"
    arguments = ", ".join(
        [*map(of, item.get("arguments", ())), *(f"{k}={of(v)}" for k, v in item.get("named", {}).items())]
    )
    if "on" in item:
        return f"{instance(item['on'])}.{item['call']}({arguments})"
    return f"{item['call']}({arguments})"
