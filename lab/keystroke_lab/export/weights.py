"""Trained weights to files others load: a Hugging Face folder and a GGUF file.

Values are the trained ones (bfloat16) or their nearest 8-bit blocks; names and row order are what
transformers and llama.cpp expect. A tokenizer, shape or tensor that does not fit is refused before anything
is written.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray
from safetensors.torch import save_file

from keystroke.errors import InputError, ModelDamaged
from keystroke_lab.evaluation.perplexity import open_model
from keystroke_lab.pretraining.step import read_state
from keystroke_lab.tokenizer import special
from keystroke_lab.tokenizer.code_tokenizer import PRE_TOKENIZER, load, save
from keystroke_lab.training.transformer import Shape

Weights = dict[str, torch.Tensor]

KEYSTROKE = {"fim_order": "spm", "languages": ["python"]}
_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def expected_tensors(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Every tensor of a model of this shape."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    tensors: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocab, shape.hidden),
        "model.norm.weight": (shape.hidden,),
    }
    for i in range(shape.layers):
        layer = f"model.layers.{i}."
        tensors |= {
            f"{layer}input_layernorm.weight": (shape.hidden,),
            f"{layer}self_attn.q_proj.weight": (q, shape.hidden),
            f"{layer}self_attn.k_proj.weight": (kv, shape.hidden),
            f"{layer}self_attn.v_proj.weight": (kv, shape.hidden),
            f"{layer}self_attn.o_proj.weight": (shape.hidden, q),
            f"{layer}post_attention_layernorm.weight": (shape.hidden,),
            f"{layer}mlp.gate_proj.weight": (shape.intermediate, shape.hidden),
            f"{layer}mlp.up_proj.weight": (shape.intermediate, shape.hidden),
            f"{layer}mlp.down_proj.weight": (shape.hidden, shape.intermediate),
        }
    return tensors


def read_trained(path: Path) -> tuple[Shape, Weights, dict[str, Any]]:
    """The weights of a run (final.pt, stable.pt) and what keystroke.json says of them. Raises ModelDamaged if
    one is missing, misshapen or not finite."""
    state = read_state(path)
    shape = Shape.from_json(state["shape"])
    weights: Weights = state.get("weights") or state.get("model") or {}
    for name, size in expected_tensors(shape).items():
        tensor = weights.get(name)
        if tensor is None or tuple(tensor.shape) != size:
            found = "is missing" if tensor is None else f"is {tuple(tensor.shape)}"
            raise ModelDamaged(
                f"{path}: {name} {found} where the shape wants {size}; export from a whole run"
            )
        if not torch.isfinite(tensor.float()).all():
            raise ModelDamaged(f"{path}: {name} has values that are not numbers; the run diverged")
    skills = {**KEYSTROKE, "next_edit": state["next_edit"]} if state.get("next_edit") else {**KEYSTROKE}
    if state.get("languages"):
        skills["languages"] = list(state["languages"])
    return shape, {name: weights[name] for name in expected_tensors(shape)}, skills


def _checked_tokenizer(tokenizer: Path, shape: Shape) -> Any:
    loaded = load(tokenizer)
    size = loaded.get_vocab_size(with_added_tokens=True)
    if size != shape.vocab:
        raise InputError(
            f"the tokenizer at {tokenizer} has {size:,} tokens, the model {shape.vocab:,}; "
            "export with the one it was trained with"
        )
    return loaded


def export_huggingface(weights: Path, tokenizer: Path, out: Path) -> None:
    """A folder that `transformers` loads as LlamaForCausalLM."""
    shape, tensors, skills = read_trained(weights)
    loaded = _checked_tokenizer(tokenizer, shape)
    out.mkdir(parents=True, exist_ok=True)
    partial = out / "model.safetensors.partial"
    save_file(
        {n: t.to(torch.bfloat16).contiguous() for n, t in tensors.items()},
        str(partial),
        metadata={"format": "pt"},
    )
    os.replace(partial, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(shape.huggingface(), indent=1) + "\n")
    generation = {"bos_token_id": special.END, "eos_token_id": special.END}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    (out / "keystroke.json").write_text(json.dumps(skills) + "\n")
    save(loaded, out)


def gguf_name(name: str) -> str:
    """llama.cpp's name for one of our tensors."""
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_GGUF_NAMES[rest.removesuffix('.weight')]}.weight"


