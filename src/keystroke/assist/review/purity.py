"""Extracts the part of a Python module that can be run safely: definitions that only compute.

Kept are imports of pure modules, definitions that use nothing else, and constants made of them.
"""

from __future__ import annotations

import ast

from keystroke.analysis.syntax import try_parse


def _word_set(words: str) -> frozenset[str]:
    return frozenset(words.split())


MODULES = _word_set("""
__future__ abc bisect collections copy dataclasses datetime decimal difflib enum fractions functools
heapq html itertools json math numbers operator re random statistics string textwrap time types
typing unicodedata
""")
_BANNED = _word_set("""
open exec eval compile __import__ input breakpoint exit quit globals locals getattr setattr delattr vars
memoryview help __builtins__ __loader__ __spec__
""")
_DUNDERS = _word_set("""
__init__ __name__ __class__ __doc__ __dict__ __len__ __iter__ __next__ __eq__ __cause__ __slots__
__repr__ __str__ __hash__ __contains__ __getitem__ __post_init__ __wrapped__
""")
_LOADING = _word_set("""
read_text read_bytes write_text write_bytes unlink system popen sleep now today utcnow load dump
""")
# Ways from a value into the interpreter: frames, code, dynamic attributes, evaluated text.
_INWARD = _word_set("""
gi_frame gi_code cr_frame cr_code ag_frame tb_frame f_back f_builtins f_globals f_locals f_code
attrgetter methodcaller get_type_hints ForwardRef Formatter singledispatch singledispatchmethod
FunctionType CodeType ModuleType sys os codecs
""")


def pure_part(text: str) -> ast.Module | None:
    """The pure part of the module; None where the text does not parse."""
    module = try_parse(text)
    if module is not None:
        kinds = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign
        module.body = [node for node in module.body if isinstance(node, kinds) and is_pure(node)]
    return module


def is_pure(node: ast.AST) -> bool:
    """Whether everything below this node is pure."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and (inner.id in _BANNED or _is_bad_dunder(inner.id)):
            return False
        if isinstance(inner, ast.Attribute) and (
            _is_bad_dunder(inner.attr) or inner.attr in _LOADING | _INWARD
        ):
            return False
        if isinstance(inner, ast.Import):
            if not all(alias.name.partition(".")[0] in MODULES for alias in inner.names):
                return False
        elif isinstance(inner, ast.ImportFrom):
            if not _is_pure_import(inner):
                return False
        elif isinstance(inner, ast.Await | ast.AsyncFor | ast.AsyncWith | ast.Global):
            return False
    return True


def is_plain_attribute(name: str) -> bool:
    """Whether the attribute name is harmless on the module's objects and on plain values."""
    return not name.startswith("_") and name not in _LOADING | _INWARD | _BANNED | {"format", "format_map"}


def _is_pure_import(node: ast.ImportFrom) -> bool:
    inside = not node.level and (node.module or "").partition(".")[0] in MODULES
    return inside and not any(alias.name in _INWARD or alias.name.startswith("_") for alias in node.names)


def _is_bad_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__") and name not in _DUNDERS
