"""The sizes of a draft head, stored beside its weights.

Attention heads and rotary embedding are the target's own, so an engine computes the head's attention as in
any other layer.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from keystroke.engine.checkpoint.spec import ModelSpec
from keystroke.errors import InputError


@dataclass(frozen=True, slots=True)
class HeadShape:
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int  # tokens it can guess
    layers: tuple[int, ...]  # behind how many layers of the target a feature is taken
    norm_eps: float

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise InputError(f"{self.heads} heads cannot share {self.kv_heads} key heads evenly")
        if not self.layers or list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 1:
            raise InputError(f"the layers {self.layers} must rise, from 1 to the target's number of layers")
        if any(n < 1 or n % 16 for n in (self.hidden, self.intermediate, self.vocabulary)):
            raise InputError("hidden, intermediate and vocabulary sizes must be multiples of 16")

    @classmethod
    def of(
        cls, spec: ModelSpec, *, intermediate: int = 0, vocabulary: int = 16_384, layers: tuple[int, ...] = ()
    ) -> HeadShape:
        """The head for a target: features from near its beginning, its middle and its end; a feed-forward
        layer of ten thirds the width unless `intermediate` says another."""
        depth = spec.layers
        chosen = layers or tuple(sorted({min(2, depth), max(1, depth // 2), max(1, depth - 3)}))
        if chosen[-1] > depth:
            raise InputError(f"{spec.name} has {depth} layers; a feature behind layer {chosen[-1]} cannot be")
        return cls(
            hidden=spec.hidden,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            intermediate=intermediate or -(-spec.hidden * 10 // 3 // 64) * 64,
            vocabulary=min(vocabulary, spec.vocab_size // 16 * 16),
            layers=chosen,
            norm_eps=spec.norm_eps,
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> HeadShape:
        try:
            said = json.loads(text)
            return cls(**{**said, "layers": tuple(said["layers"])})
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(f"this is not the shape of a draft head ({error})") from error
