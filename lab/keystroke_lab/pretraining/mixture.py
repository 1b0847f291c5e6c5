"""The order in which shards are trained on: streams of shards in fixed shares.

The same plan always gives the same order, wherever the shards are stored. A stream is a language or the
edits; a short one is repeated. The order is also the order in which to send shards to another machine.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from keystroke.errors import InputError, NotFound
from keystroke_lab.corpus.shards import shard_paths

EDITS = "edits"
# Python first: what people use the model for most, and what its next edits are of. The others alike.
SHARES = {
    "python": 0.30, "javascript": 0.11, "typescript": 0.14, "go": 0.09, "rust": 0.08, "java": 0.09,
    "c": 0.08, "cpp": 0.08, EDITS: 0.08,
}  # fmt: skip
_PACKED = 6  # characters in a byte of a piece, about: pieces are weighed by what they hold


@dataclass(frozen=True, slots=True)
class PlannedPiece:
    stream: str
    name: str  # of its file
    characters: int
    sha256: str


@dataclass(frozen=True, slots=True)
class MixturePlan:
    shares: Mapping[str, float]
    pieces: tuple[PlannedPiece, ...]
    seed: int = 0

    def __post_init__(self) -> None:
        empty = [stream for stream in self.shares if not any(p.stream == stream for p in self.pieces)]
        if empty or not self.shares:
            raise NotFound(
                f"there are no pieces of {', '.join(empty) or 'anything'}; build them or change the shares"
            )

    def shard_order(self) -> Iterator[PlannedPiece]:
        """Pieces without end; after each the streams have had their shares as nearly as pieces allow."""
        total = sum(self.shares.values())
        had = dict.fromkeys(sorted(self.shares), 0.0)
        queues: dict[str, list[PlannedPiece]] = {stream: [] for stream in had}
        passes = dict.fromkeys(had, 0)
        while True:
            stream = min(had, key=lambda name: had[name] * total / self.shares[name])
            if not queues[stream]:
                queues[stream] = sorted((p for p in self.pieces if p.stream == stream), key=lambda p: p.name)
                random.Random(f"{self.seed} {stream} {passes[stream]}").shuffle(queues[stream])
                passes[stream] += 1
            piece = queues[stream].pop()
            had[stream] += max(1, piece.characters)
            yield piece

    def lots(self, most: int) -> Iterator[list[PlannedPiece]]:
        """Every piece once, in the order of first use, in lots of at most `most` bytes packed, about."""
        left, lot, size = {p.name for p in self.pieces}, list[PlannedPiece](), 0
        for piece in self.shard_order():
            if not left:
                break
            if piece.name not in left:
                continue
            left.discard(piece.name)
            packed = piece.characters // _PACKED
            if lot and size + packed > most:
                yield lot
                lot, size = [], 0
            lot.append(piece)
            size += packed
        if lot:
            yield lot

    def to_json(self) -> str:
        return json.dumps(
            {"seed": self.seed, "shares": dict(self.shares), "pieces": [asdict(p) for p in self.pieces]}
        )

    @classmethod
    def read(cls, path: Path) -> MixturePlan:
        try:
            said = json.loads(path.read_text())
            return cls(said["shares"], tuple(PlannedPiece(**row) for row in said["pieces"]), said["seed"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InputError(
                f"{path} is no plan of a mixture ({error}); make one with `keystroke train plan`"
            ) from error


def make_plan(code: Path, edits: Path | None, shares: Mapping[str, float], seed: int = 0) -> MixturePlan:
    """A plan over the pieces in the folders; a stream without pieces is left out, its share to the others."""
    pieces = [_piece(path.name.partition("-")[0], path) for path in shard_paths(code)]
    if edits is not None:
        pieces += [_piece(EDITS, path) for path in shard_paths(edits)]
    there = {piece.stream for piece in pieces}
    return MixturePlan(
        {s: share for s, share in shares.items() if s in there and share > 0}, tuple(pieces), seed
    )


def _piece(stream: str, path: Path) -> PlannedPiece:
    data = path.read_bytes()
    return PlannedPiece(stream, path.name, len(data) * _PACKED, hashlib.sha256(data).hexdigest())
