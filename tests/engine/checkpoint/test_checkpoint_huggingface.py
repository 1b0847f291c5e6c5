from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_models import FAMILIES, saved

from keystroke.engine.checkpoint import ModelSpec, RopeSpec, open_checkpoint
from keystroke.engine.checkpoint.fields import Fields
from keystroke.engine.checkpoint.huggingface import read_spec
from keystroke.errors import KeystrokeError, ModelDamaged, UnsupportedModel


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_tensor_reads_back_exactly(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    model = saved(tmp_path, family, dtype)
    with open_checkpoint(tmp_path) as checkpoint:
        expected = {name: value.float().numpy() for name, value in model.state_dict().items()}
        if model.config.tie_word_embeddings:
            del expected["lm_head.weight"]
        if family == "gemma3":  # its norms multiply by one more than what is stored
            expected |= {n: v + 1 for n, v in expected.items() if n.endswith("norm.weight")}
        actual = {name: checkpoint.tensor(name) for name in checkpoint.names()}
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == np.float32
        np.testing.assert_array_equal(actual[name], value, err_msg=name)


def test_the_spec_says_what_the_configuration_says(tmp_path: Path) -> None:
    saved(tmp_path / "tiny", "qwen3", tie_word_embeddings=True, num_attention_heads=8)
    with open_checkpoint(tmp_path / "tiny") as checkpoint:
        assert checkpoint.spec == ModelSpec(
            architecture="qwen3",
            name="tiny",
            vocab_size=96,
            hidden=64,
            layers=2,
            heads=8,
            kv_heads=2,
            head_dim=16,
            intermediate=128,
            norm_eps=1e-5,
            rope=RopeSpec(10_000.0),
            context_length=256,
            tied=True,
            qk_norm=True,
            bos=1,
            eos=frozenset({2}),
        )
        assert "lm_head.weight" not in checkpoint.names()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parameter_count_is_the_model_s_own(tmp_path: Path, family: str) -> None:
    model = saved(tmp_path, family)
    assert open_checkpoint(tmp_path).spec.parameters == sum(p.numel() for p in model.parameters())


def test_a_model_in_the_hub_s_cache_is_named_after_its_repository(tmp_path: Path) -> None:
    folder = (
        tmp_path
        / "models--Qwen--Qwen2.5-Coder-0.5B"
        / "snapshots"
        / "8123ea2e9354afb7ffcc6c8641d1b2f5ecf18301"
    )
    saved(folder, "qwen2")
    assert open_checkpoint(folder).spec.name == "Qwen2.5-Coder-0.5B"


def test_shards_read_like_one_file(tmp_path: Path) -> None:
    model = saved(tmp_path, "llama", shard="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    with open_checkpoint(tmp_path) as checkpoint:
        for name, value in model.state_dict().items():
            np.testing.assert_array_equal(checkpoint.tensor(name), value.numpy())


def test_raw_is_the_stored_type_without_a_copy(tmp_path: Path) -> None:
    model = saved(tmp_path, "llama", torch.bfloat16)
    with open_checkpoint(tmp_path) as checkpoint:
        values, kind = checkpoint.raw("model.norm.weight")
    assert kind == "BF16"
    np.testing.assert_array_equal(values, model.state_dict()["model.norm.weight"].view(torch.uint16).numpy())
    assert not values.flags.writeable
    assert not values.flags.owndata


def test_ends_come_from_both_configurations(tmp_path: Path) -> None:
    saved(tmp_path, "qwen2")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8, 100000]}')
    assert open_checkpoint(tmp_path).spec.eos == {2, 7, 8}


def test_llama_biases_follow_the_configuration(tmp_path: Path) -> None:
    model = saved(tmp_path, "llama", attention_bias=True, mlp_bias=True)
    with open_checkpoint(tmp_path) as checkpoint:
        spec = checkpoint.spec
        assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias) == (True, True, True)
        name = "model.layers.1.self_attn.o_proj.bias"
        np.testing.assert_array_equal(checkpoint.tensor(name), model.state_dict()[name].numpy())


