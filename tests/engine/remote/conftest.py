from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai_server import OpenAIServer, running


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with running() as started:
        yield started
