"""The published JSON Schema is exactly what the types say."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import msgspec
import pytest

from keystroke.protocol import schema
from keystroke.protocol.events import Event

FOLDER = Path(__file__).parents[2] / "schema"


@pytest.mark.parametrize("name", sorted(schema.DOCUMENTS))
def test_the_schema_files_match_the_types(name: str) -> None:
    assert (FOLDER / f"{name}.json").read_bytes() == schema.render(name), (
        "run: python -m keystroke.protocol.schema schema"
    )


def test_every_server_event_is_in_the_schema() -> None:
    document = msgspec.json.decode((FOLDER / "server_events.json").read_bytes())
    kinds = [d["properties"].get("type", {}) for d in document["$defs"].values()]
    tags = {kind["enum"][0] for kind in kinds if "enum" in kind}
    assert {str(event.__struct_config__.tag) for event in get_args(Event)} <= tags
