"""A store copied out and back: every row, nothing overwritten, nothing taken from a damaged file."""

from __future__ import annotations

import gzip
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa

from keystroke.errors import InputError
from keystroke.gateway.access.keys import make_key
from keystroke.gateway.record.backup import read_backup, write_backup
from keystroke.gateway.record.store import Store, default_url
from keystroke.gateway.record.tables import KEYS, RESPONSES, USAGE
from keystroke.protocol.items import Item, Message, OutputText
from keystroke.protocol.response import Receipt, Response
from postgres_server import postgres_server


def filled(store: Store, count: int = 1200) -> None:
    zero = {
        f: 0 for f in Receipt.__struct_fields__ if f not in ("model", "priority", "service_tier", "currency")
    }
    paid = Receipt(model="m", priority="chat", service_tier="default", **zero)  # type: ignore[arg-type]
    for at in range(count):
        message = Message(f"msg_{at}", "completed", [OutputText(f"Antwort – {at}\n")])
        response = Response(id=f"r{at}", created_at=1, model="m", status="completed", output=[message])
        store.save_response("k", [Item(type="message", role="user", content="schön")], response)
        store.save_usage(f"r{at}", "k", "somebody", "completed", paid)
    store.add_key(make_key("somebody")[0])
    store.flush_now()


def content(store: Store) -> dict[str, list[tuple[object, ...]]]:
    with store.engine.connect() as connection:
        return {
            t.name: sorted((tuple(r) for r in connection.execute(sa.select(t))), key=lambda row: str(row[0]))
            for t in (RESPONSES, USAGE, KEYS)
        }


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(Store(default_url(tmp_path / "one"))) as made:
        filled(made)
        yield made


def test_what_is_restored_is_what_was_there(store: Store, tmp_path: Path) -> None:
    file = tmp_path / "backup.gz"
    assert write_backup(store, file) == {"keys": 1, "usage": 1200, "responses": 1200}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with closing(Store(default_url(tmp_path / "two"))) as other:
        assert read_backup(other, file) == {"keys": 1, "usage": 1200, "responses": 1200}
        assert content(other) == content(store)


def test_a_backup_goes_to_postgres_and_comes_back(store: Store, tmp_path: Path) -> None:
    first, second = tmp_path / "a.gz", tmp_path / "b.gz"
    write_backup(store, first)
    with postgres_server() as url, closing(Store(url)) as other:
        read_backup(other, first)
        write_backup(other, second)
    with closing(Store(default_url(tmp_path / "three"))) as third:
        read_backup(third, second)
        assert content(third) == content(store)


def test_a_backup_that_is_missing_is_called_missing(store: Store, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        read_backup(store, tmp_path / "none.gz")


def test_rows_that_are_there_stay_as_they_are(store: Store, tmp_path: Path) -> None:
    file = tmp_path / "backup.gz"
    write_backup(store, file)
    with store.engine.begin() as connection:
        connection.execute(sa.update(KEYS).values(revoked_at=5.0))
        connection.execute(sa.delete(RESPONSES).where(RESPONSES.c.id == "r7"))
    assert read_backup(store, file)["responses"] == 1
    assert store.keys()[0].revoked_at == 5.0


@pytest.mark.parametrize("damage", ["cut", "changed", "other", "missing"])
def test_a_damaged_file_is_refused_whole(store: Store, tmp_path: Path, damage: str) -> None:
    file = tmp_path / "backup.gz"
    write_backup(store, file)
    body = gzip.decompress(file.read_bytes())
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-200])
    elif damage == "changed":
        file.write_bytes(gzip.compress(body.replace(b"somebody", b"nobody", 1)))
    elif damage == "other":
        file.write_bytes(gzip.compress(b'{"some": "json"}\n'))
    else:
        file.unlink()
    with closing(Store(default_url(tmp_path / "two"))) as other:
        with pytest.raises(InputError):
            read_backup(other, file)
        assert content(other) == {"responses": [], "usage": [], "keys": []}


def test_a_place_that_cannot_be_written_is_named(store: Store, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        write_backup(store, tmp_path / "nowhere" / "backup.gz")
