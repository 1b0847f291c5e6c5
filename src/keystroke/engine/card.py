"""Reads a model's card: `keystroke.json` beside the weights, or GGUF keys. The file takes precedence."""

from __future__ import annotations

from pathlib import Path

from keystroke.engine.checkpoint.gguf_header import GGUFArray, read_metadata
from keystroke.engine.tokenizer.huggingface import read_json
from keystroke.errors import ModelDamaged

_DIALECTS = {"typescript": "tsx"}  # a variant with a syntax tree of its own


def card_value(path: Path, key: str) -> object:
    """`key` in keystroke.json, else the GGUF key `keystroke.KEY`; None if there is neither. Raises
    ModelDamaged for a file that cannot be read."""
    folder = path if path.is_dir() else path.parent
    value: object = read_json(folder / "keystroke.json").get(key)
    if value is None and path.is_file():
        name = f"keystroke.{key}"
        value = read_metadata(path, lambda known: known == name).get(name)
    return value


def card_languages(path: Path, key: str = "languages") -> frozenset[str] | None:
    """The languages that the card lists under `key`, by the names of their syntax trees; None if it lists
    none."""
    value = card_value(path, key)
    if value is None:
        return None
    if isinstance(value, GGUFArray):
        value = value.values()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ModelDamaged(f'"{key}" in keystroke.json must be a list of names such as ["python"]')
    named = frozenset(name.lower() for name in value)
    return named | {dialect for language, dialect in _DIALECTS.items() if language in named}
