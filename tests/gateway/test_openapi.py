"""The OpenAPI document describes the server: a fuzzer that believes it finds nothing undocumented."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from gateway_support import RunningServer, scripted_model, serving
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from keystroke.gateway.routes import openapi_document

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
EXAMPLES = 15


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving(scripted_model(lambda _prompt: "ok", context_length=2000)) as running:
        yield running


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    """Thousands of requests on one connection, without a look for proxies and passwords before each."""
    with requests.Session() as opened:
        opened.trust_env = False
        yield opened


schema = schemathesis.openapi.from_dict(openapi_document())


@pytest.mark.slow
@schema.parametrize()
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
def test_every_answer_is_one_the_document_promises(
    case: Any, server: RunningServer, session: requests.Session
) -> None:
    case.call_and_validate(base_url=server.url, checks=CHECKS, session=session, timeout=60)


def test_the_document_names_every_address_the_server_serves(server: RunningServer) -> None:
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    served = {route.path for route in server.gateway._http.routes}  # type: ignore[attr-defined]
    assert set(paths) == served - {"/openapi.json"}
    assert server.settled()
