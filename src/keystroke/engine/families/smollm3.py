"""SmolLM3: Llama without rotary embedding in every fourth layer."""

from __future__ import annotations

from keystroke.engine.checkpoint.fields import Fields
from keystroke.engine.checkpoint.spec import ModelSpec
from keystroke.engine.families.config_file import read_llama
from keystroke.engine.families.family import ConfigFile, Family, GGUFFile
from keystroke.engine.families.gguf_fields import read_llama_gguf
from keystroke.engine.families.llama import windowed_layers

_UNROTATED_EVERY = 4  # GGUF files do not state it


def read_config(file: ConfigFile) -> ModelSpec:
    config = file.config
    layers = config.integer("num_hidden_layers", 1024)
    return read_llama(
        file,
        "smollm3",
        theta=2_000_000.0,
        windowed=windowed_layers(file, layers),
        unrotated=_unrotated_layers(config, layers),
    )


def _unrotated_layers(config: Fields, layers: int) -> frozenset[int]:
    listed = config.get("no_rope_layers")
    if isinstance(listed, list):
        if len(listed) < layers or any(each not in (0, 1) for each in listed):
            raise config.error("no_rope_layers", "a list of 0 and 1, one for each layer")
        return frozenset(n for n, rotated in enumerate(listed[:layers]) if not rotated)
    every = config.integer("no_rope_layer_interval", 4096, default=_UNROTATED_EVERY)
    return frozenset(n for n in range(layers) if (n + 1) % every == 0)


def read_gguf(file: GGUFFile) -> ModelSpec:
    layers = file.fields.integer("smollm3.block_count", 1024)
    unrotated = range(_UNROTATED_EVERY - 1, layers, _UNROTATED_EVERY)
    return read_llama_gguf(file, "smollm3", unrotated=frozenset(unrotated))


FAMILY = Family(
    name="smollm3",
    title="SmolLM3",
    huggingface=("SmolLM3ForCausalLM",),
    gguf="smollm3",
    read_config=read_config,
    read_gguf=read_gguf,
    paired=True,
)
