"""Reads Hugging Face folders: config.json, generation_config.json and safetensors files.

A model that the spec cannot express raises UnsupportedModel.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from keystroke.engine.checkpoint.digest import quick_digest
from keystroke.engine.checkpoint.fields import Fields
from keystroke.engine.checkpoint.rope import yarn_attention_factor
from keystroke.engine.checkpoint.safetensors_file import SafetensorsFile
from keystroke.engine.checkpoint.spec import (
    HEAD,
    Architecture,
    Checkpoint,
    ExpertsSpec,
    ModelSpec,
    RopeSpec,
    check_shapes,
)
from keystroke.errors import ModelDamaged, UnsupportedModel

_ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",  # the same arithmetic once no sliding window is active
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "SmolLM3ForCausalLM": "smollm3",
    "MinistralForCausalLM": "llama",  # Mistral with some layers windowed
    "Gemma3ForCausalLM": "gemma3",
}
_JSON_LIMIT = 64 << 20
RUNNABLE = "Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE, SmolLM3 and Gemma 3 (text)"
ELSEWHERE = "serve it with llama.cpp's server, Ollama or vLLM and add it as a remote model"


class HuggingFaceCheckpoint(Checkpoint):
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        config, extra = _configuration(folder)
        _architecture(config)  # report an unsupported model before missing files
        self._paths = _weight_files(folder)
        self._home: dict[str, SafetensorsFile] = {}
        for path in self._paths:
            file = SafetensorsFile(path)
            self._home.update(dict.fromkeys(file.entries, file))
        self.spec = read_spec(config, extra, _name(folder), tied=HEAD not in self._home)
        check_shapes(self.spec, self._shape)

    def _shape(self, name: str) -> tuple[int, ...] | None:
        if (parts := self._expert_names(name)) is not None:
            shapes = {self._home[part].entries[part].shape if part in self._home else None for part in parts}
            shape = shapes.pop()
            return None if shapes or shape is None or len(shape) != 2 else (len(parts) * shape[0], shape[1])
        file = self._home.get(name)
        return file.entries[name].shape if file else None

    def _expert_names(self, name: str) -> list[str] | None:
        """The stored tensors that the stacked experts `name` consist of; None for any other tensor."""
        if self.spec.experts is None or ".mlp.experts." not in name:
            return None
        before, _, after = name.partition(".experts.")
        return [f"{before}.experts.{expert}.{after}" for expert in range(self.spec.experts.count)]

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        if (parts := self._expert_names(name)) is not None:
            return np.concatenate([self._home[part].tensor(part) for part in parts])
        values = self._home[name].tensor(name)
        return values + np.float32(1) if self._stored_less_one(name) else values

    def raw(self, name: str) -> tuple[npt.NDArray[np.generic], str]:
        if self._stored_less_one(name):
            return self.tensor(name), "F32"
        if (parts := self._expert_names(name)) is not None:
            stored = [self._home[part].raw(part) for part in parts]
            return np.concatenate([array for array, _ in stored]), stored[0][1]
        return self._home[name].raw(name)

    def storage(self, name: str) -> str:
        parts = self._expert_names(name)
        return super().storage(name) if parts is None else self._home[parts[0]].raw(parts[0])[1]

    def _stored_less_one(self, name: str) -> bool:
        """Whether a weight is stored minus one, as Gemma's norms are."""
        return self.spec.architecture == "gemma3" and name.endswith("norm.weight")

    def fingerprint(self) -> str:
        small = [self._folder / "config.json", self._folder / "generation_config.json"]
        return quick_digest([path for path in small if path.exists()] + self._paths)

    def close(self) -> None:
        self._home.clear()


def configured_spec(folder: Path) -> ModelSpec:
    """The spec of a folder's configuration, without weights. Raises UnsupportedModel or ModelDamaged."""
    return read_spec(*_configuration(folder), _name(folder))


