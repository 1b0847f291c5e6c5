"""Llama, and Mistral and Ministral, which have the same arithmetic with a sliding window in some layers."""

from __future__ import annotations

from keystroke.engine.checkpoint.spec import ModelSpec
from keystroke.engine.families.config_file import read_llama
from keystroke.engine.families.family import ConfigFile, Family
from keystroke.engine.families.gguf_fields import read_llama_gguf

_MISTRAL_WINDOW = 4096  # where a configuration does not state it


def read_config(file: ConfigFile) -> ModelSpec:
    config = file.config
    mistral = config.get("architectures") in (["MistralForCausalLM"], ["MinistralForCausalLM"])
    layers = config.integer("num_hidden_layers", 1024)
    return read_llama(
        file,
        "llama",
        windowed=frozenset(range(layers)) if mistral else windowed_layers(file, layers),
        window=_MISTRAL_WINDOW if mistral else None,
        mlp_bias=config.flag("mlp_bias", False),
    )


def windowed_layers(file: ConfigFile, layers: int) -> frozenset[int]:
    """The layers with a sliding window, as configurations without layer_types give them."""
    if not file.config.flag("use_sliding_window", False):
        return frozenset()
    return frozenset(range(file.config.integer("max_window_layers", 4096, layers), layers))


FAMILY = Family(
    name="llama",
    title="Llama, Mistral",
    huggingface=("LlamaForCausalLM", "MistralForCausalLM", "MinistralForCausalLM"),
    gguf="llama",
    read_config=read_config,
    read_gguf=lambda file: read_llama_gguf(file, "llama"),
    paired=True,
)
