"""Tokenizers: loading, streaming decoding and incremental encoding."""

from __future__ import annotations

from pathlib import Path

from keystroke.engine.tokenizer.base import Tokenizer
from keystroke.engine.tokenizer.byte_tokens import ByteTokenizer
from keystroke.engine.tokenizer.stream import StreamDecoder
from keystroke.errors import NotFound

__all__ = ["ByteTokenizer", "StreamDecoder", "Tokenizer", "load_tokenizer"]


def load_tokenizer(path: Path, cache: Path | None = None) -> Tokenizer:
    """The tokenizer of a Hugging Face folder, a tokenizer.json or a GGUF file. `cache`: a folder for
    tokenizers that are built from a GGUF file."""
    if path.is_dir() or path.name == "tokenizer.json":
        from keystroke.engine.tokenizer.huggingface import load_tokenizer_json

        return load_tokenizer_json(path)
    if path.is_file():
        from keystroke.engine.tokenizer.gguf import load_gguf_tokenizer  # imported here: needs more packages

        return load_gguf_tokenizer(path, cache)
    raise NotFound(f"there is no model at {path}")
