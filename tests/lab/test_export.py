"""Exported models are the trained model: the same logits in transformers and through our own checkpoint
reader."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from keystroke.assist.next_edit.prompt import VERSION, detect_edit_format
from keystroke.engine.checkpoint import open_checkpoint
from keystroke.engine.templates import detect_fim
from keystroke.engine.tokenizer import load_tokenizer
from keystroke.errors import InputError, KeystrokeError, ModelDamaged
from keystroke_lab.export.weights import (
    add_layers,
    expected_tensors,
    export_gguf,
    export_huggingface,
    import_weights,
    read_trained,
)
from keystroke_lab.tokenizer import code_tokenizer, special
from keystroke_lab.training.transformer import CodeModel, Shape

SHAPE = Shape(vocab=320, hidden=64, layers=2, heads=4, kv_heads=2, head_dim=32, intermediate=96, context=64)
CODE = "def add(first, second):\n    total = first + second\n    return total\n\n\n" * 30


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    learned = code_tokenizer.train([CODE, "".join(map(chr, range(32, 900)))], SHAPE.vocab)
    code_tokenizer.save(learned, folder)
    return folder


@pytest.fixture(scope="module")
def model() -> CodeModel:
    torch.manual_seed(1)
    model = CodeModel(SHAPE, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():  # the zeros a run starts from would hide a misplaced matrix
            parameter.copy_((parameter + 0.05 * torch.randn_like(parameter)).bfloat16().float())
    return model


@pytest.fixture(scope="module")
def weights(model: CodeModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "final.pt"
    tensors = {name: p.detach().to(torch.bfloat16) for name, p in model.named_parameters()}
    torch.save({"shape": SHAPE.to_json(), "step": 1, "tokens": 1, "weights": tensors}, path)
    return path


def test_transformers_computes_the_same_logits(
    weights: Path, tokenizer: Path, model: CodeModel, tmp_path: Path
) -> None:
    export_huggingface(weights, tokenizer, tmp_path)
    reference = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.randint(0, SHAPE.vocab, (2, 48), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs, ours = reference(tokens).logits, model.logits(tokens)
    assert torch.allclose(theirs, ours, atol=2e-5, rtol=1e-4)


def test_transformers_tokenises_alike(weights: Path, tokenizer: Path, tmp_path: Path) -> None:
    export_huggingface(weights, tokenizer, tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    assert theirs(CODE, add_special_tokens=False)["input_ids"] == ours.encode(CODE)


def test_an_unquantised_gguf_holds_every_tensor_exactly(
    weights: Path, tokenizer: Path, model: CodeModel, tmp_path: Path
) -> None:
    file = tmp_path / "model.gguf"
    export_gguf(weights, tokenizer, file, name="test", quantisation="F32")
    checkpoint = open_checkpoint(file)
    mine = dict(model.named_parameters())
    for name, size in expected_tensors(SHAPE).items():
        found = checkpoint.tensor(name)
        assert found.shape == size
        np.testing.assert_array_equal(found, mine[name].detach().numpy())
    assert checkpoint.spec.tied
    assert checkpoint.spec.context_length == SHAPE.context
    assert checkpoint.spec.rope.theta == SHAPE.rope_theta
    checkpoint.close()


def test_an_8_bit_gguf_stays_within_half_a_step_of_each_block(
    weights: Path, tokenizer: Path, model: CodeModel, tmp_path: Path
) -> None:
    file = tmp_path / "model.gguf"
    export_gguf(weights, tokenizer, file, name="test")
    checkpoint = open_checkpoint(file)
    name = "model.layers.1.self_attn.q_proj.weight"
    wanted = dict(model.named_parameters())[name].detach().numpy()
    step = np.abs(wanted.reshape(-1, 32)).max(axis=1, keepdims=True) / 127
    error = np.abs(checkpoint.tensor(name) - wanted).reshape(-1, 32)
    assert np.all(error <= 0.57 * step)  # half a step, and the rounding of its 16-bit scale
    checkpoint.close()


def test_the_gguf_carries_tokenizer_and_fill_in_the_middle_order(
    weights: Path, tokenizer: Path, tmp_path: Path
) -> None:
    file = tmp_path / "model.gguf"
    export_gguf(weights, tokenizer, file, name="test")
    inside, outside = load_tokenizer(file), load_tokenizer(tokenizer)
    assert inside.encode(CODE) == outside.encode(CODE)
    assert inside.special("<|fim_middle|>") == special.FIM_MIDDLE
    template = detect_fim(inside, file)
    assert template is not None
    assert template.order == "spm"
    assert template.tokens(inside, "a", "b")[0] == special.FIM_SUFFIX


def test_a_model_says_that_it_has_learned_edits_only_if_it_has(
    weights: Path, tokenizer: Path, tmp_path: Path
) -> None:
    learned = tmp_path / "learned.pt"
    torch.save({**torch.load(weights, weights_only=True), "next_edit": VERSION}, learned)
    for source, has in ((weights, False), (learned, True)):
        file, folder = tmp_path / f"{has}.gguf", tmp_path / f"{has}"
        export_gguf(source, tokenizer, file, name="test")
        export_huggingface(source, tokenizer, folder)
        assert (detect_edit_format(load_tokenizer(file), file) is not None) == has
        assert (detect_edit_format(load_tokenizer(folder), folder) is not None) == has
        assert load_tokenizer(file).special("<|reserved_0|>") == special.KEEP


def test_a_tokenizer_of_another_size_is_refused(weights: Path, tmp_path: Path) -> None:
    other = code_tokenizer.train([CODE], 300)
    code_tokenizer.save(other, tmp_path / "other")
    with pytest.raises(InputError, match="trained with"):
        export_huggingface(weights, tmp_path / "other", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_truncated_weights_are_refused(weights: Path, tokenizer: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.pt"
    cut.write_bytes(weights.read_bytes()[:-2000])
    with pytest.raises(ModelDamaged, match=r"cut\.pt"):
        export_gguf(cut, tokenizer, tmp_path / "out.gguf", name="test")
    assert not (tmp_path / "out.gguf").exists()


def test_a_missing_or_infinite_tensor_is_named(weights: Path, tokenizer: Path, tmp_path: Path) -> None:
    state = torch.load(weights, weights_only=True)
    broken = {**state, "weights": dict(state["weights"])}
    del broken["weights"]["model.norm.weight"]
    torch.save(broken, tmp_path / "missing.pt")
    with pytest.raises(ModelDamaged, match=r"model\.norm\.weight is missing"):
        export_gguf(tmp_path / "missing.pt", tokenizer, tmp_path / "out.gguf", name="test")
    state["weights"]["model.norm.weight"] = torch.full((SHAPE.hidden,), float("inf"))
    torch.save(state, tmp_path / "infinite.pt")
    with pytest.raises(ModelDamaged, match="not numbers"):
        export_gguf(tmp_path / "infinite.pt", tokenizer, tmp_path / "out.gguf", name="test")


def test_an_unknown_quantisation_is_refused(weights: Path, tokenizer: Path, tmp_path: Path) -> None:
    with pytest.raises(KeystrokeError, match="Q8_0"):
        export_gguf(weights, tokenizer, tmp_path / "out.gguf", name="test", quantisation="Q99")


def test_training_can_go_on_from_what_was_exported(weights: Path, tokenizer: Path, tmp_path: Path) -> None:
    file, again = tmp_path / "model.gguf", tmp_path / "again.pt"
    export_gguf(weights, tokenizer, file, name="test", quantisation="BF16")
    import_weights(file, again)
    shape, tensors, _ = read_trained(again)
    wanted_shape, wanted, _ = read_trained(weights)
    # What a file can hold: its context and rotary base come back, and every weight.
    assert shape == wanted_shape
    assert all(torch.equal(tensors[name], wanted[name]) for name in wanted)


def test_llama_cpp_reads_the_gguf_as_we_do(
    weights: Path, tokenizer: Path, model: CodeModel, tmp_path: Path
) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    file = tmp_path / "model.gguf"
    export_gguf(weights, tokenizer, file, name="test", quantisation="F32")
    theirs = llama_cpp.Llama(str(file), n_ctx=64, n_threads=1, verbose=False, logits_all=True)
    tokens = theirs.tokenize(CODE.encode(), add_bos=False, special=False)
    assert tokens == load_tokenizer(file).encode(CODE)
    theirs.eval(tokens[:40])
    with torch.no_grad():
        ours = model.logits(torch.tensor([tokens[:40]]))[0].numpy()
    # llama.cpp keeps its KV cache in 16 bits: close, not equal.
    np.testing.assert_allclose(np.array(theirs.scores[:40]), ours, atol=2e-2 * np.abs(ours).max())


def test_a_deeper_model_says_what_the_shallower_one_says() -> None:
    torch.manual_seed(0)
    model = CodeModel(SHAPE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    weights = {name: p.detach() for name, p in model.named_parameters()}
    tokens = torch.arange(40, 60)[None]
    for layers in (2, 3, 5):
        shape, more = add_layers(SHAPE, weights, layers)
        deeper = CodeModel(shape)
        deeper.load_state_dict(more)
        assert len(deeper.model.layers) == layers
        assert torch.allclose(deeper.logits(tokens), model.logits(tokens), atol=1e-5)
    with pytest.raises(InputError, match="not shallower"):
        add_layers(SHAPE, weights, 1)
