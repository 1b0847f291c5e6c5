"""What becomes of each request field of each API: honoured, ignored with a note, or refused.

The table is data, one TOML file per API in `fields/`; `python -m keystroke.protocol.field_table` writes its
page. A field of an object is named with a dot (`reasoning.effort`), a field of the objects in a list as
`tools[].name`. A test compares the table with the types that the server decodes and with the request types of
the vendors' packages, so a field that is missing here fails the build.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec


class EndpointFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fields of one endpoint, each with one sentence. `extension` fields are honoured but not part of the
    vendor's API. `types` are the vendor's request types, `struct` the type that is decoded; `partial`: the
    endpoint uses only some of its fields."""

    route: str
    struct: str | None = None
    partial: bool = False
    types: list[str] = []
    honoured: dict[str, str] = {}
    ignored: dict[str, str] = {}
    refused: dict[str, str] = {}
    extension: dict[str, str] = {}

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """Each field with its treatment and its sentence."""
        treatments = {"honoured": self.honoured, "ignored": self.ignored, "refused": self.refused}
        for treatment, fields in {**treatments, "honoured (ours)": self.extension}.items():
            for name, sentence in fields.items():
                yield name, treatment, sentence


class ApiFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One API: `package` is the vendor's Python package, `endpoint` the endpoints of the API served here."""

    title: str
    endpoint: list[EndpointFields]
    package: str | None = None
    introduction: str = ""


@cache
def field_table() -> dict[str, ApiFields]:
    """Every API by the name of its file."""
    folder = files("keystroke.protocol") / "fields"
    found = sorted(
        (entry for entry in folder.iterdir() if entry.name.endswith(".toml")), key=lambda e: e.name
    )
    return {
        entry.name.removesuffix(".toml"): msgspec.convert(tomllib.loads(entry.read_text("utf-8")), ApiFields)
        for entry in found
    }


@cache
def endpoint_fields(route: str) -> EndpointFields:
    """The fields of a route such as `POST /v1/responses`. Raises KeyError for one without a table."""
    for api in field_table().values():
        for endpoint in api.endpoint:
            if endpoint.route == route:
                return endpoint
    raise KeyError(route)


def ignored_fields(route: str, request: Any) -> list[str]:
    """One sentence for each field of a decoded request that the table says is ignored."""
    notes = []
    for name, sentence in endpoint_fields(route).ignored.items():
        value = request
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
        if value and not isinstance(value, msgspec.Struct):
            notes.append(f"{name} is ignored: {sentence}")
    return notes


def render_page() -> str:
    """The documentation page of the whole table."""
    lines = [
        "# Fields of each API",
        "",
        "Every dialect is a translation onto one internal request. This page says what becomes of each",
        "request field: **honoured**; **ignored** (where a field was sent, the reply says so in `notes`);",
        "**refused** with status 400 and the field's name in `param`. Fields marked *ours* are extensions.",
        "Fields that are not listed are ignored, because clients may be newer than servers.",
        "",
        "The page is written from `src/keystroke/protocol/fields/` by",
        "`python -m keystroke.protocol.field_table docs/fields.md`; a test compares the table with the",
        "request types of the packages `openai`, `anthropic` and `ollama`.",
    ]
    for api in field_table().values():
        lines += ["", f"## {api.title}"]
        if api.introduction:
            lines += ["", api.introduction.strip()]
        for endpoint in api.endpoint:
            lines += ["", f"### `{endpoint.route}`", "", "| field | | |", "|---|---|---|"]
            lines += [f"| `{name}` | {treatment} | {text} |" for name, treatment, text in endpoint.rows()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else "docs/fields.md").write_text(render_page(), "utf-8")