def _configuration(folder: Path) -> tuple[Fields, Fields]:
    config = Fields(_read_json(folder / "config.json"), str(folder / "config.json"))
    generation = folder / "generation_config.json"
    return config, Fields(_read_json(generation) if generation.exists() else {}, str(generation))


def read_spec(config: Fields, generation: Fields, name: str, *, tied: bool = False) -> ModelSpec:
    """The spec of a config.json and generation_config.json. `tied`: the default of tie_word_embeddings."""
    architecture = _architecture(config)
    hidden = config.integer("hidden_size", 1 << 20)
    heads = config.integer("num_attention_heads", 4096)
    derived = 128 if architecture in ("qwen3", "qwen3_moe") else max(hidden // heads, 1)
    head_dim = config.integer("head_dim", 4096, default=derived)
    if "head_dim" not in config and architecture not in ("qwen3", "qwen3_moe") and hidden % heads:
        raise ModelDamaged(
            f"{config.origin} has {hidden} dimensions that {heads} heads cannot share; download it again"
        )
    layers = config.integer("num_hidden_layers", 1024)
    vocab_size = config.integer("vocab_size", 1 << 24)
    _refuse_variants(config)
    context = config.integer("max_position_embeddings", 1 << 30)
    window, windowed = _windows(config, layers, context)
    gemma = architecture == "gemma3"
    rope, window_rope = _gemma_ropes(config, context) if gemma else (_rope(config, context), None)
    if rope.scaling == "yarn":  # the stated context may be the one before or after scaling
        context = max(context, round(rope.factor * rope.original_context))
    bias = config.flag("attention_bias", False) if architecture != "qwen2" else False
    eos = {*config.tokens("eos_token_id", vocab_size), *generation.tokens("eos_token_id", vocab_size)}
    bos = config.tokens("bos_token_id", vocab_size) or generation.tokens("bos_token_id", vocab_size)
    return ModelSpec(
        architecture=architecture,
        name=name,
        vocab_size=vocab_size,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=config.integer("num_key_value_heads", 4096, default=heads),
        head_dim=head_dim,
        intermediate=config.integer("intermediate_size", 1 << 22),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=rope,
        context_length=context,
        tied=config.flag("tie_word_embeddings", tied or gemma),
        qkv_bias=architecture == "qwen2" or bias,
        o_bias=bias,
        mlp_bias=config.flag("mlp_bias", False) if architecture == "llama" else False,
        qk_norm=architecture in ("qwen3", "qwen3_moe", "gemma3"),
        bos=bos[0] if bos else None,
        eos=frozenset(eos),
        window=window,
        windowed=windowed,
        window_rope=window_rope if windowed else None,
        unrotated=_unrotated(config, layers) if architecture == "smollm3" else frozenset(),
        activation="gelu" if gemma else "silu",
        post_norms=gemma,
        embedding_scale=float(hidden**0.5) if gemma else 1.0,
        attention_scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5 if gemma else 0.0,
        experts=_experts(config) if architecture == "qwen3_moe" else None,
    )


def _experts(config: Fields) -> ExpertsSpec:
    """The mixture of a Qwen3-MoE. Models with ordinary layers between those of experts are refused."""
    if config.integer("decoder_sparse_step", 1024, default=1) != 1 or config.get("mlp_only_layers"):
        raise UnsupportedModel(
            f"{config.origin} has layers without experts between those with, which this engine does not run; "
            f"{ELSEWHERE}"
        )
    return ExpertsSpec(
        count=config.integer(
            "num_local_experts" if "num_local_experts" in config else "num_experts", 1 << 16
        ),
        top=config.integer("num_experts_per_tok", 1 << 10),
        width=config.integer("moe_intermediate_size", 1 << 22),
        normalised=config.flag("norm_topk_prob", False),
    )


def _architecture(config: Fields) -> Architecture:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or not name.isprintable():
        raise config.error("architectures", "a list that names the model's architecture")
    return known_architecture(_ARCHITECTURES, name)


def known_architecture(known: Mapping[str, Architecture], name: str) -> Architecture:
    """The architecture that a file calls `name`. Raises UnsupportedModel."""
    if name not in known:
        raise UnsupportedModel(
            f"{name} is not an architecture this engine runs ({RUNNABLE} are); {ELSEWHERE}"
        )
    return known[name]


def _refuse_variants(config: Fields) -> None:
    if config.get("quantization_config") is not None:
        raise UnsupportedModel(
            f"{config.origin} describes weights that are already quantised in another program's format; "
            f"use the original model or a GGUF file, or {ELSEWHERE}"
        )
    gemma = config.get("architectures") == ["Gemma3ForCausalLM"]
    key, usual = ("hidden_activation", "gelu_pytorch_tanh") if gemma else ("hidden_act", "silu")
    known = ("gelu_pytorch_tanh",) if gemma else ("silu", "swish")
    if (activation := config.text(key, usual)) not in known:
        raise UnsupportedModel(f"the activation {activation} is not one this engine runs; {ELSEWHERE}")
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if config.get(key):
            raise UnsupportedModel(f"{config.origin} sets {key}, which this engine does not run; {ELSEWHERE}")


def _windows(config: Fields, layers: int, context: int) -> tuple[int, frozenset[int]]:
    """The size of the sliding window and the layers that have one. A window as long as the context is
    ignored."""
    architecture, kinds = config.get("architectures"), config.get("layer_types")
    mistral = architecture in (["MistralForCausalLM"], ["MinistralForCausalLM"])
    if isinstance(kinds, list):
        if len(kinds) < layers:
            raise config.error("layer_types", "a list with one kind for each layer")
        if any(kind not in ("full_attention", "sliding_attention") for kind in kinds[:layers]):
            raise UnsupportedModel(f"{config.origin} has layer_types this engine does not run; {ELSEWHERE}")
        windowed = frozenset(n for n, kind in enumerate(kinds[:layers]) if kind == "sliding_attention")
    elif mistral:
        windowed = frozenset(range(layers))
    elif architecture == ["Gemma3ForCausalLM"]:
        every = config.integer("sliding_window_pattern", 1024, default=6)
        windowed = frozenset(n for n in range(layers) if (n + 1) % every)
    elif config.flag("use_sliding_window", False):
        windowed = frozenset(range(config.integer("max_window_layers", 4096, layers), layers))
    else:
        windowed = frozenset()
    # The default of Mistral and Gemma is 4096; null means no window.
    silent = 4096 if mistral or architecture == ["Gemma3ForCausalLM"] else context
    unbounded = config.has("sliding_window") and "sliding_window" not in config
    window = context if unbounded else config.integer("sliding_window", 1 << 30, default=silent)
    return (window, windowed) if windowed and window < context else (0, frozenset())


def _unrotated(config: Fields, layers: int) -> frozenset[int]:
    """The layers of a SmolLM3 without rotary embedding."""
    listed = config.get("no_rope_layers")
    if isinstance(listed, list):
        if len(listed) < layers or any(each not in (0, 1) for each in listed):
            raise config.error("no_rope_layers", "a list of 0 and 1, one for each layer")
        return frozenset(n for n, rotated in enumerate(listed[:layers]) if not rotated)
    every = config.integer("no_rope_layer_interval", 4096, default=4)
    return frozenset(n for n in range(layers) if (n + 1) % every == 0)


def _gemma_ropes(config: Fields, context: int) -> tuple[RopeSpec, RopeSpec]:
    """The rotary embeddings of full and windowed layers, in both formats of the configuration."""
    both = config.table("rope_parameters")
    if "full_attention" in both or "sliding_attention" in both:
        near, far = both.table("sliding_attention"), both.table("full_attention")
        return (
            _scaled_rope(far, far.number("rope_theta", 1_000_000.0), context),
            _scaled_rope(near, near.number("rope_theta", 10_000.0), context),
        )
    theta = config.number("rope_theta", 1_000_000.0)
    local = RopeSpec(config.number("rope_local_base_freq", 10_000.0))
    return _scaled_rope(config.table("rope_scaling"), theta, context), local


def _rope(config: Fields, context: int) -> RopeSpec:
    """Supports both formats: `rope_theta` with `rope_scaling`, and `rope_parameters`."""
    table = config.table("rope_parameters" if "rope_parameters" in config else "rope_scaling")
    usual = 2_000_000.0 if config.get("architectures") == ["SmolLM3ForCausalLM"] else 10_000.0
    theta = table.number("rope_theta", config.number("rope_theta", usual))
    partial = table.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise UnsupportedModel(
            f"the model rotates only a part of each head, which this engine does not run; {ELSEWHERE}"
        )
    return _scaled_rope(table, theta, context)


def _scaled_rope(table: Fields, theta: float, context: int) -> RopeSpec:
    kind = table.text("rope_type", table.text("type", "default"))
    match kind:
        case "default":
            return RopeSpec(theta)
        case "linear":
            return RopeSpec(theta, "linear", table.number("factor"))
        case "llama3":
            low, high = table.number("low_freq_factor"), table.number("high_freq_factor")
            if high <= low:
                raise ModelDamaged(
                    f"{table.origin} has high_freq_factor no larger than low_freq_factor; download it again"
                )
            original = table.integer("original_max_position_embeddings", 1 << 30, default=context)
            return RopeSpec(
                theta, "llama3", table.number("factor"), original, low_freq_factor=low, high_freq_factor=high
            )
        case "yarn":
            original = table.integer("original_max_position_embeddings", 1 << 30, default=context)
            factor = table.number("factor", context / original)
            implied = yarn_attention_factor(
                factor, _optional(table, "mscale"), _optional(table, "mscale_all_dim")
            )
            return RopeSpec(
                theta,
                "yarn",
                factor,
                original,
                beta_fast=table.number("beta_fast", 32.0),
                beta_slow=table.number("beta_slow", 1.0),
                truncate=table.flag("truncate", True),
                attention_factor=table.number("attention_factor", implied),
            )
        case _:
            raise UnsupportedModel(f"the rotary scaling {kind!r} is not one this engine runs; {ELSEWHERE}")


def _optional(table: Fields, key: str) -> float:
    return table.number(key) if table.get(key) else 0.0


def _name(folder: Path) -> str:
    """The folder's name; in the hub's cache, where folders are named by revision, the repository's."""
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        return folder.parent.parent.name.rpartition("--")[2]
    return folder.name or "model"


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        places = _read_json(index).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
            raise ModelDamaged(f"{index} does not say which file holds which tensor; download it again")
        names = sorted(set(places.values()))
        for name in names:
            # The index is not trusted: it may only name files of its own folder.
            if Path(name).name != name or not (folder / name).is_file():
                raise ModelDamaged(
                    f"{folder} lacks the file {name!r} that its index names; download the model again"
                )
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
        raise UnsupportedModel(
            f"{folder} holds its weights as pickled PyTorch files, which can run code when opened; "
            "use a version of the model with safetensors"
        )
    raise ModelDamaged(
        f"{folder} has no model.safetensors and no model.safetensors.index.json; download the model again"
    )


def _read_json(path: Path) -> dict[str, object]:
    try:
        if path.stat().st_size > _JSON_LIMIT:
            raise ModelDamaged(f"{path} is far too large for a configuration; download the model again")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelDamaged(
            f"{path} cannot be read ({error.strerror}); check the file and its permissions"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelDamaged(f"{path} is not valid JSON; download it again") from error
    if not isinstance(value, dict):
        raise ModelDamaged(f"{path} is not a table; download it again")
    return value
