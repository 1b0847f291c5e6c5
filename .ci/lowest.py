"""The lowest versions that pyproject.toml allows, as pip's constraints: python .ci/lowest.py EXTRA... > FILE

A floor says what was tried, so `make test-lowest` runs the tests on exactly these. Only what the project
names itself is held at its floor; what those packages need in turn is chosen by pip.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

_FLOOR = re.compile(
    r"(?P<name>[A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*>=\s*(?P<version>[0-9][^,;\s]*)(?:,<[^,;\s]+)?\s*(?P<marker>;.*)?"
)


def constraints(project: Path, extras: list[str]) -> list[str]:
    """One line for each requirement with a floor. Raises KeyError for an extra that is not there."""
    table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    named = list(table["dependencies"])
    for extra in extras:
        named += table["optional-dependencies"][extra]
    found: dict[str, str] = {}
    for requirement in named:
        floor = _FLOOR.fullmatch(requirement.strip())
        if floor:
            found.setdefault(floor["name"], f"{floor['name']}=={floor['version']}{floor['marker'] or ''}")
    return sorted(found.values())


if __name__ == "__main__":
    project = Path(__file__).parents[1] / "pyproject.toml"
    sys.stdout.write("".join(f"{line}\n" for line in constraints(project, sys.argv[1:])))
