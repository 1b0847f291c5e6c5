"""Ordinary Python files, always the same: what is counted in tests must not change with the program's own.

Made from a few templates and tables, no dice. Each module has what people write: imports, a class, calls
with named arguments, lines that come again for another field.
"""

from __future__ import annotations

from string import Template

# A thing that is kept, where it belongs, and its fields.
_THINGS = {
    "invoice": ("customer", "number currency total discount issued paid"),
    "parcel": ("depot", "label sender weight postage height insured"),
    "booking": ("hotel", "guest arrival nights deposit breakfast cancelled"),
    "recipe": ("cookbook", "title servings minutes calories rating vegan"),
    "sensor": ("station", "serial altitude interval voltage offset calibrated"),
    "loan": ("library", "reader shelf renewals deadline fine returned"),
}

_HEAD = Template('''"""Every $thing of a $owner: kept in one table, checked before it is written."""

from __future__ import annotations

import json
import logging
import sqlite3
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)
TABLE = "${thing}s"


class ${Thing}Error(Exception):
    """A $thing that cannot be kept."""


@dataclass
class $Thing:
''')

_CHECK = Template("""
    def validate(self):
        missing = []
$checks        if missing:
            raise ${Thing}Error(f"$thing without {', '.join(missing)}")
        return self

    def to_dict(self):
        return {
$pairs        }

    @classmethod
    def from_row(cls, row):
        return cls(
$columns        )


""")

_STORE = Template('''class ${Thing}Store:
    """All ${thing}s of one $owner; closed by whoever opened it."""

    def __init__(self, path, $owner, timeout=5.0):
        self.path = Path(path)
        self.$owner = $owner
        self.connection = sqlite3.connect(str(self.path), timeout=timeout)
        self.connection.row_factory = sqlite3.Row

    def close(self):
        self.connection.close()

    def run(self, statement, values, commit):
        logger.debug("running %s with %d values", statement, len(values))
        cursor = self.connection.execute(statement, values)
        if commit:
            self.connection.commit()
        return cursor

    def add(self, $thing, *, replace=False):
        $thing.validate()
        verb = "REPLACE" if replace else "INSERT"
        marks = ", ".join("?" for _ in $thing.to_dict())
        self.run(f"{verb} INTO {TABLE} VALUES ({marks})", list($thing.to_dict().values()), True)
        logger.info("added %s to %s", $thing.$first, self.$owner)
        return $thing

    def remove(self, $first):
        found = self.find($first, default=None)
        if found is None:
            raise ${Thing}Error(f"no $thing has the $first {$first}")
        self.run(f"DELETE FROM {TABLE} WHERE $first = ?", [$first], True)
        logger.info("removed %s from %s", $first, self.$owner)

    def find(self, $first, default=None):
        row = self.run(f"SELECT * FROM {TABLE} WHERE $first = ?", [$first], False).fetchone()
        return default if row is None else $Thing.from_row(row)

    def every(self, order="$first"):
        rows = self.run(f"SELECT * FROM {TABLE} ORDER BY {order}", [], False).fetchall()
        return [$Thing.from_row(row) for row in rows]
$changes

''')

_CHANGE = Template("""
    def change_$field(self, $first, $field):
        $thing = self.find($first, default=None)
        if $thing is None:
            raise ${Thing}Error(f"no $thing has the $first {$first}")
        $thing.$field = $field
        return self.add($thing, replace=True)
""")

_WORK = Template('''def format_line(label, value, width):
    return f"{label:<{width}} {value}"


def describe($thing):
    """What a person reads of one $thing."""
    lines = [
$lines    ]
    return "\\n".join(lines)


def sum_of(${thing}s, field, start):
    total = start
    for $thing in ${thing}s:
        value = getattr($thing, field)
        if value is not None:
            total += value
    return total


def totals(${thing}s):
    return {
$sums    }


def read_${thing}s(path):
    """The ${thing}s of a file; those that are not whole are left out."""
    source = Path(path)
    found = []
    with source.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, start=1):
            try:
                found.append($Thing(**json.loads(line)).validate())
            except (TypeError, ValueError, ${Thing}Error) as error:
                logger.warning("line %d of %s is left out: %s", number, source, error)
    return found


def write_${thing}s(path, ${thing}s):
    target = Path(path)
    with target.open("w", encoding="utf-8") as stream:
        for $thing in ${thing}s:
            stream.write(json.dumps($thing.to_dict(), sort_keys=True) + "\\n")
    logger.info("wrote %d ${thing}s to %s", len(${thing}s), target)


def import_${thing}s(path, store, *, dry=False):
    ${thing}s = read_${thing}s(path)
    for $thing in ${thing}s:
        if dry:
            logger.info("would add %s to %s", $thing.$first, store.$owner)
            continue
        store.add($thing, replace=True)
    return len(${thing}s)


def main(arguments):
    path, $owner, *sources = arguments
    store = ${Thing}Store(path, $owner, timeout=30.0)
    try:
        for source in sources:
            count = import_${thing}s(source, store, dry=False)
            logger.info("%s: %d ${thing}s", source, count)
        for $thing in store.every(order="$first"):
            print(describe($thing))
        print(json.dumps(totals(store.every(order="$last"))))
    finally:
        store.close()
''')


def modules() -> dict[str, str]:
    """The files by name: some 180 lines each."""
    return {f"{thing}s.py": _module(thing, *said) for thing, said in _THINGS.items()}


def _module(thing: str, owner: str, words: str) -> str:
    fields = words.split()
    names = {
        "thing": thing, "Thing": thing.capitalize(), "owner": owner, "first": fields[0], "last": fields[-1],
    }  # fmt: skip
    kinds = {
        field: "str" if at == 0 else "bool" if field == fields[-1] else "float"
        for at, field in enumerate(fields)
    }
    rows = "".join(f"    {field}: {kinds[field]}\n" for field in fields)
    checks = "".join(
        f'        if self.{field} is None:\n            missing.append("{field}")\n' for field in fields
    )
    pairs = "".join(f'            "{field}": self.{field},\n' for field in fields)
    columns = "".join(f'            {field}=row["{field}"],\n' for field in fields)
    changes = "".join(_CHANGE.substitute(names, field=field) for field in fields[1:])
    lines = "".join(f'        format_line("{field}", {thing}.{field}, 20),\n' for field in fields)
    sums = "".join(f'        "{field}": sum_of({thing}s, "{field}", 0.0),\n' for field in fields[2:5])
    return (
        _HEAD.substitute(names)
        + rows
        + _CHECK.substitute(names, checks=checks, pairs=pairs, columns=columns)
        + _STORE.substitute(names, changes=changes)
        + _WORK.substitute(names, lines=lines, sums=sums)
    )