def llama_row_order(matrix: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows as llama.cpp rotates them: neighbours, where Hugging Face pairs the halves of a head."""
    halves = matrix.reshape(heads, 2, matrix.shape[0] // heads // 2, matrix.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(matrix.shape))


def export_gguf(weights: Path, tokenizer: Path, out: Path, *, name: str, quantisation: str = "Q8_0") -> None:
    """One GGUF file with the tokenizer inside, for stock llama.cpp and for the embedded engine."""
    try:
        kind = GGMLQuantizationType[quantisation.upper()]
    except KeyError:
        raise InputError(
            f"{quantisation} is no GGUF quantisation; use Q8_0, F16, BF16 or F32", param="quantisation"
        ) from None
    shape, tensors, skills = read_trained(weights)
    loaded = _checked_tokenizer(tokenizer, shape)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(out.name + ".partial")
    writer = gguf.GGUFWriter(str(partial), "llama")
    _describe(writer, shape, name, kind)
    writer.add_string("keystroke.fim_order", skills["fim_order"])
    writer.add_array("keystroke.languages", skills["languages"])
    if "next_edit" in skills:
        writer.add_uint32("keystroke.next_edit", skills["next_edit"])
    _vocabulary(writer, loaded)
    for tensor_name, tensor in tensors.items():
        values = tensor.float().numpy()
        if tensor_name.endswith("q_proj.weight"):
            values = llama_row_order(values, shape.heads)
        elif tensor_name.endswith("k_proj.weight"):
            values = llama_row_order(values, shape.kv_heads)
        if values.ndim == 1 or kind is GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name(tensor_name), values)
        else:
            writer.add_tensor(gguf_name(tensor_name), gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(partial, out)


def _describe(writer: Any, shape: Shape, name: str, kind: GGMLQuantizationType) -> None:
    writer.add_name(name)
    writer.add_license("apache-2.0")
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_vocab_size(shape.vocab)
    file_types = {"Q8_0": "MOSTLY_Q8_0", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16", "F32": "ALL_F32"}
    if kind.name in file_types:
        writer.add_file_type(gguf.LlamaFileType[file_types[kind.name]])


def _vocabulary(writer: Any, tokenizer: Any) -> None:
    spec = json.loads(tokenizer.to_str())
    pieces = sorted(spec["model"]["vocab"].items(), key=lambda item: item[1])
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in spec["model"]["merges"]]
    kinds = [
        gguf.TokenType.CONTROL
        if i < len(special.NAMED) or i in (special.KEEP, *special.NUMBERS)
        else gguf.TokenType.UNUSED
        if i < special.RESERVED
        else gguf.TokenType.NORMAL
        for _, i in pieces
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZER)
    writer.add_token_list([piece for piece, _ in pieces])
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(special.END)
    writer.add_eos_token_id(special.END)
    writer.add_pad_token_id(special.PAD)
    writer.add_add_bos_token(False)
    for key, token in (
        ("fim_pre", special.FIM_PREFIX),
        ("fim_suf", special.FIM_SUFFIX),
        ("fim_mid", special.FIM_MIDDLE),
        ("fim_rep", special.REPO_NAME),
        ("fim_sep", special.FILE_SEP),
    ):
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", token)


def import_weights(checkpoint: Path, out: Path, *, layers: int = 0, context: int = 0) -> None:
    """Write an exported model's weights as a run stores them, to continue training from. `layers`: make it
    deeper, by layers that change nothing yet; `context`: make it longer."""
    model = open_model(checkpoint)
    weights = {name: p.detach().to(torch.bfloat16) for name, p in model.named_parameters()}
    shape, weights = add_layers(model.shape, weights, layers or model.shape.layers)
    shape = replace(shape, context=max(context, shape.context))
    torch.save({"shape": shape.to_json(), "step": 0, "tokens": 0, "weights": weights}, out)


def add_layers(shape: Shape, weights: Weights, layers: int) -> tuple[Shape, Weights]:
    """The same function with more layers: new ones are copies spread among the old, and write nothing to the
    residual stream, as every layer begins. Raises InputError for fewer layers."""
    if layers < shape.layers:
        raise InputError(f"the model has {shape.layers} layers; it can be made deeper, not shallower")
    found = {name: tensor for name, tensor in weights.items() if not name.startswith("model.layers.")}
    copied = -1
    for layer in range(layers):
        source = layer * shape.layers // layers
        prefix = f"model.layers.{source}."
        for name, tensor in weights.items():
            if name.startswith(prefix):
                silent = source == copied and name.endswith(("o_proj.weight", "down_proj.weight"))
                mine = f"model.layers.{layer}.{name.removeprefix(prefix)}"
                found[mine] = torch.zeros_like(tensor) if silent else tensor.clone()
        copied = source
    return replace(shape, layers=layers), found