def _edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))


YARN = {"factor": 4.0, "original_max_position_embeddings": 256}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeSpec(5e5)),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            RopeSpec(5e5, "linear", 2.0),
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 7e3, "factor": 3}},
            RopeSpec(7e3, "linear", 3.0),
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", **YARN}},
            RopeSpec(1e6, "yarn", 4.0, 256, attention_factor=pytest.approx(1.1386294361)),  # type: ignore[arg-type]
        ),
    ],
)
def test_both_generations_of_rope_configuration_are_read(
    tmp_path: Path, changes: dict[str, Any], expected: RopeSpec
) -> None:
    saved(tmp_path, "qwen2")
    _edit(tmp_path, **{"rope_parameters": "absent", **changes})
    assert open_checkpoint(tmp_path).spec.rope == expected


_QWEN = {
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "rope_theta": 1_000_000.0,
    "hidden_act": "silu",
}
PUBLISHED: dict[str, tuple[dict[str, Any], int, RopeSpec, set[int]]] = {
    # The configurations people will bring: sizes, parameter count, rotary embedding, ends.
    "Qwen2.5-Coder-0.5B": (
        {
            **_QWEN,
            "architectures": ["Qwen2ForCausalLM"],
            "hidden_size": 896,
            "intermediate_size": 4864,
            "max_position_embeddings": 32768,
            "max_window_layers": 24,
            "num_attention_heads": 14,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "sliding_window": 32768,
            "vocab_size": 151936,
            "eos_token_id": 151643,
        },
        494_032_768,
        RopeSpec(1_000_000.0),
        {151643},
    ),
    "Qwen3-0.6B": (
        {
            **_QWEN,
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "head_dim": 128,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "max_position_embeddings": 40960,
            "max_window_layers": 28,
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "sliding_window": None,
            "vocab_size": 151936,
            "eos_token_id": 151645,
        },
        596_049_920,
        RopeSpec(1_000_000.0),
        {151645},
    ),
    "Llama-3.2-1B": (
        {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "mlp_bias": False,
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "num_attention_heads": 32,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "vocab_size": 128256,
            "eos_token_id": [128001, 128008, 128009],
        },
        1_235_814_400,
        RopeSpec(500_000.0, "llama3", 32.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
        {128001, 128008, 128009},
    ),
    "SmolLM3-3B": (
        {
            "architectures": ["SmolLM3ForCausalLM"],
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "max_position_embeddings": 65536,
            "max_window_layers": 28,
            "no_rope_layer_interval": 4,
            "num_attention_heads": 16,
            "num_hidden_layers": 36,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 5000000.0,
            "sliding_window": None,
            "use_sliding_window": False,
            "vocab_size": 128256,
            "eos_token_id": 128012,
        },
        3_075_098_624,
        RopeSpec(5_000_000.0),
        {128012},
    ),
    "Gemma-3-270M": (
        {
            "architectures": ["Gemma3ForCausalLM"],
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 640,
            "intermediate_size": 2048,
            "max_position_embeddings": 32768,
            "num_attention_heads": 4,
            "num_hidden_layers": 18,
            "num_key_value_heads": 1,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06,
            "rope_local_base_freq": 10000.0,
            "rope_scaling": None,
            "rope_theta": 1000000.0,
            "sliding_window": 512,
            "vocab_size": 262144,
            "eos_token_id": [1, 106],
        },
        268_098_176,
        RopeSpec(1_000_000.0),
        {1, 106},
    ),
    "Mistral-7B-v0.1": (
        {
            "architectures": ["MistralForCausalLM"],
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
            "vocab_size": 32000,
            "eos_token_id": 2,
        },
        7_241_732_096,
        RopeSpec(10_000.0),
        {2},
    ),
    "DeepSeek-Coder-1.3B": (
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 5504,
            "max_position_embeddings": 16384,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "num_key_value_heads": 16,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {"factor": 4.0, "type": "linear"},
            "rope_theta": 100000,
            "tie_word_embeddings": False,
            "vocab_size": 32256,
            "eos_token_id": 32014,
        },
        1_346_471_936,
        RopeSpec(100_000.0, "linear", 4.0),
        {32014},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_understood(name: str) -> None:
    config, parameters, rope, ends = PUBLISHED[name]
    spec = read_spec(
        Fields(config, "config.json"), Fields({}, ""), name, tied="tie_word_embeddings" not in config
    )
    assert (spec.parameters, spec.rope, set(spec.eos)) == (parameters, rope, ends)


def test_a_yarn_model_has_its_stretched_context(tmp_path: Path) -> None:
    saved(tmp_path, "qwen2")
    _edit(tmp_path, rope_parameters="absent", rope_theta=1e6, rope_scaling={"type": "yarn", **YARN})
    assert open_checkpoint(tmp_path).spec.context_length == 1024


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["MixtralForCausalLM"]},
        {"architectures": ["Gemma4ForConditionalGeneration"]},
        {"quantization_config": {"quant_method": "gptq"}},
        {"hidden_act": "gelu"},
        {"layer_types": ["full_attention", "linear_attention"]},
        {"attn_logit_softcapping": 50.0},
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ],
)
def test_a_model_we_cannot_compute_is_refused_with_a_way_out(tmp_path: Path, changes: dict[str, Any]) -> None:
    saved(tmp_path, "qwen2")
    _edit(tmp_path, **changes)
    with pytest.raises(UnsupportedModel, match="remote model"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 0},
        {"hidden_size": "64"},
        {"hidden_size": 128},
        {"hidden_size": "absent"},
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 3},
        {"num_attention_heads": 3},
        {"num_key_value_heads": 3},
        {"vocab_size": 1 << 60},
        {"vocab_size": True},
        {"head_dim": 15},
        {"head_dim": 32},
        {"rms_norm_eps": -1},
        {"rms_norm_eps": float("nan")},
        {"tie_word_embeddings": "yes"},
        {"architectures": []},
        {"architectures": "Qwen2ForCausalLM"},
        {"eos_token_id": "</s>"},
        {"rope_parameters": []},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8}},
        {"max_position_embeddings": 1.5},
    ],
)
def test_a_configuration_that_does_not_fit_is_damage_in_one_sentence(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    saved(tmp_path, "qwen2")
    _edit(tmp_path, **changes)
    with pytest.raises(ModelDamaged) as caught:
        open_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("family", "changes", "window", "windowed"),
    [
        ("mistral", {"sliding_window": 64}, 64, {0, 1}),
        ("mistral", {"sliding_window": 256}, 0, set()),  # as wide as the context: never active
        ("mistral", {"sliding_window": None}, 0, set()),
        ("mistral", {"sliding_window": "absent"}, 0, set()),  # which means 4096
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}, 8, {1}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, 8, {1}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1}, 0, set()),
        ("gemma3", {"layer_types": "absent", "sliding_window_pattern": 2}, 5, {0}),
    ],
)
def test_which_layers_see_a_window_is_read_in_every_manner_it_is_written(
    tmp_path: Path, family: str, changes: dict[str, Any], window: int, windowed: set[int]
) -> None:
    saved(tmp_path, family)
    _edit(tmp_path, **{"layer_types": "absent", **changes})
    spec = open_checkpoint(tmp_path).spec
    assert (spec.window, set(spec.windowed)) == (window, windowed)
    assert (spec.unsupported_feature() is None) == (not windowed)


