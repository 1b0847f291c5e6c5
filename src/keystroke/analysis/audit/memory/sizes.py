"""Sizes of C types in bytes on 64-bit Linux; None for types defined elsewhere."""

from __future__ import annotations

import re

_SIZES = {
    "char": 1,
    "wchar_t": 4,
    "short": 2,
    "int": 4,
    "long": 8,
    "float": 4,
    "double": 8,
    "size_t": 8,
    "ssize_t": 8,
    "bool": 1,
    "_Bool": 1,
    "void": 1,
}
_FIXED = re.compile(r"u?int(\d+)(?:_t)?")
_WORDS = re.compile(r"\b(?:const|volatile|unsigned|signed|static|register)\b")


def size_of(kind: str) -> int | None:
    if "*" in kind:
        return 8
    text = _WORDS.sub("", kind).strip() or "int"
    fixed = _FIXED.search(text)
    if fixed:
        return int(fixed[1]) // 8
    words = text.split()
    if words[-1] == "int" and len(words) > 1:
        words.pop()
    if words[0] == "long":
        return 16 if words[-1] == "double" else 8
    return _SIZES.get(words[-1]) if len(words) == 1 else None
