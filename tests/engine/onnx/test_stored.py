"""Models that run on their weights as they are stored: near the widened model, by either set of operators."""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keystroke.config import Settings, load_settings
from keystroke.engine.checkpoint import open_checkpoint
from keystroke.engine.load import load_model
from keystroke.engine.onnx import backend, native
from keystroke.engine.onnx.convert import conversion_cache, convert_model, convert_stored, graph_bytes
from keystroke.engine.onnx.engine import OnnxEngine, OnnxGraph, OnnxOptions
from keystroke.engine.onnx.stored import can_run_stored, fits_native_operators, portable_bytes
from keystroke.errors import ConfigError, ModelDamaged, NotEnoughMemory

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))
from checkpoint_models import reference, saved, write_gguf
from stored_models import KINDS, opened, write_stored

Array = np.ndarray[Any, Any]
PROMPT: list[int] = np.random.default_rng(0).integers(0, 96, 40).tolist()
NEAR = 0.002  # nats a token: what the rounding of activations may cost


def logprobs(engine: OnnxEngine) -> Array:
    with engine.session() as session:
        logits = session._forward(PROMPT, 0, len(PROMPT), None).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    found: Array = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return found


def divergence(path: Path, cache: Path, kernels: str) -> float:
    """Mean KL divergence of the model from its widened weights in 32-bit floats, in nats a token."""
    with open_checkpoint(path) as checkpoint:
        model = convert_model(checkpoint, precision="fp32", cache=cache)
        with OnnxEngine(OnnxGraph(model, checkpoint.spec, "fp32"), OnnxOptions(threads=1)) as engine:
            exact = logprobs(engine)
    with opened(path, cache, kernels) as engine:
        found = logprobs(engine)
    return float((np.exp(exact) * (exact - found)).sum(axis=1).mean())


