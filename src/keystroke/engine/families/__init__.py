"""Model families, one file each: names, sizes, tensors and layers, for every engine and both file formats."""

from __future__ import annotations

from collections.abc import Mapping

from keystroke.engine.checkpoint.spec import Architecture
from keystroke.engine.families import (
    gemma3,
    glm4_moe_lite,
    gpt_oss,
    llama,
    mellum,
    ministral3,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
    smollm3,
)
from keystroke.engine.families.family import ELSEWHERE, Family
from keystroke.errors import UnsupportedModel

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    qwen3_moe.FAMILY,
    smollm3.FAMILY,
    gemma3.FAMILY,
    gpt_oss.FAMILY,
    qwen3_next.FAMILY,
    qwen3_5.FAMILY,
    qwen3_5.MIXTURE,
    mellum.FAMILY,
    ministral3.FAMILY,
    glm4_moe_lite.FAMILY,
)
_BY_NAME = {family.name: family for family in FAMILIES}
_BY_CONFIG = {name: family for family in FAMILIES for name in family.huggingface}
BY_GGUF = {family.gguf: family for family in FAMILIES}


_NO_GEMMA_4 = (
    "Gemma 4 does not run here: its layers have heads of two sizes, and so have its keys and values, where "
    "every engine has one size"
)
# Architectures that users ask for and that are refused, with the reason to report.
_REFUSED = dict.fromkeys(("gemma4", "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"), _NO_GEMMA_4)


def family_of(architecture: Architecture) -> Family:
    return _BY_NAME[architecture]


def family_of_config(name: str) -> Family:
    """The family of an architecture in config.json. Raises UnsupportedModel."""
    return _look_up(_BY_CONFIG, name)


def family_of_gguf(name: str) -> Family:
    """The family of an architecture in a GGUF file. Raises UnsupportedModel."""
    return _look_up(BY_GGUF, name)


def _look_up(known: Mapping[str, Family], name: str) -> Family:
    if name in _REFUSED:
        raise UnsupportedModel(f"{_REFUSED[name]}; {ELSEWHERE}")
    if name not in known:
        *most, last = (family.title for family in FAMILIES)
        raise UnsupportedModel(
            f"{name} is not an architecture this engine runs ({', '.join(most)} and {last} are); {ELSEWHERE}"
        )
    return known[name]
