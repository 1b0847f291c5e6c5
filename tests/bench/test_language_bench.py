"""The benchmark by language: every language has its cases, shares are counted, the picture is well formed."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from bench.completion import CASES, LANGUAGES, draw_plot
from bench.exactness import (
    SETTLED,
    AnswerStore,
    Cascade,
    by_language,
    compare_models,
    exactness,
    language,
    summarise_languages,
)
from bench.plot import HEIGHT, WIDTH, Point, plot

from keystroke.analysis.audit.rules.secrets import holds_secret
from keystroke.gateway.live import second_opinion
from keystroke.text.cases import CompletionCase, read_cases
from keystroke_lab.evaluation.completion import EvaluatedSuggestion

PERMISSIVE = re.compile(r"MIT|Apache|BSD|ISC|0BSD|Unlicense|zlib|PSF|CC0|BSL|Zero|ZPL", re.I)


class Fixed:
    """Says one text; as sure as it is told."""

    fills = True

    def __init__(self, text: str, confidence: float = 1.0) -> None:
        self.name, self.text, self.confidence = text, text, confidence
        self.asked = 0

    def line(self, prefix: str, suffix: str | None) -> EvaluatedSuggestion:
        self.asked += 1
        return EvaluatedSuggestion(self.text, self.confidence)

    block = line


def case(kind: str, middle: str, path: str = "a.go") -> CompletionCase:
    return CompletionCase(kind, "p", "1", "MIT", path, "x := ", middle, "\n")


def test_every_language_has_cases_with_their_licence() -> None:
    cases = read_cases(LANGUAGES)
    counted = Counter(language(c) for c in cases)
    assert {"javascript", "typescript", "go", "rust", "java", "c"} <= set(counted)
    for c in cases:
        assert c.kind in ("rest_of_line", "line")
        assert PERMISSIVE.search(c.licence), c.licence
        assert c.middle.strip() and c.prefix and c.project and c.version  # noqa: PT018
    assert not [c for c in cases if holds_secret(c.middle)]
    assert max(Counter((c.project, c.kind, language(c)) for c in cases).values()) <= 4


def test_cases_are_limited_by_kind_and_language() -> None:
    chosen = by_language([*read_cases(CASES), *read_cases(LANGUAGES)], 2)
    for name, cases in chosen.items():
        assert set(Counter(c.kind for c in cases).values()) <= {1, 2}, name
    assert "python" in chosen


def test_shares_have_intervals_and_all_languages_are_added_up() -> None:
    cases = [case("rest_of_line", "1"), case("rest_of_line", "2"), case("line", "1")]
    row = exactness(AnswerStore(lambda: Fixed("1 ")), cases, ["rest_em", "line_em", "fim_rest_em"])
    assert (row["rest_em"], row["line_em"], row["fim_rest_em"]) == (0.5, 1.0, 0.5)
    assert row["rest_em_95"][0] < 0.5 < row["rest_em_95"][1]
    assert row["p50_ms"] >= 0
    together = summarise_languages({"go": row, "c": {**row, "rest_em": 1.0}}, ["rest_em"])
    assert (together["rest_em"], together["rest_em_of"]) == (0.75, 4)
    assert (row["shown"], row["shown_of"], row["shown_right"]) == (1.0, 5, 0.6)
    assert (together["shown"], together["shown_of"]) == (1.0, 10)
    assert exactness(AnswerStore(lambda: Fixed("1")), [], ["rest_em"]) == {"p50_ms": None}


def test_two_models_are_compared_place_by_place() -> None:
    cases = [case("rest_of_line", middle) for middle in "1112"]
    one, two = AnswerStore(lambda: Fixed("1")), AnswerStore(lambda: Fixed("2"))
    row = compare_models(one, two, cases, ["rest_em", "line_em"])
    assert (row["only_first"], row["only_second"], row["of"], row["gained"]) == (3, 1, 4, -0.5)
    assert row["gained_95"][0] < -0.5 < row["gained_95"][1]
    assert compare_models(one, one, cases, ["fim_rest_em"])["gained_95"] == [0.0, 0.0]
    assert compare_models(one, two, [], ["rest_em"]) == {"only_first": 0, "only_second": 0, "of": 0}


@pytest.mark.parametrize(
    ("small", "large", "text", "shown", "verdict"),
    [
        (("a", 0.9), ("a ", 0.3), "a", True, "confirmed"),
        (("a", 0.9), ("a b", 0.85), "a b", True, "lengthened"),
        (("a", 0.9), ("a b", 0.75), "a", True, "left"),
        (("a", 0.9), ("b", 0.85), "b", True, "replaced"),
        (("a", 0.9), ("b", 0.84), "a", True, "left"),
        (("a", 0.7), ("b", 0.85), "b", True, "offered"),
        (("a", 0.7), ("b", 0.3), "b", False, "nothing shown"),
    ],
)
def test_of_two_minds_the_larger_has_its_say_by_the_rule_of_the_gateway(
    small: tuple[str, float], large: tuple[str, float], text: str, shown: bool, verdict: str
) -> None:
    cascade = Cascade(AnswerStore(lambda: Fixed(*small)), AnswerStore(lambda: Fixed(*large)))
    said = cascade.answer(case("line", ""), below=True)
    assert (said.text, said.shown, said.verdict) == (text, shown, verdict)
    assert SETTLED == second_opinion.SETTLED
    assert (said.first + SETTLED <= said.seconds) == (small[1] >= 0.8)


def test_a_model_shows_nothing_in_a_language_it_has_not_learned() -> None:
    small = AnswerStore(lambda: Fixed("a"), learned=frozenset({"python"}))
    assert small.answer(case("line", "", "a.py"), below=True).shown
    assert not small.answer(case("line", ""), below=True).shown
    said = Cascade(small, AnswerStore(lambda: Fixed("b", 0.85))).answer(case("line", ""), below=True)
    assert (said.text, said.verdict) == ("b", "offered")


def test_an_answer_that_was_kept_is_not_asked_for_again_and_counts_as_it_was(tmp_path: Path) -> None:
    first, one = Fixed("1", 0.7), case("line", "")
    said = AnswerStore(lambda: first, tmp_path / "answers.jsonl").answer(one, below=False)
    again = AnswerStore(lambda: Fixed("2"), tmp_path / "answers.jsonl")
    found = again.answer(one, below=False)
    assert (found.text, found.confidence, first.asked) == ("1", 0.7, 1)
    assert found.seconds == pytest.approx(said.seconds, abs=1e-4)
    assert again.fills
    assert again.answer(one, below=True).text == "2"


def test_times_are_of_this_machine_where_that_is_asked_and_texts_stay_as_they_were(tmp_path: Path) -> None:
    cases, kept = [case("line", "1"), replace(case("line", "1"), prefix="y := ")], tmp_path / "answers.jsonl"
    exactness(AnswerStore(lambda: Fixed("1"), kept), cases, ["line_em"])
    elsewhere = [{**json.loads(line), "seconds": 1e6} for line in kept.read_text().splitlines()]
    kept.write_text("".join(json.dumps(row) + "\n" for row in elsewhere))
    here = Fixed("2")
    again = AnswerStore(lambda: here, kept)
    row = exactness(again, cases, ["line_em"], timed=1)
    assert (row["line_em"], here.asked, again.same) == (1.0, 1, [False])
    assert row["p50_ms"] < 1e9
    assert exactness(AnswerStore(lambda: here, kept), cases, ["line_em"])["p50_ms"] == 1e9


def test_the_picture_is_well_formed_and_every_point_lies_in_it() -> None:
    points = [Point("a<b>&\"'", 3.0, 0.2, 0.1, 0.35), Point("slow", 4000.0, 1.0, 0.97, 1.0)]
    root = ElementTree.fromstring(plot(points, "x < y"))
    circles = [e for e in root.iter() if e.tag.endswith("circle")]
    assert len(circles) == len(points)
    for circle in circles:
        assert 0 < float(circle.attrib["cx"]) < WIDTH
        assert 0 < float(circle.attrib["cy"]) < HEIGHT
    ElementTree.fromstring(plot([], "nothing"))
    alike = [Point(name, 7000.0, 0.4, 0.3, 0.5) for name in ("large", "small>large", "larger")]
    labels = [e for e in ElementTree.fromstring(plot(alike, "")).iter() if e.text in {p.label for p in alike}]
    lines = sorted(float(e.attrib["y"]) for e in labels)
    assert [b - a for a, b in pairwise(lines)] == pytest.approx([16.0, 16.0])
    row = {"fim_rest_em": 0.4, "fim_rest_em_95": [0.3, 0.5], "fim_rest_em_of": 9, "p50_ms": 12.0}
    assert "coder" in draw_plot({"/m/coder.gguf": {"all": row}})
