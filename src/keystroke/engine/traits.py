"""Reads the properties of a model from its headers, without loading the weights.

They are recorded when a model is added, so that choosing a model for a role reads no files.
"""

from __future__ import annotations

from pathlib import Path

from keystroke.engine.checkpoint import open_checkpoint
from keystroke.engine.library import Traits
from keystroke.engine.templates import detect_chat


def traits_of(path: Path) -> Traits:
    """The traits of a GGUF file or folder. Raises a ModelError if no engine can run it."""
    with open_checkpoint(path) as checkpoint:
        spec = checkpoint.spec
    return Traits(spec.architecture, spec.parameters, spec.context_length, detect_chat(path) is not None)
