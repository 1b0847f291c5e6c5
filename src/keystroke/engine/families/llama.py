"""Llama, and Mistral and Ministral, which have the same arithmetic with a sliding window in some layers."""

from __future__ import annotations

from keystroke.engine.checkpoint.spec import ModelSpec
from keystroke.engine.families.config_file import read_llama, refuse_linear_layers
from keystroke.engine.families.family import ConfigFile, Family, GGUFFile
from keystroke.engine.families.gguf_fields import read_llama_gguf

_MISTRAL_WINDOW = 4096  # where a configuration does not say


def read_config(file: ConfigFile) -> ModelSpec:
    config = file.config
    mistral = config.get("architectures") in (["MistralForCausalLM"], ["MinistralForCausalLM"])
    layers = config.integer("num_hidden_layers", 1024)
    spec = read_llama(
        file,
        "llama",
        windowed=frozenset(range(layers)) if mistral else windowed_layers(file, layers),
        window=_MISTRAL_WINDOW if mistral else None,
        mlp_bias=config.flag("mlp_bias", False),
    )
    return refuse_linear_layers(spec, config)


def windowed_layers(file: ConfigFile, layers: int) -> frozenset[int]:
    """The layers with a sliding window, as configurations without layer_types give them."""
    if not file.config.flag("use_sliding_window", False):
        return frozenset()
    return frozenset(range(file.config.integer("max_window_layers", 4096, layers), layers))


def read_gguf(file: GGUFFile) -> ModelSpec:
    return read_llama_gguf(file, "llama")


FAMILY = Family(
    name="llama",
    title="Llama, Mistral",
    huggingface=("LlamaForCausalLM", "MistralForCausalLM", "MinistralForCausalLM"),
    gguf="llama",
    read_config=read_config,
    read_gguf=read_gguf,
    paired=True,
)
