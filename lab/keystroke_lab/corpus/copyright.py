"""The licence of each file according to a Debian package's machine-readable debian/copyright.

Only what is stated counts. A file belongs to the last paragraph whose patterns match it; a statement is
permissive only if every licence that applies is on the list. A file in another format states nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

# Debian's short names, and the ones that people write for them.
_PERMISSIVE = re.compile(
    r"expat|mit([-~](0|cmu|expat|style|x11))?|x11|isc|0bsd|bsd-?[23]-?clauses?([-~](patent|clear|google|new|simplified))?"
    r"|(new|modified|simplified)-bsd|bsd-[23]|apache[-~]?v?2(\.0)?|apache-license-2\.0|zlib(/libpng)?|libpng|bsl-?1(\.0)?"
    r"|boost(-1\.0)?|cc0(-1\.0)?|public-domain|unlicense|ncsa|psf-2(\.0)?|python-2\.0|postgresql|wtfpl(-2)?|hpnd"
    r"|blueoak-1\.0\.0|upl-1\.0|unicode(-dfs-\d+)?"
)
_NAMES = {
    "expat": "MIT", "mit": "MIT", "apache-2": "Apache-2.0", "apache-2.0": "Apache-2.0", "isc": "ISC",
    "bsd-3-clause": "BSD-3-Clause", "bsd-2-clause": "BSD-2-Clause", "zlib": "Zlib", "cc0-1.0": "CC0-1.0",
}  # fmt: skip


def permissive(stated: str) -> str | None:
    """The licence a `License:` line states, if it is one we may use; of alternatives those we may take. Where
    alternatives and additions stand in one line every part has to be permissive: what binds what cannot be
    told from the words."""
    text = re.sub(r"\s+with\s+(the\s+)?llvm[-\s]exceptions?", "", " ".join(stated.lower().split()))
    choices = [
        re.split(r"\s*,\s*(?:and\s+)?|\s+and\s+", choice) for choice in re.split(r"\s*,?\s+or\s+", text)
    ]
    named = [[name for part in choice if (name := part.strip(" ()"))] for choice in choices]
    if len(named) > 1 and any(len(choice) > 1 for choice in named):
        named = [[name for choice in named for name in choice]]
    taken = [choice for choice in named if choice and all(map(_PERMISSIVE.fullmatch, choice))]
    return " OR ".join(" AND ".join(_NAMES.get(name, name) for name in choice) for choice in taken) or None


@dataclass(frozen=True, slots=True)
class Copyright:
    """Patterns with their licences, in the order of the file; None where a licence is not permissive."""

    rules: tuple[tuple[re.Pattern[str], str | None], ...]

    @property
    def any_permissive(self) -> bool:
        return any(licence for _, licence in self.rules)

    def licence(self, path: str) -> str | None:
        """Of one file, if permissive. What no pattern matches has none."""
        for pattern, licence in reversed(self.rules):
            if pattern.match(path):
                return licence
        return None


def parse(text: str) -> Copyright:
    """A debian/copyright file. One that is not in the machine readable form has no rules."""
    rules = []
    for fields in _paragraphs(text):
        if "files" in fields and "license" in fields:
            licence = permissive(fields["license"].split("\n", 1)[0])
            patterns = [glob for glob in fields["files"].split() if not glob.startswith("debian/")]
            rules += [(_compiled(glob), licence) for glob in patterns]
    return Copyright(tuple(rules))


def _paragraphs(text: str) -> Iterator[dict[str, str]]:
    for paragraph in re.split(r"\n[ \t]*\n", text.replace("\r\n", "\n")):
        fields: dict[str, str] = {}
        name = ""
        for line in paragraph.split("\n"):
            if line[:1] in (" ", "\t"):
                if name:
                    fields[name] += "\n" + line.strip()
            elif ":" in line and not line.startswith("#"):
                name, _, value = line.partition(":")
                name = name.strip().lower()
                fields[name] = value.strip()
        yield fields


@lru_cache(maxsize=4096)
def _compiled(glob: str) -> re.Pattern[str]:
    """`*` matches slashes too, as the format says."""
    glob = glob.removeprefix("./")
    body = "".join({"*": ".*", "?": "."}.get(c, re.escape(c)) for c in glob)
    return re.compile(rf"{body}\Z", re.S)
