"""Draft heads with random weights."""

from __future__ import annotations

import numpy as np

from keystroke.engine.checkpoint.spec import ModelSpec
from keystroke.engine.speculative.head_file import NORMS, HeadConfig, HeadWeights


def random_head(spec: ModelSpec, layers: tuple[int, ...] = (1, 2), vocabulary: int = 120) -> HeadWeights:
    config = HeadConfig(
        target=spec.name,
        target_vocabulary=spec.vocab_size,
        hidden=spec.hidden,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        intermediate=192,
        vocabulary=vocabulary,
        layers=layers,
        norm_eps=1e-6,
    )
    chance = np.random.default_rng(0)
    matrices = {}
    for name, (rows, columns) in config.matrices.items():
        values = chance.normal(0, 40, (rows, columns)).clip(-127, 127).astype(np.int8)
        values[:, 0] = 127
        scales = chance.uniform(0.5, 1.5, rows).astype(np.float32) / 40 / columns**0.5
        matrices[name] = values, scales
    norms = {name: chance.normal(1, 0.1, spec.hidden).astype(np.float32) for name in NORMS}
    known = np.sort(chance.permutation(spec.vocab_size)[:vocabulary]).astype(np.int32)
    return HeadWeights(config, matrices, norms, known)