def test_both_generations_of_a_gemma_s_ropes_are_read(tmp_path: Path) -> None:
    saved(tmp_path, "gemma3")
    near, far = RopeSpec(20_000.0), RopeSpec(2_000_000.0, "linear", 8.0)
    scaled = {"rope_type": "linear", "factor": 8.0}
    both = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 20_000.0},
        "full_attention": {**scaled, "rope_theta": 2_000_000.0},
    }
    _edit(tmp_path, rope_parameters=both)
    spec = open_checkpoint(tmp_path).spec
    assert (spec.rope, spec.window_rope) == (far, near)
    _edit(
        tmp_path,
        rope_parameters="absent",
        rope_theta=2_000_000.0,
        rope_local_base_freq=20_000.0,
        rope_scaling=scaled,
    )
    spec = open_checkpoint(tmp_path).spec
    assert (spec.rope, spec.window_rope) == (far, near)


def test_a_list_of_layers_that_does_not_fit_is_damage(tmp_path: Path) -> None:
    saved(tmp_path, "smollm3")
    for wrong in ([1], [1, 2], ["yes", "no"]):
        _edit(tmp_path, no_rope_layers=wrong)
        with pytest.raises(ModelDamaged, match="no_rope_layers"):
            open_checkpoint(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    for place in ("nowhere", "."):
        with pytest.raises(KeystrokeError, match=r"config\.json"):
            open_checkpoint(tmp_path / place)
    saved(tmp_path, "llama", shard="40KB")
    victim = sorted(tmp_path.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(ModelDamaged, match=victim.name):
        open_checkpoint(tmp_path)
    for path in tmp_path.glob("model*"):
        path.unlink()
    with pytest.raises(ModelDamaged, match=r"no model\.safetensors"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UnsupportedModel, match="pickled"):
        open_checkpoint(tmp_path)


def test_an_index_cannot_point_outside_its_folder(tmp_path: Path) -> None:
    saved(tmp_path / "good", "llama")
    saved(tmp_path / "bad", "llama")
    index = tmp_path / "bad" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "../good/model.safetensors"}}))
    with pytest.raises(ModelDamaged, match="index"):
        open_checkpoint(tmp_path / "bad")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    _edit(tmp_path, attention_bias=True)
    with pytest.raises(ModelDamaged, match=r"model\.layers\.0\.self_attn\.q_proj\.bias and 7 more"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "generation_config.json"])
