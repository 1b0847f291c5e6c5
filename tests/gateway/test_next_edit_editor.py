"""Who is asked for next edits: a model with an adapter where it is quick enough, else the buffer's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from keystroke.assist.next_edit.places import PlaceMarks, PlacesFormat
from keystroke.gateway.live.next_edit import QUICK, choose_edit_model
from keystroke.gateway.work.registry import ModelRegistry, ServedModel

FORMAT = PlacesFormat(lambda text: [], lambda tokens: "", PlaceMarks(0, 1, 2, 3, (), ()))


def served(edits: object, rate: float | None) -> ServedModel:
    return cast(ServedModel, SimpleNamespace(edits=edits, scheduler=SimpleNamespace(prefill_rate=rate)))


def registry(**entries: ServedModel) -> ModelRegistry:
    return cast(ModelRegistry, SimpleNamespace(entries=entries))


@pytest.mark.parametrize(("rate", "asked"), [(None, "adapted"), (QUICK, "adapted"), (QUICK - 1, "own")])
def test_a_model_with_an_adapter_is_asked_where_it_is_quick_enough(rate: float | None, asked: str) -> None:
    models: dict[str, Any] = {"own": served(None, 900.0), "adapted": served(FORMAT, rate)}
    assert choose_edit_model(registry(**models), models["own"]) is models[asked]


def test_without_such_a_model_the_buffers_own_is_asked() -> None:
    own = served(None, None)
    assert choose_edit_model(registry(own=own, other=served(None, 5000.0)), own) is own
