"""The store keeps what it was given, batches writes, and never fails a response."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from keystroke.errors import ConfigError, NotFound
from keystroke.gateway.access.keys import make_key
from keystroke.gateway.record.store import Store, default_url
from keystroke.gateway.record.tables import KEYS, RESPONSES, USAGE
from keystroke.protocol.items import Item, Message, OutputText
from keystroke.protocol.response import Receipt, Response
from postgres_server import postgres_server


def response(name: str, previous: str | None = None) -> Response:
    message = Message(f"msg_{name}", "completed", [OutputText(f"answer {name}")])
    return Response(
        id=name, created_at=1, model="m", status="completed", output=[message], previous_response_id=previous
    )


def receipt(**fields: float) -> Receipt:
    zero: dict[str, object] = {
        f: 0 for f in Receipt.__struct_fields__ if f not in ("model", "priority", "service_tier", "currency")
    }
    return Receipt(model="m", priority="chat", service_tier="default", **{**zero, **fields})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    with postgres_server() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    url = default_url(tmp_path) if request.param == "sqlite" else request.getfixturevalue("postgres")
    made = Store(url)
    yield made
    with made.engine.begin() as connection:
        for table in (RESPONSES, USAGE, KEYS):
            connection.execute(table.delete())
    made.close()


async def test_a_response_comes_back_as_it_went_in(store: Store) -> None:
    store.save_response("key", [Item(role="user", content="q")], response("a"))
    await store.flush()
    found = await store.response("a")
    assert found is not None
    assert (found.key_id, found.items, found.response) == (
        "key",
        [Item(role="user", content="q")],
        response("a"),
    )
    assert await store.response("b") is None


async def test_a_chain_is_read_oldest_first_and_the_last_write_of_an_id_stands(store: Store) -> None:
    for name, previous in (("a", None), ("b", "a"), ("c", "b"), ("c", "b")):
        store.save_response("key", [Item(role="user", content=name)], response(name, previous))
    await store.flush()
    assert [s.response.id for s in await store.chain("c")] == ["a", "b", "c"]
    assert await store.chain("nothing") == []


async def test_usage_adds_up_by_key_and_model(store: Store) -> None:
    for number in range(3):
        store.save_usage(
            f"r{number}", "k1", "bob", "completed", receipt(input_tokens=10, output_tokens=2, cost=0.5)
        )
    store.save_usage("r9", "k2", "eve", "completed", receipt(input_tokens=1))
    rows = store.usage()
    assert [(r.key, r.responses, r.input_tokens, r.output_tokens, r.cost) for r in rows] == [
        ("bob", 3, 30, 6, 1.5),
        ("eve", 1, 1, 0, 0.0),
    ]
    assert [r.key for r in store.usage(key="k2")] == ["eve"]
    assert store.usage(since=time.time() + 10) == []


async def test_keystrokes_are_one_row_an_hour_and_add_up_like_any_other_work(store: Store) -> None:
    for number in range(5):
        paid = receipt(input_tokens=10, computed_tokens=3, output_tokens=2, first_token_ms=4.0)
        store.save_usage(f"w{number}", "k1", "bob", "completed", paid, live=True)
        await store.flush()
    store.save_usage("r1", "k1", "bob", "completed", receipt(input_tokens=10, first_token_ms=4.0))
    (row,) = store.usage()
    assert (row.responses, row.input_tokens, row.computed_tokens, row.output_tokens) == (6, 60, 15, 10)
    assert row.first_token_ms == pytest.approx(4.0)
    with store.engine.connect() as connection:
        held = connection.execute(sa.select(sa.func.count()).select_from(USAGE)).scalar()
    assert held is not None
    assert held <= 3  # the hour may have changed in between


def test_a_database_of_an_earlier_version_is_brought_up_to_date(tmp_path: Path) -> None:
    url = default_url(tmp_path)
    Store(url).close()
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        for column in ("responses", "computed_tokens"):
            connection.execute(sa.text(f"ALTER TABLE usage DROP COLUMN {column}"))
        connection.execute(
            sa.text(
                "INSERT INTO usage (id, key_id, key_name, model, at, status, input_tokens, reused_tokens, "
                "output_tokens, cost, first_token_ms, total_ms, receipt) "
                "VALUES ('r', 'k', 'bob', 'm', 1.0, 'completed', 10, 4, 2, 0.5, 3.0, 9.0, '')"
            )
        )
    store = Store(url)
    (row,) = store.usage()
    assert (row.responses, row.computed_tokens, row.first_token_ms) == (1, 6, 3.0)
    store.close()


def test_keys_are_kept_by_hash_and_revoked_by_name_or_id(store: Store) -> None:
    key, token = make_key("bob")
    store.add_key(key)
    assert store.keys() == [key]
    with store.engine.begin() as connection:
        assert token not in str(connection.execute(sa.select(KEYS)).all())
    store.revoke_key("bob")
    assert store.keys()[0].revoked_at is not None
    with pytest.raises(NotFound):
        store.revoke_key("bob")


async def test_nothing_said_is_kept_without_retention(tmp_path: Path) -> None:
    store = Store(default_url(tmp_path), retention_days=0)
    store.save_response("key", [], response("a"))
    await store.flush()
    assert await store.response("a") is None
    store.close()


async def test_responses_past_their_retention_are_deleted(tmp_path: Path) -> None:
    store = Store(default_url(tmp_path), retention_days=1)
    store.save_response("key", [], response("old"))
    store.save_response("key", [], response("new"))
    await store.flush()
    with store.engine.begin() as connection:
        ancient = time.time() - 2 * 86_400
        connection.execute(sa.update(RESPONSES).where(RESPONSES.c.id == "old").values(created_at=ancient))
    store._purge()
    assert await store.response("old") is None
    assert await store.response("new") is not None
    store.close()


async def test_a_failing_database_is_logged_and_the_next_write_works(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = store.engine.begin
    monkeypatch.setattr(store.engine, "begin", lambda: (_ for _ in ()).throw(OSError("disk full")))
    store.save_response("key", [], response("lost"))
    await store.flush()
    monkeypatch.setattr(store.engine, "begin", begin)
    store.save_response("key", [], response("kept"))
    await store.flush()
    assert await store.response("kept") is not None


async def test_a_response_that_can_never_be_stored_is_not_called_committed(tmp_path: Path) -> None:
    store = Store(default_url(tmp_path), quota_mb=1)
    try:
        store.save_response("key", [], response("large"), running=True)
        assert await store.flush()
        committed = [
            await store.commit_response("key", [Item(role="user", content=text)], response(name))
            for name, text in (("large", "x" * (2 << 20)), ("a", ""), ("broken", "\ud800"), ("b", ""))
        ]
        found = [await store.response(name) is not None for name in ("large", "a", "broken", "b")]
    finally:
        store.close()
    assert committed == found == [False, True, False, True]


async def test_a_clock_that_is_set_back_does_not_make_new_responses_the_oldest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, now = Store(default_url(tmp_path), quota_mb=1), time.time()
    try:
        for number, clock in enumerate((now, now + 10, now - 86_400, now - 86_000)):
            monkeypatch.setattr(time, "time", lambda clock=clock: clock)
            items = [Item(role="user", content="x" * 400_000)]
            assert await store.commit_response("key", items, response(f"r{number}"))
        kept = [await store.response(f"r{number}") is not None for number in range(4)]
    finally:
        monkeypatch.undo()
        store.close()
    assert kept == [False, False, True, True]


@pytest.mark.parametrize(
    "url", ["nonsense", "sqlite:////proc/nowhere/x.db", "postgresql://nobody@127.0.0.1:1/x"]
)
def test_a_database_that_cannot_be_opened_is_one_sentence(url: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.database"):
        Store(url)


async def test_a_response_that_cannot_be_stored_does_not_stay_in_progress(tmp_path: Path) -> None:
    """What was stored while it ran goes, and rows that come later are stored."""
    store = Store(default_url(tmp_path))
    running = response("a")
    running.status = "in_progress"
    store.save_response("key", [], running, running=True)
    assert await store.flush()
    with store.engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE TRIGGER refuse BEFORE INSERT ON responses WHEN NEW.id = 'a' "
            "BEGIN SELECT RAISE(ABORT, 'not this one'); END"
        )
    assert not await store.commit_response("key", [], response("a"))
    assert await store.response("a") is None
    assert await store.commit_response("key", [], response("b"))
    assert await store.response("b") is not None
    store.close()
