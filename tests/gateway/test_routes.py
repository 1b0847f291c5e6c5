"""Every route of the table checks its caller before its handler runs."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from gateway_support import RunningServer, scripted_model, serving

from keystroke.config import ServerSettings
from keystroke.gateway.access.security import Access
from keystroke.gateway.api.openapi import RouteSpec
from keystroke.gateway.routes import ROUTES

KEY = "a-key-of-this-test"
OPEN = (Access.PUBLIC, Access.HOST, Access.OPTIONAL)


@pytest.fixture(scope="module")
def exposed() -> Iterator[RunningServer]:
    """A server that listens beyond loopback."""
    patch = pytest.MonkeyPatch()
    patch.setenv("KEYSTROKE_TEST_KEY", KEY)
    server = ServerSettings(host="0.0.0.0", api_key_env="KEYSTROKE_TEST_KEY")
    with serving(scripted_model(lambda _prompt: "ok"), server=server) as running:
        yield running
    patch.undo()


def call(server: RunningServer, spec: RouteSpec, headers: dict[str, str]) -> int:
    path = spec.path.format(name="app.js", response_id="resp_none", task_id="task_none", model="fast")
    reply = httpx.request(spec.method, f"{server.url}{path}", content=b"{}", headers=headers, timeout=60)
    return reply.status_code


@pytest.mark.parametrize("spec", ROUTES, ids=lambda spec: spec.operation)
def test_a_route_that_is_not_declared_open_needs_a_key(exposed: RunningServer, spec: RouteSpec) -> None:
    refused = spec.access not in OPEN
    assert (call(exposed, spec, {}) == 401) == refused
    assert (call(exposed, spec, {"authorization": "Bearer another"}) == 401) == refused
    assert call(exposed, spec, {"authorization": f"Bearer {KEY}"}) not in (401, 403)


@pytest.mark.parametrize("spec", ROUTES, ids=lambda spec: spec.operation)
def test_a_page_of_another_site_reaches_no_route_that_is_not_open(
    exposed: RunningServer, spec: RouteSpec
) -> None:
    headers = {"authorization": f"Bearer {KEY}", "origin": "https://elsewhere.example"}
    assert (call(exposed, spec, headers) == 403) == (spec.access not in OPEN)


def test_a_route_without_a_declared_access_requires_a_key() -> None:
    assert RouteSpec("GET", "/new", ROUTES[0].handler, "new", "A new route").access is Access.KEY


def test_only_what_holds_nothing_of_a_user_is_open() -> None:
    open_routes = {(spec.method, spec.path) for spec in ROUTES if spec.access in OPEN}
    assert open_routes == {
        ("GET", "/"),
        ("GET", "/play/{name}"),
        ("GET", "/health"),
        ("GET", "/openapi.json"),
    }


def test_tasks_are_closed_to_pages_of_other_programs() -> None:
    assert {spec.access for spec in ROUTES if spec.path.startswith("/v1/tasks")} == {Access.FILES}
