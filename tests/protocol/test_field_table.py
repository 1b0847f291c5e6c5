"""The table of request fields: complete against the vendors' packages, true to the types that are decoded,
and the source of its documentation page."""

from __future__ import annotations

import collections.abc
import importlib
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from keystroke.protocol.field_table import EndpointFields, field_table, render_page

ROOT = Path(__file__).parents[2]
ENDPOINTS = [
    pytest.param(api.package, endpoint, id=f"{name}: {endpoint.route}")
    for name, api in field_table().items()
    for endpoint in api.endpoint
]
LISTS = (list, collections.abc.Iterable, collections.abc.Sequence)


def resolve(dotted: str) -> Any:
    module, _, name = dotted.rpartition(".")
    return getattr(importlib.import_module(module), name)


def declared(kind: Any) -> dict[str, Any]:
    """The fields of a TypedDict or of a pydantic model, by the names that go over the wire."""
    if hasattr(kind, "model_fields"):
        return {field.alias or name: field.annotation for name, field in kind.model_fields.items()}
    return typing.get_type_hints(kind)


def objects(annotation: Any, suffix: str = "") -> Iterator[tuple[str, Any]]:
    """The object types of an annotation; those of a list have the suffix `[]`."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType, typing.Required, typing.NotRequired, typing.Annotated):
        for part in typing.get_args(annotation):
            yield from objects(part, suffix)
    elif origin in LISTS:
        for part in typing.get_args(annotation):
            yield from objects(part, "[]")
    elif hasattr(annotation, "__required_keys__") or hasattr(annotation, "model_fields"):
        yield suffix, annotation


def vendor_fields(kind: Any) -> set[str]:
    """Names of a request type, and of the objects in it where there is one form of the object; objects of
    several forms (messages, tools) are one field."""
    names = set()
    for name, annotation in declared(kind).items():
        names.add(name)
        inner = list(objects(annotation))
        if len(inner) == 1:
            ((suffix, kind),) = inner
            names |= {f"{name}{suffix}.{sub}" for sub in declared(kind)}
    return names


def listed(endpoint: EndpointFields) -> set[str]:
    return {name for name, _, _ in endpoint.rows()}


@pytest.mark.parametrize(("package", "endpoint"), ENDPOINTS)
def test_every_request_field_of_the_vendors_package_is_in_the_table(
    package: str | None, endpoint: EndpointFields
) -> None:
    if package is not None:
        pytest.importorskip(package)
    known = set().union(*(vendor_fields(resolve(kind)) for kind in endpoint.types))
    assert sorted(known - listed(endpoint)) == []
    if endpoint.types:  # what the vendor no longer has is not promised either
        ours = {name for name, kind, _ in endpoint.rows() if kind != "honoured (ours)"}
        assert sorted(ours - known) == []
        assert sorted(endpoint.extension.keys() & known) == []


@pytest.mark.parametrize(("package", "endpoint"), ENDPOINTS)
def test_the_table_agrees_with_the_type_that_is_decoded(
    package: str | None, endpoint: EndpointFields
) -> None:
    """A field is honoured or refused only if it is decoded, and every decoded field is in the table."""
    if endpoint.struct is None:
        pytest.skip("this endpoint has no type of its own")
    decoded = {field.encode_name for field in msgspec.structs.fields(resolve(endpoint.struct))}
    top = {name for name in listed(endpoint) if "." not in name}
    assert endpoint.partial or sorted(decoded - top) == []
    used = {name for name in endpoint.honoured | endpoint.refused | endpoint.extension if "." not in name}
    assert sorted(used - decoded) == []


@pytest.mark.parametrize(("package", "endpoint"), ENDPOINTS)
def test_a_field_is_in_one_section_and_has_a_sentence(package: str | None, endpoint: EndpointFields) -> None:
    names = [name for name, _, _ in endpoint.rows()]
    assert len(names) == len(set(names))
    assert all(sentence.strip() for _, _, sentence in endpoint.rows())


def test_a_field_that_is_missing_from_the_table_is_noticed() -> None:
    class Inner(typing.TypedDict, total=False):
        depth: int

    class Request(typing.TypedDict, total=False):
        model: str
        one: Inner | None
        many: list[Inner]
        either: Inner | EmptyForm

    class EmptyForm(typing.TypedDict):
        pass

    hints = {"model": str, "one": Inner | None, "many": list[Inner], "either": Inner | EmptyForm}
    Request.__annotations__ = hints
    assert vendor_fields(Request) == {"model", "one", "one.depth", "many", "many[].depth", "either"}


def test_the_page_is_written_from_the_table() -> None:
    assert (ROOT / "docs" / "fields.md").read_text("utf-8") == render_page(), (
        "run: python -m keystroke.protocol.field_table docs/fields.md"
    )
