"""What a model says of itself beyond its tensors: `keystroke.json` beside the weights, or GGUF keys.

Reads one named value and believes nothing else. The file beside the weights wins: a user can write it.
"""

from __future__ import annotations

from pathlib import Path

from keystroke.engine.checkpoint.gguf_header import Array, read_metadata
from keystroke.engine.tokenizer.huggingface import read_json
from keystroke.errors import ModelDamaged

_DIALECTS = {"typescript": "tsx"}  # markup inside has a tree of its own, and is no language of its own


def card_value(path: Path, key: str) -> object:
    """`key` in keystroke.json, else the GGUF key `keystroke.KEY`; None where neither is there. Raises
    ModelDamaged for a file that cannot be read."""
    folder = path if path.is_dir() else path.parent
    said: object = read_json(folder / "keystroke.json").get(key)
    if said is None and path.is_file():
        name = f"keystroke.{key}"
        said = read_metadata(path, lambda known: known == name).get(name)
    return said


def card_languages(path: Path, key: str = "languages") -> frozenset[str] | None:
    """The languages that the card names under `key` (those the model has learned), by the names that syntax
    trees have; None where it says nothing: then it is taken to know them all."""
    said = card_value(path, key)
    if said is None:
        return None
    if isinstance(said, Array):
        said = said.values()
    if not isinstance(said, list) or not all(isinstance(name, str) for name in said):
        raise ModelDamaged(f'"{key}" in keystroke.json must be a list of names such as ["python"]')
    named = frozenset(name.lower() for name in said)
    return named | {dialect for language, dialect in _DIALECTS.items() if language in named}