def test_a_cut_file_never_raises_anything_but_our_errors(tmp_path: Path, name: str) -> None:
    saved(tmp_path, "llama")
    path = tmp_path / name
    whole = path.read_bytes()
    end = whole.rindex(b"}") if name.endswith("json") else len(whole)  # a final line break is not missed
    for cut in {*range(0, min(end, 400), 7), *range(0, end, end // 60 + 1), end - 1}:
        path.write_bytes(whole[:cut])
        with pytest.raises(ModelDamaged):
            open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"\xff\xfe",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 99999999]}}',
        b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [8, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}}',
        b'{"a": {"dtype": "F32", "shape": [4611686018427387903, 4], "data_offsets": [0, 16]}}',
        b'{"a": {"dtype": "F32", "shape": [5], "data_offsets": [0, 16]}}',
        b'{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": 3, "shape": [4], "data_offsets": [0, 16]}}',
        b"[" * 100_000,
    ],
)
def test_a_hostile_safetensors_header_is_damage(tmp_path: Path, header: bytes) -> None:
    saved(tmp_path, "llama")
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    with pytest.raises(ModelDamaged):
        open_checkpoint(tmp_path)


def test_a_header_length_beyond_the_file_allocates_nothing(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    (tmp_path / "model.safetensors").write_bytes((1 << 63).to_bytes(8, "little") + bytes(100))
    with pytest.raises(ModelDamaged, match="header"):
        open_checkpoint(tmp_path)


def test_a_type_we_do_not_read_is_refused_when_asked_for(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"dtype":"F32"', b'"dtype":"I32"'))
    with pytest.raises(UnsupportedModel, match="I32"):
        open_checkpoint(tmp_path).tensor("model.norm.weight")


def test_equal_content_has_an_equal_fingerprint_and_any_change_another(tmp_path: Path) -> None:
    for folder in ("a", "b", "c"):
        saved(tmp_path / folder, "llama")
    _edit(tmp_path / "c", bos_token_id=3)
    a, b, c = (open_checkpoint(tmp_path / folder) for folder in "abc")
    assert a.fingerprint() == b.fingerprint() != c.fingerprint()
