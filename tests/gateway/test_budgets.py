"""Monthly budgets of keys, and usage for other programs."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from gateway_support import echo, scripted_model, serving

from keystroke.config import NamedModel, ServerSettings
from keystroke.errors import Unavailable
from keystroke.gateway.access.keys import make_key
from keystroke.gateway.access.limits import BudgetSpent, MonthlyBudgets, month_end, month_start
from keystroke.gateway.record.store import Store, UsageRow, default_url
from keystroke.gateway.record.usage_export import send_usage, usage_csv
from local_http import Handler, listening

ROWS = [
    UsageRow("alice", "coder", 3, 900, 300, 600, 120, 0.25, 12.0, 80.0),
    UsageRow("=cmd()", "deep, large", 1, 10, 0, 10, 5, 1.5, 30.0, 90.0),
]


def test_a_month_begins_and_ends_in_utc() -> None:
    now = datetime(2026, 12, 31, 23, 59, tzinfo=UTC).timestamp()
    assert datetime.fromtimestamp(month_start(now), UTC) == datetime(2026, 12, 1, tzinfo=UTC)
    assert datetime.fromtimestamp(month_end(now), UTC) == datetime(2027, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(("tokens", "cost"), [(1000, 0.0), (0, 2.0), (1000, 2.0)])
def test_a_budget_is_spent_by_tokens_or_money_and_only_by_its_own_key(tokens: int, cost: float) -> None:
    limited, _ = make_key("a", monthly_tokens=tokens, monthly_cost=cost)
    free, _ = make_key("b")
    budgets = MonthlyBudgets()
    budgets.update([limited, free], {limited.id: (400, 0.9)})
    budgets.check(limited.id)
    for key in (limited, free):
        budgets.add(key.id, 700, 1.2)
    with pytest.raises(BudgetSpent, match="of this month"):
        budgets.check(limited.id)
    budgets.check(free.id)
    budgets.update([limited], {})  # a new month
    budgets.check(limited.id)


def test_a_key_over_its_budget_is_refused_while_others_go_on(tmp_path: Path) -> None:
    poor, poor_token = make_key("poor", monthly_cost=0.001)
    rich, rich_token = make_key("rich", monthly_cost=1000.0)
    with closing(Store(default_url(tmp_path))) as store:
        for key in (poor, rich):
            store.add_key(key)
    table = NamedModel(cost_per_million_input=100.0, cost_per_million_output=100.0)
    model = scripted_model(echo)
    with serving(model, tables={"echo": table}, folder=tmp_path, server=ServerSettings()) as server:

        def ask(token: str) -> httpx.Response:
            body = {"model": "auto", "input": "word " * 20}
            headers = {"Authorization": f"Bearer {token}"}
            return httpx.post(f"{server.url}/v1/responses", json=body, headers=headers, timeout=60)

        deadline = time.monotonic() + 60
        while (refused := ask(poor_token)).is_success:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "budget_exceeded"
        assert ask(rich_token).is_success
        assert server.gateway.store is not None
        server.gateway.store.set_budget("poor", None, 1000.0)
        while not ask(poor_token).is_success:
            assert time.monotonic() < deadline
            time.sleep(0.2)


def test_usage_is_exported_as_csv_that_no_spreadsheet_runs() -> None:
    read = list(csv.DictReader(io.StringIO(usage_csv(ROWS))))
    assert [row["key"] for row in read] == ["alice", "'=cmd()"]
    assert read[0]["cost"] == "0.25"
    assert read[1]["model"] == "deep, large"


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    bodies: list[bytes] = []

    class Taking(Handler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.reply(200 if self.path == "/v1/metrics" else 400, b"", {})

    with listening(Taking) as url:
        yield url, bodies


def test_usage_is_sent_to_a_collector(collector: tuple[str, list[bytes]]) -> None:
    wire = pytest.importorskip(
        "opentelemetry.proto.collector.metrics.v1.metrics_service_pb2", reason="the [scale] extra"
    )
    url, bodies = collector
    send_usage(ROWS, f"{url}/v1/metrics")
    (scope,) = wire.ExportMetricsServiceRequest.FromString(bodies[0]).resource_metrics[0].scope_metrics
    metrics = {metric.name: metric for metric in scope.metrics}
    assert set(metrics) == {f"keystroke.usage.{name}" for name in ("responses", "tokens", "cost")}
    assert sum(point.as_double for point in metrics["keystroke.usage.cost"].sum.data_points) == 1.75
    with pytest.raises(Unavailable, match="did not accept"):
        send_usage(ROWS, f"{url}/elsewhere")
