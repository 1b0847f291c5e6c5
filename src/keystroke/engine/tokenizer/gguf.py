"""Builds a tokenizer from the tables of a GGUF file (`tokenizer.ggml.*`).

Refuses a tokenizer that it cannot rebuild exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keystroke.engine.checkpoint.gguf_header import open_header, read_metadata
from keystroke.engine.tokenizer.cached import load_or_build
from keystroke.engine.tokenizer.huggingface import (
    DEEPSEEK_PATTERNS,
    GPT2_PATTERN,
    GPT4O_PATTERN,
    LLAMA3_PATTERN,
    QWEN2_PATTERN,
    QWEN35_PATTERN,
    SEED_PATTERN,
    SPACE_MARK,
    TEKKEN_PATTERN,
    LibraryTokenizer,
    from_spec,
)
from keystroke.errors import ModelDamaged, UnsupportedModel

_CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 3, 4, 5, 6

_BYTES: dict[str, Any] = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}
_DIGITS: dict[str, Any] = {"type": "Digits", "individual_digits": True}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


_GPT2 = [_split(GPT2_PATTERN), _BYTES]
_CODE = [_DIGITS, _split(GPT2_PATTERN), _BYTES]
_LLAMA3 = [_split(LLAMA3_PATTERN), _BYTES]
_QWEN2 = [_split(QWEN2_PATTERN), _BYTES]
_QWEN35 = [_split(QWEN35_PATTERN), _BYTES]
_GPT4O = [_split(GPT4O_PATTERN), _BYTES]
_TEKKEN = [_split(TEKKEN_PATTERN), _BYTES]
_SEED = [_split(SEED_PATTERN), _BYTES]
_DEEPSEEK = [*map(_split, DEEPSEEK_PATTERNS), _BYTES]

PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": _GPT2,
    "default": _GPT2,
    "phi-2": _GPT2,
    "jina-es": _GPT2,
    "jina-de": _GPT2,
    "mpt": _GPT2,
    "olmo": _GPT2,
    "smollm": _CODE,
    "starcoder": _CODE,
    "refact": _CODE,
    "command-r": _CODE,
    "codeshell": _CODE,
    "exaone": _CODE,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "dbrx": _LLAMA3,
    "glm4": _LLAMA3,
    "chatglm-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "stablelm2": _QWEN2,
    "qwen35": _QWEN35,
    "gpt-4o": _GPT4O,
    "tekken": _TEKKEN,
    "mellum2": _CODE,
    "seed-coder": _SEED,
    "deepseek-coder": _DEEPSEEK,
}


def load_gguf_tokenizer(path: Path, cache: Path | None = None) -> LibraryTokenizer:
    """The tokenizer of a GGUF file, cached in the folder `cache` if given."""
    header = open_header(path)

    def build() -> LibraryTokenizer:
        return build_tokenizer(read_metadata(path, lambda key: key.startswith("tokenizer.")), path.name)

    return build() if cache is None else load_or_build(cache, header.metadata_digest(), build)


def build_tokenizer(table: Mapping[str, Any], origin: str) -> LibraryTokenizer:
    """The tokenizer that the `tokenizer.ggml.*` values in `table` describe."""
    pieces = _read_strings(table, "tokens", origin)
    kinds = table.get("tokenizer.ggml.token_type") or [1] * len(pieces)
    if len(kinds) != len(pieces):
        raise ModelDamaged(f"{origin} types {len(kinds)} tokens of {len(pieces)}; fetch it again")
    model = table.get("tokenizer.ggml.model")
    if model == "gpt2":
        spec = _byte_level_spec(table, pieces, kinds, origin)
    elif model == "llama":
        spec = _sentencepiece_spec(table, pieces, kinds, origin)
    else:
        raise UnsupportedModel(
            f"{origin} has a '{model}' tokenizer; 'gpt2' and 'llama' ones can be rebuilt from a GGUF"
        )
    bos = _token_id(table, "bos_token_id", len(pieces))
    eos = _token_id(table, "eos_token_id", len(pieces))
    begins = table.get("tokenizer.ggml.add_bos_token", model == "llama")
    config = {
        "bos_token": None if bos is None else pieces[bos],
        "eos_token": None if eos is None else pieces[eos],
        "add_bos_token": bool(begins) and bos is not None,
    }
    tokenizer = from_spec(spec, config)
    tokenizer.vocab_size = len(pieces)
    return tokenizer


def _byte_level_spec(
    table: Mapping[str, Any], pieces: list[str], kinds: list[int], origin: str
) -> dict[str, Any]:
    pre = table.get("tokenizer.ggml.pre", "default")
    stages = PRE_TOKENIZERS.get(pre)
    if stages is None:
        raise UnsupportedModel(
            f"{origin} splits text the '{pre}' way, which cannot be rebuilt from a GGUF; "
            "use the model's folder with its tokenizer.json"
        )
    vocabulary, added = _divide_pieces(pieces, kinds)
    merges = []
    for merge in _read_strings(table, "merges", origin):
        left, _, right = merge.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise ModelDamaged(f"{origin} merges '{merge}', which its vocabulary lacks; fetch it again")
        merges.append((left, right))
    # Llama 3 and Mistral's Tekken look up the whole pre-token before they merge.
    return _build_spec(vocabulary, merges, added, stages, ignore_merges=stages in (_LLAMA3, _TEKKEN))


def _sentencepiece_spec(
    table: Mapping[str, Any], pieces: list[str], kinds: list[int], origin: str
) -> dict[str, Any]:
    scores = table.get("tokenizer.ggml.scores")
    if not scores or len(scores) != len(pieces):
        raise ModelDamaged(f"{origin} lacks the scores of its tokens; fetch it again")
    vocabulary, added = _divide_pieces(pieces, kinds)
    # Sentencepiece joins the neighbours whose union has the best score: equivalent to merging by its rank.
    ranked = []
    for piece, token in vocabulary.items():
        if kinds[token] == _BYTE:
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-scores[token], vocabulary[left], vocabulary[right], left, right))
    ranked.sort()
    normalisers: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
    ]
    if table.get("tokenizer.ggml.add_space_prefix", True):
        normalisers.insert(0, {"type": "Prepend", "prepend": SPACE_MARK})
    unknown = _token_id(table, "unknown_token_id", len(pieces))
    spec = _build_spec(
        vocabulary, [(left, right) for *_, left, right in ranked], added, [], ignore_merges=False
    )
    spec["normalizer"] = {"type": "Sequence", "normalizers": normalisers}
    spec["model"] |= {
        "byte_fallback": True,
        "fuse_unk": True,
        "unk_token": None if unknown is None else pieces[unknown],
    }
    return spec


def _build_spec(
    vocabulary: dict[str, int],
    merges: list[tuple[str, str]],
    added: list[dict[str, Any]],
    stages: list[dict[str, Any]],
    *,
    ignore_merges: bool,
) -> dict[str, Any]:
    # The library renumbers added tokens that the vocabulary lacks; white space is text.
    spaces = {each["content"]: each["id"] for each in added if each["content"].isspace()}
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": stages} if stages else None,
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": ignore_merges,
            "vocab": spaces | vocabulary,
            "merges": merges,
        },
    }


def _divide_pieces(pieces: list[str], kinds: list[int]) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """The vocabulary for merges, and the added tokens."""
    vocabulary: dict[str, int] = {}
    added: list[dict[str, Any]] = []
    for token, (piece, kind) in enumerate(zip(pieces, kinds, strict=True)):
        if kind in (_CONTROL, _USER_DEFINED):
            added.append({"id": token, "content": piece, "special": kind == _CONTROL} | _EXACT)
        elif kind != _UNUSED:  # unused rows pad the embedding
            vocabulary.setdefault(piece, token)
    return vocabulary, added


_EXACT = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def _read_strings(table: Mapping[str, Any], key: str, origin: str) -> list[str]:
    value = table.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise ModelDamaged(f"{origin} holds no tokenizer {key}; fetch it again, or use the model's folder")
    return value


def _token_id(table: Mapping[str, Any], key: str, size: int) -> int | None:
    value = table.get(f"tokenizer.ggml.{key}")
    return value if isinstance(value, int) and 0 <= value < size else None