@pytest.mark.parametrize("kernels", ["native", "portable"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_any_stored_type_stays_near_its_widened_weights(
    tmp_path: Path, kind: str, kernels: str
) -> None:
    write_stored(tmp_path / "model.gguf", "qwen2", [kind])
    assert 0 <= divergence(tmp_path / "model.gguf", tmp_path, kernels) < NEAR


@pytest.mark.parametrize("kernels", ["native", "portable"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_types_may_be_mixed_within_a_layer(tmp_path: Path, family: str, tied: bool, kernels: str) -> None:
    write_stored(
        tmp_path / "model.gguf", family, ["Q4_K", "Q6_K", "Q8_0", "Q5_K", "Q4_1"], tie_word_embeddings=tied
    )
    assert 0 <= divergence(tmp_path / "model.gguf", tmp_path, kernels) < NEAR


@pytest.mark.parametrize("kernels", ["native", "portable"])
@pytest.mark.parametrize("family", ["smollm3", "gemma3"])
def test_what_a_family_does_otherwise_is_done_with_stored_weights_too(
    tmp_path: Path, family: str, kernels: str
) -> None:
    write_stored(tmp_path / "model.gguf", family, ["Q4_K", "Q6_K"])
    assert 0 <= divergence(tmp_path / "model.gguf", tmp_path, kernels) < NEAR


def test_every_bias_is_added(tmp_path: Path) -> None:
    write_stored(tmp_path / "model.gguf", "llama", ["Q4_K", "Q6_K"], attention_bias=True, mlp_bias=True)
    assert 0 <= divergence(tmp_path / "model.gguf", tmp_path, "native") < NEAR
    assert 0 <= divergence(tmp_path / "model.gguf", tmp_path, "portable") < NEAR


@pytest.mark.parametrize("kernels", ["native", "portable"])
def test_scores_beyond_half_precision_are_no_infinity(tmp_path: Path, kernels: str) -> None:
    write_stored(tmp_path / "model.gguf", "qwen2", ["Q4_K"], attention_biases=240)
    assert 0 <= divergence(tmp_path / "model.gguf", tmp_path, kernels) < NEAR


def test_rounding_a_second_time_is_what_this_saves(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_stored(path, "qwen2", ["Q4_K"])
    with open_checkpoint(path) as checkpoint:
        spec, found = checkpoint.spec, []
        for precision in ("fp32", "int4"):
            model = convert_model(checkpoint, precision=precision, cache=tmp_path)
            with OnnxEngine(OnnxGraph(model, spec, precision), OnnxOptions(threads=1)) as engine:
                found.append(logprobs(engine))
    exact, twice = found
    again = float((np.exp(exact) * (exact - twice)).sum(axis=1).mean())
    assert again > 5 * divergence(path, tmp_path, "portable")


def test_with_our_operators_the_cache_holds_a_graph_and_no_weights(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_stored(path, "qwen2", ["Q4_K"], vocab_size=4096)
    with opened(path, tmp_path, "native") as engine:
        assert engine.info.weight_bytes > path.stat().st_size // 2
        assert engine.info.kv_bytes_per_token == 2 * 2 * 2 * 64 * 2  # two bytes a number
    with open_checkpoint(path) as checkpoint:
        room = graph_bytes(checkpoint)
    (entry,) = conversion_cache(tmp_path).entries()
    assert entry.bytes < room < path.stat().st_size


@pytest.mark.parametrize("tied", [True, False])
def test_the_room_asked_for_a_portable_layout_is_the_room_taken(tmp_path: Path, tied: bool) -> None:
    path = tmp_path / "model.gguf"
    write_stored(path, "qwen2", KINDS, vocab_size=4096, tie_word_embeddings=tied, max_position_embeddings=64)
    with open_checkpoint(path) as checkpoint:
        asked = portable_bytes(checkpoint) + graph_bytes(checkpoint)
        convert_stored(checkpoint, native=False, cache=tmp_path)
    (entry,) = conversion_cache(tmp_path).entries()
    assert 0.5 * entry.bytes < asked < 2 * entry.bytes


def test_other_types_are_converted(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", reference("qwen2"), "qwen2")
    saved(tmp_path / "folder", "qwen2")
    for path in (tmp_path / "model.gguf", tmp_path / "folder"):
        with open_checkpoint(path) as checkpoint:
            assert not can_run_stored(checkpoint)


# Loading


def settings(tmp_path: Path, precision: str = "auto", kernels: str = "auto") -> Settings:
    known = load_settings()
    own = native.operators_library(known.paths.cache)
    compiled = tmp_path / "cache" / "native"
    if own is not None and not compiled.exists():  # compiled once for all tests
        compiled.mkdir(mode=0o700, parents=True)
        shutil.copy2(own, compiled)
    return replace(
        known,
        paths=replace(known.paths, cache=tmp_path / "cache"),
        model=replace(known.model, precision=precision),
        engine=replace(known.engine, kernels=kernels, threads=1),
    )


@pytest.mark.model
def test_a_file_of_stored_types_is_loaded_as_it_is(tmp_path: Path) -> None:
    found = {}
    for kernels in ("auto", "portable"):
        model = load_model("smollm2", settings(tmp_path, kernels=kernels))
        with model.engine as engine, engine.session() as session:
            assert engine.info.precision == "stored"
            session.extend(model.tokenizer.encode("def add(a, b):\n    return a"))
            found[kernels] = [session.step().tokens[0] for _ in range(4)]
    assert found["auto"] == found["portable"]


def test_stored_is_refused_for_weights_that_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from keystroke.engine import load

    write_gguf(tmp_path / "model.gguf", reference("qwen2"), "qwen2")
    monkeypatch.setattr(load, "_open_tokenizer", lambda *_: None)
    with pytest.raises(ConfigError, match=r"Q4_K.*set model.precision to int8"):
        load_model(tmp_path / "model.gguf", settings(tmp_path, "stored"))


@pytest.mark.parametrize("kernels", ["auto", "portable"])
def test_a_model_larger_than_the_memory_is_refused_before_it_is_laid_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    from keystroke.engine import load

    write_stored(tmp_path / "model.gguf", "qwen2", ["Q4_K"])
    monkeypatch.setattr(load, "_open_tokenizer", lambda *_: None)
    monkeypatch.setattr(backend, "available_bytes", lambda: 1000)
    with pytest.raises(NotEnoughMemory, match="needs about"):
        load_model(tmp_path / "model.gguf", settings(tmp_path, kernels=kernels))
    assert not (tmp_path / "cache" / "onnx").exists()


def test_a_file_that_ends_too_soon_is_refused_before_anything_is_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from keystroke.engine import load

    path = tmp_path / "model.gguf"
    write_stored(path, "qwen2", ["Q4_K"])
    monkeypatch.setattr(load, "_open_tokenizer", lambda *_: None)
    whole = path.read_bytes()
    for size in (len(whole) - 1000, len(whole) // 2, len(whole) // 10):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelDamaged):
            load_model(path, settings(tmp_path))


def test_heads_that_our_operators_do_not_take_are_left_to_the_runtime(tmp_path: Path) -> None:
    write_stored(tmp_path / "model.gguf", "qwen2", ["Q4_K"])
    with open_checkpoint(tmp_path / "model.gguf") as checkpoint:
        assert fits_native_operators(checkpoint)
        checkpoint.spec = replace(checkpoint.spec, head_dim=640)
        assert not fits_native_operators(checkpoint)


# Compiling


EXPORTED = '__attribute__((visibility("default")))'


@pytest.fixture
def small_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Compiles in no time, in place of the operators."""
    if native._compiler() is None:
        pytest.skip("no C compiler here")
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "small.c").write_text(f"{EXPORTED} int self_check(void) {{ return 0; }}")
    monkeypatch.setattr(native, "_FOLDER", folder)
    monkeypatch.setattr(native, "_PARTS", ("small.c",))
    return folder


def test_a_library_of_another_version_does_not_count(tmp_path: Path, small_source: Path) -> None:
    first = native.operators_library(tmp_path)
    if first is None:
        pytest.skip("not the vectors")
    assert not native.must_compile(tmp_path)
    (small_source / "small.c").write_text(f"{EXPORTED} int self_check(void) {{ return 0 * 1; }}")
    assert native.must_compile(tmp_path)
    native.operators_library.cache_clear()
    second = native.operators_library(tmp_path)
    assert second is not None
    assert second != first
    assert not native.must_compile(tmp_path)


def test_operators_are_compiled_once_for_a_processor(tmp_path: Path) -> None:
    announced = native.must_compile(tmp_path)
    first = native.operators_library(tmp_path)
    if first is None:
        pytest.skip("no C compiler here, or not the vectors")
    assert announced
    assert not native.must_compile(tmp_path)
    made = first.stat().st_mtime_ns
    native.operators_library.cache_clear()
    assert native.operators_library(tmp_path) == first
    assert native.unavailable_reason(tmp_path) is None
    assert first.stat().st_mtime_ns == made
    assert [each.suffix for each in first.parent.iterdir()] == [".so"]


@pytest.mark.usefixtures("small_source")
def test_operators_are_kept_where_nobody_else_can_write(tmp_path: Path) -> None:
    folder = tmp_path / "native"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "planted.so").write_bytes(b"")
    first = native.operators_library(tmp_path)
    if first is None:
        pytest.skip("not the vectors")
    assert [first] == list(folder.iterdir())
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_library_that_fails_its_check_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if native._compiler() is None:
        pytest.skip("no C compiler here")
    for verdict in ("return 1", "__builtin_trap()"):
        source = tmp_path / f"{len(verdict)}.c"
        source.write_text(f"int self_check(void) {{ {verdict}; }}")
        monkeypatch.setattr(native, "_FOLDER", tmp_path)
        monkeypatch.setattr(native, "_PARTS", (source.name,))
        monkeypatch.setattr(native, "_FLAGS", ("-fPIC", f"-DCASE={len(verdict)}"))
        native.operators_library.cache_clear()
        assert native.operators_library(tmp_path) is None
        assert (
            native.unavailable_reason(tmp_path) == "what was compiled does not pass its check on this machine"
        )
        assert not list(tmp_path.glob("native/*"))
    native.operators_library.cache_clear()


def test_two_processes_that_compile_at_once_end_with_one_library(tmp_path: Path, small_source: Path) -> None:
    if native.operators_library(tmp_path / "first") is None:
        pytest.skip("not the vectors")
    script = "import sys; from pathlib import Path; from keystroke.engine.onnx import native; "
    script += "native._FOLDER, native._PARTS = Path(sys.argv[2]), ('small.c',); "
    script += "print(native.operators_library(Path(sys.argv[1])))"
    command = [sys.executable, "-c", script, str(tmp_path / "both"), str(small_source)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    found = {each.communicate()[0].strip() for each in running}
    assert found == {str(path) for path in (tmp_path / "both" / "native").iterdir()}


@pytest.mark.parametrize("compiler", ["absent", "failing", "for another processor"])
def test_without_a_working_compiler_there_is_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    program = tmp_path / "compiler"
    program.write_text(
        "#!/bin/sh\nexit 1\n" if compiler == "failing" else "#!/bin/sh\necho '#define __ARM_NEON 1'\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("CC", "" if compiler == "absent" else str(program))
    monkeypatch.setenv("PATH", "/nowhere" if compiler == "absent" else "/usr/bin:/bin")
    assert native.operators_library(tmp_path / "cache") is None
    assert not (tmp_path / "cache").exists()
    said = {"absent": "no C compiler", "failing": "cannot compile", "for another processor": "neither AVX2"}
    assert said[compiler] in (native.unavailable_reason(tmp_path / "cache") or "")
