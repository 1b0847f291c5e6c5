"""Qwen2 and Qwen2.5: Llama with biases of queries, keys and values."""

from __future__ import annotations

from keystroke.engine.checkpoint.spec import ModelSpec
from keystroke.engine.families.config_file import read_llama
from keystroke.engine.families.family import ConfigFile, Family
from keystroke.engine.families.gguf_fields import read_llama_gguf
from keystroke.engine.families.llama import windowed_layers


def read_config(file: ConfigFile) -> ModelSpec:
    layers = file.config.integer("num_hidden_layers", 1024)
    return read_llama(
        file, "qwen2", windowed=windowed_layers(file, layers), attention_bias=False, qkv_bias=True
    )


FAMILY = Family(
    name="qwen2",
    title="Qwen2",
    huggingface=("Qwen2ForCausalLM",),
    gguf="qwen2",
    read_config=read_config,
    read_gguf=lambda file: read_llama_gguf(file, "qwen2"),
)
