"""Fill-in-the-middle prompts: the text before and after the cursor between a model's control tokens.

Control tokens are inserted as ids, so that text never becomes one. A model without them can only continue the
text before the cursor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from keystroke.engine.card import card_value
from keystroke.engine.tokenizer.base import Tokenizer
from keystroke.errors import ModelDamaged

Order = Literal["psm", "spm"]


@dataclass(frozen=True, slots=True)
class FimTemplate:
    """The control tokens of a format and their order.

    "psm": prefix P suffix S middle; "spm": suffix S prefix P middle. With "spm" the typed text comes last, so
    that the suffix's KV stays valid while typing. `middle` is empty if the model has no such token."""

    prefix: str
    suffix: str
    middle: str
    order: Order = "psm"
    file_sep: str | None = None
    repo_name: str | None = None
    stops: frozenset[int] = frozenset()  # tokens that end the middle, besides the model's eos

    def prompt(self, prefix: str, suffix: str) -> str:
        """The prompt as text. Prefer `tokens`: text that looks like a control token stays text there."""
        if self.order == "psm":
            return f"{self.prefix}{prefix}{self.suffix}{suffix}{self.middle}"
        return f"{self.suffix}{suffix}{self.prefix}{prefix}{self.middle}"

    def tokens(self, tokenizer: Tokenizer, prefix: str, suffix: str) -> list[int]:
        """The prompt as tokens, with the model's first token if it has one."""
        return self.assemble(tokenizer, tokenizer.encode(prefix), tokenizer.encode(suffix))

    def assemble(self, tokenizer: Tokenizer, prefix: Sequence[int], suffix: Sequence[int]) -> list[int]:
        """The prompt from text that is already encoded."""
        before, after, middle = (
            tokenizer.encode(t, special=True) for t in (self.prefix, self.suffix, self.middle)
        )
        first = [] if tokenizer.bos is None else [tokenizer.bos]
        if self.order == "psm":
            return [*first, *before, *prefix, *after, *suffix, *middle]
        return [*first, *after, *suffix, *before, *prefix, *middle]


# Prefix, suffix, middle, order, file separator, repository name, and other tokens that end the middle.
_FIM_FAMILIES: tuple[tuple[str, str, str, Order, str, str, tuple[str, ...]], ...] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "psm", "<|file_sep|>", "<|repo_name|>",
     ("<|endoftext|>", "<|fim_pad|>", "<|file_separator|>", "<|edit|>")),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "psm", "<file_sep>", "<repo_name>",
     ("<|endoftext|>", "<fim_pad>")),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>", "psm", "<filename>", "<reponame>", ("<|endoftext|>",)),
    ("▁<PRE>", "▁<SUF>", "▁<MID>", "psm", "", "", ("▁<EOT>",)),
    ("<PRE>", "<SUF>", "<MID>", "psm", "", "", ("<EOT>", "<EOD>")),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", "psm", "", "", ("<|EOT|>",)),
    ("[PREFIX]", "[SUFFIX]", "[MIDDLE]", "spm", "", "", ()),
    ("[PREFIX]", "[SUFFIX]", "", "spm", "", "", ()),
    ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", "psm", "", "", ("<[end▁of▁sentence]>",)),
)  # fmt: skip


def detect_fim(tokenizer: Tokenizer, path: Path | None = None) -> FimTemplate | None:
    """The format that the tokenizer's special tokens belong to; None if there is none. `fim_order` in the
    model's card overrides the order."""
    for prefix, suffix, middle, order, file_sep, repo_name, ends in _FIM_FAMILIES:
        names = [n for n in (prefix, suffix, middle) if n]
        ids = [tokenizer.special(n) for n in names]
        if None in ids:
            continue
        others = [tokenizer.special(n) for n in (*ends, file_sep, repo_name) if n]
        template = FimTemplate(
            prefix=prefix,
            suffix=suffix,
            middle=middle,
            order=order,
            file_sep=file_sep if file_sep and tokenizer.special(file_sep) is not None else None,
            repo_name=repo_name if repo_name and tokenizer.special(repo_name) is not None else None,
            stops=frozenset(i for i in (*ids, *others) if i is not None),
        )
        stated = card_value(path, "fim_order") if path is not None else None
        if stated not in (None, "psm", "spm"):
            raise ModelDamaged(f"fim_order is '{stated}'; it must be psm or spm")
        return template if stated is None else replace(template, order=stated)
    return None
