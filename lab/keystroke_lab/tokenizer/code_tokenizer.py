"""The code tokenizer: byte-level BPE.

Every byte string round-trips. The special tokens come first, so their ids are the same whatever the
vocabulary learned; plain text never becomes one of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from keystroke.errors import InputError, ModelDamaged
from keystroke_lab.tokenizer.special import END, NAMED, PAD, RESERVED, SPELLING

# How text is cut before merging. This is the "qwen2" way, which stock llama.cpp and the engine's
# incremental encoder know: a word keeps the one sign before it (".append", "(self", "_name", " return"), a
# digit stands alone, closing punctuation takes its newline along ("):\n"), and indentation is one piece.
PRE_TOKENIZER = "qwen2"
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Measure:
    """How densely a tokenizer packs a text."""

    characters: int
    tokens: int

    @property
    def characters_per_token(self) -> float:
        return self.characters / max(1, self.tokens)


def untrained() -> Tokenizer:
    """The tokenizer's shape without a vocabulary."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train(texts: Iterable[str], vocab_size: int = 32_768, *, progress: bool = False) -> Tokenizer:
    """A tokenizer learned from `texts`."""
    if vocab_size < 256 + RESERVED:
        raise InputError(
            f"a vocabulary of {vocab_size} cannot hold every byte; ask for at least {256 + RESERVED}"
        )
    tokenizer = untrained()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPELLING],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=32,
        show_progress=progress,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json and the small configuration transformers wants beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "bos_token": SPELLING[END],
        "eos_token": SPELLING[END],
        "pad_token": SPELLING[PAD],
        "model_max_length": 2048,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def load(path: Path) -> Tokenizer:
    """The tokenizer of a folder or tokenizer.json. Raises ModelDamaged if it is not one of ours."""
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception for every fault
        raise ModelDamaged(
            f"{file} is not a tokenizer ({error}); train one with `keystroke train tokenizer`"
        ) from error
    wrong = [text for i, text in enumerate(NAMED) if tokenizer.token_to_id(text) != i]
    if wrong:
        raise ModelDamaged(
            f"{file} lacks the special token {wrong[0]} at its place; it belongs to another model"
        )
    return tokenizer


def plain(tokenizer: Tokenizer) -> Tokenizer:
    """A copy that knows no special tokens: what looks like one in a source file stays text."""
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = []
    return Tokenizer.from_str(json.dumps(spec))


def measure(tokenizer: Tokenizer, texts: Sequence[str]) -> Measure:
    machine = plain(tokenizer)
    encoded = machine.encode_batch(list(texts), add_special_tokens=False)
    return Measure(sum(map(len, texts)), sum(len(e.ids) for e in encoded))
