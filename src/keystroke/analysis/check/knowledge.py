"""Tables about Python from `knowledge.toml`, which describes them.

An entry is a candidate for a fix; the code that uses it checks the result before it is shown.
"""

from __future__ import annotations

from importlib.resources import files

import msgspec


class _Tables(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    homes: dict[str, str]
    aliases: dict[str, str]
    foreign: dict[str, str]
    foreign_methods: dict[str, dict[str, str]]
    moved_modules: dict[str, str]
    moved_names: dict[str, str]
    packages: dict[str, str]


_TABLES = msgspec.toml.decode(files(__package__).joinpath("knowledge.toml").read_bytes(), type=_Tables)
HOMES = {name: module for module, names in _TABLES.homes.items() for name in names.split()}
ALIASES = _TABLES.aliases
FOREIGN = _TABLES.foreign
FOREIGN_METHODS = _TABLES.foreign_methods
MOVED_MODULES = _TABLES.moved_modules
PACKAGES = _TABLES.packages
_ABSTRACT = (*_TABLES.homes["collections.abc"].split(), "Set", "MutableSet", "Sized", "Container")
MOVED_NAMES = {("collections", name): "collections.abc" for name in _ABSTRACT}  # (module, name) -> module
MOVED_NAMES |= {
    (module, name): home
    for path, home in _TABLES.moved_names.items()
    for module, _, name in [path.rpartition(".")]
}
