"""Commands with a model on this machine: a tiny one of random weights, on the real engine."""
# ruff: noqa: F811 - fixtures are imported by name

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path

import pytest
from cli_home import Home, home  # noqa: F401
from tiny_model import write_tiny_model

from keystroke.clients.cli.bench import benchmarks, run_recorded
from keystroke.engine.unsupported_gpu import unsupported_gpu


@pytest.fixture
def tiny_home(home: Home) -> Home:
    write_tiny_model(home.root / "tiny")
    home.configure('[model]\ndefault = "tiny"\nprecision = "fp32"\n[models.tiny]\npath = "tiny"\n')
    return home


def ended(home: Home, *arguments: str, stdin: str = "") -> dict[str, object]:
    lines = home.keystroke(*arguments, "--json", stdin=stdin).stdout.splitlines()
    end: dict[str, object] = json.loads(lines[-1])
    return end


def test_text_is_generated_and_the_first_load_is_converted_once(tiny_home: Home) -> None:
    first = tiny_home.keystroke("generate", "def f(x):", "--max-tokens", "12")
    converted = sorted(p for p in (tiny_home.root / "cache").rglob("*.onnx"))
    assert len(converted) == 1
    made = converted[0].stat().st_mtime_ns
    again = tiny_home.keystroke("generate", "def f(x):", "--max-tokens", "12")
    assert again.stdout == first.stdout
    assert converted[0].stat().st_mtime_ns == made


def test_a_converted_model_runs_without_what_builds_graphs_or_speaks_http(tiny_home: Home) -> None:
    tiny_home.keystroke("generate", "def f(x):", "--max-tokens", "2")
    told = tiny_home.program("generate", "def f(x):", "--max-tokens", "2", PYTHONPROFILEIMPORTTIME="1").stderr
    loaded = {
        line.rpartition("|")[2].strip() for line in told.splitlines() if line.startswith("import time:")
    }
    assert "onnxruntime" in loaded
    assert not loaded & {"onnx", "httpx", "torch", "asyncio"}


def test_the_seed_decides_the_text_and_drafts_do_not(tiny_home: Home) -> None:
    def text(seed: str, *options: str) -> str:
        arguments = ("generate", "abcabcabc", "--max-tokens", "24", "--temperature", "1", "--seed", seed)
        return tiny_home.keystroke(*options, *arguments).stdout

    assert text("1") == text("1", "--set", "speculation.enabled=false")
    assert len({text(str(seed)) for seed in range(3)}) == 3


def test_a_stop_string_ends_the_text_before_it(tiny_home: Home) -> None:
    whole = tiny_home.keystroke("generate", "def f(x):", "--max-tokens", "12").stdout
    stop = whole[4:6]
    cut = tiny_home.keystroke("generate", "def f(x):", "--max-tokens", "12", "--stop", stop).stdout
    assert cut == whole[: whole.index(stop)] + "\n"


def test_both_sides_of_the_cursor_reach_a_model_that_fills_in_the_middle(tiny_home: Home) -> None:
    file = tiny_home.root / "a.py"
    file.write_text("a = 1\nb = \nc = 3\n")
    with_suffix = ended(tiny_home, "complete", "a.py:2", "--max-tokens", "4")
    file.write_text("a = 1\nb = ")
    without = ended(tiny_home, "complete", "a.py:2", "--max-tokens", "4")
    # The line end before "c" counts too, and so do the format's three marks.
    assert (with_suffix["prompt_tokens"], without["prompt_tokens"]) == (10 + 7 + 3, 10 + 3)


def test_a_turn_reuses_the_tokens_of_the_turns_before(tiny_home: Home) -> None:
    done = tiny_home.keystroke("chat", "--json", "--max-tokens", "5", stdin="one\ntwo\n")
    first, second = (e for e in map(json.loads, done.stdout.splitlines()) if e["type"] == "end")
    assert first["reused_tokens"] == 0
    assert second["reused_tokens"] >= first["prompt_tokens"] - 1


def test_a_model_that_cannot_chat_says_so_before_the_first_line(tiny_home: Home) -> None:
    (tiny_home.root / "tiny" / "tokenizer_config.json").write_text("{}")
    assert "no model on this machine follows instructions" in tiny_home.refused("chat", stdin="hello\n")
    assert "has no chat template" in tiny_home.refused("chat", "--model", "tiny", stdin="hello\n", code=1)


