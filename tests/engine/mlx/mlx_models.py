"""MLX engines with a layer that drafts, on its CPU build."""

from __future__ import annotations

from pathlib import Path

from keystroke.engine.checkpoint import open_checkpoint
from keystroke.engine.mlx.engine import MlxEngine, MlxOptions
from keystroke.engine.mlx.weights import read_weights
from keystroke.engine.speculative.head_file import HeadWeights


def drafting_engine(path: Path, head: HeadWeights | None = None) -> MlxEngine:
    """As the backend loads it on a GPU: with its predictor, or with `head`."""
    with open_checkpoint(path) as checkpoint:
        checkpoint.read_predictor()
        weights = read_weights(checkpoint, lambda _done, _total: None)
        return MlxEngine(checkpoint.spec, weights, MlxOptions(kv_budget=64 << 20, draft_head=head))
