"""What a model is, without loading it.

Reads headers and texts of its files, never the weights. Whoever adds a model records this once, so that
choosing a model for a role takes no reading.
"""

from __future__ import annotations

from pathlib import Path

from keystroke.engine.checkpoint import open_checkpoint
from keystroke.engine.library import Traits
from keystroke.engine.templates import detect_chat


def traits_of(path: Path) -> Traits:
    """The traits of a GGUF file or a folder. Raises one of ModelError's kinds where no engine could run
    it."""
    with open_checkpoint(path) as checkpoint:
        spec = checkpoint.spec
    return Traits(spec.architecture, spec.parameters, spec.context_length, detect_chat(path) is not None)
