"""Scores mean what they say: known answers give known numbers, and the same cases come from the same seed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from keystroke.engine.load import load_model
from keystroke.engine.templates import detect_fim
from keystroke.engine.tokenizer import load_tokenizer
from keystroke.errors import InputError
from keystroke.text.cases import CompletionCase, read_cases, write_cases
from keystroke_lab.evaluation.batched import BatchedModel, greedy, score
from keystroke_lab.evaluation.cases import make_cases
from keystroke_lab.evaluation.completion import (
    EvaluatedSuggestion,
    ModelSuggester,
    NgramSuggester,
    Share,
    edit_similarity,
    evaluate,
    left_to_right,
    limited,
    summary,
)
from keystroke_lab.evaluation.perplexity import model_bits_per_byte, open_model
from keystroke_lab.export.weights import export_gguf
from keystroke_lab.pretraining.documents import SourceText
from keystroke_lab.pretraining.fim import FimCut
from keystroke_lab.tokenizer import code_tokenizer, special
from keystroke_lab.training.transformer import CodeModel, Shape

FILES = sorted(Path(__file__).parents[2].glob("lab/keystroke_lab/**/*.py"))
SOURCES = [SourceText("keystroke", str(i), f.read_text(encoding="utf-8")) for i, f in enumerate(FILES)]
SHAPE = Shape(vocab=320, hidden=64, layers=1, heads=2, kv_heads=1, head_dim=32, intermediate=64, context=512)


def case(kind: FimCut, prefix: str, middle: str, suffix: str = "\n") -> CompletionCase:
    return CompletionCase(kind, "p", "1", "MIT", "a.py", prefix, middle, suffix)


class Scripted:
    """Answers from a table; remembers what it was asked."""

    name = "scripted"

    def __init__(self, answers: dict[str, str], *, fills: bool = True, confidence: float = 1.0) -> None:
        self.answers, self.fills, self.confidence = answers, fills, confidence
        self.asked: list[tuple[str, str | None]] = []

    def line(self, prefix: str, suffix: str | None) -> EvaluatedSuggestion:
        self.asked.append((prefix, suffix))
        return EvaluatedSuggestion(self.answers.get(prefix, ""), self.confidence, 0.5, 2)

    block = line


CASES = [
    case(FimCut.REST_OF_LINE, "a = ", "1"),
    case(FimCut.REST_OF_LINE, "b = ", "2"),
    case(FimCut.LINE, "x\n", "return total"),
    case(FimCut.BLOCK, "y\n", "one\ntwo"),
]


def test_exact_matches_are_counted_by_kind() -> None:
    answers = {"a = ": "1 ", "b = ": "3", "x\n": "return total", "y\n": "one\ntwo\n"}
    report = summary(evaluate(Scripted(answers), CASES, typed_lines=0))
    assert report["rest_of_line_em"] == 0.5
    assert report["line_em"] == report["fim_line_em"] == report["fim_block_em"] == 1.0
    assert report["chars_saved"] is None
    assert report["tokens_per_s"] == 4.0


def test_what_a_model_cannot_do_is_no_zero() -> None:
    report = summary(evaluate(Scripted({}, fills=False), CASES, typed_lines=0))
    assert report["fim_line_em"] is None
    assert report["fim_block_em"] is None
    assert report["line_em"] == 0.0


def test_left_to_right_tasks_never_show_the_text_after_the_cursor() -> None:
    suggester = Scripted({})
    evaluate(suggester, CASES, typed_lines=0)
    before_only = suggester.asked[:3]
    assert [suffix for _, suffix in before_only] == [None, None, None]
    assert all(suffix is not None for _, suffix in suggester.asked[3:])


@pytest.mark.parametrize(
    ("prefix", "before", "held"),
    [("x\n    ", "x\n   ", " "), ("x\n\t\t", "x\n\t", "\t"), ("x\n", "x\n", ""), ("x = f", "x = f", "")],
)
def test_the_last_space_or_tab_is_left_for_the_model_to_say(prefix: str, before: str, held: str) -> None:
    assert left_to_right(prefix, 100) == (before, held)


def test_typing_takes_right_suggestions_and_types_past_wrong_ones() -> None:
    right = evaluate(Scripted({"x\n": "return total"}), CASES, typed_lines=5)
    assert right.characters_saved == pytest.approx(11 / 12)  # taking it costs one key
    late = evaluate(Scripted({"x\n": "raise", "x\nret": "urn total"}), CASES, typed_lines=5)
    assert late.characters_saved == pytest.approx(8 / 12)
    assert (late.suggestions_shown, late.suggestions_right) == (2, 1)


def test_an_unsure_suggestion_is_not_shown() -> None:
    report = evaluate(Scripted({"x\n": "return total"}, confidence=0.1), CASES, typed_lines=5)
    assert (report.characters_saved, report.suggestions_shown) == (0.0, 0)


def test_the_interval_holds_the_share_and_narrows() -> None:
    low, high = Share(5, 10).interval
    assert 0.2 < low < 0.5 < high < 0.8
    more = Share(500, 1000).interval
    assert more[1] - more[0] < (high - low) / 5
    assert Share(0, 20).interval[0] == 0.0
    assert Share(0, 20).interval[1] > 0.1


def test_similarity_is_one_for_equal_and_zero_for_nothing_in_common() -> None:
    assert edit_similarity("abc", "abc") == edit_similarity("", "") == 1.0
    assert edit_similarity("abc", "xyz") == 0.0


def test_the_baseline_repeats_what_the_file_did_before() -> None:
    prefix = "total = add(first, second)\nother = 3\ntotal = add("
    assert NgramSuggester().line(prefix, None).text == "first, second)"


def test_cases_come_from_the_seed_and_survive_a_file(tmp_path: Path) -> None:
    facts = {"keystroke": ("1.0", "Apache-2.0")}
    cases = make_cases(SOURCES, facts, 3, seed=4)
    assert cases == make_cases(list(reversed(SOURCES)), facts, 3, seed=4)
    texts = [s.text for s in SOURCES]
    assert all(any(c.prefix + c.middle + c.suffix in text for text in texts) for c in cases)
    write_cases(tmp_path / "cases.xz", cases)
    assert read_cases(tmp_path / "cases.xz") == cases
    assert [c.kind for c in limited(cases, 1)] == [FimCut.REST_OF_LINE, FimCut.LINE, FimCut.BLOCK]
    (tmp_path / "bad.xz").write_bytes(b"nothing")
    with pytest.raises(InputError, match="make them again"):
        read_cases(tmp_path / "bad.xz")


def test_the_committed_cases_are_permissive_and_complete() -> None:
    cases = read_cases(Path(__file__).parents[2] / "bench" / "data" / "completion.jsonl.xz")
    assert {
        kind: sum(c.kind == kind for c in cases) for kind in (FimCut.REST_OF_LINE, FimCut.LINE, FimCut.BLOCK)
    } == {
        FimCut.REST_OF_LINE: 500,
        FimCut.LINE: 500,
        FimCut.BLOCK: 200,
    }
    assert all(c.licence and "GPL" not in c.licence for c in cases)
    assert all(c.middle.strip() for c in cases)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    code_tokenizer.save(code_tokenizer.train([s.text for s in SOURCES], SHAPE.vocab), folder)
    tensors = {n: p.detach().bfloat16() for n, p in CodeModel(SHAPE, seed=3).named_parameters()}
    torch.save({"shape": SHAPE.to_json(), "step": 0, "tokens": 0, "weights": tensors}, folder / "final.pt")
    export_gguf(folder / "final.pt", folder, folder / "tiny.gguf", name="tiny")
    return folder / "tiny.gguf"


def test_a_model_that_knows_nothing_needs_every_bit(exported: Path) -> None:
    model = CodeModel(SHAPE)
    torch.nn.init.zeros_(model.model.embed_tokens.weight)  # every token equally likely
    tokenizer = load_tokenizer(exported)
    text = SOURCES[0].text[:300]
    expected = math.log2(SHAPE.vocab) * len(tokenizer.encode(text)) / len(text.encode())
    assert model_bits_per_byte(model, tokenizer, [text]) == pytest.approx(expected, rel=1e-5)


def test_an_exported_model_answers_through_the_engine(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = load_model(exported)
    try:
        suggester = ModelSuggester(model)
        assert suggester.fills
        first = suggester.line("def add(a, b):\n    ", "\n")
        assert "\n" not in first.text
        assert first.text == suggester.line("def add(a, b):\n    ", "\n").text
        suggester.close()
    finally:
        model.engine.close()


def test_batched_completions_are_those_made_one_by_one(exported: Path) -> None:
    model = open_model(exported)
    tokenizer = load_tokenizer(exported)
    prompts = [
        tokenizer.encode(text) for text in ("def add(a, b):\n", "import os", "x = [i for i in range(10)]\n")
    ]
    ends = frozenset({0})
    with torch.no_grad():
        wanted = []
        for prompt in prompts:
            tokens = list(prompt)
            for _ in range(6):
                tokens.append(int(model.logits(torch.tensor([tokens]))[0, -1].argmax()))
            answer = tokens[len(prompt) :]
            wanted.append(answer[: answer.index(0)] if 0 in answer else answer)
    assert [a.tokens for a in greedy(model, prompts, 6, [ends] * 3, size=2)] == wanted


def test_batched_scores_use_the_engines_prompts(exported: Path) -> None:
    tokenizer = load_tokenizer(exported)
    plain = BatchedModel(open_model(exported), tokenizer, detect_fim(tokenizer, exported), frozenset({0}))
    filled = plain.prompt(CASES[2], 16, fill=True)
    assert filled.tokens[0] == special.FIM_SUFFIX
    assert filled.tokens[-1] == special.FIM_MIDDLE
    assert special.FIM_MIDDLE not in plain.prompt(CASES[2], 16, fill=False).tokens
    result = score(plain, CASES[:2], fill=False, limit=4)
    assert result.exact.of == 2
    assert all("\n" not in text for text in result.answers)
