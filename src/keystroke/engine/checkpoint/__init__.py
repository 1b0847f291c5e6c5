"""Checkpoints: reads a model's files into one spec and one naming of tensors, whatever their format."""

from __future__ import annotations

from pathlib import Path

from keystroke.engine.checkpoint.gguf_header import SPLIT
from keystroke.engine.checkpoint.rope import extend_context, inverse_frequencies, rope_tables
from keystroke.engine.checkpoint.spec import EMBEDDING, Checkpoint, ModelSpec, RopeSpec, tensor_shapes
from keystroke.errors import InputError, NotFound

__all__ = [
    "EMBEDDING",
    "Checkpoint",
    "ModelSpec",
    "RopeSpec",
    "extend_context",
    "inverse_frequencies",
    "open_checkpoint",
    "rope_tables",
    "tensor_shapes",
]


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a Hugging Face folder or a GGUF file (or a folder that holds just one)."""
    path = Path(path)
    if not path.exists():
        raise NotFound(f"there is no model at {path}; give a folder with config.json or a .gguf file")
    if path.is_file():
        if path.suffix == ".safetensors":
            raise InputError(f"{path} is only a part of a model; give its folder, the one with config.json")
        return _open_gguf(path)
    if (path / "config.json").is_file():
        # Imported here: families, which both readers use, import the modules of this package.
        from keystroke.engine.checkpoint.huggingface import HuggingFaceCheckpoint

        return HuggingFaceCheckpoint(path.resolve())
    files = sorted(path.glob("*.gguf"))
    models = {SPLIT.sub("", file.stem) for file in files}
    if len(models) == 1:  # one file, or the parts of one model
        return _open_gguf(files[0])
    if files:
        raise InputError(f"{path} holds {len(files)} GGUF files; give one of them, such as {files[0].name}")
    raise InputError(f"{path} has neither config.json nor a .gguf file; give a folder that holds a model")


def _open_gguf(path: Path) -> Checkpoint:
    from keystroke.engine.checkpoint.gguf_file import GGUFCheckpoint  # folders need no gguf package

    return GGUFCheckpoint(path)
