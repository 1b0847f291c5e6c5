"""A whole model of a few thousand random weights: real files and a real tokenizer, loaded in no time."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

HIDDEN, LAYERS, HEADS, KV_HEADS, INNER = 32, 1, 2, 1, 64
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|fim_prefix|>",
    "<|fim_suffix|>",
    "<|fim_middle|>",
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_model(folder: Path, *, context: int = 512) -> Path:
    """A Llama of random weights, one token for each byte, with chat and fill-in-the-middle tokens."""
    folder.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    vocabulary = len(alphabet) + len(SPECIAL)
    end = len(alphabet) + SPECIAL.index("<|im_end|>")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": end,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "eos_token": "<|im_end|>"})
    )
    chance = np.random.default_rng(0)
    head = HIDDEN // HEADS
    shapes = {"model.embed_tokens.weight": (vocabulary, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        base = f"model.layers.{layer}"
        shapes |= {
            f"{base}.input_layernorm.weight": (HIDDEN,),
            f"{base}.post_attention_layernorm.weight": (HIDDEN,),
            f"{base}.self_attn.q_proj.weight": (HEADS * head, HIDDEN),
            f"{base}.self_attn.k_proj.weight": (KV_HEADS * head, HIDDEN),
            f"{base}.self_attn.v_proj.weight": (KV_HEADS * head, HIDDEN),
            f"{base}.self_attn.o_proj.weight": (HIDDEN, HEADS * head),
            f"{base}.mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{base}.mlp.up_proj.weight": (INNER, HIDDEN),
            f"{base}.mlp.down_proj.weight": (HIDDEN, INNER),
        }
    save_file(
        {name: chance.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()},
        folder / "model.safetensors",
    )
    return folder
