"""The benchmark's rows, on the emulator: what they report, not how fast."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench.cuda_rows import cuda_coder, cuda_parts
from cuda_models import tiny_engine, tiny_spec

from bench import cuda
from keystroke.engine.base import Sampling
from keystroke.engine.cuda.target import HOPPER, TARGETS
from keystroke.engine.model import Model
from keystroke.engine.tokenizer.byte_tokens import ByteTokenizer

COMMON = {"shape", "precision", "context", "mode", "tok_s", "fraction_of_limit", "peer_tok_s"}


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = cuda_parts
    for name, value in {"SETTLED": 1, "TOKENS": 2, "ROUNDS": 2, "LAUNCHES": 2}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module.torch.cuda, "synchronize", lambda: None)
    return module


@pytest.fixture
def run(parts: Any) -> Iterator[Any]:
    spec = tiny_spec(layers=1, context=512)
    with tiny_engine(spec, kv_tokens=2048, sparse="always") as engine:
        yield parts.Run(engine, 1e12)


def test_every_row_of_random_weights_reports_its_columns(
    parts: Any, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []  # rows of each step that the host started
    start = run.engine._stepper.start

    def counted(rows: list[Any]) -> Any:
        given.append(sum(len(row.tokens) for row in rows))
        return start(rows)

    monkeypatch.setattr(run.engine._stepper, "start", counted)
    rows = {
        "decode": parts.decode(run, 60),
        "verify 16 rows": parts.verify(run, 60),
        "3 sessions together": parts.together(run, 40, 3),
        "first token after +16": parts.first_token(run, 64),
        "prefill": parts.prefill(run, 100, rounds=2),
    }
    assert [row["mode"] for row in rows.values()] == list(rows)
    assert all(set(row) >= COMMON and row["tok_s"] > 0 for row in rows.values())
    assert rows["decode"]["fraction_of_limit"] is not None
    assert (
        given.count(16) == 1 + 2 * 3 + 2
    )  # the kernel alone, two rounds of drafts, two times 16 typed tokens
    assert run.engine.sparse_steps == 0
    monkeypatch.setattr(parts, "SPARSE_FROM", 32)
    assert "times_dense" in parts.sparse_decode(run, 60)
    assert run.engine.sparse_steps > 0


def test_the_edit_says_where_two_texts_part_and_how_near_the_choice_was(
    parts: Any, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[7 * i % 200 for i in range(70)], [11 * i % 200 for i in range(70)]]
    monkeypatch.setattr(parts, "rewrites", lambda model: [(prompt, [1, 2, 3], 3) for prompt in prompts])
    monkeypatch.setattr(parts, "measure_verify_cost", lambda engine, most: None)
    run.model = Model("tiny", run.engine, ByteTokenizer({}, eos=250, vocab_size=256))
    plain, drafted = parts.edit(run)
    assert (plain["tokens"], drafted["tokens"]) == (6, 6)
    assert drafted["same_text"] is True
    assert "first_difference" not in drafted

    with run.engine.session() as session:
        session.extend(prompts[1])
        said = session.step(sampling=Sampling(logprobs=2))
        (_, best), (_, second) = session.step(sampling=Sampling(logprobs=2)).logprobs[0].top
    one = {"said": [(1, 2), (said.tokens[0], 5, 6)], "reused": [64, 64]}
    other = {"said": [(1, 2), (said.tokens[0], 6, 6)], "reused": [64, 0]}
    found = parts.difference(run, prompts, one, other)
    assert found.pop("best_logits_apart") == pytest.approx(best - second, abs=1e-3)
    assert found == {"question": 1, "token": 1, "same_reads": False}


def test_the_shapes_of_every_part_suit_the_kernel(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "blocks", lambda: 132)
    monkeypatch.setattr(parts, "kind", lambda name: TARGETS.get(name, HOPPER))
    for part in parts.PARTS.values():
        assert part.kernels()


@pytest.fixture
def bench() -> Any:
    return cuda


ROW = {"shape": "tiny", "precision": "bf16", "context": 1024, "mode": "decode", "tok_s": 10.0}
ROW |= {"fraction_of_limit": 0.5, "peer_tok_s": None}


def test_a_worker_is_heard_until_it_ends_and_a_bad_end_costs_only_what_it_had_not_said(
    bench: Any, tmp_path: Path
) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        "import json, sys\n"
        "print('noise of a library')\n"
        "if sys.argv[1] == 'early': sys.exit(3)\n"
        "print('READY', flush=True)\n"
        "print(json.dumps({'limit': float(sys.stdin.readline())}), flush=True)\n"
        "if sys.argv[1] == 'hangs': sys.stdin.read()\n"
        "sys.exit(sys.argv[1] == 'late')\n"
    )
    soon = time.monotonic() + 100
    good, late, early, hangs = (bench.Worker(str(script), name) for name in ("", "late", "early", "hangs"))
    for worker in (good, late, hangs):
        worker.wait_ready(soon)
    assert list(good.run(2.5, soon)) == [{"limit": 2.5}]
    said = late.run(2.5, soon)
    assert next(said) == {"limit": 2.5}
    with pytest.raises(RuntimeError, match="code 1"):
        next(said)
    with pytest.raises(RuntimeError, match="code 3 before it was ready"):
        early.wait_ready(soon)
    waits = hangs.run(2.5, soon)
    assert next(waits) == {"limit": 2.5}
    with pytest.raises(TimeoutError, match="stopped"):
        next(hangs.run(2.5, time.monotonic()))


def test_a_report_sets_the_peer_beside_its_row_and_keeps_failures(
    bench: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    report = bench.Report()
    report.add(dict(ROW))
    report.add({**ROW, "mode": "verify 16 rows", "times_one_row": 1.2})
    report.add({"part": "tiny", "row": "prefill", "error": "ValueError: no"})
    report.add_peer({"shape": "tiny", "peer_tok_s": 4.0})
    assert [(row["peer_tok_s"], row.get("times_peer")) for row in report.rows] == [(4.0, 2.5), (None, None)]
    assert [row["row"] for row in report.failed] == ["prefill"]
    assert "times_one_row 1.2" in capsys.readouterr().out


def test_a_coders_row_reports_its_columns_and_whether_texts_are_the_same(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module: Any = cuda_coder
    monkeypatch.setattr(module, "MOST", 3)
    monkeypatch.setattr(module, "prompts", lambda *_: [[5, 17, 99, 3], [44, 120, 7, 8]])
    monkeypatch.setattr(module, "measure_verify_cost", lambda *_: (0.0, *([1.0] * 33)))
    model = Model("tiny", run.engine, ByteTokenizer({}, eos=250, vocab_size=256))
    module.measure(run, model, "coder-new", Sampling(), 2)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["mode"] for row in rows] == ["coder-new greedy, plain", "coder-new greedy, prompt lookup"]
    assert all(set(row) >= COMMON | {"tokens_a_step", "drafted", "accepted"} for row in rows)
    assert [row["same_text"] for row in rows] == ["2 of 2"] * 2
