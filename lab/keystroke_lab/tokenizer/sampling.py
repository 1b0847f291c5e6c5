"""Text to learn a vocabulary from, and how densely a vocabulary packs each language.

Languages count by their share of the mixture, not by how much was harvested; the same corpus gives the same
text. Density is measured on held-out code.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer

from keystroke.errors import NotFound
from keystroke_lab.corpus.shards import read_shard, shard_paths
from keystroke_lab.pretraining.mixture import make_plan
from keystroke_lab.tokenizer.code_tokenizer import measure

_FILES = 300  # of a language to measure with


def balanced_texts(folder: Path, shares: Mapping[str, float], characters: int) -> list[str]:
    """Files of the training part of a corpus, about `characters` together, each language by its share; less
    of one that has less."""
    plan = make_plan(folder, None, shares)
    total = sum(plan.shares.values())
    left = {language: characters * share / total for language, share in plan.shares.items()}
    texts: list[str] = []
    for piece in plan.pieces:
        for source in read_shard(folder / piece.name) if left.get(piece.stream, 0) > 0 else ():
            if left[piece.stream] <= 0:
                break
            texts.append(source.text)
            left[piece.stream] -= len(source.text)
    return texts


def density(tokenizer: Tokenizer, folder: Path) -> dict[str, float]:
    """Bytes a token by language, over files of the pieces in `folder`. Raises NotFound without any."""
    texts: dict[str, list[str]] = {}
    for path in shard_paths(folder):
        held = texts.setdefault(path.name.partition("-")[0], [])
        if len(held) < _FILES:
            held += [source.text for source in read_shard(path)][: _FILES - len(held)]
    if not texts:
        raise NotFound(f"{folder} holds no pieces of a corpus; build one with `keystroke train corpus`")
    found = {}
    for language, some in sorted(texts.items()):
        size = sum(len(text.encode()) for text in some)
        found[language] = round(size / max(1, measure(tokenizer, some).tokens), 3)
    return found
