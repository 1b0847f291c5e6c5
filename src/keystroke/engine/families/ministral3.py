"""Ministral 3 and Devstral Small 2 (text): Llama with YaRN, and queries that grow with their position."""

from __future__ import annotations

from dataclasses import replace

from keystroke.engine.checkpoint.rope import yarn_attention_factor
from keystroke.engine.checkpoint.spec import ModelSpec
from keystroke.engine.families.config_file import read_llama
from keystroke.engine.families.family import ELSEWHERE, ConfigFile, Family, GGUFFile
from keystroke.engine.families.gguf_fields import read_gguf_rope, read_llama_gguf
from keystroke.errors import UnsupportedModel

_THETA = 1_000_000.0


def read_config(file: ConfigFile) -> ModelSpec:
    kind = file.config.get("model_type")
    if kind not in ("ministral3", "mistral", None):
        raise UnsupportedModel(f"{file.config.origin} is of the type {kind}, which is not run; {ELSEWHERE}")
    layers = file.config.integer("num_hidden_layers", 1024)
    return read_llama(file, "ministral3", theta=_THETA, windowed=frozenset(range(layers)))


def read_gguf(file: GGUFFile) -> ModelSpec:
    fields, stated = file.fields, file.stated
    context = fields.integer(f"{stated}.context_length", 1 << 30)
    rope = read_gguf_rope(fields, stated, context)
    if rope.scaling == "yarn":
        weight = fields.number(f"{stated}.rope.scaling.yarn_log_multiplier", 0.0) or 0.0
        growth = fields.number(f"{stated}.attention.temperature_scale", 0.0) or 0.0
        factor = yarn_attention_factor(rope.factor, weight, weight) if weight else rope.attention_factor
        rope = replace(rope, attention_factor=factor, query_growth=growth)
    return read_llama_gguf(file, "ministral3", rope=rope)


FAMILY = Family(
    name="ministral3",
    title="Ministral 3",
    huggingface=("Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"),
    gguf="mistral3",
    read_config=read_config,
    read_gguf=read_gguf,
    paired=True,
)