def test_a_prompt_beyond_the_context_is_one_sentence_and_nothing_is_printed(tiny_home: Home) -> None:
    assert "512" in tiny_home.refused("generate", stdin="x" * 600)
    (tiny_home.root / "a.py").write_text("x = 1\n" * 1000)
    assert tiny_home.keystroke("complete", "a.py", "--max-tokens", "8").code == 0  # trimmed, not refused
    assert "ask for fewer tokens" in tiny_home.refused("complete", "a.py", "--max-tokens", "600")
    assert "512" in tiny_home.keystroke("chat", stdin="y" * 600 + "\n", code=2).stderr


def test_doctor_and_the_quick_benchmark_measure(tiny_home: Home) -> None:
    facts = json.loads(tiny_home.keystroke("doctor", "--json").stdout)["model"]
    assert (facts["name"], facts["context"], facts["fill_in_the_middle"]) == ("tiny", 512, "psm")
    assert facts["speed"]["decode"] > 0
    assert "decode" in tiny_home.keystroke("doctor").stdout
    quick = json.loads(tiny_home.keystroke("bench", "quick", "--json").stdout)
    assert quick["prefill"] > 0
    assert (quick["model"], quick["engine"]) == ("tiny", "onnx")
    assert "cores" in quick["machine"]


def test_a_benchmark_for_an_issue_prints_what_it_recorded_and_changes_no_result() -> None:
    root = Path(__file__).parents[2]
    script = "from bench.record import record; print('a table'); record('of a test', {'decode': {'mlx': 2}})"
    code, (result,) = run_recorded([sys.executable, "-c", script], root)
    assert code == 0
    assert result["figures"] == {"decode.mlx": 2}  # type: ignore[index]
    assert {"machine", "version", "command"} <= set(result)  # type: ignore[call-overload]
    assert not (root / "bench/results/of a test.json").exists()
    assert run_recorded([sys.executable, "-c", "raise SystemExit(3)"], root) == (3, [])


def test_only_programs_are_listed_as_benchmarks() -> None:
    assert {"gateway", "steps"} <= set(benchmarks())
    assert not {"review_cases", "plot", "project_tests"} & set(benchmarks())


def test_without_a_gpu_the_cuda_engine_says_what_is_missing(tiny_home: Home) -> None:
    if unsupported_gpu() is not None:
        wanted = "needs an NVIDIA one"
    elif importlib.util.find_spec("torch") is None:
        wanted = "keystroke[cuda]"
    else:
        torch = importlib.import_module("torch")
        if torch.cuda.is_available():
            pytest.skip("this machine has a GPU")
        wanted = "torch was built without CUDA" if torch.version.cuda is None else "nvidia-smi"
    assert wanted in tiny_home.refused("bench", "cuda", code=1)
    assert wanted in tiny_home.refused("serve", "--engine", "cuda", "--model", "tiny", "--port", "0", code=1)
    facts = json.loads(tiny_home.keystroke("--set", "engine.kind=cuda", "doctor", "--quick", "--json").stdout)
    assert facts["cuda"]["suits"] is False
    assert wanted in facts["cuda"]["why"]


def test_a_model_is_added_shown_and_used_by_name(tiny_home: Home) -> None:
    folder = tiny_home.root / "Other-Tiny"
    write_tiny_model(folder)
    tiny_home.keystroke("models", "add", str(folder))
    shown = json.loads(tiny_home.keystroke("models", "show", "Other-Tiny", "--json").stdout)
    assert (shown["architecture"], shown["context"]) == ("llama", 512)
    assert tiny_home.keystroke("generate", "x", "-m", "Other-Tiny", "--max-tokens", "3").stdout
    (folder / "model.safetensors").unlink()
    assert "lost its file" in tiny_home.refused("generate", "x", "-m", "Other-Tiny", code=1)


def test_a_model_that_cannot_run_is_refused_when_it_is_added(tiny_home: Home, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "strange")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "model_type": "mamba", "architectures": ["MambaForCausalLM"]})
    )
    assert "Mamba" in tiny_home.refused("models", "add", str(folder), code=1)
    assert [p.name for p in (tiny_home.root / "models").glob("*")] == []
