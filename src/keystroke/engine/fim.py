"""Fill in the middle: how a model wants the text before and after the cursor.

Knows the control tokens of each family and puts texts between them, as ids; text is never read for
tokens. A model that has none of them can only go on from the text before the cursor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from keystroke.engine.checkpoint.gguf_header import read_metadata
from keystroke.engine.tokenizer.base import Tokenizer
from keystroke.engine.tokenizer.huggingface import read_json
from keystroke.errors import ModelDamaged

Order = Literal["psm", "spm"]


@dataclass(frozen=True, slots=True)
class FimTemplate:
    """Fill-in-the-middle: the text before and after the cursor between control tokens.

    "psm": prefix P suffix S middle; "spm": suffix S prefix P middle. With "spm" what is typed comes last, so
    the suffix's KV stays valid while typing. A model may have no middle token (then it is empty)."""

    prefix: str
    suffix: str
    middle: str
    order: Order = "psm"
    file_sep: str | None = None
    repo_name: str | None = None
    stops: frozenset[int] = frozenset()  # tokens that end the middle, besides the model's eos

    def prompt(self, prefix: str, suffix: str) -> str:
        """The prompt as text; `tokens` is the one that keeps look-alikes apart."""
        if self.order == "psm":
            return f"{self.prefix}{prefix}{self.suffix}{suffix}{self.middle}"
        return f"{self.suffix}{suffix}{self.prefix}{prefix}{self.middle}"

    def tokens(self, tokenizer: Tokenizer, prefix: str, suffix: str) -> list[int]:
        """The prompt as tokens, the model's first token included where it has one."""
        return self.assemble(tokenizer, tokenizer.encode(prefix), tokenizer.encode(suffix))

    def assemble(self, tokenizer: Tokenizer, prefix: Sequence[int], suffix: Sequence[int]) -> list[int]:
        """The same from text already encoded, as an editor's buffer keeps it."""
        before, after, middle = (
            tokenizer.encode(t, special=True) for t in (self.prefix, self.suffix, self.middle)
        )
        first = [] if tokenizer.bos is None else [tokenizer.bos]
        if self.order == "psm":
            return [*first, *before, *prefix, *after, *suffix, *middle]
        return [*first, *after, *suffix, *before, *prefix, *middle]


# Families by their tokens: prefix, suffix, middle, order, file separator, repository name, and further tokens
# that end a middle.
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
    """The fill-in-the-middle format that the tokenizer's special tokens belong to, or None: such a model
    can only go on from the text before the cursor. A model of ours says its order beside its weights."""
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
        said = _said_order(path) if path is not None else None
        return template if said is None else replace(template, order=said)
    return None


def _said_order(path: Path) -> Order | None:
    """`fim_order` in keystroke.json beside the weights, or the GGUF key `keystroke.fim_order`."""
    folder = path if path.is_dir() else path.parent
    said: object = read_json(folder / "keystroke.json").get("fim_order")
    if said is None and path.is_file():
        said = read_metadata(path, lambda key: key == "keystroke.fim_order").get("keystroke.fim_order")
    if said in (None, "psm", "spm"):
        return said
    raise ModelDamaged(f"fim_order is '{said}'; it must be psm or spm")
