"""BENCHMARKS.md is what `make figures` writes; benchmarks leave results that it can read."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from bench.figures import CATALOGUE, LONGEST, PAGE, write_page
from bench.record import RESULTS, flattened, record


def test_the_page_is_written_from_the_results() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == write_page(tomllib.loads(CATALOGUE.read_text(encoding="utf-8")), RESULTS)
    assert page.count("\n") <= LONGEST == 250


def test_every_result_says_where_it_comes_from() -> None:
    for path in RESULTS.glob("*.json"):
        result = json.loads(path.read_text(encoding="utf-8"))
        assert set(result) == {"command", "machine", "date", "version", "figures"}, path.name
        assert all(result.values()), path.name


def test_every_result_is_shown() -> None:
    shown = {
        row["result"]
        for feature in tomllib.loads(CATALOGUE.read_text(encoding="utf-8"))["feature"]
        for row in feature["row"]
    }
    assert {path.stem for path in RESULTS.glob("*.json")} == shown


def test_a_recorded_result_fills_a_row_and_a_missed_target_is_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BENCH_RESULTS", str(tmp_path))
    record("speed", {"decode": {"ours": 1234.5, "theirs": 2000}, "lost": 0})
    assert json.loads(capsys.readouterr().out) == {"decode": {"ours": 1234.5, "theirs": 2000}, "lost": 0}
    rows = [
        {"metric": "decode", "result": "speed", "ours": "{decode.ours} tok/s", "at_least": 1500},
        {"metric": "lost", "result": "speed", "ours": "{lost}", "peer": "{decode.theirs}", "at_most": 0},
    ]
    page = write_page({"feature": [{"title": "Speed", "row": rows}]}, tmp_path)
    assert "| decode | 1,234.5 tok/s |  | at least 1,500, **missed** |" in page
    assert "| lost | 0 | 2,000 | at most 0 |" in page
    rows[0]["ours"] = "{decode.nobody}"
    with pytest.raises(KeyError):
        write_page({"feature": [{"title": "Speed", "row": rows}]}, tmp_path)


def test_a_page_that_is_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_RESULTS", str(tmp_path))
    record("speed", {"rate": 1})
    rows = [{"metric": f"rate {i}", "result": "speed", "ours": "{rate}"} for i in range(LONGEST)]
    with pytest.raises(ValueError, match="lines"):
        write_page({"feature": [{"title": "Speed", "row": rows}]}, tmp_path)


def test_nested_figures_are_named_with_dots() -> None:
    assert flattened({"a": {"b": 1, "c": {"d": 2}}, "e": [3]}) == {"a.b": 1, "a.c.d": 2, "e": [3]}
