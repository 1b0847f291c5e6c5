"""Qwen3: Llama with norms of query and key heads, whose size is not the hidden size over their number."""

from __future__ import annotations

from keystroke.engine.checkpoint.spec import ModelSpec
from keystroke.engine.families.config_file import read_llama
from keystroke.engine.families.family import ConfigFile, Family
from keystroke.engine.families.gguf_fields import read_llama_gguf
from keystroke.engine.families.llama import windowed_layers

HEAD_DIM = 128  # where a configuration does not state it


def read_config(file: ConfigFile) -> ModelSpec:
    layers = file.config.integer("num_hidden_layers", 1024)
    return read_llama(file, "qwen3", head_dim=HEAD_DIM, windowed=windowed_layers(file, layers), qk_norm=True)


FAMILY = Family(
    name="qwen3",
    title="Qwen3",
    huggingface=("Qwen3ForCausalLM",),
    gguf="qwen3",
    read_config=read_config,
    read_gguf=lambda file: read_llama_gguf(file, "qwen3"),
)
